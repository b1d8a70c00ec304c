"""torchtitan: `step-N` folders of torch.distributed.checkpoint, in the checkpoint folder of its job configuration.

Its last save may be the weights alone, as a distributed checkpoint or in safetensors files: a result, and nothing to
resume from. Old folders are removed file by file: one that is half gone still has its `.metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from supervisor.layouts import dcp
from supervisor.layouts.found import Candidate, Found
from supervisor.layouts.tree import Broken, Tree

PATTERN = r"step:\s*(\d+)"

_NAME = re.compile(r"step-([0-9]{1,15})")
_HF_INDEX = "model.safetensors.index.json"


def find(names: Sequence[str]) -> list[Candidate]:
    """`step-N`."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    return [Candidate(name=name, step=int(found[1])) for name, found in matches if found]


def inspect(tree: Tree, candidate: Candidate) -> Found:
    """Whole as a distributed checkpoint, and with the state of the training in it."""
    folder = candidate.name
    if tree.entry(f"{folder}/{dcp.METADATA_NAME}") is None and tree.is_file(f"{folder}/{_HF_INDEX}"):
        raise Broken(f"{folder} holds exported weights: nothing to resume from")
    files, pieces, metadata = dcp.inspect_folder(tree, folder)
    if not any(key == "train_state" or key.startswith("train_state.") for key in metadata.keys):
        raise Broken(f"{folder} holds the weights alone: nothing to resume from")
    return dcp.describe(candidate, files, pieces, metadata)
