"""Output of Slurm's tools to records. Pure, and total: garbage becomes `Unreadable`, nothing raises.

A row with a wrong number of fields is reported and dropped, never shifted; a word that is not known is kept raw. Field
names and separators are those of `slurm.commands`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, tzinfo

from slurm.commands import FIELD_SEPARATOR, SACCT_FIELDS, SQUEUE_FIELDS, row_end, sacct_delimiter
from slurm.hostlist import expand_nodes
from slurm.types import (
    ENDED_STATES,
    ClusterFacts,
    JobFlag,
    JobListing,
    JobRecord,
    JobState,
    NodeAvailability,
    NodeBase,
    NodeListing,
    NodeRecord,
    Unreadable,
)

_EVIDENCE_CHARS = 400
_NOTHING = frozenset({"", "(null)", "n/a", "none", "unknown", "none assigned"})
_MAX_JOB_ID = 2**32


# ---------------------------------------------------------------- job states

_COMPACT_STATES = {
    "PD": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "CD": "COMPLETED",
    "CA": "CANCELLED",
    "F": "FAILED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
    "PR": "PREEMPTED",
    "BF": "BOOT_FAIL",
    "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY",
    "CG": "COMPLETING",
    "CF": "CONFIGURING",
    "RQ": "REQUEUED",
    "RH": "REQUEUE_HOLD",
    "RF": "REQUEUE_FED",
    "SE": "SPECIAL_EXIT",
    "RD": "RESV_DEL_HOLD",
    "SO": "STAGE_OUT",
    "RS": "RESIZING",
    "ST": "STOPPED",
    "SI": "SIGNALING",
    "RV": "REVOKED",
}

# The base state that a flag shown alone stands for. COMPLETING, STAGE_OUT and REVOKED hide it: None.
_BASE_OF_FLAG = {
    JobFlag.CONFIGURING: JobState.RUNNING,
    JobFlag.RESIZING: JobState.RUNNING,
    JobFlag.STOPPED: JobState.RUNNING,
    JobFlag.SIGNALING: JobState.RUNNING,
    JobFlag.REQUEUED: JobState.PENDING,
    JobFlag.REQUEUE_HOLD: JobState.PENDING,
    JobFlag.REQUEUE_FED: JobState.PENDING,
    JobFlag.SPECIAL_EXIT: JobState.PENDING,
    JobFlag.RESV_DEL_HOLD: JobState.PENDING,
    JobFlag.EXPEDITING: JobState.PENDING,
}

_STATES = {state.value: state for state in JobState if state is not JobState.UNRECOGNIZED}
_FLAGS = {flag.value: flag for flag in JobFlag}


def parse_job_state(text: str) -> tuple[JobState | None, frozenset[JobFlag]]:
    """Base state and flags of a state word of squeue or sacct, long or compact, or of several joined by `+` or `,`.

    None as base: only a flag was shown and it hides the base state (COMPLETING). `UNRECOGNIZED`: a word of another
    release. `CANCELLED by 1001` and the cut form `CANCELLED+` are CANCELLED.
    """
    words = [_COMPACT_STATES.get(word, word) for word in _state_words(text)]
    states = [_STATES[word] for word in words if word in _STATES]
    flags = frozenset(_FLAGS[word] for word in words if word in _FLAGS)
    if states:
        return states[0], flags
    if not words or any(word not in _FLAGS for word in words):
        return JobState.UNRECOGNIZED, flags
    return next((_BASE_OF_FLAG[flag] for flag in sorted(flags) if flag in _BASE_OF_FLAG), None), flags


def _state_words(text: str) -> list[str]:
    without_user = re.sub(r"\s+by\s+.*$", "", text.strip(), flags=re.IGNORECASE | re.DOTALL)
    return [word.upper() for word in re.split(r"[+,\s]+", without_user) if word]


# ---------------------------------------------------------------- small values


def parse_time(text: str, tz: tzinfo = UTC) -> datetime | None:
    """An instant in UTC from Slurm's standard form, printed in zone `tz`; None for Slurm's words for "not known".

    Raises:
        ValueError: any other form (a user's SLURM_TIME_FORMAT): an error, not "no start time".
    """
    if text.strip().lower() in _NOTHING:
        return None
    return datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S").replace(tzinfo=tz).astimezone(UTC)


def parse_exit_code(text: str) -> tuple[int | None, int | None]:
    """(exit status, signal) of `A:B`, or of the wait(2) status word that squeue prints (35072 is exit status 137)."""
    status, colon, signal = text.strip().partition(":")
    if not status.isdecimal() or (colon and not signal.isdecimal()):
        return None, None
    if colon:
        return _in_range(int(status), 256), _in_range(int(signal), 1000)
    raw = int(status)
    return (raw >> 8, raw & 0x7F) if raw < 2**16 else (None, None)


def _in_range(value: int, limit: int) -> int | None:
    return value if value < limit else None


def parse_duration_s(text: str) -> int | None:
    """Seconds of a time limit as sbatch reads it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s; None for any other.

    UNLIMITED and INFINITE are no number of seconds either: ask for them by name first.
    """
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text.strip())
    if found is None:
        return None
    days, first, second, third = (int(group) if group is not None else None for group in found.groups())
    if days is not None:
        return ((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return ((first or 0) * 60 + (second or 0)) * 60 + third
    return (first or 0) * 60 + (second or 0)


def _text(value: str) -> str:
    return "" if value.strip() in {"(null)", "N/A"} else value.strip()


def _job_id(text: str) -> int:
    """The number of a job id; the leading one of `21+0` (heterogeneous job) and `7_3` (array element)."""
    found = re.fullmatch(r"(\d{1,10})(?:[+_]\S*)?", text.strip())
    if found is None or not 0 < int(found[1]) < _MAX_JOB_ID:
        raise ValueError(f"{text[:40]!r} is not a job id")
    return int(found[1])


def _unreadable(text: str, why: object) -> Unreadable:
    return Unreadable(text=text[:_EVIDENCE_CHARS], why=str(why)[:_EVIDENCE_CHARS])


# ---------------------------------------------------------------- jobs


def parse_squeue(text: str, *, mark: str, tz: tzinfo = UTC) -> JobListing:
    """Jobs of `slurm.commands.squeue_argv(mark)`'s output."""
    return _parse_jobs(text, row_end(mark), FIELD_SEPARATOR, lambda fields: _squeue_job(fields, tz))


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
            unreadable.append(_unreadable(row, error))
    if rest.strip():
        unreadable.append(_unreadable(rest, "the row has no end: output was cut, or the tool printed something else"))
    return JobListing(jobs=tuple(jobs), unreadable=tuple(unreadable))


def _named(names: tuple[str, ...], values: list[str]) -> Mapping[str, str]:
    if len(values) != len(names):
        raise ValueError(f"{len(values)} fields, {len(names)} asked for")
    return dict(zip(names, values, strict=True))


def _squeue_job(values: list[str], tz: tzinfo) -> JobRecord:
    row = _named(SQUEUE_FIELDS, values)
    state, flags = parse_job_state(row["State"])
    exit_code, exit_signal = _exit_of(row["exit_code"], state, flags)
    # A job that waits may show nodes it had before or may get, and an estimated start.
    nodes = expand_nodes(row["NodeList"]) if state is not JobState.PENDING else ()
    return JobRecord(
        job_id=_job_id(row["JobID"]),
        state=state,
        raw_state=row["State"].strip(),
        flags=flags,
        name=_text(row["Name"]),
        user=_text(row["UserName"]),
        partition=_text(row["Partition"]),
        comment=_text(row["Comment"]),
        reason="" if row["Reason"].strip() == "None" else _text(row["Reason"]).strip("()"),
        nodes=nodes,
        submit_at=parse_time(row["SubmitTime"], tz),
        # Without nodes it never started: squeue then prints when it was cancelled.
        start_at=parse_time(row["StartTime"], tz) if nodes else None,
        # Of a job that runs squeue prints the end of its time limit.
        end_at=parse_time(row["EndTime"], tz) if _is_over(state, flags) else None,
        exit_code=exit_code,
        exit_signal=exit_signal,
        restarts=int(row["RestartCnt"]) if row["RestartCnt"].strip().isdecimal() else 0,
    )


def _is_over(state: JobState | None, flags: frozenset[JobFlag]) -> bool:
    return state in ENDED_STATES or JobFlag.COMPLETING in flags


def _exit_of(text: str, state: JobState | None, flags: frozenset[JobFlag]) -> tuple[int | None, int | None]:
    # A job that still runs has "0" there, which is no exit status.
    return parse_exit_code(text) if _is_over(state, flags) else (None, None)


def _sacct_job(values: list[str], tz: tzinfo) -> JobRecord:
    row = _named(SACCT_FIELDS, values)
    state, flags = parse_job_state(row["State"])
    exit_code, exit_signal = _exit_of(row["ExitCode"], state, flags)
    if state is JobState.FAILED and exit_code == 0 and exit_signal == 0:
        exit_code = 128
    return JobRecord(
        job_id=_job_id(row["JobIDRaw"]),
        state=state,
        raw_state=row["State"].strip(),
        flags=flags,
        name=_text(row["JobName"]),
        user=_text(row["User"]),
        partition=_text(row["Partition"]),
        comment=_text(row["Comment"]) or comment_of_submit_line(row["SubmitLine"]),
        nodes=expand_nodes(row["NodeList"]),
        submit_at=parse_time(row["Submit"], tz),
        start_at=parse_time(row["Start"], tz),
        end_at=parse_time(row["End"], tz),
        exit_code=exit_code,
        exit_signal=exit_signal,
    )


def comment_of_submit_line(line: str) -> str:
    """The value of the last `--comment=` on a submit line (Slurm keeps the arguments joined by blanks), or empty."""
    found = re.findall(r"(?:^|\s)--comment=(\S+)", line)
    return str(found[-1]) if found else ""


# ---------------------------------------------------------------- nodes

# One letter that scontrol (old releases) and sinfo hang on a word, and the flag it stands for.
_NODE_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}

# sinfo's collapsed words. A word that hides the base state has base UNKNOWN: a drained node may be down as well.
_NODE_WORDS: Mapping[str, tuple[NodeBase | None, frozenset[str]]] = {
    "ALLOC": (NodeBase.ALLOCATED, frozenset()),
    "MIX": (NodeBase.MIXED, frozenset()),
    "UNK": (NodeBase.UNKNOWN, frozenset()),
    "ERR": (NodeBase.ERROR, frozenset()),
    "FUTR": (NodeBase.FUTURE, frozenset()),
    "DRAINED": (None, frozenset({"DRAIN"})),
    "DRAINING": (NodeBase.ALLOCATED, frozenset({"DRAIN"})),
    "DRNG": (NodeBase.ALLOCATED, frozenset({"DRAIN"})),
    "FAILING": (NodeBase.ALLOCATED, frozenset({"FAIL"})),
    "FAILG": (NodeBase.ALLOCATED, frozenset({"FAIL"})),
    "COMP": (NodeBase.IDLE, frozenset({"COMPLETING"})),
    "MAINT": (None, frozenset({"MAINTENANCE"})),
    "RESV": (NodeBase.IDLE, frozenset({"RESERVED"})),
    "PLND": (NodeBase.IDLE, frozenset({"PLANNED"})),
    "BOOT": (None, frozenset({"REBOOT_ISSUED"})),
    "REBOOT": (None, frozenset({"REBOOT_ISSUED"})),
    "INVAL": (None, frozenset({"INVALID_REG"})),
    "NO_RESPOND": (None, frozenset({"NOT_RESPONDING"})),
}

_NODE_BASES = {base.value: base for base in NodeBase if base is not NodeBase.UNRECOGNIZED}

# Flags that say nothing about whether the node can be used.
_HARMLESS_FLAGS = frozenset(
    {"CLOUD", "DYNAMIC_FUTURE", "DYNAMIC_NORM", "PLANNED", "PERFCTRS", "RESUME", "UNDRAIN", "COMPLETING"}
)
_KNOWN_FLAGS = _HARMLESS_FLAGS | {
    "DRAIN",
    "FAIL",
    "NOT_RESPONDING",
    "INVALID_REG",
    "POWER_DOWN",
    "POWERED_DOWN",
    "POWERING_DOWN",
    "POWER_DRAIN",
    "POWER_UP",
    "POWERING_UP",
    "MAINTENANCE",
    "RESERVED",
    "REBOOT_REQUESTED",
    "REBOOT_ISSUED",
    "BLOCKED",
    "EXTERNAL",
}

_Rule = tuple[Callable[[NodeBase, frozenset[str]], bool], NodeAvailability]

# First hit wins.
_NODE_RULES: tuple[_Rule, ...] = (
    # A planned reboot passes through NOT_RESPONDING and DRAIN; neither is a failure.
    (lambda _, flags: bool(flags & {"REBOOT_ISSUED", "POWERING_UP"}), NodeAvailability.UNAVAILABLE),
    (lambda base, _: base in {NodeBase.DOWN, NodeBase.ERROR}, NodeAvailability.DOWN),
    (
        lambda _, flags: bool(flags & {"NOT_RESPONDING", "INVALID_REG", "POWERED_DOWN", "POWERING_DOWN"}),
        NodeAvailability.DOWN,
    ),
    # Work is still on it: no repair, no reset, until it is DRAINED.
    (lambda base, flags: _has_drain(flags) and _has_work(base, flags), NodeAvailability.DRAINING),
    (lambda _, flags: _has_drain(flags), NodeAvailability.DRAINED),
    (lambda _, flags: bool(flags - _HARMLESS_FLAGS), NodeAvailability.UNAVAILABLE),  # unknown flags as well
    (lambda base, flags: base is NodeBase.IDLE and "COMPLETING" in flags, NodeAvailability.UNAVAILABLE),
    (
        lambda base, _: base in {NodeBase.IDLE, NodeBase.MIXED, NodeBase.ALLOCATED},
        NodeAvailability.USABLE,
    ),
)


def classify_node(base: NodeBase, flags: frozenset[str]) -> NodeAvailability:
    """What a node can be used for now. A flag that is not known makes it unavailable, never drained or down."""
    return next((found for holds, found in _NODE_RULES if holds(base, flags)), NodeAvailability.UNAVAILABLE)


def _has_drain(flags: frozenset[str]) -> bool:
    return bool(flags & {"DRAIN", "FAIL"})


def _has_work(base: NodeBase, flags: frozenset[str]) -> bool:
    return base in {NodeBase.ALLOCATED, NodeBase.MIXED} or "COMPLETING" in flags


def unknown_flags(flags: frozenset[str]) -> frozenset[str]:
    """The flags that this release does not know: worth one log line each."""
    return flags - _KNOWN_FLAGS


def parse_node_state(text: str) -> tuple[NodeBase, frozenset[str]]:
    """Base state and flags of `IDLE+DRAIN+NOT_RESPONDING`, of the older `IDLE*+DRAIN`, and of sinfo's single words.

    sinfo shows at most one suffix: the absence of `*` in its words does not mean that the node responds.
    """
    base: NodeBase | None = None
    flags: set[str] = set()
    words = text.strip().upper().split("+")
    if len(words) == 2 and not words[1] and words[0].startswith("ALLOC"):
        flags.add("COMPLETING")  # `allocated+`: there the plus is a suffix, not a separator
    for word in words:
        plain = word.strip().rstrip("".join(_NODE_SUFFIXES))
        flags.update(_NODE_SUFFIXES[letter] for letter in word.strip()[len(plain) :])
        known, implied = _node_word(plain, is_first=word is words[0])
        base = base or known
        flags |= implied
    return base or (NodeBase.UNKNOWN if flags else NodeBase.UNRECOGNIZED), frozenset(flags)


def _node_word(word: str, *, is_first: bool) -> tuple[NodeBase | None, frozenset[str]]:
    if not word:
        return None, frozenset()
    if word in _NODE_BASES:
        return _NODE_BASES[word], frozenset()
    if word in _NODE_WORDS:
        return _NODE_WORDS[word]
    if is_first and word not in _KNOWN_FLAGS:
        return NodeBase.UNRECOGNIZED, frozenset()
    return None, frozenset({word})


_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z_]*)=")
_FIELD_AFTER_REASON = r" (?:Comment|Extra|InstanceId|InstanceType|ReservationName|ResumeAfterTime)="
_AFTER_REASON = re.compile(_FIELD_AFTER_REASON)
_DRAINED_BY = re.compile(rf" \[([^\s@\[\]]+)@([^\s\[\]]+)\](?=\s*$|\s\s|{_FIELD_AFTER_REASON})")


def parse_nodes(text: str) -> NodeListing:
    """Nodes of `scontrol -o show node`. A node that is listed twice counts once; the second row is reported."""
    nodes: dict[str, NodeRecord] = {}
    unreadable: list[Unreadable] = []
    for row in _node_rows(text):
        try:
            node = _node(row)
        except ValueError as error:
            unreadable.append(_unreadable(row, error))
            continue
        if node.name in nodes:
            unreadable.append(_unreadable(row, f"node {node.name} is listed twice"))
        else:
            nodes[node.name] = node
    return NodeListing(nodes=tuple(nodes.values()), unreadable=tuple(unreadable))


def _node_rows(text: str) -> Iterator[str]:
    """One node each; a line that does not start a node goes on with the one before (reasons may have line breaks)."""
    row = ""
    for line in text.split("\n"):
        if line.startswith("NodeName=") and row.strip():
            yield row
            row = line
        else:
            row = f"{row}  {line}" if row else line
    if row.strip():
        yield row


def _node(row: str) -> NodeRecord:
    head, _, tail = row.partition(" Reason=")
    fields = _keyed(head)
    if "NodeName" not in fields or "State" not in fields:
        raise ValueError("no NodeName= or no State=")
    base, flags = parse_node_state(fields["State"])
    reason, reason_user, reason_at = _parse_reason(tail)
    return NodeRecord(
        name=fields["NodeName"],
        base=base,
        flags=flags,
        raw_state=fields["State"],
        address=_text(fields.get("NodeAddr", "")),
        host_name=_text(fields.get("NodeHostName", "")),
        port=_int(fields, "Port"),
        partitions=tuple(p for p in _text(fields.get("Partitions", "")).split(",") if p),
        reason=reason,
        reason_user=reason_user,
        reason_at=reason_at,
        cpus=_int(fields, "CPUTot") or 0,
        memory_mb=_int(fields, "RealMemory") or 0,
        gres=_text(fields.get("Gres", "")),
        boot_at=_text(fields.get("BootTime", "")),
        version=_text(fields.get("Version", "")),
    )


def _keyed(text: str) -> dict[str, str]:
    """`A=1 B=some words C=` to a dictionary; of a key that comes twice the first counts."""
    found = list(_KEY.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    pairs = [(match[1], text[match.end() : end].strip()) for match, end in zip(found, ends, strict=True)]
    return dict(reversed(pairs))


def _int(fields: Mapping[str, str], key: str) -> int | None:
    value = fields.get(key, "")
    return int(value) if value.isdecimal() and len(value) < 19 else None


def _parse_reason(tail: str) -> tuple[str, str, str]:
    """(reason, user, time) of what follows `Reason=`.

    Slurm puts ` [user@time]` behind the first line of a reason; its further lines follow after eight blanks, then other
    fields. So of several such brackets the one that ends a line is Slurm's, and another is part of the text.
    """
    by = _DRAINED_BY.search(tail)
    if by is None:
        return " ".join(tail.split()), "", ""
    following = _AFTER_REASON.search(tail, by.end())
    end = following.start() if following else len(tail)
    return " ".join((tail[: by.start()] + " " + tail[by.end() : end]).split()), by[1], by[2]


# ---------------------------------------------------------------- sbatch and the cluster

_SUBMITTED = re.compile(r"(?:Submitted batch job )?(\d{1,10})(?:;\S+| on cluster \S+)?")


def parse_sbatch(stdout: str) -> int | None:
    """The job id of sbatch's answer, or None when there is no line, or more than one, that can only be a job id.

    Site wrappers print banners with numbers in them on the same stream.
    """
    found = [_SUBMITTED.fullmatch(line.strip()) for line in stdout.splitlines()]
    ids = {int(match[1]) for match in found if match}
    return ids.pop() if len(ids) == 1 and all(0 < job_id < _MAX_JOB_ID for job_id in ids) else None


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
        return _unreadable(config_text, "no ClusterName or no SLURM_VERSION in the configuration")
    storage = config.get("AccountingStorageType", "").lower()
    return ClusterFacts(
        cluster=config["ClusterName"],
        version=config["SLURM_VERSION"],
        has_accounting=storage not in _NOTHING and not storage.endswith("/none"),
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
