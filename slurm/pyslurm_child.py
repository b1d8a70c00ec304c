"""The process that imports pyslurm and may die of it: questions and answers are JSON, one object a line.

Question: `{"id": 1, "ask": "release" | "cluster" | "jobs" | "nodes"}`. Answer: `{"id": 1, "ok": value}` or
`{"id": 1, "error": text}`; a row that can't be read is `{"unreadable": text, "why": text}` among the others.
Standard library and pyslurm only. It ends when its standard input does, and with it whoever started it.

Seen: `import pyslurm` without a reachable configuration ends the process, without an exception; a load blocks for many
seconds when the controller is frozen. Attributes used, all of pyslurm 25.11: `__version__`; `slurmctld.Config.load()`
(those in `_CONFIG`); `Partitions.load()` (name, is_default), `Jobs.load()` (those in `_JOB`, user_id, user_name) and
`Nodes.load()` (those in `_NODE`, reason_user), and their `values()`; and `_get_exit_code` of its module of jobs (see
`mend_exit_codes`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

_CONFIG = (
    "cluster_name",
    "version",
    "accounting_storage_type",
    "slurmd_timeout",
    "min_job_age",
    "message_timeout",
    "slurmd_port",
)
_JOB = (
    "id",
    "state",
    "name",
    "partition",
    "comment",
    "state_reason",
    "allocated_nodes",
    "submit_time",
    "start_time",
    "end_time",
    "exit_code",
    "exit_code_signal",
    "requeue_count",
)
_NODE = (
    "name",
    "state",
    "address",
    "hostname",
    "slurmd_port",
    "partitions",
    "reason",
    "reason_time",
    "total_cpus",
    "real_memory",
    "configured_gres",
    "boot_time",
    "slurm_version",
)

_JOBS_MODULE = "pyslurm.core.job.job"

Row = dict[str, Any]


def ask_release() -> str:
    """The version of pyslurm; its first two numbers are the Slurm release it was built for."""
    import pyslurm

    return str(pyslurm.__version__)


def ask_cluster() -> Row:
    """The controller's configuration and the names of the partitions."""
    import pyslurm

    config = pyslurm.slurmctld.Config.load()
    partitions = list(pyslurm.Partitions.load().values())
    return {
        **_read(config, _CONFIG),
        "partitions": [partition.name for partition in partitions],
        "default_partition": next((partition.name for partition in partitions if partition.is_default), None),
    }


def ask_jobs() -> list[Row]:
    """All jobs in the controller's memory; with `is_exit_code_cut` where 128 may be missing from an exit code."""
    import pyslurm

    kind = {} if mend_exit_codes() else {"is_exit_code_cut": True}
    names: dict[Any, Any] = {}

    def read(job: Any) -> Row:
        # The library asks the system's user database for each job: here once for each user.
        if job.user_id not in names:
            names[job.user_id] = job.user_name
        return {**_read(job, _JOB), "user_name": names[job.user_id], **kind}

    return _rows(pyslurm.Jobs.load().values(), read)


def mend_exit_codes() -> bool:
    """Make pyslurm, once imported, give exit codes as they were; False for a pyslurm that is built otherwise.

    Its own function takes 128 from a code of 128 and more: 137 would be 9, and 203 would be 75, which asks to be
    resubmitted. There is no other access to Slurm's word.
    """
    jobs: Any = sys.modules.get(_JOBS_MODULE)
    if not hasattr(jobs, "_get_exit_code"):
        return False
    jobs._get_exit_code = split_wait_status  # noqa: SLF001
    return True


def split_wait_status(status: int) -> tuple[int | None, int | None]:
    """(exit code, signal) of a wait(2) status word; nothing for Slurm's word for "none"."""
    return (status >> 8, status & 0x7F) if 0 <= status < 2**16 else (None, None)


def ask_nodes() -> list[Row]:
    """All nodes."""
    import pyslurm

    def read(node: Any) -> Row:
        # Without a reason the library would look up uid 0, for each node.
        return {**_read(node, _NODE), "reason_user": node.reason_user if node.reason else None}

    return _rows(pyslurm.Nodes.load().values(), read)


_ANSWERS: dict[str, Callable[[], Any]] = {
    "release": ask_release,
    "cluster": ask_cluster,
    "jobs": ask_jobs,
    "nodes": ask_nodes,
}


def _rows(records: Iterable[Any], read: Callable[[Any], Row]) -> list[Row]:
    rows: list[Row] = []
    for record in records:
        try:
            rows.append(read(record))
        except Exception as error:  # noqa: BLE001 - one bad record must not hide the others
            rows.append({"unreadable": repr(record), "why": f"{type(error).__name__}: {error}"})
    return rows


def _read(record: Any, names: tuple[str, ...]) -> Row:
    return dict(zip(names, attrgetter(*names)(record), strict=True))


def answer(line: str) -> Row:
    """The answer to one question; exceptions of pyslurm become its error."""
    question = json.loads(line)
    try:
        return {"id": question["id"], "ok": _ANSWERS[question["ask"]]()}
    except Exception as error:  # noqa: BLE001 - pyslurm's errors are known only once it is imported
        return {"id": question["id"], "error": f"{type(error).__name__}: {error}"}


def main() -> int:
    """Answer until standard input ends."""
    # Slurm's library prints to where it likes: answers have a pipe of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(line), default=str, separators=(",", ":")) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
