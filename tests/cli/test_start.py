"""What the command costs to start, and that each command has help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from supervisor.cli.main import main

HEAVY = ("torch", "numpy.random", "submitit", "pyslurm", "rich", "supervisor.daemon", "asyncio")
ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    return main.list_commands(click.Context(main))


def test_status_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from supervisor.cli.main import main\n"
        "try: main(['status'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    env = {"SUPERVISOR_LEDGER": str(tmp_path / "l.db"), "SUPERVISOR_SOCKET": str(tmp_path / "s")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


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
