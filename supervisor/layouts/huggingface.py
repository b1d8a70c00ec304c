"""Hugging Face Trainer: `checkpoint-N` folders; `trainer_state.json` is written last and says which step it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from supervisor.layouts import dcp, deepspeed, safetensors, torchfile
from supervisor.layouts.found import Candidate, Found, Piece
from supervisor.layouts.tree import Broken, Tree, Unfinished

PATTERN = ""
STATE_NAME = "trainer_state.json"
MAX_STATE_BYTES = 64 * 1024 * 1024  # holds the whole log history

_NAME = re.compile(r"checkpoint-([0-9]{1,15})")
_MODELS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHARD_FOLDER = re.compile(r"(?:pytorch_model_fsdp|optimizer)_[0-9]{1,3}")
_TORCH_FILES = re.compile(r"optimizer\.(?:pt|bin)|scheduler\.pt|scaler\.pt|rng_state(?:_[0-9]{1,6})?\.pth|.*_fsdp\.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


class _State(msgspec.Struct):
    global_step: int


def find(names: Sequence[str]) -> list[Candidate]:
    """`checkpoint-N`; the folders that it is staged in (`tmp-checkpoint-N`) are none."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    return [Candidate(name=name, step=int(found[1])) for name, found in matches if found]


def inspect(tree: Tree, candidate: Candidate) -> Found:
    """Whole when `trainer_state.json` is there, and the weights and what goes with them are whole files."""
    folder = candidate.name
    path = f"{folder}/{STATE_NAME}"
    if tree.entry(path) is None:
        raise Unfinished(f"{path} is missing: it is written last")
    try:
        step = msgspec.json.decode(tree.read(path, MAX_STATE_BYTES), type=_State).global_step
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        raise Broken(f"{path} can't be read") from None
    if step != candidate.step:
        raise Broken(f"{path} is of step {step}")
    names = tree.names(folder)
    pieces, files = _find_weights(tree, folder, names)
    states = [name for name in names if _TORCH_FILES.fullmatch(name)]
    pieces += [torchfile.to_piece(tree, f"{folder}/{name}") for name in states]
    note = _judge_optimizer(tree, folder, names, states)
    paths = {*files, *(piece.path for piece in pieces), path}
    return Found(step=step, files=tuple(sorted(paths)), pieces=tuple(dict.fromkeys(pieces)), note=note, end_mark=path)


def _find_weights(tree: Tree, folder: str, names: Sequence[str]) -> tuple[list[Piece], list[str]]:
    pieces: list[Piece] = []
    files: list[str] = []
    for index in (name for name in _INDEXES if name in names):
        files.append(f"{folder}/{index}")
        pieces += [_weights(tree, f"{folder}/{shard}") for shard in safetensors.read_index(tree, f"{folder}/{index}")]
    pieces += [_weights(tree, f"{folder}/{name}") for name in _MODELS if name in names]
    for name in names:
        place = f"{folder}/{name}"
        if _SHARD_FOLDER.fullmatch(name) and tree.is_folder(place):
            found, shards, _ = dcp.inspect_folder(tree, place)
            pieces += shards
            files += found
        elif deepspeed.find([name]) and tree.is_folder(place):
            pieces += deepspeed.inspect_folder(tree, place, 0).pieces
    if not pieces and not any(name.endswith("_fsdp.bin") for name in names):
        raise Broken(f"{folder} holds no weights")
    return pieces, files


def _weights(tree: Tree, path: str) -> Piece:
    return safetensors.to_piece(tree, path) if path.endswith(".safetensors") else torchfile.to_piece(tree, path)


def _judge_optimizer(tree: Tree, folder: str, names: Sequence[str], states: Sequence[str]) -> str:
    """A note when it holds the weights alone (save_only_model); raises Broken when only part of the rest is there.

    The Trainer does not complain when optimizer or scheduler are missing: it would go on with both as new.
    """
    shards = [name for name in names if name.startswith(("optimizer_", "global_step"))]
    has_shards = any(tree.is_folder(f"{folder}/{name}") for name in shards)
    if any(name in names for name in _OPTIMIZERS) and "scheduler.pt" not in names:
        raise Broken(f"{folder}/scheduler.pt is missing")
    if has_shards or any(name in names for name in _OPTIMIZERS):
        return ""
    if any(name.startswith(("scheduler", "rng_state")) for name in states):
        raise Broken(f"{folder} holds no optimizer state")
    return "the weights alone: the optimizer starts anew"
