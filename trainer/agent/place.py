"""Where a node stands among those that train, in which start of the training, and from which checkpoint. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.beats import ChannelError, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the launcher's go says to one node."""

    launch: int  # number of this start of the training within the attempt, from 0
    rank: int
    nodes: int
    master_addr: str
    master_port: int
    rdzv_id: str
    resume_from: str = ""
    resume_step: int = 0


def parse_place(message: Message) -> Place:
    """The place in a go message. Raises ChannelError when it has none."""
    try:
        return Place(
            launch=int(message["launch"]),
            rank=int(message["rank"]),
            nodes=int(message["nodes"]),
            master_addr=str(message["master_addr"]),
            master_port=int(message["master_port"]),
            rdzv_id=str(message["rdzv_id"]),
            resume_from=str(message["resume_from"]),
            resume_step=int(message["resume_step"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelError(f"go without {error}") from None
