"""Sees on which collectives a rank waits for the others: what `trainer.steptime` takes from a step's time.

On CPUs (gloo) the waits are in the thread that trains: in `Work.wait`, which torch.distributed, FSDP and the ranks'
own talk go through, and at the end of a backward pass, where DistributedDataParallel waits inside C++ from the last
gradient on. Which parameters' gradients come last is learnt in the first passes; after that their hooks are left.

On GPUs the thread that trains only hands kernels over; there the Flight Recorder's durations are read, where NCCL
records them (TORCH_NCCL_ENABLE_TIMING).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainer.contract import ENV_NODE_SOCKET
from trainer.steptime import TIMES, FlightLook, StepTimes

log = logging.getLogger("trainer.waits")

LEARN_PASSES = 6  # several, for a step of more than one
_MAX_FLIGHT_BYTES = 64 * 1024 * 1024


def watch_waits(model: torch.nn.Module, times: StepTimes = TIMES, env: Mapping[str, str] = os.environ) -> bool:
    """Begin to see what this rank waits for; False where nobody asks for it or it can't be seen.

    Before the first step; a second model takes the place of the first. Costs some microseconds a step, and raises
    nothing into the training.
    """
    if not env.get(ENV_NODE_SOCKET) or not (dist.is_available() and dist.is_initialized()):
        return False
    if dist.get_world_size() == 1:
        return False
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return _read_flight(times, env)
    try:
        _watch_tail(model, times)
        _watch_works(times)
    except (RuntimeError, TypeError, AttributeError) as error:  # of a model that takes no hooks, another PyTorch
        log.info("slow ranks are not told apart: %s", error)
        return False
    times.see_waits()
    return True


# ---------------------------------------------------------------- CPUs: collectives


def _watch_works(times: StepTimes) -> None:
    work = dist.Work
    inner: Callable[..., Any] = work.wait
    if getattr(inner, "is_watched", False):
        return

    def wait(self: dist.Work, *arguments: Any, **named: Any) -> Any:
        with times.waiting():
            return inner(self, *arguments, **named)

    wait.is_watched = True  # type: ignore[attr-defined]
    work.wait = wait  # type: ignore[method-assign]


# ---------------------------------------------------------------- CPUs: the end of a backward pass


class _Tail:
    """The time from a pass's last gradient to its end, where that isn't a wait that was seen already."""

    def __init__(self, model: torch.nn.Module, times: StepTimes) -> None:
        self._times = times
        self._passes = 0
        self._newest = -1
        self._lasts: set[int] = set()
        self._last_at = self._waited_s = 0.0
        self._is_queued = False
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self._newest = index
            self._mark()
            if not self._is_queued or self._passes >= LEARN_PASSES:  # a pass that failed has left it queued
                self._is_queued = True
                _at_end(self._before_end)

        return note

    def _mark(self) -> None:
        self._last_at, self._waited_s = time.perf_counter(), self._times.waited_s

    def _before_end(self) -> None:
        _at_end(self._end)  # once more: DistributedDataParallel's own wait at the end was queued after the first

    def _end(self) -> None:
        self._is_queued = False
        tail_s = time.perf_counter() - self._last_at
        self._times.waited(max(0.0, tail_s - (self._times.waited_s - self._waited_s)))
        self._mark()  # of two hooks in one pass, each asks for an end
        if self._passes < LEARN_PASSES:
            self._passes += 1
            self._lasts.add(self._newest)
            if self._passes == LEARN_PASSES:
                self._keep_lasts()

    def _keep_lasts(self) -> None:
        for index, handle in enumerate(self._handles):
            if index not in self._lasts:
                handle.remove()

    def remove(self) -> None:
        """Let go of the model."""
        for handle in self._handles:
            handle.remove()


_tail: _Tail | None = None


def _watch_tail(model: torch.nn.Module, times: StepTimes) -> None:
    global _tail  # noqa: PLW0603 - one training a process; two of them would count a wait twice
    if _tail is not None:
        _tail.remove()
    _tail = _Tail(model, times)


def _at_end(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)  # noqa: SLF001


# ---------------------------------------------------------------- GPUs


def _read_flight(times: StepTimes, env: Mapping[str, str]) -> bool:
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # noqa: SLF001
    if dump is None or env.get("TORCH_NCCL_ENABLE_TIMING", "0") not in {"1", "true", "y", "yes"}:
        return False
    times.read_flight(lambda: parse_flight(dump()))
    return True


def parse_flight(dump: bytes | str) -> FlightLook | None:
    """What the Flight Recorder's JSON says of finished collectives; None when it can't be read or holds none."""
    if len(dump) > _MAX_FLIGHT_BYTES:
        return None
    try:
        entries = json.loads(dump)["entries"]
        numbers = [int(entry["record_id"]) for entry in entries]
        durations = {
            int(entry["record_id"]): float(entry["duration_ms"]) / 1e3
            for entry in entries
            if entry.get("duration_ms") is not None
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return FlightLook(durations_s=durations, first=min(numbers), last=max(numbers)) if numbers else None
