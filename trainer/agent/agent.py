"""One node of the training step, from its hello to its end: what it makes of its orders and of its ranks.

It trains only while the launcher answers: a node that is cut off kills its ranks before somebody else writes in their
place. Nothing that it started survives it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer import contract
from trainer.agent.place import Place, parse_place
from trainer.agent.probe import ProbeRun, plain_checks
from trainer.agent.program import Program, choose_program
from trainer.agent.runner import RUNNER, Runner, torchrun_arguments
from trainer.agent.surroundings import find_interface, hold_port, is_listening, training_environment
from trainer.agent.words import (
    CONSOLE_TAIL_BYTES,
    LOG_TAIL_BYTES,
    find_worker_log,
    is_victim,
    read_nccl_warnings,
    read_tail,
)
from trainer.beats import BeatClient, Message
from trainer.contract import AttemptSpec, CheckResult, NodeReport, RunPaths
from trainer.descendants import has_children, kill_descendants, signal_workers
from trainer.verdict import EXIT_MISCONFIGURED

LAUNCHER_LOST_S = 10.0  # without a word from the launcher for this long a node stops its ranks
LOG_READ_LIMIT_S = 2.0  # a file system that hangs must not hold the exit code back
FAREWELL_LIMIT_S = 10.0
EXIT_TERMINATED = 128 + signal.SIGTERM

_TICK_S = 0.5
_START_TICK_S = 0.02  # while seconds count


class NodeAgent:
    """One node of the training step, from its hello to its end."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        attempt_dir: Path,
        node: str,
        launcher: tuple[str, int],
        secret: str,
        environment: Mapping[str, str],
        runner_command: Callable[[Program], Sequence[str]] | None = None,
        lost_after_s: float = LAUNCHER_LOST_S,
    ) -> None:
        self._spec = spec
        self._attempt_dir = attempt_dir
        self._node = node
        self._log_dir = RunPaths(attempt_dir.parent.parent).logs(spec.attempt) / node
        self._environment = training_environment(spec, attempt_dir.parent.parent, node, environment)
        self._program = choose_program(spec.command, sys.executable)
        self._runner_command = runner_command or (lambda program: (program.python, str(RUNNER)))
        self._lost_after_s = lost_after_s
        self._runner: Runner | None = None
        self._probe: ProbeRun | None = None
        self._state = "starting"
        self._checks: tuple[CheckResult, ...] = ()
        self._checked: Message | None = None
        self._ended: Message | None = None
        self._failure: Message = {}
        self._held_port = hold_port()
        self._place: Place | None = None
        self._listening: Message | None = None
        self._is_training = False
        self._saw_workers = False
        self._requests: dict[int, int] = {}  # signals that the training is to get, by the launcher's count
        self._told: dict[int, set[int]] = {}  # who has had each of them
        self._untold: set[int] = set()
        self._is_terminated = False  # SIGTERM came to this node
        self._own_requests = 0  # sent to this node alone: counted downwards
        self._events: list[Message] = []
        self._client = BeatClient(
            address=launcher,
            hello={
                "type": "hello",
                "secret": secret,
                "node": node,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            },
            interval_s=spec.beat_interval_s,
            state=lambda: {"state": self._state},
            connected=self._list_news,
            lost_after_s=lost_after_s,
        )

    def run(self) -> int:
        """Check, train when told so, and return the exit code of this node."""
        self._note("node.started")
        self._install_signals()
        self._client.start()
        try:
            self._make_log_dir()
            self._prepare_runner()
            self._begin_checks()
            return self._serve()
        finally:
            kill_descendants()
            self._client.stop(2.0)

    def _serve(self) -> int:
        farewell_at: float | None = None
        while True:
            order = self._next_order()
            kind = order["type"]
            if kind == "go":
                self._begin_training(parse_place(order))
                farewell_at = None
            elif kind == "spare" and self._ended is None:
                self._state = "spare"
            elif kind == "signal":
                self._take_request(order)
            elif kind == "kill":
                self._end(int(order.get("exit_code", EXIT_TERMINATED)), str(order.get("reason", "told to stop")))
            elif kind == "bye":
                return self._finish()
            self._look_at_checks()
            self._look_at_training()
            self._pass_requests_on()
            if self._client.is_lost():
                self._end(EXIT_TERMINATED, f"no word from the launcher for {self._lost_after_s:g} s: ranks stopped")
                return self._finish()
            if self._ended is not None:
                farewell_at = farewell_at or time.monotonic() + FAREWELL_LIMIT_S
                if self._spec.worker_restarts == 0 and time.monotonic() > farewell_at:
                    return self._finish()

    def _list_news(self) -> list[Message]:
        news = (*self._events, self._checked, self._listening, self._ended)
        return [message for message in news if message is not None]

    def _next_order(self) -> Message:
        is_starting = self._is_training and not self._saw_workers
        try:
            return self._client.inbox.get(timeout=_START_TICK_S if is_starting else _TICK_S)
        except queue.Empty:
            return {"type": "tick"}

    # ---- checks

    def _begin_checks(self) -> None:
        if self._ended is not None:
            return
        self._state = "checking"
        if self._spec.start_checks:
            self._probe = ProbeRun(
                self._spec.start_checks,
                limit_s=self._spec.start_checks_timeout_s,
                environment=self._environment,
            )
        else:
            self._report_checks(())

    def _look_at_checks(self) -> None:
        if self._probe is None or self._checked is not None:
            return
        results = self._probe.poll()
        if results is not None:
            self._report_checks(results)

    def _report_checks(self, results: tuple[CheckResult, ...]) -> None:
        self._checks = results
        self._checked = {"type": "checked", "checks": plain_checks(results), "port": self._port()}
        self._client.send(self._checked)
        failed = [check.check for check in results if check.ok is False]
        if failed:
            self._end(contract.EXIT_NODE_CHECK_FAILED, f"start checks failed: {', '.join(failed)}")
        elif results:
            self._write_report(None, "")

    def _port(self) -> int:
        return int(self._held_port.getsockname()[1])

    # ---- training

    def _make_log_dir(self) -> None:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # torchrun will fail over it, and say so in its exit code
            print(f"{self._node}: {error}", file=sys.stderr, flush=True)

    def _prepare_runner(self) -> None:
        """Let torchrun be imported now, for when it is needed."""
        try:
            self._runner = Runner(self._runner_command(self._program), self._environment)
        except OSError as error:
            self._end(EXIT_MISCONFIGURED, f"{self._program.python} could not be started: {error}")

    def _begin_training(self, place: Place) -> None:
        if place == self._place:
            return  # told again after a reconnection
        self._place = place
        self._untold, self._told = set(self._requests), {count: set() for count in self._requests}  # new processes
        self._listening, self._ended, self._failure, self._saw_workers = None, None, {}, False
        if self._runner is None:
            self._prepare_runner()
        if self._runner is None:
            return
        local = self._client.local_address
        interface = find_interface(local)
        names = {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface} if interface else {}
        self._runner.train(
            torchrun_arguments(self._spec, self._program, place, log_dir=str(self._log_dir), local_addr=local),
            {k: v for k, v in names.items() if k not in self._environment},
        )
        self._state, self._is_training = "running", True
        self._note("torchrun.started")

    def _look_at_training(self) -> None:
        runner = self._runner
        if runner is None:
            return
        for report in runner.read_reports():
            if report["type"] == "ready":
                self._note("torchrun.imported", report.get("time"))
            elif report["type"] == "failed":
                self._failure = report
        if not self._is_training:
            return
        self._look_at_rendezvous()
        if not self._saw_workers and has_children(runner.process.pid):
            self._saw_workers = True
            self._note("workers.started")
        code = runner.exit_code()
        if code is not None:
            for report in runner.read_reports():
                self._failure = report if report["type"] == "failed" else self._failure
            self._end(code, self._describe_end(code))

    # ---- requests to save

    def _take_request(self, order: Message) -> None:
        """Remember a signal for the training, which may not run yet."""
        count, number = int(order.get("count", 0)), int(order["number"])
        if count not in self._requests:
            self._requests[count] = number
            self._told[count] = set()
            self._untold.add(count)

    def _pass_requests_on(self) -> None:
        if self._runner is None or not self._is_training:
            return
        for count in sorted(self._untold):
            pid, workers = self._runner.process.pid, self._spec.procs_per_node
            if signal_workers(self._requests[count], pid, workers=workers, told=self._told[count]):
                self._untold.discard(count)

    def _look_at_rendezvous(self) -> None:
        """Say when the others may come: who knocks before torchrun listens waits half a second in vain."""
        place = self._place
        if place is None or place.rank != 0 or self._listening is not None:
            return
        if is_listening(self._client.local_address, place.master_port):
            self._listening = {"type": "listening", "rdzv_id": place.rdzv_id}
            self._client.send(self._listening)
            self._note("rendezvous.opened")

    def _describe_end(self, code: int) -> str:
        if code == 0:
            return "finished"
        if not self._failure:
            return f"torchrun ended with exit code {code}"
        return f"rank {self._failure.get('rank')} ended with exit code {self._failure.get('exit_code')}"

    def _end(self, code: int, reason: str) -> None:
        """Stop everything on this node and say so, once for each start of the training."""
        if self._ended is not None:
            self._client.send(self._ended)
            return
        left = kill_descendants()
        self._is_training, self._runner = False, None
        self._state = "ended"
        self._held_port.close()
        self._held_port = hold_port()  # for the next start: the old one may stay busy for a minute
        if left:
            reason += f"; processes {left} survive SIGKILL"
        tail = self._read_log_tail(code)
        self._ended = {
            "type": "ended",
            "exit_code": code,
            "reason": reason,
            "victim": is_victim(tail),
            "terminated": self._is_terminated,
            "rank": self._failure.get("rank"),
            "port": self._port(),
        }
        self._client.send(self._ended)
        self._write_report(code, tail)
        if self._spec.worker_restarts > 0 and code not in (0, EXIT_MISCONFIGURED):
            self._prepare_runner()

    def _read_log_tail(self, code: int) -> str:
        """The failing worker's last words; empty when the file system does not give them soon."""
        if code == 0:
            return ""
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(self._find_last_words()), daemon=True)
        reader.start()
        reader.join(LOG_READ_LIMIT_S)
        tail = found[0] if found else ""
        if self._failure and tail:
            print(f"{self._node}: last words:\n{tail[-CONSOLE_TAIL_BYTES:]}", file=sys.stderr, flush=True)
        return tail

    def _find_last_words(self) -> str:
        local_rank = self._failure.get("local_rank")
        log = find_worker_log(self._log_dir, local_rank if isinstance(local_rank, int) else 0)
        tail = read_tail(log, LOG_TAIL_BYTES) if log else ""
        return (read_nccl_warnings(self._log_dir) + tail)[-LOG_TAIL_BYTES:]

    def _finish(self) -> int:
        code = self._ended["exit_code"] if self._ended else 0
        return int(code)

    # ---- surroundings

    def _write_report(self, code: int | None, log_tail: str) -> None:
        report = NodeReport(
            attempt=self._spec.attempt,
            node=self._node,
            host=socket.gethostname(),
            time=time.time(),
            checks=self._checks,
            exit_code=code,
            log_tail=log_tail,
        )
        try:
            contract.write_json(self._attempt_dir / "nodes" / f"{self._node}.json", report)
        except OSError as error:  # a full disk must not hide the exit code
            print(f"{self._node}: node report not written: {error}", file=sys.stderr, flush=True)

    def _note(self, event: str, at: float | None = None) -> None:
        message: Message = {"type": "event", "event": event, "time": time.time() if at is None else at}
        self._events.append(message)
        self._client.send(message)

    def _install_signals(self) -> None:
        def stop(number: int, _frame: object) -> None:
            reason = f"signal {signal.Signals(number).name}"
            self._is_terminated = number == signal.SIGTERM
            self._client.inbox.put({"type": "kill", "exit_code": 128 + number, "reason": reason})

        def forward(number: int, _frame: object) -> None:
            self._own_requests -= 1
            self._client.inbox.put({"type": "signal", "number": number, "count": self._own_requests})

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGUSR1, forward)
        signal.signal(signal.SIGUSR2, forward)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: self._client.inbox.put({"type": "tick"}))
