"""Inside a supervised job: run one pickled function as submitit does, once per process.

`python -P -m slurm.submitit_step FOLDER JOB_ID`, started by torchrun through the submission script. -P keeps the
working directory out of the search path until this package is imported: a folder `slurm` there must not take its place.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurm.submitit_environment import (
    ENV_JOB_ID,
    EXIT_DO_NOT_RESTART,
    EXIT_RESUBMIT,
    SAVE_NAME,
    OutOfTime,
    Saved,
    SupervisedJobEnvironment,
    SupervisedPaths,
    choose_gpus,
    publish_bytes,
    take_place,
    tell_outcome,
)
from slurm.submitit_failures import is_machine_failure
from slurm.submitit_logs import JobLogs
from slurm.submitit_parameters import CLUSTER
from slurm.submitit_script import ENV_GPUS_PER_TASK, ENV_ONE_LOG, ENV_PYTHONPATH, ENV_RETRY

EXIT_FAILED = 1  # the supervisor judges, and may start the next attempt

_SEEN_LIMIT_S = 60.0


def main(argv: list[str]) -> int:
    """Run the function and publish its outcome."""
    folder, job_id = argv
    retry, gpus = os.environ.pop(ENV_RETRY, "machine"), os.environ.pop(ENV_GPUS_PER_TASK, "")
    is_one_log = bool(os.environ.pop(ENV_ONE_LOG, ""))
    _search_like_the_submitter(os.environ.pop(ENV_PYTHONPATH, ""))
    os.environ.update({"SUBMITIT_EXECUTOR": CLUSTER, "SUBMITIT_FOLDER": folder, ENV_JOB_ID: job_id})
    take_place(os.environ)
    if gpus:
        choose_gpus(os.environ, int(gpus))
    with suppress(ImportError):  # as submitit: before the pickle may bring it
        import numpy as np  # noqa: F401

    environment = SupervisedJobEnvironment()
    paths = environment.paths
    for path in (paths.result_pickle, paths.error_pickle):  # an earlier attempt's
        path.unlink(missing_ok=True)
    logs = JobLogs(paths.stdout, None if is_one_log else paths.stderr)
    logs.open()
    try:
        return _run(environment, paths, logs, retry)
    except Saved:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_RESUBMIT)  # threads that don't end must not hold up the next attempt


def _run(environment: SupervisedJobEnvironment, paths: SupervisedPaths, logs: JobLogs, retry: str) -> int:
    from submitit.core.logger import get_logger

    logger = get_logger()
    logger.info("Starting with %s, attempt %s", environment, os.environ.get("SUPERVISOR_ATTEMPT", "?"))
    try:
        delayed = _load(paths)
        environment._handle_signals(paths, delayed)  # noqa: SLF001 - as submitit's own step
        result = delayed.result()
        environment.ignore_warnings()
        logger.info("Job completed successfully")
        del delayed
        outcome = _pickle(("success", result))
        del result
        logger.info("Exiting after successful completion")
    except Exception as error:  # noqa: BLE001 - the function's own
        environment.ignore_warnings()
        return _fail(paths, error, retry)
    logs.settle()
    publish_bytes(paths.result_pickle, outcome)
    return 0


def _load(paths: SupervisedPaths) -> Any:
    from submitit.core import utils
    from submitit.core.logger import get_logger

    source = _find_pickle(paths.submitted_pickle)
    get_logger().info("Loading pickle: %s", source)
    return utils.DelayedSubmission.load(source)


def _find_pickle(submitted: Path) -> Path:
    """The function's pickle, or the service's copy of the newest save; network file systems show it after a while."""
    saved = os.environ.get("SUPERVISOR_RESUME_FROM", "")
    copy = Path(saved) / SAVE_NAME if saved else submitted
    until = time.monotonic() + _SEEN_LIMIT_S
    while True:
        found = next((path for path in (submitted, copy) if path.exists()), None)
        if found is not None:
            return found
        if time.monotonic() > until:
            raise OSError(errno.ESTALE, "the submitted function is not seen on this node", str(submitted))
        time.sleep(1)


def _pickle(value: object) -> bytes:
    import pickle

    import cloudpickle  # type: ignore[import-untyped]

    data: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return data


def _fail(paths: SupervisedPaths, error: Exception, retry: str) -> int:
    """Publish an exception: as the result when it is final, else where it waits for the supervisor's judgement."""
    from submitit.core.logger import get_logger

    is_final = isinstance(error, OutOfTime) or retry == "none" or (retry == "machine" and not is_machine_failure(error))
    text = "".join(traceback.format_exception(error))
    get_logger().error("Submitted job triggered an exception")
    sys.stderr.write(text)
    sys.stderr.flush()
    if is_final:
        # Told before it is published: who sees the result may look at the run.
        what = str(error) if isinstance(error, OutOfTime) else f"task {paths.task_id} raised {_last_line(text)}"
        tell_outcome(os.environ, EXIT_DO_NOT_RESTART, what)
    try:
        publish_bytes(paths.result_pickle if is_final else paths.error_pickle, _pickle(("error", text)))
    except OSError as failure:
        get_logger().error("the traceback could not be stored: %s", failure)
    return EXIT_DO_NOT_RESTART if is_final else EXIT_FAILED


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _search_like_the_submitter(pythonpath: str) -> None:
    if pythonpath:
        given = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (pythonpath, given) if part)
    sys.path[:0] = [os.getcwd(), *(part for part in pythonpath.split(os.pathsep) if part)]  # noqa: PTH109


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
