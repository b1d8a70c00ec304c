"""The block that torchrun prints when a worker failed: which ranks, where, how. Its "root cause" is only a hint."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"^\s*\[(\d{1,6})\]:\s*$")
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)$")
_RULE = re.compile(r"^\s*[=-]{20,}\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """One entry. `exit_code`: negative for a signal, as Python counts."""

    host: str = ""
    rank: int | None = None
    exit_code: int | None = None
    time: str = ""  # the agent's local time, whole seconds
    traceback: str = ""
    is_root: bool = False  # named as first observed by this agent

    @property
    def signal(self) -> int | None:
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None


def parse_failures(text: str) -> tuple[RankFailure, ...]:
    """All entries of all blocks of a text, in its order; several agents' blocks may follow one another."""
    failures: list[RankFailure] = []
    fields: dict[str, str] | None = None
    is_root, last = False, ""
    for line in text.splitlines():
        if "Root Cause (first observed failure)" in line:
            _close(failures, fields, is_root=is_root)
            fields, is_root = None, True
        elif line.strip().endswith("Failures:"):
            _close(failures, fields, is_root=is_root)
            fields, is_root = None, False
        elif _ENTRY.match(line):
            _close(failures, fields, is_root=is_root)
            fields, last = {}, ""
        elif _RULE.match(line):
            _close(failures, fields, is_root=is_root)
            fields = None
        elif fields is not None and (found := _FIELD.match(line)) and last != "traceback":
            last = found[1]
            fields[last] = found[2].strip()
        elif fields is not None and last == "traceback":
            fields["traceback"] += "\n" + line.rstrip()
    _close(failures, fields, is_root=is_root)
    return tuple(failures)


def _close(failures: list[RankFailure], fields: dict[str, str] | None, *, is_root: bool) -> None:
    if fields:
        failures.append(
            RankFailure(
                host=fields.get("host", ""),
                rank=_leading_number(fields.get("rank", "")),
                exit_code=_leading_number(fields.get("exitcode", "")),
                time=fields.get("time", ""),
                traceback=fields.get("traceback", ""),
                is_root=is_root,
            )
        )


def _leading_number(text: str) -> int | None:
    found = re.match(r"\s*(-?\d{1,9})", text)
    return int(found[1]) if found else None
