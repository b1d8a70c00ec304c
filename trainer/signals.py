"""What a signal may ask of a training: SIGUSR1 to save and exit, SIGUSR2 to save now and go on.

Slurm sends SIGUSR1 before a time limit (`--signal=USR1@<s>`). A handler only sets a flag; the loop reads it once a
step and all ranks agree on it (one rank that exits alone would leave the others in a collective). SIGTERM keeps its
default action on purpose: when Slurm or torchrun says "end", the process must die at once, because a clean-up that
hangs holds up the whole job's replacement.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_SIGNAL = signal.SIGUSR1
SAVE_SIGNAL = signal.SIGUSR2


class SaveRequests:
    """Remembers what was asked for; usable as a context manager that restores the old handlers.

    Install it before importing anything slow: until then the default action of both signals ends the process. A
    handler for SIGUSR2 that someone else has set stays: submitit's, which requeues, is one. Outside the main thread,
    where Python lets nobody set handlers, it hears nothing.
    """

    def __init__(self) -> None:
        self._exits = 0
        self._saves = 0
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous[EXIT_SIGNAL] = signal.signal(EXIT_SIGNAL, self._remember_exit)
        if signal.getsignal(SAVE_SIGNAL) is signal.SIG_DFL:
            self._previous[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, self._remember_save)

    @property
    def is_exit_requested(self) -> bool:
        """True from the first SIGUSR1 on."""
        return self._exits > 0

    @property
    def saves(self) -> int:
        """How often SIGUSR2 came: a save is wanted when it has grown."""
        return self._saves

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            # None: set by code that is not Python's, which can't be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _remember_exit(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._exits += 1

    def _remember_save(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._saves += 1
