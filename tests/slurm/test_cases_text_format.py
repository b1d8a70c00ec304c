"""What text of Slurm's tools looks like, as bug reports brought it, and how it is asked for so that it can't."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from slurm import commands
from slurm.client import CliClient
from slurm.commands import FIELD_SEPARATOR, SACCT_FIELDS, SQUEUE_FIELDS, row_end, sacct_delimiter
from slurm.errors import SlurmError
from slurm.parse import parse_sacct, parse_squeue
from slurm.run_tool import Completed
from slurm.values import parse_duration_s, parse_time
from supervisor.config import ConfigError, parse_run_file
from tests.core.builders import NOW

MARK = "MARK"
HOSTILE = {
    "SQUEUE_FORMAT": "%A %j",
    "SQUEUE_FORMAT2": "jobid",
    "SINFO_FORMAT": "%n",
    "SACCT_FORMAT": "jobid",
    "SLURM_CLUSTERS": "all",
    "SLURM_TIME_FORMAT": "relative",
    "SQUEUE_STATES": "R",
    "LC_ALL": "de_DE.UTF-8",
    "TZ": "Asia/Tokyo",
    "PATH": "/usr/bin",
}
READING: dict[str, Callable[[], tuple[str, ...]]] = {
    "squeue": lambda: commands.squeue_argv(MARK),
    "sacct": lambda: commands.sacct_argv(NOW, MARK),
    "nodes": commands.show_nodes_argv,
    "squeue as JSON": commands.squeue_json_argv,
    "sacct as JSON": lambda: commands.sacct_json_argv(NOW),
    "nodes as JSON": commands.show_nodes_json_argv,
    "sinfo as JSON": commands.sinfo_json_argv,
    "config": commands.show_config_argv,
    "partitions": commands.show_partitions_argv,
}


def squeue_row(*values: str) -> str:
    return FIELD_SEPARATOR.join(values) + row_end(MARK) + "\n"


def sacct_row(**fields: str) -> str:
    row = dict.fromkeys(SACCT_FIELDS, "") | fields
    return "".join(value + sacct_delimiter(MARK) for value in row.values()) + "\n"


def whole_row(**fields: str) -> str:
    return squeue_row(*(dict.fromkeys(SQUEUE_FIELDS, "") | {"JobID": "55", "State": "RUNNING"} | fields).values())


def test_fields_are_asked_for_at_their_full_width_with_a_separator() -> None:
    """TX-01: `-O field` without a colon is cut at 20 characters and runs into the next."""
    argv = commands.squeue_argv(MARK)
    assert "-O" in argv
    for field in argv[argv.index("-O") + 1].split(","):
        assert field.partition(":")[2].startswith(FIELD_SEPARATOR)


def test_a_row_with_too_few_fields_is_dropped_and_reported() -> None:
    """TX-01."""
    merged = squeue_row("gpu-node-0001.examplegpu:h100:8", "gpu:h100:3", "mixed")
    listing = parse_squeue(merged + whole_row(), mark=MARK)
    assert [job.job_id for job in listing.jobs] == [55]
    assert "3 fields" in listing.unreadable[0].why


@pytest.mark.parametrize("name", READING)
def test_reading_commands_say_what_they_want_themselves(name: str) -> None:
    """TX-03: no command relies on a default format, and none prints a header."""
    argv = READING[name]()
    if argv[0] == "squeue" and "--json" not in argv:
        assert {"-h", "-O"} <= set(argv)
    if argv[0] == "sacct" and "--json" not in argv:
        assert {"-n", "-o"} <= set(argv)


def test_settings_of_a_user_do_not_reach_a_reading_command() -> None:
    """TX-03, TX-11: the format of times is fixed as well."""
    seen: list[Mapping[str, str]] = []

    def run(argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        seen.append(env)
        return Completed(returncode=0)

    asked = CliClient(run=run, parent=HOSTILE)
    for question in (asked.fetch_jobs, asked.fetch_nodes, lambda: asked.fetch_ended_jobs(since=NOW)):
        try:
            question()
        except SlurmError:
            continue
    assert len(seen) == 3
    for env in seen:
        assert env == {"PATH": "/usr/bin", "LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("30:00", 1800), ("2-12", 216000), ("2-12:30", 217800), ("1-02:03:04", 93784)],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, seconds: int) -> None:
    """TX-05."""
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["soon", "1:2:3:4", "2-", "-5", "1h"])
def test_a_time_limit_that_cant_be_read_is_an_error_at_the_start_and_not_no_limit(text: str, tmp_path: Path) -> None:
    """TX-05."""
    assert parse_duration_s(text) is None
    run_file = (
        f'name = "gpt"\ncommand = ["true"]\nroot = "{tmp_path}"\n[nodes]\nmin = 1\nmax = 1\n'
        f'[slurm]\ntime_limit = "{text}"\n'
    )
    with pytest.raises(ConfigError, match="time_limit"):
        parse_run_file(run_file, path=tmp_path / "run.toml")


def test_a_record_over_several_lines_is_one_record() -> None:
    """TX-06."""
    rows = sacct_row(JobIDRaw="55", State="RUNNING", NodeList="gpu01", Comment="first line\n \n second line")
    rows += sacct_row(JobIDRaw="56", State="FAILED", NodeList="gpu02")
    listing = parse_sacct(rows, mark=MARK)
    assert [(job.job_id, job.raw_state, job.nodes) for job in listing.jobs] == [
        (55, "RUNNING", ("gpu01",)),
        (56, "FAILED", ("gpu02",)),
    ]
    assert listing.jobs[0].comment == "first line\n \n second line"
    assert listing.unreadable == ()


def test_a_job_name_with_a_separator_shifts_nothing() -> None:
    """TX-08."""
    (job,) = parse_sacct(
        sacct_row(JobIDRaw="55", State="RUNNING", JobName="sweep|lr=1", NodeList="gpu01"), mark=MARK
    ).jobs
    assert (job.name, job.nodes) == ("sweep|lr=1", ("gpu01",))


def test_a_row_with_too_many_fields_is_dropped_and_reported() -> None:
    """TX-08: a name may even hold the separator itself."""
    listing = parse_squeue(whole_row(Name=f"a{FIELD_SEPARATOR}b") + whole_row(JobID="56"), mark=MARK)
    assert ([job.job_id for job in listing.jobs], len(listing.unreadable)) == ([56], 1)


@pytest.mark.parametrize("start", ["Ystday 13:05", "1772445600", "13:05", "2026-03-02"])
def test_a_time_in_another_form_is_an_error_and_not_an_unknown_start(start: str) -> None:
    """TX-11."""
    with pytest.raises(ValueError, match="time"):
        parse_time(start)
    listing = parse_squeue(whole_row(StartTime=start, NodeList="gpu01"), mark=MARK)
    assert (listing.jobs, len(listing.unreadable)) == ((), 1)


@pytest.mark.parametrize("name", READING)
def test_no_question_carries_job_ids(name: str) -> None:
    """TX-12: everything is asked for at once, so that no id can be left out of an answer unsaid."""
    argv = READING[name]()
    assert not any(word.startswith(("-j", "--job")) for word in argv)
