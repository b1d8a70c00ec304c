"""submitit's public API on supervised jobs: the processes are real, a stand-in is the service. No Slurm.

What can be is compared with submitit's own executors on this machine.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import submitit
from submitit.core import core, utils
from submitit.helpers import CommandFunction, DelayedSubmission, FunctionSequence, as_completed, monitor_jobs

from slurm import submitit_plugin
from slurm.submitit_failures import is_machine_failure
from slurm.submitit_plugin import RunWatcher, SupervisedJob
from tests.slurm.stand_in.service import Service
from trainer.contract import Manifest, Outcome, RunPaths, parse

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    service = Service()
    monkeypatch.setattr(submitit_plugin, "ask_service", service.ask)
    monkeypatch.setattr(SupervisedJob, "watcher", RunWatcher(delay_s=1))
    monkeypatch.setattr(SupervisedJob, "_results_timeout_s", 0.2)
    # submitit looks for a result once a second
    quick = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(min(seconds, 0.05)))
    monkeypatch.setattr(core, "_time", quick)
    yield
    service.close()


@pytest.fixture
def executor(tmp_path: Path) -> submitit.AutoExecutor:
    return submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="supervised")


def wait(what: str, condition: Callable[[], Any]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def run_dir(job: submitit.Job[Any]) -> Path:
    return job.paths.folder / "runs" / job.job_id


def warn(job: submitit.Job[Any], attempt: int = 1) -> None:
    """The warning before the time limit, as the launcher passes it on to every process."""
    for pid in (run_dir(job) / "attempts" / str(attempt) / "pids").read_text().split():
        os.kill(int(pid), signal.SIGUSR2)


# ---- results and logs


def test_a_result_and_its_logs_are_where_submitit_puts_them(executor: submitit.AutoExecutor) -> None:
    def work(x: int) -> int:
        print("to the log")
        print("to the other", file=sys.stderr)
        os.system("echo of a child")
        return x + 1

    job = executor.submit(work, 41)
    assert job.result() == 42
    assert job.done()
    assert job.exception() is None
    folder = job.paths.folder
    names = {f"{job.job_id}_{end}" for end in ("0_log.out", "0_log.err", "0_result.pkl", "submitted.pkl")}
    assert names < {path.name for path in folder.iterdir()}
    assert all(path.is_file() and not path.is_symlink() for path in (job.paths.stdout, job.paths.stderr))
    out = job.stdout() or ""
    assert "to the log\n" in out
    assert "of a child\n" in out
    assert "Exiting after successful completion" in out  # all of it, at the instant when the result is there
    assert (job.stderr() or "").endswith("to the other\n")
    assert "to the log" in (run_dir(job) / "attempts/1/0.out").read_text()  # the service's evidence
    assert job.submission().args == (41,)
    wait("the service's word", lambda: job.done(force_check=True) and job.state == "COMPLETED")


def test_a_result_waits_for_a_log_that_is_slow(tmp_path: Path) -> None:
    code = """
import os, signal, sys, threading
from pathlib import Path
from slurm.submitit_logs import JobLogs
logs = JobLogs(Path("out"), Path("err"))
logs.open()
slow = logs._tees[0].pid
os.kill(slow, signal.SIGSTOP)
print("late", flush=True)
threading.Timer(0.3, os.kill, (slow, signal.SIGCONT)).start()
logs.settle()
sys.exit(Path("out").read_text() != "late\\n")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0


def test_tasks_have_results_logs_and_places_of_their_own(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(nodes=2, tasks_per_node=2, cpus_per_task=4)

    def tell() -> dict[str, Any]:
        environment = submitit.JobEnvironment()
        print("I am", environment.global_rank)
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_CPUS_PER_TASK", "RANK")
        return {
            "place": (environment.global_rank, environment.local_rank, environment.node),
            "size": (environment.num_tasks, environment.num_nodes),
            "hosts": list(environment.hostnames),
            "job": environment.job_id,
            "result": str(environment.paths.result_pickle),
            "slurm": [os.environ.get(name) for name in names],
            "left": [name for name in os.environ if name.startswith(("TORCHELASTIC", "MASTER_"))],
        }

    job = executor.submit(tell)
    results = job.results()
    assert [result["place"] for result in results] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert results[3]["size"] == (4, 2)
    assert results[3]["hosts"] == ["n1", "n2"]
    assert results[3]["slurm"] == ["3", "1", "4", "1", "4", None]
    assert results[3]["left"] == []
    assert [result["job"] for result in results] == [job.job_id] * 4
    assert results[2]["result"] == str(job.task(2).paths.result_pickle)
    assert job.task(2).result() == results[2]
    assert "I am 2" in (job.task(2).stdout() or "")
    assert [line for line in (job.stdout() or "").splitlines() if line.startswith("I am")] == [
        f"I am {i}" for i in range(4)
    ]
    with pytest.raises(AssertionError, match="results"):
        job.result()


def test_torchs_helper_exports_a_store_of_the_jobs_own(executor: submitit.AutoExecutor) -> None:
    def export() -> tuple[str | None, ...]:
        submitit.helpers.TorchDistributedEnvironment().export()
        names = ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
        return tuple(os.environ.get(name) for name in names)

    executor.update_parameters(tasks_per_node=2)
    assert executor.submit(export).results() == [("n1", "0", "2", "0", None), ("n1", "1", "2", "1", None)]


def test_gpus_of_a_task_are_all_it_sees(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(tasks_per_node=2, slurm_gpus_per_task=2)
    job = executor.submit(os.getenv, "CUDA_VISIBLE_DEVICES")
    assert job.results() == ["0,1", "2,3"]


def test_both_streams_in_one_log_stay_apart_as_evidence(executor: submitit.AutoExecutor) -> None:
    def say() -> None:
        print("out")
        print("err", file=sys.stderr)

    executor.update_parameters(stderr_to_stdout=True)
    job = executor.submit(say)
    job.result()
    said = job.stdout() or ""  # two streams into one file: a line of the one may end within a line of the other
    assert "out" in said
    assert "err" in said
    assert job.stderr() is None
    assert (run_dir(job) / "attempts/1/0.err").read_text().endswith("err\n")


def test_the_submitters_environment_setup_and_modules_are_the_functions(
    executor: submitit.AutoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, library = tmp_path / "project", tmp_path / "library"
    (project / "slurm").mkdir(parents=True)
    (project / "slurm" / "__init__.py").write_text("raise RuntimeError('the wrong slurm')")
    (project / "mine.py").write_text("VALUE = 5")
    library.mkdir()
    (library / "theirs.py").write_text("VALUE = 6")
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.setenv("TOKEN", "it's a secret")
    executor.update_parameters(slurm_setup=["export STAGED=$TOKEN-too", "echo staging", "nonesuch"])

    def read() -> tuple[Any, ...]:
        import mine  # type: ignore[import-not-found]
        import theirs  # type: ignore[import-not-found]

        return mine.VALUE, theirs.VALUE, os.environ["TOKEN"], os.environ["STAGED"], str(Path.cwd())

    job = executor.submit(read)
    assert job.result() == (5, 6, "it's a secret", "it's a secret-too", str(project))
    wait("what the setup said", lambda: "staging\n" in (job.stdout() or "") and "nonesuch" in (job.stderr() or ""))
    evidence = (run_dir(job) / "attempts/1/0.out").read_text(), (run_dir(job) / "attempts/1/0.err").read_text()
    assert "staging\n" in evidence[0]
    assert "nonesuch" in evidence[1]


def test_ids_stand_in_folder_names_and_the_folder_tells_arrays_apart(tmp_path: Path) -> None:
    one = submitit.AutoExecutor(folder=tmp_path / "one" / "%j", cluster="supervised").submit(abs, -1)
    assert one.result() == 1
    assert one.paths.stdout.parent == tmp_path / "one" / one.job_id
    many = submitit.AutoExecutor(folder=tmp_path / "many" / "%A" / "%a", cluster="supervised")
    jobs = many.map_array(abs, [-1, -2])
    assert [job.result() for job in jobs] == [1, 2]
    base = jobs[0].job_id.rpartition("_")[0]
    assert [job.job_id for job in jobs] == [f"{base}_0", f"{base}_1"]
    assert jobs[1].paths.result_pickle.parent == tmp_path / "many" / base / "1"


# ---- many jobs


def test_arrays_batches_and_what_waits_for_them(executor: submitit.AutoExecutor, capsys: Any) -> None:
    jobs = executor.map_array(pow, [2, 3], [5, 5])
    with executor.batch():
        jobs += [executor.submit(pow, base, 2) for base in (7, 8)]
    assert {job.result() for job in as_completed(jobs, timeout=LIMIT_S, poll_frequency=0.1)} == {32, 243, 49, 64}
    wait("the ends", lambda: all(job.done(force_check=True) and job.state == "COMPLETED" for job in jobs))
    monitor_jobs(jobs, poll_frequency=0.1, test_mode=True)
    assert "All jobs finished, jobs with indices [] failed" in capsys.readouterr().out
    environment = executor.map_array(lambda _: submitit.JobEnvironment().array_task_id, [0, 0])
    assert [job.result() for job in environment] == ["0", "1"]


def test_a_job_is_awaited(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(abs, -3)

    async def gather() -> list[Any]:
        first = await job.awaitable().results(poll_interval=0.1)
        return first + [await one for one in job.task(0).awaitable().results_as_completed(0.1)]

    assert asyncio.run(gather()) == [3, 3, 3]


def test_a_pickled_job_is_read_in_another_process(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    job = executor.submit(abs, -4)
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(job))
    job.result()
    code = "import pickle, sys; job = pickle.load(open(sys.argv[1], 'rb')); print(job.job_id, job.result())"
    argv = [sys.executable, "-c", code, str(tmp_path / "job.pkl")]
    read = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert read.stdout.split() == [job.job_id, "4"]
    again: SupervisedJob[int] = SupervisedJob(folder=job.paths.folder, job_id=job.job_id)
    assert again.result() == 4


def test_a_command_and_a_sequence_are_functions_like_any(executor: submitit.AutoExecutor) -> None:
    sequence = FunctionSequence()
    sequence.add(abs, -1)
    sequence.add(pow, 2, 3)
    functions: list[Callable[[], Any]] = [CommandFunction(["echo", "hello"]), sequence]
    command, numbers = executor.submit_array(functions)
    assert command.result() == "hello"
    assert numbers.result() == [1, 8]


# ---- ends that are no results


def test_an_exception_is_final_after_one_attempt_and_told_as_submitit_tells_it(
    executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    def fail() -> None:
        raise ValueError("no such colour")

    local = submitit.AutoExecutor(folder=tmp_path / "local", cluster="local").submit(fail)
    job = executor.submit(fail)
    with pytest.raises(utils.FailedJobError) as ours:
        job.result()
    with pytest.raises(utils.FailedJobError) as theirs:
        local.result()
    told = "ValueError: no such colour\n----------------------"
    assert told in str(ours.value).replace("\n\n", "\n")
    assert told in str(theirs.value).replace("\n\n", "\n")
    assert isinstance(job.exception(), utils.FailedJobError)
    wait("the state", lambda: job.done(force_check=True) and job.state == "FAILED")
    assert utils.pickle_load(job.paths.result_pickle)[0] == "error"
    wait("the trace in the log", lambda: "ValueError: no such colour" in (job.stderr() or ""))
    assert not (run_dir(job) / "attempts" / "2").exists()
    outcome = parse(Outcome, RunPaths(run_dir(job)).outcome(1).read_bytes())
    assert (outcome.exit_code, outcome.message) == (93, "task 0 raised ValueError: no such colour")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("peer"),
        OSError(116, "Stale file handle"),
        OSError(30, "Read-only file system"),
        RuntimeError("NCCL error in: x.cpp"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4321"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("No CUDA GPUs are available: Found no NVIDIA driver on your system"),
        type("DistBackendError", (RuntimeError,), {})("any words"),
        ExceptionGroup("two", [KeyError("x"), BrokenPipeError()]),
    ],
)
def test_what_a_broken_machine_or_a_lost_peer_looks_like_is_known(error: Exception) -> None:
    assert is_machine_failure(error)
    outer = ValueError("while training")
    outer.__cause__ = error
    assert is_machine_failure(outer)
    outer.__context__, outer.__cause__ = error, None  # which hides the context, as "raise ... from None" does
    assert not is_machine_failure(outer)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such colour"),
        RuntimeError("CUDA error: device-side assert triggered"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"),
        FileNotFoundError(2, "No such file or directory", "timed_out.yaml"),
        KeyError("timeout"),
    ],
)
def test_what_the_function_did_itself_is_not_the_machines(error: Exception) -> None:
    assert not is_machine_failure(error)


def test_an_exception_in_a_circle_of_causes_is_judged() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_machine_failure(first)


@pytest.mark.parametrize(
    ("raised", "retry", "attempts"),
    [(ConnectionResetError("peer"), None, 2), (KeyError("x"), "all", 2), (ConnectionResetError("peer"), "none", 1)],
)
def test_what_may_be_the_machines_fault_is_tried_again(
    executor: submitit.AutoExecutor, raised: Exception, retry: str | None, attempts: int
) -> None:
    def fail() -> None:
        raise RuntimeError("while training") from raised

    executor.update_parameters(supervised_max_without_progress=2, supervised_retry_exceptions=retry)
    job = executor.submit(fail)
    wait("the end", lambda: job.done(force_check=True))
    with pytest.raises(utils.FailedJobError, match="while training"):
        job.result()
    wait("the state", lambda: job.get_info("force")["state"] == "held")
    assert len(list((run_dir(job) / "attempts").iterdir())) == attempts


def test_the_task_that_failed_is_told_by_the_tasks_that_were_ended_with_it(executor: submitit.AutoExecutor) -> None:
    def fail() -> None:
        if submitit.JobEnvironment().global_rank == 1:
            raise ValueError("no such colour")
        os._exit(143)  # as the launcher ends the others

    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(fail)
    with pytest.raises(utils.FailedJobError, match=r"(?s)of task 1, which ended this one.*no such colour"):
        job.results()


def test_logs_of_all_attempts_stand_in_order_in_one_file(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def die_first() -> str:
        print("try", os.environ["SUPERVISOR_ATTEMPT"])
        if not seen.exists():
            seen.touch()
            os.system("echo last words >&2; kill -KILL $PPID")
        return "done"

    job = executor.submit(die_first)
    assert job.result() == "done"
    lines = [line for line in (job.stdout() or "").splitlines() if line.startswith("try")]
    assert lines == ["try 1", "try 2"]
    assert "last words" in (job.stderr() or "")
    assert (run_dir(job) / "attempts/1/0.err").read_text().endswith("last words\n")


def test_a_result_that_can_not_be_pickled_is_told_and_not_lost(executor: submitit.AutoExecutor) -> None:
    import threading

    job = executor.submit(threading.Lock)
    with pytest.raises(utils.FailedJobError, match="cannot pickle"):
        job.result()


def test_a_function_that_exits_leaves_no_result_and_its_last_words_are_told(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(supervised_max_without_progress=1)
    job = executor.submit(sys.exit, "no licence left")
    with pytest.raises(utils.UncompletedJobError, match="no licence left"):
        job.result()


def test_a_cancelled_job_is_done_and_cancelling_twice_does_nothing(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(time.sleep, 600)
    assert not job.done()
    job.cancel()
    job.cancel()
    wait("the state", lambda: job.done(force_check=True))
    assert job.state == "CANCELLED"
    with pytest.raises(utils.UncompletedJobError, match="stopped by a person"):
        job.result()


def test_a_job_is_cancelled_with_its_object_when_asked_for(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(time.sleep, 600).cancel_at_deletion()
    watched: SupervisedJob[None] = SupervisedJob(folder=job.paths.folder, job_id=job.job_id)
    del job
    wait("the state", lambda: watched.done(force_check=True))
    assert watched.state == "CANCELLED"


def test_a_refusal_within_an_array_names_what_was_submitted(
    executor: submitit.AutoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = submitit_plugin._submit

    def refuse_second(job: SupervisedJob[Any], *options: str) -> submitit_plugin.Answer:
        if job.job_id.endswith("_1"):
            return submitit_plugin.Answer(returncode=1, stderr="no more")
        return submit(job, *options)

    monkeypatch.setattr(submitit_plugin, "_submit", refuse_second)
    with pytest.raises(
        utils.FailedSubmissionError, match=r"no more; already submitted: submitit-\w+_0, submitit-\w+_2"
    ):
        executor.map_array(abs, [1, 2, 3])


# ---- the warning


class Counting:
    """Counts until its third attempt; what it has counted is its state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def __call__(self, word: str) -> tuple[str, int]:
        self.count += 1
        (self.folder / f"counted-{self.count}").touch()
        if self.count < 3:
            try:
                time.sleep(600)
            except SystemExit:
                print("unwound")
                raise
        return word, self.count

    def checkpoint(self, word: str) -> DelayedSubmission | None:
        print("checkpoint is called")
        return None if word == "never" else DelayedSubmission(self, f"{word}+")


cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_what_checkpoint_gives_is_what_the_next_attempt_runs(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    executor.update_parameters(tasks_per_node=1, supervised_max_without_progress=1)
    job = executor.submit(Counting(tmp_path), "a")
    for attempt in (1, 2):
        wait(f"attempt {attempt}", (tmp_path / f"counted-{attempt}").exists)
        warn(job, attempt)
    assert job.result() == ("a++", 3)
    assert (job.stdout() or "").count("checkpoint is called\n") == 2
    assert (job.stdout() or "").count("unwound\n") == 2
    assert parse(Outcome, RunPaths(run_dir(job)).outcome(1).read_bytes()).exit_code == 75


def test_each_save_is_a_checkpoint_of_the_run_and_stands_in_for_a_lost_pickle(
    executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    import xxhash

    job = executor.submit(Counting(tmp_path), "a")
    for attempt in (1, 2):
        wait(f"attempt {attempt}", (tmp_path / f"counted-{attempt}").exists)
        if attempt == 2:
            job.paths.submitted_pickle.unlink()
        warn(job, attempt)
    assert job.result() == ("a++", 3)
    paths = RunPaths(run_dir(job))
    manifest = parse(Manifest, (paths.checkpoint(2, 2) / "MANIFEST.json").read_bytes())
    assert (manifest.run, manifest.step, manifest.attempt, manifest.world_size) == (job.job_id, 2, 2, 1)
    data = (paths.checkpoint(2, 2) / manifest.files[0].path).read_bytes()
    assert manifest.files[0].xxh3_128 == xxhash.xxh3_128_hexdigest(data)
    assert pickle.loads(data).args == ("a++",)
    assert paths.checkpoint(1, 1).is_dir()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Counting, "checkpoint function returned None"),
        (None, "timed-out and not checkpointable"),
    ],
)
def test_what_can_not_go_on_ends_for_good_at_the_warning(
    executor: submitit.AutoExecutor, tmp_path: Path, function: type[Counting] | None, why: str
) -> None:
    def count(_: str) -> None:
        (tmp_path / "counted-1").touch()
        time.sleep(600)

    job = executor.submit(function(tmp_path) if function else count, "never")
    wait("the function", (tmp_path / "counted-1").exists)
    warn(job)
    with pytest.raises(utils.FailedJobError, match=why):
        job.result()
    wait("the state", lambda: job.done(force_check=True) and job.state == "FAILED")


def test_the_time_limit_is_met_as_often_as_submitit_allows(tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="supervised", slurm_max_num_timeout=1)
    job = executor.submit(Counting(tmp_path), "a")
    for attempt in (1, 2):
        wait(f"attempt {attempt}", (tmp_path / f"counted-{attempt}").exists)
        warn(job, attempt)
    with pytest.raises(utils.FailedJobError, match="timed-out too many times"):
        job.result()


def test_before_its_time_a_warning_is_a_preemption_and_every_function_is_started_again(
    executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    executor.update_parameters(timeout_min=600)

    def count() -> str:
        if os.environ["SUPERVISOR_ATTEMPT"] == "1":
            (tmp_path / "started").touch()
            time.sleep(600)
        return os.environ["SUPERVISOR_ATTEMPT"]

    job = executor.submit(count)
    wait("the function", (tmp_path / "started").exists)
    warn(job)
    assert job.result() == "2"


def test_only_the_first_task_saves_and_the_others_go_on_until_they_are_ended(
    executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    executor.update_parameters(tasks_per_node=2)

    class Pair:
        def __call__(self, attempt: int) -> int:
            rank = submitit.JobEnvironment().global_rank
            (tmp_path / f"{attempt}-{rank}").touch()
            until = time.monotonic() + LIMIT_S
            while attempt == 1 and time.monotonic() < until and not (rank == 1 and (tmp_path / "saved-0").exists()):
                time.sleep(0.05)
            return rank

        def checkpoint(self, attempt: int) -> DelayedSubmission:
            (tmp_path / f"saved-{submitit.JobEnvironment().global_rank}").touch()
            return DelayedSubmission(self, attempt + 1)

    job = executor.submit(Pair(), 1)
    wait("both", lambda: (tmp_path / "1-0").exists() and (tmp_path / "1-1").exists())
    warn(job)
    wait("both again", lambda: (tmp_path / "2-0").exists() and (tmp_path / "2-1").exists())
    assert job.results() == [0, 1]
    assert not (tmp_path / "saved-1").exists()


class SignalsWhenStored:
    """A result during whose storing the warning comes."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGUSR2)
        return str, ("stored",)


class Quick:
    def __call__(self) -> SignalsWhenStored:
        return SignalsWhenStored()

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(self)


def test_a_warning_when_the_function_is_over_does_not_start_it_again(executor: submitit.AutoExecutor) -> None:
    job: submitit.Job[Any] = executor.submit(Quick())
    assert job.result() == "stored"
    assert not (run_dir(job) / "attempts" / "2").exists()


def test_a_function_that_closes_its_output_has_a_result(executor: submitit.AutoExecutor) -> None:
    def close() -> int:
        sys.stdout.close()
        sys.stderr = None
        return 3

    assert executor.submit(close).result() == 3


def test_a_half_written_save_of_an_attempt_that_was_killed_is_not_in_the_way(
    executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    job = executor.submit(Counting(tmp_path), "a")
    job.paths.submitted_pickle.with_suffix(".pkl.save_tmp").write_bytes(b"half")
    job.paths.result_pickle.with_suffix(".pkl.save_tmp").write_bytes(b"half")
    for attempt in (1, 2):
        wait(f"attempt {attempt}", (tmp_path / f"counted-{attempt}").exists)
        warn(job, attempt)
    assert job.result() == ("a++", 3)
