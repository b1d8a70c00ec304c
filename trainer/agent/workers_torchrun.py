"""Ranks started by torchrun, imported ahead of its arguments (trainer/torchrun.py), and what it says of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.agent.place import Place
from trainer.agent.program import Program
from trainer.agent.rank_processes import describe_code, port_taken, stop_processes
from trainer.agent.words import find_worker_log
from trainer.agent.workers import FAILED, FINISHED, START_FAILED, Setting, WorkersEnd, is_python
from trainer.beats import ChannelError, LineBuffer, Message
from trainer.descendants import find_workers
from trainer.verdict import EXIT_MISCONFIGURED

RUNNER = Path(__file__).parents[1] / "torchrun.py"


def torchrun_arguments(
    setting: Setting, program: Program, place: Place, environment: Mapping[str, str], *, local_addr: str
) -> list[str]:
    """Torchrun's arguments on one node.

    The static rendezvous: node ranks are the launcher's, and it starts 0.8 s faster than c10d. Worker restarts are
    the launcher's too (every node at once): torchrun's own restart each node by itself and fail to meet again.
    """
    tee = ["--tee=0:3"] if place.rank == 0 else []
    words = program.arguments
    if setting.prefix:
        inner = (environment.get("PYTHON_EXEC") or program.python, "-u", *words) if is_python(program) else words[1:]
        words = ("--no-python", *setting.prefix, *inner)
    return [
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={setting.procs}",
        f"--node-rank={place.rank}",
        f"--master-addr={place.master_addr}",
        f"--master-port={place.master_port}",
        f"--rdzv-id={place.rdzv_id}",
        f"--local-addr={local_addr}",
        "--max-restarts=0",
        f"--log-dir={setting.log_dir}",
        "--redirects=3",
        *tee,
        *words,
    ]


class Runner:
    """One torchrun: imported ahead, started when its arguments are known."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        self.environment = dict(environment)
        self._lines = LineBuffer(1024 * 1024)
        self._report, write_end = os.pipe()
        os.set_blocking(self._report, False)
        try:
            self.process = subprocess.Popen(
                [*command, str(write_end)],
                stdin=subprocess.PIPE,
                env=self.environment,
                pass_fds=(write_end,),
            )
        except OSError:
            os.close(self._report)
            raise
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

    def close(self) -> None:
        """Let go of its pipes; it is dead, or will be."""
        for stream in (self.process.stdin,):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(OSError):
            os.close(self._report)


class TorchrunWorkers:
    """One torchrun around the ranks of each start; the next one is imported meanwhile when asked to."""

    opens_port = True

    def __init__(
        self,
        setting: Setting,
        program: Program,
        environment: Mapping[str, str],
        *,
        local_addr: Callable[[], str],
        command: Callable[[Program], Sequence[str]] | None = None,
    ) -> None:
        """`command`: what stands for trainer/torchrun.py, in tests."""
        self._setting = setting
        self._program = program
        self._environment = environment
        self._local_addr = local_addr
        self._command = command or (lambda program: (program.python, str(RUNNER)))
        self._next: Runner | None = None
        self._runner: Runner | None = None
        self._place: Place | None = None
        self._failure: Message = {}
        self._end: WorkersEnd | None = None

    def prepare(self) -> None:
        """Let a torchrun be imported now, for when it is needed."""
        if self._next is None:
            with contextlib.suppress(OSError):  # told when it is to start
                self._next = Runner(self._command(self._program), self._environment)

    def settle(self) -> None:
        """All of it is prepared ahead."""

    def start(self, place: Place, program: Program, environment: Mapping[str, str]) -> None:
        """Start the ranks: with the torchrun that is prepared, if it was for this program."""
        self._place, self._failure, self._end = place, {}, None
        if program.python != self._program.python and self._next is not None:
            self._next.process.kill()
            self._next = None
        self._program = program
        try:
            self._runner = self._next or Runner(self._command(program), self._environment)
        except OSError as error:
            reason = f"{program.python} could not be started: {error}"
            self._end = WorkersEnd(kind=START_FAILED, exit_code=EXIT_MISCONFIGURED, reason=reason)
            return
        self._next = None
        argv = torchrun_arguments(self._setting, program, place, environment, local_addr=self._local_addr())
        self._runner.train(argv, environment)

    def poll(self) -> WorkersEnd | None:
        """See `Workers`. Torchrun tells after it has stopped the others."""
        runner = self._runner
        if self._end is not None or runner is None:
            return self._end
        code = runner.exit_code()
        for report in runner.read_reports():
            if report["type"] in ("failed", "port_taken"):
                self._failure = report
        if code is not None:
            self._end = self._tell(code)
        return self._end

    def pids(self) -> Mapping[int, int]:
        """See `Workers`."""
        return find_workers(self._runner.process.pid) if self._runner is not None and self._end is None else {}

    def kept(self) -> frozenset[int]:
        """The torchrun that is prepared for the next start."""
        return frozenset() if self._next is None else frozenset({self._next.process.pid})

    def stop(self, grace_s: float) -> list[int]:
        """See `Workers`."""
        if self._runner is None:
            return []
        left = stop_processes(self.pids().values(), grace_s, kept={*self._setting.others(), *self.kept()})
        self._end = self._end or WorkersEnd(kind=FAILED, exit_code=143, reason="stopped")
        self._runner.close()
        self._runner = None
        return left

    def close(self) -> None:
        """End the torchrun that is prepared, too."""
        if self._next is not None:
            self._next.process.kill()
            self._next.process.wait()
            self._next.close()
            self._next = None
        self.stop(0.0)

    def _tell(self, code: int) -> WorkersEnd:
        if code == 0:
            return WorkersEnd(kind=FINISHED, exit_code=0, reason="finished")
        local_rank, rank = self._failure.get("local_rank"), self._failure.get("rank")
        log = find_worker_log(self._setting.log_dir, local_rank if isinstance(local_rank, int) else 0)
        assert self._place is not None
        if rank is None:
            if self._failure:
                return port_taken(self._place)
            return WorkersEnd(kind=FAILED, exit_code=code, reason=f"torchrun ended with {describe_code(code)}")
        return WorkersEnd(
            kind=FAILED,
            exit_code=code,
            rank=rank,
            local_rank=local_rank,
            error_file=str(self._failure.get("error_file") or ""),
            log=str(log or ""),
            reason=f"rank {rank} ended with {describe_code(int(self._failure.get('exit_code', code)))}",
        )
