"""torch.distributed.checkpoint: a folder per step, `__<rank>_<n>.distcp` files, and `.metadata`, written last."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from supervisor.layouts.found import Candidate, Found, Piece
from supervisor.layouts.metadata import MAX_METADATA_BYTES, Item, Metadata, read_metadata
from supervisor.layouts.tree import Broken, Tree, Unfinished

METADATA_NAME = ".metadata"
PATTERN = ""

# any folder whose name ends in the step: everybody names them differently
_NAME = re.compile(r"(?:[^0-9.][^/]{0,200}?)?(?<![0-9])([0-9]{1,15})", re.DOTALL)


def find(names: Sequence[str]) -> list[Candidate]:
    """Names that end in a number."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    return [Candidate(name=name, step=int(found[1])) for name, found in matches if found]


def inspect(tree: Tree, candidate: Candidate) -> Found:
    """Whole when `.metadata` can be read and each piece that it names lies within its file."""
    files, pieces, _ = inspect_folder(tree, candidate.name)
    return Found(step=candidate.step or 0, files=files, pieces=pieces, end_mark=f"{candidate.name}/{METADATA_NAME}")


def inspect_folder(tree: Tree, folder: str) -> tuple[tuple[str, ...], tuple[Piece, ...], Metadata]:
    """(files, pieces, metadata) of a folder that torch.distributed.checkpoint.save has written."""
    path = f"{folder}/{METADATA_NAME}"
    entry = tree.entry(folder)
    if entry is not None and entry.kind == "file":
        raise Unfinished(f"{folder} is a file, and no checkpoint")  # many names end in a number
    if tree.entry(path) is None:
        raise Unfinished(f"{path} is missing: it is written last")
    metadata = tree.once("metadata", path, lambda: _read(tree, path))
    by_file: dict[str, list[Item]] = defaultdict(list)
    for item in metadata.items:
        by_file[item.path].append(item)
    if not by_file:
        raise Broken(f"{path} names no file")
    pieces: list[Piece] = []
    for name, items in sorted(by_file.items()):
        pieces += _pieces(f"{folder}/{name}", items, tree.file(f"{folder}/{name}").size)
    files = (path, *(f"{folder}/{name}" for name in sorted(by_file)))
    return files, tuple(pieces), metadata


def _read(tree: Tree, path: str) -> Metadata:
    data = tree.read(path, MAX_METADATA_BYTES)
    try:
        return read_metadata(data)
    except Broken as error:
        raise Broken(f"{path}: {error}") from None


def _pieces(path: str, items: Sequence[Item], size: int) -> list[Piece]:
    end = max(item.offset + item.length for item in items)
    if size < end:
        raise Broken(f"{path} has {size} bytes, {end} are needed")
    is_tensors_only = path.endswith(".safetensors")
    return [
        Piece(
            path=path,
            offset=item.offset,
            length=item.length,
            seal="zip" if item.is_plain and not is_tensors_only else "none",
        )
        for item in items
    ]
