"""One attempt's training step, from srun to the exit record: the loop that acts. Monotonic clock only."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import contract
from trainer.beats import BeatEvent, BeatServer, Message
from trainer.contract import EXIT_NODE_SILENT, AttemptSpec, ExitRecord, LaunchReport, NodeBeat, Outcome
from trainer.launching.limits import OWN_SILENCE_S, POLL_S, REPORT_INTERVAL_S, Limits
from trainer.launching.nodes import Node
from trainer.launching.writer import Writer, read_outcome
from trainer.step import Step, find_blamed_node, parse_srun_line, srun_command, step_environment
from trainer.verdict import (
    EXIT_MISCONFIGURED,
    EXIT_NOT_STARTED,
    Candidate,
    Go,
    NodeEnd,
    Verdict,
    choose_nodes,
    describe_failed_check,
    judge_ends,
)

EXIT_TERMINATED = 128 + signal.SIGTERM
# What a training says on purpose: starting it again in the same attempt would only bring it there once more.
FINAL_CODES = frozenset(
    {
        contract.EXIT_RESUBMIT,
        contract.EXIT_CHECKPOINT_REJECTED,
        contract.EXIT_DIVERGED,
        contract.EXIT_DO_NOT_RESTART,
    }
)


class Launcher:
    """One attempt's training step, from srun to the exit record."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        attempt_dir: Path,
        nodes: Sequence[str],
        own_node: str,
        own_address: str,
        job_id: int,
        environment: Mapping[str, str],
        agent: Sequence[str],
        limits: Limits,
    ) -> None:
        self._spec = spec
        self._attempt_dir = attempt_dir
        self._own_node = own_node
        self._own_address = own_address
        self._job_id = job_id
        self._environment = environment
        self._agent = (*agent, str(attempt_dir))
        self._limits = limits
        self._nodes = {name: Node(name) for name in nodes}
        self._secret = secrets.token_hex(16)
        self._server = BeatServer(secret=self._secret, nodes=frozenset(nodes))
        self._writer = Writer(attempt_dir)
        self._step: Step | None = None
        self._started_at = self._turned_at = time.monotonic()
        self._enough_at: float | None = None
        self._go: Go | None = None
        self._ends: list[NodeEnd] = []  # of the nodes that train, in the order of their arrival
        self._failed_at: float | None = None
        self._restarts = 0
        self._is_open = False  # the first node's torchrun listens: the others may come
        self._killed_at: float | None = None
        self._silent_since: dict[str, float] = {}
        self._srun_ended_at: float | None = None
        self._seq = 0
        self._reported: tuple[float, object] = (0.0, None)
        self._signals: list[int] = []
        self._requests: list[int] = []  # signals for the training: save and exit
        self._is_terminated = False  # SIGTERM or SIGINT came to the launcher
        self._is_step_terminated = False  # a node got SIGTERM, from Slurm
        self._phase = "starting"

    def run(self) -> int:
        """Run the step to its end and return the job's exit code."""
        self._install_signals()
        self._writer.start()
        self._note("launch.started")
        self._report()
        verdict = self._start_step()
        while verdict is None:
            verdict = self._cycle()
        return self._conclude(verdict)

    def _cycle(self) -> Verdict | None:
        self._forgive_own_silence()
        for event in self._server.poll(POLL_S):
            self._take(event)
        self._look_at_srun()
        self._look_for_dead_agents()
        verdict = self._take_signals() or self._look_for_silence()
        if verdict is None:
            verdict = self._decide_start() if self._go is None else self._look_at_ends()
        self._report()
        return verdict

    # ---- start

    def _start_step(self) -> Verdict | None:
        environment = {
            **step_environment(self._environment),
            contract.ENV_LAUNCHER: f"{self._own_address}:{self._server.port}",
            contract.ENV_LAUNCHER_SECRET: self._secret,
        }
        try:
            self._step = Step(srun_command(list(self._nodes), self._agent, self._environment), environment)
        except OSError as error:
            return Verdict(exit_code=EXIT_MISCONFIGURED, reason=f"srun could not be started: {error}")
        self._phase = "checking"
        self._note("step.started")
        return None

    def _decide_start(self) -> Verdict | None:
        now = time.monotonic()
        candidates = [
            Candidate(
                node=n.name,
                is_connected=n.connected_at is not None,
                is_checked=n.is_checked,
                is_silent=n.name in self._silent_since,
                failed=n.failed or (n.end.reason if n.end else ""),
                exit_code=n.end.exit_code if n.end else None,
            )
            for n in self._nodes.values()
        ]
        healthy = sum(c.is_checked and not c.failed and not c.is_silent for c in candidates)
        if healthy >= self._spec.nodes and self._enough_at is None:
            self._enough_at = now
        choice = choose_nodes(
            candidates,
            self._spec.nodes,
            may_wait_for_spares=self._enough_at is None or now - self._enough_at < self._limits.spare_grace_s,
            is_too_late=self._is_start_late(now),
        )
        if isinstance(choice, Go):
            self._go = choice
            self._send_go()
            return None
        if choice is None and self._is_srun_gone(now):
            return self._judge_failed_start()
        return choice

    def _is_start_late(self, now: float) -> bool:
        connected = [n.connected_at for n in self._nodes.values() if n.connected_at is not None]
        if now - self._started_at > self._limits.connect_s and len(connected) < len(self._nodes):
            return True
        limit_s = self._spec.start_checks_timeout_s + self._limits.checks_margin_s
        return len(connected) == len(self._nodes) and now - max(connected) > limit_s

    def _judge_failed_start(self) -> Verdict:
        lines = self._step.lines if self._step else []
        node = find_blamed_node(lines, list(self._nodes))
        code = EXIT_NODE_SILENT if node else EXIT_NOT_STARTED
        said = lines[0] if lines else "it said nothing"
        return Verdict(exit_code=code, reason=f"the training step did not start; {said}", node=node)

    def _send_go(self) -> None:
        assert self._go is not None
        self._phase = "running"
        self._ends = []
        self._failed_at = self._killed_at = None
        for name in self._go.nodes:
            self._nodes[name].end = None
        self._is_open = False
        self._note("go.sent")
        for name in self._nodes:
            self._tell_place(name)

    def _tell_place(self, name: str) -> None:
        if self._go is None or self._nodes[name].end is not None or self._nodes[name].failed:
            return
        if name not in self._go.nodes:
            self._server.send(name, {"type": "spare"})
            return
        if name != self._go.nodes[0] and not self._is_open:
            return
        master = self._nodes[self._go.nodes[0]]
        self._server.send(
            name,
            {
                "type": "go",
                "rank": self._go.nodes.index(name),
                "nodes": len(self._go.nodes),
                "master_addr": master.address,
                "master_port": master.port,
                "rdzv_id": self._rdzv_id(),
            },
        )

    def _rdzv_id(self) -> str:
        return f"{self._job_id}.{self._spec.attempt}.{self._restarts}"

    # ---- what the nodes say

    def _take(self, event: BeatEvent) -> None:
        node = self._nodes[event.node]
        if event.kind == "closed":
            node.closed_at = time.monotonic()
            return
        node.beat_at = time.monotonic()
        if event.kind == "connected":
            node.closed_at = None
            node.address = event.address
            if node.connected_at is None:
                node.connected_at = node.beat_at
                self._note("node.connected", node.name)
            self._tell_place(node.name)
            for count in range(len(self._requests)):
                self._tell_request(node.name, count)
            return
        self._take_message(node, event.message)

    def _take_message(self, node: Node, message: Message) -> None:
        kind = message["type"]
        if kind == "beat":
            node.state = "ended" if node.end else str(message.get("state", node.state))[:20]
        elif kind == "checked" and not node.is_checked:
            node.failed = describe_failed_check(message)
            node.port = _integer(message.get("port"))
            node.is_checked = True
            self._note("checks.finished", node.name)
        elif kind == "listening" and self._go is not None and message.get("rdzv_id") == self._rdzv_id():
            self._is_open = True
            for name in self._go.nodes[1:]:
                self._tell_place(name)
        elif kind == "ended" and node.end is None:
            node.port = _integer(message.get("port")) or node.port
            self._is_step_terminated |= message.get("terminated") is True
            self._end_node(
                NodeEnd(
                    node=node.name,
                    exit_code=_integer(message.get("exit_code")),
                    reason=str(message.get("reason", ""))[:500],
                    is_victim=message.get("victim") is True or self._killed_at is not None,
                )
            )
        elif kind == "event":
            self._take_event(node, message)

    def _take_event(self, node: Node, message: Message) -> None:
        event, at = message.get("event"), message.get("time")
        if isinstance(event, str) and isinstance(at, float) and (event, at) not in node.events:
            node.events.add((event, at))
            self._note(event, node.name, at)

    def _end_node(self, end: NodeEnd) -> None:
        node = self._nodes[end.node]
        node.end, node.state = end, "ended"
        if self._go is not None and end.node in self._go.nodes:
            self._ends.append(end)
            if end.exit_code != 0 and self._failed_at is None:
                self._failed_at = time.monotonic()
        self._note("node.ended", end.node)

    # ---- the course of the step

    def _look_at_ends(self) -> Verdict | None:
        assert self._go is not None
        now = time.monotonic()
        begun = self._go.nodes if self._is_open else self._go.nodes[:1]
        open_nodes = [name for name in begun if self._nodes[name].end is None]
        if not open_nodes:
            return self._restart_or_end()
        if self._is_srun_gone(now):
            return self._judge_ends()
        if self._failed_at is None:
            return None
        silent = [name for name in open_nodes if name in self._silent_since]
        if silent and not any(self._is_wavering(name, now) for name in open_nodes):
            # its peers fail because of it: they are the victims, whoever reported first
            return self._judge_silence(silent)
        if self._killed_at is None and now - self._failed_at > self._limits.peer_grace_s:
            self._killed_at = now
            for name in open_nodes:
                self._server.send(name, {"type": "kill", "reason": "another node failed"})
        if self._killed_at is not None and now - self._killed_at > self._limits.kill_s:
            return self._judge_ends()
        return None

    def _restart_or_end(self) -> Verdict | None:
        assert self._go is not None
        is_curable = (
            self._failed_at is not None
            and self._restarts < self._spec.worker_restarts
            and self._outcome() is None
            and not any(end.exit_code in FINAL_CODES for end in self._ends)
            and all(self._server.is_connected(name) for name in self._go.nodes)
        )
        if not is_curable:
            return self._judge_ends()
        self._restarts += 1
        self._note("workers.restarted")
        self._send_go()
        return None

    def _judge_ends(self) -> Verdict:
        assert self._go is not None
        alive = [name for name in self._go.nodes if self._server.is_connected(name)]
        return judge_ends(self._ends, self._go.nodes, alive, self._outcome())

    def _judge_silence(self, silent: Sequence[str]) -> Verdict:
        first = min(silent, key=lambda name: self._silent_since[name])
        reason = f"no beat from {', '.join(silent)} for more than {self._spec.suspect_after_s:g} s"
        return Verdict(exit_code=EXIT_NODE_SILENT, reason=reason, node=first)

    def _look_for_dead_agents(self) -> None:
        """An agent that was killed: srun tells of it only when the last process that it left has ended.

        A kernel that closes a connection is alive, so this is no silent node; one that goes down closes them too, and
        is given the time in which the service finds it silent.
        """
        limit = time.monotonic() - 2 * self._spec.suspect_after_s
        for node in self._nodes.values():
            if node.end is None and node.closed_at is not None and node.closed_at < limit:
                self._end_node(NodeEnd(node=node.name, exit_code=1, reason="its agent ended without a word"))

    def _look_for_silence(self) -> Verdict | None:
        now = time.monotonic()
        for node in self._nodes.values():
            is_awaited = node.connected_at is not None and node.end is None
            if is_awaited and self._age_s(node, now) > self._spec.suspect_after_s:
                self._silent_since.setdefault(node.name, now)
            else:
                self._silent_since.pop(node.name, None)
        if self._go is None:
            return None
        silent = [name for name in self._go.nodes if name in self._silent_since]
        if any(now - self._silent_since[name] > self._limits.silent_s for name in silent):
            return self._judge_silence(silent)
        return None

    def _forgive_own_silence(self) -> None:
        """A suspended job stops the launcher too: what it did not hear meanwhile is not the nodes' silence."""
        now = time.monotonic()
        gap_s = now - self._turned_at
        self._turned_at = now
        if gap_s < OWN_SILENCE_S:
            return
        for node in self._nodes.values():
            if node.beat_at is not None:
                node.beat_at += gap_s
            if node.closed_at is not None:
                node.closed_at += gap_s

    def _is_wavering(self, name: str, now: float) -> bool:
        """Neither surely alive nor surely silent: the next second decides."""
        return name not in self._silent_since and self._age_s(self._nodes[name], now) > (self._spec.suspect_after_s / 2)

    def _age_s(self, node: Node, now: float) -> float:
        return now - (self._started_at if node.beat_at is None else node.beat_at)

    def _look_at_srun(self) -> None:
        step = self._step
        if step is None:
            return
        for end in [end for line in step.lines for end in parse_srun_line(line)]:
            node = self._nodes.get(end.node)
            # connected: its own word is on the way, and says more
            if node is not None and node.end is None and not self._server.is_connected(end.node):
                self._end_node(end)
        if self._srun_ended_at is None and step.exit_code() is not None:
            self._srun_ended_at = time.monotonic()

    def _is_srun_gone(self, now: float) -> bool:
        if self._srun_ended_at is None:
            return False
        is_anyone_left = any(self._server.is_connected(name) for name in self._nodes)
        return now - self._srun_ended_at > (self._limits.step_end_s if is_anyone_left else POLL_S)

    def _outcome(self) -> Outcome | None:
        return read_outcome(self._attempt_dir / "outcome.json", self._spec.attempt)

    # ---- end

    def _conclude(self, verdict: Verdict) -> int:
        self._phase = "ending"
        self._report()
        self._stop_nodes(verdict)
        for name in self._nodes:
            self._server.send(name, {"type": "bye"})
        self._wait_for_srun()
        self._note("step.ended")
        self._writer.close(self._exit_record(verdict), 30.0)
        self._server.close()
        print(f"trainer.launch: exit {verdict.exit_code}: {verdict.reason}", file=sys.stderr, flush=True)
        return verdict.exit_code

    def _stop_nodes(self, verdict: Verdict) -> None:
        deadline = time.monotonic() + self._limits.kill_s
        told: set[str] = set()
        while time.monotonic() < deadline and (self._step is None or self._step.exit_code() is None):
            open_nodes = [
                name
                for name, node in self._nodes.items()
                if node.end is None and node.connected_at is not None and name not in self._silent_since
            ]
            if not open_nodes:
                return
            for name in open_nodes:
                if name not in told and self._server.is_connected(name):
                    told.add(name)
                    is_spare = self._go is not None and name not in self._go.nodes
                    code = 0 if is_spare else EXIT_TERMINATED
                    self._server.send(name, {"type": "kill", "exit_code": code, "reason": verdict.reason})
            self._turn()

    def _wait_for_srun(self) -> None:
        if self._step is None:
            return
        deadline = time.monotonic() + self._limits.step_end_s
        is_stuck = False
        while self._step.exit_code() is None and time.monotonic() < deadline:
            if not is_stuck and self._is_srun_stuck():
                is_stuck = True
                deadline = min(deadline, time.monotonic() + self._limits.last_word_s)
            self._turn()
        self._step.stop()

    def _is_srun_stuck(self) -> bool:
        """True when it can only be waiting for nodes that are gone; Slurm ends what is left of them with the job."""
        is_anyone_left = any(self._server.is_connected(name) and name not in self._silent_since for name in self._nodes)
        has_lost_nodes = bool(self._silent_since) or any(n.connected_at is None for n in self._nodes.values())
        return has_lost_nodes and not is_anyone_left

    def _turn(self) -> None:
        for event in self._server.poll(POLL_S):
            self._take(event)
        self._look_at_srun()
        self._look_for_silence()
        self._report()

    def _exit_record(self, verdict: Verdict) -> ExitRecord:
        return ExitRecord(
            attempt=self._spec.attempt,
            job_id=self._job_id,
            exit_code=verdict.exit_code,
            reason=verdict.reason,
            node=verdict.node,
            time=time.time(),
            nodes={n.name: n.end.exit_code if n.end else None for n in self._nodes.values()},
            is_step_terminated=self._is_step_terminated and not self._is_terminated,
        )

    # ---- reporting

    def _report(self) -> None:
        now = time.monotonic()
        silent = tuple(self._silent_since)
        # Who begins to be quiet is told at once: the service looks closer then, and each second is one of recovery.
        quiet = [n.name for n in self._nodes.values() if self._age_s(n, now) > self._spec.suspect_after_s / 2]
        key = (self._phase, silent, quiet, [(n.state, n.end) for n in self._nodes.values()])
        if key == self._reported[1] and now - self._reported[0] < REPORT_INTERVAL_S:
            return
        self._reported = (now, key)
        self._seq += 1
        self._writer.offer(
            LaunchReport(
                attempt=self._spec.attempt,
                job_id=self._job_id,
                seq=self._seq,
                time=time.time(),
                host=self._own_node,
                phase=self._phase,
                nodes={
                    n.name: NodeBeat(
                        state=n.state,
                        age_s=round(self._age_s(n, now), 3),
                        exit_code=n.end.exit_code if n.end else None,
                    )
                    for n in self._nodes.values()
                },
                silent=silent,
            )
        )

    def _note(self, event: str, node: str = "", at: float | None = None) -> None:
        self._writer.note(event, time.time() if at is None else at, node or self._own_node)

    # ---- signals

    def _install_signals(self) -> None:
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        self._server.wake_on(wake)
        self._waker = waker  # closed with the process
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, lambda received, _frame: self._signals.append(received))

    def _take_signals(self) -> Verdict | None:
        received, self._signals = self._signals, []
        for number in received:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._request_save(number, signal.Signals(number).name)
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._is_terminated = True
                silent = sorted(self._silent_since, key=self._silent_since.__getitem__)
                evidence = f"; silent: {', '.join(silent)}" if silent else ""
                reason = f"the launcher received {signal.Signals(number).name}{evidence}"
                return Verdict(exit_code=128 + number, reason=reason, node=silent[0] if silent else None)
        return None

    def _request_save(self, number: int, why: str) -> None:
        """Have the training save, and with SIGUSR1 end; one that has not begun is told as it begins."""
        wish = "save and end" if number == signal.SIGUSR1 else "save"
        print(f"trainer.launch: {why}: the training is asked to {wish}", file=sys.stderr, flush=True)
        self._note("save.requested")
        self._requests.append(number)
        for name in self._nodes:
            self._tell_request(name, len(self._requests) - 1)

    def _tell_request(self, name: str, count: int) -> None:
        self._server.send(name, {"type": "signal", "number": self._requests[count], "count": count + 1})


def _integer(value: object) -> int:
    return value if type(value) is int else 0
