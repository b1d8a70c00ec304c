"""The example configuration says what the service really takes."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

from supervisor.config import Settings, parse_settings

EXAMPLE = Path(__file__).parents[2] / "systemd" / "supervisor.toml"

# Keys whose default says "none" or depends on the machine: the example shows a value instead.
ILLUSTRATED = {"control.admin_group", "slurm.conf", "sweep.limits.shared_paths", "launcher.python", "notify.command"}


def spelt_out() -> str:
    """The example with every key switched on."""
    return re.sub(r"^#(?=[a-z_]+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def defaults() -> dict[str, Any]:
    return flat(dataclasses.asdict(Settings()))


def test_the_example_as_it_stands_means_the_defaults() -> None:
    assert parse_settings(EXAMPLE.read_text(), path=EXAMPLE) == Settings()


def test_the_example_names_every_key_and_no_other() -> None:
    assert set(flat(tomllib.loads(spelt_out()))) == set(defaults())


def test_the_values_that_the_example_calls_defaults_are_the_defaults() -> None:
    shown = flat(dataclasses.asdict(parse_settings(spelt_out(), path=EXAMPLE)))
    differing = {key for key, value in defaults().items() if shown[key] != value}
    assert differing <= ILLUSTRATED
