"""The node probes, run beside the agent, and their results as the messages carry them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from trainer import contract
from trainer.agent.program import PYTHONS
from trainer.beats import Message
from trainer.contract import CheckResult, ContractError


def parse_checks(data: bytes) -> tuple[CheckResult, ...]:
    """The results printed by a node's probes, a JSON list. Raises ContractError for anything else."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise ContractError("the checks printed no JSON") from None
    if not isinstance(raw, list):
        raise ContractError("the checks printed no list")
    return tuple(contract.parse(CheckResult, json.dumps(item).encode()) for item in raw)


def plain_checks(checks: Sequence[CheckResult]) -> list[Message]:
    """Check results as a message carries them; long details are cut."""
    return [
        {"check": c.check, "ok": c.ok, "detail": c.detail[:500], "value": c.value, "limit": c.limit} for c in checks
    ]


class ProbeRun:
    """The node probes, run under a deadline. A probe that does not answer is unknown, never a failure."""

    def __init__(self, argv: Sequence[str], *, limit_s: float, environment: Mapping[str, str]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the probe
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal = ""
        command = [sys.executable if argv[0] in PYTHONS else argv[0], *argv[1:]]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            self._refusal = f"the checks could not be started: {error}"

    def poll(self) -> tuple[CheckResult, ...] | None:
        """The results, or None while there are none yet; not to be asked again afterwards."""
        process = self._process
        if process is not None and process.poll() is None and time.monotonic() < self._deadline:
            return None
        with self._output:
            return self._judge(process)

    def pids(self) -> frozenset[int]:
        """The process of the probes, while it runs."""
        return frozenset() if self._process is None else frozenset({self._process.pid})

    def cancel(self) -> None:
        """End the probes: nobody waits for them any more."""
        with self._output:
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.5)

    def _judge(self, process: subprocess.Popen[bytes] | None) -> tuple[CheckResult, ...]:
        if process is None:
            return _unknown(self._refusal)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                process.wait(0.5)
            return _unknown(f"no answer within {self._limit_s:g} s")
        self._output.seek(0)
        try:
            return parse_checks(self._output.read(1024 * 1024))
        except ContractError as error:
            return _unknown(f"exit code {process.returncode}: {error}")


def _unknown(detail: str) -> tuple[CheckResult, ...]:
    return (CheckResult(check="start_checks", ok=None, detail=detail),)
