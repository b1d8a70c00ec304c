"""Several rows of one job id as one job: components of a heterogeneous job, siblings in a federation. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slurm.types import ENDED_STATES, JobFlag, JobRecord, JobState


def merge_rows(rows: Iterable[JobRecord]) -> tuple[JobRecord, ...]:
    """One record for each job id, in the order in which the ids come first."""
    rows = tuple(rows)
    by_id: dict[int, list[JobRecord]] = {}
    for row in rows:
        by_id.setdefault(row.job_id, []).append(row)
    if len(by_id) == len(rows):  # nearly always
        return rows
    return tuple(combine_rows(same) for same in by_id.values())


def combine_rows(rows: list[JobRecord]) -> JobRecord:
    """One job of its rows.

    A copy that another cluster of the federation has revoked counts only where there is no other. Of what is left, the
    job has failed when one row has, waits while one waits, and has ended well only when all have.
    """
    counting = [row for row in rows if JobFlag.REVOKED not in row.flags] or rows
    chosen = min(counting, key=_rank)
    nodes = tuple(dict.fromkeys(node for row in counting for node in row.nodes))
    return replace(chosen, nodes=nodes if not chosen.is_pending else chosen.nodes)


def _rank(row: JobRecord) -> int:
    if row.state in ENDED_STATES and row.state is not JobState.COMPLETED:
        return 0
    if row.is_pending:
        return 1
    return 3 if row.is_ended else 2
