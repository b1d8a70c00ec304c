"""Save-and-exit on request: Slurm's `--signal=USR1@<s>` before a time limit, or anyone's `kill -USR1`.

The handler only sets a flag; the training loop reads it once a step and all ranks agree on it (one rank that exits
alone would leave the others in a collective). SIGTERM keeps its default action on purpose: when Slurm or torchrun
says "end", the process must die at once, because a clean-up that hangs holds up the whole job's replacement.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

SAVE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class SaveAndExit:
    """Remembers that a save-and-exit was requested; usable as a context manager that restores the old handlers.

    Install it before importing anything slow: until then the default action of SIGUSR1 ends the process.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = SAVE_SIGNALS) -> None:
        self._received: signal.Signals | None = None
        self._previous = {number: signal.signal(number, self._remember) for number in signals}

    @property
    def is_requested(self) -> bool:
        """True from the first signal on."""
        return self._received is not None

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that came, or None."""
        return self._received

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._received is None:
            self._received = signal.Signals(number)
