"""How a training command of the run file is to be started: under which Python, with which arguments. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.agent.place import Place
from trainer.contract import AttemptSpec

PYTHONS = ("python", "python3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How torchrun is to start a training command: under which Python, and its arguments from the program on."""

    python: str
    arguments: tuple[str, ...]


def choose_program(command: Sequence[str], python: str) -> Program:
    """The Python and torchrun arguments for a command of the run file.

    `x.py …` and `-m module …` run under `python`; a leading `python`/`python3` means the same; a leading path of a
    Python selects that one. Everything else is a program of its own (torchrun's --no-python).
    """
    first, rest = command[0], tuple(command[1:])
    is_python = Path(first).name.startswith("python") and not first.endswith(".py")
    if is_python and rest and (rest[0] == "-m" or rest[0].endswith(".py")):
        return Program(python=python if first in PYTHONS else first, arguments=rest)
    if first == "-m" or first.endswith(".py"):
        return Program(python=python, arguments=tuple(command))
    return Program(python=python, arguments=("--no-python", *command))


def fill_command(spec: AttemptSpec, run_dir: Path, place: Place) -> tuple[str, ...]:
    """The training command of one start: the template with its placeholders filled, or the command as it is."""
    if not spec.command_template:
        return spec.command
    values = {
        "{resume_from}": place.resume_from,
        "{resume_step}": str(place.resume_step),
        "{run}": spec.run,
        "{attempt}": str(spec.attempt),
        "{run_dir}": str(run_dir),
    }
    return tuple(_fill(word, values) for word in spec.command_template)


def _fill(word: str, values: Mapping[str, str]) -> str:
    pattern = "|".join(re.escape(placeholder) for placeholder in values)
    return re.sub(pattern, lambda found: values[found[0]], word)  # what was filled in is not filled again
