"""Which layouts there are, and which one a folder has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from supervisor.layouts import dcp, deepspeed, huggingface, lightning, megatron, torchtitan
from supervisor.layouts.found import Candidate, Found
from supervisor.layouts.tree import Tree

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

# torchtitan's names are also what others give a plain distributed checkpoint: what both share is asked for then
_TOLD_BY_NAME = ("megatron", "huggingface", "lightning", "deepspeed")


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
    if len(there) == 1:
        return LAYOUTS[best], ""
    listed = ", ".join(f"{name} {count}" for name, count in there.items())
    return LAYOUTS[best], f"several layouts lie here ({listed}): {best} is taken; name it in the run file"


def pattern_of(layout: str) -> str:
    """The pattern that finds the step in a log of this layout's framework; "" where there is none."""
    return LAYOUTS[layout].pattern if layout in LAYOUTS else ""
