"""Files that others write while the training runs, read by a thread: a file system that hangs stops no beat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from trainer import contract
from trainer.contract import Advice, AttemptSpec, ContractError, CutOff, Progress, RunPaths
from trainer.launching.reading import read_regular

INTERVAL_S = 1.0
READ_LIMIT_S = 1.0  # for one file; one that hangs is not asked for again until it answers

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
        self._hanging: dict[Path, threading.Thread] = {}
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
        """What the file says, if it is another one than before. A read that hangs holds up no other file's."""
        hanging = self._hanging.get(path)
        if hanging is not None and hanging.is_alive():
            return None
        known = self._stamps.get(path)
        question: _Question[tuple[tuple[int, int], T] | None] = _Question(lambda: _read_new(kind, path, known))
        self._hanging[path] = question
        question.join(READ_LIMIT_S)
        found = question.answers[0] if question.answers else None
        if found is None:
            return None
        self._stamps[path] = found[0]
        return found[1]


def _read_new(kind: type[T], path: Path, known: tuple[int, int] | None) -> tuple[tuple[int, int], T] | None:
    """The file's stamp and what it says; None where it is the known one, or can't be read."""
    try:
        status = path.lstat()
        stamp = (status.st_ino, status.st_mtime_ns)
        return None if stamp == known else (stamp, contract.parse(kind, read_regular(path)))
    except (OSError, ContractError):
        return None


class _Question(threading.Thread, Generic[T]):
    """A question to the file system. `answers`: one, once there is one."""

    def __init__(self, question: Callable[[], T]) -> None:
        super().__init__(name="question", daemon=True)
        self.answers: list[T] = []
        self._question = question
        self.start()

    def run(self) -> None:
        """Ask."""
        self.answers.append(self._question())


def ask_within(limit_s: float, question: Callable[[], T]) -> T | None:
    """The answer of a question to the file system, or None when it does not come in time."""
    asked = _Question(question)
    asked.join(limit_s)
    return asked.answers[0] if asked.answers else None
