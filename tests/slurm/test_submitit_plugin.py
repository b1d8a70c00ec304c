"""What submitit's words become in a run file, and what becomes of a function's outcome. No Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import utils

from slurm.submitit_plugin import SupervisedExecutor, SupervisedJob, render_run_file, run_name
from supervisor.config import parse_run_file


def executor(folder: Path) -> submitit.AutoExecutor:
    return submitit.AutoExecutor(folder=folder, cluster="supervised")


def run_file(parameters: dict[str, Any]) -> dict[str, Any]:
    text = render_run_file(parameters, name="r", command=["x"], root=Path("/s"), workdir=Path("/w"))
    parse_run_file(text, path=Path("/w/run.toml"))  # the service takes it
    return tomllib.loads(text)


# ---- parameters


def test_submitit_knows_the_cluster_by_name_and_never_chooses_it_itself(tmp_path: Path) -> None:
    assert isinstance(executor(tmp_path)._executor, SupervisedExecutor)
    assert SupervisedExecutor.affinity() == 0


def test_common_and_slurm_words_reach_the_run_file(tmp_path: Path) -> None:
    auto = executor(tmp_path)
    auto.update_parameters(
        name="train it",
        nodes=2,
        tasks_per_node=4,
        cpus_per_task=8,
        gpus_per_node=4,
        mem_gb=1.5,
        timeout_min=90,
        slurm_partition="gpu",
        slurm_account="team",
        slurm_qos="high",
        slurm_constraint="h100",
        slurm_exclusive=True,
        slurm_signal_delay_s=30,
        slurm_additional_parameters={"reservation": "week", "licenses": "a:1"},
    )
    made = run_file(auto._executor.parameters)
    assert made["nodes"] == {"min": 2, "max": 2, "procs_per_node": 4}
    options = made["slurm"].pop("options")
    assert made["slurm"] == {
        "partition": "gpu",
        "account": "team",
        "qos": "high",
        "time_limit": "90",
        "gpus_per_node": 4,
    }
    assert set(options) == {
        "--constraint=h100",
        "--cpus-per-task=32",
        "--mem=1536M",
        "--exclusive",
        "--signal=B:USR2@30",
        "--reservation=week",
        "--licenses=a:1",
    }


def test_supervised_words_win_over_slurm_words_and_those_over_common_ones(tmp_path: Path) -> None:
    auto = executor(tmp_path)
    auto.update_parameters(timeout_min=1, slurm_time=2, slurm_qos="low", supervised_qos="high", supervised_nodes=3)
    assert auto._executor.parameters == {"time": 2, "qos": "high", "nodes": 3}


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [
        ("slurm_setup", ["module load x"], "no shell runs before it"),
        ("slurm_nodelist", "n1", "can't leave it when it breaks"),
        ("slurm_dependency", "afterok:1", "one live job per run"),
        ("slurm_array_parallelism", 3, "a run of its own"),
        ("stderr_to_stdout", True, "evidence"),
        ("supervised_colour", "red", "unknown parameter"),
    ],
)
def test_what_a_run_can_not_have_is_refused_with_the_reason(tmp_path: Path, word: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        executor(tmp_path).update_parameters(**{word: value})


def test_words_of_other_clusters_are_left_to_them(tmp_path: Path) -> None:
    auto = executor(tmp_path)
    auto.update_parameters(local_setup=["x"], nodes=1)
    assert auto._executor.parameters == {"nodes": 1}
    local = submitit.AutoExecutor(folder=tmp_path, cluster="local")
    local.update_parameters(slurm_partition="gpu", supervised_root="/s", timeout_min=1)
    assert local._executor.parameters == {"timeout_min": 1}


def test_a_run_name_is_one_that_both_sides_take() -> None:
    assert run_name({"job_name": "a_b c/ü"}, "1") == "a-b-c-1"
    assert run_name({"job_name": "__"}, "1") == "submitit-1"
    assert run_name({}, "1") == "submitit-1"


def test_strings_with_quotes_backslashes_and_other_alphabets_come_through(tmp_path: Path) -> None:
    root = Path('/s/with "quotes" \\ and ü')
    text = render_run_file({}, name="r", command=["x", "\x7f\t"], root=root, workdir=tmp_path)
    assert tomllib.loads(text)["root"] == str(root)
    assert tomllib.loads(text)["command"] == ["x", "\x7f\t"]


# ---- without a service


def test_a_refused_submission_is_told_in_the_services_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISOR_SOCKET", str(tmp_path / "nobody.sock"))
    with pytest.raises(utils.FailedSubmissionError, match=r"nobody\.sock"):
        executor(tmp_path / "jobs").submit(print)


def test_a_service_that_does_not_answer_leaves_the_state_unknown_and_the_job_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERVISOR_LEDGER", str(tmp_path / "none.db"))
    job: SupervisedJob[Any] = SupervisedJob(tmp_path, "never-heard-of")
    assert job.state == "UNKNOWN"
    assert not job.done(force_check=True)


# ---- the step


class Step:
    """One process of a job, as torchrun starts it."""

    def __init__(self, folder: Path, function: Any, *arguments: Any) -> None:
        self.job: SupervisedJob[Any] = SupervisedJob(folder, "r-1")
        utils.DelayedSubmission(function, *arguments).dump(self.job.paths.submitted_pickle)

    def start(self, cwd: Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", "slurm.submitit_step", str(self.job.paths.folder), "r-1", ""],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "RANK": "0", "WORLD_SIZE": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, cwd: Path) -> int:
        with self.start(cwd) as process:
            process.communicate(timeout=60)
        return process.returncode


def test_an_earlier_attempts_error_and_half_written_file_are_not_in_the_way(tmp_path: Path) -> None:
    step = Step(tmp_path, lambda: 42)
    step.job.paths.error_pickle.write_bytes(b"old")
    (tmp_path / "r-1_0_outcome.pkl.save_tmp").write_bytes(b"half")
    assert step.run(tmp_path) == 0
    assert step.job.result() == 42
    assert not step.job.paths.error_pickle.exists()


def test_an_exception_is_no_result_as_long_as_another_attempt_may_follow(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no such colour")

    step = Step(tmp_path, fail)
    assert step.run(tmp_path) == 1
    assert not step.job.paths.result_pickle.exists()
    assert "no such colour" in utils.pickle_load(step.job.paths.error_pickle)[1]


def test_modules_of_the_working_directory_are_found_and_a_folder_slurm_there_is_not_taken_for_ours(
    tmp_path: Path,
) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "__init__.py").write_text("raise RuntimeError('the wrong slurm')")
    (tmp_path / "mine.py").write_text("VALUE = 5")

    def read() -> int:
        import mine  # type: ignore[import-not-found]

        return int(mine.VALUE)

    step = Step(tmp_path, read)
    assert step.run(tmp_path) == 0
    assert step.job.result() == 5


def test_before_the_time_limit_what_checkpoint_gives_is_stored_and_the_next_attempt_asked_for(tmp_path: Path) -> None:
    class Counting:
        def __call__(self, first: int) -> int:
            import time

            if first == 0:
                print("counting", flush=True)
                time.sleep(60)
            return first

        def checkpoint(self, first: int) -> utils.DelayedSubmission:
            return utils.DelayedSubmission(self, first + 10)

    step = Step(tmp_path, Counting(), 0)
    with step.start(tmp_path) as process:
        assert process.stdout is not None
        assert any(line == "counting\n" for line in process.stdout)
        process.send_signal(signal.SIGUSR2)
        process.communicate(timeout=60)
    assert process.returncode == 75
    assert step.run(tmp_path) == 0
    assert step.job.result() == 10


def test_before_the_time_limit_a_function_without_checkpoint_ends_for_good(tmp_path: Path) -> None:
    def count() -> None:
        import time

        print("counting", flush=True)
        time.sleep(60)

    step = Step(tmp_path, count)
    with step.start(tmp_path) as process:
        assert process.stdout is not None
        assert any(line == "counting\n" for line in process.stdout)
        process.send_signal(signal.SIGUSR2)
        process.communicate(timeout=60)
    assert process.returncode == 93
    assert "no checkpoint()" in utils.pickle_load(step.job.paths.error_pickle)[1]
