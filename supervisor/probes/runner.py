"""Runs the host probes of one node, each in a child of its own under a deadline, and prints one JSON line.

    python -m supervisor.probes.runner --limits JSON [--head-time T] [--shared PATH]... [--mark PATH] [--deadline S]

A probe that gives no answer is unknown, and its process is left: a call that hangs on a dead file system can't be
killed. Exit code 0 says that the line is complete, whatever the results; 2 is a bad argument, with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from supervisor.probes import clock, disk, memory, shared_path, shm
from supervisor.probes.limits import Limits, parse_limits
from trainer import contract
from trainer.contract import CheckResult

DEADLINE_S = 10.0
MAX_ANSWER_BYTES = 256 * 1024

Probe = Callable[[], tuple[CheckResult, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The line that is printed. Times are the node's clock, seconds since the epoch."""

    version: int = contract.CONTRACT_VERSION
    node: str
    started_at: float
    ended_at: float
    results: tuple[CheckResult, ...]


def command(
    limits: Mapping[str, object],
    *,
    deadline_s: float = DEADLINE_S,
    python: str = sys.executable,
    pythonpath: str | None = None,
) -> tuple[str, ...]:
    """The argv that runs the probes on any node which sees this installation under the same path."""
    path = pythonpath or str(Path(__file__).resolve().parent.parent.parent)
    return (
        *("/usr/bin/env", f"PYTHONPATH={path}", python, "-P", "-s", "-m", "supervisor.probes.runner"),
        *("--limits", json.dumps(limits), "--deadline", f"{deadline_s:g}"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, judge, print."""
    started_at = time.time()
    options = _parse_arguments(argv)
    probes = list_probes(options.limits, options.head_time, started_at, options.deadline)
    if options.mark:
        probes = (*probes, (f"mark:{options.mark}", lambda: (shared_path.leave_mark(options.mark, node_name()),)))
    results = run_probes(probes, options.deadline)
    report = ProbeReport(node=node_name(), started_at=started_at, ended_at=time.time(), results=results)
    sys.stdout.write(contract.render_json(report).decode("utf-8", "replace") + "\n")
    sys.stdout.flush()
    return 0


def node_name() -> str:
    """Slurm's name of this node, or the host name outside Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def list_probes(
    limits: Limits, head_time: float | None, started_at: float, deadline_s: float
) -> tuple[tuple[str, Probe], ...]:
    """(name, probe) of everything that the limits ask for."""
    probes: list[tuple[str, Probe]] = [(f"disk:{path}", _disk_probe(path, limits)) for path in limits.disk_paths]
    probes.append(("memory", lambda: (_judge_memory(limits),)))
    probes.append(("shm", lambda: (_judge_shm(limits),)))
    probes += [(f"shared:{path}", _shared_probe(path)) for path in limits.shared_paths]
    if head_time is not None:
        reading = clock.measure(head_time, started_at=started_at, wait_s=deadline_s)
        probes.append(("clock", lambda: (clock.judge(reading, max_skew_s=limits.clock_max_skew_s),)))
    if limits.gpu_count:
        probes.append(("gpu", lambda: _judge_gpus(limits)))
        probes.append(("leftover_process", _judge_leftovers))
    if limits.kernel_log_window_s:
        probes.append(("kernel_log", lambda: _judge_kernel_log(limits)))
    return tuple(probes)


def _disk_probe(path: str, limits: Limits) -> Probe:
    return lambda: (
        disk.judge(
            disk.measure(path),
            min_free_fraction=limits.disk_min_free_fraction,
            min_free_bytes=limits.disk_min_free_bytes,
        ),
    )


def _shared_probe(path: str) -> Probe:
    return lambda: (shared_path.judge(shared_path.measure(path)),)


def _judge_memory(limits: Limits) -> CheckResult:
    return memory.judge(memory.measure(), min_available_fraction=limits.memory_min_available_fraction)


def _judge_shm(limits: Limits) -> CheckResult:
    return shm.judge(
        shm.measure(), min_free_fraction=limits.shm_min_free_fraction, min_total_bytes=limits.shm_min_total_bytes
    )


def _judge_gpus(limits: Limits) -> tuple[CheckResult, ...]:
    from supervisor.probes import gpu

    return gpu.judge(gpu.measure(), expected_count=limits.gpu_count)


def _judge_leftovers() -> tuple[CheckResult, ...]:
    from supervisor.probes import leftover

    return (leftover.judge(leftover.measure()),)


def _judge_kernel_log(limits: Limits) -> tuple[CheckResult, ...]:
    from supervisor.probes import kernel_log

    return (kernel_log.judge(kernel_log.measure(limits.kernel_log_window_s)),)


# ---------------------------------------------------------------- children


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    results: tuple[CheckResult, ...]


@dataclass(slots=True)
class _Running:
    name: str
    pid: int
    pipe: int
    answer: bytearray


def run_probes(probes: Sequence[tuple[str, Probe]], deadline_s: float) -> tuple[CheckResult, ...]:
    """Results of all probes, run at the same time; one without an answer by the deadline is unknown."""
    until = time.monotonic() + deadline_s
    running = [_start(name, probe) for name, probe in probes]
    _gather(running, until)
    results: list[CheckResult] = []
    for one in running:
        results += _read_answer(one, deadline_s)
        os.close(one.pipe)
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(one.pid, os.WNOHANG)
    return tuple(results)


def _start(name: str, probe: Probe) -> _Running:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        os.set_blocking(reading, False)
        return _Running(name=name, pid=pid, pipe=reading, answer=bytearray())
    code = 1
    try:
        os.close(reading)
        signal.alarm(600)  # should the parent be killed: nothing stays for ever, unless the kernel holds it
        answer = contract.render_json({"results": _run_one(name, probe)})
        while answer:
            answer = answer[os.write(writing, answer) :]
        code = 0
    finally:
        os._exit(code)


def _run_one(name: str, probe: Probe) -> tuple[CheckResult, ...]:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - whatever a probe stumbles over is no verdict on the node
        return (CheckResult(check=name, ok=None, detail=f"{type(error).__name__}: {error}"[:500]),)


def _gather(running: Sequence[_Running], until: float) -> None:
    poll = select.poll()
    waiting = {one.pipe: one for one in running}
    for pipe in waiting:
        poll.register(pipe, select.POLLIN)
    while waiting and (left_s := until - time.monotonic()) > 0:
        for pipe, _ in poll.poll(left_s * 1000):
            data = os.read(pipe, 65536)
            waiting[pipe].answer += data
            if not data or len(waiting[pipe].answer) > MAX_ANSWER_BYTES:
                poll.unregister(pipe)
                del waiting[pipe]


def _read_answer(one: _Running, deadline_s: float) -> tuple[CheckResult, ...]:
    try:
        return contract.parse(_Answer, bytes(one.answer)).results
    except contract.ContractError:
        return (CheckResult(check=one.name, ok=None, detail=f"no answer in {deadline_s:g} s"),)


# ---------------------------------------------------------------- arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    limits: Limits
    head_time: float | None
    deadline: float
    mark: str = ""


def _parse_arguments(argv: Sequence[str] | None) -> _Options:
    parser = argparse.ArgumentParser(prog="supervisor.probes.runner", description="Host probes of one node")
    parser.add_argument("--limits", default="{}", help="limits as one JSON object")
    parser.add_argument("--head-time", type=float, help="head node's clock at the question, seconds since the epoch")
    parser.add_argument("--shared", action="append", default=[], help="shared path to try, beside those of --limits")
    parser.add_argument("--mark", default="", help="a file of this path, a dash and the node's name is left there")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for all probes")
    found = parser.parse_args(argv)
    try:
        raw = json.loads(found.limits)
        if found.shared and isinstance(raw, dict):
            raw["shared_paths"] = [*raw.get("shared_paths", []), *found.shared]
        limits = parse_limits(raw)
        if found.head_time is not None and not math.isfinite(found.head_time):
            raise ValueError(f"--head-time {found.head_time} is no time")  # noqa: TRY301
        if not 0 < found.deadline <= 300:
            raise ValueError(f"--deadline {found.deadline} is not between 0 and 300")  # noqa: TRY301
    except (ValueError, TypeError, RecursionError) as error:
        parser.error(str(error))
    return _Options(limits=limits, head_time=found.head_time, deadline=found.deadline, mark=found.mark)


if __name__ == "__main__":
    sys.exit(main())
