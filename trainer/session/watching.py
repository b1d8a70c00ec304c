"""The losses of a training: read, averaged over ranks, and judged; with the samples that each step trained on."""

from __future__ import annotations

import array
import base64
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trainer.losswatch import Finding, LossPolicy, LossWatch

SPANS_KEPT = 1024  # steps whose samples are known, for what a divergence may reach back


class LossDiverged(RuntimeError):
    """The loss went wrong; `finding` says how and since when. Exit with 79."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        what = "is not a finite number" if finding.kind == "nan" else f"is a spike (score {finding.score or 0:.1f})"
        super().__init__(f"the loss {what} since step {finding.onset_step}: {finding.loss} at step {finding.step}")


class LossReader:
    """Reads losses without holding up a GPU: one that is there is copied aside, and read in the step after."""

    def __init__(self) -> None:
        self._waiting: tuple[int, torch.Tensor, Any] | None = None

    def read(self, step: int, loss: torch.Tensor | float | None) -> tuple[int, float] | None:
        """The newest loss that can be read without waiting, with its step: this step's, or on a GPU the last one's."""
        ready = self.take()
        if loss is None:
            return ready
        if not isinstance(loss, torch.Tensor):
            return step, float(loss)
        if loss.device.type == "cpu":
            return step, float(loss.item())
        aside = torch.empty((), dtype=torch.float64, pin_memory=True)
        aside.copy_(loss.detach().double().reshape(()), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._waiting = (step, aside, event)
        return ready

    def take(self) -> tuple[int, float] | None:
        """The loss that has not been read yet, waited for; None when there is none."""
        if self._waiting is None:
            return None
        step, aside, event = self._waiting
        self._waiting = None
        event.synchronize()
        return step, float(aside)


class LossJudge:
    """Hears the mean loss of each step, in the order of steps, and says when it went wrong.

    `mean`: the newest one, None when it is no finite number. Its state are the losses that a spike is measured by, so
    that one just after a restart is seen, too.
    """

    def __init__(self, policy: LossPolicy, on_loss: Callable[[int, float], None] | None) -> None:
        self.mean: float | None = None
        self._watch = LossWatch(policy=policy)
        self._on_loss = on_loss
        self._spans: deque[tuple[int, int, int]] = deque(maxlen=SPANS_KEPT)  # step, first sample, end

    def count(self, step: int, first_sample: int, end_sample: int) -> None:
        """Remember what a step trained on."""
        self._spans.append((step, first_sample, end_sample))

    def hear(self, step: int, mean: float) -> Finding | None:
        """Take the mean loss of a step; what is wrong, if something is."""
        self.mean = mean if math.isfinite(mean) else None
        if self._on_loss is not None:
            self._on_loss(step, mean)
        self._watch, finding = self._watch.observe(step, mean)
        return finding

    def samples_since(self, finding: Finding) -> tuple[int, int]:
        """(first, end) of the samples from the onset on."""
        spans = {step: (first, end) for step, first, end in self._spans}
        return spans.get(finding.onset_step, (0, 0))[0], spans.get(finding.step, (0, 0))[1]

    def state_dict(self) -> dict[str, Any]:
        """The losses that count, padded: an item of a checkpoint keeps its size."""
        recent = self._watch.recent
        padding = [0.0] * (self._watch.policy.window - len(recent) if self._watch.policy.spike_score else 0)
        packed = base64.b64encode(array.array("d", [*recent, *padding]).tobytes()).decode()
        return {"count": len(recent), "losses": packed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved losses."""
        losses = array.array("d", base64.b64decode(state["losses"]))[: state["count"]]
        if self._watch.policy.spike_score:
            self._watch = replace(self._watch, recent=tuple(losses)[-self._watch.policy.window :])
