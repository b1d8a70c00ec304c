"""Writes the pages that are made from the code: every configuration key, every command with its help, every module.

`make docs` writes them; a test compares them with the code, so that none of these can stay undocumented.
"""

import ast
import dataclasses
import inspect
import io
import re
import sys
import tokenize
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from supervisor.cli.main import main as cli
from supervisor.config import Settings
from supervisor.model import RunSpec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_PACKAGES = ("supervisor", "slurm", "trainer")

_CONFIGURATION = """\
# Configuration

Made from the code by `make docs`; change the comments there.

Both files are TOML. They are checked strictly: an unknown key is refused, with the nearest known one. Names end in the
unit: `_s` is seconds. A default of "-" means that nothing is set.

"""
_RUN_FILE = """\
## The run file

What `supervisor submit RUN.toml` takes: one training, in its owner's words. Relative paths start at the file's folder.
"""
_SETTINGS = """\
## The service's settings

Read from `--config`, else from the file that `SUPERVISOR_CONFIG` names, else from `/etc/supervisor/supervisor.toml`.
[systemd/supervisor.toml](../systemd/supervisor.toml) is an example with every key.
"""
_CLI = """\
# Commands

Made from the code by `make docs`; change the help texts there.

"""

_MODULES = """\
# Modules

Made from the code by `make docs`: the first line of each module. [architecture.md](architecture.md) says how they work
together, and where a change belongs.

"""

_TYPE_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}
# Defaults that depend on the machine or on the file itself.
_DEFAULTS_IN_WORDS = {"workdir": "the run file's folder", "python": "the daemon's own"}


def main() -> int:
    """Write every page."""
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    return 0


def pages() -> dict[str, str]:
    """The generated pages by file name, as they ought to be."""
    return {
        "configuration.md": "\n".join(
            [_CONFIGURATION + _RUN_FILE, *_tables(RunSpec, "###"), _SETTINGS, *_tables(Settings, "###")]
        ),
        "cli.md": _CLI + "\n".join(_commands(cli, ["supervisor"])),
        "modules.md": _MODULES + "\n".join(_folders()),
    }


# ---------------------------------------------------------------- configuration


def _tables(kind: type, marks: str, section: str = "") -> Iterator[str]:
    """One table per section: first a record's own keys, then its sub-records."""
    hints = typing.get_type_hints(kind)
    comments = _comments(kind)
    keys = [field for field in dataclasses.fields(kind) if not dataclasses.is_dataclass(hints[field.name])]
    if section:
        yield f"{marks} `[{section}]`\n\n{_first_line(kind)}\n"
    if keys:
        rows = [
            f"| `{field.name}` | {_type_word(hints[field.name])} | {_default(field)} | {comments.get(field.name, '')} |"
            for field in keys
        ]
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _tables(hints[field.name], marks, f"{section}.{field.name}" if section else field.name)


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n", 1)[0]


def _comments(kind: type) -> dict[str, str]:
    """What stands behind each field in the source: its meaning, written once, next to what it configures."""
    source = inspect.getsource(kind)
    by_line = {
        token.start[0]: re.sub(r"^noqa: [A-Z0-9, ]+(- )?", "", token.string.lstrip("# ")).strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (record,) = ast.parse(source).body
    assert isinstance(record, ast.ClassDef)
    return {
        node.target.id: by_line[node.end_lineno].replace("|", "\\|")
        for node in record.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in by_line
    }


def _type_word(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin in {types.UnionType, typing.Union}:
        return " or ".join(_type_word(arg) for arg in args if arg is not type(None))
    if origin is tuple:
        return "list"
    if origin is dict or (origin is not None and issubclass(origin, typing.Mapping)):
        return "table"
    return _TYPE_WORDS[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "**required**"
    if field.name in _DEFAULTS_IN_WORDS:
        return _DEFAULTS_IN_WORDS[field.name]
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value in (None, (), "", {}):
        return "-"
    return f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value) if isinstance(value, int) else f'"{value}"'


# ---------------------------------------------------------------- commands


def _commands(command: click.Command, words: list[str], parent: click.Context | None = None) -> Iterator[str]:
    """A command's help, then that of the commands below it."""
    context = click.Context(command, info_name=words[-1], parent=parent, terminal_width=100, max_content_width=100)
    yield f"## `{' '.join(words)}`\n\n```\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _commands(below, [*words, name], context)


# ---------------------------------------------------------------- modules


def _folders() -> Iterator[str]:
    """One table per folder: each of its modules, and what it says it is for."""
    for package in _PACKAGES:
        inner = {path.parent for path in (ROOT / package).rglob("*.py")}
        for folder in sorted(inner):
            rows = [
                f"| [{path.stem}](../{path.relative_to(ROOT)}) | {_purpose(path)} |"
                for path in sorted(folder.glob("*.py"))
                if path.name != "__init__.py"
            ]
            heading = f"## `{folder.relative_to(ROOT)}/`"
            if rows:
                yield "\n".join([heading, "", "| module | what it is for |", "|---|---|", *rows]) + "\n"


def _purpose(path: Path) -> str:
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n", 1)[0]
    return first.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
