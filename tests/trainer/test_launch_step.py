"""What Slurm says of nodes and tasks, and how the step is asked for."""

from __future__ import annotations

import pytest

from trainer.step import (
    expand_nodelist,
    find_blamed_node,
    find_refusal,
    is_left_alone,
    parse_node_addr,
    parse_srun_line,
    srun_command,
    step_environment,
)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n1,login", ("n1", "login")),
        ("n[1-3,07],login", ("n1", "n2", "n3", "n07", "login")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("r[1-2]c[1-2]", ("r1c1", "r1c2", "r2c1", "r2c2")),
        ("gpu-a[1]-ib", ("gpu-a1-ib",)),
    ],
)
def test_a_node_list_is_read_without_scontrol(text: str, nodes: tuple[str, ...]) -> None:
    assert expand_nodelist(text) == nodes


def test_the_address_is_read_from_one_line_of_scontrol() -> None:
    line = "NodeName=n2 Arch=x86_64 CoresPerSocket=1 NodeAddr=10.77.0.2 NodeHostName=n2 Version=22.05.8"
    assert parse_node_addr(line) == "10.77.0.2"
    assert parse_node_addr("") == ""


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("srun: error: n2: task 1: Killed", [("n2", 137)]),
        ("srun: error: n[1-2]: tasks 0-1: Exited with exit code 76", [("n1", 76), ("n2", 76)]),
        ("srun: error: n1: tasks 0,2: Segmentation fault (core dumped)", [("n1", 139)]),
        ("srun: error: n3: task 2: Out Of Memory", [("n3", 137)]),
        ("srun: error: Unable to create step for job 3: Invalid node name specified", []),
        ("[rank0]: srun: error: n2: task 1: Killed", []),
        ("", []),
    ],
)
def test_ends_of_agents_are_read_from_sruns_error_lines(line: str, ends: list[tuple[str, int]]) -> None:
    assert [(end.node, end.exit_code) for end in parse_srun_line(line)] == ends


def test_the_line_in_which_srun_refuses_an_option_is_found() -> None:
    refusal = "srun: unrecognized option '--container-image=x.sqsh'"
    assert find_refusal(["srun: error: something else", refusal]) == refusal
    assert not find_refusal(["srun: error: Unable to create step for job 3: Invalid node name specified"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("JobId=7 JobState=RUNNING Reason=None PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=None", True),
        ("JobId=7 JobState=RUNNING Reason=None PreemptTime=2026-01-01T00:01:00", False),  # with a grace time
        ("JobId=7 JobName=x JobState=RUNNING Reason=None Requeue=0", True),
        ("JobId=7 JobState=CANCELLED Reason=None PreemptTime=None", False),
        ("JobId=7 JobState=COMPLETING PreemptTime=None", False),
        ("", False),  # it does not answer
    ],
)
def test_slurm_leaves_a_job_alone_that_runs_and_is_not_preempted(text: str, expected: bool) -> None:
    assert is_left_alone(text) == expected


def test_a_node_on_which_the_step_could_not_be_launched_is_named() -> None:
    lines = ["srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure"]
    assert find_blamed_node(lines, ["n1", "n2"]) == "n2"
    assert find_blamed_node(lines, ["n1"]) is None


def test_the_step_has_one_agent_on_each_node_and_reads_no_input() -> None:
    command = srun_command(["n1", "n2"], ["python", "-m", "trainer.node", "dir"], {})
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n2", "--input=none", "--overlap"} <= set(command)
    assert command[-4:] == ["python", "-m", "trainer.node", "dir"]


def test_wishes_per_task_do_not_take_gpus_from_our_one_task() -> None:
    wishes = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8", "HOME": "/h"}
    assert step_environment(wishes) == {"SLURM_GPUS_ON_NODE": "8", "HOME": "/h", "SLURM_EXPORT_ENV": "ALL"}
    assert "--gpus-per-node=8" in srun_command(["n1"], ["agent"], wishes)
    assert not any("gpus" in word for word in srun_command(["n1"], ["agent"], {"SLURM_GPUS_ON_NODE": "8"}))
