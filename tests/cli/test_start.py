"""What the command costs to start, and that each command has help."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

from supervisor.cli.main import main
from supervisor.store import Store
from tests.store.records import NOW, attempt, plan, run

# What `supervisor status` may import besides the standard library, and how much of ours. Importing sqlite-utils takes
# longer than all of these; a module more costs every call of the command (bench-scale times it).
THIRD_PARTY = {"click"}
MOST_OWN_MODULES = 26
NEVER = (
    "asyncio",
    "logging",
    "subprocess",
    "slurm.types",
    "supervisor.daemon",
    "supervisor.observed",
    "trainer.contract",
)
LISTING = """\
import sys
before = set(sys.modules)
from supervisor.cli.main import main
try: main(["status"])
except SystemExit as end: assert not end.code, end.code
named = (module for name, module in sys.modules.items() if name not in before)
print(*(m.__name__ for m in named if "." in m.__name__ or not m.__name__.startswith("_")))
"""
ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    return main.list_commands(click.Context(main))


def imported_by_status(ledger: Path) -> set[str]:
    with Store.open(ledger, now=NOW) as store:
        for name in ("a", "b"):
            store.add_run(run(name), NOW)
            store.commit(plan(replace(attempt(1, of=name), nodes=("n1", "n2", "n3"))), NOW)
    env = {"SUPERVISOR_LEDGER": str(ledger), "SUPERVISOR_SOCKET": str(ledger.with_name("s"))}
    done = subprocess.run(
        [sys.executable, "-c", LISTING], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert "n[1-3]" in done.stdout
    return set(done.stdout.splitlines()[-1].split())


def test_status_imports_nothing_heavy(tmp_path: Path) -> None:
    imported = imported_by_status(tmp_path / "ledger.db")
    own = {name for name in imported if name.split(".")[0] in {"supervisor", "slurm", "trainer"}}
    assert len(own) <= MOST_OWN_MODULES, sorted(own)
    assert imported.isdisjoint(NEVER)
    packages = {name.split(".")[0] for name in imported - own}
    assert packages - sys.stdlib_module_names - THIRD_PARTY == set()


@pytest.mark.parametrize("name", commands())
def test_every_command_has_help_and_stands_in_the_page(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.help
    assert f"## `supervisor {name}`" in (ROOT / "docs/cli.md").read_text()
    for param in command.params:
        assert isinstance(param, click.Argument) or (isinstance(param, click.Option) and param.help)


@pytest.mark.parametrize("name", ["submit", "stop", "pause", "resume", "release", "daemon"])
def test_every_command_that_acts_has_a_dry_run(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert "dry_run" in {param.name for param in command.params}


@pytest.mark.parametrize(
    "name",
    ["submit", "status", "history", "nodes", "stop", "pause", "resume", "release", "plan", "doctor"],
)
def test_every_command_that_tells_something_can_tell_it_as_json(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert "as_json" in {param.name for param in command.params}


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    argv = f"{sys.executable} -m supervisor.cli.main --help | head -n 1"
    done = subprocess.run(["sh", "-c", argv], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
