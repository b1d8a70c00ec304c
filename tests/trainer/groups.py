"""Runs a function on several ranks, joined by gloo, and returns what each of them returned."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 120.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trainer.example.loop", "torch._dynamo"])


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, is_joined: bool = True) -> list[Any]:
    """What `work(*arguments)` returns on each of `world` ranks, in their order; a rank's error is the caller's.

    `is_joined` False: `work` joins the group itself.
    """
    port = _free_port()
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
    processes = [
        _CONTEXT.Process(target=_join, args=(rank, world, port, sender, work, arguments, is_joined), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        return [_receive(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _receive(rank: int, receiver: Connection) -> Any:
    assert receiver.poll(LIMIT_S), f"rank {rank} has no result within {LIMIT_S:g} s"
    try:
        value, error = receiver.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a word") from None
    assert not error, f"rank {rank}:\n{error}"
    return value


def _join(
    rank: int,
    world: int,
    port: int,
    sender: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    is_joined: bool,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if is_joined:
            dist.init_process_group("gloo")
        sender.send((work(*arguments), ""))
        if is_joined:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - told to the test
        sender.send((None, traceback.format_exc()))
        sys.exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
