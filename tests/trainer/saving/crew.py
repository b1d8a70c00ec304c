"""The savers of several ranks in one process, each with its own writer, and hand-made plans of what they save."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.trainer.saving.waiting import DEADLINE_S, await_that
from trainer.saving.image import Image
from trainer.saving.saver import Saver, SaveResult, Staging
from trainer.saving.zipimage import Piece, lay_out


@dataclass(frozen=True, slots=True)
class HandMade:
    """A plan of one rank: a tensor of each size."""

    image: Image
    metadata: bytes | None


def plan_by_hand(rank: int, sources: Sequence[torch.Tensor | bytes]) -> HandMade:
    pieces = [
        Piece(pickle=None, size=len(source))
        if isinstance(source, bytes)
        else Piece(pickle=b"pickle", size=source.numel() * source.element_size())
        for source in sources
    ]
    image, _ = lay_out(f"__{rank}_0.distcp", pieces)
    return HandMade(image, b"metadata" if rank == 0 else None)


def raw(source: torch.Tensor | bytes) -> bytes:
    return source if isinstance(source, bytes) else source.flatten().view(torch.uint8).numpy().tobytes()


class Crew:
    """`world` ranks; `values[r]` are rank r's tensors."""

    def __init__(self, root: Path, values: Sequence[Sequence[torch.Tensor | bytes]], **options: Any) -> None:
        offers: list[Any] = []

        def gather(offer: Any) -> list[Any]:
            offers.append(offer)
            return [offers[0]]

        self.root = root
        self.values = [list(own) for own in values]
        self.plans = [plan_by_hand(rank, own) for rank, own in enumerate(values)]
        self.savers = [
            Saver(
                root / "checkpoints",
                **{
                    "run": "gpt",
                    "attempt": 1,
                    "rank": rank,
                    "world": len(values),
                    "node_size": 1,
                    "gather": gather,
                    "nice": 0,
                    **options,
                },
            )
            for rank in range(len(values))
        ]

    def begin(self, step: int, ranks: Sequence[int] | None = None) -> None:
        for rank in ranks if ranks is not None else range(len(self.savers)):
            self.savers[rank].begin(self.plans[rank], self.values[rank], step=step, samples=step * 8)

    def results(self) -> list[SaveResult]:
        return [result for saver in self.savers if (result := saver.wait(DEADLINE_S)) is not None]

    def save(self, step: int) -> list[SaveResult]:
        self.begin(step)
        return self.results()

    def snapshot(self) -> list[list[bytes]]:
        return [[raw(source) for source in own] for own in self.values]

    def stored(self, step: int) -> list[list[bytes]]:
        """The bytes of all slots in the files of a step, each file's checksums having been checked."""
        return [read_slots(self.root / "checkpoints" / f"step-{step}.a1", plan.image) for plan in self.plans]

    def close(self) -> None:
        for saver in self.savers:
            saver.close()


@contextmanager
def crew(root: Path, values: Sequence[Sequence[torch.Tensor | bytes]], **options: Any) -> Iterator[Crew]:
    made = Crew(root, values, **options)
    try:
        yield made
    finally:
        made.close()


def read_slots(folder: Path, image: Image) -> list[bytes]:
    data = (folder / image.name).read_bytes()
    assert len(data) == image.size
    begin = 0
    while (begin := data.find(b"PK\x03\x04", begin)) >= 0:  # each item is a zip, by its checksums whole
        end = data.find(b"PK\x05\x06", begin)
        comment = int.from_bytes(data[end + 20 : end + 22], "little")
        with zipfile.ZipFile(io.BytesIO(data[begin : end + 22 + comment])) as item:
            assert item.testzip() is None
        begin = end
    return [data[slot.offset : slot.offset + slot.size] for slot in image.slots]


__all__ = ["Crew", "Staging", "await_that", "crew", "plan_by_hand", "raw", "read_slots"]
