"""The supervision options of `supervisor sbatch`: on the command line, in `#SUPERVISE` lines, and what they mean. Pure.

`--supervise-NAME=VALUE` stands anywhere among sbatch's own options; `#SUPERVISE --NAME=VALUE` (or `NAME=VALUE`) stands
where `#SBATCH` lines stand, before the script's first command. The command line wins.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from slurm.sbatch_options import read_options
from supervisor.model import LAYOUTS, MAX_WARNING_S

PREFIX = "--supervise-"
_DIRECTIVE = re.compile(r"#SUPERVISE(?=\s|$)(.*)")
_MAX_VALUE_CHARS = 4096
_HELP_CHARS = 78  # with the two that click puts in front: 80, as wide as any terminal


class BadSupervision(ValueError):
    """A supervision option that can't be read; the message is one line for the person who wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One supervision option."""

    name: str
    help: str
    metavar: str = ""  # empty: a switch
    key: tuple[str, ...] = ()  # where its value stands in the tables of a run file; empty: not for the run
    convert: Callable[[str], Any] = str
    more: tuple[tuple[str, ...], ...] = ()  # further places of the value
    is_of_the_script: bool = False  # without a place there, yet a matter of the run: may stand in the script


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("a whole number is needed")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number of seconds is needed") from None
    if not math.isfinite(value) or not 0 <= value < 1e9:
        raise ValueError("a number of seconds, 0 or more, is needed")
    return value


def _yes_or_no(text: str) -> bool:
    if text not in {"yes", "no"}:
        raise ValueError("yes or no is needed")
    return text == "yes"


def _warning(text: str) -> int:
    value = _whole(text)
    if value > MAX_WARNING_S:
        raise ValueError(f"at most {MAX_WARNING_S} seconds are possible")
    return value


def _layout(text: str) -> str:
    if text not in LAYOUTS:
        raise ValueError(f"one of {', '.join(LAYOUTS)} is needed")
    return text


def _pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"it needs one group, around the step's number, and has {groups}")
    return text


OPTIONS: tuple[Option, ...] = (
    Option(name="name", metavar="NAME", key=("name",), help="The run's name; default: made of the job's name."),
    Option(
        name="root",
        metavar="DIR",
        key=("root",),
        help="Where the run directory goes, shared with the nodes; default: .supervisor in the working directory.",
    ),
    Option(
        name="min-nodes", metavar="N", key=("nodes", "min"), convert=_whole, help="Start with as few; default: --nodes."
    ),
    Option(
        name="max-nodes", metavar="N", key=("nodes", "max"), convert=_whole, help="At most as many; default: --nodes."
    ),
    Option(
        name="multiple-of", metavar="N", key=("nodes", "multiple_of"), convert=_whole, help="Only multiples of N nodes."
    ),
    Option(
        name="elastic",
        metavar="YES|NO",
        key=("nodes", "elastic"),
        convert=_yes_or_no,
        help="Whether the data loader can go on with another number of nodes; default: as checkpoints tell.",
    ),
    Option(
        name="checkpoint-dir",
        metavar="DIR",
        key=("checkpoint", "directory"),
        help="Where the training saves; without it: the run directory.",
    ),
    Option(
        name="layout",
        metavar="LAYOUT",
        key=("checkpoint", "layout"),
        convert=_layout,
        help=f"How checkpoints lie there: {', '.join(LAYOUTS)}; default with a checkpoint directory: auto.",
    ),
    Option(
        name="keep-last",
        metavar="N",
        key=("checkpoint", "keep_last"),
        convert=_whole,
        help="Verified checkpoints that are kept.",
    ),
    Option(
        name="checkpoint-every-s",
        metavar="S",
        key=("checkpoint", "every_s"),
        convert=_seconds,
        help="Told to the training as SUPERVISOR_CHECKPOINT_EVERY_S.",
    ),
    Option(
        name="progress-pattern",
        metavar="REGEX",
        key=("progress", "pattern"),
        convert=_pattern,
        help="Finds the step in the job's log; one group, the number.",
    ),
    Option(
        name="stall-s",
        metavar="S",
        key=("progress", "step_max_s"),
        more=(("progress", "start_max_s"),),
        convert=_seconds,
        help="Silence of the log or of progress that ends an attempt; default: only where progress is seen, 900.",
    ),
    Option(
        name="max-restarts",
        metavar="N",
        key=("restart", "max_without_progress"),
        convert=_whole,
        help="Attempts in a row without a newer checkpoint; then the run is held. Default 3.",
    ),
    Option(
        name="max-node-failures",
        metavar="N",
        key=("restart", "max_node_failures"),
        convert=_whole,
        help="The same for attempts lost with a node, counted apart. Default 10.",
    ),
    Option(
        name="backoff-s",
        metavar="S",
        key=("restart", "backoff_s"),
        convert=_seconds,
        help="Pause before the second restart without progress; doubles. Default 15.",
    ),
    Option(
        name="queue-ahead-s",
        metavar="S",
        key=("restart", "queue_ahead_s"),
        convert=_seconds,
        help="So long before the time limit the next job is queued behind the running one. Default 0: never.",
    ),
    Option(
        name="warn-s",
        metavar="N",
        key=("slurm", "warn_before_limit_s"),
        convert=_warning,
        help="As --signal=B:USR1@N, where no --signal is given; default: no warning.",
    ),
    Option(
        name="may-requeue",
        is_of_the_script=True,
        help="The training has Slurm requeue its job; known by itself where the script calls scontrol requeue.",
    ),
    Option(name="dry-run", help="Say what would be submitted; submit nothing."),
    Option(name="json", help="With dry-run: as JSON."),
    Option(name="config", metavar="FILE", help="The service's configuration, as --config of the other commands."),
)
_BY_NAME = {option.name: option for option in OPTIONS}
_IN_SCRIPTS = frozenset(o.name for o in OPTIONS if o.key or o.is_of_the_script)

Settings = Mapping[str, str]  # by option name, as written


def take_options(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """(sbatch's own words, supervision options by name) of a command line.

    What stands after the script are the script's own arguments, whatever they look like. Raises BadSupervision, and
    BadSubmission for options that sbatch can't read.
    """
    others = [(at, word) for at, word in enumerate(words) if not word.startswith(PREFIX)]
    _, used = read_options([word for _, word in others])
    script_at = others[used][0] if used < len(others) else len(words)
    if any(word == "--" for _, word in others[:used]):
        script_at = words.index("--") + 1
    ours = [word for word in words[:script_at] if word.startswith(PREFIX)]
    kept = tuple(word for at, word in enumerate(words) if at >= script_at or not word.startswith(PREFIX))
    return kept, _read_settings((word.removeprefix(PREFIX) for word in ours), PREFIX, frozenset(_BY_NAME))


def read_directives(text: str) -> dict[str, str]:
    """The supervision options in the `#SUPERVISE` lines of a script, by name. Raises BadSupervision."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            break  # as sbatch: directives end at the first command
        match = _DIRECTIVE.match(line)
        if match is None:
            continue
        try:
            words = list(takewhile(lambda word: not word.startswith("#"), shlex.split(match.group(1))))
            found.update(_read_settings((word.removeprefix("--") for word in words), "", _IN_SCRIPTS))
        except ValueError as error:
            raise BadSupervision(f"line {number}: #SUPERVISE: {error}") from None
    return found


def find_unread(text: str) -> tuple[int, ...]:
    """The numbers of `#SUPERVISE` lines that stand behind the script's first command, where none is read."""
    lines = text.split("\n")
    stripped = (line.strip() for line in lines)
    first = next((at for at, line in enumerate(stripped) if line and not line.startswith("#")), len(lines))
    return tuple(at + 1 for at in range(first, len(lines)) if _DIRECTIVE.match(lines[at]))


def render_tables(settings: Settings) -> dict[str, Any]:
    """The settings as the tables of a run file. Raises BadSupervision."""
    tables: dict[str, Any] = {}
    for name, text in settings.items():
        option = _BY_NAME[name]
        if not option.key:
            continue
        try:
            value = option.convert(text)
        except ValueError as error:
            raise BadSupervision(f"{PREFIX}{name}={text[:80]}: {error}") from None
        for *path, last in (option.key, *option.more):
            table = tables
            for part in path:
                table = table.setdefault(part, {})
            table[last] = value
    return tables


def render_help() -> str:
    """The options for the command's help, in lines for 80 columns: what is longer goes on below its start."""
    width = max(len(_usage(option)) for option in OPTIONS) + 2
    return "\n".join(_render_option(option, width) for option in OPTIONS)


def _render_option(option: Option, width: int) -> str:
    return textwrap.fill(
        option.help,
        width=_HELP_CHARS,
        initial_indent=f"{_usage(option):{width}}",
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _usage(option: Option) -> str:
    return f"{PREFIX}{option.name}" + (f"={option.metavar}" if option.metavar else "")


def _read_settings(words: Any, prefix: str, allowed: frozenset[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        option = _BY_NAME.get(name)
        if option is None or name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(sorted(allowed))}"
            raise BadSupervision(f'there is no supervision option "{prefix}{name[:60]}"; {hint}')
        if bool(equals) != bool(option.metavar) or (option.metavar and not value):
            raise BadSupervision(f"{prefix}{name}: {'takes no value' if equals else f'write {prefix}{name}=VALUE'}")
        if len(value) > _MAX_VALUE_CHARS or not value.isprintable():
            raise BadSupervision(f"{prefix}{name}: one line of at most {_MAX_VALUE_CHARS} printable characters")
        found[name] = value
    return found
