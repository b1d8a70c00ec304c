"""What the launcher knows of each node of the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.verdict import NodeEnd


@dataclass(slots=True)
class Node:
    name: str
    state: str = "starting"
    address: str = ""
    connected_at: float | None = None
    beat_at: float | None = None
    closed_at: float | None = None  # its connection ended, and none has come in its place
    is_checked: bool = False
    failed: str = ""
    port: int = 0
    end: NodeEnd | None = None
    events: set[tuple[str, float]] = field(default_factory=set)
