"""A rank's part of each checkpoint on its node's own disk, written before the shared file system's.

It is a copy and never counts as a checkpoint (trainer.storage.tiers). So nothing here fails a save: a disk that is
full or broken is told once, one that hangs is waited for in bounds, and the shared file system gets its part all the
same.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.contract import ManifestFile
from trainer.saving.disk import Cancelled, write_image, write_small
from trainer.saving.image import Slot
from trainer.saving.memory import StagingMemory
from trainer.storage.stored import METADATA_NAME
from trainer.storage.tiers import LocalTier

log = logging.getLogger("trainer.saving.nearby")

LEAST_WAIT_S = 20.0
SLOWEST_BYTES_PER_S = 50e6  # a node's disk that takes fewer is given up for this save


class NearbyDisk:
    """This node's disk, for the life of a writer; for one save it is given up after `least_wait_s` and more by size."""

    def __init__(self, root: Path, *, least_wait_s: float = LEAST_WAIT_S) -> None:
        self._tier = LocalTier(root)
        self._least_wait_s = least_wait_s
        self._told = ""
        self._writing: threading.Thread | None = None

    def write(
        self,
        name: str,
        image: tuple[str, StagingMemory, Sequence[Slot]],
        metadata: bytes | None,
        *,
        prepare_thread: Callable[[], None],
        is_cancelled: Callable[[], bool],
    ) -> list[ManifestFile] | None:
        """Write this rank's files of a checkpoint there, durably; None, within bounds, where that did not work."""
        if self._writing is not None and self._writing.is_alive():
            return None  # it hangs since an earlier save
        done: list[list[ManifestFile]] = []
        abandoned = threading.Event()

        def is_over() -> bool:
            return abandoned.is_set() or is_cancelled()

        def work() -> None:
            prepare_thread()
            files = self._try(name, image, metadata, is_over)
            if files is not None:
                done.append(files)

        self._writing = threading.Thread(target=work, name="nearby", daemon=True)
        self._writing.start()
        self._writing.join(self._least_wait_s + image[1].size / SLOWEST_BYTES_PER_S)
        if self._writing.is_alive():
            abandoned.set()
            self._tell(f"{self._tier.path(name)}: this node's disk hangs")
            return None
        return done[0] if done else None

    def publish(self, name: str, manifest: bytes) -> None:
        """All ranks have their part on their nodes' disks: say so on this one. Returns at once."""
        threading.Thread(target=lambda: self._publish(name, manifest), name="nearby", daemon=True).start()

    def _publish(self, name: str, manifest: bytes) -> None:
        problem = self._tier.publish(name, manifest)
        if problem:
            self._tell(problem)
        else:
            self._told = ""

    def _try(
        self,
        name: str,
        image: tuple[str, StagingMemory, Sequence[Slot]],
        metadata: bytes | None,
        is_over: Callable[[], bool],
    ) -> list[ManifestFile] | None:
        for is_last in (False, True):
            try:
                return self._write(name, image, metadata, is_over)
            except Cancelled:
                return None
            except OSError as error:
                self._tier.drop(name, image[0])
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if is_last or not is_full:
                    self._tell(f"{self._tier.path(name)}: {error.strerror or error}")
                    return None
                self._tier.make_room(keep=1)
        return None

    def _write(
        self,
        name: str,
        image: tuple[str, StagingMemory, Sequence[Slot]],
        metadata: bytes | None,
        is_over: Callable[[], bool],
    ) -> list[ManifestFile]:
        folder = self._tier.begin(name)
        file_name, memory, slots = image
        files = []
        for left in (file_name, METADATA_NAME) if metadata is not None else (file_name,):
            self._tier.drop(name, left)  # of an earlier try at this step
        if memory.size:
            files.append(write_image(memory, slots, folder / file_name, is_cancelled=is_over))
        if metadata is not None:
            files.append(write_small(folder / METADATA_NAME, metadata))
        return files

    def _tell(self, problem: str) -> None:
        if not self._told:
            log.warning("%s: checkpoints are not kept on this node's disk now; saves go on without it", problem)
        self._told = problem
