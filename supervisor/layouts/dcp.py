"""torch.distributed.checkpoint: a folder per step, `__<rank>_<n>.distcp` files, and `.metadata`, written last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from supervisor.layouts.found import Candidate, Found, Piece, Seal
from supervisor.layouts.metadata import METADATA_NAME, Metadata, TooLarge, check_files, read_opened
from supervisor.layouts.tree import Broken, Tree, Unfinished
from trainer.format.entries import group

__all__ = ["METADATA_NAME", "PATTERN", "describe", "find", "inspect", "inspect_folder"]

PATTERN = ""

# torchtitan's key for the state of the data loader on one data-parallel rank; who took over its loader has it as well
_OF_DATA_RANK = re.compile(r"(?:\A|\.)dp_rank_([0-9]{1,9})(?:\Z|\.)")
_OF_RANK_0 = "__0.metadata"
# any folder whose name ends in the step: everybody names them differently
_NAME = re.compile(r"(?:[^0-9.][^/]{0,200}?)?(?<![0-9])([0-9]{1,15})", re.DOTALL)


def find(names: Sequence[str]) -> list[Candidate]:
    """Names that end in a number."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    return [Candidate(name=name, step=int(found[1])) for name, found in matches if found]


def inspect(tree: Tree, candidate: Candidate) -> Found:
    """Whole when `.metadata` can be read, and all that it describes lies in the files that it names."""
    files, pieces, metadata = inspect_folder(tree, candidate.name)
    return describe(candidate, files, pieces, metadata)


def describe(candidate: Candidate, files: tuple[str, ...], pieces: tuple[Piece, ...], metadata: Metadata) -> Found:
    """What `inspect_folder` has found, and of how many ranks the position in the data is."""
    ranks = {int(found[1]) for key in metadata.keys if (found := _OF_DATA_RANK.search(key))}
    return Found(
        step=candidate.step or 0,
        files=files,
        pieces=pieces,
        end_mark=f"{candidate.name}/{METADATA_NAME}",
        world_size=max(ranks) + 1 if ranks else 0,
        is_elastic=not ranks,
    )


def inspect_folder(tree: Tree, folder: str) -> tuple[tuple[str, ...], tuple[Piece, ...], Metadata]:
    """(files, pieces, metadata) of a folder that torch.distributed.checkpoint.save has written."""
    path = f"{folder}/{METADATA_NAME}"
    entry = tree.entry(folder)
    if entry is not None and entry.kind == "file":
        raise Unfinished(f"{folder} is a file, and no checkpoint")  # many names end in a number
    if tree.entry(path) is None:
        _refuse_parted(tree, folder)
        raise Unfinished(f"{path} is missing: it is written last")
    metadata = tree.once("metadata", path, lambda: _read(tree, path))
    if isinstance(metadata, TooLarge):
        raise metadata
    names = sorted(set(metadata.entries.paths))
    if not names:
        raise Broken(f"{path} names no file")
    sizes = {name: tree.file(f"{folder}/{name}").size for name in names}
    tree.once("coverage", path, lambda: _check(folder, metadata, sizes))
    return (path, *(f"{folder}/{name}" for name in names)), _pieces(folder, metadata), metadata


def _refuse_parted(tree: Tree, folder: str) -> None:
    if tree.is_file(f"{folder}/{_OF_RANK_0}"):
        raise Broken(
            f"{folder} has a metadata file for each rank: it was saved with use_collectives=False, and nothing in it "
            "tells how many ranks there were, or that all of them have finished"
        )


def _read(tree: Tree, path: str) -> Metadata | TooLarge:
    """The error is a value: it is remembered, as the content is, and does not cost half a minute again."""
    try:
        with tree.open(path) as fd:
            return read_opened(fd, path)
    except TooLarge as error:
        return error
    except Broken as error:
        raise Broken(f"{path}: {error}") from None


def _check(folder: str, metadata: Metadata, sizes: Mapping[str, int]) -> bool:
    try:
        check_files(metadata, sizes)
    except Broken as error:
        raise Broken(f"{folder}: {error}") from None
    return True


def _pieces(folder: str, metadata: Metadata) -> tuple[Piece, ...]:
    """The payload, file by file."""
    entries = metadata.entries
    found: list[Piece] = []
    for name, numbers in sorted(group(entries.paths).items()):
        path = f"{folder}/{name}"
        is_zip = not name.endswith(".safetensors")
        for number in sorted(numbers, key=entries.offsets.__getitem__):
            seal: Seal = "zip" if is_zip and number not in entries.packed else "none"
            found.append(Piece(path=path, offset=entries.offsets[number], length=entries.lengths[number], seal=seal))
    return tuple(found)
