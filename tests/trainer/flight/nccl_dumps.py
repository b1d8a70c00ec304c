"""Flight Recorder dumps as ProcessGroupNCCL writes them, of chosen content: no GPU is needed to test with them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

BEGAN_NS = 1_772_470_000_000_000_000


def entry(
    seq: int,
    *,
    op: str = "all_reduce",
    group: str = "0",
    description: str = "default_pg",
    number: int = 0,
    state: str = "completed",
    sizes: Sequence[Sequence[int]] = ((8,),),
    dtype: str = "Float",
    at_s: float = 0.0,
    is_p2p: bool = False,
    p2p_seq: int = 0,
    **others: Any,
) -> dict[str, Any]:
    """One entry; completed and retired unless `state` says something else."""
    is_over = state == "completed"
    created = BEGAN_NS + int((seq + at_s) * 1e9)
    return {
        "record_id": seq,
        "pg_id": number,
        "process_group": (group, description),
        "collective_seq_id": seq,
        "p2p_seq_id": p2p_seq,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": created,
        "duration_ms": 0.25 if is_over else None,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": [dtype] * len(sizes),
        "output_sizes": [list(size) for size in sizes],
        "output_dtypes": [dtype] * len(sizes),
        "state": state,
        "time_discovered_started_ns": created + 1000 if state != "scheduled" else None,
        "time_discovered_completed_ns": created + 2000 if is_over else None,
        "retired": is_over,
        "timeout_ms": 600000,
        "is_p2p": is_p2p,
        "frames": [
            {"name": "all_reduce", "filename": "/env/lib/python3.11/site-packages/torch/distributed/x.py", "line": 9},
            {"name": "step", "filename": "/home/u/train.py", "line": 40 + seq},
        ],
        **others,
    }


def dump(
    entries: Sequence[Mapping[str, Any]], *, groups: Mapping[str, str], version: str = "2.10", **others: Any
) -> bytes:
    """A rank's dump. `groups`: name → ranks as PyTorch spells them, "[0, 1]"."""
    numbers = {str(e["process_group"][0]): str(e["pg_id"]) for e in entries}
    status = {
        numbers.get(name, name): {
            "last_enqueued_collective": max([e["collective_seq_id"] for e in own], default=-1),
            "last_started_collective": -1,
            "last_completed_collective": max([e["collective_seq_id"] for e in own if e["retired"]], default=-1),
        }
        for name in groups
        for own in [[e for e in entries if e["process_group"][0] == name]]
    }
    return pickle.dumps(
        {
            "version": version,
            "comm_lib_version": "2.27.3",
            "pg_config": {
                name: {"name": name, "desc": "default_pg" if name == "0" else f"mesh_{name}", "ranks": ranks}
                for name, ranks in groups.items()
            },
            "pg_status": status,
            "nccl_comm_state": {"0x7f": {"rank": "0", "n_ranks": "4", "id": "abc"}},
            "entries": [dict(e) for e in entries],
            **others,
        },
        protocol=2,
    )
