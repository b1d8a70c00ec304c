"""The edge to Slurm: a protocol of the few verbs that the service needs, and the command-line client."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from slurm.types import ClusterFacts, JobListing, JobRecord, NodeListing, SubmitRequest, Submitted


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

    def cancel(self, job_id: int) -> None:
        """End a job; a job that is already gone is no error."""
        ...

    def drain(self, node: str, reason: str) -> None:
        """Set DRAIN with a reason. The caller has read the node first: Slurm replaces any reason without asking."""
        ...

    def undrain(self, node: str) -> None:
        """Return a drained node to service."""
        ...
