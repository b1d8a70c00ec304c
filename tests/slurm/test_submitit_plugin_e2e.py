"""Functions submitted through submitit, on a real Slurm with a real daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit

from slurm.sandbox import Sandbox
from tests.e2e.stage import Stage

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("submitit")
    with Sandbox.start(nodes=2, directory=directory / "sandbox") as sandbox:
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


def test_a_function_of_two_processes_returns_the_result_of_each(stage: Stage, executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(name="add_one", nodes=1, tasks_per_node=2, timeout_min=5)

    def rank_and_sum(x: int) -> tuple[int, int, int]:
        environment = submitit.JobEnvironment()
        return environment.global_rank, environment.num_tasks, x + 1

    job = executor.submit(rank_and_sum, 41)
    stage.wait("both results", job.done, 60)
    assert job.results() == [(0, 2, 42), (1, 2, 42)]
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
