"""Reads one checkpoint of a foreign layout back: every byte that a checksum guards against it, and all others once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from supervisor.layouts import torchzip
from supervisor.layouts.found import Candidate, Found, Piece
from supervisor.layouts.registry import AUTO, LAYOUTS, choose
from supervisor.layouts.survey import describe
from supervisor.layouts.tree import Broken, Tree, read_at
from supervisor.model import CheckpointView


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """`is_whole` None: it is not the checkpoint that was asked for any more. `unsealed`: bytes without a checksum."""

    is_whole: bool | None
    detail: str
    size: int = 0
    unsealed: int = 0


def read_back(
    path: Path, layout_name: str, stamp: str, *, on_bytes: Callable[[int], None] = lambda _count: None
) -> Reading:
    """Read the checkpoint with this stamp back; raises OSError when it can't be read."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        tree = Tree(folder)
        if tree.entry(path.name) is None:
            return Reading(is_whole=None, detail="no longer there: removed meanwhile")
        try:
            found, view = _inspect(tree, path, layout_name)
            if view.stamp != stamp:
                return Reading(is_whole=None, detail="written again meanwhile")
            reading = _read(tree, found, on_bytes)
            if _inspect(Tree(folder), path, layout_name)[1].stamp != stamp:
                return Reading(is_whole=None, detail="written again meanwhile")
        except Broken as error:
            return _judge_broken(folder, path, layout_name, stamp, str(error))
        return reading
    finally:
        os.close(folder)


def _inspect(tree: Tree, path: Path, layout_name: str) -> tuple[Found, CheckpointView]:
    layout = LAYOUTS[layout_name] if layout_name != AUTO else choose(tree.names(""))[0]
    candidate = next(iter(layout.find([path.name])), Candidate(name=path.name, step=None))
    found = layout.inspect(tree, candidate)
    return found, describe(found, {name: tree.file(name) for name in found.files}, str(path))


def _judge_broken(folder: int, path: Path, layout_name: str, stamp: str, why: str) -> Reading:
    """Broken counts only if nobody wrote meanwhile: a half-removed or half-written one is not known to be bad."""
    try:
        _, view = _inspect(Tree(folder), path, layout_name)
    except Broken as error:
        return Reading(is_whole=None, detail=f"changed meanwhile: {error}")
    if view.stamp != stamp:
        return Reading(is_whole=None, detail="written again meanwhile")
    return Reading(is_whole=False, detail=why)


def _read(tree: Tree, found: Found, on_bytes: Callable[[int], None]) -> Reading:
    size = unsealed = 0
    for path in dict.fromkeys(piece.path for piece in found.pieces):
        with tree.open(path) as fd:
            _drop_cached_pages(fd)
            for piece in (p for p in found.pieces if p.path == path):
                got, open_bytes = _read_piece(fd, piece, on_bytes)
                size += got
                unsealed += open_bytes
            _drop_cached_pages(fd)
    if unsealed:
        detail = f"{size} bytes read; {unsealed} of them carry no checksum"
        return Reading(is_whole=True, detail=detail, size=size, unsealed=unsealed)
    return Reading(is_whole=True, detail=f"{len(found.files)} files, {size} bytes", size=size)


def _read_piece(fd: int, piece: Piece, on_bytes: Callable[[int], None]) -> tuple[int, int]:
    """(bytes read, bytes among them without a checksum)."""
    if piece.seal == "zip":
        try:
            result = torchzip.read_back(fd, piece.offset, piece.length, on_bytes=on_bytes)
        except Broken as error:
            raise Broken(f"{piece.path}: {error}") from None
        return piece.length, result.unsealed
    at, end = piece.offset, piece.offset + piece.length
    while at < end:
        data = read_at(fd, at, min(torchzip.CHUNK_BYTES, end - at))
        if not data:
            raise Broken(f"{piece.path} is cut")
        at += len(data)
        on_bytes(len(data))
    return piece.length, piece.length


def _drop_cached_pages(fd: int) -> None:
    """What is in memory may be right while the medium is wrong."""
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return
