"""The ways to save that bench-checkpoint measures against each other, each behind the same two calls; needs torch.

Each way is given its best: own gloo groups, and stagers that keep their memory between saves.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.checkpoint_model import Training
from bench.stage import BenchFailed
from trainer.contract import fsync_dir


class Way(Protocol):
    """One way to save: `begin` is what training waits for, `finish` ends when the save is as durable as it gets.

    `remove`: what was saved last, on rank 0; every rank calls it.
    """

    def begin(self, path: Path) -> None: ...

    def is_done(self) -> bool: ...

    def finish(self) -> None: ...

    def remove(self) -> None: ...

    def close(self) -> None: ...


def collect(training: Training) -> dict[str, Any]:
    """The state as a user of DCP collects it: live tensors, and a random state for each rank."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": training.scheduler.state_dict(),
        f"rng.rank{dist.get_rank()}": torch.get_rng_state(),
    }


class Sync:
    """`dcp.save`; finished when its files, their names and the folder's own are on the disk."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._path = Path()

    def begin(self, path: Path) -> None:
        self._path = path
        dcp_save(collect(self._training), storage_writer=FileSystemWriter(path))

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        rank = dist.get_rank()
        for file in sorted(self._path.iterdir()):
            if file.name.startswith(f"__{rank}_") or (rank == 0 and file.name == ".metadata"):
                _fsync(file)
        fsync_dir(self._path)
        if rank == 0:
            fsync_dir(self._path.parent)

    def remove(self) -> None:
        _remove(self._path)

    def close(self) -> None:
        pass


class Memcpy:
    """A bare copy of the same bytes into memory that was touched before; nothing is saved."""

    def __init__(self, training: Training) -> None:
        self._sources = training.local_tensors()
        self._copies = [torch.empty_like(source, device="cpu").fill_(1) for source in self._sources]

    def begin(self, path: Path) -> None:
        del path
        for copy, source in zip(self._copies, self._sources, strict=True):
            copy.copy_(source)

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def remove(self) -> None:
        pass

    def close(self) -> None:
        self._copies.clear()


class Async:
    """`dcp.async_save` in a thread or in a process of its own, with a stager that is used again."""

    def __init__(self, training: Training, kind: AsyncCheckpointerType) -> None:
        self._training = training
        self._kind = kind
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, kind is AsyncCheckpointerType.PROCESS, False, False))
        self._save: Future[Any] | None = None
        self._path = Path()

    def begin(self, path: Path) -> None:
        self._path = path
        begun = async_save(
            collect(self._training),
            storage_writer=FileSystemWriter(path),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(begun, AsyncSaveResponse):
            raise BenchFailed("async_save staged in the background, which this benchmark does not wait for")
        self._save = begun

    def is_done(self) -> bool:
        return self._save is None or self._save.done()

    def finish(self) -> None:
        if self._save is not None:
            self._save.result()
        self._save = None

    def remove(self) -> None:
        _remove(self._path)

    def close(self) -> None:
        self.finish()
        self._stager.close()


def _remove(path: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
