"""The line between a rank and the agent of its node: what is told, what it costs, and who is not listened to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainer import ranklink
from trainer.agent.ranks import RankDesk, make_socket_folder
from trainer.contract import ENV_NODE_SOCKET
from trainer.progress import ProgressWriter

DEADLINE_S = 30.0


def await_true(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)
    return value


@pytest.fixture(autouse=True)
def _strangers_leave() -> Iterator[None]:
    yield
    while Stranger.open:
        Stranger.open.pop().close()


@pytest.fixture
def desk() -> Iterator[RankDesk]:
    desk = RankDesk(make_socket_folder() / "ranks.sock")
    desk.start()
    yield desk
    desk.close()


class Stranger:
    """Whatever connects to the socket."""

    open: ClassVar[list[Stranger]] = []

    def __init__(self, desk: RankDesk) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(str(desk.path))
        Stranger.open.append(self)

    def say(self, *lines: object) -> Stranger:
        for line in lines:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # cut off meanwhile
                self._sock.sendall(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        return self

    def hello(self, rank: int = 0, **more: object) -> Stranger:
        return self.say({"type": "hello", "rank": rank, "pid": os.getpid(), **more})

    def progress(self, step: int, phase: str = "step", **more: object) -> Stranger:
        return self.say({"type": "progress", "step": step, "phase": phase, **more})

    def is_cut_off(self) -> bool:
        self._sock.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):
            while self._sock.recv(4096):
                pass
        return True

    def close(self) -> None:
        self._sock.close()


def _steps(desk: RankDesk) -> dict[int, int]:
    return {entry["rank"]: entry["step"] for entry in desk.states()}


# ---------------------------------------------------------------- the rank's end


@pytest.fixture
def linked(desk: RankDesk, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankDesk]:
    """This process is rank 5 of the desk."""
    monkeypatch.setattr(ranklink, "_link", None)
    monkeypatch.setenv(ENV_NODE_SOCKET, str(desk.path))
    monkeypatch.setenv("RANK", "5")
    yield desk
    link = ranklink._link
    if link is not None:
        link.forget()


def test_a_rank_without_a_progress_file_tells_its_agent_where_it_is(linked: RankDesk) -> None:
    with ProgressWriter(None, 1, final_step=100) as progress:
        await_true(lambda: _steps(linked) == {5: -1})
        progress.step_done(1)
        with progress.phase("eval"):
            state = await_true(lambda: [s for s in linked.states() if s["phase"] == "eval"])[0]

    assert (state["step"], state["pid"], state["entered"]) == (1, os.getpid(), {"eval": 1})
    assert state["limit_s"] == 3600.0
    assert 0 <= state["age_s"] < 5


def test_steps_are_told_twice_a_second_at_most(linked: RankDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    take = RankDesk._take_news

    def count(desk: RankDesk, line: Any, news: Any) -> bool:
        told.append(news)
        return take(desk, line, news)

    monkeypatch.setattr(RankDesk, "_take_news", count)
    with ProgressWriter(None, 1) as progress:
        began = time.monotonic()
        for step in range(1, 300):
            progress.step_done(step)
            time.sleep(0.005)
        took_s = time.monotonic() - began

    assert 2 <= len(told) <= 3 + 2 * took_s


def test_telling_costs_a_step_less_than_20_microseconds(linked: RankDesk) -> None:
    def fastest_step_s(progress: ProgressWriter) -> float:
        best = 1.0
        for _ in range(20):
            began = time.perf_counter()
            for step in range(1, 201):
                progress.step_done(step)
            best = min(best, (time.perf_counter() - began) / 200)
        return best

    with ProgressWriter(None, 1) as told, ProgressWriter(None, 1) as alone:
        alone._link = None
        assert fastest_step_s(told) - fastest_step_s(alone) < 20e-6


def test_a_rank_finds_its_agent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_socket_folder()
    first = RankDesk(folder / "ranks.sock")
    first.start()
    code = (
        "import time\nfrom trainer.progress import ProgressWriter\nprogress = ProgressWriter(None, 1)\n"
        "for step in range(1, 999):\n    time.sleep(0.1)\n    progress.step_done(step)"
    )
    environment = {**os.environ, "RANK": "0", ENV_NODE_SOCKET: str(first.path)}
    rank = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        await_true(first.states)
        first.close()
        folder.mkdir(mode=0o700)
        second = RankDesk(folder / "ranks.sock")
        second.start()
        await_true(lambda: _steps(second).get(0, 0) > 0)
        second.close()
    finally:
        rank.kill()
        rank.wait()


def test_a_forked_child_has_no_line_and_leaves_its_parents_alone(linked: RankDesk) -> None:
    with ProgressWriter(None, 1) as progress:
        await_true(linked.states)
        child = os.fork()
        if child == 0:
            progress.step_done(77)
            with progress.phase("save"):
                pass
            os._exit(0 if ranklink._link is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        progress.step_done(3)

        await_true(lambda: _steps(linked) == {5: 3})


def test_without_an_agent_there_is_no_line_and_no_thread() -> None:
    before = set(threading.enumerate())

    assert ranklink.open_link({}) is None
    assert set(threading.enumerate()) <= before


def test_the_line_imports_no_torch() -> None:
    code = "import trainer.progress, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- the agent's end


def test_only_the_user_may_enter_the_sockets_folder(desk: RankDesk) -> None:
    assert desk.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_process_of_another_user_is_cut_off(desk: RankDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    stranger = Stranger(desk)

    assert stranger.is_cut_off()


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.0\n\n", b"[]\n", b"x" * 100_000, b'{"type":"hello","rank":"x"}\n', b"\xff\xfe\n"]
)
def test_who_speaks_another_language_is_cut_off_and_the_others_are_heard(desk: RankDesk, line: bytes) -> None:
    rank = Stranger(desk).hello().progress(4)
    assert Stranger(desk).say(line).is_cut_off()
    rank.progress(5)

    await_true(lambda: _steps(desk) == {0: 5})


def test_an_unknown_phase_is_not_passed_on(desk: RankDesk) -> None:
    assert Stranger(desk).hello().progress(1, phase="lunch").is_cut_off()
    assert desk.states() == []


def test_a_program_that_a_rank_starts_does_not_take_its_place(desk: RankDesk) -> None:
    rank = Stranger(desk).hello().progress(4)
    await_true(lambda: _steps(desk) == {0: 4})
    code = (
        "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n"
        's.sendall(b\'{"type":"hello","rank":0}\\n\')\nsys.exit(len(s.recv(10)))'
    )
    other = subprocess.run([sys.executable, "-c", code, str(desk.path)], check=False, timeout=DEADLINE_S)

    rank.progress(5)
    await_true(lambda: _steps(desk) == {0: 5})
    assert other.returncode == 0


def test_a_rank_that_comes_back_takes_its_own_place(desk: RankDesk) -> None:
    old = Stranger(desk).hello().progress(4)
    await_true(lambda: _steps(desk) == {0: 4})
    Stranger(desk).hello().progress(6)

    assert old.is_cut_off()
    await_true(lambda: _steps(desk) == {0: 6})


def test_the_ranks_of_an_earlier_start_are_forgotten_and_not_heard_again(desk: RankDesk) -> None:
    old = Stranger(desk).hello(launch=0).progress(4)
    await_true(desk.states)
    desk.begin(1)

    assert old.is_cut_off()
    assert Stranger(desk).hello(launch=0).progress(4).is_cut_off()
    new = Stranger(desk).hello(launch=1).progress(2)
    await_true(lambda: _steps(desk) == {0: 2})
    new.close()
    await_true(lambda: desk.states() == [])


def test_a_change_of_phase_wakes_the_agent() -> None:
    woken = threading.Event()
    desk = RankDesk(make_socket_folder() / "ranks.sock", woken.set)
    desk.start()
    try:
        rank = Stranger(desk).hello().progress(4)
        assert woken.wait(DEADLINE_S)
        woken.clear()
        rank.progress(5)
        await_true(lambda: _steps(desk) == {0: 5})
        assert not woken.is_set()
        rank.progress(5, phase="save")
        assert woken.wait(DEADLINE_S)
    finally:
        desk.close()


def test_ages_stand_still_while_the_agent_is_stopped(desk: RankDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    Stranger(desk).hello().progress(4)
    await_true(desk.states)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3600)
    age_s = desk.states()[0]["age_s"]
    monkeypatch.undo()

    assert age_s < 60


def test_folders_that_dead_agents_left_are_removed_and_those_of_living_ones_stay(
    desk: RankDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(desk.path.parent.parent))
    dead = make_socket_folder()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead / "ranks.sock"))
    os.utime(dead, (0, 0))
    os.utime(desk.path.parent, (0, 0))

    fresh = make_socket_folder()

    assert not dead.exists()
    assert desk.path.exists()
    fresh.rmdir()


# ---------------------------------------------------------------- ranks without a line


def test_of_ranks_without_a_line_log_growth_and_cpu_time_are_told(desk: RankDesk, tmp_path: Path) -> None:
    log = tmp_path / "0" / "attempt_0" / "1"
    log.mkdir(parents=True)
    (log / "stdout.log").write_text("x" * 123)
    Stranger(desk).hello(rank=0).progress(4)
    desk.watch({0: os.getpid(), 1: os.getpid()}, tmp_path)

    linked, sign = await_true(lambda: states if len(states := desk.states()) == 2 else None)

    assert (linked["rank"], linked["step"]) == (0, 4)
    assert (sign["rank"], sign["pid"], sign["log_bytes"]) == (1, os.getpid(), 123)
    assert sign["cpu_s"] > 0
