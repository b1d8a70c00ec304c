"""The sandbox's configuration files as text. Pure.

What differs between Slurm releases is decided by what is installed (`SlurmShape`), not by a list of versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm.sandbox.spec import (
    CLUSTER_NAME,
    CPUS_PER_NODE,
    DEFAULT_PARTITION,
    MEMORY_MB_PER_NODE,
    STANDBY_HOST,
    TAKEOVER_AFTER_S,
    SandboxSpec,
)

# A sandbox is for short feedback: Slurm's own defaults batch decisions over seconds to spare a busy controller.
_SCHEDULER = "sched_min_interval=50000,sched_interval=5,batch_sched_delay=0,bf_interval=1,bf_max_job_test=100"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmShape:
    """What the installed Slurm has."""

    version: str  # as `slurmctld -V` prints it, such as "24.11.5"
    has_cred_none: bool
    has_cgroup_disabled: bool  # cgroup.conf knows CgroupPlugin=disabled


def render_slurm_conf(spec: SandboxSpec, shape: SlurmShape) -> str:
    """slurm.conf of the sandbox."""
    lines = [
        f"ClusterName={CLUSTER_NAME}",
        f"SlurmctldHost={spec.head_host}({spec.head_address})",
        *([f"SlurmctldHost={STANDBY_HOST}({spec.standby_address})"] if spec.has_standby else []),
        f"SlurmctldPort={spec.controller_port}",
        f"SlurmdPort={spec.nodes[0].port}",
        f"SlurmUser={spec.user}",
        f"SlurmdUser={spec.user}",
        # No munge: any client may claim to be anybody, so nothing should listen where other machines reach it.
        "AuthType=auth/none",
        *(["CredType=cred/none"] if shape.has_cred_none else []),
        *_communication_lines(spec),
        f"StateSaveLocation={spec.root}/state",
        f"SlurmdSpoolDir={spec.root}/spool/%n",
        f"SlurmctldPidFile={spec.root}/run/slurmctld.pid",
        f"SlurmdPidFile={spec.root}/run/%n.pid",
        f"SlurmctldLogFile={spec.log('slurmctld')}",
        f"SlurmdLogFile={spec.root}/log/%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        "ProctrackType=proctrack/linuxproc",
        "MpiDefault=none",
        "PropagateResourceLimits=NONE",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SlurmdParameters=config_overrides",
        "SchedulerType=sched/backfill",
        f"SchedulerParameters={_SCHEDULER}",
        f"SlurmdTimeout={spec.slurmd_timeout_s}",
        f"SlurmctldTimeout={TAKEOVER_AFTER_S if spec.has_standby else 10}",
        "MessageTimeout=5",
        "TCPTimeout=2",
        f"KillWait={spec.kill_wait_s}",
        "UnkillableStepTimeout=60",
        "InactiveLimit=0",
        "WaitTime=0",
        f"MinJobAge={spec.min_job_age_s}",
        "ReturnToService=2",
        f"TreeWidth={max(16, len(spec.nodes))}",
        *_accounting_lines(spec),
        *(["GresTypes=gpu"] if spec.gpus_per_node else []),
        *_node_lines(spec),
        f"PartitionName={DEFAULT_PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        *([spec.extra_conf.rstrip()] if spec.extra_conf else []),
    ]
    return "\n".join(lines) + "\n"


def _communication_lines(spec: SandboxSpec) -> list[str]:
    # With these, a daemon listens only on the address that its host name resolves to.
    if spec.mode == "isolated":
        return ["CommunicationParameters=NoCtldInAddrAny"]  # nodes are out of reach anyhow; srun must be in reach
    return ["CommunicationParameters=NoCtldInAddrAny,NoInAddrAny"] if spec.is_local_only else []


def _accounting_lines(spec: SandboxSpec) -> list[str]:
    if not spec.accounting:
        return []
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={spec.head_address}",
        f"AccountingStoragePort={spec.dbd_port}",
    ]


def render_slurmdbd_conf(spec: SandboxSpec, *, database: str, password: str) -> str:
    """slurmdbd.conf of the sandbox; it holds a password."""
    lines = [
        "AuthType=auth/none",
        f"DbdHost={spec.head_host}",
        f"DbdAddr={spec.head_address}",
        f"DbdPort={spec.dbd_port}",
        f"SlurmUser={spec.user}",
        f"LogFile={spec.log('slurmdbd')}",
        f"PidFile={spec.root}/run/slurmdbd.pid",
        "DebugLevel=info",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={spec.database_port}",
        "StorageUser=slurm",
        f"StoragePass={password}",
        f"StorageLoc={database}",
        *(["CommunicationParameters=NoInAddrAny"] if spec.is_local_only else []),
    ]
    return "\n".join(lines) + "\n"


def _node_lines(spec: SandboxSpec) -> list[str]:
    gres = f" Gres=gpu:{spec.gpus_per_node}" if spec.gpus_per_node else ""
    return [
        f"NodeName={node.name} NodeHostname={_host_of(spec, node.name)} NodeAddr={node.address} Port={node.port}"
        f" CPUs={CPUS_PER_NODE} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1"
        f" RealMemory={MEMORY_MB_PER_NODE}{gres} State=UNKNOWN"
        for node in spec.nodes
    ]


def _host_of(spec: SandboxSpec, node: str) -> str:
    return node if spec.mode == "isolated" else spec.head_host


def render_cgroup_conf(shape: SlurmShape) -> str:
    """cgroup.conf: the sandbox tracks processes by parentage and leaves the machine's control groups alone."""
    return "CgroupPlugin=disabled\n" if shape.has_cgroup_disabled else ""


def render_gres_conf(spec: SandboxSpec) -> str:
    """gres.conf: ordinary files stand for GPU devices."""
    if not spec.gpus_per_node:
        return ""
    return f"Name=gpu Flags=nvidia_gpu_env File={spec.root}/gpu/gpu[0-{spec.gpus_per_node - 1}]\n"


def render_hosts(spec: SandboxSpec) -> str:
    """/etc/hosts as the isolated nodes and the controller see it."""
    # Since 24.11 the controller looks up the host that a command came from, for seconds, holding its locks.
    lines = ["127.0.0.1 localhost", f"{spec.head_address} {spec.head_host} {spec.machine_host}"]
    if spec.has_standby:
        lines.append(f"{spec.standby_address} {STANDBY_HOST}")
    return "\n".join(lines + [f"{node.address} {node.name}" for node in spec.nodes]) + "\n"


# No name server is reachable from a node: refused at once beats five seconds of silence for each unknown name.
RESOLV_CONF = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
