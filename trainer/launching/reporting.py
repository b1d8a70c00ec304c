"""launch.json: what the launcher sees, once a second and when it changes."""

from __future__ import annotations

import time

from trainer.contract import AttemptSpec, LaunchReport, NodeBeat, Straggler
from trainer.launching.fleet import Fleet
from trainer.launching.limits import REPORT_INTERVAL_S
from trainer.launching.training import Training
from trainer.launching.writer import Writer

CHANGE_INTERVAL_S = 0.1  # a thousand nodes that change one after the other are a few reports


class Reporter:
    """Offers reports to the writer."""

    def __init__(self, *, spec: AttemptSpec, job_id: int, own_node: str, fleet: Fleet, writer: Writer) -> None:
        self.phase = "starting"
        self.why = ""
        self.stragglers: tuple[Straggler, ...] = ()
        self._spec = spec
        self._job_id = job_id
        self._own_node = own_node
        self._fleet = fleet
        self._writer = writer
        self._training: Training | None = None
        self._seq = 0
        self._reported: tuple[float, object] = (float("-inf"), None)

    def begin(self, training: Training) -> None:
        """A start of the training begins."""
        self.phase, self._training, self.stragglers = "running", training, ()

    def recover(self, why: str) -> None:
        """It was interrupted."""
        self.phase, self.why, self.stragglers = "recovering", why, ()

    def report(self, now: float) -> None:
        """Offer a report if it is time, or if something has changed."""
        fleet, since_s = self._fleet, now - self._reported[0]
        if since_s < CHANGE_INTERVAL_S and self._seq > 0 and self.phase != "ending":
            return
        silent = tuple(fleet.silent_since)
        # Who begins to be quiet is told at once: the service looks closer then, and each second is one of recovery.
        key = (
            self.phase,
            self.why,
            self.stragglers,
            silent,
            fleet.quiet(),
            [(n.state, n.end) for n in fleet.nodes.values()],
            None if self._training is None else self._training.launch,
        )
        if key == self._reported[1] and since_s < REPORT_INTERVAL_S:
            return
        self._reported = (now, key)
        self._seq += 1
        self._writer.offer(self._render(silent))

    def _render(self, silent: tuple[str, ...]) -> LaunchReport:
        training = self._training
        return LaunchReport(
            attempt=self._spec.attempt,
            job_id=self._job_id,
            seq=self._seq,
            time=time.time(),
            host=self._own_node,
            phase=self.phase,
            nodes={
                n.name: NodeBeat(
                    state=n.state,
                    age_s=round(self._fleet.age_s(n.name), 3),
                    exit_code=n.end.exit_code if n.end else None,
                )
                for n in self._fleet.nodes.values()
            },
            silent=silent,
            launch=0 if training is None else training.launch,
            training=() if training is None else training.nodes,
            resume_step=self._spec.resume_step if training is None else training.point.step,
            why=self.why,
            stragglers=self.stragglers,
        )
