"""Reads one checkpoint of a foreign layout back: every byte that a checksum guards against it, and all others once."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from supervisor.layouts import torchzip
from supervisor.layouts.bulk import OnBytes, drop_cached_pages, read_portions, run_readers
from supervisor.layouts.found import Candidate, Found, Piece
from supervisor.layouts.registry import AUTO, LAYOUTS, choose
from supervisor.layouts.survey import describe, inspect_candidate
from supervisor.layouts.tree import Broken, Tree
from supervisor.model import CheckpointView
from trainer.format.stale import retry_stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """`is_whole` None: it is not the checkpoint that was asked for any more. `unsealed`: bytes without a checksum."""

    is_whole: bool | None
    detail: str
    size: int = 0
    unsealed: int = 0


def read_back(
    path: Path,
    layout_name: str,
    stamp: str,
    *,
    on_bytes: OnBytes = lambda _count: None,
    readers: int = 1,
    is_cached: bool = False,
) -> Reading:
    """Read the checkpoint with this stamp back, from storage unless `is_cached`; raises OSError when it can't be read.

    `on_bytes` gets the count of each portion that was read, with several readers from several threads.
    """
    if retry_stale(lambda: not _is_there(path)):
        return Reading(is_whole=None, detail="no longer there: removed meanwhile")
    try:
        found, view = inspect_foreign(path, layout_name)
        if view.stamp != stamp:
            return Reading(is_whole=None, detail="written again meanwhile")
        reading = _read(path.parent, found, on_bytes, readers, is_cached=is_cached)
        if inspect_foreign(path, layout_name)[1].stamp != stamp:
            return Reading(is_whole=None, detail="written again meanwhile")
    except Broken as error:
        return _judge_broken(path, layout_name, stamp, str(error))
    return reading


def inspect_foreign(path: Path, layout_name: str, *, marks: Sequence[str] = ()) -> tuple[Found, CheckpointView]:
    """What a layout says of one checkpoint without reading its payload; raises Broken and OSError.

    `marks`: endings of files beside it that say that it is not finished.
    """
    return retry_stale(lambda: _inspect(path, layout_name, marks))


def _inspect(path: Path, layout_name: str, marks: Sequence[str]) -> tuple[Found, CheckpointView]:
    with _tree(path.parent) as tree:
        names = tree.names("")
        layout = LAYOUTS[layout_name] if layout_name != AUTO else choose(names)[0]
        candidate = next(iter(layout.find([path.name])), Candidate(name=path.name, step=None))
        found, entries = inspect_candidate(tree, layout, candidate, names, marks)
        return found, describe(found, entries, str(path))


@contextmanager
def _tree(folder: Path) -> Iterator[Tree]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Tree(fd)
    finally:
        os.close(fd)


def _is_there(path: Path) -> bool:
    with _tree(path.parent) as tree:
        return tree.entry(path.name) is not None


def _judge_broken(path: Path, layout_name: str, stamp: str, why: str) -> Reading:
    """Broken counts only if nobody wrote meanwhile: a half-removed or half-written one is not known to be bad."""
    try:
        _, view = inspect_foreign(path, layout_name)
    except Broken as error:
        return Reading(is_whole=None, detail=f"changed meanwhile: {error}")
    if view.stamp != stamp:
        return Reading(is_whole=None, detail="written again meanwhile")
    return Reading(is_whole=False, detail=why)


def _read(folder: Path, found: Found, on_bytes: OnBytes, readers: int, *, is_cached: bool) -> Reading:
    by_path: dict[str, list[Piece]] = defaultdict(list)
    for piece in found.pieces:
        by_path[piece.path].append(piece)
    work = sorted(by_path.values(), key=lambda pieces: -sum(piece.length for piece in pieces))

    def read(pieces: list[Piece]) -> tuple[int, int]:
        return retry_stale(lambda: _read_file(folder, pieces, on_bytes, is_cached=is_cached))

    counts = run_readers(work, read, readers)
    size, unsealed = sum(count for count, _ in counts), sum(count for _, count in counts)
    if unsealed:
        detail = f"{size} bytes read; {unsealed} of them carry no checksum"
        return Reading(is_whole=True, detail=detail, size=size, unsealed=unsealed)
    return Reading(is_whole=True, detail=f"{len(found.files)} files, {size} bytes", size=size)


def _read_file(folder: Path, pieces: list[Piece], on_bytes: OnBytes, *, is_cached: bool) -> tuple[int, int]:
    """(bytes read, bytes among them without a checksum) of the pieces of one file."""
    size = unsealed = 0
    with _tree(folder) as tree, tree.open(pieces[0].path) as fd:
        if not is_cached:
            drop_cached_pages(fd)
        for piece in pieces:
            size += piece.length
            unsealed += _read_piece(fd, piece, on_bytes)
        if not is_cached:
            drop_cached_pages(fd)
    return size, unsealed


def _read_piece(fd: int, piece: Piece, on_bytes: OnBytes) -> int:
    """Bytes read without a checksum."""
    if piece.seal == "zip":
        try:
            return torchzip.read_back(fd, piece.offset, piece.length, on_bytes=on_bytes).unsealed
        except Broken as error:
            raise Broken(f"{piece.path}: {error}") from None
    if read_portions(fd, piece.offset, piece.length, lambda portion: on_bytes(len(portion))) < piece.length:
        raise Broken(f"{piece.path} is cut")
    return piece.length
