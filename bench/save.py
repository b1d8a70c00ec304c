"""`make bench-save`: how long training stands still for a save, against DCP's synchronous save of the same state."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import describe_machine, finish, median, render_table, show

WORLD = 2
_WIDTH = 1536
_LAYERS = 6  # 14 million weights; with Adam's two moments three times that, 4 bytes each: 170 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of each save, as rank 0 saw them."""

    sync_s: list[float]
    blocking_s: list[float]
    total_s: list[float]
    bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.save", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind, in turns; one more warms up")
    options = parser.parse_args(argv)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        times = _run_ranks(Path(folder), options.repeats)
    result = _result(times)
    _tell(result)
    finish("save", result, machine)
    return 0


def _run_ranks(folder: Path, repeats: int) -> Times:
    from torch.multiprocessing.spawn import spawn

    spawn(_rank, args=(str(folder), repeats, _free_port()), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return Times(**json.loads((folder / "times.json").read_text()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- in each rank


def _rank(rank: int, folder: str, repeats: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times = _measure(Path(folder), rank, repeats)
    if rank == 0:
        text = {"sync_s": times.sync_s, "blocking_s": times.blocking_s, "total_s": times.total_s, "bytes": times.bytes}
        (Path(folder) / "times.json").write_text(json.dumps(text))
    dist.destroy_process_group()


def _measure(folder: Path, rank: int, repeats: int) -> Times:
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    from trainer.checkpoint import Checkpointer

    state = _build_state(rank)
    checkpointer = Checkpointer(folder / "run", "bench", 1, keep_last=2)
    sync_s, blocking_s, total_s, size = [], [], [], 0
    for number in range(repeats + 1):
        dist.barrier()
        began = time.monotonic()
        path = folder / f"sync-{number}"
        dcp_save(state.collect(), storage_writer=FileSystemWriter(path))
        sync_s.append(time.monotonic() - began)
        size = sum(file.stat().st_size for file in path.iterdir())
        state.step += 1
        dist.barrier()
        blocking_s.append(checkpointer.save(state))
        result = checkpointer.wait()
        assert result is not None
        assert result.is_verified, result.error
        total_s.append(result.total_s)
    return Times(sync_s=sync_s[1:], blocking_s=blocking_s[1:], total_s=total_s[1:], bytes=size)


def _build_state(rank: int) -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard

    from trainer.state import TrainState

    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, _WIDTH)).sum().backward()
    optimizer.step()
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        base_seed=1,
        rank=rank,
        world=WORLD,
    )


# ---------------------------------------------------------------- the result


def _result(times: Times) -> dict[str, Any]:
    sync_s, blocking_s = median(times.sync_s, 4), median(times.blocking_s, 4)
    return {
        "bytes": times.bytes,
        "ranks": WORLD,
        "saves": len(times.sync_s),
        "sync_s": sync_s,
        "blocking_s": blocking_s,
        "total_s": median(times.total_s, 4),
        "sync_over_blocking": round(sync_s / blocking_s, 1) if sync_s and blocking_s else None,
        "each": {"sync_s": times.sync_s, "blocking_s": times.blocking_s, "total_s": times.total_s},
    }


def _tell(result: dict[str, Any]) -> None:
    print(
        f"\nSaving {result['bytes'] / 1e6:.0f} MB on {WORLD} ranks (gloo), median of {result['saves']} saves, seconds"
    )
    rows = [
        ("torch.distributed.checkpoint.save", show(result["sync_s"], 3), show(result["sync_s"], 3), "no"),
        ("trainer.checkpoint", show(result["blocking_s"], 3), show(result["total_s"], 3), "yes"),
    ]
    print(render_table(("save", "training stands still", "until done", "read back and verified"), rows))
    print(f"\ntraining stands still {show(result['sync_over_blocking'])} times shorter")


if __name__ == "__main__":
    sys.exit(main())
