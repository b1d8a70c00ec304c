"""The training loop of the reference script: build, restore, train, and leave with the right exit code."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # fully_shard imports it anyhow; here it costs less, see trainer.example.train
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from trainer.checkpoint import (
    Checkpointer,
    CheckpointRejected,
    DataChanged,
    DataNotElastic,
    LossDiverged,
)
from trainer.contents.randomness import seed_rng
from trainer.contract import (
    EXIT_CHECKPOINT_REJECTED,
    EXIT_DIVERGED,
    EXIT_DO_NOT_RESTART,
    EXIT_FINISHED,
    EXIT_RESUBMIT,
    Outcome,
    RunPaths,
    write_json,
)
from trainer.data import ByteWindows, Share, read_text
from trainer.example.model import Gpt, Shape
from trainer.example.options import Options
from trainer.history import StepLog, loss_path, samples_path
from trainer.loaders import GlobalBatches
from trainer.progress import ProgressWriter
from trainer.session.place import Place
from trainer.signals import SaveRequests

log = logging.getLogger("trainer.example")


def run(options: Options, place: Place, requests: SaveRequests, progress: ProgressWriter) -> int:
    """Train to the last step or until asked to save and exit; returns the exit code."""
    log.info("torch is imported, %.2f s after this process began", _age_s())
    torch.set_num_threads(1)  # ranks share the cores of small machines, and sums keep their order
    with _process_group(options, place):
        log.info("%d ranks have met, %.2f s after this process began", place.world, _age_s())
        try:
            return _train(options, place, requests, progress)
        except LossDiverged:
            return EXIT_DIVERGED
        except CheckpointRejected:
            return EXIT_CHECKPOINT_REJECTED
        except (DataChanged, DataNotElastic):
            return EXIT_DO_NOT_RESTART


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


def _train(options: Options, place: Place, requests: SaveRequests, progress: ProgressWriter) -> int:
    windows = ByteWindows(text=read_text(options.text), length=options.seq_len)
    data = GlobalBatches(
        len(windows),
        seed=options.seed,
        global_batch=options.global_batch,
        rank=place.rank,
        world=place.world,
        fingerprint=windows.fingerprint,
    )
    _agree_on_data(windows.fingerprint, place)
    model, optimizer, scheduler = _build(options, place)
    logs = _Logs()
    with Checkpointer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        seed=options.seed,
        run_dir=place.run_dir,
        every_s=options.save_every_s,
        every_steps=options.save_every_steps,
        when_busy="wait" if options.save_every_steps else "skip",
        keep_last=options.keep_last,
        on_loss=logs.append_loss,
        requests=requests,
        progress=progress,
    ) as checkpointer:
        restored = checkpointer.restore()
        logs.open(checkpointer.place, restored.path.name if restored else "")
        training = _Training(
            options=options,
            windows=windows,
            data=data,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            checkpointer=checkpointer,
            logs=logs,
            device=_device(place),
        )
        code = training.run()
    if code == EXIT_FINISHED:
        log.info("finished at step %d", checkpointer.steps_done)
    return code


def _agree_on_data(fingerprint: str, place: Place) -> None:
    """Refuse to start when nodes read different text (another Python, a half-copied folder): nobody would notice."""
    seen: list[str] = [""] * place.world
    dist.all_gather_object(seen, fingerprint)
    others = [str(rank) for rank, found in enumerate(seen) if found != seen[0]]
    if others:
        error = DataChanged(f"ranks {', '.join(others)} read other text than rank 0 does")
        if place.rank == 0 and place.run_dir is not None:
            outcome = Outcome(attempt=place.attempt, exit_code=EXIT_DO_NOT_RESTART, message=str(error))
            write_json(RunPaths(place.run_dir).outcome(place.attempt), outcome)
        raise error


def _device(place: Place) -> torch.device:
    return torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _build(
    options: Options, place: Place
) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
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
    return model, optimizer, scheduler


def lr_factor(step: int, warmup: int, steps: int) -> float:
    """Share of the highest learning rate after `step` steps: linear up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


# ---------------------------------------------------------------- loop


class _Logs:
    """The evidence files of this attempt: samples of this rank, and on rank 0 the loss. Nothing before `open`."""

    def __init__(self) -> None:
        self._samples: StepLog | None = None
        self._loss: StepLog | None = None

    def open(self, place: Place, resumed_from: str) -> None:
        if place.run_dir is None:
            return
        samples = samples_path(place.run_dir, place.attempt, place.rank)
        loss = loss_path(place.run_dir, place.attempt)
        self._samples = StepLog(samples, world=place.world, resumed_from=resumed_from)
        self._loss = StepLog(loss, world=place.world, resumed_from=resumed_from) if place.rank == 0 else None

    def append_samples(self, step: int, samples: list[int]) -> None:
        if self._samples is not None:
            self._samples.append_samples(step, samples)

    def append_loss(self, step: int, loss: float) -> None:
        if self._loss is not None:
            self._loss.append_loss(step, loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    options: Options
    windows: ByteWindows
    data: GlobalBatches
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    checkpointer: Checkpointer
    logs: _Logs
    device: torch.device

    def run(self) -> int:
        is_first = True
        while (step := self.checkpointer.steps_done + 1) <= self.options.steps:
            began = time.monotonic()
            share = self.data.next()
            loss = self._step(share)
            self.logs.append_samples(step, share.samples)
            if self.checkpointer.step(loss=loss):
                return EXIT_RESUBMIT
            if is_first:
                log.info("step %d done %.2f s after this process began", step, _age_s())
                is_first = False
            if step % self.options.log_every == 0 or step == self.options.steps:
                log.info("step %d/%d loss of rank 0 %.6f", step, self.options.steps, float(loss))
            if step == self.options.stop_after:
                self.checkpointer.leave()
                return EXIT_RESUBMIT
            if (left := self.options.step_sleep_s - (time.monotonic() - began)) > 0:
                time.sleep(left)
        return EXIT_FINISHED

    def _step(self, share: Share) -> torch.Tensor:
        tokens = self._tokens(share.inputs)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:]) * share.weight
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def _tokens(self, samples: list[int]) -> torch.Tensor:
        text = bytearray().join(self.windows[index] for index in samples)
        bytes_ = torch.frombuffer(text, dtype=torch.uint8).view(len(samples), self.windows.length + 1)
        return bytes_.to(self.device, torch.int64)


def _age_s() -> float:
    """Seconds since this process was started, imports included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
