"""Starts in a row that brought nothing: when to wait before the next, and when to give up. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Streak:
    """The starts since the newest verified checkpoint that ended without a newer one, and no node to blame.

    Where a node is to blame, it is left out, and so the number of such starts has its bound anyway.
    """

    failures: int = 0
    steps: tuple[int | None, ...] = ()  # the newest step of each; None: not known
    stillborn: int = 0  # of them, those that failed before anything had begun
    places: tuple[str, ...] = ()  # the one node where each failed; "": not only there


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The next start would only fail as well. `next`: as in the exit record."""

    next: str
    reason: str


def extend_streak(
    streak: Streak,
    *,
    has_newer: bool,
    is_blamed: bool,
    last_step: int | None,
    is_stillborn: bool = False,
    place: str = "",
) -> Streak:
    """The streak after one more start that was interrupted. `has_newer`: a newer checkpoint is verified since."""
    if has_newer:
        streak = Streak()
    if is_blamed:
        return streak
    return Streak(
        failures=streak.failures + 1,
        steps=(*streak.steps, last_step),
        stillborn=streak.stillborn + is_stillborn,
        places=(*streak.places, place),
    )


def judge_streak(streak: Streak, *, max_without_progress: int, backoff_s: float) -> float | GiveUp:
    """Seconds to wait before the next start, or that there is to be none."""
    if streak.failures >= max(1, max_without_progress):
        step = streak.steps[0]
        if step is not None and set(streak.steps) == {step}:
            return GiveUp(next="hold", reason=f"step {step} was the last one {streak.failures} times in a row")
        is_one_place = len(set(streak.places)) == 1 and streak.places[0] != ""
        if streak.stillborn == streak.failures and not is_one_place:  # another job would only fail in the same way
            return GiveUp(next="hold", reason=f"{streak.failures} starts in a row failed before their first step")
        return GiveUp(next="resubmit", reason=f"{streak.failures} starts in a row without a newer verified checkpoint")
    if streak.failures < 2:
        return 0.0
    return float(backoff_s * 2 ** min(streak.failures - 2, 16))
