"""What submitit's words become: in the run file, in the submission script, or a refusal. No Slurm."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import utils

from slurm.submitit_parameters import render_run_file, run_name, time_limit_min
from slurm.submitit_plugin import SupervisedExecutor, SupervisedJob
from slurm.submitit_script import choose_environment, render_script
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
    assert run_file({})["slurm"]["time_limit"] == "5"  # as submitit


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [
        ("slurm_teardown", ["rm -r x"], "under finally"),
        ("slurm_nodelist", "n1", "can't leave it when it breaks"),
        ("slurm_exclude", "n1", "drain a node"),
        ("slurm_dependency", "afterok:1", "one live job"),
        ("slurm_comment", "mine", "submission answer was lost"),
        ("slurm_srun_args", ["-vv"], "makes the steps"),
        ("slurm_use_srun", False, "torchrun starts the function"),
        ("slurm_setup", "module load x", "list of shell lines"),
        ("slurm_additional_parameters", {"exclude": "n1"}, "drain a node"),
        ("slurm_additional_parameters", {"signal": "USR1@10"}, "slurm_signal_delay_s"),
        ("supervised_retry_exceptions", "often", "one of machine, all, none"),
        ("supervised_colour", "red", "unknown parameter"),
    ],
)
def test_what_a_run_can_not_have_is_refused_with_the_reason(tmp_path: Path, word: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        executor(tmp_path).update_parameters(**{word: value})


def test_every_word_of_submitits_slurm_executor_has_an_effect_or_a_refusal(tmp_path: Path) -> None:
    from submitit.slurm.slurm import _get_default_parameters

    values = {"additional_parameters": {"licenses": "a"}, "setup": ["true"], "teardown": ["true"], "srun_args": ["-v"]}
    flags = {"exclusive": True, "stderr_to_stdout": True, "use_srun": True}
    for word in _get_default_parameters():
        auto = executor(tmp_path)
        value = values.get(word, flags.get(word, 4))
        try:
            with pytest.warns() if word == "num_gpus" else contextlib.nullcontext():
                auto.update_parameters(**{f"slurm_{word}": value})
        except ValueError as refusal:
            assert "can't be used with" in str(refusal)  # noqa: PT017
            continue
        if word == "use_srun":  # as it is anyway
            continue
        run_file(auto._executor.parameters)
        assert auto._executor.parameters, word


def test_words_at_the_executors_making_reach_it_under_slurms_name(tmp_path: Path) -> None:
    made = submitit.AutoExecutor(
        folder=tmp_path, cluster="supervised", slurm_max_num_timeout=7, slurm_python="singularity exec x python"
    )._executor
    assert isinstance(made, SupervisedExecutor)
    assert (made.max_num_timeout, made.python) == (7, "singularity exec x python")
    ours = submitit.AutoExecutor(
        folder=tmp_path, cluster="supervised", slurm_max_num_timeout=7, supervised_max_num_timeout=8
    )._executor
    assert isinstance(ours, SupervisedExecutor)
    assert ours.max_num_timeout == 8


def test_additional_parameters_win_over_words_and_what_the_supervisor_does_itself_is_taken(tmp_path: Path) -> None:
    auto = executor(tmp_path)
    extra = {"partition": "long", "requeue": True, "ntasks-per-node": 2, "hint": "nomultithread"}
    auto.update_parameters(slurm_partition="short", cpus_per_task=3, slurm_additional_parameters=extra)
    made = run_file(auto._executor.parameters)
    assert (made["slurm"]["partition"], made["nodes"]["procs_per_node"]) == ("long", 2)
    assert {"--hint=nomultithread", "--cpus-per-task=6"} < set(made["slurm"]["options"])
    assert not any("requeue" in option for option in made["slurm"]["options"])
    auto.update_parameters(slurm_additional_parameters={})
    assert "--hint=nomultithread" not in run_file(auto._executor.parameters)["slurm"]["options"]


def test_gpus_of_each_task_are_asked_for_by_the_node(tmp_path: Path) -> None:
    auto = executor(tmp_path)
    auto.update_parameters(tasks_per_node=4, slurm_gpus_per_task=2)
    assert run_file(auto._executor.parameters)["slurm"]["gpus_per_node"] == 8
    auto.update_parameters(slurm_gpus_per_node="h100:4")
    made = run_file(auto._executor.parameters)["slurm"]
    assert "--gres=gpu:h100:4" in made["options"]
    assert "gpus_per_node" not in made
    with pytest.warns(UserWarning, match="gpus_per_node"):
        auto.update_parameters(slurm_num_gpus=3)
    assert run_file(auto._executor.parameters)["slurm"]["gpus_per_node"] == 3


def test_an_array_that_must_not_run_all_at_once_is_refused_and_one_that_may_is_not(tmp_path: Path) -> None:
    auto = executor(tmp_path)
    auto.update_parameters(slurm_array_parallelism=2)
    with pytest.raises(ValueError, match="each of the 3 functions is a run of its own"):
        auto.map_array(abs, [1, 2, 3])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "minutes"),
    [
        (90, 90),
        ("90", 90),
        ("1:30", 1),
        ("2:30:00", 150),
        ("1-12", 2160),
        ("1-0:30", 1470),
        ("1-0:0:30", 1440),
        ("x", 5),
    ],
)
def test_a_time_limit_in_any_spelling_of_slurm_is_one_of_minutes(given: Any, minutes: int) -> None:
    assert time_limit_min({"time": given}) == minutes
    assert time_limit_min({}) == 5


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
    assert run_name({"job_name": "v1..v2"}, "1") == "v1-v2-1"


def test_strings_with_quotes_backslashes_and_other_alphabets_come_through(tmp_path: Path) -> None:
    root = Path('/s/with "quotes" \\ and ü')
    text = render_run_file({}, name="r", command=["x", "\x7f\t"], root=root, workdir=tmp_path)
    assert tomllib.loads(text)["root"] == str(root)
    assert tomllib.loads(text)["command"] == ["x", "\x7f\t"]


# ---- the submission script


def run_script(tmp_path: Path, *, environment: dict[str, str], setup: list[str], export: str = "ALL") -> dict[str, str]:
    """What the command of a script sees, given this environment of a submitter."""
    script = tmp_path / "s.sh"
    text = render_script(
        environment=choose_environment(environment, export),
        settings={},
        setup=setup,
        python="env -0; true",
        folder="x",
        signal_name="USR2",
    )
    script.write_bytes(text.encode(errors="surrogateescape"))
    job = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "RANK": "3", "CUDA_VISIBLE_DEVICES": "1"}
    done = subprocess.run(
        ["/bin/bash", str(script), "r-1", str(tmp_path / "r-1")], env=job, capture_output=True, timeout=30, check=True
    )
    pairs = [line.decode(errors="surrogateescape").partition("=") for line in done.stdout.split(b"\0") if line]
    return {name: value for name, _, value in pairs}


def test_the_submitters_environment_is_the_functions_but_not_what_belongs_to_another_job(tmp_path: Path) -> None:
    """SB-08."""
    odd = 'it\'s "quoted"\n$HOME `x` ü \udcff'
    seen = run_script(
        tmp_path,
        environment={
            "TOKEN": odd,
            "LD_LIBRARY_PATH": "/opt/lib",
            "OMP_NUM_THREADS": "3",
            "PATH": os.environ["PATH"],
            "SLURM_JOB_ID": "1",
            "SLURM_CPU_BIND": "quiet",
            "SBATCH_PARTITION": "x",
            "PMIX_RANK": "0",
            "RANK": "0",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "SUPERVISOR_CONFIG": "x",
            "SUBMITIT_EXECUTOR": "slurm",
            "not a name": "x",
            "GROUP_NAME": "mine",
        },
        setup=[],
    )
    assert (seen["TOKEN"], seen["LD_LIBRARY_PATH"], seen["OMP_NUM_THREADS"]) == (odd, "/opt/lib", "3")
    assert seen["GROUP_NAME"] == "mine"
    assert (seen["SLURM_JOB_ID"], seen["RANK"], seen["CUDA_VISIBLE_DEVICES"]) == ("7", "3", "1")
    assert not {"SLURM_CPU_BIND", "SBATCH_PARTITION", "PMIX_RANK", "SUPERVISOR_CONFIG", "SUBMITIT_EXECUTOR"} & set(seen)


def test_setup_lines_run_before_the_function_with_the_functions_that_the_submitters_shell_exported(
    tmp_path: Path,
) -> None:
    environment = {
        "BASH_FUNC_module%%": "() {  export LOADED=$1\n}",
        "BASH_FUNC_broken%%": "() {  if; }",
        "PATH": os.environ["PATH"],
    }
    seen = run_script(
        tmp_path, environment=environment, setup=["export MORE='a b'", "module cuda", "nonesuch", "false"]
    )
    assert (seen["MORE"], seen["LOADED"]) == ("a b", "cuda")


@pytest.mark.parametrize(
    ("export", "expected"),
    [
        ("ALL", {"A": "1", "B": "2"}),
        ("NONE", {}),
        ("A", {"A": "1"}),
        ("ALL,B=3", {"A": "1", "B": "3"}),
        ("B=3,C=4,MISSING", {"B": "3", "C": "4"}),
    ],
)
def test_sbatchs_export_chooses_the_variables(export: str, expected: dict[str, str]) -> None:
    assert choose_environment({"A": "1", "B": "2"}, export) == expected


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


def test_the_environment_lies_in_a_file_for_its_owner_only_and_the_service_is_given_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("SUPERVISOR_SOCKET", str(tmp_path / "nobody.sock"))
    with pytest.raises(utils.FailedSubmissionError):
        executor(tmp_path / "jobs").submit(print)
    (script,) = (tmp_path / "jobs").glob("*_submission.sh")
    (run,) = (tmp_path / "jobs").glob("*_submission.toml")
    assert "hunter2" in script.read_text()
    assert stat.S_IMODE(script.stat().st_mode) == 0o600
    assert "hunter2" not in run.read_text()
    assert str(script) in run.read_text()
