"""CliClient over a scripted tool: what each exit and each sentence of Slurm's tools means."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurm import commands
from slurm.client import CliClient
from slurm.commands import FIELD_SEPARATOR, SACCT_FIELDS, SQUEUE_FIELDS
from slurm.errors import SlurmRefused, SlurmUnavailable, SlurmUnreadable, SubmitUnconfirmed
from slurm.inherited import AS_THE_SERVICE, Inherited, SoftLimit
from slurm.run_tool import MAX_OUTPUT_BYTES, Completed, run_tool
from slurm.types import Identity, SubmitRequest

DATA = Path(__file__).parents[1] / "data" / "slurm-22.05"
SINCE = datetime(2026, 3, 2, 8, 0, 0, tzinfo=UTC)
TOKEN = "sup:run-a:7"
REQUEST = SubmitRequest(
    script=Path("/runs/a/batch.sh"), token=TOKEN, job_name="sup-a", nodes=2, output=Path("/runs/a/job.log")
)

OK = Completed(returncode=0)
CONNECT_FAILURE = Completed(
    returncode=1, stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
)
NO_ACCOUNTING = Completed(returncode=1, stderr="Slurm accounting storage is disabled\n")
DATABASE_DOWN = Completed(
    returncode=1,
    stdout="55",
    stderr="sacct: error: _open_persist_conn: failed to open persistent connection to host:ctl1:6819: "
    "Connection refused\nsacct: error: Problem talking to the database: Connection refused\n",
)
TIMED_OUT = Completed(returncode=None)


class ScriptedTools:
    """Answers by tool name; an answer may be made from the argv, which holds the row mark."""

    def __init__(self, **answers: Completed | Callable[[tuple[str, ...]], Completed] | OSError) -> None:
        self.answers = answers
        self.calls: list[tuple[str, ...]] = []
        self.environments: list[Mapping[str, str]] = []

    def __call__(self, argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        self.calls.append(argv)
        self.environments.append(env)
        answer = self.answers.get(argv[0], OK)
        if isinstance(answer, OSError):
            raise answer
        return answer if isinstance(answer, Completed) else answer(argv)


def client(**answers: Completed | Callable[[tuple[str, ...]], Completed] | OSError) -> CliClient:
    return CliClient(run=ScriptedTools(**answers), parent={"PATH": "/usr/bin"})


def squeue(*rows: dict[str, str], stderr: str = "") -> Callable[[tuple[str, ...]], Completed]:
    def answer(argv: tuple[str, ...]) -> Completed:
        mark = argv[-1].rpartition(FIELD_SEPARATOR)[2]
        lines = [
            FIELD_SEPARATOR.join(row.get(name, "") for name in SQUEUE_FIELDS) + FIELD_SEPARATOR + mark + "\n"
            for row in rows
        ]
        return Completed(returncode=0, stdout="".join(lines), stderr=stderr)

    return answer


def sacct(*rows: dict[str, str]) -> Callable[[tuple[str, ...]], Completed]:
    def answer(argv: tuple[str, ...]) -> Completed:
        delimiter = next(word for word in argv if word.startswith("--delimiter=")).partition("=")[2]
        lines = ["".join(row.get(name, "") + delimiter for name in SACCT_FIELDS) + "\n" for row in rows]
        return Completed(returncode=0, stdout="".join(lines))

    return answer


LIVE = {
    "JobID": "900",
    "State": "RUNNING",
    "NodeList": "n[1-2]",
    "Comment": TOKEN,
    "SubmitTime": "2026-03-02T08:00:01",
}
ENDED = {
    "JobIDRaw": "900",
    "State": "COMPLETED",
    "ExitCode": "0:0",
    "Submit": "2026-03-02T08:00:01",
    "SubmitLine": f"sbatch --parsable --comment={TOKEN} /runs/a/batch.sh",
}


# ---------------------------------------------------------------- a failed question


@pytest.mark.parametrize(
    "done",
    [
        CONNECT_FAILURE,
        TIMED_OUT,
        Completed(returncode=1, stderr="slurm_load_jobs error: Socket timed out on send/recv operation"),
        Completed(returncode=1, stderr="slurm_load_jobs error: Zero Bytes were transmitted or received"),
        Completed(returncode=1, stderr="slurm_load_jobs error: Slurm backup controller in standby mode"),
        Completed(returncode=1, stderr="slurm_load_jobs error: Protocol authentication error"),
        Completed(returncode=1, stderr="slurm_load_jobs error: something this release does not know"),
        Completed(returncode=-9),
        Completed(returncode=0, stderr="squeue: error: Unable to contact slurm controller (connect failure)"),
    ],
)
def test_a_question_that_failed_is_unavailable_and_never_an_empty_answer(done: Completed) -> None:
    asked = client(squeue=done, scontrol=done, sacct=done)
    for ask in (asked.fetch_jobs, asked.fetch_nodes, asked.fetch_cluster):
        with pytest.raises(SlurmUnavailable):
            ask()
    with pytest.raises(SlurmUnavailable):
        asked.fetch_ended_jobs(since=SINCE)
    with pytest.raises(SlurmUnavailable):
        asked.find_by_token(TOKEN, since=SINCE)


def test_an_error_carries_its_evidence() -> None:
    with pytest.raises(SlurmUnavailable) as caught:
        client(squeue=CONNECT_FAILURE).fetch_jobs()
    assert caught.value.argv[0] == "squeue"
    assert caught.value.returncode == 1
    assert "connect failure" in caught.value.stderr
    assert "connect failure" in str(caught.value)


def test_a_tool_that_is_not_installed_is_unavailable() -> None:
    with pytest.raises(SlurmUnavailable, match="could not be started"):
        client(squeue=FileNotFoundError("squeue is not on PATH")).fetch_jobs()


def test_missing_rights_are_refused() -> None:
    with pytest.raises(SlurmRefused):
        client(squeue=Completed(returncode=1, stderr="slurm_load_jobs error: Access/permission denied")).fetch_jobs()


def test_output_over_the_limit_is_unreadable() -> None:
    with pytest.raises(SlurmUnreadable):
        client(squeue=Completed(returncode=None, stdout="x", is_truncated=True)).fetch_jobs()


def test_rows_of_which_none_can_be_read_are_no_empty_queue() -> None:
    with pytest.raises(SlurmUnreadable):
        client(squeue=Completed(returncode=0, stdout="JOBID PARTITION\n55 main\n")).fetch_jobs()


def test_an_empty_queue_is_an_empty_answer() -> None:
    assert client(squeue=OK).fetch_jobs().jobs == ()


def test_a_cluster_without_a_node_is_unreadable() -> None:
    with pytest.raises(SlurmUnreadable):
        client(scontrol=OK).fetch_nodes()


def test_a_job_whose_row_is_garbage_does_not_hide_the_others() -> None:
    listing = client(squeue=squeue(LIVE, {**LIVE, "JobID": "x"})).fetch_jobs()
    assert [job.job_id for job in listing.jobs] == [900]
    assert len(listing.unreadable) == 1


def test_each_listing_is_one_command() -> None:
    tools = ScriptedTools(squeue=squeue(LIVE), scontrol=Completed(returncode=0, stdout="NodeName=n1 State=IDLE\n"))
    CliClient(run=tools, parent={}).fetch_jobs()
    CliClient(run=tools, parent={}).fetch_nodes()
    assert [argv[0] for argv in tools.calls] == ["squeue", "scontrol"]


def test_the_facts_of_the_cluster_come_from_two_commands() -> None:
    def scontrol(argv: tuple[str, ...]) -> Completed:
        name = "partitions.txt" if "partition" in argv else "config.txt"
        return Completed(returncode=0, stdout=(DATA / name).read_text())

    facts = client(scontrol=scontrol).fetch_cluster()
    assert (facts.cluster, facts.version, facts.partitions) == ("acct", "22.05.8", ("main", "other"))


# ---------------------------------------------------------------- accounting


def test_a_cluster_without_accounting_refuses_to_tell_ended_jobs() -> None:
    with pytest.raises(SlurmRefused):
        client(sacct=NO_ACCOUNTING).fetch_ended_jobs(since=SINCE)


def test_an_unreachable_database_is_unknown_and_its_partial_list_is_not_used() -> None:
    with pytest.raises(SlurmUnavailable):
        client(sacct=DATABASE_DOWN).fetch_ended_jobs(since=SINCE)
    with pytest.raises(SlurmUnavailable):
        client(sacct=replace(DATABASE_DOWN, returncode=0)).fetch_ended_jobs(since=SINCE)


@pytest.mark.parametrize("returncode", [0, 1])
def test_a_database_that_gives_no_reason_is_unavailable_too(returncode: int) -> None:
    done = Completed(returncode=returncode, stderr="sacct: error: Problem talking to the database: Success")
    with pytest.raises(SlurmUnavailable):
        client(sacct=done).fetch_ended_jobs(since=SINCE)


def test_an_old_record_under_a_job_id_that_came_round_again_is_left_out() -> None:
    """SB-11."""
    old = {**ENDED, "Submit": "2017-10-03T17:39:29"}
    jobs = client(sacct=sacct(old, ENDED)).fetch_ended_jobs(since=SINCE).jobs
    assert [job.submit_at for job in jobs] == [datetime(2026, 3, 2, 8, 0, 1, tzinfo=UTC)]


# ---------------------------------------------------------------- looking a token up


def test_a_token_is_found_in_the_controllers_memory_without_accounting() -> None:
    (job,) = client(
        squeue=squeue(LIVE, {**LIVE, "JobID": "7", "Comment": TOKEN + "0"}), sacct=NO_ACCOUNTING
    ).find_by_token(TOKEN, since=SINCE)
    assert job.job_id == 900


def test_a_token_is_found_in_accounting_when_the_controller_has_forgotten_the_job() -> None:
    (job,) = client(squeue=OK, sacct=sacct(ENDED)).find_by_token(TOKEN, since=SINCE)
    assert job.raw_state == "COMPLETED"


def test_what_the_controller_says_of_a_job_counts_before_accounting() -> None:
    (job,) = client(squeue=squeue(LIVE), sacct=sacct({**ENDED, "State": "NODE_FAIL"})).find_by_token(TOKEN, since=SINCE)
    assert job.raw_state == "RUNNING"


def test_of_several_runs_of_one_job_in_accounting_the_newest_counts() -> None:
    newer = {**ENDED, "Submit": "2026-03-02T09:00:00", "State": "FAILED"}
    (job,) = client(squeue=OK, sacct=sacct(newer, ENDED)).find_by_token(TOKEN, since=SINCE)
    assert job.raw_state == "FAILED"


def test_two_jobs_with_one_token_are_both_told() -> None:
    found = client(squeue=squeue(LIVE, {**LIVE, "JobID": "901"}), sacct=NO_ACCOUNTING).find_by_token(TOKEN, since=SINCE)
    assert [job.job_id for job in found] == [900, 901]


def test_a_token_nobody_knows_is_an_empty_answer_only_when_all_sources_answered() -> None:
    assert client(squeue=OK, sacct=NO_ACCOUNTING).find_by_token(TOKEN, since=SINCE) == ()
    assert client(squeue=OK, sacct=OK).find_by_token(TOKEN, since=SINCE) == ()
    for broken in (
        client(squeue=CONNECT_FAILURE, sacct=sacct(ENDED)),
        client(squeue=squeue(LIVE), sacct=DATABASE_DOWN),
        client(squeue=OK, sacct=TIMED_OUT),
        client(squeue=OK, sacct=Completed(returncode=1, stderr="sacct: error: Access/permission denied")),
    ):
        with pytest.raises(SlurmUnavailable):
            broken.find_by_token(TOKEN, since=SINCE)


def test_a_row_with_the_token_that_cannot_be_read_is_no_empty_answer() -> None:
    garbled = {**LIVE, "SubmitTime": "yesterday"}
    with pytest.raises(SlurmUnreadable):
        client(squeue=squeue(garbled, {**LIVE, "Comment": ""}), sacct=NO_ACCOUNTING).find_by_token(TOKEN, since=SINCE)


# ---------------------------------------------------------------- submitting


def submission_failed(text: str) -> Completed:
    return Completed(returncode=1, stderr=f"sbatch: error: Batch job submission failed: {text}\n")


def test_an_accepted_job_keeps_what_submit_filters_said_as_a_warning() -> None:
    """SB-03."""
    said = 'sbatch: no partition specified, using default gpu\nsbatch: error: "SBATCH_EXCLUSIVE=true" -- invalid value'
    submitted = client(sbatch=Completed(returncode=0, stdout="7787232\n", stderr=said)).submit(REQUEST)
    assert (submitted.job_id, submitted.warnings) == (7787232, said)


BANNER = "   Welcome to the Apollo3 machine\n--> Verifying quota is at 0.00%...OK\n"


@pytest.mark.parametrize(
    "stdout",
    [f"{BANNER}519605", f"{BANNER}519605;apollo\n", f"{BANNER}Submitted batch job 519605\n", "519605;c\nbye 7\n"],
)
def test_a_sites_banner_is_not_taken_for_a_job_id(stdout: str) -> None:
    """SB-02."""
    assert client(sbatch=Completed(returncode=0, stdout=stdout)).submit(REQUEST).job_id == 519605


@pytest.mark.parametrize("stdout", ["", "hello\n", "1\n2\n", f"{BANNER}", "3;a\nSubmitted batch job 4\n"])
def test_an_answer_without_one_job_id_is_unconfirmed(stdout: str) -> None:
    """SB-02."""
    with pytest.raises(SubmitUnconfirmed):
        client(sbatch=Completed(returncode=0, stdout=stdout)).submit(REQUEST)


@pytest.mark.parametrize(
    "done",
    [
        submission_failed("Socket timed out on send/recv operation"),
        submission_failed("Zero Bytes were transmitted or received"),
        submission_failed("Unable to contact slurm controller (send failure)"),
        submission_failed("Unable to contact slurm controller (receive failure)"),
        submission_failed("Message receive failure"),
        submission_failed("Unexpected message received"),
        submission_failed("Insane message length"),
        submission_failed("Incompatible versions of client and server code"),
        submission_failed("Header lengths are longer than data received"),
        submission_failed("Unspecified error"),
        submission_failed("words that no release has said so far"),
        Completed(
            returncode=1,
            stderr="sbatch: error: slurm_receive_msg: Insane message length\n"
            "sbatch: error: Batch job submission failed: Unspecified error\n",
        ),
        TIMED_OUT,
        Completed(returncode=-9),
        Completed(returncode=-15, stderr="sbatch: error: interrupted"),
        Completed(returncode=1, stdout="519605\n", stderr="wrapper: cannot write the log"),
        Completed(returncode=None, is_truncated=True),
    ],
)
def test_a_submission_whose_answer_was_lost_is_unconfirmed(done: Completed) -> None:
    """SB-05, SB-06 (killed), SB-10."""
    with pytest.raises(SubmitUnconfirmed):
        client(sbatch=done).submit(REQUEST)


@pytest.mark.parametrize(
    "done",
    [
        submission_failed("Unable to contact slurm controller (connect failure)"),
        submission_failed("Slurm job queue full, sleeping and retrying"),
        submission_failed("Slurm temporarily unable to accept job, sleeping and retrying"),
        submission_failed("Slurm backup controller in standby mode"),
        submission_failed("Protocol authentication error"),
        submission_failed("Unable to create job record, try again"),
        Completed(returncode=1, stderr="sbatch: fatal: Could not establish a configuration source\n"),
    ],
)
def test_a_submission_that_certainly_was_not_accepted_is_unavailable_and_not_unconfirmed(done: Completed) -> None:
    """SB-10."""
    with pytest.raises(SlurmUnavailable) as caught:
        client(sbatch=done).submit(REQUEST)
    assert not isinstance(caught.value, SubmitUnconfirmed)


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        *(
            (submission_failed(text), text)
            for text in (
                "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
                "Invalid account or account/partition combination specified",
                "Access/permission denied",
                "Invalid node name specified",
                "Invalid partition name specified",
                "Requested node configuration is not available",
                "Invalid generic resource (gres) specification",
                "Requested time limit is invalid (missing or exceeds some limit)",
                "Memory required by task is not available",
                "User's group not permitted to use this partition",
                "More processors requested than permitted",
                "Node count specification invalid",
            )
        ),
        (
            Completed(
                returncode=1,
                stderr="sbatch: lua: Invalid account\nsbatch: lua: quota server: Connection refused\n"
                "sbatch: error: Batch job submission failed: Invalid account\n",
            ),
            "lua: Invalid account; lua: quota server: Connection refused; Invalid account",
        ),
        (
            Completed(
                returncode=1,
                stderr="sbatch: error: ask the team lead for hours\n"
                "sbatch: error: Batch job submission failed: Unspecified error\n",
            ),
            "ask the team lead for hours; Unspecified error",
        ),
        (
            Completed(returncode=1, stderr="sbatch: unrecognized option '--nonsense'\n"),
            "unrecognized option '--nonsense'",
        ),
        (
            Completed(returncode=1, stderr="sbatch: error: Unable to open file /runs/a/batch.sh\n"),
            "Unable to open file /runs/a/batch.sh",
        ),
    ],
)
def test_a_submission_that_slurm_will_never_take_is_refused_with_its_reason_said_once(
    done: Completed, reason: str
) -> None:
    """SB-10."""
    with pytest.raises(SlurmRefused) as caught:
        client(sbatch=done).submit(REQUEST)
    assert str(caught.value) == reason


def test_a_missing_sbatch_is_unavailable_and_not_unconfirmed() -> None:
    with pytest.raises(SlurmUnavailable) as caught:
        client(sbatch=FileNotFoundError("sbatch")).submit(REQUEST)
    assert not isinstance(caught.value, SubmitUnconfirmed)


def test_a_submission_is_tried_once_and_the_next_try_is_the_same() -> None:
    """SB-07."""
    tools = ScriptedTools(sbatch=submission_failed("Socket timed out on send/recv operation"))
    subject = CliClient(run=tools, parent={"PATH": "/usr/bin"})
    for _ in range(2):
        with pytest.raises(SubmitUnconfirmed):
            subject.submit(REQUEST)
    assert len(tools.calls) == 2
    assert tools.calls[0] == tools.calls[1]


class ToolsAs:
    """Answers for tools that are run as another account, and keeps who that was."""

    def __init__(self, answer: Completed) -> None:
        self.answer = answer
        self.calls: list[tuple[tuple[str, ...], Identity | None, Path | None]] = []
        self.environments: list[Mapping[str, str]] = []
        self.inherited: list[Inherited] = []

    def __call__(
        self,
        argv: tuple[str, ...],
        timeout_s: float,
        env: Mapping[str, str],
        *,
        identity: Identity | None,
        directory: Path | None,
        inherited: Inherited = AS_THE_SERVICE,
    ) -> Completed:
        self.calls.append((argv, identity, directory))
        self.inherited.append(inherited)
        self.environments.append(env)
        return self.answer


ACCEPTED = Completed(returncode=0, stdout="1\n")
ADA = Identity(uid=0, gid=0)


def test_the_job_of_another_user_is_submitted_as_that_user_with_that_users_home() -> None:
    tools, tools_as = ScriptedTools(), ToolsAs(ACCEPTED)
    subject = CliClient(run=tools, run_as=tools_as, parent={"PATH": "/usr/bin", "HOME": "/home/me"})
    subject.submit(replace(REQUEST, identity=ADA))
    assert tools.calls == []
    assert tools_as.calls == [(commands.sbatch_argv(REQUEST), ADA, None)]
    assert (tools_as.environments[0]["HOME"], tools_as.environments[0]["USER"]) == ("/root", "root")


def test_sbatch_is_run_where_the_person_ran_it_and_with_their_environment() -> None:
    tools_as = ToolsAs(ACCEPTED)
    subject = CliClient(run=ScriptedTools(), run_as=tools_as, parent={"PATH": "/usr/bin", "SECRET": "x"})
    here, theirs = Path("/home/ada"), {"PATH": "/home/ada/bin", "SLURM_JOB_ID": "7"}
    subject.submit(replace(REQUEST, submit_dir=here, environment=theirs, is_own_environment=True))
    assert [(identity, directory) for _, identity, directory in tools_as.calls] == [(None, here)]
    assert tools_as.environments == [{"PATH": "/home/ada/bin"}]


def test_a_job_is_claimed_and_cancelled_as_its_owner() -> None:
    tools, tools_as = ScriptedTools(), ToolsAs(OK)
    subject = CliClient(run=tools, run_as=tools_as)
    subject.claim(7, TOKEN, ADA)
    subject.cancel(7, ADA)
    assert [(argv[0], identity) for argv, identity, _ in tools_as.calls] == [("scontrol", ADA), ("scancel", ADA)]
    assert tools.calls == []


def test_the_limits_of_the_persons_shell_reach_sbatch_under_the_services_own_account_too() -> None:
    tools_as = ToolsAs(ACCEPTED)
    shell = Inherited(umask=0o027, limits=(SoftLimit(name="NOFILE", value=99),))
    CliClient(run=ScriptedTools(), run_as=tools_as).submit(replace(REQUEST, inherited=shell))
    assert (tools_as.calls[0][1:], tools_as.inherited) == ((None, None), [shell])


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        ("Invalid job id specified for job 7\n", SlurmRefused),
        ("Invalid user id for job 7\n", SlurmRefused),
        ("slurm_update error: Unable to contact slurm controller (connect failure)\n", SlurmUnavailable),
    ],
)
def test_a_claim_that_slurm_does_not_take_says_why(stderr: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        client(scontrol=Completed(returncode=1, stderr=stderr)).claim(7, TOKEN)


def test_a_job_that_slurm_does_not_know_is_refused_and_not_unavailable() -> None:
    unknown = Completed(returncode=1, stderr="slurm_load_jobs error: Invalid job id specified\n")
    with pytest.raises(SlurmRefused):
        client(scontrol=unknown).describe_job(7)
    with pytest.raises(SlurmUnavailable):
        client(scontrol=CONNECT_FAILURE).describe_job(7)


@pytest.mark.parametrize(
    ("done", "error"),
    [
        # scontrol ends with 0 here (22.05)
        (Completed(returncode=0, stderr="job script retrieval failed: Invalid job id specified\n"), SlurmRefused),
        (Completed(returncode=0, stderr="job script retrieval failed: Access/permission denied\n"), SlurmRefused),
        (OK, SlurmRefused),
        (Completed(returncode=0, stdout="#!/bin/sh\necho \ufffd\n"), SlurmUnreadable),
        (TIMED_OUT, SlurmUnavailable),
    ],
)
def test_a_script_that_cannot_be_had_unchanged_is_an_error(done: Completed, error: type[Exception]) -> None:
    with pytest.raises(error):
        client(scontrol=done).fetch_script(7)


def test_a_uid_that_the_host_does_not_know_is_refused() -> None:
    with pytest.raises(SlurmRefused, match="no user"):
        client().submit(replace(REQUEST, identity=Identity(uid=2**31 - 7, gid=1)))


# ---------------------------------------------------------------- changing


@pytest.mark.parametrize(
    "stderr",
    [
        "scancel: error: Kill job error on job id 55: Invalid job id specified",
        "scancel: error: Kill job error on job id 55: Job/step already completing or completed",
    ],
)
def test_cancelling_a_job_that_is_gone_is_no_error(stderr: str) -> None:
    client(scancel=Completed(returncode=1, stderr=stderr)).cancel(55)


def test_cancelling_someone_elses_job_is_refused() -> None:
    done = Completed(returncode=1, stderr="scancel: error: Kill job error on job id 55: Access/permission denied")
    with pytest.raises(SlurmRefused):
        client(scancel=done).cancel(55)


@pytest.mark.parametrize("done", [CONNECT_FAILURE, TIMED_OUT])
def test_a_change_without_an_answer_is_unavailable(done: Completed) -> None:
    subject = client(scancel=done, scontrol=done)
    with pytest.raises(SlurmUnavailable):
        subject.cancel(55)
    with pytest.raises(SlurmUnavailable):
        subject.drain("n1", "sup: xid48")
    with pytest.raises(SlurmUnavailable):
        subject.undrain("n1")


def test_a_drain_without_the_rights_is_refused() -> None:
    done = Completed(returncode=1, stderr="slurm_update error: Invalid user id")
    with pytest.raises(SlurmRefused, match="Invalid user id"):
        client(scontrol=done).drain("n1", "sup: xid48")


def test_no_command_runs_for_what_is_refused_before() -> None:
    tools = ScriptedTools()
    with pytest.raises(SlurmRefused):
        CliClient(run=tools, parent={}).drain("n1", "two\nlines")
    assert tools.calls == []


# ---------------------------------------------------------------- running a tool for real


def tool(directory: Path, body: str) -> tuple[str, ...]:
    path = directory / "squeue"
    path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\n{body}\n")
    path.chmod(0o755)
    return (str(path),)


def test_output_and_exit_code_are_told_and_nothing_is_inherited(tmp_path: Path) -> None:
    argv = tool(tmp_path, "print(sorted(os.environ)); print('e', file=sys.stderr); sys.exit(3)")
    done = run_tool(argv, 10, {"ONLY": "this"})
    assert (done.returncode, done.stderr) == (3, "e\n")
    assert "ONLY" in done.stdout
    assert "PATH" not in done.stdout


def test_bytes_that_are_no_utf8_are_read_anyway(tmp_path: Path) -> None:
    done = run_tool(tool(tmp_path, "sys.stdout.buffer.write(b'a\\xff\\r\\n')"), 10, {})
    assert done.stdout == "a\ufffd\r\n"


def test_a_tool_that_does_not_answer_is_killed_with_its_children(tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    hold = f"fd = os.open({str(held)!r}, os.O_WRONLY); subprocess.Popen(['sleep', '60'], pass_fds=[fd]); time.sleep(60)"
    began = time.monotonic()
    done = run_tool(tool(tmp_path, hold), 1.0, {"PATH": "/usr/bin:/bin"})
    assert done.returncode is None
    assert time.monotonic() - began < 5
    # The end of the pipe comes when the last process that holds it is gone.
    assert select.select([reader], [], [], 10)[0]
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_tool_that_prints_without_end_is_stopped(tmp_path: Path) -> None:
    done = run_tool(tool(tmp_path, "while True: sys.stdout.write('x' * 1000000)"), 30, {})
    assert done.is_truncated
    assert done.returncode is None
    assert len(done.stdout) < MAX_OUTPUT_BYTES + 4_000_000


def test_a_tool_is_never_looked_up_on_the_jobs_path(tmp_path: Path) -> None:
    tool(tmp_path, "print('the job chose this')")
    with pytest.raises(FileNotFoundError):
        run_tool(("squeue",), 5, {"PATH": str(tmp_path)}, path=str(tmp_path / "empty"))
