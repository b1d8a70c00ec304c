"""`SlurmClient` that reads through pyslurm, in a child process that may die; what changes something is CliClient's.

`choose_client` decides which client fits this machine and cluster. The child is `slurm.pyslurm_child`: importing
pyslurm can end its process, and a load can hang, so nothing of it happens here. A dead or late child is a source that
did not answer; the next question starts a new one.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from slurm import commands
from slurm.client import SlurmClient
from slurm.errors import SlurmError, SlurmUnavailable, SlurmUnreadable
from slurm.hostlist import expand_nodes
from slurm.jobs import merge_rows
from slurm.json_form import Notice
from slurm.parse import read_reason
from slurm.states import parse_job_state, parse_node_state
from slurm.types import (
    ENDED_STATES,
    ClusterFacts,
    Identity,
    JobDescription,
    JobFlag,
    JobListing,
    JobRecord,
    JobState,
    NodeListing,
    NodeRecord,
    SubmitRequest,
    Submitted,
    Unreadable,
)

T = TypeVar("T")
Row = Mapping[str, Any]

CHECK_LIMIT_S = 5.0  # for choosing: a controller that does not answer by then leaves the command line

_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_EVIDENCE_BYTES = 1000
_FAILURES_TO_CLI = 3  # in a row: then the command line is asked, so that a broken library blinds nobody for long
_RETRY_AFTER_S = 600.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)


# ---------------------------------------------------------------- which client


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The client to use, what it is, and why."""

    client: SlurmClient
    kind: Literal["cli", "pyslurm"]
    reason: str


def choose_client(
    wanted: Literal["auto", "cli", "pyslurm"],
    *,
    cli: SlurmClient,
    parent: Mapping[str, str],
    timeout_s: float,
    check_limit_s: float = CHECK_LIMIT_S,
    on_notice: Notice = lambda _sentence: None,
) -> Choice:
    """The client by pyslurm when it imports and is of the cluster's release, else `cli`; never an error.

    A cluster that does not say its release now is asked by `cli`, and by pyslurm once it has said that it fits.
    `parent`: the environment that PATH, SLURM_CONF and PYTHONPATH are taken from. Without pyslurm this takes no time;
    with it at most `check_limit_s`. `on_notice` is told, once each time, when a chosen pyslurm is given up for a while.
    """
    if wanted == "cli":
        return Choice(client=cli, kind="cli", reason="as configured")
    if not is_findable(parent):
        return Choice(client=cli, kind="cli", reason="pyslurm is not installed")
    until = time.monotonic() + check_limit_s
    client = PyslurmClient(cli=cli, parent=parent, timeout_s=timeout_s, on_notice=on_notice)
    try:
        release = client.fetch_release(limit_s=check_limit_s)
    except SlurmError as error:
        client.close()
        return Choice(client=cli, kind="cli", reason=f"pyslurm does not import: {error}")
    try:
        version = client.fetch_cluster_by_child(limit_s=max(0.0, until - time.monotonic())).version
    except SlurmError as error:
        client.await_release(release)
        return Choice(
            client=client, kind="cli", reason=f"the cluster's release is not known to pyslurm {release}: {error}"
        )
    if _release_of(release) != _release_of(version):
        client.close()
        return Choice(client=cli, kind="cli", reason=_say_misfit(release, version))
    return Choice(client=client, kind="pyslurm", reason=_FITS)


def is_findable(parent: Mapping[str, str]) -> bool:
    """True when an import in the child would find a module pyslurm; nothing is imported."""
    paths = [part for part in parent.get("PYTHONPATH", "").split(os.pathsep) if part]
    spec = importlib.machinery.PathFinder.find_spec("pyslurm", [*paths, *sys.path])
    return spec is not None and spec.has_location  # a mere folder of that name has none


_FITS = "pyslurm is of the cluster's release"


def _say_misfit(release: str, version: str) -> str:
    return f"pyslurm {release} is not of the cluster's release ({version})"


def _release_of(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


# ---------------------------------------------------------------- the client


class PyslurmClient:
    """`SlurmClient`: jobs, nodes and cluster by pyslurm, the rest by `cli`. Any number of calls at once; one child."""

    def __init__(
        self,
        *,
        cli: SlurmClient,
        parent: Mapping[str, str],
        timeout_s: float,
        on_notice: Notice = lambda _sentence: None,
    ) -> None:
        self._cli = cli
        self._environment = child_environment(parent)
        self._timeout_s = timeout_s
        self._on_notice = on_notice
        self._lock = threading.Lock()
        self._child: _Child | None = None
        # By question: a library that trips over one job must not be thought well because it can read the nodes.
        self._failures: dict[str, int] = {}
        self._cli_until: dict[str, float] = {}  # monotonic
        self._release_to_meet = ""  # pyslurm's, while that of the cluster is not known to be another

    def fetch_release(self, *, limit_s: float) -> str:
        """The version of pyslurm; SlurmUnavailable when it can't be imported."""
        return str(self._ask("release", limit_s))

    def fetch_cluster_by_child(self, *, limit_s: float) -> ClusterFacts:
        """As `fetch_cluster`, within `limit_s` and without the command line."""
        return parse_cluster_row(self._ask("cluster", limit_s))

    def await_release(self, release: str) -> None:
        """Ask `cli` until `fetch_cluster` has shown that the cluster is of pyslurm's `release`; for ever when not."""
        self._release_to_meet = release
        self.close()

    def fetch_cluster(self) -> ClusterFacts:
        """Name, version, partitions and time-outs; two calls of the library."""
        if self._release_to_meet:
            return self._meet_release(self._cli.fetch_cluster())
        return self._read("cluster", parse_cluster_row, self._cli.fetch_cluster)

    def fetch_jobs(self) -> JobListing:
        """All jobs in the controller's memory. On exit codes see `parse_job_row`."""
        return self._read("jobs", parse_job_rows, self._cli.fetch_jobs)

    def fetch_nodes(self) -> NodeListing:
        """All nodes; SlurmUnreadable when not one can be read."""
        return self._read("nodes", parse_node_rows, self._cli.fetch_nodes)

    def fetch_ended_jobs(self, *, since: datetime) -> JobListing:
        return self._cli.fetch_ended_jobs(since=since)

    def find_by_token(self, token: str, *, since: datetime) -> tuple[JobRecord, ...]:
        return self._cli.find_by_token(token, since=since)

    def submit(self, request: SubmitRequest) -> Submitted:
        return self._cli.submit(request)

    def cancel(self, job_id: int, identity: Identity | None = None) -> None:
        self._cli.cancel(job_id, identity)

    def claim(self, job_id: int, token: str, identity: Identity | None = None, *, may_requeue: bool = False) -> None:
        self._cli.claim(job_id, token, identity, may_requeue=may_requeue)

    def describe_job(self, job_id: int) -> JobDescription:
        return self._cli.describe_job(job_id)

    def fetch_script(self, job_id: int) -> str:
        return self._cli.fetch_script(job_id)

    def drain(self, node: str, reason: str) -> None:
        self._cli.drain(node, reason)

    def undrain(self, node: str) -> None:
        self._cli.undrain(node)

    def close(self) -> None:
        """End the child; it also ends with this process."""
        with self._lock:
            self._drop_child()

    def _meet_release(self, facts: ClusterFacts) -> ClusterFacts:
        release = self._release_to_meet
        if _release_of(release) == _release_of(facts.version):
            self._release_to_meet = ""
            self._on_notice(f"jobs and nodes by pyslurm from now on: {_FITS}")
        return facts

    def _read(self, question: str, parse: Callable[[Any], T], by_cli: Callable[[], T]) -> T:
        if self._release_to_meet:
            return by_cli()
        if time.monotonic() < self._cli_until.get(question, 0.0):
            return by_cli()
        try:
            value = parse(self._ask(question, self._timeout_s))
        except SlurmError as error:
            failures = self._failures[question] = self._failures.get(question, 0) + 1
            if failures < _FAILURES_TO_CLI:
                raise
            self._cli_until[question] = time.monotonic() + _RETRY_AFTER_S
            self.close()  # the library read slurm.conf once, and the controller may have moved since
            self._on_notice(
                f"{question} by the commands, not by pyslurm, for {_RETRY_AFTER_S:g} s: "
                f"{failures} failures in a row, the last one: {error}"
            )
            return by_cli()
        self._failures[question] = 0
        return value

    def _ask(self, question: str, limit_s: float) -> Any:
        until = time.monotonic() + limit_s
        if not self._lock.acquire(timeout=max(0.0, limit_s)):
            raise SlurmUnavailable(f"pyslurm has not answered an earlier question within {limit_s:g} s")
        try:
            if self._child is None:
                self._child = _Child(self._environment)
            return self._child.ask(question, until)
        except _ChildLost as error:
            self._drop_child()
            raise SlurmUnavailable(f"{question}: {error}") from None
        except OSError as error:
            raise SlurmUnavailable(f"the process for pyslurm can't be started: {error}") from None
        finally:
            self._lock.release()

    def _drop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def child_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """What the child gets: a reading command's environment, and where its modules and Slurm's library are."""
    paths = [part for part in (_PACKAGE_ROOT, parent.get("PYTHONPATH", "")) if part]
    library = {name: parent[name] for name in ("LD_LIBRARY_PATH",) if name in parent}
    return {**commands.reading_environment(parent), **library, "PYTHONPATH": os.pathsep.join(paths)}


# ---------------------------------------------------------------- the child, from here


class _ChildLost(Exception):
    """The child died, was late, or said what can't be read: it is of no use any more."""


class _Child:
    """One child process. Any trouble makes it unusable: it is then killed."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slurm.pyslurm_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd="/",
            env=dict(environment),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._buffer = bytearray()
        self._number = 0

    def ask(self, question: str, until: float) -> Any:
        """The answer; SlurmUnavailable with pyslurm's own words, _ChildLost when there is none."""
        self._number += 1
        try:
            os.write(self._stdin.fileno(), json.dumps({"id": self._number, "ask": question}).encode() + b"\n")
        except OSError:
            raise _ChildLost(self._last_words()) from None
        answer = self._parse(self._receive(until))
        if "error" in answer:
            raise SlurmUnavailable(f"pyslurm: {answer['error']}")
        return answer["ok"]

    def kill(self) -> None:
        """End it, and reap it when the kernel lets it go."""
        with suppress(OSError):
            self._process.kill()
        for stream in (self._stdin, self._stdout, self._said):
            with suppress(OSError):
                stream.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def _receive(self, until: float) -> bytes:
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        data: bytes | bytearray = self._buffer
        while b"\n" not in data:
            if not poll.poll(max(0.0, (until - time.monotonic()) * 1000)):
                raise _ChildLost("no answer in time")
            data = os.read(self._stdout.fileno(), 1 << 20)
            if not data:
                raise _ChildLost(self._last_words())
            self._buffer += data
            if len(self._buffer) > _MAX_ANSWER_BYTES:
                raise _ChildLost(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise _ChildLost("its answer is no JSON") from None
        if not isinstance(answer, dict) or answer.get("id") != self._number or not {"ok", "error"} & answer.keys():
            raise _ChildLost("its answer does not belong to the question")
        return answer

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _EVIDENCE_BYTES))
        said = " ".join(self._said.read().decode(errors="replace").split())
        return f"the process ended with exit code {self._process.returncode}" + (f": {said}" if said else "")


# ---------------------------------------------------------------- rows to records


def parse_job_rows(rows: Any) -> JobListing:
    """Jobs of the child's answer; SlurmUnreadable when there are rows and not one can be read."""
    jobs, unreadable = _parse_rows(rows, parse_job_row)
    return JobListing(jobs=merge_rows(jobs), unreadable=unreadable)


def parse_node_rows(rows: Any) -> NodeListing:
    """Nodes of the child's answer; SlurmUnreadable when not one can be read: a cluster has nodes."""
    nodes, unreadable = _parse_rows(rows, parse_node_row)
    if not nodes:
        raise SlurmUnreadable("pyslurm: no node in its answer")
    return NodeListing(nodes=nodes, unreadable=unreadable)


def parse_job_row(row: Row) -> JobRecord:
    """One job.

    Exit status: exact, but for a row with `is_exit_code_cut` (see `slurm.pyslurm_child.mend_exit_codes`): there 128 is
    subtracted from a status of 128 and more, as sacct before 25.11 does, so that a status below 128 means "that, or
    that plus 128"; only FAILED with neither status nor signal is sure to have been 128.

    Raises:
        ValueError, TypeError, KeyError: a row that is none.
    """
    state, flags = parse_job_state(_text(row["state"]))
    is_over = state in ENDED_STATES or JobFlag.COMPLETING in flags
    exit_code, exit_signal = (row["exit_code"], row["exit_code_signal"]) if is_over else (None, None)
    if row.get("is_exit_code_cut") and state is JobState.FAILED and exit_code == 0 and exit_signal == 0:
        exit_code = 128
    # As with squeue: what a waiting job shows of nodes and start is a plan or a memory.
    nodes = expand_nodes(_text(row["allocated_nodes"])) if state is not JobState.PENDING else ()
    return JobRecord(
        job_id=int(row["id"]),
        state=state,
        raw_state=_text(row["state"]),
        flags=flags,
        name=_text(row["name"]),
        user=_text(row["user_name"]),
        partition=_text(row["partition"]),
        comment=_text(row["comment"]),
        reason=read_reason(_text(row["state_reason"])),
        nodes=nodes,
        submit_at=_instant(row["submit_time"]),
        start_at=_instant(row["start_time"]) if nodes else None,
        end_at=_instant(row["end_time"]) if is_over else None,
        limit_at=_instant(row["end_time"]) if state is JobState.RUNNING and not is_over else None,
        exit_code=exit_code,
        exit_signal=exit_signal,
        restarts=int(row["requeue_count"] or 0),
    )


def parse_node_row(row: Row) -> NodeRecord:
    """One node; instants as scontrol prints them in UTC.

    Raises:
        ValueError, TypeError, KeyError: a row that is none.
    """
    if not row["name"]:
        raise ValueError("a node without a name")
    base, flags = parse_node_state(_text(row["state"]))
    gres = row["configured_gres"] or {}
    reason = _text(row["reason"])
    return NodeRecord(
        name=_text(row["name"]),
        base=base,
        flags=flags,
        raw_state=_text(row["state"]),
        address=_text(row["address"]),
        host_name=_text(row["hostname"]),
        port=row["slurmd_port"],
        partitions=tuple(_text(part) for part in row["partitions"] or ()),
        reason=reason,
        reason_user=_text(row["reason_user"]),
        reason_at=_printed(row["reason_time"]) if reason else "",
        cpus=int(row["total_cpus"] or 0),
        memory_mb=int(row["real_memory"] or 0),
        gres=",".join(f"{name}:{count}" for name, count in gres.items()),
        boot_at=_printed(row["boot_time"]),
        version=_text(row["slurm_version"]),
    )


def parse_cluster_row(row: Any) -> ClusterFacts:
    """Facts of the cluster; SlurmUnreadable for an answer that has none."""
    try:
        storage = _text(row["accounting_storage_type"]).lower()
        facts = ClusterFacts(
            cluster=_text(row["cluster_name"]),
            version=_text(row["version"]),
            has_accounting=bool(storage) and not storage.endswith("/none"),
            partitions=tuple(_text(name) for name in row["partitions"]),
            slurmd_timeout_s=row["slurmd_timeout"],
            min_job_age_s=row["min_job_age"],
            message_timeout_s=row["message_timeout"],
            default_partition=row["default_partition"],
            slurmd_port=row["slurmd_port"],
        )
    except (LookupError, TypeError) as error:
        raise SlurmUnreadable(f"pyslurm: {error!r} in the cluster's configuration") from None
    if not facts.cluster or not facts.version:
        raise SlurmUnreadable("pyslurm: no cluster name or no version in the cluster's configuration")
    return facts


def _parse_rows(rows: Any, build: Callable[[Row], T]) -> tuple[tuple[T, ...], tuple[Unreadable, ...]]:
    if not isinstance(rows, list):
        raise SlurmUnreadable("pyslurm: its answer is no list")
    records: list[T] = []
    unreadable: list[Unreadable] = []
    for row in rows:
        try:
            records.append(build(row))
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            why = row.get("why") if isinstance(row, dict) else None
            unreadable.append(Unreadable(text=str(row)[:_EVIDENCE_BYTES], why=str(why or repr(error))))
    if unreadable and not records:
        raise SlurmUnreadable(f"pyslurm: not one row can be read: {unreadable[0].why}")
    return tuple(records), tuple(unreadable)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value.strip()


def _instant(value: Any) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(value, UTC)


def _printed(value: Any) -> str:
    at = _instant(value)
    return "" if at is None else at.strftime("%Y-%m-%dT%H:%M:%S")
