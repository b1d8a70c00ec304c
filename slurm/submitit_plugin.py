"""`submitit.AutoExecutor(folder, cluster="supervised")`: submitit users get supervision by changing one word.

Each submitted function becomes a run of the service. submitit pickles the function and reads the result back, as
always; in between the supervisor submits, watches and resubmits. The job id of submitit's files is the run's name: the
same for all attempts. Nothing here asks Slurm; submitit's own requeue stays off.

Speaks to the service through its command line (submit, status, stop) and knows nothing else of it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

from submitit.auto import auto
from submitit.core import core, job_environment, logger, utils

ENV_JOB_ID = "SUBMITIT_SUPERVISED_JOB_ID"
CLUSTER = "supervised"
STEP_MODULE = "slurm.submitit_step"
EXIT_RESUBMIT = 75  # saved, and wants to go on: the supervisor resubmits
EXIT_DO_NOT_RESTART = 93  # the next attempt would end the same way: the supervisor holds the run

_SERVICE = (sys.executable, "-P", "-m", "supervisor")
_SUBMIT_LIMIT_S = 90.0  # it asks a node whether it sees the run directory
_ASK_LIMIT_S = 30.0
_SIGNAL_DELAY_S = 90  # submitit's own default
_NAME_CHARS = 60

# What submitit's users and its code know, for each word of `supervisor status`.
_STATES: Mapping[str, str] = {
    "pending": "PENDING",
    "waiting": "PENDING",
    "paused": "PENDING",
    "starting": "RUNNING",
    "running": "RUNNING",
    "recovering": "REQUEUED",
    "stopping": "COMPLETING",
    "finished": "COMPLETED",
    "stopped": "CANCELLED",
    "held": "FAILED",
}
_FINAL_STATES = frozenset({"COMPLETED", "CANCELLED"})  # a held run may be released

# ---------------------------------------------------------------- parameters

_RUN_WORDS = frozenset({"job_name", "time", "nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "mem"})
_SLURM_WORDS = frozenset({"partition", "account", "qos"})
_OPTION_WORDS: Mapping[str, str] = {
    "constraint": "--constraint",
    "cpus_per_gpu": "--cpus-per-gpu",
    "gres": "--gres",
    "mail_type": "--mail-type",
    "mail_user": "--mail-user",
    "mem_per_cpu": "--mem-per-cpu",
    "mem_per_gpu": "--mem-per-gpu",
    "wckey": "--wckey",
}
_OUR_WORDS = frozenset({"root", "max_without_progress"})
_OTHER_WORDS = frozenset({"exclusive", "signal_delay_s", "additional_parameters"})
_REFUSED_WORDS: Mapping[str, str] = {
    "num_gpus": "write gpus_per_node",
    "gpus_per_task": "write gpus_per_node and tasks_per_node: torchrun starts the processes of a node",
    "setup": "torchrun starts the function on each node; no shell runs before it",
    "teardown": "torchrun starts the function on each node; no shell runs after it",
    "comment": "the supervisor finds a job whose submission answer was lost by it",
    "dependency": "the supervisor sets it: one live job per run",
    "nodelist": "a job bound to a node can't leave it when it breaks",
    "exclude": "the supervisor sets it: it holds the broken nodes",
    "array_parallelism": "each function is a run of its own; Slurm's limits bound how many run at once",
    "srun_args": "the supervisor makes the steps of the job itself",
    "use_srun": "the supervisor makes the steps of the job itself",
    "stderr_to_stdout": "a failed process's error output is kept apart: it is evidence",
}
_VALID_WORDS = _RUN_WORDS | _SLURM_WORDS | _OPTION_WORDS.keys() | _OUR_WORDS | _OTHER_WORDS


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter that a supervised run can't have, with the reason."""
    for word, value in parameters.items():
        if word in _REFUSED_WORDS and value not in (None, False):
            raise ValueError(f'"{word}" can\'t be used with cluster="{CLUSTER}": {_REFUSED_WORDS[word]}')
        if word not in _VALID_WORDS and word not in _REFUSED_WORDS:
            known = ", ".join(sorted(_VALID_WORDS))
            raise ValueError(f'unknown parameter "{word}" for cluster="{CLUSTER}"; there are: {known}')


def count_tasks(parameters: Mapping[str, Any]) -> int:
    """Processes of a job: nodes times tasks per node."""
    return int(parameters.get("nodes", 1)) * _tasks_per_node(parameters)


def run_name(parameters: Mapping[str, Any], suffix: str) -> str:
    """A run name out of the job name and a suffix that makes it unique.

    Without underscores, though run names may have them: submitit reads what follows one as an array index.
    """
    wanted = re.sub(r"[^A-Za-z0-9.-]+", "-", str(parameters.get("job_name", "submitit"))).strip("-.")
    return f"{wanted[:_NAME_CHARS] or 'submitit'}-{suffix}"


def render_run_file(
    parameters: Mapping[str, Any], *, name: str, command: Sequence[str], root: Path, workdir: Path
) -> str:
    """The run file (TOML) of one function.

    The number of nodes is fixed: a function's results are counted by its tasks. Silence at the start has no limit,
    since a function need not report progress; one that does is watched from its first step on.
    """
    nodes = int(parameters.get("nodes", 1))
    restart: dict[str, Any] = {}
    if "max_without_progress" in parameters:
        restart["max_without_progress"] = int(parameters["max_without_progress"])
    sections: dict[str, dict[str, Any]] = {
        "nodes": {"min": nodes, "max": nodes, "procs_per_node": _tasks_per_node(parameters)},
        "slurm": _slurm_section(parameters),
        "restart": restart,
        "progress": {"start_max_s": 0},
    }
    top = {"name": name, "command": list(command), "root": str(root), "workdir": str(workdir)}
    lines = [f"{key} = {_toml(value)}" for key, value in top.items()]
    for section, values in sections.items():
        if values:
            lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _tasks_per_node(parameters: Mapping[str, Any]) -> int:
    return max(1, int(parameters.get("ntasks_per_node", 1)))


def _slurm_section(parameters: Mapping[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {word: str(parameters[word]) for word in sorted(_SLURM_WORDS & parameters.keys())}
    if "time" in parameters:
        section["time_limit"] = str(parameters["time"])
    if parameters.get("gpus_per_node"):
        section["gpus_per_node"] = int(parameters["gpus_per_node"])
    section["options"] = _sbatch_options(parameters)
    return section


def _sbatch_options(parameters: Mapping[str, Any]) -> list[str]:
    options = [f"{option}={parameters[word]}" for word, option in _OPTION_WORDS.items() if word in parameters]
    if "cpus_per_task" in parameters:  # the job has one task per node, which starts all of the node's processes
        options.append(f"--cpus-per-task={int(parameters['cpus_per_task']) * _tasks_per_node(parameters)}")
    if "mem" in parameters:
        options.append(f"--mem={parameters['mem']}")
    if parameters.get("exclusive"):
        value = parameters["exclusive"]
        options.append("--exclusive" if value is True else f"--exclusive={value}")
    # To the batch step only: the launcher there passes it on to the processes of all nodes.
    options.append(f"--signal=B:USR2@{int(parameters.get('signal_delay_s', _SIGNAL_DELAY_S))}")
    for key, value in (parameters.get("additional_parameters") or {}).items():
        options.append(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return options


def _toml(value: object) -> str:
    # JSON's strings, numbers and lists are TOML's, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---------------------------------------------------------------- the service


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a `supervisor` command ended. `returncode` None: it did not answer in time."""

    returncode: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def why(self) -> str:
        """What it said of its failure, in one line."""
        said = " ".join((self.stderr or self.stdout).split())
        return said or ("no answer in time" if self.returncode is None else f"exit code {self.returncode}")


def ask_service(*arguments: str, limit_s: float = _ASK_LIMIT_S) -> Answer:
    """Run a `supervisor` command, with this process's environment ($SUPERVISOR_CONFIG says which service)."""
    try:
        done = subprocess.run(
            [*_SERVICE, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(returncode=None)
    return Answer(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


class RunWatcher(core.InfoWatcher):
    """States of runs, from `supervisor status --json`; one question for all jobs of the process."""

    def __init__(self, delay_s: int = 10) -> None:
        super().__init__(delay_s)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """PENDING, RUNNING, REQUEUED (between two attempts), COMPLETED, FAILED (held), CANCELLED or UNKNOWN."""
        return self.get_info(job_id, mode=mode).get("State") or "UNKNOWN"

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """The runs in an answer of `supervisor status --json`, by name; all values as text."""
        runs = json.loads(string)["runs"]
        return {
            str(run["run"]): {
                "JobID": str(run["run"]),
                "State": _STATES.get(run["state"], "UNKNOWN"),
                **{key: "" if value is None else str(value) for key, value in run.items()},
            }
            for run in runs
        }

    def update(self) -> None:
        """Ask once for all jobs that may still change. A service that does not answer leaves what was known."""
        open_jobs = self._registered - self._finished
        self._last_status_check = time.time()
        if not open_jobs:
            return
        self._num_calls += 1
        answer = ask_service("status", "--json", *(open_jobs if len(open_jobs) == 1 else ()))
        if answer.returncode != 0:
            logger.get_logger().warning(f"supervisor status: {answer.why}; states may be out of date")
            return
        found = self.read_info(answer.stdout)
        self._info_dict.update({name: info for name, info in found.items() if name in open_jobs})
        self._finished |= {name for name in open_jobs if self.get_state(name, mode="cache") in _FINAL_STATES}


# ---------------------------------------------------------------- what submitit users hold


class SupervisedPaths(utils.JobPaths):
    """submitit's files of one task, and ours beside them.

    A result is there only when the function returned. An error is not final while the supervisor may start the next
    attempt, so it has a file of its own, which `SupervisedJob` reads once the run is over.
    """

    @property
    def error_pickle(self) -> Path:
        """The traceback of the newest attempt's exception, as submitit pickles it."""
        return self._format_id(self.folder / "%j_%t_error.pkl")

    @property
    def run_file(self) -> Path:
        """What was handed to the service."""
        return self._format_id(self.folder / "%j_submission.toml")


class SupervisedJob(core.Job[core.R]):
    """A run of the service, as a submitit job; `job_id` is the run's name, constant over all attempts."""

    watcher = RunWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths: SupervisedPaths = SupervisedPaths(folder, job_id=job_id, task_id=self.task_id)

    @property
    def paths(self) -> SupervisedPaths:
        return self._paths

    def cancel(self, check: bool = True) -> None:
        """`supervisor stop`: the running attempt ends and no other follows."""
        answer = ask_service("stop", self.job_id)
        if check and answer.returncode != 0:
            raise RuntimeError(f"{self.job_id} was not stopped: {answer.why}")

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        # Other hosts' files show after a while on network file systems; a job that was stopped need not have any.
        is_stopped = self.watcher.get_state(self.job_id, mode="cache") == "CANCELLED"
        until = time.monotonic() + (0.0 if is_stopped else self._results_timeout_s)
        while True:
            for path in (self.paths.result_pickle, self.paths.error_pickle):
                if path.exists():
                    outcome: tuple[str, Any] = utils.pickle_load(path)
                    return outcome
            if time.monotonic() > until:
                break
            time.sleep(0.5)
        info = self.get_info("force")
        raise utils.UncompletedJobError(
            f"run {self.job_id} is {info.get('state', 'unknown to the service')} and task {self.task_id} left no "
            f"result: {info.get('reason') or 'no reason given'}; `supervisor history {self.job_id}` tells more"
        )


class SupervisedExecutor(core.PicklingExecutor):
    """Hands functions to the service.

    `python`: the interpreter on the nodes, this one by default; `folder` must be seen there under the same path.
    Parameters are submitit's own and those of its Slurm executor, plus `supervised_root` (where run directories go,
    by default `folder`/runs) and `supervised_max_without_progress` (see the run file's [restart]).
    """

    job_class = SupervisedJob

    def __init__(self, folder: Path | str, max_pickle_size_gb: float = 1.0, python: str | None = None) -> None:
        super().__init__(folder, max_pickle_size_gb=max_pickle_size_gb)
        self.python = python or sys.executable

    @classmethod
    def affinity(cls) -> int:
        """0: chosen only by name."""
        return 0

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        return {
            "name": "job_name",
            "timeout_min": "time",
            "mem_gb": "mem",
            "nodes": "nodes",
            "cpus_per_task": "cpus_per_task",
            "gpus_per_node": "gpus_per_node",
            "tasks_per_node": "ntasks_per_node",
        }

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        # Not those of Slurm: AutoExecutor would take their old, unprefixed form for ours, on every cluster.
        return set(_OUR_WORDS)

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        converted = super()._convert_parameters(params)
        if isinstance(converted.get("mem"), (int, float)):
            converted["mem"] = f"{round(converted['mem'] * 1024)}M"
        return converted

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        given = {word: value for word, value in kwargs.items() if value is not None}
        check_parameters(given)
        self.parameters.update({word: value for word, value in given.items() if word not in _REFUSED_WORDS})

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        jobs: list[core.Job[Any]] = []
        for delayed in delayed_submissions:
            try:
                jobs.append(self._submit_one(delayed, is_first=not jobs))
            except utils.FailedSubmissionError as error:
                if not jobs:
                    raise
                names = ", ".join(job.job_id for job in jobs)
                raise utils.FailedSubmissionError(f"{error}; already submitted: {names}") from error
        return jobs

    def _submit_one(self, delayed: utils.DelayedSubmission, *, is_first: bool) -> SupervisedJob[Any]:
        name = run_name(self.parameters, secrets.token_hex(4))
        job: SupervisedJob[Any] = SupervisedJob(self.folder, name, list(range(count_tasks(self.parameters))))
        paths = job.paths
        paths.folder.mkdir(parents=True, exist_ok=True)
        delayed.dump(paths.submitted_pickle)
        size_gb = paths.submitted_pickle.stat().st_size / 1024**3
        if size_gb > self.max_pickle_size_gb:
            paths.submitted_pickle.unlink()
            raise RuntimeError(
                f"a pickle of {size_gb:.2f} GB is larger than max_pickle_size_gb, {self.max_pickle_size_gb}"
            )
        paths.run_file.write_text(self._render_run_file(name), encoding="utf-8")
        # Whether nodes see this folder is asked once per call: it takes a second, and arrays share the folder.
        options = () if is_first else ("--no-visibility-check",)
        answer = ask_service("submit", "--json", *options, str(paths.run_file), limit_s=_SUBMIT_LIMIT_S)
        if answer.returncode != 0:
            raise utils.FailedSubmissionError(f"supervisor submit {paths.run_file}: {answer.why}")
        return job

    def _render_run_file(self, name: str) -> str:
        independent = utils.JobPaths.get_first_id_independent_folder(self.folder)
        root = self.parameters.get("root")
        if root is None:  # beside the pickles, which the nodes see; a root of the user's own is the user's to make
            root = independent / "runs"
            root.mkdir(exist_ok=True)
        return render_run_file(
            self.parameters,
            name=name,
            # "-u" first: with "-m" there, torchrun would run under the function's Python, which may have no torch.
            command=(
                self.python,
                "-u",
                "-P",
                "-m",
                STEP_MODULE,
                str(self.folder),
                name,
                os.environ.get("PYTHONPATH", ""),
            ),
            root=Path(root).expanduser().absolute(),
            workdir=Path.cwd(),
        )

    def _num_tasks(self) -> int:
        return count_tasks(self.parameters)

    def _submit_command(self, command: str) -> NoReturn:
        raise NotImplementedError(f'cluster="{CLUSTER}" submits functions only; for a command write a run file')

    # Parts of submitit's way through a submission script, which is not taken here.

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError


# ---------------------------------------------------------------- inside the job


class _StepPaths(SupervisedPaths):
    """submitit writes the outcome here; the step then publishes it as the result or as the error."""

    @property
    def result_pickle(self) -> Path:
        return self._format_id(self.folder / "%j_%t_outcome.pkl")


class SupervisedJobEnvironment(job_environment.JobEnvironment):
    """What a function can ask about its job: from torchrun's variables, and the run's name as job id."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": ENV_JOB_ID,
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "GROUP_WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    @property
    def paths(self) -> _StepPaths:
        return _StepPaths(os.environ["SUBMITIT_FOLDER"], job_id=self.job_id, task_id=self.global_rank)

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        # SIGTERM keeps its default action: a process that stays when it is told to end holds up the next attempt.
        signal.signal(self._usr_sig(), _SaveHandler(self, paths, submission).save_and_exit)

    def _requeue(self, countdown: int) -> None:
        """Nothing: the supervisor resubmits, Slurm and submitit do not."""


class OutOfTime(utils.UncompletedJobError):
    """The function needs more than the job's time limit and can't be continued."""


class _SaveHandler(job_environment.SignalHandler):
    """Before the time limit: store what `checkpoint()` gives and end with the code that asks for the next attempt."""

    def save_and_exit(self, signum: int, frame: FrameType | None = None) -> None:
        if self.env.global_rank == 0 and not hasattr(self._delayed.function, "checkpoint"):
            # As submitit: from the start again it would only run into the same limit, for ever.
            raise OutOfTime("the time limit is near, and the function has no checkpoint(): it can't go on later")
        self.checkpoint_and_exit(signum, frame)

    def _exit(self) -> NoReturn:
        self._logger.info("saved; the supervisor starts the next attempt")
        sys.exit(EXIT_RESUBMIT)


# ---------------------------------------------------------------- slurm_* words


def accept_slurm_words(executor: type[auto.AutoExecutor]) -> None:
    """Make `update_parameters(slurm_partition=…)` reach a supervised job.

    AutoExecutor drops words with another cluster's prefix silently, and no hook of a plugin sees them: a job would land
    in the wrong partition only because its cluster was renamed. Other clusters are not touched.
    """
    original = executor._internal_update_parameters  # noqa: SLF001 - see above
    if getattr(original, "is_supervised", False):
        return

    def update(self: auto.AutoExecutor, **kwargs: Any) -> None:
        if self.cluster != CLUSTER:
            original(self, **kwargs)
            return
        given = {word: value for word, value in kwargs.items() if value is not None}
        auto._convert_deprecated_args(given, self._deprecated_args)  # noqa: SLF001 - unprefixed words of Slurm
        shared, ours = split_parameters(given, frozenset(self._typed_parameters()))
        original(self, **shared)
        self._executor._internal_update_parameters(**ours)  # noqa: SLF001 - as AutoExecutor does

    update.is_supervised = True  # type: ignore[attr-defined]
    executor._internal_update_parameters = update  # type: ignore[method-assign]  # noqa: SLF001


def split_parameters(parameters: Mapping[str, Any], generics: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What AutoExecutor handles itself, and what is for this executor: `slurm_x`, and before it `supervised_x`."""
    shared: dict[str, Any] = {}
    specific: dict[str, Any] = {}
    for prefix in ("", "slurm_", f"{CLUSTER}_"):  # the later one wins
        for word, value in parameters.items():
            is_ours = word.startswith(("slurm_", f"{CLUSTER}_"))
            if not prefix and not is_ours:
                shared[word] = value
            elif prefix and word.startswith(prefix):
                plain = word.removeprefix(prefix)
                (shared if plain in generics else specific)[plain] = value
    return shared, specific


accept_slurm_words(auto.AutoExecutor)
