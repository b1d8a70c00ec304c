"""What makes a stored checkpoint trustworthy: its manifest, and each file judged by it.

Files of a checkpoint are only ever judged by their manifest: names, sizes and checksums. Three answers, not two: a
file is as recorded, it is not, or it could not be read (a stale NFS handle, an I/O error). The last one is unknown:
it never counts as damage, and nothing is removed for it.

No torch here: a checkpoint can be found and checked by any process.
"""

from __future__ import annotations

import enum
import errno
import io
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from trainer.contract import (
    MANIFEST_NAME,
    VERIFIED_NAME,
    ContractError,
    Manifest,
    ManifestFile,
    VerificationRecord,
    checkpoint_name,
    parse,
    parse_checkpoint_name,
    write_json,
)
from trainer.format import manifest as manifests
from trainer.format.stale import retry_stale

CHUNK_BYTES = 4 * 1024 * 1024
METADATA_NAME = ".metadata"  # of torch.distributed.checkpoint

T = TypeVar("T")


class CheckpointRejected(Exception):
    """A checkpoint is not what its manifest says, or does not load: resume from an older one.

    `path` is the folder, `problems` one line for each thing that is wrong, `files` the names of bad files, where it is
    files: another copy of them would do.
    """

    def __init__(self, path: Path, problems: Iterable[str], *, files: Iterable[str] = ()) -> None:
        self.path = path
        self.problems = tuple(problems)
        self.files = tuple(files)
        super().__init__(f"checkpoint {path} is rejected: {'; '.join(self.problems)}")


class NotRegular(Exception):
    """A pipe, a folder or a device has the name of a file: reading it could take for ever."""


class CheckpointUnreadable(OSError):
    """A checkpoint could not be read now; this says nothing about its content."""


class Condition(enum.Enum):
    """What a look at one file found."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVerdict:
    """The condition of one file of a manifest, with the reason when it is not good."""

    path: str
    condition: Condition
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint folder that has a name of ours. `is_verified`: its record says so and belongs to its manifest."""

    path: Path
    step: int
    attempt: int
    is_complete: bool
    is_verified: bool


# ---------------------------------------------------------------- checksums


def checksum_file(path: Path, *, from_storage: bool = False) -> tuple[int, str]:
    """(size in bytes, xxh3_128 as 32 hex digits) of a file.

    `from_storage` drops the file's clean pages from the cache first, so that what is read is what the device holds
    (as far as the file system honours it; a file that was just written must have been fsynced before).
    """
    digest = xxhash.xxh3_128()
    size = 0
    with _open_regular(path) as stream:
        if from_storage:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _open_regular(path: Path) -> io.FileIO:
    """A file opened for reading; raises `NotRegular` without waiting for whoever writes to a pipe, and OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegular("is not a regular file")
    return io.FileIO(fd, "rb")


def _read_regular(path: Path) -> bytes:
    with _open_regular(path) as stream:
        return stream.read()


def checksum_bytes(data: bytes) -> str:
    """xxh3_128 of bytes, 32 hex digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def describe_file(root: Path, relative: str) -> ManifestFile:
    """The manifest's entry for a file as it is now."""
    size, digest = checksum_file(root / relative)
    return ManifestFile(path=relative, size_bytes=size, xxh3_128=digest)


def check_file(root: Path, expected: ManifestFile, *, from_storage: bool = False) -> FileVerdict:
    """Compare one file with its manifest entry. Never raises OSError: what cannot be read is UNKNOWN."""
    try:
        return retry_stale(lambda: _compare(root, expected, from_storage=from_storage))
    except NotRegular as error:
        return _verdict(expected, Condition.BAD, str(error))
    except (FileNotFoundError, NotADirectoryError):
        return _verdict(expected, Condition.BAD, "is missing")
    except OSError as error:
        return _verdict(expected, Condition.UNKNOWN, f"could not be read: {error.strerror or error}")


def _compare(root: Path, expected: ManifestFile, *, from_storage: bool) -> FileVerdict:
    size = (root / expected.path).stat().st_size
    if size != expected.size_bytes:
        return _verdict(expected, Condition.BAD, f"has {size} bytes, its manifest says {expected.size_bytes}")
    size, digest = checksum_file(root / expected.path, from_storage=from_storage)
    if (size, digest) != (expected.size_bytes, expected.xxh3_128):
        return _verdict(expected, Condition.BAD, "does not match its checksum")
    return _verdict(expected, Condition.GOOD, "")


def _verdict(expected: ManifestFile, condition: Condition, reason: str) -> FileVerdict:
    return FileVerdict(path=expected.path, condition=condition, reason=reason)


# ---------------------------------------------------------------- manifests


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises `CheckpointRejected` when there is none or it is not one, `CheckpointUnreadable` when it can't be read now.
    """
    return parse_manifest(path, read_manifest_bytes(path))


def read_manifest_bytes(path: Path) -> bytes:
    """The bytes of a checkpoint's manifest; errors as in `read_manifest`."""
    try:
        return retry_stale(lambda: _read_regular(path / MANIFEST_NAME))
    except NotRegular as error:
        raise CheckpointRejected(path, [f"{MANIFEST_NAME} {error}"]) from None
    except (FileNotFoundError, NotADirectoryError):
        reason = f"has no {MANIFEST_NAME}: it was never finished" if path.is_dir() else "is not a folder"
        raise CheckpointRejected(path, [reason]) from None
    except OSError as error:
        raise CheckpointUnreadable(error.errno, f"{MANIFEST_NAME}: {error.strerror}", str(path)) from error


def parse_manifest(path: Path, data: bytes) -> Manifest:
    """A manifest from its bytes; raises `CheckpointRejected` when it is damaged or belongs to another folder."""
    try:
        manifest = manifests.parse_manifest(data)
    except ContractError as error:
        raise CheckpointRejected(path, [str(error)]) from error
    if not manifest.files:
        raise CheckpointRejected(path, ["its manifest names no file"])
    named = parse_checkpoint_name(path.name)
    if named is not None and named != (manifest.step, manifest.attempt):
        found = checkpoint_name(manifest.step, manifest.attempt)
        raise CheckpointRejected(path, [f"holds the manifest of {found}"])
    return manifest


def share_files(files: Iterable[ManifestFile], shares: int) -> list[list[ManifestFile]]:
    """The files dealt into `shares` lists of about equal bytes, the same on every caller."""
    dealt: list[list[ManifestFile]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for file in sorted(files, key=lambda f: (-f.size_bytes, f.path)):
        lightest = loads.index(min(loads))
        dealt[lightest].append(file)
        loads[lightest] += file.size_bytes
    return dealt


def judge_files(path: Path, verdicts: Iterable[FileVerdict]) -> None:
    """Raise `CheckpointRejected` if any file is bad, else `CheckpointUnreadable` if any is unknown."""
    found = list(verdicts)
    bad = [v for v in found if v.condition is Condition.BAD]
    if bad:
        raise CheckpointRejected(path, [f"{v.path} {v.reason}" for v in bad], files=[v.path for v in bad])
    unknown = [f"{v.path} {v.reason}" for v in found if v.condition is Condition.UNKNOWN]
    if unknown:
        raise CheckpointUnreadable(errno.EIO, "; ".join(unknown), str(path))


def verify_checkpoint(path: Path) -> Manifest:
    """Read every byte of a checkpoint back and return its manifest; raises as `judge_files` and `read_manifest`."""
    manifest = read_manifest(path)
    judge_files(path, [check_file(path, file, from_storage=True) for file in manifest.files])
    return manifest


def publish_verification(path: Path, *, ok: bool, bad_files: Iterable[str] = (), now: float) -> VerificationRecord:
    """Write VERIFIED.json for the manifest that stands there now; raises as `read_manifest`, and OSError."""
    data = read_manifest_bytes(path)
    manifest = parse_manifest(path, data)
    record = VerificationRecord(
        attempt=manifest.attempt,
        step=manifest.step,
        ok=ok,
        manifest_xxh3_128=checksum_bytes(data),
        bad_files=tuple(bad_files),
        time=now,
    )
    write_json(path / VERIFIED_NAME, record)
    return record


# ---------------------------------------------------------------- finding and keeping


def find_checkpoints(root: Path) -> list[Found]:
    """The checkpoint folders under `root` that have a name of ours, by step then attempt; other names are ignored.

    Reads two small files of each folder, no shard. A folder that vanishes or can't be read meanwhile is left out.
    """
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(_look(root, names), key=lambda found: (found.step, found.attempt))


def _look(root: Path, names: Iterable[str]) -> Iterator[Found]:
    for name in names:
        parsed = parse_checkpoint_name(name)
        if parsed is None:
            continue
        path = root / name
        data = _read_or_none(path / MANIFEST_NAME)
        yield Found(
            path=path,
            step=parsed[0],
            attempt=parsed[1],
            is_complete=data is not None,
            is_verified=data is not None and _is_vouched_for(path, data),
        )


def _is_vouched_for(path: Path, manifest: bytes) -> bool:
    data = _read_or_none(path / VERIFIED_NAME)
    if data is None:
        return False
    try:
        record = parse(VerificationRecord, data)
    except ContractError:
        return False
    return record.ok and record.manifest_xxh3_128 == checksum_bytes(manifest)


def _read_or_none(path: Path) -> bytes | None:
    try:
        return _read_regular(path)
    except (OSError, NotRegular):
        return None


def choose_resume(found: Iterable[Found], *, attempt: int, given: Path | None, is_supervised: bool) -> list[Path]:
    """Checkpoints to try, the best one first.

    Under a service: this attempt's own newest verified one (its workers were restarted in place), then the one it
    was given; a step older than the given one is never taken. Without one: every complete checkpoint, newest step
    first (loading verifies it). What is given then is gone back to if it is one of these; another run's is where a run
    begins that has none of its own yet.
    """
    newest_first = sorted(found, key=lambda f: (f.step, f.attempt), reverse=True)
    if not is_supervised:
        complete = [f.path for f in newest_first if f.is_complete]
        meant = [path for path in complete if given is not None and is_same_folder(path, given)]
        return meant or complete or ([given] if given is not None else [])
    named = parse_checkpoint_name(given.name) if given is not None else None
    at_least = named[0] if named is not None else 0
    own = [f.path for f in newest_first if f.attempt == attempt and f.is_verified and f.step > at_least]
    return own if given is None else [*own, given]


def is_same_folder(one: Path, other: Path) -> bool:
    """True for one folder under two names, by links or by mounts."""
    if one == other:
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False


def next_attempt(run_dir: Path) -> int:
    """The lowest attempt number above all that have left anything in a run directory."""
    used = [found.attempt for found in find_checkpoints(run_dir / "checkpoints")]
    with suppress(FileNotFoundError):
        used += [int(entry.name) for entry in os.scandir(run_dir / "attempts") if entry.name.isdecimal()]
    return max(used, default=0) + 1


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint folder, its claims first; a folder that is gone already is no error. Raises OSError."""
    for name in (VERIFIED_NAME, MANIFEST_NAME):  # a removal cut short leaves an unfinished one, not a false one
        with suppress(FileNotFoundError):
            (path / name).unlink()
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def writer_rank(file: str) -> int | None:
    """The rank that wrote a file of a checkpoint, by its name; None for a name that is not one of ours."""
    if file == METADATA_NAME:
        return 0
    rank = file.removeprefix("__").partition("_")[0]
    return int(rank) if file.startswith("__") and rank.isascii() and rank.isdecimal() else None
