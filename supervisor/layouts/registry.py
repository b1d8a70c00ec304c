"""Which layouts there are, and which one a folder has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from supervisor.layouts import dcp, deepspeed, huggingface, lightning, megatron, torchtitan
from supervisor.layouts.found import Candidate, Found
from supervisor.layouts.tree import Broken, Tree

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a framework lays its checkpoints out; `pattern` finds the step in what it prints ("": it prints none)."""

    name: str
    find: Callable[[Sequence[str]], list[Candidate]]
    inspect: Callable[[Tree, Candidate], Found]
    pattern: str


LAYOUTS: Mapping[str, Layout] = {
    name: Layout(name=name, find=module.find, inspect=module.inspect, pattern=module.PATTERN)
    for name, module in (
        ("dcp", dcp),
        ("torchtitan", torchtitan),
        ("megatron", megatron),
        ("huggingface", huggingface),
        ("lightning", lightning),
        ("deepspeed", deepspeed),
    )
}


def _inspect_unnamed(tree: Tree, candidate: Candidate) -> Found:
    """`step-N` may be torchtitan's or anybody's: whole as what both share, and more than exported weights."""
    files, pieces, metadata = dcp.inspect_folder(tree, candidate.name)
    if not any("opt" in key.lower() for key in metadata.keys):
        raise Broken(f"{candidate.name} holds no optimizer state: weights alone, it seems")
    mark = f"{candidate.name}/{dcp.METADATA_NAME}"
    return Found(step=candidate.step or 0, files=files, pieces=pieces, end_mark=mark)


_UNNAMED = Layout(name="dcp", find=torchtitan.find, inspect=_inspect_unnamed, pattern="")
_TOLD_BY_NAME = ("megatron", "huggingface", "lightning", "deepspeed")


def tell_layout(name: str) -> str:
    """The layout that gives checkpoints this name; "" when the name does not tell."""
    return next((layout for layout in _TOLD_BY_NAME if LAYOUTS[layout].find([name])), "")


def choose(names: Sequence[str]) -> tuple[Layout, str]:
    """The layout that most names belong to, and what to tell a person when others are there too (else "").

    A plain distributed checkpoint may have any name that ends in a number: it is what is left when nothing else fits.
    """
    counts = {name: len(LAYOUTS[name].find(names)) for name in _TOLD_BY_NAME}
    counts["dcp"] = len(torchtitan.find(names))
    there = {name: count for name, count in counts.items() if count}
    if not there:
        return LAYOUTS["dcp"], ""
    best = max(there, key=lambda name: there[name])
    layout = LAYOUTS[best] if best != "dcp" else _UNNAMED
    if len(there) == 1:
        return layout, ""
    listed = ", ".join(f"{name} {count}" for name, count in there.items())
    return layout, f"several layouts lie here ({listed}): {best} is taken; name the layout"


_NEEDS: Mapping[str, str] = {
    "dcp": "folders whose names end in the step, with .metadata in them",
    "torchtitan": "folders step-N, with .metadata in them",
    "megatron": "folders iter_NNNNNNN",
    "huggingface": "folders checkpoint-N, with trainer_state.json in them",
    "lightning": "*.ckpt",
    "deepspeed": "folders global_stepN",
}


def needs_of(layout: str) -> str:
    """What checkpoints of a layout are known by, for people; "" for one that is none."""
    return _NEEDS.get(layout, "")


def pattern_of(layout: str) -> str:
    """The pattern that finds the step in a log of this layout's framework; "" where there is none."""
    return LAYOUTS[layout].pattern if layout in LAYOUTS else ""
