"""Lightning: one `.ckpt` file per checkpoint, or a folder of that name with a distributed one; the step is inside."""

from __future__ import annotations

import re
from collections.abc import Sequence

from supervisor.layouts import dcp, deepspeed, torchfile
from supervisor.layouts.found import Candidate, Found
from supervisor.layouts.scalars import find_numbers_in_file
from supervisor.layouts.tree import Broken, Tree, Unfinished

PATTERN = ""
META_NAME = "meta.pt"

_STEP = re.compile(r"(?:^|[-_ ])(?:global_)?step=([0-9]{1,15})(?![0-9])")
_STEP_KEY = ("global_step",)


def find(names: Sequence[str]) -> list[Candidate]:
    """`*.ckpt`, with the step that the name tells."""
    return [
        Candidate(name=name, step=int(found[1]) if (found := _STEP.search(name)) else None)
        for name in names
        if name.endswith(".ckpt") and not name.startswith(".")
    ]


def inspect(tree: Tree, candidate: Candidate) -> Found:
    """Whole when the file's own directory is there and holds all of it, or the folder's parts are."""
    name = candidate.name
    entry = tree.entry(name)
    if entry is not None and entry.kind == "link":
        raise Broken(f"{name} is a link to another one")
    if entry is not None and entry.kind == "folder":
        return _inspect_folder(tree, candidate)
    piece = torchfile.to_piece(tree, name)
    step = _find_step(tree, candidate, name)
    return Found(step=step, files=(name,), pieces=(piece,), has_end_mark=piece.seal == "zip")


def _inspect_folder(tree: Tree, candidate: Candidate) -> Found:
    name = candidate.name
    if tree.is_folder(f"{name}/checkpoint"):  # its DeepSpeed strategy
        found = deepspeed.inspect_folder(tree, f"{name}/checkpoint", 0, "no mark says that its save has ended")
        step = _find_step(tree, candidate, next(path for path in found.files if path.endswith("model_states.pt")))
        return Found(step=step, files=found.files, pieces=found.pieces, note=found.note, has_end_mark=False)
    files, pieces, _ = dcp.inspect_folder(tree, name)
    meta = f"{name}/{META_NAME}"
    if tree.entry(meta) is None:
        raise Unfinished(f"{meta} is missing: it is written last")
    piece = torchfile.to_piece(tree, meta)
    step = _find_step(tree, candidate, meta)
    return Found(step=step, files=(*files, meta), pieces=(*pieces, piece), end_mark=meta)


def _find_step(tree: Tree, candidate: Candidate, path: str) -> int:
    step = find_numbers_in_file(tree, path, _STEP_KEY).get("global_step", candidate.step)
    if step is None or step < 0:
        raise Broken(f"{candidate.name}: neither its name nor its content tells the step")
    return step
