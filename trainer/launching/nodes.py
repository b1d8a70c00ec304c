"""What the launcher knows of each node of the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.verdict import NodeEnd


@dataclass(slots=True)
class Node:
    """One node of the allocation. Instants are of the launcher's own clock; numbers of starts are -1 while none."""

    name: str
    state: str = "starting"
    address: str = ""
    agent: str = ""  # which process of ours is there: another one begins anew
    connected_at: float | None = None  # for the first time
    beat_at: float | None = None
    closed_at: float | None = None  # its connection ended, and none has come in its place
    is_told_dead: bool = False  # srun said that its agent ended
    has_left_word: bool = False  # where others can read it: that it lives and can't reach us
    is_checked: bool = False  # at all
    checked_for: int = -1  # number of the start before which it was checked last
    failed: str = ""  # why it can't train, by its checks or because its ranks could not be stopped
    banned: str = ""  # why it is not used again, by evidence of what it does to the training
    port: int = 0  # for rank 0's rendezvous, should it be rank 0: another one for each start
    end: NodeEnd | None = None  # of its ranks in the current start, or of its agent before the first
    is_terminated: bool = False  # it got SIGTERM, from Slurm
    cut_s: float = 0.0  # for so long had it not reached us when it stopped its ranks by itself
    is_port_taken: bool = False
    stopped_for: int = -1  # number of the start whose ranks are stopped there for certain
    evidence_for: int = -1  # number of the start of which it has collected the evidence
    lost: str = ""  # kind of its loss, while it is lost
    lost_at: float = 0.0
    blamed: int = 0  # how often a loss spoke against it
    respawns: int = 0
    respawned_at: float = float("-inf")
    back_at: float = float("-inf")  # its newest connection
    coming_until: float | None = None  # a new agent is being started there
    events: set[tuple[str, float]] = field(default_factory=set)
