"""`submitit.AutoExecutor(folder, cluster="supervised")`: submitit users get supervision by changing one word.

Each submitted function becomes a run of the service. submitit pickles the function and reads the result back, as
always; in between the supervisor submits, watches and resubmits. The job id of submitit's files is the run's name: the
same for all attempts. Nothing here asks Slurm how a job is; submitit's own requeue stays off.

Speaks to the service through its command line (submit, status, stop) and knows nothing else of it.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from submitit.auto import auto
from submitit.core import core, logger, utils

from slurm.submitit_environment import SupervisedJobEnvironment, SupervisedPaths
from slurm.submitit_parameters import (
    CLUSTER,
    DEFAULT_SIGNAL,
    check_array,
    count_tasks,
    our_words,
    render_run_file,
    run_name,
    split_parameters,
    take_parameters,
    time_limit_min,
)
from slurm.submitit_script import (
    ENV_GPUS_PER_TASK,
    ENV_ONE_LOG,
    ENV_PYTHONPATH,
    ENV_RETRY,
    choose_environment,
    render_script,
)

__all__ = ["SupervisedExecutor", "SupervisedJob", "SupervisedJobEnvironment", "SupervisedPaths"]

_SERVICE = (sys.executable, "-P", "-m", "supervisor")
_SUBMIT_LIMIT_S = 90.0  # it asks a node whether it sees the run directory
_ASK_LIMIT_S = 30.0
_SUBMIT_AT_ONCE = 8
_LOG_TAIL_CHARS = 4000
_TRACE_BYTES = 1024**2  # no traceback is larger

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
# Of a held run, by the end of its last attempt, where Slurm has a word of its own.
_HELD_STATES: Mapping[str, str] = {
    "cancelled": "CANCELLED",
    "host_memory": "OUT_OF_MEMORY",
    "node_failed": "NODE_FAIL",
    "node_silent": "NODE_FAIL",
    "time_limit": "TIMEOUT",
}
_OVER = frozenset({"finished", "stopped"})  # a held run may be released


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
            errors="replace",
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
        """A word of Slurm's, or UNKNOWN. REQUEUED: between two attempts. FAILED and its like: held."""
        return self.get_info(job_id, mode=mode).get("State") or "UNKNOWN"

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """The runs in an answer of `supervisor status --json`, by name; all values as text."""
        return {str(run["run"]): _read_run(run) for run in json.loads(string)["runs"]}

    def update(self) -> None:
        """Ask once for all jobs that may still change. A service that does not answer leaves what was known."""
        open_jobs = self._registered - self._finished
        self._last_status_check = time.time()
        if not open_jobs:
            return
        self._num_calls += 1
        answer = ask_service("status", "--json", *(open_jobs if len(open_jobs) == 1 else ()))
        try:
            found = self.read_info(answer.stdout) if answer.returncode == 0 else None
        except (ValueError, KeyError, TypeError):
            found = None
        if found is None:
            logger.get_logger().warning(f"supervisor status: {answer.why}; states may be out of date")
            return
        self._info_dict.update({name: info for name, info in found.items() if name in open_jobs})
        self._finished |= {name for name in open_jobs if found.get(name, {}).get("state") in _OVER}


def _read_run(run: Mapping[str, Any]) -> dict[str, str]:
    state = _STATES.get(run["state"], "UNKNOWN")
    if run["state"] == "held":
        state = _HELD_STATES.get(run.get("end") or "", state)
    plain = {key: "" if value is None else str(value) for key, value in run.items()}
    return {"JobID": str(run["run"]), "State": state, **plain}


# ---------------------------------------------------------------- what submitit users hold


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
        """`supervisor stop`: the running attempt ends and no other follows. Nothing happens to a job that is over."""
        answer = ask_service("stop", self.job_id)
        if not check or answer.returncode == 0:
            return
        self.watcher.update()
        if self.get_info("cache").get("state") not in _OVER:
            raise RuntimeError(f"{self.job_id} was not stopped: {answer.why}")

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the warning of a time limit or a preemption to the running attempt, to test a checkpoint()."""
        del timeout  # submitit tells them apart by the time that the attempt has run
        job_id = self.get_info("force").get("job_id")
        if not job_id:
            raise RuntimeError(f"{self.job_id} has no job in Slurm now")
        command = ["scancel", "--batch", f"--signal={_signal_name()}", job_id]
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_ASK_LIMIT_S, check=True)

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        # Other hosts' files show after a while on network file systems; a job that was stopped need not have any.
        is_stopped = self.watcher.get_state(self.job_id, mode="cache") == "CANCELLED"
        until = time.monotonic() + (0.0 if is_stopped else self._results_timeout_s)
        while True:
            for path in (self.paths.result_pickle, self.paths.error_pickle):
                if path.exists():
                    outcome: tuple[str, Any] = utils.pickle_load(path)
                    return outcome
            told = self._find_other_failure()  # the launcher ends a job's other tasks with the one that failed
            if told:
                return "error", told
            if time.monotonic() > until:
                break
            time.sleep(0.5)
        raise utils.UncompletedJobError(self._describe_missing_result())

    def _find_other_failure(self) -> str:
        """The traceback of another task of this job, or an empty string."""
        for kind in ("result", "error"):
            for path in sorted(self.paths.folder.glob(f"{glob.escape(self.job_id)}_*_{kind}.pkl")):
                if path.stat().st_size > _TRACE_BYTES:  # a result, perhaps a large one
                    continue
                outcome, value = utils.pickle_load(path)
                if outcome == "error":
                    task = path.name.removeprefix(f"{self.job_id}_").partition("_")[0]
                    return f"(of task {task}, which ended this one)\n{value}"
        return ""

    def _describe_missing_result(self) -> str:
        info = self.get_info("force")
        what = f"run {self.job_id} is {info.get('state', 'unknown to the service')}"
        why = f"task {self.task_id} left no result: {info.get('reason') or 'no reason given'}"
        lines = [f"{what} and {why}; `supervisor history {self.job_id}` tells more"]
        for name, text in (("error", self.stderr()), ("output", self.stdout())):
            if text:
                return "\n".join([*lines, f"The end of its {name} stream:", "-" * 40, text[-_LOG_TAIL_CHARS:]])
        return "\n".join([*lines, f"It has written no log: {self.paths.stdout}"])


class SupervisedExecutor(core.PicklingExecutor):
    """Hands functions to the service.

    `python`: a shell command for the nodes' interpreter, this one by default; `folder` must be seen there under the
    same path. Parameters are submitit's own and those of its Slurm executor, plus `supervised_root` (where run
    directories go, by default `folder`/runs), `supervised_max_without_progress` (see the run file's [restart]) and
    `supervised_retry_exceptions` (of the function: "machine", what a broken machine looks like; "all"; "none").
    """

    job_class = SupervisedJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = python or shlex.quote(sys.executable)

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
        return our_words()

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        converted = super()._convert_parameters(params)
        if isinstance(converted.get("mem"), (int, float)):
            converted["mem"] = f"{round(converted['mem'] * 1024)}M"
        return converted

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        self.parameters.update(take_parameters(kwargs))

    # ---- submission

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        count = len(delayed_submissions)
        check_array(self.parameters, count)
        name = run_name(self.parameters, secrets.token_hex(4))
        names = [f"{name}_{index}" for index in range(count)] if count > 1 else [name]
        jobs = [self._prepare(*pair, count) for pair in zip(delayed_submissions, names, strict=True)]
        # Whether nodes see this folder is asked once per call: it takes a second, and arrays share the folder.
        answers = [_submit(jobs[0])]
        if count > 1 and answers[0].returncode == 0:
            with ThreadPoolExecutor(_SUBMIT_AT_ONCE) as pool:
                answers += pool.map(lambda job: _submit(job, "--no-visibility-check"), jobs[1:])
        _raise_refusals(jobs, answers)
        return list(jobs)

    def _prepare(self, delayed: utils.DelayedSubmission, name: str, count: int) -> SupervisedJob[Any]:
        """Everything that a job finds in the folder, before the service hears of it."""
        job: SupervisedJob[Any] = SupervisedJob(self.folder, name, list(range(count_tasks(self.parameters))))
        paths = job.paths
        paths.folder.mkdir(parents=True, exist_ok=True)
        delayed.set_timeout(time_limit_min(self.parameters), self.max_num_timeout)
        delayed.dump(paths.submitted_pickle)
        size_gb = paths.submitted_pickle.stat().st_size / 1024**3
        if count * size_gb > self.max_pickle_size_gb:
            paths.submitted_pickle.unlink()
            raise RuntimeError(
                f"{count} pickles of about {size_gb:.2f} GB are more than max_pickle_size_gb, {self.max_pickle_size_gb}"
            )
        _write_private(paths.submission_file, self._render_script())
        paths.run_file.write_text(self._render_run_file(name, paths), encoding="utf-8")
        return job

    def _render_script(self) -> str:
        environment = choose_environment(os.environ, str(self.parameters.get("export", "ALL")))
        settings = {
            ENV_PYTHONPATH: os.environ.get("PYTHONPATH", ""),
            ENV_RETRY: str(self.parameters.get("retry_exceptions", "machine")),
            ENV_GPUS_PER_TASK: str(self.parameters.get("gpus_per_task") or ""),
            ENV_ONE_LOG: "1" if self.parameters.get("stderr_to_stdout") else "",
        }
        return render_script(
            environment=environment,
            settings={name: value for name, value in settings.items() if value},
            setup=self.parameters.get("setup", ()),
            python=self.python,
            folder=str(self.folder),
            signal_name=_signal_name(),
        )

    def _render_run_file(self, name: str, paths: SupervisedPaths) -> str:
        independent = utils.JobPaths.get_first_id_independent_folder(self.folder)
        root = self.parameters.get("root")
        if root is None:  # beside the pickles, which the nodes see; a root of the user's own is the user's to make
            root = independent / "runs"
            root.mkdir(exist_ok=True)
        return render_run_file(
            self.parameters,
            name=name,
            command=("/bin/bash", str(paths.submission_file), name, str(paths.folder / name)),
            root=Path(root).expanduser().absolute(),
            workdir=Path(self.parameters.get("chdir", Path.cwd())).absolute(),
            signal_name=_signal_name(),
        )

    def _num_tasks(self) -> int:
        return count_tasks(self.parameters)

    def _submit_command(self, command: str) -> NoReturn:
        raise NotImplementedError(f'cluster="{CLUSTER}" submits functions only; for a command use CommandFunction')

    # Parts of submitit's way through sbatch, which is not taken here.

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError


def _submit(job: SupervisedJob[Any], *options: str) -> Answer:
    return ask_service("submit", "--json", *options, str(job.paths.run_file), limit_s=_SUBMIT_LIMIT_S)


def _raise_refusals(jobs: Sequence[SupervisedJob[Any]], answers: Sequence[Answer]) -> None:
    refused = [(job, answer) for job, answer in zip(jobs, answers, strict=False) if answer.returncode != 0]
    if not refused:
        return
    job, answer = refused[0]
    accepted = [job.job_id for job, answer in zip(jobs, answers, strict=False) if answer.returncode == 0]
    others = f"; already submitted: {', '.join(accepted)}" if accepted else ""
    raise utils.FailedSubmissionError(f"supervisor submit {job.paths.run_file}: {answer.why}{others}")


def _write_private(path: Path, text: str) -> None:
    """A file for its owner's eyes: it holds an environment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(text)


def _signal_name() -> str:
    return os.environ.get("SUBMITIT_PREEMPT_SIGNAL", DEFAULT_SIGNAL)


# ---------------------------------------------------------------- slurm_* words


def accept_slurm_words(module: Any) -> None:
    """Make `AutoExecutor(slurm_x=…)` and `update_parameters(slurm_x=…)` reach a supervised job.

    `module`: submitit.auto.auto. AutoExecutor drops words with another cluster's prefix silently, and no hook of a
    plugin sees them: a job would land in the wrong partition only because its cluster was renamed. Other clusters are
    not touched.
    """
    original_update = module.AutoExecutor._internal_update_parameters  # noqa: SLF001 - see above
    original_init = module.flexible_init
    if getattr(original_update, "is_supervised", False):
        return

    def update(self: auto.AutoExecutor, **kwargs: Any) -> None:
        if self.cluster != CLUSTER:
            original_update(self, **kwargs)
            return
        given = {word: value for word, value in kwargs.items() if value is not None}
        auto._convert_deprecated_args(given, self._deprecated_args)  # noqa: SLF001 - unprefixed words of Slurm
        shared, ours = split_parameters(given)
        original_update(self, **shared)
        generic = {word: value for word, value in ours.items() if word in self._typed_parameters()}
        plain = {word: value for word, value in ours.items() if word not in generic}
        mine = self._executor
        mine._internal_update_parameters(**mine._convert_parameters(generic), **plain)  # noqa: SLF001 - as it does

    def init(cls: type[core.Executor], folder: Path | str, **kwargs: Any) -> core.Executor:
        if issubclass(cls, SupervisedExecutor):
            from_slurm = {
                f"{CLUSTER}_{word.removeprefix('slurm_')}": value
                for word, value in kwargs.items()
                if word.startswith("slurm_")
            }
            kwargs = from_slurm | kwargs
        made: core.Executor = original_init(cls, folder, **kwargs)
        return made

    update.is_supervised = True  # type: ignore[attr-defined]
    module.AutoExecutor._internal_update_parameters = update  # noqa: SLF001
    module.flexible_init = init


accept_slurm_words(auto)
