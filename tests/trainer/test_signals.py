"""Save-and-exit on request."""

from __future__ import annotations

import os
import signal

import pytest

from trainer.signals import SaveAndExit


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_before_the_time_limit_is_remembered(number: signal.Signals) -> None:
    with SaveAndExit() as request:
        before = request.is_requested
        os.kill(os.getpid(), number)
        assert (before, request.is_requested, request.received) == (False, True, number)


def test_sigterm_still_ends_the_process_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SaveAndExit():
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SaveAndExit():
        assert signal.getsignal(signal.SIGUSR1) is not before
    assert signal.getsignal(signal.SIGUSR1) is before
