"""Where a node stands among those that train. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.beats import ChannelError, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this node stands among those that train, as the launcher's go says."""

    rank: int
    nodes: int
    master_addr: str
    master_port: int
    rdzv_id: str


def parse_place(message: Message) -> Place:
    """The place in a go message. Raises ChannelError when it has none."""
    try:
        return Place(
            rank=int(message["rank"]),
            nodes=int(message["nodes"]),
            master_addr=str(message["master_addr"]),
            master_port=int(message["master_port"]),
            rdzv_id=str(message["rdzv_id"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelError(f"go without {error}") from None
