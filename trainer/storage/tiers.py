"""Where checkpoints stand, fastest first: the node's own disk, the shared file system, object storage.

The shared file system alone is durable: it is the run directory, and all that the service sees. What lies on a node's
disk is a copy that makes restarts faster: it goes with its node, so it never counts as a checkpoint, and nothing is
removed elsewhere for its sake. What is in object storage (trainer.storage.objects) is a copy for the day when the
shared file system is lost; it is made of verified checkpoints only.

Retention counts verified checkpoints only, keeps at least two of them, and stands back while somebody reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from trainer.contract import (
    MANIFEST_NAME,
    ContractError,
    ManifestFile,
    fsync_dir,
    parse_checkpoint_name,
    write_bytes,
)
from trainer.format.manifest import parse_manifest as parse_manifest_bytes
from trainer.storage.leases import LeaseUnreadable, read_leases
from trainer.storage.stored import (
    CHUNK_BYTES,
    Condition,
    FileVerdict,
    Found,
    find_checkpoints,
    remove_checkpoint,
)

log = logging.getLogger("trainer.storage.tiers")

KEEP_AT_LEAST = 2
KEEP_LOCAL = 2


# ---------------------------------------------------------------- the node's own disk


class LocalTier:
    """One run's folder on this node's disk: the files of this node's ranks, and the manifest of the whole checkpoint.

    `root` is the run's own folder there. Several ranks of a node use it side by side; all that they do is idempotent.
    """

    def __init__(self, root: Path, *, keep: int = KEEP_LOCAL) -> None:
        self.root = root
        self._keep = keep

    def path(self, name: str) -> Path:
        """The folder of one checkpoint."""
        return self.root / name

    def begin(self, name: str) -> Path:
        """The folder to write this node's files of a checkpoint into, in place of what has that name; OSError.

        What an earlier try left counts no longer: its manifest goes, its files are overwritten.
        """
        path = self.path(name)
        path.mkdir(parents=True, exist_ok=True)
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        return path

    def publish(self, name: str, manifest: bytes) -> str:
        """Say that this node's files are there, and make room; returns why that failed, empty when it did not.

        A node's disk that is full or broken must not fail a save: the checkpoint that counts is elsewhere.
        """
        try:
            write_bytes(self.path(name) / MANIFEST_NAME, manifest)
            fsync_dir(self.root)
            self.make_room(newest=name)
        except OSError as error:
            return f"{self.path(name)}: {error.strerror or error}"
        return ""

    def manifest(self, name: str) -> bytes | None:
        """The manifest's bytes of a checkpoint that was published here; None without one that can be read."""
        try:
            data = (self.path(name) / MANIFEST_NAME).read_bytes()
            parse_manifest_bytes(data)
        except (OSError, ContractError):
            return None
        return data

    def has(self, name: str, file: ManifestFile) -> bool:
        """True when a file of a checkpoint is here with its recorded size."""
        try:
            found = (self.path(name) / file.path).lstat()
        except OSError:
            return False
        return found.st_size == file.size_bytes

    def drop(self, name: str, file: str) -> None:
        """Remove one file that turned out bad: nobody is to try it again."""
        with suppress(OSError):
            (self.path(name) / file).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Names of the checkpoints here, published or not, by step then attempt."""
        try:
            found = [entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        keys = {name: key for name in found if (key := parse_checkpoint_name(name)) is not None}
        return sorted(keys, key=keys.__getitem__)

    def make_room(self, *, newest: str = "", keep: int | None = None) -> None:
        """Remove all but the newest published ones, by attempt then step; what is newer than those, unpublished, stays.

        `newest` is the one just published: after the service went back on purpose, older attempts' higher steps go.
        """
        keep = self._keep if keep is None else keep
        names = sorted(self.names(), key=_by_attempt)
        published = [name for name in names if (self.path(name) / MANIFEST_NAME).exists()]
        if newest in published:
            published = published[: published.index(newest) + 1]
        kept = published[-keep:]
        for name in names:
            if kept and _by_attempt(name) < _by_attempt(kept[-1]) and name not in kept:
                with suppress(OSError):
                    remove_checkpoint(self.path(name))


def _by_attempt(name: str) -> tuple[int, int]:
    step, attempt = parse_checkpoint_name(name) or (0, 0)
    return attempt, step


# ---------------------------------------------------------------- keeping


def choose_prunable(
    found: Iterable[Found], *, keep_last: int, attempt: int, in_use: frozenset[Path] = frozenset()
) -> list[Found]:
    """What may go: everything older than the last `keep_last` verified ones (at least two), by step.

    Only verified ones are counted, so broken saves never push a good one out. Left alone: what is in use, what a
    newer attempt than `attempt` wrote, and everything as long as fewer than `keep_last` are verified.
    """
    ordered = sorted(found, key=lambda f: (f.step, f.attempt))
    verified = [f for f in ordered if f.is_verified]
    keep = max(keep_last, KEEP_AT_LEAST)
    if len(verified) < keep:
        return []
    oldest_kept = verified[-keep]
    limit = (oldest_kept.step, oldest_kept.attempt)
    return [f for f in ordered if (f.step, f.attempt) < limit and f.attempt <= attempt and f.path not in in_use]


def prune(checkpoints: Path, *, keep_last: int, attempt: int, in_use: Iterable[Path] = ()) -> list[Path]:
    """Remove what `choose_prunable` names, but nothing that is leased; returns the folders that went.

    Nothing at all is removed while there is a lease that can't be read. What can't be removed now is tried again by
    the next call.
    """
    try:
        held = read_leases(checkpoints.parent, since_attempt=attempt)
    except LeaseUnreadable as error:
        log.warning("no old checkpoint is removed now: %s", error)
        return []
    kept = frozenset(in_use) | {checkpoints / name for name in held}
    gone = []
    for old in choose_prunable(find_checkpoints(checkpoints), keep_last=keep_last, attempt=attempt, in_use=kept):
        try:
            remove_checkpoint(old.path)
        except OSError as error:
            log.warning("old checkpoint %s is not removed: %s", old.path, error)
        else:
            gone.append(old.path)
    return gone


# ---------------------------------------------------------------- copying


def copy_file(source: Path, destination: Path, expected: ManifestFile) -> FileVerdict:
    """Copy one file of a checkpoint to another folder, durable there, and say what was read; raises OSError."""
    target = destination / expected.path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_128()
    size = 0
    try:
        reader = (source / expected.path).open("rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError):
        return FileVerdict(path=expected.path, condition=Condition.BAD, reason="is missing")
    with reader, target.open("wb") as writer:
        while chunk := reader.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    if (size, digest.hexdigest()) != (expected.size_bytes, expected.xxh3_128):
        reason = f"has {size} bytes that do not match its checksum"
        return FileVerdict(path=expected.path, condition=Condition.BAD, reason=reason)
    return FileVerdict(path=expected.path, condition=Condition.GOOD)
