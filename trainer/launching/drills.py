"""Failures that somebody asks for: which node makes one, and when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.contract import DrillRequest

DRILL_KINDS = ("node", "process", "network", "hang")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOrder:
    """The order for a node, or, without one, why the drill is refused."""

    request: DrillRequest
    node: str = ""
    refusal: str = ""


@dataclass(slots=True)
class Drills:
    """Makes each request once."""

    made: dict[str, DrillOrder] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def tell(self) -> tuple[str, ...]:
        """What was made since the last call, as evidence of the interruption that it led to."""
        new = [o for o in self.made.values() if o.node and o.request.id not in self._told]
        self._told.update(o.request.id for o in new)
        return tuple(f"drill {o.request.id}: {o.request.kind} on {o.node}" for o in new)

    def next_order(
        self, request: DrillRequest | None, *, training: Sequence[str], own_node: str, last_step: int | None
    ) -> DrillOrder | None:
        """What is to be done about the request now; None: nothing, it was made or its step is not done yet."""
        if request is None or request.id in self.made or not training:
            return None
        if request.at_step is not None and (last_step is None or last_step < request.at_step):
            return None
        order = self.made[request.id] = choose_victim(request, training, own_node)
        return order


def choose_victim(request: DrillRequest, training: Sequence[str], own_node: str) -> DrillOrder:
    """The node of a drill: the one that was asked for, else the last one that trains and is not the launcher's."""
    if request.kind not in DRILL_KINDS:
        return DrillOrder(request=request, refusal=f"{request.kind!r} is none of {', '.join(DRILL_KINDS)}")
    if request.node:
        is_training = request.node in training
        return DrillOrder(
            request=request,
            node=request.node if is_training else "",
            refusal="" if is_training else f"{request.node} does not train",
        )
    others = [node for node in training if node != own_node]
    if others:
        return DrillOrder(request=request, node=others[-1])
    if request.kind in ("process", "hang"):
        return DrillOrder(request=request, node=training[-1])
    return DrillOrder(request=request, refusal=f"no node but the launcher's own, {own_node}, trains")
