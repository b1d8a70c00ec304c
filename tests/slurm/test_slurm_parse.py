"""Parsers on real output of Slurm 22.05.8 (tests/data/slurm-22.05) and on shapes met in bug reports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm import parse, states, values
from slurm.commands import FIELD_SEPARATOR, SACCT_FIELDS, SQUEUE_FIELDS, row_end, sacct_delimiter
from slurm.types import (
    ClusterFacts,
    JobFlag,
    JobListing,
    JobRecord,
    JobState,
    NodeAvailability,
    NodeBase,
    NodeRecord,
    Unreadable,
)

DATA = Path(__file__).parents[1] / "data" / "slurm-22.05"
MARK = "MARK"


def read(name: str) -> str:
    return (DATA / name).read_bytes().decode()


def squeue_jobs() -> dict[int, JobRecord]:
    return {job.job_id: job for job in parse.parse_squeue(read("squeue.txt"), mark=MARK).jobs}


def sacct_jobs() -> dict[int, JobRecord]:
    return {job.job_id: job for job in parse.parse_sacct(read("sacct.txt"), mark=MARK).jobs}


def nodes() -> dict[str, NodeRecord]:
    return {node.name: node for node in parse.parse_nodes(read("nodes.txt")).nodes}


def squeue_row(**changes: str) -> str:
    row = dict.fromkeys(SQUEUE_FIELDS, "") | {
        "JobID": "55",
        "State": "RUNNING",
        "SubmitTime": "2026-03-02T08:00:00",
        "NodeList": "gpu[01-02]",
        "Name": "run",
    }
    return FIELD_SEPARATOR.join({**row, **changes}.values()) + row_end(MARK) + "\n"


def sacct_row(**changes: str) -> str:
    row = dict.fromkeys(SACCT_FIELDS, "") | {
        "JobIDRaw": "55",
        "State": "RUNNING",
        "ExitCode": "0:0",
        "Submit": "2026-03-02T08:00:00",
        "NodeList": "gpu01",
    }
    return "".join(value + sacct_delimiter(MARK) for value in {**row, **changes}.values()) + "\n"


def one_squeue_job(**changes: str) -> JobRecord:
    (job,) = parse.parse_squeue(squeue_row(**changes), mark=MARK).jobs
    return job


def one_sacct_job(**changes: str) -> JobRecord:
    (job,) = parse.parse_sacct(sacct_row(**changes), mark=MARK).jobs
    return job


# ---------------------------------------------------------------- squeue


def test_every_row_of_a_real_squeue_is_read() -> None:
    listing = parse.parse_squeue(read("squeue.txt"), mark=MARK)
    assert sorted(job.job_id for job in listing.jobs) == list(range(1, 14))
    assert listing.unreadable == ()


def test_a_running_job_has_its_nodes_and_start_and_no_end() -> None:
    job = squeue_jobs()[10]
    assert (job.state, job.nodes, job.comment) == (JobState.RUNNING, ("n1", "n2"), "sup:run:7")
    assert job.start_at == datetime(2026, 11, 30, 3, 57, 55, tzinfo=UTC)
    assert (job.end_at, job.exit_code, job.is_live) == (None, None, True)


def test_a_waiting_job_has_no_start_and_no_nodes_even_where_slurm_plans_them() -> None:
    waiting = squeue_jobs()
    assert waiting[11].reason == "Dependency"
    assert waiting[11].is_pending
    for job_id in (9, 11, 12):
        assert (waiting[job_id].start_at, waiting[job_id].nodes) == (None, ())


def test_a_shell_exit_status_of_137_stays_137_in_squeue() -> None:
    assert (squeue_jobs()[3].exit_code, squeue_jobs()[3].exit_signal) == (137, 0)


def test_a_batch_script_killed_by_signal_9_shows_the_signal() -> None:
    assert (squeue_jobs()[5].exit_code, squeue_jobs()[5].exit_signal) == (0, 9)


def test_a_completing_job_hides_its_state_and_has_ended() -> None:
    job = squeue_jobs()[13]
    assert (job.state, job.raw_state, job.flags) == (None, "COMPLETING", frozenset({JobFlag.COMPLETING}))
    assert job.is_ended
    assert not job.is_live


def test_a_job_cancelled_before_it_started_has_no_start_and_no_nodes() -> None:
    job = squeue_jobs()[7]
    assert (job.state, job.start_at, job.nodes) == (JobState.CANCELLED, None, ())


def test_a_job_that_slurm_requeued_says_so() -> None:
    assert squeue_jobs()[9].restarts == 1


def test_separators_and_line_breaks_in_names_and_comments_shift_nothing() -> None:
    job = squeue_jobs()[8]
    assert (job.name, job.comment) == ("a|b,lr=1", "line one\n\n line|two\n999|RUNNING")
    assert 999 not in squeue_jobs()


def test_a_comment_cannot_forge_a_row_without_the_mark() -> None:
    forged = squeue_row(JobID="999").replace(MARK, "GUESS")
    listing = parse.parse_squeue(squeue_row(Comment="x\n" + forged), mark=MARK)
    assert [job.job_id for job in listing.jobs] == []
    assert len(listing.unreadable) == 1


def test_a_row_with_a_wrong_number_of_fields_is_reported_and_the_others_are_kept() -> None:
    short = FIELD_SEPARATOR.join(["56", "RUNNING", "gpu01"]) + row_end(MARK) + "\n"
    listing = parse.parse_squeue(short + squeue_row(), mark=MARK)
    assert [job.job_id for job in listing.jobs] == [55]
    assert "3 fields, 13 asked for" in listing.unreadable[0].why


def test_output_that_was_cut_in_the_middle_of_a_row_is_reported() -> None:
    listing = parse.parse_squeue(squeue_row() + squeue_row(JobID="56")[:40], mark=MARK)
    assert [job.job_id for job in listing.jobs] == [55]
    assert len(listing.unreadable) == 1


def test_an_empty_queue_is_an_empty_listing() -> None:
    assert parse.parse_squeue("", mark=MARK) == JobListing(jobs=())


@pytest.mark.parametrize("job_id", ["0", "-4", "x", "", "99999999999"])
def test_a_row_without_a_job_id_is_unreadable(job_id: str) -> None:
    assert parse.parse_squeue(squeue_row(JobID=job_id), mark=MARK).jobs == ()


def test_heterogeneous_and_array_ids_are_read_by_their_leading_number() -> None:
    assert one_squeue_job(JobID="21+0").job_id == 21
    assert one_squeue_job(JobID="7_3").job_id == 7


def test_a_time_in_a_users_own_format_makes_the_row_unreadable_not_its_start_unknown() -> None:
    for start in ("Ystday 13:05", "1772445600"):
        listing = parse.parse_squeue(squeue_row(StartTime=start), mark=MARK)
        assert (listing.jobs, len(listing.unreadable)) == ((), 1)


@pytest.mark.parametrize("reason", ["launch failed requeued held", "launch_failed_requeued_held"])
def test_a_job_held_after_a_failed_launch_keeps_its_reason_and_waits(reason: str) -> None:
    job = one_squeue_job(JobID="80634", State="PENDING", Reason=reason, RestartCnt="1")
    assert (job.reason, job.restarts, job.is_pending) == (reason, 1, True)


def test_the_reason_of_a_waiting_job_is_given_without_brackets() -> None:
    shown = one_squeue_job(State="PENDING", Reason="(ReqNodeNotAvail, UnavailableNodes:gpu[03-04])")
    assert shown.reason == "ReqNodeNotAvail, UnavailableNodes:gpu[03-04]"


# ---------------------------------------------------------------- job state words


@pytest.mark.parametrize(
    ("text", "state", "flags"),
    [
        ("RUNNING", JobState.RUNNING, set()),
        ("CANCELLED by 1001", JobState.CANCELLED, set()),
        ("CANCELLED+", JobState.CANCELLED, set()),
        ("PD", JobState.PENDING, set()),
        ("CG", None, {JobFlag.COMPLETING}),
        ("COMPLETING", None, {JobFlag.COMPLETING}),
        ("CONFIGURING", JobState.RUNNING, {JobFlag.CONFIGURING}),
        ("REQUEUED", JobState.PENDING, {JobFlag.REQUEUED}),
        ("REQUEUE_HOLD", JobState.PENDING, {JobFlag.REQUEUE_HOLD}),
        ("SPECIAL_EXIT", JobState.PENDING, {JobFlag.SPECIAL_EXIT}),
        ("REVOKED", None, {JobFlag.REVOKED}),
        ("RUNNING,COMPLETING", JobState.RUNNING, {JobFlag.COMPLETING}),
        ("PENDING+REQUEUED", JobState.PENDING, {JobFlag.REQUEUED}),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY, set()),
        ("SOMETHING_NEW", JobState.UNRECOGNIZED, set()),
        ("", JobState.UNRECOGNIZED, set()),
    ],
)
def test_state_words_become_a_base_state_and_flags(text: str, state: JobState | None, flags: set[JobFlag]) -> None:
    assert states.parse_job_state(text) == (state, frozenset(flags))


@pytest.mark.parametrize("text", ["SOMETHING_NEW", "", "REVOKED", "REQUEUED", "PENDING+REQUEUED", "STAGE_OUT"])
def test_a_word_that_does_not_say_ended_is_never_read_as_ended(text: str) -> None:
    job = one_squeue_job(State=text)
    assert (job.is_live, job.raw_state) == (True, text)


# ---------------------------------------------------------------- sacct


def test_every_row_of_a_real_sacct_is_read() -> None:
    listing = parse.parse_sacct(read("sacct.txt"), mark=MARK)
    assert [job.job_id for job in listing.jobs] == [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13]
    assert listing.unreadable == ()


def test_the_token_is_found_in_the_submit_line_where_the_database_keeps_no_comments() -> None:
    assert sacct_jobs()[10].comment == "sup:run:7"


@pytest.mark.parametrize(
    ("line", "comment"),
    [
        ("sbatch --comment=sup:gpt:1:65 t.sh --comment=mine", "sup:gpt:1:65"),
        ("sbatch --comment=sup:gpt:1:65 t.sh --comment=sup:other:7:65", "sup:gpt:1:65"),
        ("sbatch --comment=a --comment=b t.sh", "b"),
        ("sbatch t.sh x--comment=sup:gpt:1:65", ""),
    ],
)
def test_the_scripts_own_arguments_do_not_hide_the_token(line: str, comment: str) -> None:
    assert parse.comment_of_submit_line(line) == comment


def test_a_submit_line_with_line_breaks_is_one_row() -> None:
    job = sacct_jobs()[8]
    assert (job.state, job.name) == (JobState.RUNNING, "a|b,lr=1")


def test_sacct_before_25_11_prints_an_exit_status_of_137_as_9() -> None:
    # Nothing in the row tells it from an exit status of 9: the reader of `exit_code` has to know.
    assert (sacct_jobs()[3].exit_code, sacct_jobs()[3].exit_signal) == (9, 0)


def test_failed_with_exit_0_in_sacct_can_only_have_been_128() -> None:
    assert sacct_jobs()[4].exit_code == 128


def test_a_node_failure_is_told_by_its_state_not_by_its_exit_code() -> None:
    for exit_code in ("0:0", "1:0"):
        assert one_sacct_job(State="NODE_FAIL", ExitCode=exit_code).state is JobState.NODE_FAIL


@pytest.mark.parametrize("start", ["None", "Unknown"])
def test_a_job_cancelled_while_waiting_reads_without_start_and_nodes_in_sacct(start: str) -> None:
    job = one_sacct_job(State="CANCELLED by 1001", Start=start, NodeList="None assigned")
    assert (job.state, job.start_at, job.nodes) == (JobState.CANCELLED, None, ())


def test_all_runs_of_a_requeued_job_are_kept() -> None:
    rows = [
        sacct_row(State="NODE_FAIL", Submit="2026-03-02T08:00:00"),
        sacct_row(State="PREEMPTED", Submit="2026-03-02T10:00:00"),
        sacct_row(State="RUNNING", Submit="2026-03-02T12:00:00"),
    ]
    jobs = parse.parse_sacct("".join(rows), mark=MARK).jobs
    assert [job.raw_state for job in jobs] == ["NODE_FAIL", "PREEMPTED", "RUNNING"]
    assert len({job.submit_at for job in jobs}) == 3


def test_times_are_read_in_the_zone_they_were_printed_in() -> None:
    two_hours_east = timezone(timedelta(hours=2))
    assert values.parse_time("2026-03-02T08:00:00", two_hours_east) == datetime(2026, 3, 2, 6, tzinfo=UTC)


# ---------------------------------------------------------------- nodes


def test_nodes_are_read_with_base_state_flags_and_place() -> None:
    lost = nodes()["n4"]
    assert (lost.base, lost.flags) == (NodeBase.DOWN, frozenset({"NOT_RESPONDING"}))
    assert (lost.address, lost.host_name, lost.port, lost.cpus) == ("127.0.0.1", "head", 27924, 8)
    assert nodes()["n1"].partitions == ("main", "other")


def test_the_reason_is_given_apart_from_who_set_it() -> None:
    drained = nodes()["n3"]
    assert drained.reason == "sup#41 xid48: uncorrectable memory error"
    assert (drained.reason_user, drained.reason_at) == ("root", "2026-11-30T03:57:58")


def test_words_in_a_reason_of_several_lines_are_not_taken_for_fields() -> None:
    node = nodes()["n2"]
    assert (node.base, node.flags) == (NodeBase.MIXED, frozenset({"DRAIN"}))
    assert node.reason == "bad disk State=IDLE [eve@2020-01-01T00:00:00] see ticket"
    assert node.reason_user == "root"


def test_a_bracket_in_the_text_of_a_reason_does_not_say_who_set_it() -> None:
    row = "NodeName=n1 State=IDLE+DRAIN Reason=see [eve@2020-01-01T00:00:00] [ada@2026-03-02T08:00:00] Comment=x [y@z]"
    (node,) = parse.parse_nodes(row).nodes
    assert (node.reason, node.reason_user) == ("see [eve@2020-01-01T00:00:00]", "ada")


def test_control_characters_in_a_reason_make_no_node_of_their_own() -> None:
    (node,) = parse.parse_nodes("NodeName=n1 State=DOWN Reason=a\x0bNodeName=n9 State=IDLE\n").nodes
    assert (node.name, node.base) == ("n1", NodeBase.DOWN)


def test_a_reason_that_goes_on_in_a_new_line_makes_no_node_of_its_own() -> None:
    listing = parse.parse_nodes("NodeName=n1 State=IDLE+DRAIN Reason=first [root@2026-03-02T08:00:00]\nsecond\n")
    (node,) = listing.nodes
    assert (node.reason, node.reason_user) == ("first second", "root")


def test_a_node_listed_twice_counts_once() -> None:
    listing = parse.parse_nodes("NodeName=n1 State=IDLE\nNodeName=n1 State=DOWN\n")
    assert [node.base for node in listing.nodes] == [NodeBase.IDLE]
    assert "twice" in listing.unreadable[0].why


def test_a_row_without_a_state_is_reported_and_the_others_are_kept() -> None:
    listing = parse.parse_nodes("NodeName=n1 Arch=x86\nNodeName=n2 State=IDLE\n")
    assert [node.name for node in listing.nodes] == ["n2"]
    assert len(listing.unreadable) == 1


@pytest.mark.parametrize(
    ("text", "base", "flags"),
    [
        ("IDLE+DRAIN+NOT_RESPONDING", NodeBase.IDLE, {"DRAIN", "NOT_RESPONDING"}),
        ("IDLE*+DRAIN", NodeBase.IDLE, {"DRAIN", "NOT_RESPONDING"}),
        ("idle*", NodeBase.IDLE, {"NOT_RESPONDING"}),
        ("down*", NodeBase.DOWN, {"NOT_RESPONDING"}),
        ("alloc*", NodeBase.ALLOCATED, {"NOT_RESPONDING"}),
        ("allocated+", NodeBase.ALLOCATED, {"COMPLETING"}),
        ("alloc+", NodeBase.ALLOCATED, {"COMPLETING"}),
        ("ALLOCATED+COMPLETING", NodeBase.ALLOCATED, {"COMPLETING"}),
        ("IDLE+", NodeBase.IDLE, set()),
        ("mix@", NodeBase.MIXED, {"REBOOT_REQUESTED"}),
        ("reboot^", NodeBase.UNKNOWN, {"REBOOT_ISSUED"}),
        ("DRAINED$", NodeBase.UNKNOWN, {"DRAIN", "MAINTENANCE"}),
        ("drng", NodeBase.ALLOCATED, {"DRAIN"}),
        ("failg", NodeBase.ALLOCATED, {"FAIL"}),
        ("IDLE+?", NodeBase.IDLE, {"?"}),
        ("IDLE+SOMETHING_NEW", NodeBase.IDLE, {"SOMETHING_NEW"}),
        ("SOMETHING_NEW", NodeBase.UNRECOGNIZED, set()),
        ("", NodeBase.UNRECOGNIZED, set()),
    ],
)
def test_node_states_become_a_base_and_flags(text: str, base: NodeBase, flags: set[str]) -> None:
    assert states.parse_node_state(text) == (base, frozenset(flags))


@pytest.mark.parametrize(
    ("text", "availability"),
    [
        ("IDLE", "usable"),
        ("IDLE+PLANNED", "usable"),
        ("IDLE+CLOUD+DYNAMIC_NORM", "usable"),
        ("MIXED", "usable"),
        ("ALLOCATED+COMPLETING", "usable"),
        ("MIXED+DRAIN", "draining"),
        ("ALLOCATED+DRAIN", "draining"),
        ("MIXED+DRAIN+COMPLETING", "draining"),
        ("IDLE+DRAIN+COMPLETING", "draining"),
        ("IDLE+DRAIN", "drained"),
        ("drain", "drained"),
        ("drng", "draining"),
        ("draining*", "down"),
        ("drained$", "drained"),
        ("fail", "drained"),
        ("failg", "draining"),
        ("DOWN", "down"),
        ("DOWN+DRAIN", "down"),
        ("DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING", "down"),
        ("IDLE+NOT_RESPONDING", "down"),
        ("IDLE+DRAIN+NOT_RESPONDING", "down"),
        ("IDLE+INVALID_REG", "down"),
        ("IDLE+DYNAMIC_NORM+MAINTENANCE+RESERVED+PLANNED", "unavailable"),
        ("mix@", "unavailable"),
        ("alloc@", "unavailable"),
        ("reboot^", "unavailable"),
        ("boot^", "unavailable"),
        ("REBOOT*+DRAIN", "unavailable"),
        ("IDLE+DRAIN+REBOOT_ISSUED+NOT_RESPONDING", "unavailable"),
        ("IDLE+POWERING_UP+NOT_RESPONDING", "unavailable"),
        ("IDLE+COMPLETING", "unavailable"),
        ("IDLE+RESERVED", "unavailable"),
        ("IDLE+BLOCKED", "unavailable"),
        ("IDLE+EXTERNAL", "unavailable"),
        ("IDLE+?", "unavailable"),
        ("IDLE+SOMETHING_NEW", "unavailable"),
        ("FUTURE", "unavailable"),
        ("UNKNOWN", "unavailable"),
        ("SOMETHING_NEW", "unavailable"),
    ],
)
def test_base_and_flags_say_what_a_node_can_be_used_for(text: str, availability: str) -> None:
    assert states.classify_node(*states.parse_node_state(text)) is NodeAvailability(availability)


def test_only_flags_that_this_release_does_not_know_are_unknown() -> None:
    assert states.unknown_flags(frozenset({"DRAIN", "PLANNED", "SOMETHING_NEW", "?"})) == {"SOMETHING_NEW", "?"}


def test_every_real_node_is_classified() -> None:
    assert {name: node.availability.value for name, node in nodes().items()} == {
        "n1": "usable",
        "n2": "draining",
        "n3": "drained",
        "n4": "down",
    }


# ---------------------------------------------------------------- sbatch, times, cluster


@pytest.mark.parametrize(
    ("stdout", "job_id"),
    [
        ("7787232\n", 7787232),
        ("7787232;east\n", 7787232),
        ("Submitted batch job 42\n", 42),
        ("Submitted batch job 42 on cluster east\n", 42),
        ("   Welcome to the Apollo3 machine\n--> Verifying quota is at 0.00%...OK\n519605\n", 519605),
        ("519605\nSubmitted batch job 519605\n", 519605),
        ("", None),
        ("no id here 12\n", None),
        ("12\n519605\n", None),
        ("0\n", None),
        ("99999999999\n", None),
    ],
)
def test_the_job_id_is_read_only_where_one_line_can_be_nothing_else(stdout: str, job_id: int | None) -> None:
    assert parse.parse_sbatch(stdout) == job_id


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("30:00", 1800),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("1-02:03:04", 93784),
        ("1:00:00", 3600),
        ("", None),
        ("soon", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert values.parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:9", (0, 9)),
        ("137:0", (137, 0)),
        ("35072", (137, 0)),
        ("9", (0, 9)),
        ("", (None, None)),
        ("x:1", (None, None)),
    ],
)
def test_exit_codes_are_read_in_both_forms(text: str, expected: tuple[int | None, int | None]) -> None:
    assert values.parse_exit_code(text) == expected


def test_the_facts_of_a_cluster_are_read_from_its_configuration() -> None:
    assert parse.parse_cluster(read("config.txt"), read("partitions.txt")) == ClusterFacts(
        cluster="acct",
        version="22.05.8",
        has_accounting=True,
        partitions=("main", "other"),
        slurmd_timeout_s=10,
        min_job_age_s=300,
        message_timeout_s=10,
        default_partition="main",
        slurmd_port=6818,
    )


@pytest.mark.parametrize("storage", ["accounting_storage/none", "(null)"])
def test_a_cluster_without_accounting_is_recognised(storage: str) -> None:
    config = read("config.txt").replace("accounting_storage/slurmdbd", storage)
    facts = parse.parse_cluster(config, "")
    assert isinstance(facts, ClusterFacts)
    assert not facts.has_accounting


# ---------------------------------------------------------------- garbage

_WORDS = st.sampled_from(
    [
        "State=",
        "NodeName=",
        "Reason=",
        " [root@2026-03-02T08:00:00]",
        "RUNNING",
        "2026-03-02T08:00:00",
        "0001-01-01T00:00:00",
        FIELD_SEPARATOR,
        row_end(MARK),
        sacct_delimiter(MARK),
        *"\n+*[]-,1n",
    ]
)
_GARBAGE = st.one_of(st.text(), st.lists(st.one_of(_WORDS, st.text(max_size=3))).map("".join))


@given(text=_GARBAGE)
def test_no_garbage_makes_a_parser_raise(text: str) -> None:
    parse.parse_squeue(text, mark=MARK)
    parse.parse_sacct(text, mark=MARK)
    parse.parse_nodes(text)
    states.classify_node(*states.parse_node_state(text))
    states.parse_job_state(text)
    values.parse_exit_code(text)
    values.parse_duration_s(text)
    parse.parse_sbatch(text)
    assert isinstance(parse.parse_cluster(text, text), ClusterFacts | Unreadable)


_FIELD = st.one_of(
    _WORDS.filter(lambda word: "\x1f" not in word), st.text(alphabet=st.characters(exclude_characters="\x1f"))
)


@given(values=st.lists(_FIELD, min_size=len(SQUEUE_FIELDS), max_size=len(SQUEUE_FIELDS)))
def test_a_row_of_any_values_is_one_job_or_one_unreadable_row(values: list[str]) -> None:
    listing = parse.parse_squeue(FIELD_SEPARATOR.join(values) + row_end(MARK) + "\n", mark=MARK)
    assert len(listing.jobs) + len(listing.unreadable) == 1


@given(
    name=st.text(alphabet=st.characters(exclude_characters="\x1f")),
    comment=st.text(alphabet=st.characters(exclude_characters="\x1f")),
)
def test_free_text_comes_back_as_it_was_given(name: str, comment: str) -> None:
    job = one_squeue_job(Name=name, Comment=comment)
    assert (job.job_id, job.state, job.nodes) == (55, JobState.RUNNING, ("gpu01", "gpu02"))
    if comment.strip() not in {"(null)", "N/A"}:
        assert job.comment == comment.strip()


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("(Resources)", "Resources"),
        ("RaisedSignal:9(Killed)", "RaisedSignal:9(Killed)"),
        ("(ReqNodeNotAvail, UnavailableNodes:gpu[03-04])", "ReqNodeNotAvail, UnavailableNodes:gpu[03-04]"),
        ("None", ""),
    ],
)
def test_a_reason_loses_the_brackets_around_it_and_none_of_its_own(printed: str, reason: str) -> None:
    assert parse.read_reason(printed) == reason
