"""One rank of a gloo training that is made to stop in a known way, and the Flight Recorder dump of it.

`python -m tests.trainer.flight.desync FOLDER [SCENARIO…]` makes the dumps of all scenarios there, as tests/data/flight
holds them (without stacks: they would name the folders of the machine); a test makes those of one of them anew.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 4
SCENARIOS = (
    "all_well",  # nothing is stuck
    "sleeper",  # rank 2 does not come to the fourth all_reduce
    "other_op",  # rank 1 calls broadcast where the others call all_reduce
    "other_size",  # rank 1 has half as many elements; gloo ends it for that, after the dumps
    "other_dtype",  # rank 1 has integers, of as many bytes: gloo sums them up as if they were numbers with a point
    "other_order",  # rank 3 uses two groups in the other order
    "killed",  # rank 3 dies before the fourth all_reduce, without a dump
    "chain",  # rank 3 is missing in its tensor group; ranks 0-1 wait for it and for rank 2 in theirs
    "skipped",  # rank 1 leaves a barrier out and waits for the others in the next all_reduce
)
_WAIT_S = 60.0


def run_rank(scenario: str, rank: int, folder: Path, *, has_stacks: bool) -> None:
    """Be one rank: call what the scenario says, and dump when all have come as far as they can."""
    from datetime import timedelta

    import torch
    from torch import distributed

    meet = f"file://{folder}/store"
    limit = timedelta(seconds=_WAIT_S)
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS, timeout=limit)
    tensor = torch.ones(16, 4)
    groups = make_groups(scenario, distributed)
    for _ in range(3):
        distributed.all_reduce(tensor)
    (folder / f"begun.{rank}").touch()
    wait_for(lambda: all((folder / f"begun.{other}").exists() for other in range(RANKS)))
    if scenario == "killed" and rank == 3:
        (folder / f"ready.{rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario == "other_size":
        call_and_dump(rank, tensor, folder, has_stacks=has_stacks)
        return
    thread = threading.Thread(target=call_last, args=(scenario, rank, tensor, groups), daemon=True)
    thread.start()
    # as far as it can: the call is over, or is in the recorder and stays there
    thread.join(2.0)
    (folder / f"ready.{rank}").touch()
    wait_for(lambda: all((folder / f"ready.{other}").exists() for other in range(RANKS)))
    dump(folder, rank, has_stacks=has_stacks)
    (folder / f"done.{rank}").touch()
    wait_for(lambda: all((folder / f"done.{other}").exists() for other in range(3 if scenario == "killed" else RANKS)))
    os._exit(0)


def call_and_dump(rank: int, tensor: Any, folder: Path, *, has_stacks: bool) -> None:
    """Rank 1 calls first, each dumps at once: when the data arrive, gloo ends the rank that has other sizes."""
    from torch import distributed

    time.sleep(0.5)  # until the recorder has seen the ends of the calls before
    wait_for(lambda: rank == 1 or (folder / "ready.1").exists())
    distributed.all_reduce(tensor[:8] if rank == 1 else tensor, async_op=True)
    dump(folder, rank, has_stacks=has_stacks)
    (folder / f"ready.{rank}").touch()
    wait_for(lambda: rank == 1 or all((folder / f"ready.{other}").exists() for other in range(RANKS)))
    os._exit(0)


def dump(folder: Path, rank: int, *, has_stacks: bool) -> None:
    """Write what this rank's recorder holds, as PyTorch would."""
    recorder = importlib.import_module("torch._C._distributed_c10d")
    (folder / f"fr_trace_rank_{rank}").write_bytes(recorder._dump_fr_trace(True, has_stacks, False))


def make_groups(scenario: str, distributed: Any) -> list[Any]:
    """The further groups of a scenario; all ranks make all of them."""
    ranks: list[list[int]] = []
    if scenario == "other_order":
        ranks = [[0, 1, 2, 3], [0, 1, 2, 3]]
    if scenario == "chain":
        ranks = [[0, 1], [2, 3], [0, 2], [1, 3]]
    return [distributed.new_group(members) for members in ranks]


def call_last(scenario: str, rank: int, tensor: Any, groups: list[Any]) -> None:
    """What comes after three collectives that went well. Ends, waits, or raises when a peer is gone."""
    import torch
    from torch import distributed

    if scenario == "sleeper" and rank == 2:
        return
    if scenario == "other_op" and rank == 1:
        distributed.broadcast(tensor, src=0)
    elif scenario == "other_dtype" and rank == 1:
        distributed.all_reduce(torch.ones(16, 4, dtype=torch.int32))
    elif scenario == "other_order":
        for group in reversed(groups) if rank == 3 else groups:
            distributed.all_reduce(tensor, group=group)
    elif scenario == "chain":
        if rank != 3:
            distributed.all_reduce(tensor, group=groups[0 if rank < 2 else 1])
            distributed.all_reduce(tensor, group=groups[2 if rank % 2 == 0 else 3])
    else:
        if scenario == "skipped" and rank != 1:
            distributed.all_gather_object([None] * RANKS, rank)
        distributed.all_reduce(tensor)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; gives up, with the process, after a minute."""
    until = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > until:
            os._exit(3)
        time.sleep(0.02)


def make_dumps(scenario: str, folder: Path, *, has_stacks: bool) -> None:
    """Run all ranks of a scenario; their dumps lie in the folder afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.trainer.flight.desync"]
    ranks = [
        subprocess.Popen(
            [*command, scenario, str(rank), str(folder), "1" if has_stacks else "0"],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    try:
        for process in ranks:
            process.wait(timeout=2 * _WAIT_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for path in folder.iterdir():
        if not path.name.startswith("fr_trace_rank_"):
            path.unlink()


if __name__ == "__main__":
    if sys.argv[1:] and Path(sys.argv[1]).is_dir():
        for name in sys.argv[2:] or SCENARIOS:
            make_dumps(name, Path(sys.argv[1]).resolve() / name, has_stacks=False)
    else:
        run_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), has_stacks=sys.argv[4] == "1")
