"""Text of the batch script that starts our launcher on the batch host. Pure; submitit builds the `#SBATCH` part."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm.commands import escape_pattern
from slurm.values import parse_duration_s

LAUNCHER_MODULE = "trainer.launch"

# submitit's defaults that must not reach the script: 5 minutes, one node, and a wckey that clusters which track
# wckeys refuse. None leaves them out, though its annotations don't say so.
_UNSET: dict[str, Any] = {"time": None, "nodes": None, "wckey": None}


def render_batch_script(
    *,
    python: Path | str,
    attempt_dir: Path,
    job_name: str,
    output: Path,
    pythonpath: str = "",
    options: Mapping[str, str | bool] | None = None,
) -> str:
    """A batch script that becomes `python -P -m trainer.launch attempt_dir`.

    `exec`, so that no shell stands between Slurm and the launcher: signals reach it, and its exit code is the job's (a
    script that goes on after the training would end 0 though a node died under it). `options`: further `#SBATCH`
    lines, long names without dashes; True for an option without a value. What differs per submission (nodes, exclude,
    token, singleton) stands on sbatch's command line instead, which wins over the script.

    Raises:
        ValueError: a text with a line break or NUL, which can't stand on an `#SBATCH` line.
    """
    values = [str(python), str(attempt_dir), job_name, str(output), pythonpath, *map(str, (options or {}).values())]
    for value in values:
        if any(character in value for character in "\n\r\0"):
            raise ValueError(f"{value!r} has a line break or NUL in it: it can't stand in a batch script")
    # Imported here: it takes 0.1 s, and only a submission needs it.
    from submitit.slurm.slurm import _make_sbatch_string

    text: str = _make_sbatch_string(
        # -P: without it Python looks in the working directory first, and a user's own trainer/ there would be run.
        command=f"exec {shlex.join([str(python), '-P', '-m', LAUNCHER_MODULE, str(attempt_dir)])}",
        folder=attempt_dir,
        job_name=job_name,
        **_UNSET,
        setup=[f"export PYTHONPATH={shlex.quote(pythonpath)}"] if pythonpath else None,
        stderr_to_stdout=True,
        use_srun=False,
        additional_parameters={
            "output": escape_pattern(output),
            "no-requeue": True,
            # The launcher goes on with the nodes that are left (rung 2); Slurm must not end the job with the first one.
            "no-kill": True,
            **(options or {}),
        },
    )
    return _without_signal(text) if "signal" not in (options or {}) else text


def render_warning(warn_s: int, time_limit: str | None) -> tuple[str, ...]:
    """The option of sbatch that has the batch script, here the launcher, warned so long before the time limit.

    Without a limit of the job's own too: its partition may have one, and `preempt_send_user_signal` has Slurm send the
    signal ahead of a preemption. Slurm looks every 30 s and sends it up to 60 s early, so of a short limit a quarter is
    the most: else it would come as the job begins.
    """
    limit_s = parse_duration_s(time_limit) if time_limit is not None else None
    if limit_s is not None:
        warn_s = min(warn_s, limit_s // 4)
    return (f"--signal=B:USR1@{warn_s}",) if warn_s > 0 else ()


def _without_signal(text: str) -> str:
    # submitit always asks for USR2 ahead of the time limit, for its own requeue; nobody in our job waits for it, and
    # the default action of USR2 is to end the process.
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#SBATCH --signal="))
