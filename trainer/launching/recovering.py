"""A recovery while it goes on: orders to the nodes, and the next start, or the end of the attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.contract import AttemptSpec, RunPaths
from trainer.launching.choice import count_nodes
from trainer.launching.fleet import RESPAWNED, Fleet
from trainer.launching.hangs import Hang
from trainer.launching.interruptions import Finding, Interruption
from trainer.launching.limits import Limits
from trainer.launching.recovery import Member, Needs, Scene, Short, Stage, Start, next_move
from trainer.launching.resume import ResumeSearch
from trainer.launching.streak import GiveUp, Streak, extend_streak, judge_streak
from trainer.launching.training import Training
from trainer.launching.watched import WatchedFiles
from trainer.launching.watches import HangNaming, finding_of_hang
from trainer.verdict import Verdict

NAMING_LIMIT_S = 3.0  # for the collected evidence to be read, after all ranks have stopped
SEARCH_S = 0.05  # it mostly takes a millisecond: cheaper than another turn of the loop
BROKEN_GRACE_S = 0.3  # of ranks that can't save any more: a peer is gone, or they hang
_GRACEFUL = ("straggler", "check_failed")


class Recovery:
    """From an interruption to the next start. Instants are of the launcher's own clock."""

    def __init__(
        self,
        *,
        finding: Finding,
        interruption: Interruption,
        training: Training,
        streak: Streak,
        spec: AttemptSpec,
        attempt_dir: Path,
        fleet: Fleet,
        files: WatchedFiles,
        limits: Limits,
        now: float,
        hang: Hang | None,
        settle: Callable[[Hang], Hang],
        judge_stop: Callable[[], Verdict | None],
    ) -> None:
        self.finding = finding
        self.interruption = interruption
        self.streak = streak
        self.point = training.point
        self._training = training
        self._spec = spec
        self._attempt_dir = attempt_dir
        self._fleet = fleet
        self._files = files
        files.look_soon()  # the service may have told of a newer checkpoint since the last look
        self._limits = limits
        self._hang = hang if finding.kind == "hang" else None
        self._settle = settle
        self._naming: HangNaming | None = None
        self._judge_stop = judge_stop  # whether the ends that are known by then end the attempt
        self._search: ResumeSearch | None = None
        self._is_point_known = False
        self._start_at = self._found_at = now  # not before
        self._stage = Stage.STOP
        self._stage_at = now
        self._verdict: Verdict | None = None
        if finding.kind == "straggler":
            self.ban(finding)
        is_collected = all(fleet.nodes[n].evidence_for == training.launch for n in training.nodes if fleet.is_here(n))
        self._enter(Stage.EVIDENCE if finding.kind == "hang" and not is_collected else Stage.STOP, now)
        for name, node in fleet.nodes.items():
            if name not in training.nodes:
                self.tell(name)
            if node.lost in RESPAWNED and not fleet.is_coming(name):
                fleet.respawn(name)

    @property
    def round(self) -> int:
        """The number of the start that the checks are for."""
        return self._training.launch + 1

    @property
    def evidence_dir(self) -> Path:
        """Where the nodes leave what they collect of the start that was interrupted."""
        return RunPaths(self._attempt_dir.parent.parent).evidence(self._spec.attempt, self._training.launch)

    def cycle(self, now: float) -> Start | Verdict | None:
        """What comes of it, or None while it goes on."""
        self._look_for_name(now)
        self._look_for_point(now)
        if self._verdict is not None:
            return self._verdict
        move = next_move(self._scene(now), self._needs())
        if isinstance(move, Stage):
            self._enter(move, now)
            return self._verdict
        if isinstance(move, Short):
            return self._give_up("resubmit", move.reason)
        if isinstance(move, Start):
            self.interruption.note_part("check", now - self._stage_at)
        return move

    def is_urgent(self) -> bool:
        """True when a node that is mute need not be waited for: the others are enough."""
        heard = [
            name for name in self._fleet.nodes if self._fleet.is_here(name) and name not in self._fleet.silent_since
        ]
        needs = self._needs()
        count = count_nodes(len(heard), wanted=needs.wanted, minimum=needs.minimum, multiple=needs.multiple)
        return count > 0 and self._stage is not Stage.EVIDENCE

    def tell(self, name: str) -> None:
        """What a node is to do now; also when it is back, or has a new agent."""
        node = self._fleet.nodes[name]
        launch = self._training.launch
        if not self._fleet.is_here(name):
            return
        if name in self._training.nodes and node.stopped_for < launch:
            if self._stage is Stage.EVIDENCE:
                folder = str(self.evidence_dir)
                self._fleet.send(name, {"type": "evidence", "launch": launch, "dir": folder})
                return
            is_graceful = self.finding.kind in _GRACEFUL
            grace_s = self._spec.stop_grace_s if is_graceful else min(self._spec.stop_grace_s, BROKEN_GRACE_S)
            order = {"type": "stop", "launch": launch, "grace_s": grace_s, "reason": self.finding.cause[:500]}
            self._fleet.send(name, order)
        elif node.checked_for < self.round:
            self._fleet.send(name, {"type": "check", "launch": self.round})

    def _enter(self, stage: Stage, now: float) -> None:
        if stage is Stage.CHECK:
            self._leave_stop()
        if (self._stage, stage) in ((Stage.EVIDENCE, Stage.STOP), (Stage.STOP, Stage.CHECK)):
            self.interruption.note_part(self._stage.value, now - self._stage_at)
        self._stage, self._stage_at = stage, now
        if stage is not Stage.CHECK:
            for name in self._training.nodes:
                self.tell(name)

    def _look_for_name(self, now: float) -> None:
        """Whom the others waited for, once the evidence is read; it need not be known before the ranks are stopped."""
        if self._hang is None or self._stage is Stage.EVIDENCE:
            return
        if self._naming is None:
            world = len(self._training.nodes) * self._spec.procs_per_node
            self._naming = HangNaming(self._hang, self.evidence_dir, world)
        is_late = self._stage is Stage.CHECK and now - self._stage_at > NAMING_LIMIT_S
        if self._naming.is_done or is_late:
            named = finding_of_hang(self._settle(self._naming.hang))
            self._hang = None
            self.interruption.add(named, instead=True)
            self.ban(named)

    def ban(self, finding: Finding) -> None:
        """Do not use the nodes again that are to blame by what they do to the training."""
        for name in finding.nodes:
            self._fleet.nodes[name].banned = finding.cause[:500]

    def _leave_stop(self) -> None:
        """Nobody is waited for any more: who has not stopped can't be used."""
        for name in self._training.nodes:
            node = self._fleet.nodes[name]
            if self._fleet.is_here(name) and node.stopped_for < self._training.launch:
                node.failed = "its ranks could not be stopped"
        self._verdict = self._judge_stop()
        if self._verdict is None:
            self._search = ResumeSearch(self._attempt_dir.parent.parent, self._spec, lambda: self._files.advice)
            self._search.join(SEARCH_S)

    def _look_for_point(self, now: float) -> None:
        if self._search is None or self._is_point_known or self._hang is not None:
            return
        if self._search.point is not None:
            self.point, is_sure = self._search.point, True
        elif now - self._stage_at > self._limits.resume_s:
            is_sure = False
        else:
            return
        self._is_point_known = True
        if is_sure:  # what could not be looked at is neither progress nor the lack of it
            self.streak = extend_streak(
                self.streak,
                has_newer=self.point.step > self._training.point.step,
                is_blamed=bool(self.interruption.record.nodes),
                last_step=self._training.last_step,
                is_stillborn=self.interruption.record.kind == "process" and self._training.is_stillborn(self._found_at),
                place=self._find_place(),
            )
        judged = judge_streak(
            self.streak, max_without_progress=self._spec.max_without_progress, backoff_s=self._spec.backoff_s
        )
        if isinstance(judged, GiveUp):
            self._verdict = self._give_up(judged.next, judged.reason)
        elif judged > 0:
            self.interruption.note_part("wait", judged)
            self._start_at = now + judged

    def _find_place(self) -> str:
        """The one node that failed, of several; another job may do without it."""
        failed = {end.node for end in self._training.ends if end.exit_code != 0 and not end.is_victim}
        return self.finding.hint if len(self._training.nodes) > 1 and len(failed) <= 1 else ""

    def _give_up(self, what_next: str, reason: str) -> Verdict:
        record = self.interruption.record
        return Verdict(
            exit_code=self.finding.exit_code,
            reason=f"{record.cause}; {reason}",
            node=next(iter(record.nodes), record.hint or None),
            next=what_next,
            bad_nodes=record.nodes,
        )

    def _scene(self, now: float) -> Scene:
        return Scene(
            stage=self._stage,
            stage_s=now - self._stage_at,
            wait_s=self._start_at - now,
            is_point_known=self._is_point_known and self._hang is None,
            previous=self._training.nodes,
            members=tuple(self._member(name) for name in self._fleet.nodes),
        )

    def _member(self, name: str) -> Member:
        node = self._fleet.nodes[name]
        launch = self._training.launch
        was_training = name in self._training.nodes
        may_return = self._fleet.may_return(name)
        return Member(
            node=name,
            was_training=was_training,
            is_here=self._fleet.is_here(name),
            is_coming=self._fleet.is_coming(name) or may_return,
            is_unfenced=(self._fleet.is_unfenced(name) or may_return) and node.stopped_for < launch,
            has_evidence=node.evidence_for >= launch,
            is_stopped=node.stopped_for >= launch,
            is_checked=node.checked_for >= self.round,
            failed=node.failed or node.banned,
            blamed=node.blamed,
        )

    def _needs(self) -> Needs:
        spec = self._spec
        progress = self._files.progress
        is_fixed = progress is not None and not progress.is_elastic
        return Needs(
            wanted=len(self._training.nodes) if is_fixed else spec.nodes,
            minimum=len(self._training.nodes) if is_fixed else spec.nodes_min or spec.nodes,
            multiple=spec.node_multiple,
            evidence_s=self._limits.evidence_s,
            stop_s=spec.stop_grace_s + self._limits.kill_s,
            check_s=spec.start_checks_timeout_s + self._limits.checks_margin_s,
            spare_grace_s=self._limits.spare_grace_s,
        )
