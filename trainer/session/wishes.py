"""Who wants a checkpoint now: the schedule, a signal to this process, the service's advice."""

from __future__ import annotations

import logging

from trainer.session.advice import AdviceReader
from trainer.session.schedule import SaveSchedule
from trainer.signals import SaveRequests

log = logging.getLogger("trainer.checkpoint")


class Wishes:
    """What this rank has to tell the others. By time only rank 0's clock counts (`has_clock`).

    `takes_interval`: the service may change the schedule's interval, as the script has not chosen one.
    """

    def __init__(
        self,
        schedule: SaveSchedule,
        requests: SaveRequests,
        advice: AdviceReader | None,
        *,
        takes_interval: bool,
        has_clock: bool,
    ) -> None:
        self.schedule = schedule
        self._requests = requests
        self._advice = advice
        self._takes_interval = takes_interval
        self._has_clock = has_clock
        self._told = (0, 0)  # by signal, by advice

    @property
    def is_exit_wanted(self) -> bool:
        """True when this process was asked to save and exit."""
        return self._requests.is_exit_requested

    def take(self) -> bool:
        """True when a save is wanted now; what was asked for counts once."""
        asked = (self._requests.saves, self._advised())
        is_new, self._told = asked != self._told, asked
        return is_new or (self._has_clock and self.schedule.is_due_by_time())

    def _advised(self) -> int:
        advice = self._advice.latest if self._advice is not None else None
        if advice is None:
            return 0
        if self._takes_interval and advice.checkpoint_every_s != self.schedule.every_s:
            log.info("a checkpoint every %g s, as advised", advice.checkpoint_every_s)
            self.schedule.retime(advice.checkpoint_every_s)
        return advice.save_requests

    def close(self) -> None:
        """Look no further for advice."""
        if self._advice is not None:
            self._advice.close()
