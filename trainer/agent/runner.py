"""One torchrun beside the agent, imported ahead of its arguments, and what it says of its workers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.agent.place import Place
from trainer.agent.program import Program
from trainer.beats import ChannelError, LineBuffer, Message
from trainer.contract import AttemptSpec

RUNNER = Path(__file__).parents[1] / "torchrun.py"


def torchrun_arguments(
    spec: AttemptSpec, program: Program, place: Place, *, log_dir: str, local_addr: str
) -> list[str]:
    """Torchrun's arguments on one node.

    The static rendezvous: node ranks are the launcher's, and it starts 0.8 s faster than c10d. Worker restarts are
    the launcher's too (every node at once): torchrun's own restart each node by itself and fail to meet again.
    """
    tee = ["--tee=0:3"] if place.rank == 0 else []
    return [
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={spec.procs_per_node}",
        f"--node-rank={place.rank}",
        f"--master-addr={place.master_addr}",
        f"--master-port={place.master_port}",
        f"--rdzv-id={place.rdzv_id}",
        f"--local-addr={local_addr}",
        "--max-restarts=0",
        f"--log-dir={log_dir}",
        "--redirects=3",
        *tee,
        *program.arguments,
    ]


class Runner:
    """One torchrun: imported ahead, started when its arguments are known."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lines = LineBuffer(1024 * 1024)
        self._report, write_end = os.pipe()
        os.set_blocking(self._report, False)
        try:
            self.process = subprocess.Popen(
                [*command, str(write_end)],
                stdin=subprocess.PIPE,
                env=dict(environment),
                pass_fds=(write_end,),
            )
        finally:
            os.close(write_end)

    def train(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Hand over the arguments; what is wrong with them shows in the exit code."""
        stdin = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already: its exit code says why
            stdin.write(json.dumps({"argv": list(argv), "environment": dict(environment)}).encode() + b"\n")
            stdin.close()

    def read_reports(self) -> list[Message]:
        """What it has said since the last call."""
        with contextlib.suppress(OSError, ChannelError):
            return self._lines.feed(os.read(self._report, 65536))
        return []

    def exit_code(self) -> int | None:
        """As a shell gives it, or None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code
