"""How a sandbox begins and ends: nothing may be left, however its owner ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

from slurm.sandbox import Sandbox, SandboxError, SandboxUnavailable
from slurm.sandbox.processes import await_true, read_descendants
from slurm.sandbox.spec import registry_dir
from supervisor.cli.sandbox import sandbox as command
from tests.sandbox.conftest import Traces, read_traces, remains_of

pytestmark = pytest.mark.slurm

Mode = Literal["isolated", "loopback"]


@pytest.fixture(params=["isolated", "loopback"])
def mode(request: pytest.FixtureRequest) -> Mode:
    if request.param == "isolated":
        request.getfixturevalue("namespaces_permitted")
        return "isolated"
    return "loopback"


def start_job(sandbox: Sandbox) -> None:
    sent = sandbox.run("sbatch", f"-N{len(sandbox.node_names)}", "-o/dev/null", "--wrap=srun sleep 1000")
    assert sent.returncode == 0, sent.stderr
    # slurmd, slurmstepd and the sleeping task at least
    assert await_true(lambda: all(len(sandbox.node_pids(n)) >= 3 for n in sandbox.node_names), deadline_s=20)


def nothing_remains(traces: Traces) -> bool:
    return await_true(lambda: not remains_of(traces), deadline_s=10, every_s=0.1)


def test_nothing_is_left_after_stop(mode: Mode) -> None:
    sandbox = Sandbox.start(nodes=2, mode=mode)
    start_job(sandbox)
    sandbox.freeze("n2")
    traces = read_traces(sandbox)
    sandbox.stop()
    sandbox.stop()
    assert len(traces.pids) > 8
    assert remains_of(traces) == []
    assert not sandbox.directory.exists()


def test_nothing_is_left_when_the_owner_is_killed(mode: Mode, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from slurm.sandbox import Sandbox;"
        f"Sandbox.start(nodes=2, mode={mode!r}, directory=Path({str(tmp_path)!r}));"
        "print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "up\n"
            sandbox = Sandbox.attach(tmp_path)
            start_job(sandbox)
            traces = read_traces(sandbox)
        finally:
            owner.kill()
    assert nothing_remains(traces), remains_of(traces)
    assert not sandbox.is_running


def test_nothing_is_left_when_even_the_keeper_is_killed(mode: Mode, tmp_path: Path) -> None:
    sandbox = Sandbox.start(nodes=2, mode=mode, directory=tmp_path)
    start_job(sandbox)
    sandbox.freeze("n2")
    traces = read_traces(sandbox)
    (keeper,) = [p.pid for p in read_descendants(os.getpid()) if _is_keeper(p.pid, tmp_path)]
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    Sandbox.sweep_leftovers()  # where another process of this host has not done it yet, to start a sandbox
    assert not (registry_dir() / f"{sandbox.sandbox_id}.json").exists()
    assert nothing_remains(traces), remains_of(traces)


def _is_keeper(pid: int, directory: Path) -> bool:
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"slurm.sandbox.keeper" in line and str(directory).encode() in line


def test_two_sandboxes_run_side_by_side(mode: Mode) -> None:
    with Sandbox.start(nodes=1, mode=mode) as one, Sandbox.start(nodes=2, mode=mode) as two:
        assert one.run("srun", "-N1", "sh", "-c", "echo $SLURM_CONF").stdout.strip() == one.env["SLURM_CONF"]
        assert len(two.run("srun", "-N2", "echo", "x").stdout.split()) == 2
        assert one.run("sinfo", "-h", "-N").stdout.count("n1") == 1


def test_accounts_are_kept_and_nothing_of_the_database_is_left(accounting_installed: None) -> None:
    with Sandbox.start(nodes=1, accounting=True) as sandbox:
        traces = read_traces(sandbox)
        database = sandbox._spec.database
        assert database.exists()
        sandbox.run("sbatch", "--wait", "-o/dev/null", "--wrap=exit 3")
        asked = ("sacct", "-n", "-X", "-P", "-oJobID,State,ExitCode")
        assert await_true(lambda: sandbox.run(*asked).stdout == "1|FAILED|3:0\n", deadline_s=20), sandbox.run(*asked)
        sandbox.freeze_accounting()
        assert sandbox.run("timeout", "1", *asked).returncode == 124
        sandbox.thaw_accounting()
    assert remains_of(traces) == []
    assert not database.exists()


def test_a_sandbox_without_accounting_says_so_when_its_daemon_is_to_fail() -> None:
    with Sandbox.start(nodes=1) as sandbox, pytest.raises(SandboxError, match="without accounting"):
        sandbox.stop_accounting()


def test_a_configuration_that_slurm_refuses_is_named_with_the_end_of_its_log(mode: Mode, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="NoSuchOption"):
        Sandbox.start(nodes=1, mode=mode, directory=tmp_path, extra_conf="NoSuchOption=1")
    with pytest.raises(SandboxError, match="not running"):
        Sandbox.attach(tmp_path)


def test_what_is_not_installed_is_named_by_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm.sandbox.installed._SYSTEM_DIRS", ())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="apt-get install slurmctld slurmd slurm-client"):
        Sandbox.start(nodes=1)


def test_the_command_line_starts_shows_and_ends_a_sandbox(tmp_path: Path) -> None:
    def call(*argv: str, code: int = 0) -> dict[str, object]:
        done = CliRunner().invoke(command, [*argv, f"--directory={tmp_path}", "--json"])
        assert done.exit_code == code, done.output
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    assert call("status", code=1)["running"] is False
    up = call("up", "--nodes=2")
    traces = read_traces(Sandbox.attach(tmp_path))
    assert call("status")["states"] == {"n1": "idle", "n2": "idle"}
    assert call("env") == up["env"]
    assert call("down") == {"stopped": True}
    assert remains_of(traces) == []
    assert call("down") == {"stopped": False}


@pytest.mark.parametrize("words", ["env", "down", "fault freeze n1"])
def test_the_command_line_refuses_with_one_line_and_code_two(tmp_path: Path, words: str) -> None:
    done = CliRunner().invoke(command, [*words.split(), f"--directory={tmp_path}"])
    assert done.exit_code == 2
    assert "no sandbox in" in done.output
    assert len(done.output.splitlines()) == 1


def test_somebody_elses_sandbox_is_neither_shown_nor_ended(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another account's files need root")
    state = tmp_path / "sandbox.json"
    state.write_text("{}")
    os.chown(state, 12345, 12345)
    for word, code in (("status", 1), ("down", 2)):
        done = CliRunner().invoke(command, [word, f"--directory={tmp_path}"])
        assert done.exit_code == code
        assert "belongs to uid 12345" in done.output


def test_faults_by_name_break_and_mend_a_cluster(tmp_path: Path) -> None:
    def call(*argv: str, code: int = 0) -> str:
        done = CliRunner().invoke(command, [*argv, f"--directory={tmp_path}"])
        assert done.exit_code == code, done.output
        return done.output

    up = call("up", "--nodes=2")
    try:
        assert f"sandbox env --directory {tmp_path}" in up
        assert "sandbox down" in call("up", code=2)
        running = Sandbox.attach(tmp_path)
        assert call("fault", "power-cut", "n2").startswith("n2 has no power")
        assert running.node_pids("n2") == ()
        call("fault", "revive", "n2")
        assert running.node_pids("n2")
        call("fault", "freeze-controller")
        call("fault", "thaw-controller")
        assert "it has n1, n2" in call("fault", "freeze", "n9", code=2)
        assert "needs a node" in call("fault", "freeze", code=2)
        assert "takes no node" in call("fault", "stop-controller", "n1", code=2)
        assert "power-cut" in call("fault", "explode", code=2)
    finally:
        call("down")
