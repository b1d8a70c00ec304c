"""The subjects of the contract suite behind one handle: the cluster in memory, and a real one, read in two ways."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from slurm.client import CliClient, SlurmClient
from slurm.pyslurm_client import PyslurmClient
from slurm.run_tool import Completed, run_tool
from slurm.sandbox import Sandbox
from slurm.types import JobRecord, JobState, SubmitRequest
from tests.fakes import FakeClock, FakeSlurm, Fault

SLEEPS = "exec sleep 600"


class Subject(Protocol):
    """A cluster of four nodes, n1 to n4, and the means to move it on."""

    client: SlurmClient
    directory: Path

    def now(self) -> datetime: ...

    def pass_time(self) -> None:
        """A moment passes."""

    def power_cut(self, node: str) -> None: ...

    def revive(self, node: str) -> None: ...

    def lose_next_reply(self) -> None:
        """The next submission is accepted, and its answer lost."""

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The controller is down."""
        yield

    def close(self) -> None:
        """Nothing of the client is left."""


@dataclass
class FakeSubject:
    directory: Path
    fake: FakeSlurm = field(default_factory=lambda: FakeSlurm(clock=FakeClock(), nodes=4))

    def __post_init__(self) -> None:
        self.client: SlurmClient = self.fake
        self.fake.on_start = self._run_script

    def now(self) -> datetime:
        return self.fake.clock.now()

    def pass_time(self) -> None:
        self.fake.advance(0.5)

    def power_cut(self, node: str) -> None:
        self.fake.power_cut(node)

    def revive(self, node: str) -> None:
        self.fake.revive(node)

    def lose_next_reply(self) -> None:
        self.fake.plan("submit", Fault.LOST_REPLY)

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.fake.outage = True
        yield
        self.fake.outage = False

    def close(self) -> None:
        pass

    def _run_script(self, job: JobRecord) -> None:
        last = self.fake.request_of(job.job_id).script.read_text().splitlines()[-1]
        if last.startswith("exit "):
            code = int(last.removeprefix("exit "))
            self.fake.end_job(job.job_id, JobState.FAILED if code else JobState.COMPLETED, exit_code=code)


@dataclass
class RealSubject:
    directory: Path
    sandbox: Sandbox

    def __post_init__(self) -> None:
        self.parent = {**os.environ, **self.sandbox.env}
        self.client: SlurmClient = self.make_client(CliClient(run=self._run, parent=self.parent), timeout_s=30.0)
        self._loses_reply = False

    def make_client(self, cli: CliClient, *, timeout_s: float) -> SlurmClient:
        """The client to hold to the contract, over a command line that is given."""
        return cli

    def now(self) -> datetime:
        return datetime.now(UTC)

    def pass_time(self) -> None:
        time.sleep(0.1)  # between two looks at a condition with a deadline

    def power_cut(self, node: str) -> None:
        self.sandbox.power_cut(node)

    def revive(self, node: str) -> None:
        self.sandbox.revive(node)

    def lose_next_reply(self) -> None:
        self._loses_reply = True

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.sandbox.stop_controller()
        patient = self.client
        self.client = self.make_client(CliClient(timeout_s=1.0, parent=self.parent), timeout_s=1.0)
        try:
            yield
        finally:
            self.close()
            self.client = patient
            self.sandbox.start_controller()

    def close(self) -> None:
        pass

    def _run(self, argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        done = run_tool(argv, timeout_s, env, path=self.sandbox.env["PATH"])
        if argv[0] == "sbatch" and self._loses_reply:
            self._loses_reply = False
            return Completed(returncode=None)
        return done


class PyslurmSubject(RealSubject):
    """The same cluster, read through pyslurm."""

    def make_client(self, cli: CliClient, *, timeout_s: float) -> SlurmClient:
        return PyslurmClient(cli=cli, parent=self.parent, timeout_s=timeout_s)

    def close(self) -> None:
        assert isinstance(self.client, PyslurmClient)
        self.client.close()


@dataclass
class Cluster:
    """What the tests hold: a subject, with words for what they do all the time."""

    subject: Subject
    submitted: list[int] = field(default_factory=list)

    @property
    def client(self) -> SlurmClient:
        return self.subject.client

    def request(
        self, token: str, *, nodes: int = 1, body: str = SLEEPS, name: str = "", **more: object
    ) -> SubmitRequest:
        """Whole nodes, as training takes them; one folder and one name per test unless `name` says otherwise."""
        script = self.subject.directory / f"{token}.sh"
        script.write_text(f"#!/bin/bash\n#SBATCH --no-kill\n{body}\n")
        request = SubmitRequest(
            script=script,
            token=token,
            job_name=name or token,
            nodes=nodes,
            output=self.subject.directory / f"{token}.log",
            options=("--exclusive",),
        )
        return replace(request, **more)  # type: ignore[arg-type]

    def submit(self, token: str, **more: object) -> int:
        job_id = self.client.submit(self.request(token, **more)).job_id  # type: ignore[arg-type]
        self.submitted.append(job_id)
        return job_id

    def job(self, job_id: int) -> JobRecord:
        return next(job for job in self.client.fetch_jobs().jobs if job.job_id == job_id)

    def until(self, condition: Callable[[], bool], *, within_s: float = 15) -> None:
        """Let time pass until `condition` holds; fail when it does not in `within_s` of the subject's own time."""
        deadline = self.subject.now() + timedelta(seconds=within_s)
        while not condition():
            assert self.subject.now() < deadline, f"not within {within_s} s"
            self.subject.pass_time()

    def until_state(self, job_id: int, state: JobState, *, within_s: float = 15) -> JobRecord:
        self.until(lambda: self.job(job_id).state is state, within_s=within_s)
        return self.job(job_id)

    def until_idle(self) -> None:
        """Every node can take a job again."""
        self.until(lambda: all(node.is_idle for node in self.client.fetch_nodes().nodes), within_s=40)
