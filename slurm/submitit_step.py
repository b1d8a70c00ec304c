"""Inside a supervised job: run one pickled function as submitit does, once per process.

`python -P -m slurm.submitit_step FOLDER JOB_ID [PYTHONPATH]`, started by torchrun. -P keeps the working directory out
of the search path until this package is imported: a folder `slurm` there must not take its place.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from slurm.submitit_plugin import (
    CLUSTER,
    ENV_JOB_ID,
    EXIT_DO_NOT_RESTART,
    OutOfTime,
    SupervisedJobEnvironment,
    SupervisedPaths,
)


def main(argv: list[str]) -> int:
    """Run the function and publish its outcome; exceptions of the function leave with their traceback."""
    folder, job_id, *more = argv
    os.environ.update({"SUBMITIT_EXECUTOR": CLUSTER, "SUBMITIT_FOLDER": folder, ENV_JOB_ID: job_id})
    _search_like_the_submitter(more[0] if more else "")
    # Imported late: submitit imports numpy, which the user's own search path may bring.
    from submitit.core.submission import process_job

    environment = SupervisedJobEnvironment()
    outcome = environment.paths.result_pickle
    published = SupervisedPaths(folder, job_id=job_id, task_id=environment.global_rank)
    result, error = published.result_pickle, published.error_pickle
    # What an earlier attempt left is not this one's; a half-written file would make submitit refuse to write.
    for path in (outcome, outcome.with_suffix(f"{outcome.suffix}.save_tmp"), result, error):
        path.unlink(missing_ok=True)
    _link_log(1, published.stdout)
    _link_log(2, published.stderr)
    try:
        process_job(folder)
    except Exception as failure:
        if outcome.exists():
            outcome.replace(error)
        if isinstance(failure, OutOfTime):
            return EXIT_DO_NOT_RESTART
        raise
    outcome.replace(result)
    return 0


def _link_log(descriptor: int, name: Path) -> None:
    """Let submitit's name of a log lead to the file that torchrun opened for this process in this attempt."""
    with suppress(OSError):
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - the link's text is what counts
        if target.is_file():
            name.unlink(missing_ok=True)
            name.symlink_to(target)


def _search_like_the_submitter(pythonpath: str) -> None:
    if pythonpath:
        given = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (pythonpath, given) if part)
    sys.path[:0] = [os.getcwd(), *(part for part in pythonpath.split(os.pathsep) if part)]  # noqa: PTH109


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
