"""The training loop of the reference script: start, step, agree, save, end.

Ranks must decide alike: whether to save and whether to stop travel with the loss in one all-reduce a step, so a
signal that reaches one rank only, or a clock that runs differently, cannot split them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # fully_shard imports it anyhow; here it costs less, see trainer.example.train
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from trainer.checkpoint import Checkpointer, CheckpointRejected, SaveResult, SaveSchedule
from trainer.contract import (
    EXIT_CHECKPOINT_REJECTED,
    EXIT_DO_NOT_RESTART,
    EXIT_FINISHED,
    EXIT_RESUBMIT,
    Outcome,
    RunPaths,
    write_json,
)
from trainer.data import BatchNotDivisible, ByteWindows, SampleOrder, read_text
from trainer.example.model import Gpt, Shape
from trainer.example.options import Options, Place
from trainer.history import StepLog, loss_path, samples_path
from trainer.progress import ProgressWriter
from trainer.signals import SaveAndExit
from trainer.state import DataChanged, TrainState, seed_rng
from trainer.tiers import choose_resume, find_checkpoints, next_attempt, publish_verification

log = logging.getLogger("trainer.example")


def run(options: Options, place: Place, request: SaveAndExit, progress: ProgressWriter) -> int:
    """Train to the last step or until asked to save and exit; returns the exit code."""
    log.info("torch is imported, %.2f s after this process began", _age_s())
    torch.set_num_threads(1)  # ranks share the cores of small machines, and sums keep their order
    with _process_group(options, place):
        log.info("%d ranks have met, %.2f s after this process began", place.world, _age_s())
        place = _settle_attempt(place)
        if place.rank == 0 and place.run_dir is not None:
            # Of workers that were restarted in place: what they left must not explain how these ones end.
            RunPaths(place.run_dir).outcome(place.attempt).unlink(missing_ok=True)
        try:
            session = _open_session(options, place, request, progress)
            return session.train()
        except CheckpointRejected as error:
            return _end(place, EXIT_CHECKPOINT_REJECTED, str(error), checkpoint=error.path)
        except (DataChanged, BatchNotDivisible) as error:
            return _end(place, EXIT_DO_NOT_RESTART, str(error))


# ---------------------------------------------------------------- start


@contextmanager
def _process_group(options: Options, place: Place) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=options.timeout_s)
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)
    if place.is_launched:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    yield
    # Only on the good way out: after an error a peer may be gone, and destroying waits for it.
    dist.destroy_process_group()


def _settle_attempt(place: Place) -> Place:
    """The place with an attempt number: the service's, or the next free one, the same on all ranks."""
    if place.is_supervised or place.run_dir is None:
        return place
    chosen = [next_attempt(place.run_dir) if place.rank == 0 else 0]
    dist.broadcast_object_list(chosen)
    return replace(place, attempt=chosen[0])


def _open_session(options: Options, place: Place, request: SaveAndExit, progress: ProgressWriter) -> _Session:
    windows = ByteWindows(text=read_text(options.text), length=options.seq_len)
    order = SampleOrder(size=len(windows), seed=options.seed)
    order.part(0, options.global_batch, place.rank, place.world)  # refuse an uneven split before anything slow
    _agree_on_data(windows.fingerprint, place)
    state = _build_state(options, place, windows.fingerprint)
    checkpointer = None
    resumed_from = ""
    if place.run_dir is not None:
        checkpointer = Checkpointer(
            place.run_dir,
            place.run,
            place.attempt,
            keep_last=options.keep_last,
            node_size=place.local_world,
        )
        resumed_from = _resume(checkpointer, place, state)
        if resumed_from:
            progress.resumed(state.step, state.samples)
    return _Session(
        options=options,
        place=place,
        request=request,
        progress=progress,
        windows=windows,
        order=order,
        state=state,
        checkpointer=checkpointer,
        schedule=SaveSchedule(every_s=options.save_every_s, every_steps=options.save_every_steps),
        logs=_Logs.open(place, resumed_from),
        resumed_step=state.step,
        device=_device(place),
    )


def _agree_on_data(fingerprint: str, place: Place) -> None:
    """Refuse to start when nodes read different text (another Python, a half-copied folder): nobody would notice."""
    seen: list[str] = [""] * place.world
    dist.all_gather_object(seen, fingerprint)
    others = [str(rank) for rank, found in enumerate(seen) if found != seen[0]]
    if others:
        raise DataChanged(f"ranks {', '.join(others)} read other text than rank 0 does")


def _device(place: Place) -> torch.device:
    return torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _build_state(options: Options, place: Place, fingerprint: str) -> TrainState:
    torch.manual_seed(options.seed)  # the same weights on every rank
    shape = Shape(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        length=options.seq_len,
        dropout=options.dropout,
    )
    model = Gpt(shape).to(_device(place))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, options.warmup, options.steps)
    )
    seed_rng(options.seed, 0, place.rank)
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        base_seed=options.seed,
        rank=place.rank,
        world=place.world,
        data_fingerprint=fingerprint,
    )


def lr_factor(step: int, warmup: int, steps: int) -> float:
    """Share of the highest learning rate after `step` steps: linear up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _resume(checkpointer: Checkpointer, place: Place, state: TrainState) -> str:
    """Load the newest checkpoint that counts; returns its name, or "" for a fresh start.

    This attempt's own checkpoints come first: its workers may have been restarted in place after it saved. Raises
    `CheckpointRejected` for the last candidate when all are rejected: a fresh start would throw the run away.
    """
    for path in (candidates := _agree_on_candidates(place)):
        try:
            loaded = checkpointer.load(path, state)
        except CheckpointRejected as error:
            _denounce(place, error)
            if path == candidates[-1]:
                raise
            continue
        log.info("resumed from %s: step %d, %d samples", path.name, loaded.step, loaded.samples)
        if loaded.is_reseeded and place.rank == 0:
            log.warning(
                "%d ranks instead of %d: random states are seeded anew from (%d, step %d, rank); the run is no "
                "longer bit-identical to an undisturbed one",
                place.world,
                loaded.world_size,
                state.base_seed,
                loaded.step,
            )
        return path.name
    return ""


def _agree_on_candidates(place: Place) -> list[Path]:
    found: list[list[Path]] = [[]]
    if place.rank == 0 and place.run_dir is not None:
        checkpoints = find_checkpoints(RunPaths(place.run_dir).checkpoints())
        found = [
            choose_resume(
                checkpoints,
                attempt=place.attempt,
                given=place.resume_from,
                is_supervised=place.is_supervised,
            )
        ]
    dist.broadcast_object_list(found)
    return found[0]


def _denounce(place: Place, error: CheckpointRejected) -> None:
    log.error("%s", error)
    own = f".a{place.attempt}"
    if place.rank == 0 and error.path.name.endswith(own):
        try:  # so that nobody tries it again, and this attempt may write that step anew
            publish_verification(error.path, ok=False, bad_files=error.problems, now=time.time())
        except (CheckpointRejected, OSError) as failure:
            log.warning("%s is not marked as damaged: %s", error.path, failure)


# ---------------------------------------------------------------- loop


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logs:
    """The evidence files of this attempt: samples of this rank, and on rank 0 the loss."""

    samples: StepLog | None = None
    loss: StepLog | None = None

    @staticmethod
    def open(place: Place, resumed_from: str) -> _Logs:
        if place.run_dir is None:
            return _Logs()
        samples = samples_path(place.run_dir, place.attempt, place.rank)
        loss = loss_path(place.run_dir, place.attempt)
        return _Logs(
            samples=StepLog(samples, world=place.world, resumed_from=resumed_from),
            loss=StepLog(loss, world=place.world, resumed_from=resumed_from) if place.rank == 0 else None,
        )

    def append(self, step: int, samples: list[int], loss: float) -> None:
        if self.samples is not None:
            self.samples.append_samples(step, samples)
        if self.loss is not None:
            self.loss.append_loss(step, loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agreed:
    """What all ranks know after a step: the mean loss of the global batch, and what follows."""

    loss: float
    saves: bool
    stops: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    options: Options
    place: Place
    request: SaveAndExit
    progress: ProgressWriter
    windows: ByteWindows
    order: SampleOrder
    state: TrainState
    checkpointer: Checkpointer | None
    schedule: SaveSchedule
    logs: _Logs
    resumed_step: int
    device: torch.device

    def train(self) -> int:
        is_first = True
        while self.state.step < self.options.steps:
            began = time.monotonic()
            agreed = self._step()
            if is_first:
                log.info("step %d done %.2f s after this process began", self.state.step, _age_s())
                is_first = False
            if agreed.stops:
                return self._save_and_leave()
            if agreed.saves and self.state.step < self.options.steps:
                self._save()
            self._collect(self.checkpointer.poll() if self.checkpointer else None)
            if (left := self.options.step_sleep_s - (time.monotonic() - began)) > 0:
                time.sleep(left)
        return self._finish()

    def _step(self) -> _Agreed:
        state = self.state
        samples = self.order.part(state.samples, self.options.global_batch, self.place.rank, self.place.world)
        tokens = self._tokens(samples)
        state.optimizer.zero_grad()
        loss: torch.Tensor = state.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        agreed = self._agree(loss.detach(), state.step + 1)
        state.optimizer.step()
        state.scheduler.step()
        state.step += 1
        state.samples += self.options.global_batch
        self.logs.append(state.step, samples, agreed.loss)
        self.progress.step_done(
            state.step, loss=agreed.loss if math.isfinite(agreed.loss) else None, samples=state.samples
        )
        if state.step % self.options.log_every == 0 or state.step == self.options.steps:
            log.info("step %d/%d loss %.6f", state.step, self.options.steps, agreed.loss)
        return agreed

    def _tokens(self, samples: list[int]) -> torch.Tensor:
        text = bytearray().join(self.windows[index] for index in samples)
        bytes_ = torch.frombuffer(text, dtype=torch.uint8).view(len(samples), self.windows.length + 1)
        return bytes_.to(self.device, torch.int64)

    def _agree(self, loss: torch.Tensor, step: int) -> _Agreed:
        saves = self.place.rank == 0 and self._wants_to_save(step)
        stops = self.request.is_requested or step == self.options.stop_after
        told = torch.tensor([0.0, float(saves), float(stops)], dtype=torch.float64)
        told[0] = loss.double() / self.place.world
        dist.all_reduce(told)
        mean, save_votes, stop_votes = told.tolist()
        return _Agreed(loss=mean, saves=save_votes > 0, stops=stop_votes > 0)

    def _wants_to_save(self, step: int) -> bool:
        # By time, a save is not asked for while one is in flight; by steps, it waits its turn.
        if self.checkpointer is None or not self.schedule.is_due(step):
            return False
        return bool(self.options.save_every_steps) or not self.checkpointer.is_busy

    def _save(self) -> None:
        if self.checkpointer is None:
            return
        with self.progress.phase("save"):
            self._collect(self.checkpointer.wait())
            self.checkpointer.save(self.state)
        self.schedule.saved()

    def _collect(self, result: SaveResult | None) -> None:
        if result is None:
            return
        if result.is_verified:
            log.info(
                "checkpoint %s is verified: %.3f s blocking, %.3f s in all",
                result.path.name,
                result.blocking_s,
                result.total_s,
            )
        elif self.place.rank == 0:
            log.error("checkpoint %s failed, training goes on: %s", result.path.name, result.error)

    # ------------------------------------------------------------ end

    def _save_and_leave(self) -> int:
        verified = self._save_until_verified(tries=1)
        message = f"saved step {self.state.step} on request" if verified else "asked to exit, and the save failed"
        return _end(self.place, EXIT_RESUBMIT, message)

    def _finish(self) -> int:
        self.progress.enter("end")
        if self.state.step > self.resumed_step:  # else the last step is in the checkpoint that was loaded
            self._save_until_verified()
        log.info("finished at step %d", self.state.step)
        return EXIT_FINISHED

    def _save_until_verified(self, tries: int | None = None) -> bool:
        """Save this step and wait for it; without a number of tries until the checkpointer gives up (and raises)."""
        if self.checkpointer is None:
            return False
        while tries is None or tries > 0:
            self._save()
            result = self.checkpointer.wait()
            self._collect(result)
            if result is not None and result.is_verified:
                return True
            tries = None if tries is None else tries - 1
        return False


def _age_s() -> float:
    """Seconds since this process was started, imports included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _end(place: Place, exit_code: int, message: str, *, checkpoint: Path | None = None) -> int:
    if place.rank == 0:
        log.warning("exit %d: %s", exit_code, message)
    if place.rank == 0 and place.run_dir is not None:
        outcome = Outcome(
            attempt=place.attempt,
            exit_code=exit_code,
            message=message,
            checkpoint=str(checkpoint) if checkpoint else "",
        )
        try:
            write_json(RunPaths(place.run_dir).outcome(place.attempt), outcome)
        except OSError as error:
            log.error("the outcome is not written: %s", error)  # noqa: TRY400 - one line says it all
    return exit_code
