"""What the demo proves: the surviving history of the disturbed run against an undisturbed one, step by step. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trainer.history import History

SAME_SIZE_LIMIT = 1e-5  # relative difference of the loss while the node count is the undisturbed run's
OTHER_SIZE_LIMIT = 1e-3  # after a change of node count: the same sums in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How the surviving history differs from the undisturbed one."""

    final_step: int
    steps_missing: int
    samples_repeated: int
    samples_skipped: int
    max_rel_diff_same_size: float  # steps before the first change of node count
    max_rel_diff: float  # all steps

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it must be, in sentences; empty: all is well."""
        rows = (
            (self.steps_missing, f"{self.steps_missing} steps are missing from the surviving history"),
            (self.samples_repeated, f"{self.samples_repeated} samples were used twice"),
            (self.samples_skipped, f"{self.samples_skipped} samples were skipped"),
            (
                self.max_rel_diff_same_size > SAME_SIZE_LIMIT,
                f"loss differs by {self.max_rel_diff_same_size:.2e} on the same node count (limit {SAME_SIZE_LIMIT:g})",
            ),
            (
                self.max_rel_diff > OTHER_SIZE_LIMIT,
                f"loss differs by {self.max_rel_diff:.2e} (limit {OTHER_SIZE_LIMIT:g})",
            ),
        )
        return tuple(text for is_wrong, text in rows if is_wrong)


def audit(survived: History, undisturbed: History, same_size_attempts: frozenset[int]) -> Audit:
    """Compare loss and samples of each step; `same_size_attempts` ran on as many nodes as the undisturbed run."""
    repeated = skipped = 0
    same = every = 0.0
    for step, right in undisturbed.losses.items():
        got = Counter(survived.samples.get(step, ()))
        wanted = Counter(undisturbed.samples.get(step, ()))
        repeated += (got - wanted).total()
        skipped += (wanted - got).total()
        if step in survived.losses:
            difference = abs(survived.losses[step] - right) / max(abs(right), 1e-12)
            every = max(every, difference)
            if survived.attempts[step] in same_size_attempts:
                same = max(same, difference)
    return Audit(
        final_step=max(survived.losses, default=0),
        steps_missing=len(undisturbed.losses.keys() - survived.losses.keys()),
        samples_repeated=repeated,
        samples_skipped=skipped,
        max_rel_diff_same_size=same,
        max_rel_diff=every,
    )
