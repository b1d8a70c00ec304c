"""From a state dict to the image of each rank's file and the `.metadata` of the checkpoint, once per structure.

DCP's own planner says which chunk of each tensor a rank holds. Here is decided who writes what several hold, and where
in the files it lies. All of that is known before a byte is copied, so that a save only fills slots: `SavePlan.sources`
gives the tensors and bytes for them, and says when the state is no longer the planned one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from trainer.saving.image import Image
from trainer.saving.indexing import Place, render_metadata
from trainer.saving.pickles import pickle_tensor
from trainer.saving.quiet import no_collections
from trainer.saving.sharing import share_out
from trainer.saving.structure import Held, Part, PlanChanged, Structure, UnsupportedState, Value
from trainer.saving.zipimage import LARGE_BYTES, Piece, lay_out

__all__ = ["PlanChanged", "SavePlan", "UnsupportedState", "plan_state"]

T = TypeVar("T")


class SavePlan:
    """What this rank's file looks like, and how to fill it.

    `metadata`: the bytes of `.metadata`, on rank 0 alone. `signature`: the same on every rank, equal for equal plans.
    An image of size 0 means that this rank writes no file.
    """

    def __init__(
        self,
        *,
        image: Image,
        metadata: bytes | None,
        signature: str,
        structure: Structure,
        wanted: Sequence[Part],
    ) -> None:
        self.image = image
        self.metadata = metadata
        self.signature = signature
        self._structure = structure
        self._wanted = wanted

    def sources(self, state: Mapping[str, Any]) -> list[Value]:
        """The values for the image's slots, in their order; tensors are contiguous, and most are the state's own.

        Raises `PlanChanged`, on this rank alone, when keys, types, shapes or dtypes are not the planned ones or a
        byte item outgrew its slot.
        """
        return self._structure.values(state, self._wanted)

    def renew(self, values: Sequence[Value], items: Mapping[str, bytes]) -> list[Value] | None:
        """`sources` of before with the byte items of now, by key, for a state whose tensors are the very same objects.

        None where that is no help: some of the values were copies. Raises `PlanChanged` as `sources` does.
        """
        return self._structure.renew(values, items, self._wanted)


def plan_state(state: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> SavePlan:
    """Plan the saves of `state`, a nested dict of tensors and `bytes`; every rank of `group` calls it.

    Raises `UnsupportedState` on every rank when the state of one can't be saved, or those of two contradict each other.
    """
    with no_collections():
        return _plan(state, _Ranks(group))


def _plan(state: Mapping[str, Any], ranks: _Ranks) -> SavePlan:
    structure, problem = None, ""
    try:
        structure = Structure(state)
    except UnsupportedState as error:
        problem = f"rank {ranks.rank}: {error}"
    held = structure.held if structure is not None else []
    gathered = ranks.gather((held, problem))
    share = ranks.scatter(share_out(gathered) if gathered is not None else None)
    if share.problem or structure is None:
        raise UnsupportedState(share.problem)
    image, places, wanted = _lay_out(ranks.rank, held, share.mine)
    all_places = ranks.gather(places)
    metadata = None
    if gathered is not None and all_places is not None:
        metadata = render_metadata(
            (item for items, _ in gathered for item in items if item is not None),
            (place for part in all_places for place in part),
        )
    return SavePlan(image=image, metadata=metadata, signature=share.signature, structure=structure, wanted=wanted)


# ---------------------------------------------------------------- where it lies


def _lay_out(rank: int, held: Sequence[Held | None], mine: Sequence[Part]) -> tuple[Image, list[Place], list[Part]]:
    """(image, places, the part for each slot): bytes first, then small tensors, then large ones."""
    pairs = [(part, _take(item, part)) for part in mine if (item := held[part.at]) is not None]
    ordered = sorted(pairs, key=lambda pair: (pair[1].offsets is not None, pair[1].size >= LARGE_BYTES, pair[0]))
    image, extents = lay_out(f"__{rank}_0.distcp", [_piece(item) for _, item in ordered])
    places = [
        Place(held=item, file=image.name, offset=extent.offset, length=extent.length)
        for (_, item), extent in zip(ordered, extents, strict=True)
    ]
    wanted = [part for (part, _), extent in zip(ordered, extents, strict=True) if extent.slot is not None]
    return image, places, wanted


def _take(item: Held, part: Part) -> Held:
    return item if part.is_whole else item.rows(part.first, part.count)


def _piece(held: Held) -> Piece:
    if held.offsets is None:
        return Piece(pickle=None, size=held.size)
    return Piece(pickle=pickle_tensor(held.dtype, held.sizes, held.stride), size=held.size)


# ---------------------------------------------------------------- between the ranks


class _Ranks:
    """Gathers to and scatters from rank 0 of a group; without torch.distributed there is one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._is_alone = not dist.is_initialized()
        self.rank = 0 if self._is_alone else dist.get_rank(group)
        self._world = 1 if self._is_alone else dist.get_world_size(group)

    def gather(self, value: T) -> list[T] | None:
        if self._is_alone:
            return [value]
        gathered: list[Any] | None = [None] * self._world if self.rank == 0 else None
        dist.gather_object(value, gathered, group=self._group, group_dst=0)
        return gathered

    def scatter(self, values: list[T] | None) -> T:
        if self._is_alone:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, group=self._group, group_src=0)
        return received[0]  # type: ignore[no-any-return]
