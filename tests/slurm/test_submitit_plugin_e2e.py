"""Functions submitted through submitit, on a real Slurm with a real daemon."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit

from slurm.sandbox import Sandbox
from supervisor.model import AttemptEnd
from tests.e2e.stage import Stage

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("submitit")
    with Sandbox.start(nodes=3, directory=directory / "sandbox") as sandbox:
        stage = Stage(directory / "stage", sandbox, has_torch=True)
        stage.start_daemon()
        yield stage
        stage.close()


@pytest.fixture
def executor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> submitit.AutoExecutor:
    for name, value in stage.env.items():
        monkeypatch.setenv(name, value)
    return submitit.AutoExecutor(folder=stage.directory / "jobs", cluster="supervised")


def await_result(stage: Stage, job: submitit.Job[Any], limit_s: float = 60) -> Any:
    stage.wait(f"the end of {job.job_id}", job.done, limit_s)
    return job.result()


def test_a_function_on_two_nodes_returns_the_result_of_each_process_and_its_log(
    stage: Stage, executor: submitit.AutoExecutor
) -> None:
    executor.update_parameters(name="ranks", nodes=2, timeout_min=5)

    def tell_rank(x: int) -> tuple[int, int, int, int]:
        environment = submitit.JobEnvironment()
        print("rank", environment.global_rank)
        return environment.global_rank, environment.num_tasks, environment.num_nodes, x + 1

    job = executor.submit(tell_rank, 41)
    stage.wait("both results", job.done, 60)
    assert job.results() == [(0, 2, 2, 42), (1, 2, 2, 42)]
    assert [line for line in (job.stdout() or "").splitlines() if line.startswith("rank")] == ["rank 0", "rank 1"]
    stage.await_state("finished", job.job_id)
    assert stage.run(job.job_id).spec.slurm.time_limit == "5"


def test_a_function_survives_the_power_cut_of_its_node(
    stage: Stage, executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    executor.update_parameters(name="cut", nodes=1)
    started = tmp_path / "started"

    def wait_on_first_try() -> str:
        import time

        node = os.environ["SLURMD_NODENAME"]
        if not started.exists():
            started.write_text(node)
            time.sleep(600)
        return node

    job = executor.submit(wait_on_first_try)
    stage.wait("the first try", lambda: started.exists() and started.read_text(), 60)
    first = started.read_text()
    stage.sandbox.power_cut(first)
    assert await_result(stage, job) not in {"", first}
    assert len(stage.attempts(job.job_id)) == 2


def test_the_exception_of_a_function_is_told_once_the_supervisor_gives_up(
    stage: Stage, executor: submitit.AutoExecutor
) -> None:
    executor.update_parameters(name="raises", nodes=1, supervised_max_without_progress=1)

    def fail() -> None:
        raise ValueError("no such colour")

    job = executor.submit(fail)
    stage.wait("the end", lambda: job.done(force_check=True), 60)
    assert job.state == "FAILED"
    with pytest.raises(submitit.core.utils.FailedJobError, match="no such colour"):
        job.result()


def test_an_array_is_a_run_for_each_function_and_each_can_be_cancelled(
    stage: Stage, executor: submitit.AutoExecutor
) -> None:
    executor.update_parameters(name="array", nodes=1)

    def sleep(seconds: float) -> float:
        import time

        time.sleep(seconds)
        return seconds

    quick, slow = executor.map_array(sleep, [0.5, 600])
    slow.cancel()
    assert await_result(stage, quick) == 0.5
    stage.wait("the end of the cancelled one", lambda: slow.done(force_check=True), 30)
    assert slow.state == "CANCELLED"
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="stopped"):
        slow.result()


def test_slurms_signal_before_the_time_limit_leads_to_checkpoint_and_to_the_next_attempt(
    stage: Stage, executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    executor.update_parameters(name="saves", nodes=1)

    class Counting:
        def __init__(self, started: Path) -> None:
            self.started = started

        def __call__(self, first: int) -> int:
            import time

            if first == 0:
                self.started.touch()
                time.sleep(600)
            return first

        def checkpoint(self, first: int) -> submitit.helpers.DelayedSubmission:
            return submitit.helpers.DelayedSubmission(self, first + 10)

    started = tmp_path / "started"
    job = executor.submit(Counting(started), 0)
    stage.wait("the function", started.exists, 60)
    job_id = stage.attempt(1, job.job_id).job_id
    subprocess.run(["scancel", "--batch", "--signal=USR2", str(job_id)], env=stage.env, check=True, timeout=20)
    assert await_result(stage, job) == 10
    assert stage.attempt(1, job.job_id).end is AttemptEnd.SAVED
