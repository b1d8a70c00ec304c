"""Functions submitted through submitit, on a real Slurm with a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit

from slurm.sandbox import Sandbox
from supervisor.model import AttemptEnd
from tests.e2e.stage import Stage

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# Somebody's script; nothing in it knows of supervision. The word after cluster= is its argument.
SCRIPT = """
import json, os, sys
import submitit


def add(a, b):
    print("adding", a, "and", b, flush=True)
    print("a word of warning", file=sys.stderr, flush=True)
    return a + b


def place(_):
    environment = submitit.JobEnvironment()
    print("I am task", environment.global_rank, "of", environment.num_tasks, flush=True)
    return environment.global_rank, environment.num_tasks, environment.num_nodes, os.environ["TOKEN"]


def fail(colour):
    raise ValueError(f"no such colour: {colour}")


def lines(text):
    return [line for line in (text or "").splitlines() if line.startswith(("adding", "I am", "a word"))]


def main(cluster, folder):
    executor = submitit.AutoExecutor(folder=os.path.join(folder, "%j"), cluster=cluster)
    executor.update_parameters(
        name="my job", timeout_min=4, nodes=1, cpus_per_task=1, slurm_partition="main", slurm_signal_delay_s=60
    )
    one = executor.submit(add, 5, 7)
    wrong = executor.submit(fail, "octarine")
    many = executor.map_array(add, [1, 2, 3], [10, 20, 30])
    command = executor.submit(submitit.helpers.CommandFunction(["echo", "hello"]))
    executor.update_parameters(tasks_per_node=2)
    pair = executor.submit(place, 0)
    told = {
        "one": [one.result(), lines(one.stdout()), lines(one.stderr())],
        "many": [job.result() for job in many],
        "many_out": [lines(job.paths.stdout.read_text()) for job in many],
        "command": command.result(),
        "pair": pair.results(),
        "pair_out": [lines(pair.task(i).stdout()) for i in range(2)],
        "done": [job.done() for job in [one, *many, command, pair]],
    }
    try:
        wrong.result()
    except Exception as error:
        told["wrong"] = [type(error).__name__, [line for line in str(error).splitlines() if "octarine" in line]]
    told["files"] = sorted(path.name.replace(one.job_id, "ID") for path in one.paths.folder.iterdir()
                           if not path.name.startswith(f"{one.job_id}_submission"))
    print(json.dumps(told))


main(*sys.argv[1:])
"""


PREEMPTION = """\
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SlurmctldParameters=preempt_send_user_signal
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=20 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("submitit")
    # two nodes are cut here, and stay drained
    with Sandbox.start(nodes=4, directory=directory / "sandbox", extra_conf=PREEMPTION) as sandbox:
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


def test_a_script_of_a_submitit_user_does_the_same_with_one_word_changed(stage: Stage, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    told = {}
    running = {
        cluster: subprocess.Popen(
            [sys.executable, str(script), cluster, str(stage.directory / cluster)],
            env={**stage.env, "TOKEN": "it's mine"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cluster in ("local", "supervised")
    }
    for cluster, process in running.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err + stage.log_tail()
        told[cluster] = json.loads(out.splitlines()[-1])
    assert told["supervised"] == told["local"]
    assert told["supervised"]["pair"] == [[0, 2, 1, "it's mine"], [1, 2, 1, "it's mine"]]
    assert told["supervised"]["wrong"][0] == "FailedJobError"


def test_a_function_survives_the_power_cut_of_its_node_and_its_log_tells_of_both_attempts(
    stage: Stage, executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    executor.update_parameters(name="cut", nodes=1)
    started = tmp_path / "started"

    def wait_on_first_try() -> str:
        import time

        node = os.environ["SLURMD_NODENAME"]
        print("on", node, flush=True)
        if not started.exists():
            started.write_text(node)
            time.sleep(600)
        return node

    job = executor.submit(wait_on_first_try)
    stage.wait("the first try", lambda: started.exists() and started.read_text(), 60)
    first = started.read_text()
    stage.wait("its log", lambda: f"on {first}" in (job.stdout() or ""))
    stage.sandbox.power_cut(first)
    second = await_result(stage, job)
    assert second not in {"", first}
    assert [line for line in (job.stdout() or "").splitlines() if line.startswith("on ")] == [
        f"on {first}",
        f"on {second}",
    ]
    assert len(stage.attempts(job.job_id)) == 2


def test_an_exception_ends_the_run_after_one_attempt_and_is_its_reason(
    stage: Stage, executor: submitit.AutoExecutor
) -> None:
    executor.update_parameters(name="raises", nodes=1)

    def fail() -> None:
        raise ValueError("no such colour")

    job = executor.submit(fail)
    stage.wait("the state", lambda: job.done(force_check=True) and job.state == "FAILED", 60)
    with pytest.raises(submitit.core.utils.FailedJobError, match="no such colour"):
        job.result()
    assert len(stage.attempts(job.job_id)) == 1
    assert "task 0 raised ValueError: no such colour" in stage.run(job.job_id).reason
    assert not set(stage.attempt(1, job.job_id).nodes) & stage.drained().keys()  # no node is blamed


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


class Counting:
    """Counts; what it has counted is its state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def __call__(self, until: int) -> list[int]:
        import time

        self.count += 1
        print("counted", self.count, flush=True)
        (self.folder / f"counted-{self.count}").touch()
        if self.count < until:
            time.sleep(600)
        return [self.count, until]

    def checkpoint(self, until: int) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self, until)


def test_the_warning_and_a_preemption_lead_to_checkpoint_and_its_state_goes_on_beyond_the_budget(
    stage: Stage, executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    executor.update_parameters(name="saves", timeout_min=600, slurm_partition="low", supervised_max_without_progress=1)
    job = executor.submit(Counting(tmp_path), 3)
    stage.wait("the first count", (tmp_path / "counted-1").exists, 60)
    stage.wait("Slurm's word", lambda: stage.attempt(1, job.job_id).nodes)
    job._interrupt()  # type: ignore[attr-defined]
    stage.wait("the second count", (tmp_path / "counted-2").exists, 60)
    node = stage.wait("Slurm's word", lambda: stage.attempt(2, job.job_id).nodes)[0]
    stronger = ["sbatch", "--partition=high", "--exclusive", f"--nodelist={node}", "--output=/dev/null", "--wrap=true"]
    subprocess.run(stronger, env=stage.env, check=True, timeout=20)
    assert await_result(stage, job) == [3, 3]
    assert [stage.attempt(n, job.job_id).end for n in (1, 2)] == [AttemptEnd.SAVED, AttemptEnd.SAVED]
    assert [c.step for c in stage.checkpoints(job.job_id) if c.verified_at is not None] == [1, 2]
    assert [line for line in (job.stdout() or "").splitlines() if line.startswith("counted")] == [
        f"counted {n}" for n in (1, 2, 3)
    ]


def test_peers_of_a_node_that_is_cut_raise_and_the_next_attempt_trains_on_the_others(
    stage: Stage, executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    executor.update_parameters(name="peers", nodes=2, timeout_min=10)

    def train() -> tuple[int, int, float]:
        import time

        import torch
        import torch.distributed as dist

        place = submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        (tmp_path / f"{os.environ['SUPERVISOR_ATTEMPT']}-{place.rank}").write_text(os.environ["SLURMD_NODENAME"])
        while os.environ["SUPERVISOR_ATTEMPT"] == "1":
            dist.all_reduce(torch.ones(1))
            time.sleep(0.05)
        return place.rank, place.world_size, float(total)

    job = executor.submit(train)
    stage.wait("both", lambda: (tmp_path / "1-0").exists() and (tmp_path / "1-1").exists(), 60)
    cut = (tmp_path / "1-1").read_text()
    stage.sandbox.power_cut(cut)
    stage.wait("both results", job.done, 60)
    assert job.results() == [(0, 2, 2.0), (1, 2, 2.0)]
    assert cut not in {(tmp_path / f"2-{rank}").read_text() for rank in (0, 1)}
