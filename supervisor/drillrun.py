"""One drill from the failure to the judgement: makes it, watches the run recover, and gathers what is checked."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from supervisor.drill import After, Before, Outcome, Traces, judge_drill
from supervisor.drillmake import CannotMake, Failure
from supervisor.drillwatch import (
    ProgressTrace,
    Sight,
    is_stepping,
    look,
    read_record,
    read_step_traces,
    resume_step_of,
)
from supervisor.model import Interruption, RunState
from trainer.contract import LaunchReport

LOOK_EVERY_S = 0.1
_LEDGER_S = 20.0  # after the first new step, for the service to have noted it
_STEPS_S = 60.0  # ... and for the training to have come beyond the failure
_MORE_STEPS = 3  # beyond it: what was done twice is compared


class Say(Protocol):
    """Where it is told what goes on."""

    def __call__(self, text: str) -> None:
        """Tell this now."""
        ...

    def now_and_then(self, text: str) -> None:
        """Tell this if nothing was told for a while."""
        ...


class DrillRun:
    """A drill of one run. `timeout_s`: for the recovery, at most."""

    def __init__(self, ledger: Path, say: Say, timeout_s: float) -> None:
        self._ledger = ledger
        self._say = say
        self._timeout_s = timeout_s
        self._trace = ProgressTrace()
        self._verified: frozenset[int] = frozenset()
        self._known: frozenset[tuple[object, ...]] = frozenset()
        self._made = 0.0
        self._noticed_s: float | None = None

    def run(self, sight: Sight, kind: str, node: str, failure: Failure) -> Outcome:
        """Make the failure, watch, and judge. Raises CannotMake, and the service's errors, when nothing was made."""
        self._known = frozenset(_key(i) for i in sight.interruptions)
        self._note(sight)
        before = _describe(sight, kind, node, failure)
        failure.announce()
        self._made = time.monotonic()
        failure.make()
        self._say(f"{failure.how}, at step {before.step}; newest verified checkpoint: step {before.verified_step}")
        end, recovered_s, ending = self._watch(before)
        self._verified |= end.verified
        resume_step = resume_step_of(end) if recovered_s is not None else None
        if recovered_s is not None:
            end = self._await_more(before, end)
        after = After(
            attempt=end.attempt.number if end.attempt is not None else before.attempt,
            launch=end.launch_number,
            training=end.launch.training if end.launch is not None else (),
            resume_step=resume_step,
            verified_steps=self._verified,
            recovered_s=recovered_s,
            noticed_s=self._noticed_s,
            interruptions=self._new(end),
            record=read_record(end.run, before.attempt, before.launch),
            run_state=str(end.run.state),
            ending=ending,
        )
        return judge_drill(before, after, self._traces(end, before, after))

    def _look(self, name: str) -> Sight:
        sight = look(self._ledger, name)
        if sight is None:
            raise CannotMake(f"{name} is no run any more")
        self._note(sight)
        return sight

    def _note(self, sight: Sight) -> None:
        self._trace.add(sight)
        self._verified |= sight.verified

    def _new(self, sight: Sight) -> tuple[Interruption, ...]:
        return tuple(i for i in sight.interruptions if _key(i) not in self._known)

    def _watch(self, before: Before) -> tuple[Sight, float | None, str]:
        """Until the first new step: the seconds that it took; or why none came."""
        while True:
            sight = self._look(before.run)
            passed_s = time.monotonic() - self._made
            if is_stepping(sight, (before.attempt, before.launch)):
                self._say(f"first new step: {sight.step}, {passed_s:.1f} s after the failure")
                return sight, passed_s, ""
            if self._noticed_s is None and _is_noticed(sight, before):
                self._noticed_s = passed_s
                self._say(f"noticed: {where(sight)}")
            if sight.run.state is not RunState.ACTIVE:
                return sight, None, f"the run is {sight.run.state}: {sight.run.reason}"
            if passed_s > self._timeout_s:
                return sight, None, f"no new step within {self._timeout_s:g} s: {standing(sight, before)}"
            self._say.now_and_then(f"... {where(sight)}")
            time.sleep(LOOK_EVERY_S)

    def _await_more(self, before: Before, sight: Sight) -> Sight:
        """Until the ledger has it, and some steps were done beyond the failure; both for a bounded time."""
        began = time.monotonic()
        reached = max([before.step, *self._trace.seen.get((before.attempt, before.launch), {})])
        while True:
            found = self._new(sight)
            waits_for = []
            if not found or any(i.resumed_at is None for i in found):
                waits_for += ["the ledger"] if time.monotonic() - began < _LEDGER_S else []
            if (sight.step or 0) < reached + _MORE_STEPS and sight.run.state is RunState.ACTIVE:
                waits_for += ["more steps"] if time.monotonic() - began < _STEPS_S else []
            if not waits_for:
                return sight
            self._say.now_and_then(f"... {where(sight)}; waiting for {' and '.join(waits_for)}")
            time.sleep(LOOK_EVERY_S)
            sight = self._look(before.run)

    def _traces(self, sight: Sight, before: Before, after: After) -> Traces:
        keys = (before.attempt, before.launch), (after.attempt, after.launch)
        return read_step_traces(sight.run, *keys) or self._trace.traces(*keys)


def where(sight: Sight) -> str:
    """What the run is doing, in a few words."""
    if sight.attempt is None:
        return "no attempt"
    launch = sight.launch
    phase = f", {_phase_words(launch)}" if launch is not None else ""
    step = f", step {sight.step}" if sight.step is not None else ""
    return f"attempt {sight.attempt.number} {sight.attempt.state}, start {sight.launch_number}{phase}{step}"


def standing(sight: Sight, before: Before) -> str:
    """Where it stands after the time is up; a training that goes on as if nothing had been is not one that is down."""
    is_same = sight.attempt is not None and (sight.attempt.number, sight.launch_number) == (
        before.attempt,
        before.launch,
    )
    if is_same and (sight.step or 0) > before.step:
        return f"it trains on as before, now at step {sight.step}: the failure has not hit it, or nobody has noticed"
    return where(sight)


def _phase_words(launch: LaunchReport) -> str:
    if not launch.why:
        return launch.phase
    return f"recovering from {launch.why}" if launch.phase == "recovering" else f"started again after {launch.why}"


def _describe(sight: Sight, kind: str, node: str, failure: Failure) -> Before:
    assert sight.attempt is not None
    assert sight.launch is not None
    return Before(
        run=sight.run.name,
        kind=kind,
        node=node,
        how=failure.how,
        attempt=sight.attempt.number,
        launch=sight.launch_number,
        training=sight.launch.training,
        host=sight.launch.host,
        step=sight.step or 0,
        verified_step=max(sight.verified, default=0),
        made_at=datetime.now(UTC),
    )


def _is_noticed(sight: Sight, before: Before) -> bool:
    if sight.attempt is None or (sight.attempt.number, sight.launch_number) > (before.attempt, before.launch):
        return True
    return sight.attempt.is_over or (sight.launch is not None and sight.launch.phase == "recovering")


def _key(interruption: Interruption) -> tuple[object, ...]:
    return (interruption.attempt, interruption.launch, interruption.kind, interruption.detected_at)
