"""What ends a node's training when the launcher is not heard, and what must not: real agents, real silence."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agents import Commander, commanding
from trainer.contract import CutOff, parse

# suspect_after_s + 0.5 s: this node gives up 1.2 s after the last acknowledgement
QUICK: dict[str, Any] = {"suspect_after_s": 0.7, "beat_interval_s": 0.1}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Commander]:
    with commanding(tmp_path, **QUICK) as node:
        node.start_agent()
        yield node


def play_a_cut(folder: Path) -> None:
    with commanding(folder, **QUICK) as node:
        node.start_agent()
        rank = node.begin(0)
        cut_at = time.monotonic()
        node.order("drill", id="d1", kind="network", for_s=3.5)
        node.await_said("drilled", id="d1", ok=True)
        node.until(lambda: not node.is_alive(rank))
        assert 1.0 < time.monotonic() - cut_at < 3.5  # before it could be replaced, and while nobody could tell it to
        word = parse(CutOff, node.until(lambda: _read(node.paths.cut_off(1, "n1"))))
        assert (word.node, word.boot_id) == ("n1", node.said("hello")[-1]["boot_id"])
        back = node.until(lambda: next((m for m in node.said("hello") if m["cut_s"] > 0), None))
        assert back["agent"] == node.said("hello")[0]["agent"]
        assert "no word from the launcher" in node.await_said("ended", launch=0)["reason"]
        node.order("stop", launch=0, grace_s=0.0, reason="it was given up")
        node.await_said("stopped", launch=0)
        node.order("check", launch=1)
        node.await_said("checked", launch=1)
        node.go(1)
        assert node.up(1)
        assert len(node.agents) == 1


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def play_a_still_launcher(folder: Path) -> None:
    """Its kernel acknowledges what it does not read: nobody else can have been told to train."""
    with commanding(folder, **QUICK) as node:
        node.start_agent()
        rank = node.begin(0)
        hellos = len(node.said("hello"))
        time.sleep(5.0)  # nobody polls: as a launcher under SIGSTOP
        assert node.is_alive(rank)
        node.order("evidence", launch=0, dir=str(node.paths.evidence(1, 0)))
        node.await_said("evidence", launch=0)
        assert node.said("ended") == []
        assert len(node.said("hello")) == hellos


def play_a_frozen_agent(folder: Path) -> None:
    with commanding(folder, **QUICK) as node:
        node.start_agent()
        rank = node.begin(0)
        os.kill(node.agents[0].pid, signal.SIGSTOP)
        node.listen(2.0)
        hellos = len(node.said("hello"))
        os.kill(node.agents[0].pid, signal.SIGCONT)
        node.until(lambda: len(node.said("hello")) > hellos)  # what stood in the old connection proves nothing
        node.listen(1.0)
        assert node.is_alive(rank)
        assert node.said("ended") == []


BUSY = """
import os, sys
for _ in range(4 * (os.cpu_count() or 1)):
    if os.fork() == 0:
        while True:
            pass
sys.stdin.read()
os.killpg(0, 9)
"""


def test_a_busy_node_is_no_dead_node(node: Commander) -> None:
    rank = node.begin(0)
    hog = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, start_new_session=True)
    node.listen(2.0)
    os.killpg(hog.pid, signal.SIGKILL)
    hog.communicate()
    beats = [event.at for event in node.heard if event.message.get("type") == "beat"]
    assert (
        max(later - earlier for earlier, later in itertools.pairwise(beats)) < 3.0
    )  # suspect_after_s as it is by default
    assert node.is_alive(rank)
    assert node.said("ended") == []


STEPPING = """
import sys, threading, time
real, begun = time.time, time.monotonic()
time.time = lambda: real() + (86400 if time.monotonic() - begun > 1.0 else 0)
from trainer import node
sys.exit(node.main(sys.argv[1:2]))
"""


def test_a_clock_that_jumps_by_a_day_changes_nothing(tmp_path: Path) -> None:
    program = tmp_path / "stepping.py"
    program.write_text(STEPPING)
    with commanding(tmp_path, **QUICK) as node:
        node.start_agent(command=(str(program),))
        rank = node.begin(0)
        node.until(lambda: _is_ahead(node))
        node.listen(0.5)
        assert node.is_alive(rank)
        assert node.said("ended") == []


def _is_ahead(node: Commander) -> bool:
    offset = node.server.clock_offset("n1")
    return any(message.get("time", 0) > time.time() + 80000 for message in node.said("beat")) and offset is not None


def test_the_offset_of_a_nodes_clock_is_known(node: Commander) -> None:
    offset = node.until(lambda: node.server.clock_offset("n1"))
    assert abs(offset.offset_s) <= offset.error_s + 0.001  # the same host's
    assert offset.error_s < 0.5


def play_a_gone_launcher(folder: Path) -> None:
    with commanding(folder, **QUICK) as node:
        node.start_agent()
        rank = node.begin(0)
        node.leave()
        deadline = time.monotonic() + 20
        while node.is_alive(rank) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not node.is_alive(rank)
        assert node.agents[0].wait(20) == 143


def play_a_hanging_file_system(folder: Path) -> None:
    """Every write to the shared file system hangs from now on; the ranks are stopped all the same."""
    program = folder / "hanging.py"
    program.write_text(
        """
import sys, time
from trainer import contract, node
contract.write_json = lambda *_: time.sleep(99)
sys.exit(node.main(sys.argv[1:2]))
"""
    )
    with commanding(folder, **QUICK) as node:
        node.start_agent(command=(str(program),))
        rank = node.begin(0)
        node.order("drill", id="d", kind="network", for_s=3.0)
        node.until(lambda: not node.is_alive(rank), deadline_s=10)
        node.until(lambda: any(m["cut_s"] > 0 for m in node.said("hello")))


@pytest.mark.parametrize(("kind", "state"), [("process", None), ("hang", "T")])
def test_a_drill_hits_one_rank_once(node: Commander, kind: str, state: str | None) -> None:
    rank = node.begin(0)
    for _ in range(2):
        node.order("drill", id="d1", kind=kind)
    node.await_said("drilled", id="d1", ok=True)
    if state is None:
        assert node.await_said("ended", launch=0)["exit_code"] == 137
        return
    node.until(lambda: Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] == state)
    node.order("stop", launch=0, grace_s=0.5, reason="hang")
    node.await_said("stopped", launch=0, left=[])


def test_a_drill_on_a_node_that_trains_nothing_is_refused(node: Commander) -> None:
    node.await_said("checked")
    node.order("drill", id="d1", kind="process")
    assert node.await_said("drilled", id="d1")["ok"] is False


def play_a_termination(folder: Path) -> None:
    with commanding(folder, **QUICK) as node:
        node.start_agent()
        rank = node.begin(0)
        node.order("drill", id="d1", kind="network")
        node.until(lambda: not node.is_alive(rank))
        begun = time.monotonic()
        node.agents[0].terminate()
        assert node.agents[0].wait(20) == 143
        assert time.monotonic() - begun < 2.0  # Slurm holds the node back for as long


def play_a_power_cut(folder: Path) -> None:
    with commanding(folder, **QUICK, liveness_timeout_s=0.7) as node:
        node.start_agent()
        rank = node.begin(0)
        node.order("drill", id="d1", kind="node")
        node.until(lambda: not node.is_alive(rank))
        assert node.server.is_connected("n1")  # no kernel tells of its end
        node.listen(0.8)
        assert time.monotonic() - node.heard[-1].at > 0.5
        node.until(lambda: node.agents[0].poll() is not None)
        assert not node.paths.cut_off(1, "n1").exists()


# The scenes that mostly wait are played at the same time.
SCENES = (
    play_a_cut,
    play_a_still_launcher,
    play_a_frozen_agent,
    play_a_gone_launcher,
    play_a_hanging_file_system,
    play_a_power_cut,
    play_a_termination,
)
Outcomes = Mapping[Callable[[Path], None], "Future[None]"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    with ThreadPoolExecutor(len(SCENES)) as pool:
        return {scene: pool.submit(scene, tmp_path_factory.mktemp("scene")) for scene in SCENES}


def test_a_cut_node_stops_its_ranks_leaves_word_and_can_be_used_again(outcomes: Outcomes) -> None:
    outcomes[play_a_cut].result()


def test_a_launcher_that_stands_still_for_five_seconds_costs_nothing(outcomes: Outcomes) -> None:
    outcomes[play_a_still_launcher].result()


def test_a_frozen_agent_that_wakes_goes_on_with_its_ranks(outcomes: Outcomes) -> None:
    outcomes[play_a_frozen_agent].result()


def test_a_node_whose_launcher_is_gone_for_good_ends(outcomes: Outcomes) -> None:
    outcomes[play_a_gone_launcher].result()


def test_a_hanging_file_system_does_not_keep_ranks_alive(outcomes: Outcomes) -> None:
    outcomes[play_a_hanging_file_system].result()


def test_a_node_without_launcher_ends_at_once_when_slurm_says_so(outcomes: Outcomes) -> None:
    outcomes[play_a_termination].result()


def test_a_node_without_power_is_silent_at_once_and_gone_in_the_end(outcomes: Outcomes) -> None:
    outcomes[play_a_power_cut].result()


def test_a_wrong_token_is_refused_and_the_node_never_trains(tmp_path: Path) -> None:
    with commanding(tmp_path, **QUICK) as node:
        node.start_agent(SUPERVISOR_LAUNCHER_SECRET="wrong")
        with socket.create_connection(("127.0.0.1", node.server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            node.listen(0.6)
        assert node.heard == []
