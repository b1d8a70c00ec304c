"""Bad input ends in one line and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.sandbox import Sandbox
from supervisor.store import Store
from tests.e2e.stage import Stage

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One for all: nothing here changes it."""
    directory = tmp_path_factory.mktemp("bad")
    with Sandbox.start(nodes=2, directory=directory / "sandbox") as sandbox:
        stage = Stage(directory / "stage", sandbox)
        stage.start_daemon()
        yield stage
        stage.close()


def assert_refused(stage: Stage, run_file: Path, *expected: str) -> None:
    """One line, exit code 2, no traceback; no run, no job and no folder of it."""
    before = traces(stage)
    ended = stage.supervisor("submit", str(run_file))
    assert_one_line(ended.returncode, ended.stderr, *expected)
    assert ended.stdout == ""
    assert traces(stage) == before


def assert_one_line(returncode: int, stderr: str, *expected: str) -> None:
    assert returncode == 2, stderr
    assert len(stderr.splitlines()) == 1, stderr
    for words in expected:
        assert words in stderr


def traces(stage: Stage) -> tuple[list[str], list[str], list[str]]:
    """Runs in the ledger, jobs that trained, folders."""
    jobs = [job.name for job in stage.jobs() if job.name != "supervisor-visibility"]
    folders = sorted(str(path) for path in (stage.directory / "runs").rglob("*"))
    with Store.open_readonly(stage.directory / "ledger.db") as store:
        return [run.name for run in store.load_runs()], jobs, folders


def test_a_run_file_that_is_not_there(stage: Stage) -> None:
    assert_refused(stage, stage.directory / "none.toml", "none.toml")


def test_a_run_file_that_is_no_toml(stage: Stage) -> None:
    path = stage.directory / "broken.toml"
    path.write_text("name = [unfinished")
    assert_refused(stage, path, "broken.toml", "line 1")


def test_a_key_that_is_not_known(stage: Stage) -> None:
    assert_refused(stage, stage.write_run("a", more="[checkpoint]\nevery = 5\n"), "every", "every_s")


def test_a_minimum_above_the_maximum(stage: Stage) -> None:
    assert_refused(stage, stage.write_run("a", minimum=3, maximum=2), "min (3) is more than max (2)")


def test_a_script_that_is_not_there(stage: Stage) -> None:
    missing = stage.directory / "missing.py"
    assert_refused(stage, stage.write_run("a", script=missing), f"{missing} not found")


def test_a_partition_that_is_not_there(stage: Stage) -> None:
    assert_refused(stage, stage.write_run("a", more='[slurm]\npartition = "gpus"\n'), '"gpus"', "main")


@pytest.mark.usefixtures("namespaces_permitted")
def test_a_run_directory_that_the_nodes_do_not_see(stage: Stage) -> None:
    root = stage.sandbox.scratch
    root.mkdir(parents=True, exist_ok=True)  # on the head: each node has a disk of its own there
    assert_refused(stage, stage.write_run("a", root=root), str(root / "a"), "not visible from node")
    assert not (root / "a").exists()


def test_a_root_that_does_not_exist(stage: Stage) -> None:
    root = stage.directory / "nowhere"
    assert_refused(stage, stage.write_run("a", root=root), str(root), "all nodes share")
    assert not root.exists()


def test_a_name_that_is_in_use(stage: Stage) -> None:
    stage.submit("taken", "steps=2")
    stage.await_state("finished", "taken")
    assert_refused(stage, stage.write_run("taken"), "taken")


def test_a_second_daemon(stage: Stage) -> None:
    ended = stage.supervisor("daemon")
    assert stage.daemon is not None
    assert_one_line(ended.returncode, ended.stderr, str(stage.daemon.pid))
    assert stage.status()["daemon"]["pid"] == stage.daemon.pid


def test_a_ledger_of_a_newer_version(stage: Stage, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    env = {**stage.env, "SUPERVISOR_LEDGER": str(ledger), "SUPERVISOR_SOCKET": str(tmp_path / "control.sock")}
    assert stage.supervisor("daemon", "--once", env=env).returncode == 0
    write_newer_version(ledger)
    content = ledger.read_bytes()
    for command in ("daemon", "status"):
        ended = stage.supervisor(command, env=env)
        assert_one_line(ended.returncode, ended.stderr, "newer")
    assert ledger.read_bytes() == content


def write_newer_version(ledger: Path) -> None:
    with sqlite3.connect(ledger) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        connection.execute(f"PRAGMA user_version = {version + 1}")
    connection.close()


def test_a_command_that_needs_the_daemon_says_how_to_start_it(stage: Stage, tmp_path: Path) -> None:
    env = {**stage.env, "SUPERVISOR_SOCKET": str(tmp_path / "none.sock")}
    ended = stage.supervisor("submit", str(stage.write_run("a")), env=env)
    assert ended.returncode == 3
    assert len(ended.stderr.splitlines()) == 1
    assert "supervisor daemon" in ended.stderr
    assert not (stage.directory / "runs" / "a").exists()
