"""Replays what a launcher was told: recorded traces, and drawn ones, as its loop would see them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract import AttemptSpec
from trainer.launching.hangs import Hang, HangWatch

TRACES = Path(__file__).parents[2] / "data" / "traces"
CYCLE_S = 0.1

Beat = Sequence[Any]  # node, seconds, ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Beats in the order of time. `hung_s`: when a rank hung, None in a healthy one."""

    name: str
    nodes: tuple[str, ...]
    beats: tuple[Beat, ...]
    hung_s: float | None = None
    rank: int | None = None  # that is known without evidence
    within_s: float = 0.0


def read_trace(path: Path) -> Trace:
    head, *beats = map(json.loads, path.read_text().splitlines())
    return Trace(
        name=head["name"],
        nodes=tuple(head["nodes"]),
        beats=tuple(beats),
        hung_s=head["hung_s"],
        rank=head["rank"],
        within_s=head["within_s"],
    )


def read_traces() -> list[Trace]:
    return [read_trace(path) for path in sorted(TRACES.glob("*.jsonl"))]


def make_spec(**options: Any) -> AttemptSpec:
    return AttemptSpec(run="r", attempt=1, command=("x",), nodes=2, procs_per_node=2, **options)


def replay(trace: Trace, watch: HangWatch | None = None, *, offset_s: float = 0.0) -> tuple[float, Hang] | None:
    """When the watch found a hang, and which; None: it never did. The launcher looks ten times a second."""
    watch = watch or HangWatch(make_spec())
    now, waiting = 0.0, list(trace.beats)
    end = float(waiting[-1][1])
    watch.begin(0, trace.nodes, offset_s)
    while now < end:
        now += CYCLE_S
        while waiting and waiting[0][1] <= now:
            node, _, ranks = waiting.pop(0)
            watch.feed(node, ranks, offset_s + now)
        hang = watch.judge(offset_s + now)
        if hang is not None:
            return now, hang
    return None
