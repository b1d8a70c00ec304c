"""The edge to Slurm: a protocol of the few verbs that the service needs, and the command-line client."""

from __future__ import annotations

import os
import pwd
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from slurm import commands, failures, parse
from slurm.errors import SlurmError, SlurmRefused, SlurmUnavailable, SlurmUnreadable
from slurm.inherited import AS_THE_SERVICE, Inherited
from slurm.job_description import parse_job_description
from slurm.json_form import JsonForm, Notice
from slurm.run_as import RunAs
from slurm.run_as import run_as as run_tool_as
from slurm.run_tool import Completed, Run, run_tool
from slurm.submitted import parse_submit_line
from slurm.types import (
    ClusterFacts,
    Identity,
    JobDescription,
    JobListing,
    JobRecord,
    NodeListing,
    SubmitRequest,
    Submitted,
    Unreadable,
)


class SlurmClient(Protocol):
    """What the service asks of Slurm. Every verb is bounded in time and raises only `slurm.errors.SlurmError`."""

    def fetch_cluster(self) -> ClusterFacts:
        """Name, version, partitions and time-outs of the cluster."""
        ...

    def fetch_jobs(self) -> JobListing:
        """All jobs in the controller's memory, ended ones included; one command for all."""
        ...

    def fetch_nodes(self) -> NodeListing:
        """All nodes; one command for all."""
        ...

    def fetch_ended_jobs(self, *, since: datetime) -> JobListing:
        """Jobs submitted since then, from accounting, requeued records too. SlurmRefused without accounting."""
        ...

    def find_by_token(self, token: str, *, since: datetime) -> tuple[JobRecord, ...]:
        """Jobs whose command line carries `token`, from the controller and, where there is one, accounting."""
        ...

    def submit(self, request: SubmitRequest) -> Submitted:
        """Submit once. SubmitUnconfirmed when the answer was lost; SlurmRefused when Slurm said no."""
        ...

    def cancel(self, job_id: int, identity: Identity | None = None) -> None:
        """End a job; a job that is already gone is no error.

        `identity`: in whose name, so that Slurm itself refuses (SlurmRefused) what is another's; None: the service's.
        """
        ...

    def claim(self, job_id: int, token: str, identity: Identity | None = None, *, may_requeue: bool = False) -> None:
        """Put a token on a job that is there, and keep Slurm from requeueing it. The caller reads it back.

        `may_requeue`: leave that as it is, for a job whose own script has it requeued.

        `identity`: its owner, in whose name it is done; None: the service's own account. SlurmRefused: no such job
        any more, or no right to it.
        """
        ...

    def describe_job(self, job_id: int) -> JobDescription:
        """All that the controller says of one job. SlurmRefused: it does not know it, or does not show it."""
        ...

    def fetch_script(self, job_id: int) -> str:
        """The batch script of a job in the controller's memory. SlurmRefused: none, or another user's."""
        ...

    def drain(self, node: str, reason: str) -> None:
        """Set DRAIN with a reason. The caller has read the node first: Slurm replaces any reason without asking."""
        ...

    def undrain(self, node: str) -> None:
        """Return a drained node to service."""
        ...


_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_TIMEOUT_S = 30.0  # three times Slurm's MessageTimeout; clients retry a connection for that long


class CliClient:
    """`SlurmClient` over Slurm's command-line tools.

    `run` starts a tool, `run_as` one as another account (tests give their own); PATH and SLURM_CONF are of `parent`.
    `form`: how jobs, nodes and accounting are asked for; "json" becomes "text" by itself where a cluster's JSON can't
    be used, and `on_notice` then gets a sentence for the log, once. Any number of calls may run at once.
    """

    def __init__(
        self,
        *,
        run: Run | None = None,
        run_as: RunAs | None = None,
        timeout_s: float = _TIMEOUT_S,
        parent: Mapping[str, str] | None = None,
        form: Literal["text", "json"] = "text",
        on_notice: Notice = lambda _sentence: None,
    ) -> None:
        self._parent: Mapping[str, str] = os.environ if parent is None else parent
        self._run: Run = partial(run_tool, path=self._parent.get("PATH")) if run is None else run
        self._run_as: RunAs = partial(run_tool_as, path=self._parent.get("PATH")) if run_as is None else run_as
        self._timeout_s = timeout_s
        self._json = JsonForm(self._ask, on_notice) if form == "json" else None

    def fetch_cluster(self) -> ClusterFacts:
        """Name, version, partitions and time-outs; two commands."""
        argv = commands.show_config_argv()
        config = self._read(argv)
        partitions = self._read(commands.show_partitions_argv())
        facts = parse.parse_cluster(config.stdout, partitions.stdout)
        if isinstance(facts, Unreadable):
            raise failures.unreadable(argv, config, facts.why)
        return facts

    def fetch_jobs(self) -> JobListing:
        """All jobs in the controller's memory; SlurmUnreadable when there are rows and not one can be read."""
        listing = self._json.fetch_jobs() if self._json else None
        return listing or self._fetch_jobs_as_text()

    def _fetch_jobs_as_text(self) -> JobListing:
        mark = _draw_mark()
        argv = commands.squeue_argv(mark)
        done = self._read(argv)
        listing = parse.parse_squeue(done.stdout, mark=mark)
        _require_some(argv, done, listing.jobs, listing.unreadable)
        return listing

    def fetch_nodes(self) -> NodeListing:
        """All nodes; SlurmUnreadable when not one can be read: a cluster has nodes."""
        listing = self._json.fetch_nodes() if self._json else None
        return listing or self._fetch_nodes_as_text()

    def _fetch_nodes_as_text(self) -> NodeListing:
        argv = commands.show_nodes_argv()
        done = self._read(argv)
        listing = parse.parse_nodes(done.stdout)
        if not listing.nodes:
            raise failures.unreadable(argv, done, "no node in it")
        return listing

    def fetch_ended_jobs(self, *, since: datetime) -> JobListing:
        """Jobs from accounting submitted at `since` or later, oldest first; `since` is an aware instant.

        sacct also lists older jobs that were still there at `since`; they are left out, because job ids come round
        again and an old record must not stand for a new job. On exit codes see `slurm.parse.parse_sacct`.
        """
        listing = self._json.fetch_ended_jobs(since=since) if self._json else None
        listing = listing or self._fetch_ended_as_text(since)
        floor = since.replace(microsecond=0)  # Slurm's times are whole seconds
        jobs = tuple(job for job in _by_submission(listing) if job.submit_at is None or job.submit_at >= floor)
        return JobListing(jobs=jobs, unreadable=listing.unreadable)

    def _fetch_ended_as_text(self, since: datetime) -> JobListing:
        mark = _draw_mark()
        argv = commands.sacct_argv(since, mark)
        done = self._read(argv)
        listing = parse.parse_sacct(done.stdout, mark=mark)
        _require_some(argv, done, listing.jobs, listing.unreadable)
        return listing

    def find_by_token(self, token: str, *, since: datetime) -> tuple[JobRecord, ...]:
        """Jobs with this token, by job id: from the controller, and from accounting where there is one.

        A source that exists and does not answer, or answers with rows that can't be read, raises SlurmUnavailable or
        SlurmUnreadable: an empty answer means that both were asked and neither knows the token. Any user of the
        cluster may put a token in a job's comment, so compare user and name before adopting one.
        """
        live = self.fetch_jobs()
        ended = self._fetch_ended_if_kept(since)
        for listing in (live, ended):
            if any(token in row.text for row in listing.unreadable):
                raise SlurmUnreadable(f"a row with the token {token} can't be read: {listing.unreadable}")
        # The controller knows more of a live job than accounting does; of several runs of one job the newest counts.
        found = {job.job_id: job for job in (*_by_submission(ended), *live.jobs) if job.comment == token}
        return tuple(found[job_id] for job_id in sorted(found))

    def submit(self, request: SubmitRequest) -> Submitted:
        """Submit once, never retried here: the caller looks a lost answer up by its token first."""
        argv = commands.sbatch_argv(request)
        done = self._call_sbatch(argv, request, request.environment)
        failure = failures.submit_failure(argv, done)
        if failure is not None:
            raise failure
        job_id = parse.parse_sbatch(done.stdout)
        if job_id is None:
            raise failures.unconfirmed(argv, done)
        return Submitted(job_id=job_id, warnings=done.stderr.strip())

    def check_submission(self, request: SubmitRequest) -> str:
        """What Slurm says of a submission like this one, which it would take; nothing is submitted.

        Raises as `submit` does: SlurmRefused with Slurm's reason, which may be one that passes ("Requested node
        configuration is not available" while nodes are drained or down), SlurmUnavailable without an answer.
        """
        argv = commands.test_only_argv(request)
        done = self._call_sbatch(argv, request, request.environment if request.is_own_environment else {})
        failure = failures.submit_failure(argv, done)
        if failure is not None:
            raise failure
        return " ".join(done.stderr.split())

    def cancel(self, job_id: int, identity: Identity | None = None) -> None:
        """End a job at once (see `slurm.commands.scancel_argv` for what its processes get)."""
        self._change(commands.scancel_argv(job_id), identity=identity)

    def claim(self, job_id: int, token: str, identity: Identity | None = None, *, may_requeue: bool = False) -> None:
        """Put a token on a job and keep Slurm from requeueing it (unless it may), as its owner."""
        self._change(commands.claim_argv(job_id, token, may_requeue=may_requeue), identity=identity)

    def describe_job(self, job_id: int) -> JobDescription:
        """All that the controller says of one job; SlurmRefused when it does not know it (any more).

        Its submit line comes from accounting where the controller does not tell it (before 25.11) and there is one.
        """
        argv = commands.show_job_argv(job_id)
        done = self._read_job(argv)
        description = parse_job_description(done.stdout)
        if isinstance(description, Unreadable):
            raise failures.unreadable(argv, done, description.why)
        if description.job_id != job_id and not (description.is_array or description.is_het):
            raise failures.unreadable(argv, done, f"it is about job {description.job_id}")
        if description.submit_line or not description.is_batch:
            return description
        return replace(description, submit_line=self._fetch_submit_line(description))

    def _fetch_submit_line(self, job: JobDescription) -> str:
        mark = _draw_mark()
        try:
            done = self._read(commands.submit_line_argv(job.job_id, mark))
        except SlurmError:
            return ""  # the line says more, and what there is without it is a description all the same
        return parse_submit_line(done.stdout, mark=mark, job=job)

    def fetch_script(self, job_id: int) -> str:
        """The batch script of a job; SlurmUnreadable when it is not UTF-8, for it could not be given back unchanged."""
        argv = commands.write_script_argv(job_id)
        done = self._read_job(argv)
        if not done.stdout:
            raise failures.refused(argv, done, "gave no script")  # with exit 0 (22.05)
        if "\ufffd" in done.stdout:
            raise failures.unreadable(argv, done, "the script is not UTF-8")
        return done.stdout

    def drain(self, node: str, reason: str) -> None:
        """Set DRAIN; SlurmRefused for a reason that Slurm would not keep unchanged (`render_reason` makes one)."""
        self._change(commands.drain_argv(node, reason))

    def undrain(self, node: str) -> None:
        """Lift DRAIN and nothing else; harmless on a node that is not drained."""
        self._change(commands.undrain_argv(node))

    def _fetch_ended_if_kept(self, since: datetime) -> JobListing:
        try:
            return self.fetch_ended_jobs(since=since)
        except SlurmRefused as error:
            if failures.is_no_accounting(error):
                return JobListing(jobs=())
            raise SlurmUnavailable(
                str(error), argv=error.argv, returncode=error.returncode, stdout=error.stdout, stderr=error.stderr
            ) from error

    def _read(self, argv: commands.Argv) -> Completed:
        done = self._ask(argv)
        failure = failures.read_failure(argv, done)
        if failure is not None:
            raise failure
        return done

    def _ask(self, argv: commands.Argv) -> Completed:
        return self._call(argv, commands.reading_environment(self._parent))

    def _read_job(self, argv: commands.Argv) -> Completed:
        """A question about one job: that Slurm does not know it is an answer."""
        done = self._call(argv, commands.reading_environment(self._parent))
        if failures.is_job_gone(done):
            raise failures.refused(argv, done, "was refused")
        failure = failures.read_failure(argv, done)
        if failure is not None:
            raise failure
        return done

    def _call_sbatch(self, argv: commands.Argv, request: SubmitRequest, environment: Mapping[str, str]) -> Completed:
        if request.is_own_environment:
            env = commands.own_environment(self._parent, environment)
        else:
            user, home = self._identity(request.identity.uid if request.identity else None)
            env = commands.submitting_environment(self._parent, environment, user=user, home=home)
        return self._call(
            argv, env, identity=request.identity, directory=request.submit_dir, inherited=request.inherited
        )

    def _change(self, argv: commands.Argv, *, identity: Identity | None = None) -> None:
        done = self._call(argv, commands.reading_environment(self._parent), identity=identity)
        failure = failures.change_failure(argv, done)
        if failure is not None:
            raise failure

    def _call(
        self,
        argv: commands.Argv,
        env: Mapping[str, str],
        *,
        identity: Identity | None = None,
        directory: Path | None = None,
        inherited: Inherited = AS_THE_SERVICE,
    ) -> Completed:
        try:
            if identity is None and directory is None and inherited == AS_THE_SERVICE:
                return self._run(argv, self._timeout_s, env)
            return self._run_as(argv, self._timeout_s, env, identity=identity, directory=directory, inherited=inherited)
        except OSError as error:
            raise failures.not_started(argv, error) from error

    def _identity(self, uid: int | None) -> tuple[str, str]:
        """(user, home) for the job's environment."""
        try:
            entry = pwd.getpwuid(os.getuid() if uid is None else uid)
        except KeyError:
            if uid is not None:
                raise SlurmRefused(f"there is no user with uid {uid} on this host") from None
            return self._parent.get("USER", ""), self._parent.get("HOME", "/")
        return entry.pw_name, entry.pw_dir


def _draw_mark() -> str:
    """A row mark that no job name or comment can hold by design of its author."""
    return secrets.token_hex(8)


def _require_some(
    argv: commands.Argv, done: Completed, jobs: tuple[JobRecord, ...], unreadable: tuple[Unreadable, ...]
) -> None:
    # Rows, and none that can be read: the tool speaks another language. That is not an empty queue.
    if unreadable and not jobs:
        raise failures.unreadable(argv, done, unreadable[0].why)


def _by_submission(listing: JobListing) -> list[JobRecord]:
    return sorted(listing.jobs, key=lambda job: job.submit_at or _LONG_AGO)
