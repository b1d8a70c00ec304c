"""One save after another: planned once, begun by all ranks in the same step, planned anew when the state changed.

A save is begun without asking the other ranks whether they are ready, and held: written, and not published. They all
say so in that step's word (trainer.session.agreement). Once it is heard, rank 0 lets the save be published, or it has
failed: for a rank whose state is not the planned one, or a loss that went wrong in this very step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from trainer.contents.opaque import UnsavableObject
from trainer.contents.replicas import Key, refuse_differing
from trainer.saving.planning import PlanChanged, SavePlan, plan_state
from trainer.saving.quiet import no_collections
from trainer.saving.saver import Saver, SaveResult
from trainer.session.agreement import Agreed, Agreement
from trainer.session.outcomes import SaveOutcomes
from trainer.state import TrainState

log = logging.getLogger("trainer.checkpoint")

_WITHOUT_OTHER_TENSORS = {"model", "optimizer", "rank", "shared"}  # parts of a state whose tensors are all known


class Saves:
    """The saves of one state. Every rank has one and makes the same calls in the same order.

    `failures`: failed saves in a row as rank 0 counts them, the same on every rank.
    """

    def __init__(self, state: TrainState, saver: Saver, agreement: Agreement, outcomes: SaveOutcomes) -> None:
        self.saver = saver
        self.failures = 0
        self._state = state
        self._agreement = agreement
        self._outcomes = outcomes
        self._plan: SavePlan | None = None
        self._held_step: int | None = None
        self._void_step: int | None = None  # whose save failed for want of a plan
        self._must_plan = False
        self._is_busy_anywhere = False
        self._known: tuple[SavePlan, tuple[Any, Any], list[Any]] | None = None  # the sources of the last save
        self._is_in_flight = False  # asking the saver costs a call of the system, in each step

    @property
    def is_planned(self) -> bool:
        """True once `plan` was called."""
        return self._plan is not None

    @property
    def is_busy_anywhere(self) -> bool:
        """True unless every rank said, after the last save was begun, that its part of it has ended."""
        return self._is_busy_anywhere

    @property
    def is_busy(self) -> bool:
        """True while a save is in flight on this rank, as far as `poll` and `wait` have heard."""
        return self._is_in_flight

    def note(self, agreed: Agreed) -> bool:
        """Take up what all ranks said in a step; False when its save is to be made again."""
        self.failures = int(agreed.word.failures)
        if self._held_step != agreed.step:
            self._is_busy_anywhere = agreed.word.busy > 0
            return True
        self._held_step = None
        if agreed.word.unready:
            self._must_plan = True
            self._void_step = agreed.step
            return False
        if not agreed.word.failed:
            self.saver.confirm()
        return True

    def cancel(self, reason: str) -> None:
        """Give up the save of this step, if there is one."""
        if self._held_step is not None:
            self._held_step = None
            self.saver.cancel(reason)

    def plan(self) -> None:
        """Plan the saves of the state as it is, and get memory for them. Waits for all ranks.

        Raises, on every rank, `UnsupportedModel` and `UnsavableObject` for what would not come back as it is, or what
        else the state of one rank can't be collected for.
        """
        state: dict[str, Any] = {}
        digests: dict[Key, str] = {}
        error: Exception | None = None
        try:
            state = self._state.collect()
            digests = self._state.digests() if self._state.world > 1 else {}
        except Exception as failure:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            error = failure
        problems = self._agreement.gather(f"{type(error).__name__}: {error}" if error else "")
        if error is not None:
            raise error
        for rank, problem in enumerate(problems):
            if problem:
                raise UnsavableObject(f"rank {rank}: {problem}")
        if self._state.world > 1:
            refuse_differing(digests, self._state.rank, self._agreement.gather)
        self._plan = plan_state(state, self._agreement.group)
        self._must_plan = False
        try:
            self.saver.prepare(self._plan, self._plan.sources(state))
        except (OSError, RuntimeError) as failure:
            log.warning("memory for checkpoints is not there yet, the first save will ask again: %s", failure)

    def make_ready(self) -> None:
        """Have the state planned as it is now, having asked all ranks; for saves that nobody makes again."""
        _, problem = self._sources() if self._plan is not None else ([], None)
        is_changed = self._plan is None or self._must_plan or isinstance(problem, PlanChanged)
        if any(self._agreement.gather(is_changed)):
            self._must_plan = True

    def begin(self, say: Callable[[Exception | None], None]) -> None:
        """Begin a save, on every rank in the same step; one in flight is waited for.

        `say` tells the other ranks what keeps this one from it. `note` must follow once they have all said so.
        """
        refusal = self._plan_anew() if self._plan is None or self._must_plan else None
        self.wait()
        with no_collections():  # training stands still
            self._begin(refusal, say)

    def _begin(self, refusal: Exception | None, say: Callable[[Exception | None], None]) -> None:
        sources, problem = self._sources()
        problem = refusal or problem  # that the state is not the planned one would only be told to be planned again
        word = _Word(lambda: say(problem))
        state = self._state
        self._held_step = state.step
        self._is_busy_anywhere = self._is_in_flight = True
        assert self._plan is not None
        self.saver.begin(
            self._plan,
            sources if problem is None else problem,
            step=state.step,
            samples=state.samples,
            tokens=state.tokens,
            is_elastic=state.is_elastic,
            is_held=True,
            meanwhile=word.say,  # the rank has nothing else to do while its memory is protected
        )
        word.finish()

    def _plan_anew(self) -> Exception | None:
        """Why the state can't be planned, on every rank; raised where there is no plan to go on with."""
        try:
            self.plan()
        except Exception as error:
            if self._plan is None:
                raise
            return error
        return None

    def _sources(self) -> tuple[list[Any], Exception | None]:
        assert self._plan is not None
        try:
            return self._find_sources(self._plan, self._state.collect()), None
        except Exception as error:  # noqa: BLE001 - this rank's alone: the others must not wait for it
            return [], error

    def _find_sources(self, plan: SavePlan, state: dict[str, Any]) -> list[Any]:
        """The sources of the state; found before, if the state has the same tensors, which `collect` vouches for."""
        found = None
        parts = (state["model"], state["optimizer"])
        if self._known is not None and state.keys() <= _WITHOUT_OTHER_TENSORS:
            known_plan, known_parts, sources = self._known
            if known_plan is plan and all(a is b for a, b in zip(known_parts, parts, strict=True)):
                items = {f"rank.{rank}": item for rank, item in state["rank"].items()}
                found = plan.renew(sources, items | {"shared": state.get("shared", b"")})
        sources = plan.sources(state) if found is None else found
        self._known = (plan, parts, sources)
        return sources

    def poll(self) -> SaveResult | None:
        """The result of the save that has ended since the last call, else None; never blocks."""
        return self._take(self.saver.poll()) if self._is_in_flight else None

    def wait(self, timeout_s: float | None = None) -> SaveResult | None:
        """Wait for the save in flight and return its result; None if there is nothing new, or not in time."""
        return self._take(self.saver.wait(timeout_s))

    def _take(self, result: SaveResult | None) -> SaveResult | None:
        if result is None and not self.saver.is_busy:
            result = self.saver.poll()  # it has ended just now
        self._is_in_flight = self.saver.is_busy
        if result is not None and result.step == self._void_step and not result.is_complete:
            return None  # it is made again
        return self._outcomes.take(result)

    def close(self, *, finishes: bool = False) -> None:
        """End the writer; a save in flight is given up, unless it may finish (then nobody waits for it)."""
        self.saver.close(finishes=finishes)


class _Word:
    """Said once; what comes of it is raised by `finish`, and not where it is said."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._is_said = False
        self._error: BaseException | None = None

    def say(self) -> None:
        if self._is_said:
            return
        self._is_said = True
        try:
            self._say()
        except BaseException as error:  # noqa: BLE001 - raised by finish
            self._error = error

    def finish(self) -> None:
        self.say()
        if self._error is not None:
            raise self._error
