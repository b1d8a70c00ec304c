"""Checkpoints of a training in a few calls: made, then `restore()`, `step(...)` after each optimizer step, `close()`.

A save holds up the training while its state is staged in memory, for milliseconds; a process beside each rank writes,
checksums, publishes and reads back (trainer.saving). At most one save is in flight. When the next is due meanwhile,
`when_busy` says what happens: "skip" lets it wait until the one in flight has ended and the training goes on; "wait"
stops the training until then.

A save that failed never goes unseen: it is logged, recorded in the progress file, and tried again when the next is due
(`on_failure="go_on"`), or raised at the next step ("raise").

The ranks agree on all of this without waiting for each other: what one is told in a step, all act upon in the next
(trainer.session.agreement). SIGUSR1 asks for a save and an exit with 75, SIGUSR2 for a save; so may the service's
advice.

    SaveFailed          on_failure="raise": the newest save failed
    SavesKeepFailing    so many saves in a row failed that going on would only lose more work
    LossDiverged        the loss went wrong: exit with 79
    CheckpointRejected  every checkpoint to resume from is damaged or does not fit: exit with 78
    DataChanged, DataNotElastic   the data can't be gone on with: exit with 93
    RunDirectoryInUse   another Checkpointer of this process, or another training, has the run directory

An `Outcome` is written before these exits, because torchrun hides exit codes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from trainer import contract
from trainer.data import DataChanged, parse_skip_samples
from trainer.loaders import DataNotElastic
from trainer.losswatch import Finding, LossPolicy
from trainer.progress import ProgressWriter
from trainer.saving.planning import PlanChanged
from trainer.saving.saver import Saver, SaveResult, Staging
from trainer.session.agreement import Agreement, Word
from trainer.session.claims import RunDirectoryInUse, take_seat
from trainer.session.lastword import LastWord
from trainer.session.outcomes import SaveOutcomes
from trainer.session.place import Place, read_place
from trainer.session.restoring import Restored, restore
from trainer.session.saves import Saves
from trainer.session.settings import RESERVED_EXTRA, check_settings
from trainer.session.surroundings import (
    make_schedule,
    open_mover,
    open_saver,
    progress_path,
    read_advice,
    say_uncopied,
    settle,
)
from trainer.session.waits import watch_waits
from trainer.session.watching import LossDiverged, LossJudge, LossReader
from trainer.session.wishes import Wishes
from trainer.signals import SaveRequests
from trainer.state import Stateful, StateMismatch, TrainState
from trainer.storage.stored import CheckpointRejected, CheckpointUnreadable

__all__ = [
    "CheckpointRejected",
    "CheckpointUnreadable",
    "Checkpointer",
    "DataChanged",
    "DataNotElastic",
    "LossDiverged",
    "LossPolicy",
    "Restored",
    "RunDirectoryInUse",
    "SaveFailed",
    "SaveResult",
    "SavesKeepFailing",
    "StateMismatch",
]

log = logging.getLogger("trainer.checkpoint")

_DEFAULT_MAX_FAILURES = {True: 0, False: 5}  # under a service never: it tells someone long before
FINAL_TRIES = 5
FINAL_UPLOAD_S = 600.0  # for the copy of the last checkpoint to object storage
LAST_SAVE_S = 120.0  # for the save in flight when the loss went wrong


class SaveFailed(RuntimeError):
    """The newest save failed; the message says why."""


class SavesKeepFailing(SaveFailed):
    """So many saves in a row failed that going on would only lose more work."""


class Checkpointer:
    """Saves and restores one training. Every rank has one and makes the same calls in the same order.

    `extra`: further objects with `state_dict` and `load_state_dict`, the same on every rank; `per_rank`: those whose
    state differs by rank. `data`: see `trainer.loaders`. What is not given comes from the service's environment:
    `run_dir` (without any, nothing is saved) and the interval (`every_s`; without a service 600). `seed` is what
    random states are made of on another number of ranks. `keep_last`: checkpoints to keep when no service prunes.
    `max_failures`: failed saves in a row until `SavesKeepFailing`; by default never under a service, which tells
    someone, and 5 without. `on_loss(step, mean over ranks)` is called in the order of steps, before a step is saved.
    `final_wait_s`: how long `close` and `leave` wait for the last save.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        data: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        per_rank: Mapping[str, Stateful] | None = None,
        run_dir: Path | str | None = None,
        seed: int = 0,
        every_s: float | None = None,
        every_steps: int = 0,
        when_busy: Literal["skip", "wait"] = "skip",
        on_failure: Literal["go_on", "raise"] = "go_on",
        max_failures: int | None = None,
        loss_policy: LossPolicy | None = None,
        keep_last: int = 2,
        final_step: int | None = None,
        on_loss: Callable[[int, float], None] | None = None,
        staging: Staging = "auto",
        final_wait_s: float = 600.0,
        progress: ProgressWriter | None = None,
        requests: SaveRequests | None = None,
    ) -> None:
        check_settings(
            every_s=every_s,
            every_steps=every_steps,
            when_busy=when_busy,
            on_failure=on_failure,
            staging=staging,
            max_failures=max_failures,
            keep_last=keep_last,
            final_wait_s=final_wait_s,
            extra=(*(extra or {}), *(per_rank or {})),
        )
        self._agreement = Agreement()
        watch_waits(model)
        run_dir = Path(run_dir) if run_dir is not None else None
        self._place = place = settle(read_place(run_dir=run_dir), self._agreement)
        self._last_word = LastWord(place)
        self._losses = LossReader()
        self._judge = LossJudge(loss_policy or place.loss_policy, on_loss)
        self._state = TrainState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            data=data,
            extra={**(extra or {}), RESERVED_EXTRA: self._judge},
            per_rank=per_rank or {},
            seed=seed,
            rank=place.rank,
            world=place.world,
        )
        if data is None and place.run_dir is not None and place.rank == 0:
            log.warning(
                "no data= is given: a resumed training has to find its place in the data by itself, from `steps_done` "
                "(trainer.loaders.GlobalBatches and PerRankData keep it)"
            )
        self._own_progress = progress is None
        self._progress = progress or ProgressWriter(progress_path(place), place.attempt, final_step=final_step)
        self._own_requests = requests is None
        self._requests = requests or SaveRequests()
        schedule, takes_interval = make_schedule(place, every_s, every_steps)
        self._wishes = Wishes(
            schedule, self._requests, read_advice(place), takes_interval=takes_interval, has_clock=place.rank == 0
        )
        self._waits = when_busy == "wait"
        self._raises = on_failure == "raise"
        self._final_wait_s = final_wait_s
        self._max_failures = _DEFAULT_MAX_FAILURES[place.is_supervised] if max_failures is None else max_failures
        self._outcomes = SaveOutcomes(self._progress, is_speaker=place.rank == 0)
        saver = open_saver(place, self._agreement, keep_last=keep_last, staging=staging)
        self._saves = Saves(self._state, saver, self._agreement, self._outcomes) if saver is not None else None
        self._mover = open_mover(place)
        self._is_owed = self._exits = self._is_over = self._is_closed = False
        self._resumed_step = 0
        self._seat = take_seat(place.run_dir) if place.run_dir is not None else None
        if not self._state.is_elastic:
            self._progress.fix_size()

    # ------------------------------------------------------------ what a training calls

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the run that are done, those before the restore included."""
        return self._state.step

    @property
    def place(self) -> Place:
        """The rank and the run of this process."""
        return self._place

    @property
    def saver(self) -> Saver | None:
        """What stages and writes; None where nothing is saved."""
        return self._saves.saver if self._saves is not None else None

    @property
    def is_busy(self) -> bool:
        """True while a save is in flight on this rank."""
        if self._agreement.is_over:
            self._hear()
        return self._saves is not None and self._saves.saver.is_busy

    def restore(self) -> Restored | None:
        """Load the newest checkpoint that is whole into model, optimizer and the rest; None when there is none.

        Call it once, before the first step, on every rank. Under a service it is the checkpoint that the service
        chose, or a newer one of this attempt. Raises `CheckpointRejected`, `CheckpointUnreadable`, `DataChanged`,
        `DataNotElastic`.
        """
        self._skip_samples()
        if self._place.run_dir is None:
            return None
        try:
            with self._progress.phase("restore"):
                restored = restore(self._state, self._place, self._agreement)
        except CheckpointRejected as error:
            self._last_word.leave(contract.EXIT_CHECKPOINT_REJECTED, str(error), checkpoint=error.path)
            raise
        except (DataChanged, DataNotElastic) as error:
            self._last_word.leave(contract.EXIT_DO_NOT_RESTART, str(error))
            raise
        if restored is not None:
            self._resumed_step = restored.step
            if restored.path == contract.RunPaths(self._place.run_dir).checkpoint(restored.step, self._place.attempt):
                self._outcomes.saved_step = restored.step  # before this attempt's workers were restarted in place
            self._progress.resumed(restored.step, restored.samples)
            if self._saves is not None:
                self._saves.saver.keep([restored.path])
        return restored

    def step(
        self, *, loss: torch.Tensor | float | None = None, samples: int | None = None, tokens: int | None = None
    ) -> bool:
        """Say that an optimizer step is done; saves if that is due. True: saved, as asked: leave with exit code 75.

        `loss`: what this rank called `backward` on; the mean over ranks is what counts. `samples`, `tokens`: of this
        step, over all ranks; samples need not be given where `data` has a position. Raises `LossDiverged`,
        `SaveFailed`, `SavesKeepFailing`, and at the first step `UnsavableObject` and `UnsupportedModel`.
        """
        self._refuse_closed()
        self._count(samples, tokens)
        read = self._losses.read(self._state.step, loss)
        self._progress.step_done(self._state.step, loss=self._judge.mean, samples=self._state.samples)
        self._hear()
        if self._saves is not None and (ended := self._saves.poll()) is not None:
            self._tell_mover(ended)
        self._raise_failures()
        if self._saves is not None and not self._saves.is_planned:  # gets all its memory
            with self._progress.phase("save", limit_s=self._final_wait_s, is_counted=False):
                self._saves.plan()
        if self._exits:
            self._say(read)
            self.leave()
            return True
        if self._wants_save():
            self._save(read)
        else:
            self._say(read)
        return False

    def save(self) -> float:
        """Begin a save now, whatever the schedule; returns the seconds that training was held up.

        Every rank calls it, between two steps. Waits for a save in flight.
        """
        self._refuse_closed()
        began = time.monotonic()
        self._hear()
        if self._saves is not None:
            with self._in_wait():
                self._saves.wait()
            self._saves.make_ready()
            self._save(None)
        return time.monotonic() - began

    def leave(self) -> bool:
        """Save the last step and wait for it, as after a signal; True if it is saved. Leave with 75 then.

        Every rank calls it, between two steps.
        """
        self._refuse_closed()
        self._progress.enter("end")  # the last save is waited for until it is read back
        self._hear_last()
        problem = self._save_until_verified(tries=1)
        done = (
            f"asked to exit, and the save failed: {problem}" if problem else f"saved step {self._state.step} on request"
        )
        self._last_word.leave(contract.EXIT_RESUBMIT, done)
        self._is_over = True
        return not problem

    def wait(self, timeout_s: float | None = None) -> SaveResult | None:
        """Wait for the save in flight and return how it ended; None if there is nothing new, or not in time.

        Every rank calls it, between two steps.
        """
        self._hear()
        with self._in_wait():
            ended = self._saves.wait(timeout_s) if self._saves is not None else None
        if ended is not None:
            self._tell_mover(ended)
        return ended

    def close(self, *, saves: bool = True) -> None:
        """Save the last step if it isn't, and wait until that is read back. Every rank calls it.

        `saves` False: end at once, a save in flight is given up. Raises `SavesKeepFailing` when the last step can't
        be saved: a run without it is not finished.
        """
        if self._is_closed:
            return
        if not saves:
            self._release()
            return
        mover_s = 0.0 if self._is_over else FINAL_UPLOAD_S  # who was asked to leave has no time, and a successor
        if not self._is_over:
            self._hear_last()
            self._progress.enter("end")
            if self._saves is not None and self._state.step > self._resumed_step:
                problem = self._save_until_verified(FINAL_TRIES)
                if problem:
                    raise SavesKeepFailing(f"the last step is not saved: {problem}")
        self._release(mover_s=mover_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or (isinstance(error, SystemExit) and error.code in (0, None, contract.EXIT_RESUBMIT)):
            self.close()
        else:  # a peer may be gone: nothing is waited for; a save whose bytes are staged is finished by its writers
            self._release(finishes=True)

    # ------------------------------------------------------------ one step

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("the Checkpointer is closed and saves nothing any more: close it after the last step")

    def _count(self, samples: int | None, tokens: int | None) -> None:
        state = self._state
        first, state.step = state.samples, state.step + 1
        position = getattr(state.data, "position", None)
        state.samples = position if samples is None and position is not None else first + (samples or 0)
        if tokens is not None:
            state.tokens = (state.tokens or 0) + tokens
        self._judge.count(state.step, first, state.samples)

    def _say(self, read: tuple[int, float] | None, problem: Exception | None = None) -> None:
        word = Word(
            loss=read[1] / self._place.world if read is not None else math.nan,
            exits=float(self._wishes.is_exit_wanted),
            saves=float(self._wishes.take()),
            busy=float(self._saves is not None and self._saves.is_busy),
            unready=float(isinstance(problem, PlanChanged)),
            failed=float(problem is not None and not isinstance(problem, PlanChanged)),
            failures=float(self._outcomes.failures if self._place.rank == 0 else 0),
        )
        self._agreement.say(self._state.step, word, read[0] if read is not None else None)

    def _hear(self) -> None:
        agreed = self._agreement.hear()
        if agreed is None:
            return
        self._exits = self._exits or agreed.word.exits > 0
        self._is_owed = self._is_owed or agreed.word.saves > 0
        if agreed.loss_step is not None:
            finding = self._judge.hear(agreed.loss_step, agreed.word.loss)
            if finding is not None:
                self._end_diverged(finding)
        if self._saves is not None and not self._saves.note(agreed):
            self._is_owed = True

    def _hear_last(self) -> None:
        self._hear()
        if (read := self._losses.take()) is not None:  # of a GPU: one step behind
            self._say(read)
            self._hear()

    def _wants_save(self) -> bool:
        if self._saves is None:
            return False
        self._is_owed = self._is_owed or self._wishes.schedule.is_due_by_step(self._state.step)
        return self._is_owed and (self._waits or not self._saves.is_busy_anywhere)

    def _save(self, read: tuple[int, float] | None) -> None:
        assert self._saves is not None
        self._wishes.schedule.saved()
        self._is_owed = False
        with self._progress.phase("save", limit_s=self._final_wait_s if self._saves.is_busy else 0.0):
            self._saves.begin(lambda problem: self._say(read, problem))
        if self._agreement.is_over:  # else the next step hears it
            self._hear()

    def _raise_failures(self) -> None:
        failures = self._saves.failures if self._saves is not None else 0  # what rank 0 counts: the same everywhere
        if not failures or not (self._raises or (self._max_failures and failures >= self._max_failures)):
            return
        why = self._agreement.from_rank_0(lambda: self._outcomes.error)
        if self._max_failures and failures >= self._max_failures:
            raise SavesKeepFailing(f"the last {failures} saves failed, the newest with: {why}")
        raise SaveFailed(why)

    def _in_wait(self) -> AbstractContextManager[None]:
        """Around a wait for a save in flight: nobody is to take it for a hang."""
        if self._saves is None or not self._saves.is_busy:
            return nullcontext()
        return self._progress.phase("save", limit_s=self._final_wait_s, is_counted=False)

    # ------------------------------------------------------------ ends

    def _save_until_verified(self, tries: int) -> str:
        """Save this step and wait for it, for `final_wait_s` at most; why it is not saved, "" when it is."""
        if self._saves is None:
            return "there is no run directory"
        until = time.monotonic() + self._final_wait_s
        for left in reversed(range(tries + 1)):
            self._hear()
            self._saves.wait(max(0.0, until - time.monotonic()))
            told = self._agreement.gather((self._saves.saver.is_busy, self._outcomes.saved_step == self._state.step))
            if any(is_busy for is_busy, _ in told):
                return f"a save is still in flight after {self._final_wait_s:g} s: does the file system hang?"
            if told[0][1]:
                return ""
            if left:
                if left < tries:
                    time.sleep(min(30.0, 2.0 ** (tries - left)))
                self._saves.make_ready()
                self._save(None)
        return self._agreement.from_rank_0(lambda: self._outcomes.error)

    def _end_diverged(self, finding: Finding) -> None:
        error = LossDiverged(finding)
        self._progress.enter("end")
        if self._saves is not None:
            self._saves.cancel(str(error))
            self._saves.wait(LAST_SAVE_S)  # of a step before it went wrong, maybe
        first, end = self._judge.samples_since(finding)
        self._last_word.diverged(finding, first_sample=first, end_sample=end)
        self._last_word.leave(contract.EXIT_DIVERGED, str(error))
        self._is_over = True
        raise error

    def _tell_mover(self, ended: SaveResult) -> None:
        if self._mover is not None and ended.is_verified:
            self._mover.poke()

    def _skip_samples(self) -> None:
        ranges = parse_skip_samples(self._place.skip_samples)
        if not ranges:
            return
        skip = getattr(self._state.data, "skip", None)
        if skip is None:
            log.warning("samples %s are to be skipped, and the data has no way to", self._place.skip_samples)
        else:
            skip(ranges)

    def _release(self, *, mover_s: float = 0.0, finishes: bool = False) -> None:
        self._is_closed = True
        self._progress.enter("end")
        if self._seat is not None:
            self._seat.leave()
        if self._saves is not None:
            self._saves.close(finishes=finishes)
        if self._mover is not None and not self._mover.close(mover_s) and mover_s:
            log.warning("%s", say_uncopied(self._place))
        self._wishes.close()
        if self._own_requests:
            self._requests.restore()
        if self._own_progress:
            self._progress.close()
