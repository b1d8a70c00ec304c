"""`scontrol -o show job N`: as 22.05 and 25.11 print it, and as somebody would like it to be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.job_description import parse_job_description
from slurm.types import JobDescription, JobState, Unreadable

# Printed by 22.05.8 and 25.11; times and resources left out where nothing depends on them.
OLD = (
    "JobId=78 JobName=my job UserId=ada(1001) GroupId=lab(1002) MCS_label=N/A Priority=0 Nice=0 Account=(null) "
    "QOS=(null) JobState=PENDING Reason=JobHeldUser Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=0:0 RunTime=00:00:00 TimeLimit=1-00:00:00 TimeMin=N/A SubmitTime=2026-11-30T06:57:51 "
    "StartTime=Unknown EndTime=Unknown Partition=main AllocNode:Sid=vm:23102 ReqNodeList=(null) ExcNodeList=n[2-3] "
    "NodeList= NumNodes=2-4 NumCPUs=1 NumTasks=2 CPUs/Task=8 ReqB:S:C:T=0:0:*:* TRES=cpu=1,mem=4000M,node=1,billing=1 "
    "Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinCPUsNode=1 MinMemoryNode=64G MinTmpDiskNode=0 Features=a100 "
    "DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) "
    "Command=./train.sh --lr=3 b c WorkDir=/home/ada/x y Comment=hi there=7  StdErr=/home/ada/slurm-78.out "
    "StdIn=/dev/null StdOut=/home/ada/slurm-78.out Power= TresPerNode=gres:gpu:a100:8 \n\n"
)
NEW = (
    "JobId=1 JobName=t.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 Account=lab QOS=high "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "TimeLimit=UNLIMITED Partition=main AllocNode:Sid=vm:23102 ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-2] "
    "BatchHost=n1 NumNodes=2 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqTRES=cpu=1,node=1 AllocTRES=cpu=1,node=1 "
    "Licenses=(null) LicensesAlloc=(null) Network=(null) Command=/x/t.sh SubmitLine=sbatch --comment=hi there t.sh a "
    "WorkDir=/x Comment=hi there StdErr= StdIn=/dev/null StdOut=/x/slurm-1.out TresPerNode=gres/gpu:4 \n"
)


def described(text: str) -> JobDescription:
    found = parse_job_description(text)
    assert isinstance(found, JobDescription), found
    return found


def test_a_waiting_job_of_an_old_release_is_read() -> None:
    job = described(OLD)
    assert (job.job_id, job.name, job.user, job.uid, job.state) == (78, "my job", "ada", 1001, JobState.PENDING)
    assert (job.partition, job.account, job.qos, job.time_limit) == ("main", "", "", "1-00:00:00")
    assert (job.nodes, job.ntasks, job.cpus_per_task, job.memory_per_node) == (2, 2, "8", "64G")
    assert (job.features, job.exclude, job.node_list, job.gpus_per_node) == ("a100", "n[2-3]", "", 8)
    assert (job.command, job.submit_line, job.work_dir) == ("./train.sh --lr=3 b c", "", "/home/ada/x y")
    assert (job.comment, job.stdout, job.is_requeue) == ("hi there=7", "/home/ada/slurm-78.out", True)


def test_a_running_job_of_a_new_release_is_read() -> None:
    job = described(NEW)
    assert (job.state, job.nodes, job.node_list, job.batch_host) == (JobState.RUNNING, 2, "n[1-2]", "n1")
    assert (job.account, job.qos, job.gpus_per_node, job.is_requeue) == ("lab", "high", 4, False)
    assert (job.command, job.comment) == ("/x/t.sh", "hi there")
    assert job.submit_line == "sbatch --comment=hi there t.sh a"


def test_an_empty_argument_at_the_end_of_a_command_is_kept() -> None:
    assert described(OLD.replace("b c WorkDir", "b  WorkDir")).command == "./train.sh --lr=3 b "


@pytest.mark.parametrize(
    ("before", "after", "is_array", "is_het"),
    [
        ("JobId=78 ", "JobId=78 ArrayJobId=78 ArrayTaskId=1-3 ", True, False),
        ("JobId=78 ", "JobId=78 HetJobId=78 HetJobOffset=0 ", False, True),
    ],
)
def test_an_element_of_several_is_told(before: str, after: str, is_array: bool, is_het: bool) -> None:
    job = described(OLD.replace(before, after) + OLD.replace("JobId=78", "JobId=79"))
    assert (job.job_id, job.is_array, job.is_het) == (78, is_array, is_het)


def test_a_job_without_a_script_is_told() -> None:
    assert not described(OLD.replace("BatchFlag=1", "BatchFlag=0")).is_batch
    wrapped = described(OLD.replace("Command=./train.sh --lr=3 b c", "Command=(null)"))
    assert wrapped.command == ""


@pytest.mark.parametrize(
    "name",
    ["x UserId=root(0) GroupId=root(0)", "x JobState=RUNNING", "x Command=/etc/passwd", "x\nJobId=9 JobName=y"],
)
def test_a_name_that_imitates_a_field_is_not_believed(name: str) -> None:
    found = parse_job_description(OLD.replace("JobName=my job", f"JobName={name}"))
    assert isinstance(found, Unreadable)


def test_a_name_with_a_line_break_in_it_is_read() -> None:
    assert described(OLD.replace("JobName=my job", "JobName=a\nb")).name == "a\nb"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "nonsense",
        "JobId=1",
        OLD.replace("UserId=ada(1001)", "UserId=ada"),
        OLD.replace("NumNodes=2-4 ", ""),
        OLD.replace("=78", "=" + "7" * 5000),
    ],
)
def test_what_cannot_be_read_is_told_and_not_guessed(text: str) -> None:
    assert isinstance(parse_job_description(text), Unreadable)


@given(cut=st.integers(0, len(OLD)), garbage=st.text(max_size=30))
def test_whatever_scontrol_prints_nothing_is_raised(cut: int, garbage: str) -> None:
    parse_job_description(OLD[:cut] + garbage + OLD[cut:])
    parse_job_description(OLD[:cut] + garbage)
    parse_job_description(garbage)
