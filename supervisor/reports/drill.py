"""The report of a drill: for people, and as JSON."""

from __future__ import annotations

from typing import Any

from supervisor.drill import KINDS, Check, Outcome, rung
from supervisor.reports.table import Table, instant, one_line, render_plain

_WORDS = {True: "passed", False: "FAILED", None: "not told"}


def drill_as_json(outcome: Outcome) -> dict[str, Any]:
    """The report of `supervisor drill --json`."""
    before, after = outcome.before, outcome.after
    return {
        "run": before.run,
        "kill": before.kind,
        "node": before.node,
        "how": before.how,
        "made_at": before.made_at,
        "ok": outcome.is_passed,
        "recovered_s": _rounded(after.recovered_s),
        "noticed_s": _rounded(after.noticed_s),
        "rung": int(rung(before, after)[0]) if after.recovered_s is not None else None,
        "before": {
            "attempt": before.attempt,
            "launch": before.launch,
            "training": list(before.training),
            "step": before.step,
            "verified_step": before.verified_step,
        },
        "after": {
            "attempt": after.attempt,
            "launch": after.launch,
            "training": list(after.training),
            "resume_step": after.resume_step,
            "parts_s": dict(after.record.parts_s) if after.record is not None else {},
        },
        "checks": [{"check": c.name, "ok": c.is_ok, "detail": c.detail} for c in outcome.checks],
    }


def drill_text(outcome: Outcome) -> str:
    """The report for people, a few lines."""
    before, after = outcome.before, outcome.after
    title = f"Drill of {before.run}: {KINDS[before.kind]} ({before.how})"
    when = f"{instant(before.made_at)} UTC, at step {before.step} of attempt {before.attempt}"
    lines = [f"{title}, {when}.", "", render_plain(_table(outcome.checks))]
    if after.record is not None and after.record.parts_s:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in after.record.parts_s.items())
        lines += ["", f"Where the time went, as the launcher says: {parts}."]
    lines += ["", "All of it is as it must be." if outcome.is_passed else "NOT as it must be: see what failed above."]
    return "\n".join(lines) + "\n"


def _table(checks: tuple[Check, ...]) -> Table:
    return Table(
        columns=("check", "result", "detail"),
        rows=tuple((c.name, _WORDS[c.is_ok], one_line(c.detail, 300)) for c in checks),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
