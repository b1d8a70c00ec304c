"""Text tables of squeue, sacct, sbatch and the configuration to records. Pure, and total: nothing raises on garbage.

A row with a wrong number of fields is reported and dropped, never shifted; a word that is not known is kept raw. Field
names and separators are those of `slurm.commands`. Nodes are read by `slurm.parse_nodes`, JSON by `slurm.parse_json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, tzinfo
from operator import itemgetter

from slurm.commands import FIELD_SEPARATOR, SACCT_FIELDS, SQUEUE_FIELDS, row_end, sacct_delimiter
from slurm.hostlist import expand_nodes
from slurm.jobs import merge_rows
from slurm.parse_nodes import parse_nodes
from slurm.states import parse_job_state
from slurm.types import ENDED_STATES, ClusterFacts, JobFlag, JobListing, JobRecord, JobState, Unreadable
from slurm.values import (
    MAX_JOB_ID,
    NOTHING,
    ExitCode,
    is_number,
    parse_exit_code,
    parse_job_id,
    parse_time,
    plain_text,
    unreadable_row,
)

__all__ = [
    "comment_of_submit_line",
    "parse_cluster",
    "parse_config",
    "parse_default_partition",
    "parse_nodes",
    "parse_partitions",
    "parse_sacct",
    "parse_sbatch",
    "parse_squeue",
]

# ---------------------------------------------------------------- jobs


def parse_squeue(text: str, *, mark: str, tz: tzinfo = UTC) -> JobListing:
    """Jobs of `slurm.commands.squeue_argv(mark)`'s output, one record for each job id (see `slurm.jobs.merge_rows`)."""
    listing = _parse_jobs(text, row_end(mark), FIELD_SEPARATOR, _SqueueReader(tz).read)
    return JobListing(jobs=merge_rows(listing.jobs), unreadable=listing.unreadable)


def parse_sacct(text: str, *, mark: str, tz: tzinfo = UTC) -> JobListing:
    """Jobs of `slurm.commands.sacct_argv(since, mark)`'s output, one record for each run of a requeued job.

    Exit status: sacct before 25.11 subtracts 128 from a status of 128 and more (a shell's 137 is printed `9:0`, as an
    exit status of 9 would be), and there is no undoing it here: a status below 128 means "that, or that plus 128".
    Only FAILED with `0:0` is sure to have been 128.
    """
    delimiter = sacct_delimiter(mark)
    return _parse_jobs(text, delimiter, delimiter, lambda fields: _sacct_job(fields, tz))


def _parse_jobs(text: str, end: str, separator: str, build: Callable[[list[str]], JobRecord]) -> JobListing:
    jobs: list[JobRecord] = []
    unreadable: list[Unreadable] = []
    *rows, rest = text.split(f"{end}\n")
    for row in rows:
        try:
            jobs.append(build(row.split(separator)))
        except (ValueError, OverflowError) as error:
            unreadable.append(unreadable_row(row, error))
    if rest.strip():
        why = "the row has no end: output was cut, or the tool printed something else"
        unreadable.append(unreadable_row(rest, why))
    return JobListing(jobs=tuple(jobs), unreadable=tuple(unreadable))


def _require_fields(values: list[str], wanted: int) -> None:
    if len(values) != wanted:
        raise ValueError(f"{len(values)} fields, {wanted} asked for")


_SQUEUE_COLUMNS = (
    "JobID",
    "State",
    "RestartCnt",
    "exit_code",
    "UserName",
    "Partition",
    "NodeList",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "Reason",
    "Name",
    "Comment",
)
_pick_squeue = itemgetter(*map(SQUEUE_FIELDS.index, _SQUEUE_COLUMNS))


class _SqueueReader:
    """Reads the rows of one answer; node lists that come again are expanded once."""

    def __init__(self, tz: tzinfo) -> None:
        self._tz = tz
        self._expanded: dict[str, tuple[str, ...]] = {}

    def read(self, values: list[str]) -> JobRecord:
        _require_fields(values, len(SQUEUE_FIELDS))
        job_id, word, restarts, code, user, partition, nodes, submit, start, end, reason, name, comment = _pick_squeue(
            values
        )
        state, flags = parse_job_state(word)
        is_over = state in ENDED_STATES or JobFlag.COMPLETING in flags
        # A job that still runs has "0" as its exit code, which is no exit status.
        exit_code, exit_signal = parse_exit_code(code) if is_over else (None, None)
        # A job that waits may show nodes it had before or may get, and an estimated start.
        names = self._expand(nodes) if nodes and state is not JobState.PENDING else ()
        return JobRecord(
            job_id=parse_job_id(job_id),
            state=state,
            raw_state=word.strip(),
            flags=flags,
            name=plain_text(name),
            user=plain_text(user),
            partition=plain_text(partition),
            comment=plain_text(comment),
            reason=read_reason(reason),
            nodes=names,
            submit_at=parse_time(submit, self._tz),
            # Without nodes it never started: squeue then prints when it was cancelled.
            start_at=parse_time(start, self._tz) if names else None,
            # Of a job that runs squeue prints the end of its time limit.
            end_at=parse_time(end, self._tz) if is_over else None,
            limit_at=parse_time(end, self._tz) if state is JobState.RUNNING and not is_over else None,
            exit_code=exit_code,
            exit_signal=exit_signal,
            restarts=int(restarts) if is_number(restarts) else 0,
        )

    def _expand(self, text: str) -> tuple[str, ...]:
        names = self._expanded.get(text)
        if names is None:
            names = self._expanded[text] = expand_nodes(text)
        return names


def read_reason(text: str) -> str:
    """Why a job waits or ended, without brackets; empty for Slurm's "None"."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return "" if text == "None" else plain_text(text)


_SACCT_COLUMNS = (
    "JobIDRaw",
    "State",
    "ExitCode",
    "User",
    "Partition",
    "NodeList",
    "Submit",
    "Start",
    "End",
    "JobName",
    "Comment",
    "SubmitLine",
)
_pick_sacct = itemgetter(*map(SACCT_FIELDS.index, _SACCT_COLUMNS))


def _sacct_job(values: list[str], tz: tzinfo) -> JobRecord:
    _require_fields(values, len(SACCT_FIELDS))
    job_id, word, code, user, partition, nodes, submit, start, end, name, comment, submit_line = _pick_sacct(values)
    state, flags = parse_job_state(word)
    exit_code, exit_signal = _sacct_exit(code, state, flags)
    return JobRecord(
        job_id=parse_job_id(job_id),
        state=state,
        raw_state=word.strip(),
        flags=flags,
        name=plain_text(name),
        user=plain_text(user),
        partition=plain_text(partition),
        comment=plain_text(comment) or comment_of_submit_line(submit_line),
        nodes=expand_nodes(nodes),
        submit_at=parse_time(submit, tz),
        start_at=parse_time(start, tz),
        end_at=parse_time(end, tz),
        exit_code=exit_code,
        exit_signal=exit_signal,
    )


def _sacct_exit(code: str, state: JobState | None, flags: frozenset[JobFlag]) -> ExitCode:
    if state not in ENDED_STATES and JobFlag.COMPLETING not in flags:
        return None, None
    exit_code, exit_signal = parse_exit_code(code)
    if state is JobState.FAILED and exit_code == 0 and exit_signal == 0:
        return 128, exit_signal
    return exit_code, exit_signal


def comment_of_submit_line(line: str) -> str:
    """The `--comment=` of a submit line (Slurm keeps the arguments joined by blanks), or empty.

    What stands before the script and what are the script's own arguments can't be told apart. Our token is an option,
    and no option of a person's is one: the first that looks like a token counts, and without any the last comment.
    """
    found: list[str] = re.findall(r"(?:^|\s)--comment=(\S+)", line)
    tokens = [comment for comment in found if comment.startswith("sup:")]
    return next(iter(tokens or reversed(found)), "")


# ---------------------------------------------------------------- sbatch and the cluster

_SUBMITTED = re.compile(r"(?:Submitted batch job )?(\d{1,10})(?:;\S+| on cluster \S+)?")


def parse_sbatch(stdout: str) -> int | None:
    """The job id of sbatch's answer, or None when there is no line, or more than one, that can only be a job id.

    Site wrappers print banners with numbers in them on the same stream.
    """
    found = [_SUBMITTED.fullmatch(line.strip()) for line in stdout.splitlines()]
    ids = {int(match[1]) for match in found if match}
    return ids.pop() if len(ids) == 1 and all(0 < job_id < MAX_JOB_ID for job_id in ids) else None


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config` as a dictionary."""
    pairs = (line.partition(" = ") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def parse_partitions(text: str) -> tuple[str, ...]:
    """Names of `scontrol -o show partition`."""
    return tuple(re.findall(r"^PartitionName=(\S+)", text, flags=re.MULTILINE))


def parse_default_partition(text: str) -> str | None:
    """The partition with `Default=YES` in `scontrol -o show partition`; None when there is none."""
    found = re.search(r"^PartitionName=(\S+)(?=\s(?:.*\s)?Default=YES(?:\s|$))", text, flags=re.MULTILINE)
    return found[1] if found else None


def parse_cluster(config_text: str, partitions_text: str) -> ClusterFacts | Unreadable:
    """Facts of the cluster from its configuration and its partitions."""
    config = parse_config(config_text)
    if not config.get("ClusterName") or not config.get("SLURM_VERSION"):
        return unreadable_row(config_text, "no ClusterName or no SLURM_VERSION in the configuration")
    storage = config.get("AccountingStorageType", "").lower()
    return ClusterFacts(
        cluster=config["ClusterName"],
        version=config["SLURM_VERSION"],
        has_accounting=storage not in NOTHING and not storage.endswith("/none"),
        partitions=parse_partitions(partitions_text),
        default_partition=parse_default_partition(partitions_text),
        slurmd_timeout_s=_config_seconds(config, "SlurmdTimeout"),
        min_job_age_s=_config_seconds(config, "MinJobAge"),
        message_timeout_s=_config_seconds(config, "MessageTimeout"),
        slurmd_port=_config_seconds(config, "SlurmdPort"),
    )


def _config_seconds(config: Mapping[str, str], key: str) -> int | None:
    found = re.fullmatch(r"(\d{1,9})(?: sec)?", config.get(key, ""))
    return int(found[1]) if found else None
