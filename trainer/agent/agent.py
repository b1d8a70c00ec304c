"""One node of the training step, from its hello to its end: what it makes of its orders and of its ranks.

The agent stays while the training starts again and again inside the allocation. Orders carry the number of the start
that they belong to: those of an older one are late and count for nothing, one that comes twice is answered twice and
acted on once. It trains only while the launcher answers: a node that is cut off kills its ranks before somebody else
writes in their place (trainer.agent.outage), and offers itself again when the launcher is back.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer import contract
from trainer.agent.client import BeatClient, Patience
from trainer.agent.ends import describe_end, describe_failure, grace_s
from trainer.agent.errands import Errands
from trainer.agent.leftovers import kill_leftovers
from trainer.agent.news import News
from trainer.agent.notices import install_signals
from trainer.agent.outage import Outage, cut_off, read_boot_id
from trainer.agent.place import parse_place
from trainer.agent.probe import ProbeRun, plain_checks
from trainer.agent.ranks import RankDesk, make_socket_folder
from trainer.agent.reports import Reports, describe_node
from trainer.agent.surroundings import hold_port, wanted_environment
from trainer.agent.training import Training
from trainer.agent.words import CONSOLE_TAIL_BYTES, find_last_words
from trainer.agent.workers import WorkersEnd
from trainer.beats import Message
from trainer.contract import AttemptSpec, CheckResult, RunPaths
from trainer.descendants import kill_descendants

LOG_READ_LIMIT_S = 2.0  # a file system that hangs must not hold the exit code back
FAREWELL_LIMIT_S = 10.0  # from Slurm's SIGTERM to an end without the launcher's leave
EXIT_TERMINATED = 128 + signal.SIGTERM

_TICK_S = 0.25
_START_TICK_S = 0.02  # while seconds count


class NodeAgent:
    """What one node does for one attempt."""

    def __init__(
        self,
        *,
        spec: AttemptSpec,
        attempt_dir: Path,
        node: str,
        launcher: tuple[str, int],
        secret: str,
        environment: Mapping[str, str],
        patience: Patience,
    ) -> None:
        self._spec = spec
        self._run_dir = attempt_dir.parent.parent
        self._node = node
        self._environment = environment
        self._desk = RankDesk(make_socket_folder() / "node.sock", self._wake)
        self._probe: ProbeRun | None = None
        self._checks: tuple[CheckResult, ...] = ()
        self._launch = 0  # the newest start that an order spoke of
        self._state = "starting"
        self._news = News()
        self._held_port = hold_port()
        self._exit_code: int | None = None
        self._leave_at: float | None = None
        self._is_terminated = False  # SIGTERM came to this node
        self._reports = Reports(node)
        self._hello: Message = {
            "type": "hello",
            "secret": secret,
            "node": node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot_id": read_boot_id(),
            "agent": secrets.token_hex(8),  # tells a new agent of this node from a new connection of this one
        }
        self._client = BeatClient(
            address=launcher,
            hello=self._say_hello,
            interval_s=spec.beat_interval_s,
            state=self._describe,
            connected=self._news.listed,
            patience=patience,
        )
        self._news.client = self._client
        self._outage = Outage(self._client)
        self._training = Training(
            spec=spec,
            run_dir=self._run_dir,
            node=node,
            environment=environment,
            desk=self._desk,
            local_address=lambda: self._client.local_address,
            others=self._find_others,
        )
        self._errands = Errands(
            training=self._training,
            desk=self._desk,
            news=self._news,
            client=self._client,
            lost_s=spec.liveness_timeout_s,
        )
        self._orders: Mapping[str, Callable[[Message], None]] = {
            "go": self._go,
            "stop": self._stop,
            "check": self._check,
            "spare": self._rest,
            "evidence": self._errands.collect,
            "drill": self._make_drill,
            "signal": self._take_request,
            "kill": self._kill,
            "bye": self._leave,
            "lost": self._lose_launcher,
            "back": self._find_launcher,
        }

    def run(self) -> int:
        """Check, train when told so, and return the exit code of this node."""
        self._news.note("node.started")
        install_signals(self._client.inbox.put, self._take_termination)
        self._kill_leftovers()  # before the hello: it is the word that nothing older writes here
        self._client.start()
        try:
            self._prepare()
            while self._exit_code is None:
                self._turn(self._next_order())
            return self._exit_code
        finally:
            self._training.close()
            kill_descendants()
            self._desk.close()
            limit_s = 0.1 if self._outage.is_on() else 2.0
            self._reports.flush(limit_s)
            self._client.stop(limit_s)

    def _kill_leftovers(self) -> None:
        left = kill_leftovers(self._run_dir, self._spec.attempt, self._environment)
        if left:
            self._say(f"killed what an older agent left: processes {left}")

    def _prepare(self) -> None:
        self._desk.start()
        self._training.make_log_folder()
        self._training.prepare()
        self._begin_checks()

    def _turn(self, order: Message) -> None:
        act = self._orders.get(order["type"])
        if act is not None:
            act(order)
        if self._exit_code is None:
            self._look_at_checks()
            self._look_at_training()
            self._look_at_time()

    def _next_order(self) -> Message:
        is_opening = self._training.is_opening() and self._news.get("listening") is None
        try:
            return self._client.inbox.get(timeout=_START_TICK_S if is_opening else _TICK_S)
        except queue.Empty:
            return {"type": "tick"}

    # ---- what the launcher hears

    def _say_hello(self) -> Message:
        cut_s = round(self._outage.cut_s(), 3)
        return {**self._hello, "state": self._state, "launch": self._launch, "cut_s": cut_s}

    def _describe(self) -> Message:
        return {"state": self._state, "launch": self._launch, "ranks": self._desk.states()}

    def _wake(self) -> None:
        self._client.beat_now()

    def _say(self, text: str) -> None:
        print(f"{self._node}: {text}", file=sys.stderr, flush=True)

    # ---- checks

    def _check(self, order: Message) -> None:
        launch = int(order["launch"])
        checked = self._news.get("checked")
        if launch < self._launch:
            return
        if checked is not None and checked["launch"] == launch:
            self._news.say(checked)
        elif self._probe is None or launch > self._launch:
            self._launch = launch
            self._begin_checks()

    def _begin_checks(self) -> None:
        self._state = "checking"
        self._news.forget("checked")
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        if self._spec.start_checks:
            self._probe = ProbeRun(
                self._spec.start_checks,
                limit_s=self._spec.start_checks_timeout_s,
                environment=wanted_environment(self._spec, self._environment),
            )
        else:
            self._report_checks(())

    def _look_at_checks(self) -> None:
        results = self._probe.poll() if self._probe is not None else None
        if results is not None:
            self._probe = None
            self._report_checks(results)

    def _report_checks(self, results: tuple[CheckResult, ...]) -> None:
        self._checks = results
        if self._state == "checking":
            self._state = "ready"
        self._news.tell(
            {"type": "checked", "launch": self._launch, "checks": plain_checks(results), "port": self._port()}
        )
        if results:
            self._write_report(None, "")
        if self._failed_checks() and not self._spec.in_job:
            self._end(contract.EXIT_NODE_CHECK_FAILED, self._failed_checks())

    def _failed_checks(self) -> str:
        """Which of the newest checks this node has failed, as a reason; empty when none."""
        failed = [check.check for check in self._checks if check.ok is False]
        return f"start checks failed: {', '.join(failed)}" if failed else ""

    def _find_others(self) -> frozenset[int]:
        """Children of this process that are none of the training's."""
        return self._probe.pids() if self._probe is not None else frozenset()

    def _port(self) -> int:
        return int(self._held_port.getsockname()[1])

    def _renew_port(self) -> None:
        self._held_port.close()
        self._held_port = hold_port()  # for the next start: the old one may stay busy for a minute

    # ---- training

    def _go(self, order: Message) -> None:
        place = parse_place(order)
        last = self._training.place
        if place.launch < self._launch or self._is_over(place.launch):
            return
        if last is not None and place.launch == last.launch:
            self._news.repeat("ended")
            return
        if self._training.is_running:  # of an older start, whose stop never came
            self._training.stop(0.0)
        self._launch = place.launch
        self._outage.forget()
        self._news.forget("listening", "ended", "failed", "stopped")
        self._state = "running"
        self._training.start(place)
        self._news.note("workers.started")

    def _is_over(self, launch: int) -> bool:
        """True when the launcher has had this start stopped here: what asks for it is late."""
        stopped = self._news.get("stopped")
        return stopped is not None and stopped["launch"] >= launch

    def _rest(self, _order: Message) -> None:
        if not self._training.is_running and self._news.get("ended") is None:
            self._state = "spare"

    def _look_at_training(self) -> None:
        end = self._training.look()
        if end is not None:
            self._take_end(end)
            return
        is_opening = self._training.is_opening() and self._news.get("listening") is None
        if is_opening and (place := self._training.place) and self._training.has_opened():
            self._news.tell({"type": "listening", "launch": place.launch, "rdzv_id": place.rdzv_id})
            self._news.note("rendezvous.opened")

    def _take_end(self, end: WorkersEnd) -> None:
        if end.exit_code != 0:  # told at once, before the others of this node are stopped
            self._news.tell(describe_failure(self._launch, end))
        self._end(end.exit_code, end.reason, end=end, grace_s=grace_s(end.exit_code))

    def _end(self, code: int, reason: str, *, end: WorkersEnd | None = None, grace_s: float = 0.0) -> None:
        """Stop everything on this node and say so, once for each start of the training."""
        if self._news.get("ended") is not None:
            self._news.repeat("ended")
            return
        left = self._training.stop(grace_s)
        if left:
            reason += f"; processes {left} survive SIGKILL"
        self._state = "ended"
        self._renew_port()
        words = self._read_last_words(end) if end is not None and code != 0 else ""
        self._news.tell(
            {
                **describe_end(self._launch, code, reason, end, words),
                "terminated": self._is_terminated,
                "port": self._port(),
                "left": left,
                "cut_s": round(self._outage.cut_s(), 3),
            }
        )
        self._write_report(code, words)
        self._training.prepare()

    def _stop(self, order: Message) -> None:
        launch = int(order["launch"])
        if launch < self._launch and self._training.is_running:
            return
        if self._is_over(launch):
            self._news.repeat("stopped")
            return
        self._look_at_training()  # a rank that has just failed is to be told as that, and not as stopped
        self._launch = max(self._launch, launch)
        left: list[int] = []
        if self._training.is_running:
            self._state = "stopping"
            left = self._training.stop(float(order.get("grace_s", self._spec.stop_grace_s)))
            self._renew_port()
        if self._state != "checking":
            self._state = "ready"
        self._news.tell({"type": "stopped", "launch": launch, "port": self._port(), "left": left})
        self._training.prepare()

    def _kill(self, order: Message) -> None:
        code, reason = int(order.get("exit_code", EXIT_TERMINATED)), str(order.get("reason", "told to stop"))
        if code == 0 and self._failed_checks():  # not needed, and would not have been of use
            code, reason = contract.EXIT_NODE_CHECK_FAILED, self._failed_checks()
        self._end(code, reason)

    def _leave(self, _order: Message) -> None:
        ended = self._news.get("ended")
        self._exit_code = int(ended["exit_code"]) if ended is not None else 0

    def _read_last_words(self, end: WorkersEnd) -> str:
        evidence_dir = RunPaths(self._run_dir).evidence(self._spec.attempt, self._launch)
        words = find_last_words(Path(end.log) if end.log else None, evidence_dir, LOG_READ_LIMIT_S)
        if words:
            self._say(f"last words:\n{words[-CONSOLE_TAIL_BYTES:]}")
        return words

    def _take_request(self, order: Message) -> None:
        """A signal for the training, which may not run yet."""
        self._training.request(int(order.get("count", 0)), int(order["number"]))

    def _make_drill(self, order: Message) -> None:
        if self._errands.make_drill(order, lambda: self._is_terminated):
            self._exit_code = EXIT_TERMINATED

    # ---- losing the launcher

    def _lose_launcher(self, _order: Message) -> None:
        """Stop the ranks first: somebody may be told to write in their place."""
        if self._outage.is_on():
            return
        cut_s = self._outage.begin()
        reason = f"no word from the launcher for {cut_s:.1f} s: ranks stopped"
        if self._training.is_running:
            self._end(EXIT_TERMINATED, reason)
        self._state = "cut"
        self._say(reason)
        path = RunPaths(self._run_dir).cut_off(self._spec.attempt, self._node)
        self._reports.offer(path, cut_off(self._spec, self._node, cut_s))

    def _find_launcher(self, _order: Message) -> None:
        if self._outage.is_on():
            self._say(f"the launcher is back after {self._outage.end():.1f} s")
        if self._state == "cut":
            self._state = "ready" if self._news.get("ended") is None else "ended"

    def _look_at_time(self) -> None:
        if self._client.is_lost() and not self._outage.is_on():
            self._lose_launcher({})
        is_unheard = self._is_terminated and self._outage.is_on()  # Slurm waits for us, and nobody else does
        is_alone = self._client.is_dead() or self._outage.is_final() or is_unheard
        if is_alone:
            self._end(EXIT_TERMINATED, "the launcher did not come back")
        if is_alone or self._is_farewell_over():
            self._leave({})

    def _is_farewell_over(self) -> bool:
        """True once it is no use to wait any longer for the launcher's leave: it is late, or there is no launcher.

        Slurm's SIGTERM to a node that is left of a job without a launcher: the next job waits for this node.
        """
        if self._leave_at is None:
            return False
        has_ended = self._news.get("ended") is not None
        return time.monotonic() > self._leave_at or (has_ended and self._client.is_lost())

    # ---- surroundings

    def _write_report(self, code: int | None, log_tail: str) -> None:
        report = describe_node(self._spec.attempt, self._node, self._checks, code, log_tail)
        self._reports.offer(RunPaths(self._run_dir).node_report(self._spec.attempt, self._node), report)

    def _take_termination(self, number: int) -> None:
        """Called from a signal handler."""
        self._is_terminated |= number == signal.SIGTERM
        self._leave_at = time.monotonic() + FAREWELL_LIMIT_S
