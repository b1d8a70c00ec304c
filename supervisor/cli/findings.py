"""One thing that `supervisor doctor` has looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found. `ok` None: told, not judged, or a warning; `detail` says what to do where something is."""

    what: str
    ok: bool | None
    detail: str
    is_warning: bool = False

    @property
    def word(self) -> str:
        return "warning" if self.is_warning else {True: "ok", False: "FAILED", None: ""}[self.ok]

    @property
    def status(self) -> str:
        """For programs: ok, warn, fail, or empty where there is nothing to judge."""
        return "warn" if self.is_warning else {True: "ok", False: "fail", None: ""}[self.ok]


def warning(what: str, detail: str) -> Finding:
    """Something that may be as it is meant to be."""
    return Finding(what=what, ok=None, detail=detail, is_warning=True)
