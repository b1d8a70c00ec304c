"""Megatron-LM: `iter_NNNNNNN` folders, and a tracker file that names the newest one.

Two formats. "torch": a folder per model-parallel rank with `model_optim_rng.pt` and, with a distributed optimizer,
`distrib_optim.pt`. "torch_dist": one distributed checkpoint with `common.pt`, and `metadata.json` written last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

import msgspec

from supervisor.layouts import dcp, torchfile
from supervisor.layouts.found import Candidate, Found, Piece
from supervisor.layouts.scalars import find_numbers_in_file
from supervisor.layouts.tree import Broken, Tree, Unfinished

PATTERN = r"iteration\s+(\d+)/"
TRACKER_NAME = "latest_checkpointed_iteration.txt"

_NAME = re.compile(r"iter_([0-9]{7,15})")
_RANK = re.compile(r"mp_rank_([0-9]{2,4})(?:_([0-9]{3,4}))?(?:_([0-9]{3,4}))?")
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


class _Config(msgspec.Struct):
    sharded_backend: str


def find(names: Sequence[str]) -> list[Candidate]:
    """`iter_NNNNNNN`."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    return [Candidate(name=name, step=int(found[1])) for name, found in matches if found]


def inspect(tree: Tree, candidate: Candidate) -> Found:
    """Whole when all of its ranks' files are, and the tracker does not name an older one that is there."""
    folder = candidate.name
    note = _check_tracker(tree, candidate)
    names = tree.names(folder)
    if any(name.startswith("mp_rank_") for name in names):
        return _inspect_torch(tree, candidate, names, note)
    return _inspect_distributed(tree, candidate, names, note)


def _check_tracker(tree: Tree, candidate: Candidate) -> str:
    """What the tracker is worth, for people. It is written last, so what is newer than it was not finished."""
    if tree.entry(TRACKER_NAME) is None:
        return f"{TRACKER_NAME} is missing"
    text = tree.read_hint(TRACKER_NAME)
    if not text.isdigit() or len(text) > 15:
        return f'{TRACKER_NAME} says "{text[:20].decode("ascii", "replace")}"'
    step = int(text)
    if not tree.is_folder(f"iter_{step:07d}"):
        return f"{TRACKER_NAME} names {step}, which is not there"
    if candidate.step is not None and candidate.step > step:
        raise Unfinished(f"{candidate.name} is newer than {step}, which {TRACKER_NAME} names: its save did not end")
    return ""


def _inspect_torch(tree: Tree, candidate: Candidate, names: Sequence[str], note: str) -> Found:
    folder = candidate.name
    ranks = {name: found.groups() for name in names if (found := _RANK.fullmatch(name))}
    if not ranks:
        raise Broken(f"{folder} holds no model-parallel rank")
    _check_grid(folder, list(ranks.values()))
    parts = [(name, f"{folder}/{name}/model_optim_rng.pt") for name in sorted(ranks)]
    pieces = [torchfile.to_piece(tree, path) for _, path in parts]
    _check_sizes(tree, folder, parts[0][1], list(ranks.values()))
    optimizers = [f"{folder}/{name}/distrib_optim.pt" for name in sorted(ranks)]
    if any(tree.entry(path) is not None for path in optimizers):
        pieces += [torchfile.to_piece(tree, path) for path in optimizers]
    return _to_found(candidate, pieces, (), note)


def _check_grid(folder: str, ranks: list[tuple[str | None, ...]]) -> None:
    """Each tensor rank has a folder for each pipeline rank (and expert rank)."""
    axes = [sorted({rank[axis] or "" for rank in ranks}) for axis in range(3)]
    there = {tuple(part or "" for part in rank) for rank in ranks}
    missing = next((rank for rank in product(*axes) if rank not in there), None)
    if missing is None:
        missing = next((("axis", f"{n}") for axis in axes for n, v in enumerate(axis) if v and int(v) != n), None)
    if missing is not None:
        raise Broken(f"{folder}: the folder of a model-parallel rank is missing: {'_'.join(p for p in missing if p)}")


def _check_sizes(tree: Tree, folder: str, path: str, ranks: list[tuple[str | None, ...]]) -> None:
    """As many ranks as the arguments of the training, which lie in every file, say."""
    said = find_numbers_in_file(tree, path, _SIZES)
    for axis, name in enumerate(_SIZES):
        count = len({rank[axis] for rank in ranks})
        if name in said and said[name] > count:
            raise Broken(f"{folder} holds {count} of {said[name]} ranks ({name})")


def _inspect_distributed(tree: Tree, candidate: Candidate, names: Sequence[str], note: str) -> Found:
    folder = candidate.name
    if "metadata.json" not in names:
        raise Unfinished(f"{folder}/metadata.json is missing: it is written last")
    try:
        backend = msgspec.json.decode(tree.read(f"{folder}/metadata.json", 65536), type=_Config).sharded_backend
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        raise Broken(f"{folder}/metadata.json can't be read") from None
    if dcp.METADATA_NAME not in names and backend not in ("torch_dist", "fsdp_dtensor"):
        raise Broken(f'{folder} has the format "{backend[:40]}", which is not known')
    files, pieces, _ = dcp.inspect_folder(tree, folder)
    common = f"{folder}/common.pt"
    if "common.pt" in names:
        pieces = (*pieces, torchfile.to_piece(tree, common))
        files = (*files, common)
    elif backend == "torch_dist":
        raise Broken(f"{common} is missing")
    mark = f"{folder}/metadata.json"
    return _to_found(candidate, pieces, (*files, mark), note, end_mark=mark)


def _to_found(
    candidate: Candidate, pieces: Sequence[Piece], files: tuple[str, ...], note: str, *, end_mark: str = ""
) -> Found:
    return Found(
        step=candidate.step or 0,
        files=files or tuple(piece.path for piece in pieces),
        pieces=tuple(pieces),
        note=note,
        end_mark=end_mark,
        has_end_mark=bool(end_mark) or not note,
    )
