"""The nodes of the step as the launcher reaches them: srun, the beat channel, their slurmds' ports; who is lost."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer import contract
from trainer.beats import BeatEvent, BeatServer, Message
from trainer.contract import ENV_AGENT_LOG, AttemptSpec
from trainer.launching.clock import JUST_S, OwnClock
from trainer.launching.limits import POLL_S, Limits
from trainer.launching.nodes import Node
from trainer.launching.ports import PortWatch
from trainer.launching.relay import relayed
from trainer.launching.silence import Loss, Patience, Signs, judge_loss
from trainer.step import Step, parse_srun_line, srun_command, step_environment
from trainer.verdict import NodeEnd

PYTHON = (sys.executable, *(["-P"] if sys.flags.safe_path else []))
MAX_RESPAWNS = 3  # of an agent on the same node
RESPAWNED = ("agent_killed", "node_frozen")  # losses after which the node's kernel and slurmd still answer


class Fleet:
    """All nodes of the allocation. Single-threaded but for the ports' watch and srun's output."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        nodes: Sequence[str],
        own_node: str,
        own_address: str,
        environment: Mapping[str, str],
        agent: Sequence[str],
        limits: Limits,
        clock: OwnClock,
        ports: PortWatch,
        agent_log: str,
    ) -> None:
        self.nodes = {name: Node(name) for name in nodes}
        self.own_node = own_node
        secret = secrets.token_hex(16)
        self.server = BeatServer(secret=secret, nodes=frozenset(nodes))
        self.silent_since: dict[str, float] = {}
        self.started_at = clock.now()
        self._spec = spec
        self._agent = agent
        self._given = environment
        self._environment = {
            **step_environment(environment),
            contract.ENV_LAUNCHER: f"{own_address}:{self.server.port}",
            contract.ENV_LAUNCHER_SECRET: secret,
        }
        self._limits = limits
        self._clock = clock
        self._ports = ports
        self._agent_log = agent_log
        self._patience = Patience(
            suspect_s=spec.suspect_after_s, liveness_s=spec.liveness_timeout_s, closed_s=limits.closed_s
        )
        self.steps: list[Step] = []  # the first one is every node's, the others are of new agents
        self._respawns: dict[str, Step] = {}
        self._ends_seen: set[tuple[int, str]] = set()
        self._ended_at: float | None = None

    # ---- starting and reaching agents

    def start_step(self) -> None:
        """Start an agent on every node. Raises OSError."""
        self._ports.start()
        relay = next((name for name in self.nodes if name != self.own_node), None) if self._agent_log else None
        self._start_agents(list(self.nodes), relay=relay)

    def release_srun(self) -> None:
        """Once every agent has said hello, or is late: the srun that has started them is not needed any more."""
        step = self.steps[0] if self.steps else None
        if step is not None and not step.is_released:
            is_late = self._clock.now() - self.started_at > self._limits.connect_s
            if is_late or all(node.connected_at is not None for node in self.nodes.values()):
                step.release()

    def respawn(self, name: str) -> bool:
        """Start a new agent on a node whose agent was killed or is frozen; False: it has had its share.

        The new one kills what is left there of the old one, and its ranks.
        """
        node = self.nodes[name]
        if self.is_coming(name):
            return True
        if node.respawns >= MAX_RESPAWNS:
            return False
        node.respawns += 1
        try:
            self._start_agents([name])
        except OSError:
            return False
        node.respawned_at = self._clock.now()
        node.coming_until = node.respawned_at + self._limits.respawn_s
        self._respawns[name] = self.steps[-1]
        return True

    def is_coming(self, name: str) -> bool:
        """True while a new agent may still report from the node."""
        coming_until, step = self.nodes[name].coming_until, self._respawns.get(name)
        if coming_until is None or step is None:
            return False
        return self._clock.now() < coming_until and step.exit_code() is None

    def may_return(self, name: str) -> bool:
        """True while it is open whether the node is gone: its connection just closed, or it is back and not yet heard.

        Whoever is stopped for a while, or has lost its agent, is so at first. `find_losses` ends it.
        """
        node = self.nodes[name]
        if node.connected_at is None:
            return False
        if not self.server.is_connected(name):
            return not node.lost
        return bool(node.lost) and self._clock.now() - node.back_at < self._limits.return_s

    def is_unfenced(self, name: str) -> bool:
        """True while a new agent on a node that answers is about to say that no older rank is left there."""
        node = self.nodes[name]
        is_young = self._clock.now() - node.respawned_at < self._limits.fence_s
        return node.lost in RESPAWNED and is_young and self.is_coming(name)

    def _start_agents(self, names: Sequence[str], *, relay: str | None = None) -> None:
        command = srun_command(names, self._agent, self._given, self._spec.srun_options)
        environment = self._environment
        if relay is not None:
            command = relayed(command, relay, PYTHON)
            environment = {**environment, ENV_AGENT_LOG: self._agent_log}
        self.steps.append(Step(command, environment, is_relayed=relay is not None))

    def is_here(self, name: str) -> bool:
        """True when the node's agent can be told something, as far as is known."""
        return self.server.is_connected(name) and not self.nodes[name].lost

    def send(self, name: str, message: Message) -> None:
        """Tell a node; one without a connection is told its state when it is back."""
        self.server.send(name, message)

    def poll(self) -> list[BeatEvent]:
        """What happened, with its marks on the nodes made."""
        events = self.server.poll(POLL_S)
        now = self._clock.turn()
        for event in events:
            node = self.nodes[event.node]
            if event.kind == "closed":
                node.closed_at = now
                continue
            node.beat_at = now
            if event.kind == "connected":
                node.closed_at, node.is_told_dead, node.coming_until = None, False, None
                node.back_at = now
                node.has_left_word = False
                node.address = event.address
        return events

    # ---- srun

    def srun_ends(self) -> list[NodeEnd]:
        """Ends of agents that srun tells of for the first time."""
        found: list[NodeEnd] = []
        for number, step in enumerate(self.steps):
            for line in step.lines:
                if (number, line) not in self._ends_seen:
                    self._ends_seen.add((number, line))
                    found += [end for end in parse_srun_line(line) if end.node in self.nodes]
        return found

    def is_srun_gone(self) -> bool:
        """True when every srun has ended, and the last words of the agents had their time."""
        if not self.steps or any(step.exit_code() is None for step in self.steps):
            return False
        now = self._clock.now()
        self._ended_at = now if self._ended_at is None else self._ended_at
        is_anyone_left = any(self.server.is_connected(name) for name in self.nodes)
        if is_anyone_left and any(step.is_released for step in self.steps):
            return False
        return now - self._ended_at > (self._limits.step_end_s if is_anyone_left else POLL_S)

    def is_over(self) -> bool:
        """True when no srun is left, nor an agent that can be told something."""
        is_anyone_left = any(self.is_here(name) for name in self.nodes)
        return not is_anyone_left and all(step.exit_code() is not None for step in self.steps)

    def stop_srun(self) -> None:
        """End by force what is left of srun."""
        for step in self.steps:
            step.stop()
        self.server.close()

    # ---- silence

    def age_s(self, name: str) -> float:
        """Seconds since the node was heard, or since the start."""
        heard_at = self.nodes[name].beat_at
        return self._clock.now() - (self.started_at if heard_at is None else heard_at)

    def is_wavering(self, name: str) -> bool:
        """Neither surely alive nor surely silent: the next second decides."""
        return name not in self.silent_since and self.age_s(name) > self._spec.suspect_after_s / 2

    def quiet(self) -> list[str]:
        """Nodes that begin to be quiet, or are."""
        return [name for name in self.nodes if self.age_s(name) > self._spec.suspect_after_s / 2]

    def mark_silence(self) -> None:
        """Note who is silent now, and have their ports asked."""
        now = self._clock.now()
        for name, node in self.nodes.items():
            is_awaited = node.connected_at is not None and node.end is None
            if is_awaited and self.age_s(name) > self._spec.suspect_after_s:
                self.silent_since.setdefault(name, now)
            else:
                self.silent_since.pop(name, None)

    def find_losses(self, *, is_urgent: bool) -> list[Loss]:
        """Nodes that are lost since the last look. `is_urgent`: all wait for it, and others can take its place."""
        self._patience = replace(
            self._patience,
            liveness_s=self._spec.suspect_after_s if is_urgent else self._spec.liveness_timeout_s,
            closed_s=JUST_S if self._clock.has_just_woken() else self._limits.closed_s,
        )
        doubted = [node for node in self.nodes.values() if self._is_doubted(node)]
        beside = self._find_reference(doubted)
        self._ports.watch([node.name for node in doubted], beside=beside)
        losses = [self._judge(node, beside) for node in doubted]
        return [self._mark_lost(loss) for loss in losses if loss is not None]

    def _is_doubted(self, node: Node) -> bool:
        if node.connected_at is None or node.lost:
            return False
        return node.closed_at is not None or self.age_s(node.name) > self._spec.suspect_after_s / 2

    def _find_reference(self, doubted: Sequence[Node]) -> str | None:
        """A node that beats, on another host than this one if there is any."""
        names = {node.name for node in doubted}
        sound = [n for n in self.nodes if n not in names and self.is_here(n) and self._ports.knows(n)]
        return next((n for n in sound if n != self.own_node), sound[0] if sound else None)

    def _judge(self, node: Node, beside: str | None) -> Loss | None:
        signs = Signs(
            node=node.name,
            age_s=self.age_s(node.name),
            closed_s=None if node.closed_at is None else self._clock.now() - node.closed_at,
            is_told_dead=node.is_told_dead,
            has_left_word=node.has_left_word,
            answers=self._ports.answers(node.name),
            others_answer=None if beside is None else self._ports.answers(beside),
        )
        return judge_loss(signs, self._patience)

    def _mark_lost(self, loss: Loss) -> Loss:
        node = self.nodes[loss.node]
        node.lost, node.lost_at, node.state = loss.kind, self._clock.now(), "lost"
        node.blamed += loss.is_blamed
        return loss
