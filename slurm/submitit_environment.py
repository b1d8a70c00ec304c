"""Inside a supervised job: what a function can ask about it, and what happens when its time is nearly up.

torchrun starts the processes, and submitit's code expects what srun gives: the launcher's variables are taken out of
the environment, and Slurm's say what they would say if srun had started one task for each process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

import cloudpickle  # type: ignore[import-untyped]
from submitit.core import job_environment, utils
from submitit.slurm import slurm as submitit_slurm

ENV_JOB_ID = "SUBMITIT_SUPERVISED_JOB_ID"
EXIT_RESUBMIT = 75  # saved, and wants to go on: the supervisor resubmits
EXIT_DO_NOT_RESTART = 93  # the next attempt would end the same way: the supervisor holds the run

SAVE_NAME = "submitted.pkl"
_MANIFEST_NAME = "MANIFEST.json"
_UNWIND_S = 30.0  # for the function's own clean-up after a save

_PLACE: Mapping[str, str] = {
    "WORLD_SIZE": "SUBMITIT_SUPERVISED_NTASKS",
    "GROUP_WORLD_SIZE": "SUBMITIT_SUPERVISED_NNODES",
    "GROUP_RANK": "SUBMITIT_SUPERVISED_NODEID",
    "RANK": "SUBMITIT_SUPERVISED_GLOBALID",
    "LOCAL_RANK": "SUBMITIT_SUPERVISED_LOCALID",
    "LOCAL_WORLD_SIZE": "SUBMITIT_SUPERVISED_NTASKS_PER_NODE",
}
_LAUNCHER_NAMES = frozenset({*_PLACE, "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"})
_GPU_NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def take_place(environment: MutableMapping[str, str]) -> None:
    """Turn torchrun's variables into submitit's and Slurm's.

    `submitit.helpers.TorchDistributedEnvironment` refuses to go over variables that are set, and a function that
    chooses its own port must not be told that torchrun's store is there.
    """
    for theirs, ours in _PLACE.items():
        if theirs in environment:
            environment[ours] = environment[theirs]
    for name in [n for n in environment if n in _LAUNCHER_NAMES or n.startswith("TORCHELASTIC_")]:
        del environment[name]
    rank, tasks = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    local_tasks = max(1, _number(environment, "LOCAL_WORLD_SIZE", 1))
    nodes = max(1, _number(environment, "GROUP_WORLD_SIZE", 1))
    placed = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(_number(environment, "LOCAL_RANK", 0)),
        "SLURM_NODEID": str(_number(environment, "GROUP_RANK", 0)),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(local_tasks),
        "SLURM_TASKS_PER_NODE": f"{local_tasks}(x{nodes})" if nodes > 1 else str(local_tasks),
    }
    environment.update(placed)
    cpus = environment.get("SLURM_CPUS_PER_TASK", "")
    if cpus.isdecimal():  # the job's one task of a node has them all
        environment["SLURM_CPUS_PER_TASK"] = str(max(1, int(cpus) // local_tasks))


def _number(environment: Mapping[str, str], theirs: str, default: int) -> int:
    text = environment.get(_PLACE[theirs], "")
    return int(text) if text.isdecimal() else default


def choose_gpus(environment: MutableMapping[str, str], per_task: int) -> None:
    """Show a process its own GPUs of the node's only, as Slurm does for `--gpus-per-task`."""
    first = _number(environment, "LOCAL_RANK", 0) * per_task
    shown = next((environment[name] for name in _GPU_NAMES if environment.get(name)), "")
    known = shown.split(",") if shown else [str(i) for i in range(first + per_task)]
    own = known[first : first + per_task]
    for name in _GPU_NAMES:
        if name in environment or name == _GPU_NAMES[0]:
            environment[name] = ",".join(own)


class SupervisedPaths(utils.JobPaths):
    """submitit's files of one task, and ours beside them.

    A result is there when the function returned, or raised what no further attempt can cure. Another error has a file
    of its own, which `SupervisedJob` reads once the run is over.
    """

    @property
    def error_pickle(self) -> Path:
        """The traceback of the newest attempt's exception, as submitit pickles it."""
        return self._format_id(self.folder / "%j_%t_error.pkl")

    @property
    def run_file(self) -> Path:
        """What was handed to the service."""
        return self._format_id(self.folder / "%j_submission.toml")


class SupervisedJobEnvironment(job_environment.JobEnvironment):
    """What a function can ask about its job; the run's name is the job id."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": ENV_JOB_ID,
        "num_tasks": _PLACE["WORLD_SIZE"],
        "num_nodes": _PLACE["GROUP_WORLD_SIZE"],
        "node": _PLACE["GROUP_RANK"],
        "nodes": "SLURM_JOB_NODELIST",
        "global_rank": _PLACE["RANK"],
        "local_rank": _PLACE["LOCAL_RANK"],
    }

    @property
    def paths(self) -> SupervisedPaths:
        return SupervisedPaths(os.environ["SUBMITIT_FOLDER"], job_id=self.job_id, task_id=self.global_rank)

    @property
    def array_job_id(self) -> str | None:
        """The part of the job id that the functions of a `map_array` share; None outside of one."""
        array, _, index = self.raw_job_id.rpartition("_")
        return array if index else None

    @property
    def array_task_id(self) -> str | None:
        """The function's index in its `map_array`; None outside of one."""
        array, _, index = self.raw_job_id.rpartition("_")
        return index if array else None

    @property
    def hostnames(self) -> Sequence[str]:
        """The job's nodes in the order of their ranks; `hostnames[0]` is where task 0 runs."""
        nodes = os.environ.get(self._env["nodes"], "")
        return list(submitit_slurm._parse_node_list(nodes)) if nodes else [self.hostname]  # noqa: SLF001

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        # SIGTERM keeps its default action: a process that stays when it is told to end holds up the next attempt.
        signal.signal(self._usr_sig(), _SaveHandler(self, paths, submission).checkpoint_and_try_requeue)

    def ignore_warnings(self) -> None:
        """The function is over: to save it now would start it again."""
        signal.signal(self._usr_sig(), signal.SIG_IGN)

    def _requeue(self, countdown: int) -> None:
        """Nothing: the supervisor resubmits, Slurm and submitit do not."""


class OutOfTime(utils.UncompletedJobError):
    """The function was warned of its end and can't be continued."""


class Saved(SystemExit):
    """What `checkpoint()` gave is stored, and this process is to end."""


class _SaveHandler(job_environment.SignalHandler):
    """On the warning: store what `checkpoint()` gives, and end with the code that asks for the next attempt."""

    _is_called = False

    def checkpoint_and_try_requeue(self, signum: int, frame: FrameType | None = None) -> None:
        """As submitit decides, but nothing is requeued; a second warning during the save is no second save."""
        del frame
        timed_out = self.has_timed_out()
        word = "timed-out" if timed_out else "preempted"
        self._logger.warning("Caught signal %s: this job is %s.", signal.Signals(signum).name, word)
        if self.env.global_rank != 0:
            self._logger.info("Task %s saves nothing: task 0 does.", self.env.global_rank)
            return
        if self._is_called:
            return
        self._is_called = True
        countdown = self._delayed._timeout_countdown - timed_out  # noqa: SLF001 - submitit's own counter
        why = ""
        if hasattr(self._delayed.function, "checkpoint"):
            why = self._save(countdown)
        elif timed_out:
            why = "timed-out and not checkpointable"
        if countdown < 0:
            why = "timed-out too many times"
        if why:
            raise OutOfTime(f"Job not requeued because: {why}.")
        self._exit()

    def _save(self, countdown: int) -> str:
        """Why there is nothing to go on with; empty when there is."""
        self._logger.info("Calling checkpoint method.")
        following = self._delayed._checkpoint_function()  # noqa: SLF001 - submitit's way to find it
        if following is None:
            return "checkpoint function returned None"
        following.set_timeout(self._delayed._timeout_min, countdown)  # noqa: SLF001
        data = cloudpickle.dumps(following)
        if countdown >= 0:
            publish_bytes(self._job_paths.submitted_pickle, data)
            try:
                publish_save(os.environ, data)
            except Exception as error:  # noqa: BLE001 - the save itself is safe; only the service does not see it
                self._logger.warning("the service will not see this save: %s", error)
        return ""

    def _exit(self) -> NoReturn:
        self._logger.info("Exiting gracefully after preemption/timeout; the supervisor starts the next attempt.")
        tell_outcome(os.environ, EXIT_RESUBMIT, "checkpoint() is stored")
        # A function that catches everything would go on until the time limit.
        timer = threading.Timer(_UNWIND_S, os._exit, (EXIT_RESUBMIT,))
        timer.daemon = True
        timer.start()
        raise Saved(EXIT_RESUBMIT)


# ---------------------------------------------------------------- the contract's files


def tell_outcome(environment: Mapping[str, str], exit_code: int, message: str) -> None:
    """Say how this attempt ends, whichever process the launcher hears of first. The first word counts.

    The file is the contract's (docs/contract.md); it is written here, as this package stands apart from `trainer`.
    """
    run_dir, attempt = environment.get("SUPERVISOR_RUN_DIR"), environment.get("SUPERVISOR_ATTEMPT", "")
    if not run_dir or not attempt.isdecimal():
        return
    path = Path(run_dir) / "attempts" / attempt / "outcome.json"
    record = {"version": 1, "attempt": int(attempt), "exit_code": exit_code, "message": message[:500]}
    try:
        if path.parent.is_dir() and not path.exists():
            publish_bytes(path, json.dumps(record).encode())
    except OSError as error:
        sys.stderr.write(f"{path.name} not written: {error}\n")


def publish_save(environment: Mapping[str, str], data: bytes) -> Path | None:
    """Publish what `checkpoint()` gave as a checkpoint of the run, so that the service sees progress.

    Steps count the saves. None when there is nothing to publish to: no run directory, or one where the function keeps
    checkpoints of its own (`trainer.checkpoint`), whose steps these would be mixed up with.
    """
    import xxhash

    run_dir, attempt = environment.get("SUPERVISOR_RUN_DIR"), environment.get("SUPERVISOR_ATTEMPT", "")
    if not run_dir or not attempt.isdecimal():
        return None
    folder = Path(run_dir) / "checkpoints"
    if folder.is_dir() and any(not (path / SAVE_NAME).exists() for path in folder.glob("step-*")):
        return None
    resumed = environment.get("SUPERVISOR_RESUME_STEP", "")
    step = (int(resumed) if resumed.isdecimal() else 0) + 1
    path = folder / f"step-{step}.a{int(attempt)}"
    path.mkdir(parents=True, exist_ok=True)
    publish_bytes(path / SAVE_NAME, data)
    tasks = _number(environment, "WORLD_SIZE", 1)
    file = {"path": SAVE_NAME, "size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    manifest: dict[str, Any] = {
        "version": 1,
        "run": environment.get("SUPERVISOR_RUN", ""),
        "attempt": int(attempt),
        "step": step,
        "samples": 0,
        "world_size": tasks,
        "time": time.time(),
        "format": "submitit",
        "files": [file],
    }
    publish_bytes(path / _MANIFEST_NAME, json.dumps(manifest).encode())
    return path


def publish_bytes(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new, and that it survives a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
