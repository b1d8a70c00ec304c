"""Where the log of an attempt's job is. Pure: by the pattern of --output, where the batch script is a person's own."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from slurm.sbatch_line import render_log_path
from supervisor.model import Attempt, Run

_ANY_JOB = 9_876_543_210  # as many digits as a pattern can pad to
_ANY_NODE = "anynodeofthecluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNames:
    """Which files of a folder a script's jobs write to, whatever their numbers: `pattern`'s group is the job's id."""

    folder: Path
    pattern: str


def find_log_names(run: Run, *, user: str) -> LogNames | None:
    """Where logs of a script's jobs lie; None when that can't be known without the job."""
    if run.script is None or not run.script.output:
        return None
    rendered = render_log_path(run.script.output, job_id=_ANY_JOB, job_name=run.job_name, user=user, node=_ANY_NODE)
    folder, name = os.path.split(rendered or os.devnull)
    if rendered in (None, os.devnull) or not name or str(_ANY_JOB) in folder or _ANY_NODE in folder:
        return None
    first, *more = re.escape(name).split(str(_ANY_JOB))
    rest = [f"0*([1-9][0-9]{{0,9}}){more[0]}", *(f"[0-9]+{part}" for part in more[1:])] if more else []
    pattern = "".join([first, *rest]).replace(_ANY_NODE, "[^/]+")
    return LogNames(folder=Path(folder), pattern=pattern)


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
