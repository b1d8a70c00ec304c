"""The recoveries of the others: each is submitted, broken, waited for and cleared away.

Those that mostly wait run side by side, on other nodes of the same sandbox. What costs CPU time of theirs takes turns:
one job at a time starts and is broken, and cuts are so far apart that no restart falls into another one's start or
restart. Nothing of ours is measured meanwhile.
"""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.gap import Gap, find_gap, read_step_logs
from bench.nvrx import prepare, submit_nvrx
from bench.peers import NODES, start_bare, submit_plain, submit_submitit, submit_torchrun
from bench.recovery_result import Findings, Recovery
from bench.report import say
from bench.stage import FAILURES, BenchFailed, Stage, wait_for
from bench.victims import signal_rank
from trainer.contract import RunPaths
from trainer.storage.stored import find_checkpoints

TRAINING = ("-m", "trainer.example.train", "--steps", "100000", "--seed", "7", "--step-sleep", "0.2")
SAVE_EVERY_S = 2.0
PROCS = 3  # of the one node whose worker is killed

_PEER_TRAINING = (*TRAINING, "--save-every-s", f"{SAVE_EVERY_S:g}")
_START_LIMIT_S = 120.0
_LIMIT_S = 420.0  # Slurm's requeue alone waits two minutes
_SPACING_S = 14.0  # between two cuts: a start takes 12, a restart 5

_JOINED = re.compile(r"ft_launcher\d+@(\S+)\] .* has joined round 0 of the rendezvous .* as rank 1 in a world")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way to train, and which of its nodes is cut."""

    way: str
    submit: Callable[[Stage, Path], int]
    choose_victim: Callable[[Stage, int, Path], str]
    is_waiting: bool = True  # for more than two minutes: others start meanwhile


def _second_node(stage: Stage, job_id: int, _: Path) -> str:
    return stage.job_nodes(job_id)[1]


def _batch_host(stage: Stage, job_id: int, _: Path) -> str:
    return stage.job_nodes(job_id)[0]


def _rank_one(_: Stage, __: int, run_dir: Path) -> str:
    joined = _JOINED.search((run_dir / "job.log").read_text(errors="replace"))
    if joined is None:
        raise BenchFailed("ft_launcher did not say where rank 1 is")
    return joined[1]


PEERS = {
    peer.way: peer
    for peer in (
        Peer(way="requeue", submit=partial(submit_plain, training=_PEER_TRAINING), choose_victim=_second_node),
        Peer(
            way="requeue_batch_host", submit=partial(submit_plain, training=_PEER_TRAINING), choose_victim=_batch_host
        ),
        Peer(way="submitit", submit=partial(submit_submitit, training=_PEER_TRAINING), choose_victim=_second_node),
        Peer(
            way="nvrx",
            submit=partial(submit_nvrx, training=_PEER_TRAINING, allocated=NODES, nodes=f"2:{NODES}"),
            choose_victim=_rank_one,
            is_waiting=False,
        ),
        Peer(
            way="nvrx_spare",
            submit=partial(submit_nvrx, training=_PEER_TRAINING, allocated=NODES + 1, nodes=f"{NODES}:{NODES}"),
            choose_victim=_rank_one,
            is_waiting=False,
        ),
    )
}


# ---------------------------------------------------------------- node power cuts


def measure_cuts(stage: Stage, findings: Findings, ways: Sequence[str]) -> None:
    """A power cut under each of these ways; a way stands there once for each repeat."""
    if any(way.startswith("nvrx") for way in ways):
        prepare()
    turns = Turns()
    threads = [
        threading.Thread(target=_measure, args=(stage, findings, PEERS[way], turns, number), name=f"{way}-{number}")
        for number, way in enumerate(ways)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    await_idle(stage)


def await_idle(stage: Stage) -> None:
    """Wait until every node is idle."""
    wait_for("every node", lambda: set(stage.node_states().values()) == {"IDLE"}, 120, every_s=0.3)


class Turns:
    """Who may start and break a job: one at a time, in the order of the numbers, cuts at least so far apart."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._cut_at = float("-inf")

    def take(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next == number)

    def await_cut(self) -> None:
        left_s = self._cut_at + _SPACING_S - time.monotonic()
        time.sleep(max(0.0, left_s))
        self._cut_at = time.monotonic()

    def give(self) -> None:
        with self._changed:
            self._next += 1
            self._changed.notify_all()


def _measure(stage: Stage, findings: Findings, peer: Peer, turns: Turns, number: int) -> None:
    run_dir = stage.directory / f"{peer.way}-{number}"
    job = _Job()
    turns.take(number)
    try:
        try:
            _break(stage, peer, run_dir, job, turns)
        finally:
            if peer.is_waiting:
                turns.give()
        gap = wait_for("a step after the cut", lambda: find_gap(run_dir, job.cut_at), _LIMIT_S, every_s=0.5)
        findings.add(Recovery(way=peer.way, node=job.node, gap=gap))
    except (BenchFailed, IndexError, *FAILURES) as error:
        findings.fail(f"{peer.way}: {error}; its log ends: {read_end(run_dir)}")
    try:
        _clear_away(stage, job)
    except (BenchFailed, *FAILURES) as error:
        findings.fail(f"{peer.way}: {error}")
    finally:
        if not peer.is_waiting:
            turns.give()


@dataclass(slots=True)
class _Job:
    job_id: int = 0
    node: str = ""
    cut_at: float = 0.0


def _break(stage: Stage, peer: Peer, run_dir: Path, job: _Job, turns: Turns) -> None:
    job.job_id = peer.submit(stage, run_dir)
    wait_for("two checkpoints", lambda: count_verified(run_dir) >= 2, _START_LIMIT_S)
    node = peer.choose_victim(stage, job.job_id, run_dir)
    if peer.is_waiting:
        turns.await_cut()
    job.node, job.cut_at = node, time.time()
    stage.sandbox.power_cut(node)
    say(f"{peer.way}: power of {node} cut")


def _clear_away(stage: Stage, job: _Job) -> None:
    if job.job_id:
        stage.sandbox.run("scancel", str(job.job_id))
    if job.node:
        stage.mend(job.node)


def count_verified(run_dir: Path, after_step: int = -1) -> int:
    """Verified checkpoints of a run that are newer than a step."""
    return sum(f.step > after_step and f.is_verified for f in find_checkpoints(RunPaths(run_dir).checkpoints()))


def read_end(run_dir: Path) -> str:
    logs = [run_dir / "job.log", *sorted((run_dir / "submitit").glob("*.err"))]
    return " / ".join(log.read_text(errors="replace")[-600:] for log in logs if log.exists())


# ---------------------------------------------------------------- cold start, one worker


def measure_start(stage: Stage, findings: Findings, number: int) -> None:
    """From the start of a bare `srun torchrun` to the first step."""
    run_dir = stage.directory / f"start-{number}"
    began = time.time()
    srun = start_bare(stage, run_dir, _PEER_TRAINING, stage.sandbox.node_names[:NODES])
    try:
        first = wait_for("the first step", lambda: _first_step_at(run_dir), _START_LIMIT_S)
        findings.starts_s.append(first - began)
        say(f"srun torchrun: first step after {first - began:.2f} s")
    except BenchFailed as error:
        findings.fail(f"srun torchrun: {error}; its log ends: {read_end(run_dir)}")
    finally:
        srun.terminate()  # srun then ends its step by force
        try:
            srun.wait(30)
        except subprocess.TimeoutExpired:
            srun.kill()
            srun.wait()
    await_idle(stage)


def _first_step_at(run_dir: Path) -> float | None:
    return next((log[0].time for log in read_step_logs(run_dir) if log), None)


def kill_worker(stage: Stage, run_dir: Path, node: str) -> Gap:
    """Kill one worker of a node and wait until the training goes on."""
    since = time.time()
    signal_rank(stage, node, 1, signal.SIGKILL)
    return wait_for("a step after the kill", lambda: find_gap(run_dir, since), 60)


def has_newer(run_dir: Path, step: int) -> bool:
    """True once the training has saved twice beyond a step: another failure is no repeated one."""
    return count_verified(run_dir, step) >= 2


def measure_torchrun_worker(stage: Stage, findings: Findings, repeats: int) -> None:
    """One of three workers of one node is killed, again and again; torchrun starts them anew."""
    run_dir = stage.directory / "torchrun-worker"
    job_id = submit_torchrun(stage, run_dir, _PEER_TRAINING, PROCS)
    try:
        wait_for("two checkpoints", lambda: count_verified(run_dir) >= 2, _START_LIMIT_S)
        node = stage.job_nodes(job_id)[0]
        for _ in range(repeats):
            gap = kill_worker(stage, run_dir, node)
            findings.add(Recovery(way="torchrun_worker", node=node, gap=gap))
            wait_for("newer checkpoints", partial(has_newer, run_dir, gap.first_step), 60)
    except BenchFailed as error:
        findings.fail(f"torchrun_worker: {error}; its log ends: {read_end(run_dir)}")
    finally:
        stage.sandbox.run("scancel", str(job_id))
    await_idle(stage)
