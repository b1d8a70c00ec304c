"""Checkpoints in object storage, through fsspec: one folder of objects each, its manifest put there last.

`s3://bucket/prefix/<run>/step-<k>.a<n>/` holds the files that the manifest names, and MANIFEST.json once all of them
are there. What is there is compared with what was sent, by the storage's own checksum where it can be worked out and by
reading back where it can't; what comes back is compared with the manifest. Any URL that fsspec knows will do. Where
the storage is and who may use it is told in its own way: for S3 by AWS_ENDPOINT_URL, AWS_PROFILE and the rest of AWS's
variables and files, for all by fsspec's FSSPEC_* variables. Neither is ever written down here.

By hand: `python -m trainer.storage.objects list|put|get|check`, see trainer.storage.objectcli.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from trainer.contract import MANIFEST_NAME, ManifestFile, fsync_dir, parse_checkpoint_name
from trainer.storage.bandwidth import ByteBudget
from trainer.storage.stored import CheckpointRejected

CHUNK_BYTES = 4 * 1024 * 1024
PART_BYTES = 8 * 1024 * 1024  # S3 takes parts from 5 MiB on, and at most 10,000 of them
MAX_PARTS = 9_000

_S3_OPTIONS: dict[str, Any] = {
    "config_kwargs": {
        "connect_timeout": 10,
        "read_timeout": 60,
        "retries": {"total_max_attempts": 1},  # s3fs tries a few times itself, and trainer.storage.uploads again later
        # Not every server that speaks S3 knows the newer checksums, and some send the whole object's with a part of
        # it; all that is copied is compared here anyhow.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    },
    "fixed_upload_size": True,
}


class ObjectStorageFailed(Exception):
    """Object storage did not answer, refused, or is not set up; the message says what, for a person.

    `is_refused`: trying again does not help until somebody changes something (credentials, bucket, package).
    """

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        self.is_refused = is_refused
        super().__init__(message)


class ObjectTier:
    """The checkpoints of one run in object storage. For one thread. Every method may raise `ObjectStorageFailed`.

    `moved` is called after each piece that was compared or sent.
    """

    def __init__(self, url: str, *, budget: ByteBudget | None = None, moved: Callable[[], None] = lambda: None) -> None:
        self.url = url.rstrip("/")
        self._moved = moved
        self._budget = budget or ByteBudget(0.0)
        self._fs, self._root = _open_storage(self.url)

    def at(self, name: str, file: str) -> str:
        """The URL of one object."""
        return f"{self.url}/{name}/{file}"

    def exists(self) -> bool:
        """True when anything is there."""
        with self._telling(self.url):
            return bool(self._fs.exists(self._root))

    def names(self) -> dict[str, bool]:
        """Names of the checkpoints there, and whether each has its manifest."""
        with self._telling(self.url):
            folders = [entry["name"] for entry in self._list(self._root) if entry["type"] == "directory"]
            found = {folder.rstrip("/").rsplit("/", 1)[-1]: folder for folder in folders}
            return {
                name: self._fs.exists(f"{self._root}/{name}/{MANIFEST_NAME}")
                for name in found
                if parse_checkpoint_name(name) is not None
            }

    def _list(self, path: str) -> list[dict[str, Any]]:
        try:
            return list(self._fs.ls(path, detail=True, **_fresh(self._fs)))
        except FileNotFoundError:
            return []

    def manifest(self, name: str) -> bytes | None:
        """The bytes of a checkpoint's manifest; None where there is none."""
        with self._telling(self.at(name, MANIFEST_NAME)):
            try:
                return bytes(self._fs.cat_file(f"{self._root}/{name}/{MANIFEST_NAME}"))
            except FileNotFoundError:
                return None

    def has(self, name: str, file: ManifestFile) -> bool:
        """True when an object of that name has the recorded size. Says nothing about its content."""
        with self._telling(self.at(name, file.path)):
            return self._size(f"{self._root}/{name}/{file.path}") == file.size_bytes

    def _size(self, path: str) -> int | None:
        try:
            return int(self._fs.info(path, **_fresh(self._fs))["size"])
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------ there

    def put_file(self, name: str, file: ManifestFile, source: Path) -> None:
        """Copy one file there and compare what arrived; what an earlier try brought there is not sent again.

        Raises `CheckpointRejected` when `source` is not what the manifest says, OSError when it can't be read.
        """
        path = f"{self._root}/{name}/{file.path}"
        part_bytes = _part_bytes(file.size_bytes)
        if self._holds(name, file, source, part_bytes):
            return
        sums = self._send(path, part_bytes, source, self.at(name, file.path))
        if sums.xxh3_128 != file.xxh3_128 or sums.size != file.size_bytes:
            self._remove(path)
            problem = f"{file.path} has {sums.size} bytes that do not match its checksum"
            raise CheckpointRejected(source.parent, [problem], files=[file.path])
        with self._telling(self.at(name, file.path)):
            info = self._fs.info(path, **_fresh(self._fs))
            is_same = int(info["size"]) == file.size_bytes and (sums.fits(info.get("ETag")) or self._reads(path, file))
        if not is_same:
            self._remove(path)
            raise ObjectStorageFailed(f"{self.at(name, file.path)}: what arrived is not what was sent")

    def _holds(self, name: str, file: ManifestFile, source: Path, part_bytes: int) -> bool:
        """True when an object's own checksum shows that it is the file already: reading is cheaper than sending."""
        with self._telling(self.at(name, file.path)):
            try:
                info = self._fs.info(f"{self._root}/{name}/{file.path}", **_fresh(self._fs))
            except FileNotFoundError:
                return False
        if int(info["size"]) != file.size_bytes or not info.get("ETag"):
            return False
        sums = _Sums(part_bytes)
        with source.open("rb", buffering=0) as reader:
            while chunk := reader.read(CHUNK_BYTES):
                sums.add(chunk)
                self._moved()
        return sums.xxh3_128 == file.xxh3_128 and sums.fits(info["ETag"])

    def _send(self, path: str, part_bytes: int, source: Path, url: str) -> _Sums:
        sums = _Sums(part_bytes)
        with source.open("rb", buffering=0) as reader, self._telling(url):
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            with _writer(self._fs, path, part_bytes) as writer:
                for chunk in self._chunks(lambda size: _read_ours(reader, size)):
                    sums.add(chunk)
                    writer.write(chunk)
        return sums

    def _chunks(self, read: Callable[[int], bytes]) -> Iterator[bytes]:
        size = self._budget.chunk_bytes(CHUNK_BYTES)
        while chunk := read(size):
            self._budget.take(len(chunk))
            yield chunk
            self._moved()

    def _reads(self, path: str, file: ManifestFile) -> bool:
        digest = xxhash.xxh3_128()
        with self._fs.open(path, "rb", block_size=CHUNK_BYTES, cache_type="readahead") as reader:
            for chunk in self._chunks(reader.read):
                digest.update(chunk)
        return bool(digest.hexdigest() == file.xxh3_128)

    def put_manifest(self, name: str, data: bytes) -> None:
        """Publish a checkpoint there: all of its files must have been put before."""
        path = f"{self._root}/{name}/{MANIFEST_NAME}"
        with self._telling(self.at(name, MANIFEST_NAME)):
            self._fs.pipe_file(path, data)
            if self._fs.cat_file(path) != data:
                raise ObjectStorageFailed(f"{self.at(name, MANIFEST_NAME)}: what arrived is not what was sent")

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first; one that is not there is no error."""
        with self._telling(f"{self.url}/{name}"):
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}/{MANIFEST_NAME}")
            with suppress(FileNotFoundError):
                self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _remove(self, path: str) -> None:
        with suppress(Exception):
            self._fs.rm_file(path)

    # ------------------------------------------------------------ back

    def get_file(
        self, name: str, file: ManifestFile, target: Path, *, told: Callable[[int], None] = lambda _count: None
    ) -> None:
        """Copy one file back to `target`, compared with the manifest and durable; goes on where an earlier try ended.

        `told` is called with the bytes of each piece. Raises `CheckpointRejected` when what is there is not what the
        manifest says, OSError of this side.
        """
        url = self.at(name, file.path)
        with self._telling(url):
            size = self._size(f"{self._root}/{name}/{file.path}")
        if size != file.size_bytes:
            what = "is missing" if size is None else f"has {size} bytes, its manifest says {file.size_bytes}"
            raise CheckpointRejected(target.parent, [f"{url} {what}"], files=[file.path])
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        was_begun = part.exists()
        digest = self._fetch(name, file, part, told)
        if digest != file.xxh3_128 and was_begun:
            part.unlink()
            digest = self._fetch(name, file, part, told)
        if digest != file.xxh3_128:
            part.unlink()
            raise CheckpointRejected(target.parent, [f"{url} does not match its checksum"], files=[file.path])
        part.replace(target)
        fsync_dir(target.parent)

    def _fetch(self, name: str, file: ManifestFile, part: Path, told: Callable[[int], None]) -> str:
        digest = xxhash.xxh3_128()
        path = f"{self._root}/{name}/{file.path}"
        with part.open("a+b") as writer:
            writer.truncate(min(os.fstat(writer.fileno()).st_size, file.size_bytes))
            writer.seek(0)
            at = 0
            while at < file.size_bytes and (known := writer.read(CHUNK_BYTES)):
                digest.update(known)
                at += len(known)
                told(len(known))
            while at < file.size_bytes:
                end = min(at + PART_BYTES, file.size_bytes)
                with self._telling(self.at(name, file.path)):
                    data = bytes(self._fs.cat_file(path, start=at, end=end))
                if len(data) != end - at:
                    raise ObjectStorageFailed(
                        f"{self.at(name, file.path)}: {len(data)} bytes came instead of {end - at}"
                    )
                self._budget.take(len(data))
                digest.update(data)
                writer.write(data)
                at = end
                told(len(data))
            writer.flush()
            os.fsync(writer.fileno())
        return str(digest.hexdigest())

    # ------------------------------------------------------------ errors

    @contextmanager
    def _telling(self, url: str) -> Iterator[None]:
        """Errors of whatever library stands behind fsspec, as one kind; errors of this side's files pass."""
        try:
            yield
        except (ObjectStorageFailed, CheckpointRejected):
            raise
        except _OurSide as error:
            raise error.error from None
        except Exception as error:
            raise _describe(url, error) from error


def _part_bytes(size: int) -> int:
    least = max(PART_BYTES, -(-size // MAX_PARTS))
    return -(-least // CHUNK_BYTES) * CHUNK_BYTES


class _OurSide(Exception):
    """An error of the file that is copied, on its way through code that talks to the storage."""

    def __init__(self, error: OSError) -> None:
        self.error = error
        super().__init__(str(error))


def _read_ours(reader: io.RawIOBase, size: int) -> bytes:
    try:
        return reader.read(size) or b""
    except OSError as error:
        raise _OurSide(error) from error


def _describe(url: str, error: Exception) -> ObjectStorageFailed:
    kind = type(error).__name__
    is_refused = isinstance(error, PermissionError) or kind in {"NoCredentialsError", "ProfileNotFound"}
    is_refused = is_refused or (isinstance(error, FileNotFoundError) and "bucket" in str(error).lower())
    text = str(error) or kind
    hint = ": look at the credentials and rights that the job has" if isinstance(error, PermissionError) else ""
    return ObjectStorageFailed(f"{url}: {kind}: {text}{hint}", is_refused=is_refused)


def _open_storage(url: str) -> tuple[Any, str]:
    """The file system that fsspec has for a URL, and the path in it."""
    try:
        fsspec = importlib.import_module("fsspec")
        is_s3 = url.startswith(("s3://", "s3a://"))
        options = dict(_S3_OPTIONS) if is_s3 else {}
        fs, path = fsspec.core.url_to_fs(url, **options, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        what = f"{url}: {error}: install what fsspec needs for it (pip install 'slurm-supervisor[objects]' for S3)"
        raise ObjectStorageFailed(what, is_refused=True) from error
    except (ValueError, TypeError) as error:
        raise ObjectStorageFailed(f"{url}: {error}", is_refused=True) from error
    return fs, str(path).rstrip("/")


def _fresh(fs: Any) -> dict[str, bool]:
    """The argument that has a file system ask instead of remembering, where it knows it."""
    return {"refresh": True} if "s3" in fs.protocol else {}


@contextmanager
def _writer(fs: Any, path: str, part_bytes: int) -> Iterator[Any]:
    """An object being written; it is published by the end of the block alone, never by an error in it."""
    writer = fs.open(path, "wb", block_size=part_bytes)
    try:
        yield writer
    except BaseException:
        with suppress(Exception):
            writer.discard()  # leaving the block would close it, and closing publishes what came so far
        with suppress(AttributeError):
            writer.closed = True
        raise
    writer.close()


class _Sums:
    """Checksums of what was sent: the manifest's, and those that S3 makes of an object in one piece or in parts."""

    def __init__(self, part_bytes: int) -> None:
        self.size = 0
        self._part_bytes = part_bytes
        self._xxh3 = xxhash.xxh3_128()
        self._whole = hashlib.md5(usedforsecurity=False)
        self._part = hashlib.md5(usedforsecurity=False)
        self._parts: list[bytes] = []
        self._in_part = 0

    @property
    def xxh3_128(self) -> str:
        return str(self._xxh3.hexdigest())

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._xxh3.update(data)
        self._whole.update(data)
        view = memoryview(data)
        while view:
            piece = view[: self._part_bytes - self._in_part]
            self._part.update(piece)
            self._in_part += len(piece)
            view = view[len(piece) :]
            if self._in_part == self._part_bytes:
                self._end_part()

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0

    def fits(self, etag: object) -> bool:
        """True when an ETag is that of what was sent. False says nothing: encrypted objects have others."""
        parts = [*self._parts, self._part.digest()] if self._in_part else self._parts
        of_parts = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
        return str(etag).strip('"') in {self._whole.hexdigest(), f"{of_parts}-{len(parts)}"}


if __name__ == "__main__":
    from trainer.storage.objectcli import main

    raise SystemExit(main())
