"""What a signal may ask of a training."""

from __future__ import annotations

import os
import signal

from trainer.signals import SaveRequests


def test_usr1_asks_for_a_save_and_an_exit() -> None:
    with SaveRequests() as requests:
        before = requests.is_exit_requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (before, requests.is_exit_requested, requests.saves) == (False, True, 0)


def test_usr2_asks_for_a_save_each_time_it_comes() -> None:
    with SaveRequests() as requests:
        for expected in (1, 2):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (requests.saves, requests.is_exit_requested) == (expected, False)


def test_a_handler_for_usr2_that_is_there_stays() -> None:
    """submitit's requeues the job."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: received.append(number))
    try:
        with SaveRequests() as requests:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (received, requests.saves) == ([signal.SIGUSR2], 0)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_sigterm_still_ends_the_process_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SaveRequests():
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_old_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    with SaveRequests():
        assert signal.getsignal(signal.SIGUSR1) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == before
