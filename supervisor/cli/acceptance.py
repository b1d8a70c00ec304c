"""Whether Slurm would take a run's jobs: its partition, its size, and the options that go on sbatch's command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.client import CliClient
from slurm.errors import SlurmError, SlurmRefused
from slurm.types import NodeAvailability, NodeBase, NodeRecord, SubmitRequest
from supervisor.cli.main import EXIT_BAD_INPUT, CommandError
from supervisor.model import RunSpec

# What Slurm says of a job that nodes are missing for, also when they are only drained or down for a while.
_MAY_PASS = ("Requested node configuration is not available", "not available now", "Required node not available")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The nodes that a run may use."""

    where: str  # in words
    nodes: int
    usable: int  # neither drained nor down, and registered since the controller started


def check_acceptance(client: CliClient, spec: RunSpec) -> list[str]:
    """Notes for the user. Raises CommandError for what Slurm will never take."""
    try:
        facts = client.fetch_cluster()
        records = client.fetch_nodes().nodes
    except SlurmError as error:
        return [f"partition and options not checked: Slurm does not answer ({error}); the daemon waits for it"]
    for name in spec.slurm.partition.split(",") if spec.slurm.partition else []:
        if name not in facts.partitions:
            raise CommandError(
                f'there is no partition "{name}"; there are: {", ".join(facts.partitions)}', EXIT_BAD_INPUT
            )
    room = measure_room(records, spec.slurm.partition or facts.default_partition)
    if room.nodes < spec.nodes.min:
        raise CommandError(f"[nodes] min is {spec.nodes.min}, and {room.where} has {room.nodes} nodes", EXIT_BAD_INPUT)
    return [*_describe_room(room, spec), *_ask_slurm(client, spec, room)]


def measure_room(records: Sequence[NodeRecord], partition: str | None) -> Room:
    """The nodes of a partition (or partitions, by comma); of the whole cluster for None."""
    wanted = set(partition.split(",")) if partition else None
    own = [record for record in records if wanted is None or wanted & set(record.partitions)]
    lost = {NodeAvailability.DRAINED, NodeAvailability.DRAINING, NodeAvailability.DOWN}
    return Room(
        where=f"partition {partition}" if partition else "the cluster",
        nodes=len(own),
        usable=sum(record.availability not in lost and record.base is not NodeBase.UNKNOWN for record in own),
    )


def _describe_room(room: Room, spec: RunSpec) -> list[str]:
    if room.usable < spec.nodes.min:
        few = f"only {room.usable} of the {room.nodes} nodes of {room.where} can be used now"
        return [f"{few}, and [nodes] min is {spec.nodes.min}: the run waits for the others"]
    if room.nodes < spec.nodes.max:
        return [f"[nodes] max is {spec.nodes.max}: {room.where} has {room.nodes} nodes, the run gets no more"]
    return []


def _ask_slurm(client: CliClient, spec: RunSpec, room: Room) -> list[str]:
    try:
        client.check_submission(smallest_request(spec))
    except SlurmRefused as error:
        if room.usable < room.nodes and any(text in str(error) for text in _MAY_PASS):
            lost = room.nodes - room.usable
            why = f"{lost} of the nodes of {room.where} are drained or down, or not registered yet"
            return [f"Slurm would not take the job now ({error}): {why}"]
        raise CommandError(f"Slurm would refuse the job: {error}", EXIT_BAD_INPUT) from None
    except SlurmError as error:
        return [f"options not checked: Slurm does not answer ({error}); the daemon waits for it"]
    return []


def smallest_request(spec: RunSpec) -> SubmitRequest:
    """The submission that would do: the least number of nodes, with everything else as the run file says."""
    slurm = spec.slurm
    return SubmitRequest(
        script=Path("/bin/true"),  # replaced by the question
        token="check",  # noqa: S106 - marks a question
        job_name=spec.name,
        nodes=spec.nodes.min,
        output=Path("/dev/null"),
        chdir=spec.workdir,
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        time_limit=slurm.time_limit,
        gpus_per_node=slurm.gpus_per_node,
        options=slurm.options,
    )
