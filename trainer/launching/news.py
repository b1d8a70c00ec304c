"""What the nodes say, and what it changes in what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trainer.beats import BeatEvent, Message
from trainer.contract import AttemptSpec, Outcome
from trainer.launching.clock import OwnClock
from trainer.launching.course import FINAL_CODES
from trainer.launching.fleet import Fleet
from trainer.launching.interruptions import Finding
from trainer.launching.nodes import Node
from trainer.launching.places import Places
from trainer.launching.requests import Requests
from trainer.launching.state import State
from trainer.launching.watches import Watches
from trainer.verdict import NodeEnd, describe_failed_check


class Note(Protocol):
    """Notes an event of a node in timing.jsonl."""

    def __call__(self, event: str, node: str = "", at: float | None = None) -> None: ...


class News:
    """Takes the nodes' messages. `interrupt` begins a recovery, `outcome` is the training's own word on its end."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        state: State,
        fleet: Fleet,
        places: Places,
        watches: Watches,
        requests: Requests,
        clock: OwnClock,
        note: Note,
        interrupt: Callable[[Finding], None],
        outcome: Callable[[], Outcome | None],
    ) -> None:
        self._spec = spec
        self._state = state
        self._fleet = fleet
        self._nodes = fleet.nodes
        self._places = places
        self._watches = watches
        self._requests = requests
        self._clock = clock
        self._note = note
        self._interrupt = interrupt
        self._outcome = outcome

    def take(self, event: BeatEvent) -> None:
        """One thing that happened on the beat channel."""
        node = self._nodes[event.node]
        if event.kind == "connected":
            self._welcome(node, event.message)
        elif event.kind == "message":
            if node.lost and event.message["type"] != "event":
                self._take_back(node, event.message)
            self._take_message(node, event.message)

    def _welcome(self, node: Node, hello: Message) -> None:
        agent = str(hello.get("agent") or hello.get("pid"))
        if node.connected_at is None:
            node.connected_at = node.beat_at
            self._note("node.connected", node.name)
        elif agent != node.agent:
            self._note("agent.restarted", node.name)
            self._take_new_agent(node)
        node.agent = agent
        if self._state.recovery is not None:
            self._state.recovery.tell(node.name)
        elif not node.lost:
            self._places.tell(node.name)
        self._requests.tell_all(node.name)

    def _take_new_agent(self, node: Node) -> None:
        """Nothing of what its predecessor said holds, and no rank of that one is left."""
        training = self._state.training
        if training is not None and node.name in training.nodes and not node.lost and self._state.recovery is None:
            node.lost, node.lost_at = "agent_killed", self._clock.now()
            finding = Finding(
                kind="agent_killed",
                cause=f"the agent on {node.name} was killed",
                exit_code=1,
                hint=node.name,
                evidence=(f"another agent reports from {node.name}",),
            )
            self._interrupt(finding)
        node.lost, node.failed, node.end, node.port = "", "", None, 0
        node.checked_for, node.stopped_for = -1, self._state.launch

    def _take_back(self, node: Node, message: Message) -> None:
        """A node that was lost speaks: what it still runs is stopped before it may be used again."""
        if message["type"] == "stopped" and message.get("launch", self._state.launch) >= self._state.launch:
            node.lost, node.state, node.checked_for = "", "ready", -1
            self._note("node.returned", node.name)
            if self._state.recovery is not None:
                self._state.recovery.tell(node.name)
        elif message["type"] == "beat":
            order = {"type": "stop", "launch": self._state.launch, "grace_s": 0.0, "reason": "it was given up"}
            self._fleet.send(node.name, order)

    def _take_message(self, node: Node, message: Message) -> None:
        kind, training = message["type"], self._state.training
        launch = message.get("launch", self._state.launch)
        if kind == "beat":
            node.state = "lost" if node.lost else "ended" if node.end else str(message.get("state", node.state))[:20]
            if training is not None and launch == training.launch and self._state.recovery is None and not node.lost:
                training.feed(message.get("ranks"), self._clock.now())
                self._watches.feed(node.name, message.get("ranks"), self._clock.now())
        elif kind == "checked":
            self._take_checks(node, message, _integer(launch))
        elif kind == "listening" and training is not None and message.get("rdzv_id") == self._places.rdzv_id(training):
            training.is_open = True
            for name in training.nodes[1:]:
                self._places.tell(name)
        elif kind == "stopped":
            self._take_stopped(node, message, _integer(launch))
        elif kind == "evidence":
            node.evidence_for = max(node.evidence_for, _integer(launch))
        elif kind == "failed" and launch == self._state.launch and not node.lost:
            self._take_failure(node, message)
        elif kind == "ended" and node.end is None and launch == self._state.launch and not node.lost:
            self._take_end(node, message)
        elif kind == "event":
            self._take_event(node, message)

    def _take_checks(self, node: Node, message: Message, launch: int) -> None:
        recovery = self._state.recovery
        is_first = not node.is_checked or node.checked_for < 0
        if not is_first and (recovery is None or launch < recovery.round or node.checked_for >= recovery.round):
            return
        node.failed = describe_failed_check(message)
        node.port = _integer(message.get("port")) or node.port
        node.is_checked = True
        node.checked_for = launch if recovery is None else recovery.round
        self._note("checks.finished", node.name)
        if node.failed and recovery is not None:
            failed = f"{node.name}: {node.failed}"
            finding = Finding(
                kind="check_failed",
                cause=f"{node.name} failed its checks",
                exit_code=1,
                nodes=(node.name,),
                evidence=(failed,),
            )
            recovery.interruption.add(finding, instead=False)

    def _take_stopped(self, node: Node, message: Message, launch: int) -> None:
        node.port = _integer(message.get("port")) or node.port
        left = message.get("left")
        if launch < self._state.launch:
            return
        node.stopped_for = launch
        if left:
            node.failed = f"processes {left} survive SIGKILL"
        if self._state.recovery is not None:
            self._state.recovery.tell(node.name)
        elif not node.lost and self._state.training is not None and node.name not in self._state.training.nodes:
            self._places.tell(node.name)

    def _take_end(self, node: Node, message: Message) -> None:
        node.port = _integer(message.get("port")) or node.port
        node.is_terminated = message.get("terminated") is True
        node.cut_s = _seconds(message.get("cut_s"))
        node.is_port_taken = message.get("port_taken") is True
        is_killed = self._state.training is not None and self._state.training.killed_at is not None
        self.end_node(
            NodeEnd(
                node=node.name,
                exit_code=_integer(message.get("exit_code")),
                reason=str(message.get("reason", ""))[:500],
                is_victim=message.get("victim") is True or is_killed,
            )
        )

    def _take_failure(self, node: Node, message: Message) -> None:
        """A rank has failed; its node tells more once the others there are stopped. Seconds count, so begin."""
        training, code = self._state.training, _integer(message.get("exit_code"))
        if not self._spec.in_job or self._state.recovery is not None or training is None or code == 0:
            return
        if code in FINAL_CODES or self._outcome() is not None or any(n.is_terminated for n in self._nodes.values()):
            return
        said = str(message.get("reason") or f"rank {message.get('rank')} ended with exit code {code}")
        cause = f"{node.name}: {said}"
        finding = Finding(kind="process", cause=cause[:500], exit_code=code, hint=node.name, is_weak=True)
        self._interrupt(finding)

    def _take_event(self, node: Node, message: Message) -> None:
        event, at = message.get("event"), message.get("time")
        if isinstance(event, str) and isinstance(at, float) and (event, at) not in node.events:
            node.events.add((event, at))
            self._note(event, node.name, at)

    def end_node(self, end: NodeEnd) -> None:
        """All ranks of a node have ended, or its agent before the first start."""
        node, training = self._nodes[end.node], self._state.training
        node.end, node.state = end, "ended"
        if training is not None and end.node in training.nodes:
            training.ends.append(end)
            if end.exit_code != 0 and training.failed_at is None:
                training.failed_at = self._clock.now()
        self._note("node.ended", end.node)

    def take_srun_end(self, end: NodeEnd) -> None:
        """An agent's end, as srun tells of it."""
        node = self._nodes[end.node]
        if node.end is not None or self._fleet.server.is_connected(end.node):
            return  # connected: its own word is on the way, and says more
        if self._spec.in_job and self._state.training is not None:
            node.is_told_dead = True
        else:
            self.end_node(end)


def _integer(value: object) -> int:
    return value if type(value) is int else 0


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
