"""What a layout says of one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Seal = Literal["zip", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A name that may be a checkpoint, and the step that the name tells (None: only its content does)."""

    name: str
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of payload bytes, and what guards them: "zip", the CRC32 of each entry of a zip file; or "none"."""

    path: str  # relative to the folder of checkpoints
    offset: int
    length: int
    seal: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A whole checkpoint, by what can be told without reading it all. One that is not whole raises tree.Broken."""

    step: int
    files: tuple[str, ...]  # all that belong to it, relative to the folder of checkpoints
    pieces: tuple[Piece, ...]  # what training goes on from; the rest are texts and marks
    note: str = ""  # what is special about it, for people
    end_mark: str = ""  # the file that is written last, where there is one: nothing else may be much newer
    world_size: int = 0  # data-parallel ranks that made it; 0: not known
    is_elastic: bool = True  # False: its position in the data is one for each of those ranks
    has_end_mark: bool = True  # False: a file that is still to come would not be missed, it must be at rest a while
