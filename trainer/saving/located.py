"""The files of one checkpoint as one rank sees them: each at the place nearest by, or at the checkpoint's own."""

from __future__ import annotations

import errno
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from trainer.contract import ManifestFile
from trainer.format.metadata import METADATA_NAME, Entry, Metadata, MetadataRefused, read_metadata
from trainer.format.stale import retry_stale
from trainer.saving.copies import OWN, Copy, Failure
from trainer.saving.filereads import Damaged, OpenFile, open_file
from trainer.saving.itemhead import HEAD_BYTES, parse_head
from trainer.saving.zipimage import NotBytes, parse_bytes
from trainer.storage.stored import checksum_bytes

Locate = Callable[[ManifestFile], Path]

T = TypeVar("T")


class CopyFailed(Exception):
    """A copy could not be read as recorded."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(str(failure))


class Located:
    """Reads the files of a manifest, by their names in it. `on_bytes` hears how many were read, from any thread."""

    def __init__(
        self, path: Path, files: Iterable[ManifestFile], locate: Locate | None, on_bytes: Callable[[int], None]
    ) -> None:
        self.files: Mapping[str, ManifestFile] = {file.path: file for file in files}
        self._path = path
        self._on_bytes = on_bytes
        self._elsewhere: dict[str, tuple[Path, str]] = {}
        for file in self.files.values() if locate is not None else ():
            found = _look_at(locate(file)) if locate is not None else None
            if found is not None and found[0] != path / file.path:
                self._elsewhere[file.path] = found

    def copy_of(self, name: str) -> Copy:
        """The copy of a file that is read here."""
        found = self._elsewhere.get(name)
        return Copy(name, found[1] if found is not None else OWN)

    def forsake(self, failed: Iterable[Copy]) -> set[str]:
        """Read the checkpoint's own files in place of these copies; returns the names of those that were read here."""
        hit = {copy.file for copy in failed if copy.place != OWN and copy == self.copy_of(copy.file)}
        for name in hit:
            del self._elsewhere[name]
        return hit

    def read(self, name: str, work: Callable[[OpenFile], T]) -> T:
        """What `work` makes of the copy that is read here; raises `CopyFailed`. It may be called more than once."""
        found = self._elsewhere.get(name)
        place = found[0] if found is not None else self._path / name
        expected = self.files[name]

        def attempt() -> T:
            with open_file(place, expected, self._on_bytes) as file:
                return work(file)

        try:
            return retry_stale(attempt)
        except Damaged as error:
            raise CopyFailed(Failure(copy=self.copy_of(name), reason=str(error))) from None
        except OSError as error:
            reason = f"could not be read: {error.strerror or error}"
            number = error.errno or errno.EIO
            raise CopyFailed(Failure(copy=self.copy_of(name), reason=reason, errno=number)) from error

    def read_safely(self, name: str, work: Callable[[OpenFile], T]) -> T:
        """Like `read`, and falls back to the checkpoint's own file at once."""
        try:
            return self.read(name, work)
        except CopyFailed as error:
            if not self.forsake([error.failure.copy]):
                raise
            return self.read(name, work)

    def read_metadata(self) -> Metadata:
        """The metadata, whose checksum was right; raises `CopyFailed`."""
        try:
            return self.read_safely(METADATA_NAME, self._parse_metadata)
        except MemoryError:
            failure = Failure(
                copy=self.copy_of(METADATA_NAME), reason="needs more memory than there is", errno=errno.ENOMEM
            )
            raise CopyFailed(failure) from None

    def _parse_metadata(self, file: OpenFile) -> Metadata:
        expected = self.files[METADATA_NAME]
        data = file.read(0, expected.size_bytes)
        if checksum_bytes(data) != expected.xxh3_128:
            raise Damaged("does not match its checksum")
        try:
            return read_metadata(data, is_bounded=False)  # what a job could save, it must be able to load
        except MetadataRefused as error:
            raise Damaged(f"is refused: {error}") from None

    def read_item(self, entry: Entry) -> bytes:
        """The bytes of a byte item, whose CRC32 was right; raises `CopyFailed`."""
        return self.read_safely(entry.path, lambda file: _parse_item(entry, file))


def _parse_item(entry: Entry, file: OpenFile) -> bytes:
    item = file.read(entry.offset, entry.length)
    head = parse_head(item[:HEAD_BYTES], entry.length)
    pickled = item[head.data_at : head.data_at + head.size]
    if zlib.crc32(pickled) != head.crc:
        raise Damaged(f"holds damaged bytes as {_say_item(entry.key)}")
    try:
        return parse_bytes(pickled)
    except NotBytes as error:
        raise Damaged(f"holds as {_say_item(entry.key)} what is {error}") from None


def _say_item(key: str) -> str:
    """For people: what an item is that holds no tensor."""
    kind, _, rank = key.partition(".")
    if kind == "rank" and rank:
        return f"what rank {rank} keeps for itself (random states and the like)"
    return "what all ranks share (counters, scheduler and the like)" if key == "shared" else key


def _look_at(path: Path) -> tuple[Path, str] | None:
    """The path, and what tells this copy from one that another node sees by the same path."""
    try:
        status = path.stat()
    except OSError:
        return None
    return path, f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"
