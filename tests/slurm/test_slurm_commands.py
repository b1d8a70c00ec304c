"""Argument lists and environments: pure, hard to subvert, the same each time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm import commands
from slurm.errors import SlurmRefused
from slurm.types import Identity, SubmitRequest

REQUEST = SubmitRequest(
    script=Path("/runs/a/attempts/7/batch.sh"),
    token="sup:a:7",
    job_name="sup-a",
    nodes=2,
    output=Path("/runs/a/attempts/7/job.log"),
)


def value_of(argv: tuple[str, ...], option: str) -> str:
    """The value that counts: of an option given twice, the last."""
    return [word.partition("=")[2] for word in argv if word.startswith(f"{option}=")][-1]


def test_a_submission_is_built_the_same_each_time() -> None:
    """SB-07."""
    assert commands.sbatch_argv(REQUEST) == commands.sbatch_argv(REQUEST)
    assert commands.sbatch_argv(REQUEST).count(str(REQUEST.script)) == 1


def test_a_submission_says_everything_that_keeps_one_attempt_alone() -> None:
    assert commands.sbatch_argv(REQUEST) == (
        "sbatch",
        "--parsable",
        "--no-requeue",
        "--dependency=singleton",
        "--open-mode=append",
        "--export=ALL",
        "--job-name=sup-a",
        "--comment=sup:a:7",
        "--nodes=2",
        "--output=/runs/a/attempts/7/job.log",
        "/runs/a/attempts/7/batch.sh",
    )


def test_only_what_was_chosen_is_added() -> None:
    chosen = replace(
        REQUEST,
        partition="gpu",
        account="lab",
        qos="high",
        time_limit="1-00:00:00",
        gpus_per_node=8,
        chdir=Path("/runs/a"),
        exclude=("gpu03", "gpu01", "gpu02"),
        identity=Identity(uid=1001, gid=1002),
        options=("--mem=0",),
    )
    assert set(commands.sbatch_argv(chosen)) - set(commands.sbatch_argv(REQUEST)) == {
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--time=1-00:00:00",
        "--gpus-per-node=8",
        "--chdir=/runs/a",
        "--exclude=gpu[01-03]",
        "--mem=0",
    }


def test_sbatch_is_never_asked_to_change_the_account() -> None:
    argv = commands.sbatch_argv(replace(REQUEST, identity=Identity(uid=1001, gid=1002)))
    assert not [word for word in argv if word.startswith(("--uid", "--gid"))]


def test_a_persons_script_keeps_its_options_and_arguments_under_the_overriding_ones() -> None:
    mine = replace(
        REQUEST,
        nodes=None,
        output=None,
        options=("--nodes=2-4", "--output=out.%j"),
        dependency="afterok:5,singleton",
        export="A,SUPERVISOR_RUN",
        arguments=("--hold", "two words", "-N9", ""),
    )
    assert commands.sbatch_argv(mine) == (
        "sbatch",
        "--nodes=2-4",
        "--output=out.%j",
        "--parsable",
        "--no-requeue",
        "--dependency=afterok:5,singleton",
        "--open-mode=append",
        "--export=A,SUPERVISOR_RUN",
        "--job-name=sup-a",
        "--comment=sup:a:7",
        "/runs/a/attempts/7/batch.sh",
        "--hold",
        "two words",
        "-N9",
        "",
    )


def test_slurm_is_asked_about_a_persons_script_itself_and_about_ours_before_it_is_there() -> None:
    ours = commands.test_only_argv(REQUEST)
    theirs = commands.test_only_argv(replace(REQUEST, is_own_environment=True))
    assert (ours[:2], ours[-1]) == (("sbatch", "--test-only"), "--wrap=exit")
    assert (theirs[:2], theirs[-1]) == (("sbatch", "--test-only"), str(REQUEST.script))


@pytest.mark.parametrize("wrong", [{"arguments": ("a\0b",)}, {"options": ("--mem=\0",)}, {"export": "\0"}])
def test_what_no_command_line_can_hold_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SlurmRefused, match="NUL"):
        commands.sbatch_argv(replace(REQUEST, **wrong))


def test_a_claim_names_the_token_and_forbids_requeueing() -> None:
    argv = commands.claim_argv(7, "sup:a:1")
    assert argv == ("scontrol", "update", "JobId=7", "Comment=sup:a:1", "Requeue=0")
    assert "Requeue=0" not in commands.claim_argv(7, "sup:a:1", may_requeue=True)
    with pytest.raises(SlurmRefused):
        commands.claim_argv(7, "a Requeue=1")


def test_a_users_options_cannot_switch_ours_off() -> None:
    options = ("--requeue", "--comment=mine", "--dependency=afterok:1", "--job-name=x", "--open-mode=truncate")
    argv = commands.sbatch_argv(replace(REQUEST, options=options))
    assert value_of(argv, "--comment") == "sup:a:7"
    assert value_of(argv, "--dependency") == "singleton"
    assert value_of(argv, "--job-name") == "sup-a"
    assert value_of(argv, "--open-mode") == "append"
    assert argv.index("--no-requeue") > argv.index("--requeue")


def test_a_percent_sign_in_the_log_path_is_no_pattern() -> None:
    argv = commands.sbatch_argv(replace(REQUEST, output=Path("/runs/100%j/job.log")))
    assert value_of(argv, "--output") == "/runs/100%%j/job.log"


@pytest.mark.parametrize("token", ["", "two words", "a\nb", "x;y", "é", "a" * 201])
def test_a_token_that_could_not_be_found_again_is_refused(token: str) -> None:
    with pytest.raises(SlurmRefused):
        commands.sbatch_argv(replace(REQUEST, token=token))


@pytest.mark.parametrize("node", ["", "/etc/passwd", "n1,n2", "n[1-9]", "-n1", "@group", "n 1"])
def test_what_is_not_one_node_name_is_refused(node: str) -> None:
    with pytest.raises(SlurmRefused):
        commands.sbatch_argv(replace(REQUEST, exclude=(node,)))
    with pytest.raises(SlurmRefused):
        commands.drain_argv(node, "reason")
    with pytest.raises(SlurmRefused):
        commands.undrain_argv(node)


def test_a_script_that_could_be_an_option_is_refused() -> None:
    with pytest.raises(SlurmRefused):
        commands.sbatch_argv(replace(REQUEST, script=Path("--wrap=id")))


def test_one_squeue_asks_for_all_jobs_and_names_its_fields() -> None:
    argv = commands.squeue_argv("MARK")
    assert argv[:6] == ("squeue", "-h", "-a", "-r", "-t", "all")
    assert argv[-1].startswith("JobID:\x1f,State:\x1f,")
    assert argv[-1].endswith("Comment:\x1fMARK")


def test_sacct_is_asked_for_every_run_since_an_instant_in_utc() -> None:
    at = datetime(2026, 3, 2, 10, 0, 0, tzinfo=timezone(timedelta(hours=2)))
    argv = commands.sacct_argv(at, "MARK")
    assert {"-D", "-X", "-a", "-p"} < set(argv)
    assert argv[argv.index("-S") + 1] == "2026-03-02T08:00:00"


def test_a_naive_instant_is_refused() -> None:
    with pytest.raises(ValueError, match="aware"):
        commands.render_sacct_time(datetime(2026, 3, 2))  # noqa: DTZ001 - that is the point


# ---------------------------------------------------------------- reasons


def test_a_reason_with_line_breaks_and_quotes_becomes_one_line_that_slurm_keeps() -> None:
    wanted = "sup#41 xid48: XID 48 'DBE' on 0000:52:00\nsee run=a\t\x1b[31mé"
    rendered = commands.render_reason(wanted)
    assert rendered == "sup#41 xid48: XID 48 'DBE' on 0000:52:00 see run=a ?[31m?"
    assert commands.drain_argv("gpu01", rendered)[-1] == f"Reason={rendered}"


@given(text=st.text(max_size=400))
def test_any_text_can_be_made_a_reason(text: str) -> None:
    rendered = commands.render_reason(text)
    assert commands.is_reason(rendered)
    assert commands.render_reason(rendered) == rendered


@pytest.mark.parametrize("reason", ["", " ", "two\nlines", "é", "x" * 201, "tab\there", " led by a blank"])
def test_a_reason_that_slurm_would_change_is_refused_rather_than_mended(reason: str) -> None:
    with pytest.raises(SlurmRefused):
        commands.drain_argv("gpu01", reason)


# ---------------------------------------------------------------- environments

DAEMON = {
    "PATH": "/opt/slurm/bin:/usr/bin",
    "HOME": "/root",
    "SLURM_CONF": "/opt/slurm/slurm.conf",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0xF",
    "SLURM_JOB_ID": "12",
    "SLURM_CLUSTERS": "all",
    "SBATCH_MEM_PER_NODE": "100M",
    "SQUEUE_FORMAT": "%A %j",
    "SINFO_FORMAT": "%n",
    "SACCT_FORMAT": "jobid",
    "SLURM_TIME_FORMAT": "relative",
    "PMIX_RANK": "0",
    "PMI_RANK": "0",
    "API_KEY": "secret",
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "TZ": "Asia/Tokyo",
}


def test_nothing_of_the_daemons_environment_changes_what_the_tools_print() -> None:
    assert commands.reading_environment(DAEMON) == {
        "PATH": "/opt/slurm/bin:/usr/bin",
        "HOME": "/root",
        "SLURM_CONF": "/opt/slurm/slurm.conf",
        "LC_ALL": "C",
        "TZ": "UTC",
        "SLURM_TIME_FORMAT": "standard",
    }


def test_the_job_gets_a_sane_minimum_and_what_was_asked_for() -> None:
    """SB-08."""
    env = commands.submitting_environment(DAEMON, {"SUPERVISOR_RUN": "a,b=c"}, user="ada", home="/home/ada")
    assert env == {
        "PATH": "/opt/slurm/bin:/usr/bin",
        "SLURM_CONF": "/opt/slurm/slurm.conf",
        "TZ": "Asia/Tokyo",
        "HOME": "/home/ada",
        "USER": "ada",
        "LOGNAME": "ada",
        "LANG": "C.UTF-8",
        "SUPERVISOR_RUN": "a,b=c",
    }


@pytest.mark.parametrize(
    "name", ["SBATCH_ACCOUNT", "SLURM_CONF", "PMIX_RANK", "LD_PRELOAD", "GCONV_PATH", "", "A=B", "1A", "A-B"]
)
def test_a_variable_that_would_steer_sbatch_itself_is_refused(name: str) -> None:
    with pytest.raises(SlurmRefused):
        commands.submitting_environment(DAEMON, {name: "x"}, user="ada", home="/home/ada")


def test_a_person_gets_their_own_environment_without_the_job_that_they_were_in() -> None:
    """SB-08."""
    theirs = {
        "PATH": "/home/ada/bin:/usr/bin",
        "HOME": "/home/ada",
        "LD_LIBRARY_PATH": "/opt/cuda/lib64",
        "WANDB_API_KEY": "secret",
        "BASH_FUNC_module%%": "() {  eval `modulecmd bash $*`\n}",
        "SUPERVISOR_RUN": "a",
    }
    of_their_job = {
        "SLURM_CONF": "/home/ada/slurm.conf",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0xF",
        "SLURM_JOB_ID": "12",
        "SLURM_EXPORT_ENV": "NONE",
        "PMIX_RANK": "0",
        "PMI_RANK": "0",
    }
    env = commands.own_environment(DAEMON, {**theirs, **of_their_job})
    assert env == {**theirs, "SLURM_CONF": "/opt/slurm/slurm.conf"}


def test_what_a_person_sets_for_slurms_tools_reaches_the_job_as_from_sbatch() -> None:
    """What a job submits in its turn needs SBATCH_ACCOUNT, and srun SLURM_MPI_TYPE."""
    theirs = {"SBATCH_ACCOUNT": "lab", "SLURM_MPI_TYPE": "pmix", "PMIX_MCA_gds": "hash", "SLURM_RESTART_COUNT": "1"}
    env = commands.own_environment(DAEMON, {**theirs, "SBATCH_WAIT": "1"})
    assert env == {**theirs, "SLURM_CONF": "/opt/slurm/slurm.conf"}
    counted = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}  # the count is of our own making
    assert commands.own_environment({}, counted) == {"SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize("wrong", [{"": "x"}, {"A=B": "x"}, {"A": "\0"}, {"A\0": "x"}])
def test_a_variable_that_no_process_can_have_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(SlurmRefused):
        commands.own_environment(DAEMON, wrong)


def test_a_path_to_the_tools_is_there_even_without_one_in_the_daemons_environment() -> None:
    assert commands.reading_environment({})["PATH"]


def test_instants_are_asked_for_in_utc_because_the_tools_print_utc() -> None:
    assert commands.reading_environment({})["TZ"] == "UTC"
    assert commands.render_sacct_time(datetime(2026, 3, 2, tzinfo=UTC)) == "2026-03-02T00:00:00"
