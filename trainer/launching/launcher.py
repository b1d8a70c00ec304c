"""One attempt on its nodes, from srun to the exit record: the loop that acts. Monotonic clock only."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.beats import BeatEvent, Message
from trainer.contract import EXIT_NODE_SILENT, AttemptSpec, ExitRecord, Outcome, RunPaths
from trainer.launching.clock import OwnClock
from trainer.launching.course import EXIT_TERMINATED, FINAL_CODES, choose_fewer, find_failure, is_final
from trainer.launching.drills import Drills
from trainer.launching.fleet import Fleet
from trainer.launching.hangs import Hang
from trainer.launching.interruptions import Finding, Interruption, finding_of, record_of
from trainer.launching.limits import POLL_S, Limits
from trainer.launching.nodes import Node
from trainer.launching.ports import PortWatch
from trainer.launching.recovering import Recovery
from trainer.launching.recovery import Start
from trainer.launching.reporting import Reporter
from trainer.launching.requests import Requests
from trainer.launching.resume import ResumePoint
from trainer.launching.streak import Streak
from trainer.launching.training import Training
from trainer.launching.watched import WatchedFiles, ask_within
from trainer.launching.watches import Watches
from trainer.launching.writer import Writer, read_outcome
from trainer.step import find_blamed_node
from trainer.verdict import (
    EXIT_MISCONFIGURED,
    EXIT_NOT_STARTED,
    Candidate,
    Go,
    NodeEnd,
    Verdict,
    choose_nodes,
    describe_failed_check,
    judge_ends,
)

LOSS_EVENTS = {"node_lost": "node.lost", "node_frozen": "node.frozen", "agent_killed": "agent.killed"}
OUTCOME_LIMIT_S = 1.0  # for the file system to say how the training says that it ended


class Launcher:
    """One attempt, from srun to the exit record."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        attempt_dir: Path,
        nodes: Sequence[str],
        own_node: str,
        own_address: str,
        job_id: int,
        environment: Mapping[str, str],
        agent: Sequence[str],
        limits: Limits,
        ports: PortWatch,
        agent_log: str = "",
    ) -> None:
        self._spec = spec
        self._attempt_dir = attempt_dir
        self._own_node = own_node
        self._job_id = job_id
        self._limits = limits
        self._clock = OwnClock()
        self._fleet = Fleet(
            spec=spec,
            nodes=nodes,
            own_node=own_node,
            own_address=own_address,
            environment=environment,
            agent=(*agent, str(attempt_dir)),
            limits=limits,
            clock=self._clock,
            ports=ports,
            agent_log=agent_log,
        )
        self._nodes = self._fleet.nodes
        self._writer = Writer(attempt_dir)
        self._files = WatchedFiles(attempt_dir.parent.parent, spec)
        self._requests = Requests(self._fleet)
        self._reporter = Reporter(spec=spec, job_id=job_id, own_node=own_node, fleet=self._fleet, writer=self._writer)
        self._drills = Drills()
        self._watches = Watches(spec)
        self._enough_at: float | None = None
        self._training: Training | None = None
        self._recovery: Recovery | None = None
        self._interruptions: list[Interruption] = []
        self._streak = Streak()
        self._hang: Hang | None = None
        self._outcome_asked: tuple[int, Outcome | None] = (-1, None)
        self._turned_at = 0.0

    def run(self) -> int:
        """Run the attempt to its end and return the job's exit code."""
        self._requests.install()
        self._writer.start()
        self._files.start()
        self._note("launch.started")
        self._report()
        verdict = self._start_step()
        while verdict is None:
            verdict = self._cycle()
        return self._conclude(verdict)

    def _cycle(self) -> Verdict | None:
        is_news = self._turn()
        if not is_news and self._clock.now() - self._turned_at < POLL_S:
            return None  # nothing but beats
        self._turned_at = self._clock.now()
        verdict = self._requests.verdict(self._fleet.silent_since) or self._look_for_silence() or self._decide()
        self._report()
        return verdict

    def _turn(self) -> bool:
        """Take what came; True when there was more than beats."""
        events = self._fleet.poll()
        for event in events:
            self._take(event)
        is_news = any(event.kind != "message" or event.message["type"] != "beat" for event in events)
        for number in self._requests.take():
            is_news = True
            self._note("save.requested" if number else "signal.received")
        if is_news or self._clock.now() - self._turned_at >= POLL_S:
            self._fleet.mark_silence()
            for end in self._fleet.srun_ends():
                self._take_srun_end(end)
        return is_news

    def _decide(self) -> Verdict | None:
        self._fleet.release_srun()
        if self._spec.in_job:
            self._look_for_losses()
            self._follow_interruptions()
        if self._recovery is not None:
            return self._recover(self._recovery)
        if self._training is None:
            return self._decide_start()
        if self._spec.in_job:
            self._make_drill(self._training)
        return self._look_at_training(self._training)

    # ---- the first start

    def _start_step(self) -> Verdict | None:
        try:
            self._fleet.start_step()
        except OSError as error:
            return Verdict(exit_code=EXIT_MISCONFIGURED, reason=f"srun could not be started: {error}")
        self._reporter.phase = "checking"
        self._note("step.started")
        return None

    def _decide_start(self) -> Verdict | None:
        now = self._clock.now()
        candidates = [
            Candidate(
                node=n.name,
                is_connected=n.connected_at is not None,
                is_checked=n.is_checked,
                is_silent=n.name in self._fleet.silent_since or bool(n.lost),
                failed=n.failed or (n.end.reason if n.end else ""),
                exit_code=n.end.exit_code if n.end else None,
            )
            for n in self._nodes.values()
        ]
        healthy = [c.node for c in candidates if c.is_checked and not c.failed and not c.is_silent]
        if len(healthy) >= self._spec.nodes and self._enough_at is None:
            self._enough_at = now
        choice = choose_nodes(
            candidates,
            self._spec.nodes,
            may_wait_for_spares=self._enough_at is None or now - self._enough_at < self._limits.spare_grace_s,
            is_too_late=self._is_start_late(now),
        )
        if isinstance(choice, Verdict):
            choice = choose_fewer(choice, candidates, self._spec, is_too_late=self._is_start_late(now))
        if isinstance(choice, Go):
            self._begin(choice.nodes, ResumePoint(path=self._spec.resume_from, step=self._spec.resume_step))
            return None
        if choice is None and self._fleet.is_srun_gone():
            return self._judge_failed_start()
        return choice

    def _is_start_late(self, now: float) -> bool:
        connected = [n.connected_at for n in self._nodes.values() if n.connected_at is not None]
        if now - self._fleet.started_at > self._limits.connect_s and len(connected) < len(self._nodes):
            return True
        limit_s = self._spec.start_checks_timeout_s + self._limits.checks_margin_s
        return len(connected) == len(self._nodes) and now - max(connected) > limit_s

    def _judge_failed_start(self) -> Verdict:
        lines = [line for step in self._fleet.steps for line in step.lines]
        node = find_blamed_node(lines, list(self._nodes))
        code = EXIT_NODE_SILENT if node else EXIT_NOT_STARTED
        said = lines[0] if lines else "it said nothing"
        return Verdict(exit_code=code, reason=f"the training step did not start; {said}", node=node)

    # ---- each start

    def _begin(self, nodes: tuple[str, ...], point: ResumePoint) -> None:
        launch = 0 if self._training is None else self._training.launch + 1
        now = self._clock.now()
        self._training = Training(launch, nodes, point, now)
        self._recovery = None
        self._outcome_asked = (-1, None)
        self._reporter.begin(self._training)
        for name in nodes:
            node = self._nodes[name]
            node.end, node.is_port_taken = None, False
        self._watches.begin(self._training, self._spec.procs_per_node, now)
        self._note("go.sent")
        for name in self._nodes:
            self._tell_place(name)

    def _tell_place(self, name: str) -> None:
        training, node = self._training, self._nodes[name]
        if training is None or node.end is not None or node.lost:
            return
        if name not in training.nodes:
            if not node.failed:
                self._fleet.send(name, {"type": "spare"})
            return
        is_held_back = self._spec.worker_start == "torchrun" and name != training.nodes[0] and not training.is_open
        if is_held_back:
            return
        master = self._nodes[training.nodes[0]]
        self._fleet.send(
            name,
            {
                "type": "go",
                "launch": training.launch,
                "rank": training.nodes.index(name),
                "nodes": len(training.nodes),
                "master_addr": master.address,
                "master_port": master.port,
                "rdzv_id": self._rdzv_id(training),
                "resume_from": training.point.path,
                "resume_step": training.point.step,
            },
        )

    def _rdzv_id(self, training: Training) -> str:
        return f"{self._job_id}.{self._spec.attempt}.{training.launch}"

    # ---- what the nodes say

    def _take(self, event: BeatEvent) -> None:
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
        if self._recovery is not None:
            self._recovery.tell(node.name)
        elif not node.lost:
            self._tell_place(node.name)
        self._requests.tell_all(node.name)

    def _take_new_agent(self, node: Node) -> None:
        """Nothing of what its predecessor said holds, and no rank of that one is left."""
        training = self._training
        if training is not None and node.name in training.nodes and not node.lost and self._recovery is None:
            node.lost, node.lost_at = "agent_killed", self._clock.now()
            finding = Finding(
                kind="agent_killed",
                cause=f"the agent on {node.name} was killed",
                exit_code=1,
                hint=node.name,
                evidence=(f"another agent reports from {node.name}",),
            )
            self._interrupt(training, finding)
        node.lost, node.failed, node.end, node.port = "", "", None, 0
        node.checked_for, node.stopped_for = -1, self._launch()

    def _take_back(self, node: Node, message: Message) -> None:
        """A node that was lost speaks: what it still runs is stopped before it may be used again."""
        if message["type"] == "stopped" and message.get("launch", self._launch()) >= self._launch():
            node.lost, node.state, node.checked_for = "", "ready", -1
            self._note("node.returned", node.name)
            if self._recovery is not None:
                self._recovery.tell(node.name)
        elif message["type"] == "beat":
            order = {"type": "stop", "launch": self._launch(), "grace_s": 0.0, "reason": "it was given up"}
            self._fleet.send(node.name, order)

    def _launch(self) -> int:
        return 0 if self._training is None else self._training.launch

    def _take_message(self, node: Node, message: Message) -> None:
        kind, training = message["type"], self._training
        launch = message.get("launch", self._launch())
        if kind == "beat":
            node.state = "lost" if node.lost else "ended" if node.end else str(message.get("state", node.state))[:20]
            if training is not None and launch == training.launch and self._recovery is None and not node.lost:
                training.feed(message.get("ranks"), self._clock.now())
                self._watches.feed(node.name, message.get("ranks"), self._clock.now())
        elif kind == "checked":
            self._take_checks(node, message, _integer(launch))
        elif kind == "listening" and training is not None and message.get("rdzv_id") == self._rdzv_id(training):
            training.is_open = True
            for name in training.nodes[1:]:
                self._tell_place(name)
        elif kind == "stopped":
            self._take_stopped(node, message, _integer(launch))
        elif kind == "evidence":
            node.evidence_for = max(node.evidence_for, _integer(launch))
        elif kind == "failed" and launch == self._launch() and not node.lost:
            self._take_failure(node, message)
        elif kind == "ended" and node.end is None and launch == self._launch() and not node.lost:
            self._take_end(node, message)
        elif kind == "event":
            self._take_event(node, message)

    def _take_checks(self, node: Node, message: Message, launch: int) -> None:
        recovery = self._recovery
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
        if launch < self._launch():
            return
        node.stopped_for = launch
        if left:
            node.failed = f"processes {left} survive SIGKILL"
        if self._recovery is not None:
            self._recovery.tell(node.name)
        elif not node.lost and self._training is not None and node.name not in self._training.nodes:
            self._tell_place(node.name)

    def _take_end(self, node: Node, message: Message) -> None:
        node.port = _integer(message.get("port")) or node.port
        node.is_terminated = message.get("terminated") is True
        node.is_port_taken = message.get("port_taken") is True
        is_killed = self._training is not None and self._training.killed_at is not None
        self._end_node(
            NodeEnd(
                node=node.name,
                exit_code=_integer(message.get("exit_code")),
                reason=str(message.get("reason", ""))[:500],
                is_victim=message.get("victim") is True or is_killed,
            )
        )

    def _take_failure(self, node: Node, message: Message) -> None:
        """A rank has failed; its node tells more once the others there are stopped. Seconds count, so begin."""
        training, code = self._training, _integer(message.get("exit_code"))
        if not self._spec.in_job or self._recovery is not None or training is None or code == 0:
            return
        if code in FINAL_CODES or self._outcome(training) is not None or self._is_step_terminated():
            return
        said = str(message.get("reason") or f"rank {message.get('rank')} ended with exit code {code}")
        cause = f"{node.name}: {said}"
        finding = Finding(kind="process", cause=cause[:500], exit_code=code, hint=node.name, is_weak=True)
        self._interrupt(training, finding)

    def _take_event(self, node: Node, message: Message) -> None:
        event, at = message.get("event"), message.get("time")
        if isinstance(event, str) and isinstance(at, float) and (event, at) not in node.events:
            node.events.add((event, at))
            self._note(event, node.name, at)

    def _end_node(self, end: NodeEnd) -> None:
        node, training = self._nodes[end.node], self._training
        node.end, node.state = end, "ended"
        if training is not None and end.node in training.nodes:
            training.ends.append(end)
            if end.exit_code != 0 and training.failed_at is None:
                training.failed_at = self._clock.now()
        self._note("node.ended", end.node)

    def _take_srun_end(self, end: NodeEnd) -> None:
        node = self._nodes[end.node]
        if node.end is not None or self._fleet.server.is_connected(end.node):
            return  # connected: its own word is on the way, and says more
        if self._spec.in_job and self._training is not None:
            node.is_told_dead = True
        else:
            self._end_node(end)

    # ---- interruptions

    def _look_for_losses(self) -> None:
        training = self._training
        is_urgent = self._recovery is not None and self._recovery.is_urgent()
        for loss in self._fleet.find_losses(is_urgent=is_urgent):
            self._note(LOSS_EVENTS[loss.kind], loss.node)
            finding = finding_of(loss, EXIT_NODE_SILENT)
            if self._recovery is not None and training is not None and loss.node in training.nodes:
                self._recovery.interruption.add(finding, instead=self._recovery.finding.is_weak)
            elif training is not None and loss.node in training.nodes and self._nodes[loss.node].end is None:
                self._interrupt(training, finding)
                continue
            if loss.kind == "agent_killed":
                self._fleet.respawn(loss.node)

    def _interrupt(self, training: Training, finding: Finding) -> None:
        """Begin to recover from what was found."""
        drills = [f"drill {o.request.id}: {o.request.kind} on {o.node}" for o in self._drills.made.values() if o.node]
        if drills:
            finding = replace(finding, evidence=(*finding.evidence, *drills))
        record = record_of(finding, attempt=self._spec.attempt, launch=training.launch, last_step=training.last_step)
        now = self._clock.now()
        interruption = Interruption(record, now)
        self._interruptions.append(interruption)
        self._reporter.recover(finding.cause)
        self._note("training.interrupted")
        print(f"trainer.launch: start {training.launch} is interrupted: {finding.cause}", file=sys.stderr, flush=True)
        self._recovery = Recovery(
            finding=finding,
            interruption=interruption,
            training=training,
            streak=self._streak,
            spec=self._spec,
            attempt_dir=self._attempt_dir,
            fleet=self._fleet,
            files=self._files,
            limits=self._limits,
            now=now,
            hang=self._hang,
            settle=self._watches.settle,
            judge_stop=lambda: self._judge_stop(training, interruption),
        )
        self._writer.record(interruption.record)

    def _judge_stop(self, training: Training, interruption: Interruption) -> Verdict | None:
        """All ranks are stopped: did one of them mean to end, and who failed first?"""
        self._outcome_asked = (-1, None)
        if is_final(training.ends, self._nodes.values(), self._outcome(training)):
            return self._judge_ends(training)
        recovery = self._recovery
        if recovery is not None and recovery.finding.is_weak and interruption.record.kind == recovery.finding.kind:
            better = find_failure(training, self._nodes)
            if better is not None and not better.is_weak:
                interruption.add(better, instead=True)
        return None

    def _recover(self, recovery: Recovery) -> Verdict | None:
        move = recovery.cycle(self._clock.now())
        if isinstance(move, Verdict):
            self._writer.record(recovery.interruption.record)
            return move
        if isinstance(move, Start):
            self._streak = recovery.streak
            recovery.interruption.amend(training=move.nodes, resume_step=recovery.point.step)
            self._begin(move.nodes, recovery.point)
            self._writer.record(recovery.interruption.record)
        return None

    def _follow_interruptions(self) -> None:
        """The first new step, and a node's own word of a cut cable: both are told in the record, late as they come."""
        now = self._clock.now()
        if self._training is not None and self._recovery is None:
            if self._files.progress is not None:
                self._training.feed_progress(self._files.progress, now)
                self._watches.feed_progress(self._files.progress, now)
            if self._interruptions and self._interruptions[-1].follow(self._training):
                self._reporter.why = ""
                self._note("training.resumed")
                self._writer.record(self._interruptions[-1].record)
        awaited = {n.name for n in self._nodes.values() if n.lost and now - n.lost_at < self._limits.cut_off_s}
        self._files.awaited = frozenset(awaited)
        for word in self._files.take_words():
            for interruption in reversed(self._interruptions):
                if interruption.take_word(word):
                    self._writer.record(interruption.record)
                    break

    # ---- the course of a start

    def _look_at_training(self, training: Training) -> Verdict | None:
        now = self._clock.now()
        begun = training.nodes if self._all_may_come(training) else training.nodes[:1]
        open_nodes = [n for n in begun if self._nodes[n].end is None and not self._nodes[n].lost]
        if self._spec.in_job:
            finding = self._find_interruption(training, now)
            if finding is not None:
                self._interrupt(training, finding)
                return None
        if not open_nodes:
            return self._judge_ends(training)
        if not self._spec.in_job and self._fleet.is_srun_gone():
            return self._judge_ends(training)
        if training.failed_at is None:
            return None
        silent = [name for name in open_nodes if name in self._fleet.silent_since]
        if silent and not any(self._fleet.is_wavering(name) for name in open_nodes):
            # its peers fail because of it: they are the victims, whoever reported first
            return self._judge_silence(silent)
        if training.killed_at is None and now - training.failed_at > self._limits.peer_grace_s:
            training.killed_at = now
            for name in open_nodes:
                self._fleet.send(name, {"type": "kill", "reason": "another node failed"})
        if training.killed_at is not None and now - training.killed_at > self._limits.kill_s:
            return self._judge_ends(training)
        return None

    def _all_may_come(self, training: Training) -> bool:
        return training.is_open or self._spec.worker_start != "torchrun"

    def _find_interruption(self, training: Training, now: float) -> Finding | None:
        if training.failed_at is not None:
            is_meant = is_final(training.ends, self._nodes.values(), self._outcome(training))
            return None if is_meant else find_failure(training, self._nodes)
        if any(self._nodes[name].lost for name in training.nodes):
            return None  # told by the loss itself
        judged, self._reporter.stragglers = self._watches.judge(
            now,
            saved_step=self._files.progress.saved_step if self._files.progress else None,
            has_spare=any(name not in training.nodes and self._is_ready(name) for name in self._nodes),
        )
        self._hang = judged.hang
        if judged.wants_evidence:
            folder = str(RunPaths(self._attempt_dir.parent.parent).evidence(self._spec.attempt, training.launch))
            for name in training.nodes:
                self._fleet.send(name, {"type": "evidence", "launch": training.launch, "dir": folder})
        return judged.finding

    def _is_ready(self, name: str) -> bool:
        node = self._nodes[name]
        return self._fleet.is_here(name) and node.is_checked and not node.failed and not node.banned

    def _make_drill(self, training: Training) -> None:
        advice = self._files.advice
        order = self._drills.next_order(
            advice.drill if advice is not None else None,
            training=training.nodes,
            own_node=self._own_node,
            last_step=training.last_step,
        )
        if order is None:
            return
        if order.node:
            self._note(f"drill.sent {order.request.id} {order.request.kind}", order.node)
            self._fleet.send(order.node, {"type": "drill", "id": order.request.id, "kind": order.request.kind})
        else:
            self._note(f"drill.refused {order.request.id}: {order.refusal}")

    def _judge_ends(self, training: Training) -> Verdict:
        alive = [name for name in training.nodes if self._fleet.is_here(name)]
        verdict = judge_ends(training.ends, training.nodes, alive, self._outcome(training))
        if verdict.exit_code == 0 and training.last_step is None:
            return replace(verdict, reason=f"finished {self._clock.now() - training.began_at:.1f} s after its start")
        return verdict

    def _outcome(self, training: Training) -> Outcome | None:
        """The training's own word, asked for anew when one more node has ended."""
        if self._outcome_asked[0] != len(training.ends):
            path = self._attempt_dir / "outcome.json"
            found = ask_within(OUTCOME_LIMIT_S, lambda: read_outcome(path, self._spec.attempt))
            self._outcome_asked = (len(training.ends), found)
        return self._outcome_asked[1]

    def _judge_silence(self, silent: Sequence[str]) -> Verdict:
        first = min(silent, key=lambda name: self._fleet.silent_since[name])
        reason = f"no beat from {', '.join(silent)} for more than {self._spec.suspect_after_s:g} s"
        return Verdict(exit_code=EXIT_NODE_SILENT, reason=reason, node=first)

    def _look_for_silence(self) -> Verdict | None:
        """Without starts inside the allocation: a silent node that nobody acted upon, an agent that was killed.

        srun tells of a killed agent only when the last process that it left has ended. A kernel that closes a
        connection is alive, so this is no silent node; one that goes down closes them too, and is given the time in
        which the service finds it silent.
        """
        if self._spec.in_job and self._training is not None:
            return None
        now = self._clock.now()
        for node in self._nodes.values():
            limit_s = 2 * self._spec.suspect_after_s
            if node.end is None and node.closed_at is not None and now - node.closed_at > limit_s:
                self._end_node(NodeEnd(node=node.name, exit_code=1, reason="its agent ended without a word"))
        if self._training is None:
            return None
        silent = [name for name in self._training.nodes if name in self._fleet.silent_since]
        if any(now - self._fleet.silent_since[name] > self._limits.silent_s for name in silent):
            return self._judge_silence(silent)
        return None

    # ---- end

    def _conclude(self, verdict: Verdict) -> int:
        self._reporter.phase = "ending"
        self._report()
        self._stop_nodes(verdict)
        for name in self._nodes:
            self._fleet.send(name, {"type": "bye"})
        self._wait_for_srun()
        self._note("step.ended")
        self._writer.close(self._exit_record(verdict), 30.0)
        self._fleet.stop_srun()
        print(f"trainer.launch: exit {verdict.exit_code}: {verdict.reason}", file=sys.stderr, flush=True)
        return verdict.exit_code

    def _stop_nodes(self, verdict: Verdict) -> None:
        deadline = time.monotonic() + self._limits.kill_s
        told: set[str] = set()
        while time.monotonic() < deadline and not self._fleet.is_over():
            open_nodes = [
                name
                for name, node in self._nodes.items()
                if node.end is None and node.connected_at is not None and not self._is_gone(name)
                if self._training is None or node.stopped_for < self._training.launch
            ]
            if not open_nodes:
                return
            for name in open_nodes:
                if name not in told and self._fleet.server.is_connected(name):
                    told.add(name)
                    is_spare = self._training is not None and name not in self._training.nodes
                    code = 0 if is_spare else EXIT_TERMINATED
                    self._fleet.send(name, {"type": "kill", "exit_code": code, "reason": verdict.reason})
            self._turn()
            self._report()

    def _is_gone(self, name: str) -> bool:
        return name in self._fleet.silent_since or bool(self._nodes[name].lost)

    def _wait_for_srun(self) -> None:
        deadline = time.monotonic() + self._limits.step_end_s
        is_stuck = False
        while not self._fleet.is_over() and time.monotonic() < deadline:
            if not is_stuck and self._is_srun_stuck():
                is_stuck = True
                deadline = min(deadline, time.monotonic() + self._limits.last_word_s)
            self._turn()
            self._report()

    def _is_srun_stuck(self) -> bool:
        """True when it can only be waiting for nodes that are gone; Slurm ends what is left of them with the job."""
        is_anyone_left = any(self._fleet.server.is_connected(n) and not self._is_gone(n) for n in self._nodes)
        has_lost_nodes = any(self._is_gone(n) or node.connected_at is None for n, node in self._nodes.items())
        return has_lost_nodes and not is_anyone_left

    def _exit_record(self, verdict: Verdict) -> ExitRecord:
        last = self._interruptions[-1].record if self._recovery is not None and self._interruptions else None
        return ExitRecord(
            attempt=self._spec.attempt,
            job_id=self._job_id,
            exit_code=verdict.exit_code,
            reason=verdict.reason,
            node=verdict.node,
            time=time.time(),
            nodes={n.name: n.end.exit_code if n.end else None for n in self._nodes.values()},
            bad_nodes=tuple(dict.fromkeys((*verdict.bad_nodes, *(last.nodes if last else ())))),
            launches=self._launch() + 1,
            next=verdict.next,
            is_step_terminated=self._is_step_terminated() and not self._requests.is_terminated,
        )

    def _is_step_terminated(self) -> bool:
        return any(node.is_terminated for node in self._nodes.values())

    def _report(self) -> None:
        self._reporter.report(self._clock.now())

    def _note(self, event: str, node: str = "", at: float | None = None) -> None:
        self._writer.note(event, time.time() if at is None else at, node or self._own_node)


def _integer(value: object) -> int:
    return value if type(value) is int else 0
