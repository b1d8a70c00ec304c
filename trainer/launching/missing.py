"""Which rank the others wait for: from the Flight Recorder's dumps and the stacks that the nodes have collected.

A rank that is behind in its steps, or whose process is stopped, is named without them (trainer.launching.quiet). Where
all have done the same steps, the Flight Recorder knows who has not joined a collective; without it, the rank whose
main thread stands somewhere else while the others stand in a collective is the one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.flight.analyse import HIGH, Finding, analyse_folder
from trainer.launching.quiet import Hang

MAX_STACKS = 4096  # ranks
MAX_STACK_BYTES = 256 * 1024  # the main thread stands at the front
INNERMOST = 12  # frames in which a wait for others shows
MAX_SENTENCES = 12

_NAME = re.compile(r"^rank(\d{1,7})\.stacks\.txt\Z")
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
_FRAMES = (
    re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$'),  # ours and faulthandler's
    re.compile(r"^\s+(?P<name>\S+) \((?P<file>[^()]+):(?P<line>\d+)\)$"),  # py-spy's
)
# Where a rank waits for others: collectives, FSDP's and DDP's waits, and a backward pass, whose hooks run collectives.
_WAITS = (
    re.compile(r"torch/distributed/(?!elastic|checkpoint)"),
    re.compile(r"torch/nn/parallel/distributed"),
    re.compile(r"torch/autograd/(?:graph|__init__|function)"),
    re.compile(r"torch/cuda/(?:__init__|streams)"),
    re.compile(r"trainer/session/waits"),  # around each of them, where waits are measured
)
_AROUND = re.compile(r"/torch/|trainer/session/waits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    name: str

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.name} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


def name_missing(hang: Hang, folder: Path, *, world: int = 0, limit_s: float = 2.0) -> Hang:
    """The hang with what the collected evidence says of it. Reads files; what can't be read is left out."""
    finding = None
    with contextlib.suppress(OSError, ValueError):
        finding = analyse_folder(folder, world, limit_s=limit_s)
    return judge_evidence(hang, finding, read_stacks(folder))


def judge_evidence(hang: Hang, finding: Finding | None, stacks: Mapping[int, tuple[Frame, ...]]) -> Hang:
    """The hang with the ranks that the evidence names, if they are not known already. Pure."""
    if finding is not None and finding.kind != "none":
        # Steps are told twice a second, and a rank that waits inside native code may have told them late.
        is_open = not hang.ranks or (hang.named_by == "step" and finding.confidence == HIGH)
        if finding.culprits and is_open:
            hang = hang.name(finding.culprits, "flight", f"Flight Recorder: {finding.sentence}")
        else:
            hang = replace(hang, evidence=(*hang.evidence, f"Flight Recorder: {finding.sentence}"))
    if not hang.ranks:
        ranks = choose_outsiders(stacks)
        if ranks:
            shown = ", ".join(map(str, ranks))
            hang = hang.name(ranks, "stacks", f"rank {shown} does not wait for others, the other ranks do")
    return replace(hang, evidence=(*hang.evidence, *_say_places(hang, stacks))[: MAX_SENTENCES + len(hang.evidence)])


def choose_outsiders(stacks: Mapping[int, tuple[Frame, ...]]) -> tuple[int, ...]:
    """The ranks whose main thread stands outside of any wait for others, if they are the fewer."""
    known = {rank: frames for rank, frames in stacks.items() if frames}
    outside = tuple(rank for rank, frames in sorted(known.items()) if not is_waiting(frames))
    return outside if outside and 2 * len(outside) <= len(known) and len(outside) < len(known) else ()


def is_waiting(frames: tuple[Frame, ...]) -> bool:
    """True when the innermost calls are a wait for other ranks."""
    return any(pattern.search(frame.file) for frame in frames[:INNERMOST] for pattern in _WAITS)


def _say_places(hang: Hang, stacks: Mapping[int, tuple[Frame, ...]]) -> list[str]:
    order = sorted(stacks, key=lambda rank: (rank not in hang.ranks, rank))
    said: dict[str, list[int]] = {}
    for rank in order:
        frames = stacks[rank]
        if frames:
            inner = next((frame for frame in frames if "session/waits" not in frame.file), frames[0])
            own = next((frame for frame in frames if not _AROUND.search(frame.file)), inner)
            where = inner.words if own is inner else f"{inner.words}, called in {own.words}"
            said.setdefault(where, []).append(rank)
    return [f"rank {', '.join(map(str, ranks[:8]))}: in {where}" for where, ranks in said.items()]


# ---------------------------------------------------------------- stacks


def read_stacks(folder: Path) -> dict[int, tuple[Frame, ...]]:
    """The main thread's stack of each rank that left one, innermost call first."""
    stacks: dict[int, tuple[Frame, ...]] = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir())[: 8 * MAX_STACKS]:
            found = _NAME.match(path.name)
            if found and len(stacks) < MAX_STACKS:
                with contextlib.suppress(OSError), path.open("rb") as stream:
                    stacks[int(found[1])] = parse_main_stack(stream.read(MAX_STACK_BYTES).decode(errors="replace"))
    return stacks


def parse_main_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's calls in a text of ours, faulthandler's or py-spy's, innermost first; () if there are none."""
    starts = [found.start() for found in _THREAD.finditer(text)]
    parts = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    named = [part for part in parts if "MainThread" in part.partition("\n")[0]]
    part = next(iter(named or parts), "")
    return tuple(frame for line in part.splitlines() if (frame := _parse_frame(line)) is not None)


def _parse_frame(line: str) -> Frame | None:
    for pattern in _FRAMES:
        found = pattern.match(line)
        if found:
            return Frame(file=found["file"], line=int(found["line"]), name=found["name"].strip())
    return None
