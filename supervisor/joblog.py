"""Where the log of an attempt's job is. Pure: by the pattern of --output, where the batch script is a person's own."""

from __future__ import annotations

import os
from pathlib import Path

from slurm.sbatch_line import render_log_path
from supervisor.model import Attempt, Run


def find_shared_log(run: Run, *, user: str) -> Path | None:
    """The file that all attempts of a script write to; None when each has its own."""
    if run.script is None or not run.script.output:
        return None
    jobs = ((1, "a"), (2, "b"))
    paths = {
        render_log_path(run.script.output, job_id=job_id, job_name=run.job_name, user=user, node=node)
        for job_id, node in jobs
    }
    path = paths.pop()
    return Path(path) if path is not None and not paths and path != os.devnull else None


def find_log(run: Run, attempt: Attempt, *, user: str) -> Path | None:
    """The file that an attempt's job writes to; None while that is not known, or can't be."""
    if run.script is None:
        return run.spec.paths.attempt_dir(attempt.number) / "job.log"
    if not run.script.output or attempt.job_id is None:
        return None
    node = attempt.nodes[0] if attempt.nodes else ""
    rendered = render_log_path(run.script.output, job_id=attempt.job_id, job_name=run.job_name, user=user, node=node)
    return Path(rendered) if rendered is not None and rendered != os.devnull else None
