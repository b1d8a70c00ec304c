"""Files that others write while the training runs, read by a thread: a file system that hangs stops no beat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer import contract
from trainer.contract import Advice, AttemptSpec, ContractError, CutOff, Progress, RunPaths

INTERVAL_S = 1.0

T = TypeVar("T")


class WatchedFiles(threading.Thread):
    """Reads the advice, the progress and what lost nodes left, at most once a second each."""

    def __init__(self, run_dir: Path, spec: AttemptSpec) -> None:
        super().__init__(name="watched-files", daemon=True)
        self.advice: Advice | None = None
        self.progress: Progress | None = None
        self.awaited: frozenset[str] = frozenset()  # nodes that are lost, whose word is looked for
        self._words: list[CutOff] = []
        self._paths = RunPaths(run_dir)
        self._attempt = spec.attempt
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._wake = threading.Event()

    def look_soon(self) -> None:
        """Do not wait for the next second."""
        self._wake.set()

    def take_words(self) -> list[CutOff]:
        """What nodes have left that live and are cut off, each once."""
        words: list[CutOff] = []
        while self._words:
            words.append(self._words.pop(0))
        return words

    def run(self) -> None:
        """Read until the process ends."""
        while True:
            began = time.monotonic()
            self._wake.clear()
            advice = self._read(Advice, self._paths.advice(self._attempt))
            if advice is not None and advice.attempt == self._attempt:
                self.advice = advice
            progress = self._read(Progress, self._paths.progress(self._attempt))
            if progress is not None and progress.attempt == self._attempt:
                self.progress = progress
            for node in self.awaited:
                word = self._read(CutOff, self._paths.cut_off(self._attempt, node))
                if word is not None and word.attempt == self._attempt:
                    self._words.append(word)
            self._wake.wait(max(0.1, INTERVAL_S - (time.monotonic() - began)))

    def _read(self, kind: type[T], path: Path) -> T | None:
        """What the file says, if it is another one than before."""
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            if self._stamps.get(path) == stamp:
                return None
            record = contract.parse(kind, path.read_bytes())
        except (OSError, ContractError):
            return None
        self._stamps[path] = stamp
        return record


def ask_within(limit_s: float, question: Callable[[], T]) -> T | None:
    """The answer of a question to the file system, or None when it does not come in time."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(question()), name="question", daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None
