"""DeepSpeed: `global_stepN` folders, and `latest`, which is written after all ranks are done.

Files of a folder: `mp_rank_MM_model_states.pt` (or, with parameters sharded too, one for each data-parallel rank),
`[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt` for each rank, files of layers and experts; `zero/` when converted
to a universal checkpoint.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from supervisor.layouts import torchfile
from supervisor.layouts.found import Candidate, Found
from supervisor.layouts.scalars import find_numbers_in_file
from supervisor.layouts.tree import Broken, Tree, Unfinished

PATTERN = r"step=(\d+)"
LATEST_NAME = "latest"
MAX_UNIVERSAL_FILES = 100_000

_NAME = re.compile(r"global_step([0-9]{1,15})(_universal)?")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{2,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2,6})_optim_states\.pt")
_SIZES = ("dp_world_size", "mp_world_size")


def find(names: Sequence[str]) -> list[Candidate]:
    """`global_stepN`. The universal copy of one, made by hand, is another folder of the same step: left alone."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    return [Candidate(name=name, step=int(found[1])) for name, found in matches if found and not found[2]]


def inspect(tree: Tree, candidate: Candidate) -> Found:
    """Whole when the files of all ranks are, and `latest` does not name an older one that is there."""
    note = check_latest(tree, candidate)
    return inspect_folder(tree, candidate.name, candidate.step or 0, note)


def check_latest(tree: Tree, candidate: Candidate) -> str:
    """What `latest` is worth, for people; raises Broken for a folder that is newer than it."""
    if tree.entry(LATEST_NAME) is None:
        return f"{LATEST_NAME} is missing"
    name = tree.read_hint(LATEST_NAME).decode("utf-8", "replace")
    found = _NAME.fullmatch(name)
    if not found or not tree.is_folder(name):
        return f'{LATEST_NAME} names "{name[:40]}", which is not there'
    if candidate.step is not None and candidate.step > int(found[1]):
        raise Unfinished(f"{candidate.name} is newer than {name}, which {LATEST_NAME} names: its save did not end")
    return ""


def inspect_folder(tree: Tree, folder: str, step: int, note: str = "") -> Found:
    """The files of one save, in whatever folder they lie."""
    names = [name for name in tree.names(folder) if name.endswith(".pt")]
    models = {found.groups(): name for name in names if (found := _MODEL.fullmatch(name))}
    if not models:
        if tree.is_folder(f"{folder}/zero"):
            return _inspect_universal(tree, folder, step, note)
        raise Unfinished(f"{folder} holds no model states")
    said = find_numbers_in_file(tree, f"{folder}/{models[min(models, key=str)]}", _SIZES)
    _check_ranks(folder, models, [_OPTIMIZER.fullmatch(name) for name in names], said)
    pieces = tuple(torchfile.to_piece(tree, f"{folder}/{name}") for name in names)
    return Found(
        step=step,
        files=tuple(piece.path for piece in pieces),
        pieces=pieces,
        note=note,
        has_end_mark=not note,
    )


def _check_ranks(
    folder: str,
    models: dict[tuple[str | None, ...], str],
    optimizers: Sequence[re.Match[str] | None],
    said: dict[str, int],
) -> None:
    tensor_ranks = {int(rank[1] or 0) for rank in models}
    _check_count(folder, "model-parallel ranks", tensor_ranks, said.get("mp_world_size"))
    shards: dict[int, set[int]] = defaultdict(set)
    for found in optimizers:
        if found:
            shards[int(found[2])].add(int(found[1]))
    for rank, data_ranks in shards.items():
        _check_count(folder, f"optimizer states of model-parallel rank {rank}", data_ranks, said.get("dp_world_size"))
    if shards and set(shards) != tensor_ranks:
        raise Broken(f"{folder}: the optimizer states of a model-parallel rank are missing")
    sharded: dict[int, set[int]] = defaultdict(set)
    for data_rank, tensor_rank in models:
        if data_rank is not None:
            sharded[int(tensor_rank or 0)].add(int(data_rank))
    for rank, data_ranks in sharded.items():
        _check_count(folder, f"model states of model-parallel rank {rank}", data_ranks, said.get("dp_world_size"))
        if shards and data_ranks != shards[rank]:
            raise Broken(f"{folder}: model and optimizer states are not of the same ranks")


def _check_count(folder: str, what: str, ranks: set[int], wanted: int | None) -> None:
    count = wanted if wanted is not None and wanted > 0 else max(ranks) + 1
    missing = next((rank for rank in range(min(count, 1_000_000)) if rank not in ranks), None)
    if missing is not None:
        raise Broken(f"{folder}: {what}: {missing} of {count} is missing")


def _inspect_universal(tree: Tree, folder: str, step: int, note: str) -> Found:
    """A universal checkpoint: a folder for each parameter, with its weights and its optimizer state."""
    paths: list[str] = []
    for parameter in tree.names(f"{folder}/zero"):
        place = f"{folder}/zero/{parameter}"
        if tree.is_folder(place):
            states = [name for name in tree.names(place) if name.endswith(".pt")]
            if "fp32.pt" not in states:
                raise Broken(f"{place}/fp32.pt is missing")
            paths += [f"{place}/{name}" for name in states]
        elif parameter.endswith(".pt"):
            paths.append(place)
        if len(paths) > MAX_UNIVERSAL_FILES:
            raise Broken(f"{folder}/zero holds more than {MAX_UNIVERSAL_FILES} files")
    if not paths:
        raise Broken(f"{folder}/zero is empty")
    pieces = tuple(torchfile.to_piece(tree, path) for path in paths)
    return Found(step=step, files=tuple(paths), pieces=pieces, note=note, has_end_mark=not note)
