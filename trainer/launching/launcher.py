"""One attempt on its nodes, from srun to the exit record: the loop that acts. Monotonic clock only."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.contract import EXIT_NODE_SILENT, AttemptSpec, ExitRecord, Outcome, RunPaths
from trainer.launching.book import InterruptionBook
from trainer.launching.clock import OwnClock
from trainer.launching.course import find_failure, find_unstarted, is_final
from trainer.launching.drills import Drills
from trainer.launching.ending import Ending
from trainer.launching.first_start import FirstStart
from trainer.launching.fleet import RESPAWNED, Fleet
from trainer.launching.hangs import Hang
from trainer.launching.interruptions import Finding, Interruption, finding_of
from trainer.launching.limits import POLL_S, Limits
from trainer.launching.news import News
from trainer.launching.places import Places
from trainer.launching.ports import PortWatch
from trainer.launching.recovering import Recovery
from trainer.launching.recovery import Start
from trainer.launching.reporting import Reporter
from trainer.launching.requests import Requests
from trainer.launching.resume import ResumePoint
from trainer.launching.state import State
from trainer.launching.streak import Streak
from trainer.launching.training import Training
from trainer.launching.unaided import SilenceWatch
from trainer.launching.watched import WatchedFiles, ask_within
from trainer.launching.watches import Watches
from trainer.launching.writer import Writer, read_outcome
from trainer.step import is_left_alone, run_scontrol
from trainer.verdict import (
    EXIT_MISCONFIGURED,
    Go,
    Verdict,
    judge_ends,
)

LOSS_EVENTS = {
    "node_lost": "node.lost",
    "node_frozen": "node.frozen",
    "node_cut_off": "node.cut_off",
    "agent_killed": "agent.killed",
}
SLURM_LIMIT_S = 2.0  # for the controller to say whether it ends this job
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
        self._state = State()
        self._places = Places(spec, job_id, self._state, self._fleet)
        self._watches = Watches(spec)
        self._first_start = FirstStart(spec, self._fleet, limits, self._clock)
        self._book = InterruptionBook(spec.attempt, self._fleet, self._files, self._writer, limits)
        self._streak = Streak()
        self._hang: Hang | None = None
        self._outcome_asked: tuple[int, Outcome | None] = (-1, None)
        self._turned_at = 0.0
        self._news = News(
            spec=spec,
            state=self._state,
            fleet=self._fleet,
            places=self._places,
            watches=self._watches,
            requests=self._requests,
            clock=self._clock,
            note=self._note,
            interrupt=self._interrupt,
            outcome=self._outcome,
        )
        self._silence = SilenceWatch(
            spec=spec,
            fleet=self._fleet,
            state=self._state,
            limits=limits,
            clock=self._clock,
            end_node=self._news.end_node,
        )

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
        verdict = self._requests.verdict(self._fleet.silent_since) or self._silence.look() or self._decide()
        self._report()
        return verdict

    def _turn(self) -> bool:
        """Take what came; True when there was more than beats."""
        events = self._fleet.poll()
        for event in events:
            self._news.take(event)
        is_news = any(event.kind != "message" or event.message["type"] != "beat" for event in events)
        for number in self._requests.take():
            is_news = True
            self._note("save.requested" if number else "signal.received")
        if is_news or self._clock.now() - self._turned_at >= POLL_S:
            self._fleet.mark_silence()
            for end in self._fleet.srun_ends():
                self._news.take_srun_end(end)
        return is_news

    def _decide(self) -> Verdict | None:
        self._fleet.release_srun()
        if self._spec.in_job:
            self._look_for_losses()
            self._follow_interruptions()
        if self._state.recovery is not None:
            return self._recover(self._state.recovery)
        if self._state.training is None:
            return self._decide_start()
        if self._spec.in_job:
            self._make_drill(self._state.training)
        return self._look_at_training(self._state.training)

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
        choice = self._first_start.decide()
        if isinstance(choice, Go):
            self._begin(choice.nodes, ResumePoint(path=self._spec.resume_from, step=self._spec.resume_step))
            return None
        return choice

    # ---- each start

    def _begin(self, nodes: tuple[str, ...], point: ResumePoint) -> None:
        launch = 0 if self._state.training is None else self._state.training.launch + 1
        now = self._clock.now()
        self._state.training = Training(launch, nodes, point, now)
        self._state.recovery = None
        self._outcome_asked = (-1, None)
        self._reporter.begin(self._state.training)
        for name in nodes:
            node = self._nodes[name]
            node.end, node.is_port_taken, node.cut_s = None, False, 0.0
        self._watches.begin(self._state.training, self._spec.procs_per_node, now)
        self._note("go.sent")
        for name in self._nodes:
            self._places.tell(name)

    # ---- interruptions

    def _look_for_losses(self) -> None:
        training = self._state.training
        is_urgent = self._state.recovery is not None and self._state.recovery.is_urgent()
        for loss in self._fleet.find_losses(is_urgent=is_urgent):
            self._note(LOSS_EVENTS[loss.kind], loss.node)
            finding = finding_of(loss, EXIT_NODE_SILENT)
            if self._state.recovery is not None and training is not None and loss.node in training.nodes:
                self._state.recovery.interruption.add(finding, instead=self._state.recovery.finding.is_weak)
            elif training is not None and loss.node in training.nodes and self._nodes[loss.node].end is None:
                self._interrupt(finding)
                continue
            if loss.kind in RESPAWNED:
                self._fleet.respawn(loss.node)

    def _interrupt(self, finding: Finding) -> None:
        """Begin to recover from what was found."""
        training = self._state.training
        assert training is not None
        finding = replace(finding, evidence=(*finding.evidence, *self._drills.tell()))
        now = self._clock.now()
        interruption = self._book.open(finding, training, now)
        self._reporter.recover(finding.cause)
        self._note("training.interrupted")
        print(f"trainer.launch: start {training.launch} is interrupted: {finding.cause}", file=sys.stderr, flush=True)
        self._state.recovery = Recovery(
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

    def _judge_stop(self, training: Training, interruption: Interruption) -> Verdict | None:
        """All ranks are stopped: did one of them mean to end, and who failed first?"""
        self._outcome_asked = (-1, None)
        if is_final(training.ends, self._nodes.values(), self._outcome()):
            return self._judge_ends(training)
        recovery = self._state.recovery
        if recovery is not None and recovery.finding.is_weak and interruption.record.kind == recovery.finding.kind:
            better = find_failure(training, self._nodes)
            if better is not None and not better.is_weak:
                interruption.add(better, instead=True)
        return None

    def _recover(self, recovery: Recovery) -> Verdict | None:
        move = recovery.cycle(self._clock.now())
        if isinstance(move, Verdict):
            self._book.write(recovery.interruption)
            return move
        if isinstance(move, Start):
            self._streak = recovery.streak
            recovery.interruption.amend(training=move.nodes, resume_step=recovery.point.step)
            self._begin(move.nodes, recovery.point)
            self._book.write(recovery.interruption)
        return None

    def _follow_interruptions(self) -> None:
        """The first new step, and a node's own word of a cut cable: both are told in the record, late as they come."""
        now = self._clock.now()
        if self._state.training is not None and self._state.recovery is None:
            if self._files.progress is not None:
                self._state.training.feed_progress(self._files.progress, now)
                self._watches.feed_progress(self._files.progress, now)
            if self._state.training.is_mute(now):
                self._reporter.why = ""
            if self._book.follow(self._state.training, now):
                self._reporter.why = ""
                self._note("training.resumed")
        self._book.follow_words(now)

    # ---- the course of a start

    def _look_at_training(self, training: Training) -> Verdict | None:
        now = self._clock.now()
        begun = training.nodes if self._all_may_come(training) else training.nodes[:1]
        open_nodes = [n for n in begun if self._nodes[n].end is None and not self._nodes[n].lost]
        if self._spec.in_job:
            finding = self._find_interruption(training, now)
            if finding is not None:
                self._interrupt(finding)
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
            return self._silence.judge(silent)
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
            is_meant = is_final(training.ends, self._nodes.values(), self._outcome())
            return None if is_meant else find_failure(training, self._nodes)
        if any(self._nodes[name].lost for name in training.nodes):
            return None  # told by the loss itself
        mute = find_unstarted(
            training, self._nodes, now, self._limits.begin_s, is_gated=not self._all_may_come(training)
        )
        if mute is not None:
            return mute
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
        verdict = judge_ends(training.ends, training.nodes, alive, self._outcome())
        if verdict.exit_code == 0 and training.last_step is None:
            return replace(verdict, reason=f"finished {self._clock.now() - training.began_at:.1f} s after its start")
        return verdict

    def _outcome(self) -> Outcome | None:
        """The training's own word, asked for anew when one more node has ended."""
        training = self._state.training
        assert training is not None
        if self._outcome_asked[0] != len(training.ends):
            path = self._attempt_dir / "outcome.json"
            found = ask_within(OUTCOME_LIMIT_S, lambda: read_outcome(path, self._spec.attempt))
            self._outcome_asked = (len(training.ends), found)
        return self._outcome_asked[1]

    # ---- end

    def _conclude(self, verdict: Verdict) -> int:
        self._reporter.phase = "ending"
        self._report()
        ending = Ending(self._fleet, self._state, self._limits, self._turn_and_report)
        ending.stop_nodes(verdict)
        for name in self._nodes:
            self._fleet.send(name, {"type": "bye"})
        ending.wait_for_srun()
        self._note("step.ended")
        self._writer.close(self._exit_record(verdict), 30.0)
        self._fleet.stop_srun()
        print(f"trainer.launch: exit {verdict.exit_code}: {verdict.reason}", file=sys.stderr, flush=True)
        return verdict.exit_code

    def _turn_and_report(self) -> None:
        self._turn()
        self._report()

    def _exit_record(self, verdict: Verdict) -> ExitRecord:
        blamed = self._book.blamed() if self._state.recovery is not None else ()
        return ExitRecord(
            attempt=self._spec.attempt,
            job_id=self._job_id,
            exit_code=verdict.exit_code,
            reason=verdict.reason,
            node=verdict.node,
            time=time.time(),
            nodes={n.name: n.end.exit_code if n.end else None for n in self._nodes.values()},
            bad_nodes=tuple(dict.fromkeys((*verdict.bad_nodes, *blamed))),
            launches=self._state.launch + 1,
            next=verdict.next,
            is_step_terminated=self._is_step_terminated() and not self._requests.is_terminated and not self._is_alone(),
        )

    def _is_alone(self) -> bool:
        """True when Slurm leaves this job alone: then its own training has ended the agents, and is to blame."""
        job = str(self._job_id)
        return is_left_alone(ask_within(SLURM_LIMIT_S, lambda: run_scontrol("-o", "show", "job", job)) or "")

    def _is_step_terminated(self) -> bool:
        return any(node.is_terminated for node in self._nodes.values())

    def _report(self) -> None:
        self._reporter.report(self._clock.now())

    def _note(self, event: str, node: str = "", at: float | None = None) -> None:
        self._writer.note(event, time.time() if at is None else at, node or self._own_node)
