"""Ranks as the agent starts them: each is as a process that was just started, and its end is told as it was."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.workers_rig import ROOT, Agent, open_agent
from trainer.agent.workers import choose_first

WAYS = ["direct", pytest.param("warm", marks=pytest.mark.torch)]


@pytest.fixture(scope="module", autouse=True)
def _as_slurm_starts_them() -> Iterator[None]:
    """Tests that run in the background of a shell inherit signals that are ignored; an agent in a job does not."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory, _as_slurm_starts_them: None) -> Iterator[dict[str, Agent]]:
    """One agent for each way, shared: a prepared interpreter serves many starts."""
    opened: dict[str, Agent] = {}
    yield opened
    for agent in opened.values():
        agent.close()


@pytest.fixture(params=WAYS)
def agent(request: pytest.FixtureRequest, agents: dict[str, Agent], tmp_path_factory: pytest.TempPathFactory) -> Agent:
    way = request.param
    if way not in agents:
        agents[way] = open_agent(tmp_path_factory.mktemp(way), way)
    return agents[way]


def write(agent: Agent, program: str) -> Path:
    script = agent.folder / "train.py"
    script.write_text(program)
    return script


def run_plainly(agent: Agent, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-u", *arguments],
        cwd=agent.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


PROGRAM_FACTS = """
import json, os, signal, sys, beside
json.dump({
    "name": __name__, "file": __file__, "spec": __spec__ and __spec__.name, "package": __package__,
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "main": sys.modules["__main__"].__file__, "globals": sorted(globals()),
    "modules": sys.modules["__main__"].__dict__ is globals(),
    "signals": {int(n): str(signal.getsignal(n)).split(" at ")[0] for n in range(1, 32) if n not in (9, 19)},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "stdio": [(s.encoding, s.errors, s.line_buffering, s.write_through, s.fileno()) for s in (sys.stdout, sys.stderr)],
    "stdin": sys.stdin.read(),
    "umask": os.umask(0o22), "cwd": os.getcwd(), "executable": sys.executable,
    "files": [n for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")],
}, sys.stdout)
"""


@pytest.mark.parametrize("command", [("train.py", "--lr", "1"), ("-m", "train", "a")])
def test_a_program_finds_what_it_would_find_under_a_python_of_its_own(agent: Agent, command: tuple[str, ...]) -> None:
    write(agent, PROGRAM_FACTS)
    (agent.folder / "beside.py").write_text("")
    plain = run_plainly(agent, *command)
    environment = {"PYTHONPATH": str(ROOT)}
    assert (agent.run(*command, environment=environment).exit_code, plain.returncode) == (0, 0), agent.err()
    assert json.loads(agent.out()) == json.loads(plain.stdout)


def test_its_environment_is_what_it_was_given_and_a_ranks(agent: Agent) -> None:
    write(agent, "import json, os; print(json.dumps(dict(os.environ)))")
    agent.run("train.py", environment={"GIVEN": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    found = json.loads(agent.out())
    assert {name: found[name] for name in ("GIVEN", "TORCH_NCCL_ASYNC_ERROR_HANDLING")} == {
        "GIVEN": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    assert found["TORCHELASTIC_RESTART_COUNT"] == str(agent.starts - 1)
    assert Path(found["TORCHELASTIC_ERROR_FILE"]).parent.is_dir()
    agent.run("train.py")
    assert "GIVEN" not in json.loads(agent.out())


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("raise SystemExit(75)", 75),
        ("raise SystemExit", 0),
        ("import os; os._exit(42)", 42),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("import os; os.abort()", 134),
        ("raise KeyboardInterrupt", 130),
        ("raise SystemExit('no data')", 1),
        ("raise SystemExit(-1)", 255),
        ("def f():\n  raise ValueError('boom')\nf()", 1),
        ("x = (", 1),
        ("import sys; sys.excepthook = lambda *a: print('mine', a[2].tb_lineno, file=sys.stderr); 1 / 0", 1),
    ],
)
def test_its_end_and_its_last_words_are_those_of_any_process(agent: Agent, program: str, code: int) -> None:
    write(agent, program)
    plain = run_plainly(agent, "train.py")
    end = agent.run("train.py")
    shell = 128 - plain.returncode if plain.returncode < 0 else plain.returncode
    assert (end.exit_code, shell) == (code, code)
    fatal = agent.err().partition("Fatal Python error")[0]  # a fork has faulthandler on
    assert fatal == plain.stderr


def test_a_missing_script_is_told_as_python_tells_it(agent: Agent) -> None:
    plain = run_plainly(agent, "absent.py")
    assert agent.run("absent.py").exit_code == plain.returncode == 2
    assert agent.err() == plain.stderr


def test_it_waits_for_its_threads_and_cleans_up(agent: Agent) -> None:
    write(
        agent,
        """
import atexit, threading
class Last:
    def __del__(self): print("gone")
last = Last()
atexit.register(print, "cleaned up")
threading.Timer(0.1, print, ["thread is through"]).start()
""",
    )
    assert agent.run("train.py").kind == "finished"
    assert agent.out() == "thread is through\ncleaned up\ngone\n"


def test_it_has_a_session_of_its_own_and_no_ones_random_numbers(agent: Agent) -> None:
    write(agent, "import os, random; print(os.getsid(0) == os.getpid() == os.getpgid(0), random.random())")
    drawn = set()
    for _ in range(2):
        agent.run("train.py")
        own, number = agent.out().split()
        assert own == "True"
        drawn.add(number)
    assert len(drawn) == 2


def test_what_one_start_changes_the_next_does_not_find(agent: Agent) -> None:
    write(
        agent,
        """
import builtins, json, os, signal, sys
found = [hasattr(json, "mark"), hasattr(builtins, "mark"), "MARK" in os.environ, "mark" in sys.path,
         signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, os.getcwd().endswith("/")]
json.mark = builtins.mark = 1
os.environ["MARK"] = "1"
sys.path.append("mark")
signal.signal(signal.SIGUSR1, print)
os.chdir("/")
print(found)
""",
    )
    for _ in range(2):
        agent.run("train.py")
        assert agent.out() == "[False, False, False, False, True, False]\n"


def test_a_signal_reaches_the_handler_that_the_script_has_set(agent: Agent) -> None:
    write(
        agent,
        """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *a: sys.exit(75))
print("ready")
time.sleep(30)
""",
    )
    agent.start("train.py")
    pid = agent.pids()[0]
    assert eventually(lambda: agent.out() == "ready\n")
    os.kill(pid, signal.SIGUSR1)
    assert agent.wait().exit_code == 75


def test_a_rank_dies_of_a_signal_that_it_does_not_handle(agent: Agent) -> None:
    write(agent, "import time; print('ready'); time.sleep(30)")
    agent.start("train.py")
    pid = agent.pids()[0]
    assert eventually(lambda: agent.out() == "ready\n")
    os.kill(pid, signal.SIGUSR2)
    assert agent.wait().exit_code == 128 + signal.SIGUSR2


def test_a_port_that_somebody_listens_at_is_told_before_anything_runs(agent: Agent) -> None:
    write(agent, "print('ran')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent.start("train.py", port=server.getsockname()[1])
        end = agent.wait()
    assert (end.kind, end.is_port_taken, end.rank) == ("start_failed", True, None)
    assert agent.pids() == {}
    assert agent.run("train.py").kind == "finished"


def test_the_output_of_rank_0_is_in_the_jobs_log_behind_its_name(agent: Agent) -> None:
    write(agent, "import sys; print('to out'); print('to err', file=sys.stderr); print('no newline', end='')")
    agent.run("train.py", environment={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[s{agent.starts} rank${{rank}}]: "})
    told = [line for line in agent.console().splitlines() if line.startswith(f"[s{agent.starts - 1} ")]
    assert sorted(told) == [f"[s{agent.starts - 1} rank0]: {word}" for word in ("no newline", "to err", "to out")]


# ---------------------------------------------------------------- several ranks


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, agents: dict[str, Agent], tmp_path_factory: pytest.TempPathFactory) -> Agent:
    name = f"pair-{request.param}"
    if name not in agents:
        agents[name] = open_agent(tmp_path_factory.mktemp(name), request.param, procs=2)
    return agents[name]


def test_the_first_rank_that_fails_is_named_and_the_others_are_stopped(pair: Agent) -> None:
    write(
        pair,
        """
import os, subprocess, time
if os.environ["RANK"] == "3":
    raise SystemExit(5)
subprocess.Popen(["setsid", "sleep", "61.5"])
print("started")
time.sleep(30)
""",
    )
    pair.start("train.py", nodes=2, node_rank=1)
    end = pair.wait()
    assert (end.kind, end.rank, end.local_rank, end.exit_code) == ("failed", 3, 1, 5)
    assert end.log.endswith("/1/stderr.log")
    kept = pair.kept()
    assert eventually(lambda: pair.out(0) == "started\n")
    assert pair.stop(0.3) == []
    assert below(pair.process.pid) == kept


def test_ranks_that_have_finished_are_no_end_while_others_run(pair: Agent) -> None:
    write(pair, "import os, time; time.sleep(0.3 * int(os.environ['RANK'])); raise SystemExit(int(os.environ['RANK']))")
    assert pair.run("train.py").rank == 1


def test_a_stopped_rank_ends_before_the_grace_is_over(pair: Agent) -> None:
    write(pair, "import time; print('ready'); time.sleep(60)")
    pair.start("train.py")
    pids = pair.pids()
    os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    assert pair.stop(20) == []
    assert time.monotonic() - began < 10
    assert pair.wait().kind == "failed"


def test_a_rank_that_ignores_sigterm_is_killed(pair: Agent) -> None:
    write(
        pair,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)",
    )
    pair.start("train.py")
    assert eventually(lambda: pair.pids().keys() == {0, 1} and pair.out(0) == pair.out(1) == "ready\n")
    assert pair.stop(0.05) == []
    assert below(pair.process.pid) == pair.kept()


def test_ranks_end_with_their_agent(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "direct")
    write(agent, "import time; print('ready'); time.sleep(60)")
    agent.start("train.py")
    pid = agent.pids()[0]
    assert eventually(lambda: agent.out() == "ready\n")
    agent.process.kill()
    agent.process.communicate()
    assert eventually(lambda: not is_alive(pid))


# ---------------------------------------------------------------- direct alone


def test_words_of_a_program_of_its_own_are_filled_in_and_put_behind_the_prefix(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "direct", procs=2, prefix=("env", "WRAPPED=1"))
    try:
        agent.start("sh", "-c", "echo $WRAPPED $RANK ${local_rank}")
        assert agent.wait().kind == "finished"
        assert [agent.out(0), agent.out(1)] == ["1 0 0\n", "1 1 1\n"]
    finally:
        agent.close()


def test_a_program_that_is_not_there_is_a_start_that_failed(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "direct")
    try:
        agent.start("./absent")
        end = agent.wait()
        assert (end.kind, end.exit_code) == ("start_failed", 127)
        assert "./absent" in end.reason
    finally:
        agent.close()


def test_a_rank_0_that_could_not_open_its_port_did_not_fail_by_itself(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "direct")
    try:
        words = "'The server socket has failed to listen. port: ' + os.environ['MASTER_PORT'] + ', name: EADDRINUSE'"
        write(agent, f"import os; raise SystemExit({words})")
        end = agent.run("train.py")
        assert (end.kind, end.is_port_taken) == ("start_failed", True)
    finally:
        agent.close()


@pytest.mark.parametrize(
    ("codes", "first"),
    [({0: 0, 1: 0}, None), ({0: 1, 1: 137}, 1), ({0: 134, 1: 139}, 1), ({0: 143, 1: 1}, 0), ({}, None)],
)
def test_of_several_failures_at_once_the_one_that_followed_no_other_is_named(
    codes: dict[int, int], first: int | None
) -> None:
    assert choose_first(codes) == first


# ---------------------------------------------------------------- torchrun


@pytest.mark.torch
def test_a_rank_finds_the_environment_that_torchrun_gives_it(tmp_path: Path) -> None:
    places = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"}
    found: list[dict[str, Any]] = []
    for way in ("direct", "torchrun"):
        agent = open_agent(tmp_path / way, way, procs=2, environment={"OMP_NUM_THREADS": "1"})
        try:
            write(agent, "import json, os; print(json.dumps(dict(os.environ)))")
            agent.start("train.py", environment={"OMP_NUM_THREADS": "1"})
            assert agent.wait().kind == "finished", agent.console()
            found.append(json.loads(agent.out(1)))
            names = [path.name for path in (tmp_path / way / "logs").glob("*/attempt_0/1/*")]
            assert sorted(names) == ["stderr.log", "stdout.log"]
        finally:
            agent.close()
    direct, torchrun = found
    assert direct.keys() == torchrun.keys()
    assert {name for name in direct if direct[name] != torchrun[name]} <= places | {"PWD", "OLDPWD"}


@pytest.mark.torch
def test_torchrun_tells_which_rank_failed_and_how(tmp_path: Path) -> None:
    agent = open_agent(tmp_path, "torchrun", procs=2)
    try:
        write(agent, "import os, time; os.environ['RANK'] == '1' and os._exit(42); time.sleep(60)")
        agent.start("train.py")
        end = agent.wait()
        assert (end.kind, end.rank, end.exit_code) == ("failed", 1, 42)
        assert agent.stop(0.1) == []
        assert below(agent.process.pid) == set()
    finally:
        agent.close()


# ---------------------------------------------------------------- helping


def eventually(condition: Any, deadline_s: float = 20.0) -> bool:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def below(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}
