"""One save in one writer: its threads, from the staged bytes to the peer's file that was read back.

Each thread ends with an event for the writer's loop; a failure of any is the event "failed" with its reason.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.contract import ManifestFile
from trainer.saving.disk import Cancelled, Frontier, read_back, sum_image, sum_small, write_image, write_small
from trainer.saving.guard import Guard
from trainer.saving.image import Slot
from trainer.saving.memory import StagingMemory
from trainer.saving.nearby import NearbyDisk
from trainer.saving.protect import Chunk, Protector, Region, copy_behind
from trainer.storage.stored import Condition, check_file

METADATA_NAME = ".metadata"
_VISIBLE_WITHIN_S = 10.0  # NFS clients cache "no such folder" for a few seconds
_NOTICES = 64  # that a rank sends while it writes, however large its file is
_NOTICE_BYTES = 16 * 1024 * 1024

Event = dict[str, Any]
Post = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a writer knows of the saves to come: the memory, the slots in it, and rank 0's `.metadata`."""

    memory: StagingMemory
    name: str
    slots: tuple[Slot, ...]
    metadata: bytes | None


@dataclass(frozen=True, slots=True)
class Behind:
    """What is copied behind the training: protected chunks, and what is the same bytes twice (offset, source, size)."""

    chunks: Sequence[Chunk] = ()
    twins: Sequence[tuple[int, int, int]] = ()

    def without(self, regions: Collection[Region]) -> Behind:
        """What is left when the rank copies these regions itself."""
        own = [(region.address, region.address + region.size) for region in regions]
        chunks = [chunk for chunk in self.chunks if not any(begin <= chunk.address < end for begin, end in own)]
        return Behind(chunks, self.twins)


class Job:
    """The save in flight. `post` takes events from any thread; `prepare_thread` lowers a thread's priority."""

    def __init__(
        self,
        save: str,
        prepared: Prepared,
        request: Mapping[str, Any],
        post: Post,
        nearby: NearbyDisk | None = None,
    ) -> None:
        self.save = save
        self.request = request
        self.folder = ""  # name of the checkpoint's, once it is there
        self._nearby = nearby
        self.is_staged = False
        self.hindered: list[int] = []  # where the rank waited to write while its training stood still, once staged
        self.ended: Event | None = None
        self._prepared = prepared
        self._post = post
        self._cancelled = threading.Event()
        self._filled = threading.Event()
        self._peer = _PeerFiles()
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------ from the writer's loop

    def stage(self, behind: Behind, protector: Protector | None, guard: Guard | None) -> None:
        """Begin to copy what is protected; the event "staged" follows when the rank's own part is filled, too."""
        self._start("stage", lambda: self._stage(behind, protector, guard))

    def fill(self) -> None:
        """The rank has copied its own part."""
        self._filled.set()

    def open(self, path: Path, prepare_thread: Callable[[], None]) -> None:
        """Write, and read back what the peer writes: every rank's bytes are staged and the folder is there."""
        self.folder = path.name
        self._start("write", lambda: self._write(path, prepare_thread))
        self._start("read", lambda: self._read_back(path, prepare_thread))

    def compare(self, prepare_thread: Callable[[], None]) -> None:
        """Say what would be written: every rank's bytes are staged, and the step is in its place already."""
        self._start("compare", lambda: self._compare(prepare_thread))

    def hear_peer(self, event: Event) -> None:
        """What the rank whose files are read back here has written."""
        self._peer.hear(event)

    def end(self, event: Event) -> None:
        """The save has ended for all; threads still at it stop at their next step."""
        self.ended = event
        self._cancelled.set()
        self._filled.set()
        self._peer.cancel()

    @property
    def is_over(self) -> bool:
        """True when the save has ended and nothing here touches the memory or a file any more."""
        return self.ended is not None and not any(thread.is_alive() for thread in self._threads)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Cancelled:
            pass
        except OSError as error:
            self._tell("failed", error=_describe(error))
        except Exception as error:  # noqa: BLE001 - whatever it is: the rank must hear of it
            self._tell("failed", error=f"{type(error).__name__}: {error}")
        finally:
            self._post({"kind": "thread_ended"})

    def _tell(self, kind: str, **more: Any) -> None:
        self._post({"kind": kind, "save": self.save, **more})

    # ------------------------------------------------------------ in threads

    def _stage(self, behind: Behind, protector: Protector | None, guard: Guard | None) -> None:
        memory = self._prepared.memory
        if protector is not None and behind.chunks:
            beat = guard.beat if guard is not None else lambda: None
            self.hindered = copy_behind(
                protector,
                behind.chunks,
                memory.address,
                is_cancelled=self._cancelled.is_set,
                beat=beat,
                is_standing=lambda: not self._filled.is_set(),
            )
        if guard is not None:
            guard.disarm()
        self._filled.wait()
        for offset, source, size in behind.twins:
            memory.view[offset : offset + size] = memory.view[source : source + size]
        if not self._cancelled.is_set():
            self._tell("staged", request=self.request)

    def _write(self, path: Path, prepare_thread: Callable[[], None]) -> None:
        prepare_thread()
        files: list[ManifestFile] = []
        prepared = self._prepared
        if self._nearby is not None:
            self._write_nearby(self._nearby, path.name, prepare_thread)
        _await_folder(path)
        try:
            if prepared.metadata is not None:
                files.append(write_small(path / METADATA_NAME, prepared.metadata))
            if prepared.memory.size:
                files.append(
                    write_image(
                        prepared.memory,
                        prepared.slots,
                        path / prepared.name,
                        prepare_thread=prepare_thread,
                        on_written=self._notices(prepared),
                        is_cancelled=self._cancelled.is_set,
                    )
                )
        except OSError as error:
            if not error.filename:
                error.filename = str(path / prepared.name)
            raise
        self._tell("sealed", files=[asdict(file) for file in files])

    def _compare(self, prepare_thread: Callable[[], None]) -> None:
        prepare_thread()
        files: list[ManifestFile] = []
        prepared = self._prepared
        if prepared.metadata is not None:
            files.append(sum_small(METADATA_NAME, prepared.metadata))
        if prepared.memory.size:
            files.append(sum_image(prepared.memory, prepared.slots, prepared.name, self._cancelled.is_set))
        self._tell("compared", files=[asdict(file) for file in files])

    def _write_nearby(self, disk: NearbyDisk, name: str, prepare_thread: Callable[[], None]) -> None:
        prepared = self._prepared
        files = disk.write(
            name,
            (prepared.name, prepared.memory, prepared.slots),
            prepared.metadata,
            prepare_thread=prepare_thread,
            is_cancelled=self._cancelled.is_set,
        )
        if files is not None:
            self._tell("nearby", files=[asdict(file) for file in files])

    def _notices(self, prepared: Prepared) -> Callable[[int], None]:
        every = max(prepared.memory.size // _NOTICES, _NOTICE_BYTES)
        told = 0

        def notice(done: int) -> None:
            nonlocal told
            if done - told >= every:
                told = done
                self._tell("written", name=prepared.name, size=prepared.memory.size, done=done)

        return notice

    def _read_back(self, path: Path, prepare_thread: Callable[[], None]) -> None:
        prepare_thread()
        early = None
        name, size = self._peer.await_begin()
        if name:
            with suppress(OSError):  # what can't be read yet is read when it is durable
                early = read_back(path / name, size, self._peer.written, prepare_thread=prepare_thread)
        files = self._peer.await_files()
        bad: list[dict[str, str]] = []
        unknown: list[dict[str, str]] = []
        for file in files:
            if file.path == name and file.xxh3_128 == early and file.size_bytes == size:
                continue
            verdict = check_file(path, file, from_storage=True)
            if verdict.condition is not Condition.GOOD:
                problems = bad if verdict.condition is Condition.BAD else unknown
                problems.append({"path": verdict.path, "reason": verdict.reason})
        self._tell("checked", bad=bad, unknown=unknown)


class _PeerFiles:
    """What is known of the files of the rank that is read back here."""

    def __init__(self) -> None:
        self.written = Frontier()
        self._changed = threading.Condition()
        self._name, self._size = "", 0
        self._files: list[ManifestFile] | None = None
        self._is_cancelled = False

    def hear(self, event: Event) -> None:
        with self._changed:
            if event["kind"] == "peer_written":
                self._name, self._size = str(event["name"]), int(event["size"])
                self.written.advance(int(event["done"]))
            else:
                self._files = [ManifestFile(**file) for file in event["files"]]
                self.written.advance(max([0, *(file.size_bytes for file in self._files)]))
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._is_cancelled = True
            self.written.cancel()
            self._changed.notify_all()

    def await_begin(self) -> tuple[str, int]:
        """(name, size) of the file that is being written; an empty name when all is written already."""
        self._await(lambda: bool(self._name) or self._files is not None)
        return self._name, self._size

    def await_files(self) -> list[ManifestFile]:
        """The entries of what the rank has written, durable by now."""
        self._await(lambda: self._files is not None)
        assert self._files is not None
        return self._files

    def _await(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or condition())
            if self._is_cancelled:
                raise Cancelled


def _await_folder(path: Path) -> None:
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise FileNotFoundError(errno.ENOENT, "rank 0 made it and it is not seen here", str(path))
        time.sleep(0.05)


def _describe(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    text = f"{where}{error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename:
        with suppress(OSError):
            usage = shutil.disk_usage(Path(os.fsdecode(error.filename)).parent)
            text += f" ({usage.free // 2**20} MiB of {usage.total // 2**20} MiB are free there)"
    return text
