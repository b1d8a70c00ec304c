"""What a node makes of its orders: starts, stops and checks again and again in one allocation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.agents import Commander, commanding
from trainer.contract import NodeReport, parse


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Commander]:
    with commanding(tmp_path, command_template=("train.py", "--from={resume_from}", "{resume_step}")) as node:
        yield node


def start(node: Commander, folder: Path) -> None:
    (node.paths.run_dir / "train.py").write_text((folder / "train.py").read_text())
    node.start_agent()


def test_one_agent_trains_again_and_again_each_time_from_where_it_is_told(node: Commander, tmp_path: Path) -> None:
    start(node, tmp_path)
    first = node.begin(0, resume_from="/c/step-5.a1", resume_step=5)
    node.order("stop", launch=0, grace_s=1.0, reason="a peer is gone")
    stopped = node.await_said("stopped", launch=0)
    assert not node.is_alive(first)
    assert stopped["left"] == []
    node.order("check", launch=1)
    assert node.await_said("checked", launch=1)["port"] == stopped["port"]
    node.go(1, resume_from="/c/step-9.a1", resume_step=9)
    assert node.up(1)[1:] == ["9", "--from=/c/step-9.a1", "9"]
    assert len(node.agents) == 1
    assert node.said("ended") == []  # nothing ended by itself


def test_orders_that_come_twice_are_answered_twice_and_acted_on_once(node: Commander, tmp_path: Path) -> None:
    start(node, tmp_path)
    rank = node.begin(0)
    node.go(0)
    node.order("check", launch=0)
    node.until(lambda: len(node.said("checked", launch=0)) >= 2)
    assert node.is_alive(rank)
    for _ in range(2):
        node.order("stop", launch=0, grace_s=0.5, reason="")
    node.until(lambda: len(node.said("stopped", launch=0)) >= 2)


def test_late_orders_of_an_older_start_count_for_nothing(node: Commander, tmp_path: Path) -> None:
    start(node, tmp_path)
    rank = node.begin(3)
    node.order("stop", launch=2, grace_s=0.0, reason="late")
    node.go(2)
    node.order("check", launch=1)
    node.order("evidence", launch=3, dir=str(node.paths.evidence(1, 3)))
    node.await_said("evidence", launch=3)  # all of them have been seen by now
    assert node.is_alive(rank)
    assert node.said("stopped") == []
    assert {said["launch"] for said in node.said("checked")} == {0}  # maybe twice: as it connects, all is said again


def test_a_start_that_was_stopped_is_not_begun_by_a_late_go(node: Commander, tmp_path: Path) -> None:
    start(node, tmp_path)
    node.await_said("checked")
    node.order("stop", launch=0, grace_s=1.0, reason="never begun")
    node.await_said("stopped", launch=0)
    node.go(0)
    node.order("check", launch=1)
    node.await_said("checked", launch=1)
    assert not (node.paths.run_dir / "up.0.0").exists()
    assert node.said("beat")[-1]["state"] != "running"


STUBBORN = """
import os, pathlib, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["setsid", "sh", "-c", "trap '' TERM; sleep 98 & wait"])
run_dir = pathlib.Path(os.environ["SUPERVISOR_RUN_DIR"])
(run_dir / "up").write_text(f"{os.getpid()} 0 {child.pid}")
(run_dir / "up").rename(run_dir / "up.0.0")
time.sleep(99)
"""


def test_what_does_not_heed_sigterm_is_killed_with_everything_below_it(tmp_path: Path) -> None:
    with commanding(tmp_path, STUBBORN) as node:
        node.start_agent()
        node.await_said("checked")
        node.go(0)
        pid, _, child = node.up(0)
        node.order("stop", launch=0, grace_s=0.3, reason="")
        node.await_said("stopped", launch=0, left=[])
        assert not node.is_alive(int(pid))
        assert not node.is_alive(int(child))


FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("ValueError: boom")
time.sleep(99)
"""


def test_the_first_failed_rank_is_told_at_once_and_its_peers_on_the_node_end(tmp_path: Path) -> None:
    with commanding(tmp_path, FAILING, procs_per_node=2) as node:
        node.start_agent()
        node.await_said("checked")
        node.go(0)
        assert node.await_said("failed", launch=0)["rank"] == 1
        ended = node.await_said("ended", launch=0)
        assert (ended["exit_code"], ended["rank"], ended["left"]) == (1, 1, [])
        path = node.paths.node_report(1, "n1")
        node.until(path.exists)
        assert "boom" in parse(NodeReport, path.read_bytes()).log_tail
        node.go(1)  # an end is no end of the agent
        node.await_said("ended", launch=1)


def test_a_failed_check_is_told_and_the_node_stays_for_another_one(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        """
import json, pathlib, sys
is_good = pathlib.Path(sys.argv[1]).exists()
print(json.dumps([{"check": "disk", "ok": is_good}]))
"""
    )
    checks = ("python", str(tmp_path / "probe.py"), str(tmp_path / "good"))
    with commanding(tmp_path, start_checks=checks) as node:
        node.start_agent()
        assert node.await_said("checked", launch=0)["checks"][0]["ok"] is False
        (tmp_path / "good").touch()
        node.order("check", launch=1)
        assert node.await_said("checked", launch=1)["checks"][0]["ok"] is True
        node.order("bye")
        assert node.agents[0].wait(20) == 0


def test_a_new_agent_kills_what_an_older_one_of_the_attempt_left(node: Commander, tmp_path: Path) -> None:
    """The older one's end takes its ranks along; a rank that has left its group does not notice."""
    start(node, tmp_path)
    rank = node.begin(0)
    os.kill(rank, signal.SIGSTOP)  # it must be there, and not be able to end by itself
    hello = node.said("hello")[-1]
    os.kill(node.agents[0].pid, signal.SIGKILL)
    node.agents[0].wait(10)
    node.start_agent()
    node.until(lambda: len({message["agent"] for message in node.said("hello")}) == 2)
    assert node.said("hello")[-1]["boot_id"] == hello["boot_id"]
    node.until(lambda: not node.is_alive(rank))


def test_an_older_agent_that_lives_after_all_leaves_its_place_to_the_new_one(node: Commander, tmp_path: Path) -> None:
    start(node, tmp_path)
    rank = node.begin(0)
    os.kill(node.agents[0].pid, signal.SIGSTOP)
    node.start_agent()
    node.until(lambda: len({message["agent"] for message in node.said("hello")}) == 2)
    node.until(lambda: node.agents[0].poll() is not None and not node.is_alive(rank))
    assert node.agents[1].poll() is None


def test_a_rank_that_failed_just_before_its_stop_is_told_as_failed(node: Commander, tmp_path: Path) -> None:
    start(node, tmp_path)
    rank = node.begin(0)
    agent = node.agents[0].pid
    os.kill(agent, signal.SIGSTOP)  # it learns of both at once
    node.order("stop", launch=0, grace_s=0.1, reason="a peer failed")
    os.kill(rank, signal.SIGKILL)
    node.poll()
    os.kill(agent, signal.SIGCONT)
    node.await_said("stopped", launch=0)
    order = [event.message["type"] for event in node.heard]
    assert order.index("failed") < order.index("ended") < order.index("stopped")


def test_a_signal_reaches_ranks_that_start_later(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
time.sleep(99)
"""
    with commanding(tmp_path, program) as node:
        node.start_agent()
        node.await_said("checked")
        node.order("signal", number=int(signal.SIGUSR1), count=1)
        node.go(0)
        assert node.await_said("ended", launch=0)["exit_code"] == 75
