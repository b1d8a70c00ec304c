"""Our own layout: a folder whose MANIFEST.json names each file with its size and checksum.

Three answers, not two: it is as recorded, it is not, or it could not be read to the end (unknown, never corrupt).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from supervisor.jobfiles import NotAFile, open_folder, open_parent, open_regular, read_bounded
from supervisor.layouts.bulk import OnBytes, drop_cached_pages, read_portions, run_readers
from supervisor.layouts.metadata import METADATA_NAME, TooLarge, check_files, open_metadata
from supervisor.layouts.tree import Broken, Unfinished
from trainer import contract
from trainer.contract import MANIFEST_NAME, ContractError, Manifest, ManifestFile, RunPaths
from trainer.format.manifest import parse_manifest
from trainer.format.stale import retry_stale

MAX_PROBLEMS = 5  # that are named

# the checkpoint itself is bad only if the name leads to nothing or to no file; all other errors are the medium's
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Readback:
    """`ok`: True, every byte matched; False, `detail` says what is wrong; None, it could not be read to the end."""

    ok: bool | None
    detail: str
    bytes_read: int = 0
    is_covered: bool = True  # False: not every byte carries a checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose checkpoint it must be; None: not told, anyone's."""

    run: str | None = None
    step: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """What reading one file gave; `problem` empty: it is as recorded. `is_unknown`: it could not be read."""

    size: int = 0
    problem: str = ""
    is_unknown: bool = False


def inspect_own(path: Path, whose: Identity) -> tuple[Manifest, str]:
    """The manifest of a whole checkpoint, by names and sizes and by what its metadata describes; no shard is read.

    And what could not be checked, in words; mostly empty. Raises Unfinished, Broken, and OSError when it can't be told.
    """
    return retry_stale(lambda: _inspect(path, whose))


def _inspect(path: Path, whose: Identity) -> tuple[Manifest, str]:
    manifest, _ = _read_manifest(path, whose)
    with _open(path) as folder:
        problems = [problem for file in manifest.files if (problem := _find_size_problem(folder, file))]
        if problems:
            raise Broken(_list(problems) + _hint_local(path, manifest, problems))
        return manifest, _check_described(folder, manifest)


def _hint_local(path: Path, manifest: Manifest, problems: list[str]) -> str:
    """Says what a copy on a node's own disk is, where it may be one: outside a run directory, with files left out."""
    is_partial = len(problems) < len(manifest.files) and all(problem.endswith(" is missing") for problem in problems)
    if not is_partial or path.absolute().parent == RunPaths(path.absolute().parent.parent).checkpoints():
        return ""
    return "; if this is a copy on a node's own disk: it holds the files of its own ranks alone, which is no damage"


@contextmanager
def _open(path: Path) -> Iterator[int]:
    try:
        with open_folder(path) as folder:
            yield folder
    except NotAFile as error:
        raise Broken(f"{path.name}: {error}") from None


def verify_checkpoint(
    path: Path,
    *,
    expect_run: str | None = None,
    expect_step: int | None = None,
    expect_attempt: int | None = None,
    on_bytes: OnBytes = lambda _count: None,
    readers: int = 1,
    is_cached: bool = False,
) -> Readback:
    """Read every byte of one checkpoint back against the manifest's checksums, from storage unless `is_cached`.

    `on_bytes` gets the count of each portion that was read, with several readers from several threads.
    """
    whose = Identity(run=expect_run, step=expect_step, attempt=expect_attempt)
    try:
        manifest, data = retry_stale(lambda: _read_manifest(path, whose))
    except Unfinished:
        return Readback(ok=None, detail="no longer published: removed meanwhile")
    except Broken as error:
        return Readback(ok=False, detail=str(error))
    except OSError as error:
        return _unknown(f"could not be read: {error}")
    files = sorted(manifest.files, key=lambda file: -file.size_bytes)
    checks = run_readers(files, lambda file: _check_file(path, file, on_bytes, is_cached=is_cached), readers)
    total = sum(check.size for check in checks)
    bad = [check.problem for check in checks if check.problem and not check.is_unknown]
    if bad:
        if not _still_says(path, data):
            return _unknown("written again or removed meanwhile", total)
        return Readback(ok=False, detail=_list(bad), bytes_read=total)
    unknown = [check.problem for check in checks if check.is_unknown]
    if unknown:
        return _unknown(f"could not be read: {_list(unknown)}", total)
    return _judge_described(path, manifest, total, on_bytes)


def _unknown(detail: str, bytes_read: int = 0) -> Readback:
    return Readback(ok=None, detail=detail, bytes_read=bytes_read)


def _judge_described(path: Path, manifest: Manifest, total: int, on_bytes: OnBytes) -> Readback:
    try:
        with _open(path) as folder:
            unchecked = _check_described(folder, manifest, on_bytes)
    except Broken as error:
        return Readback(ok=False, detail=str(error), bytes_read=total)
    except OSError as error:
        return _unknown(f"could not be read: {error}", total)
    detail = f"{len(manifest.files)} files, {total} bytes"
    return Readback(ok=True, detail="; ".join(filter(None, (detail, unchecked))), bytes_read=total)


# ---------------------------------------------------------------- the manifest


def _read_manifest(path: Path, whose: Identity) -> tuple[Manifest, bytes]:
    try:
        with _open(path) as folder:
            data = read_bounded(MANIFEST_NAME, contract.MAX_JSON_BYTES, dir_fd=folder)
        manifest = parse_manifest(data)
    except FileNotFoundError:
        raise Unfinished(f"{MANIFEST_NAME} is missing: it is written last") from None
    except (ContractError, NotAFile) as error:
        raise Broken(f"{MANIFEST_NAME}: {error}") from None
    pairs = ((manifest.run, whose.run), (manifest.step, whose.step), (manifest.attempt, whose.attempt))
    if any(wanted is not None and found != wanted for found, wanted in pairs):
        found, expected = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
        raise Broken(f"{MANIFEST_NAME} is of {found}, not {expected} (run, step, attempt)")
    if not manifest.files:
        raise Broken(f"{MANIFEST_NAME} names no file")
    return manifest, data


def _still_says(path: Path, data: bytes) -> bool:
    """True while the manifest is the one that the files were held against."""
    try:
        with open_folder(path) as folder:
            return read_bounded(MANIFEST_NAME, contract.MAX_JSON_BYTES, dir_fd=folder) == data
    except (OSError, NotAFile):
        return False


# ---------------------------------------------------------------- the files


def _find_size_problem(folder: int, file: ManifestFile) -> str:
    try:
        with open_parent(folder, file.path) as (parent, name), open_regular(name, dir_fd=parent) as fd:
            size = os.fstat(fd).st_size
    except NotAFile as error:
        return f"{file.path}: {error}"
    except FileNotFoundError:
        return f"{file.path} is missing"
    return "" if size == file.size_bytes else f"{file.path} has {size} bytes instead of {file.size_bytes}"


def _check_file(path: Path, file: ManifestFile, on_bytes: OnBytes, *, is_cached: bool) -> _Check:
    try:
        return retry_stale(lambda: _read_file(path, file, on_bytes, is_cached=is_cached))
    except NotAFile as error:
        return _Check(problem=f"{file.path}: {error}")
    except OSError as error:
        if error.errno in _MISSING:
            return _Check(problem=f"{file.path} is missing")
        return _Check(problem=f"{file.path}: {error.strerror or error}", is_unknown=True)


def _read_file(path: Path, file: ManifestFile, on_bytes: OnBytes, *, is_cached: bool) -> _Check:
    with (
        open_folder(path) as folder,
        open_parent(folder, file.path) as (parent, name),
        open_regular(name, dir_fd=parent) as fd,
    ):
        size = os.fstat(fd).st_size
        if size != file.size_bytes:
            return _Check(problem=f"{file.path} has {size} bytes instead of {file.size_bytes}")
        size, digest = _digest(fd, on_bytes, is_cached=is_cached)
    if digest != file.xxh3_128:
        return _Check(size=size, problem=f"{file.path}: checksum {digest} instead of {file.xxh3_128}")
    return _Check(size=size)


def _digest(fd: int, on_bytes: OnBytes, *, is_cached: bool) -> tuple[int, str]:
    if not is_cached:
        drop_cached_pages(fd)
    state = xxhash.xxh3_128()

    def use(portion: memoryview) -> None:
        state.update(portion)
        on_bytes(len(portion))

    size = read_portions(fd, 0, None, use)
    if not is_cached:
        drop_cached_pages(fd)  # a read-back must not push the training's own pages out
    return size, state.hexdigest()


def _check_described(folder: int, manifest: Manifest, on_bytes: OnBytes = lambda _count: None) -> str:
    """Raise Broken unless what the metadata describes lies in files that the manifest guards.

    Returns what could not be checked, in words. A metadata file that is too large to be read here is the one that was
    written all the same: the manifest has its checksum.
    """
    sizes: Mapping[str, int] = {file.path: file.size_bytes for file in manifest.files}
    if METADATA_NAME not in sizes:
        return ""  # files of another kind: nothing says what should be in them
    try:
        metadata = open_metadata(folder)
        on_bytes(0)  # a sign of life: both steps take seconds where there are millions of parts
        check_files(metadata, sizes)
    except TooLarge as error:
        return f"{METADATA_NAME} is {error.strerror}; that the files hold all that it describes was not checked"
    except (Broken, NotAFile) as error:
        raise Broken(f"{METADATA_NAME}: {error}") from None
    return ""


def _list(problems: list[str]) -> str:
    rest = len(problems) - MAX_PROBLEMS
    return "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
