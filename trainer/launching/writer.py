"""The launcher's files, written by a thread of their own: a file system that hangs must not stop the beats."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from trainer import contract
from trainer.contract import ContractError, ExitRecord, InterruptionRecord, LaunchReport, Outcome
from trainer.launching.reading import read_regular


def read_outcome(path: Path, attempt: int) -> Outcome | None:
    """The training's own word on how this attempt ended, or None when it left none that can be read."""
    try:
        outcome = contract.parse(Outcome, read_regular(path))
    except FileNotFoundError:
        return None
    except (OSError, ContractError) as error:
        print(f"trainer.launch: {path.name}: {error}", file=sys.stderr, flush=True)
        return None
    return outcome if outcome.attempt == attempt else None


class Writer(threading.Thread):
    """Writes the launcher's files. What cannot be written is said once and otherwise let go."""

    def __init__(self, attempt_dir: Path) -> None:
        super().__init__(name="writer", daemon=True)
        self._attempt_dir = attempt_dir
        self._changed = threading.Condition()
        self._report: LaunchReport | None = None
        self._timing: list[str] = []
        self._interruptions: dict[int, InterruptionRecord] = {}
        self._unwritten: dict[int, InterruptionRecord] = {}  # tried again with the next report; the thread's own
        self._exit: ExitRecord | None = None
        self._said: set[str] = set()

    def offer(self, report: LaunchReport) -> None:
        """Write this report; one that is still waiting is superseded."""
        with self._changed:
            self._report = report
            self._changed.notify()

    def record(self, interruption: InterruptionRecord) -> None:
        """Write an interruption; an earlier state of it that is still waiting is superseded."""
        with self._changed:
            self._interruptions[interruption.launch] = interruption
            self._changed.notify()

    def note(self, event: str, at: float, node: str) -> None:
        """Append a line to timing.jsonl."""
        line = json.dumps({"event": event, "time": at, "node": node}) + "\n"
        with self._changed:
            self._timing.append(line)
            self._changed.notify()

    def close(self, record: ExitRecord, limit_s: float) -> None:
        """Write what waits, the exit record last; gives up after `limit_s`."""
        with self._changed:
            self._exit = record
            self._changed.notify()
        self.join(limit_s)

    def run(self) -> None:
        """Write until the exit record is written."""
        while True:
            with self._changed:
                while not (self._report or self._timing or self._interruptions or self._exit):
                    self._changed.wait()
                report, self._report = self._report, None
                timing, self._timing = self._timing, []
                interruptions, self._interruptions = {**self._unwritten, **self._interruptions}, {}
                record = self._exit
            if timing:
                self._append("".join(timing))
            self._unwritten = {
                launch: interruption
                for launch, interruption in interruptions.items()
                if not self._publish(f"interruptions/{launch}.json", interruption)
            }
            if report is not None:
                self._publish("launch.json", report)
            if record is not None:
                self._publish("exit.json", record)
                return

    def _publish(self, name: str, record: object) -> bool:
        path = self._attempt_dir / name
        if path.parent != self._attempt_dir and path.parent.is_symlink():
            self._complain(name, OSError(f"{path.parent.name} is a link"))
            return False
        try:
            contract.write_json(path, record)
        except (OSError, ValueError) as error:
            self._complain(name, error)
            return False
        return True

    def _append(self, text: str) -> None:
        try:
            with (self._attempt_dir / "timing.jsonl").open("a") as stream:
                stream.write(text)
        except OSError as error:
            self._complain("timing.jsonl", error)

    def _complain(self, name: str, error: Exception) -> None:
        if name not in self._said:
            self._said.add(name)
            print(f"trainer.launch: {name} not written: {error}", file=sys.stderr, flush=True)
