"""The reference training under nvidia-resiliency-ext's launcher: each finished step is a heartbeat of its rank."""

from __future__ import annotations

import gc
import sys
from typing import Any


def main() -> int:
    """The reference training's exit code."""
    gc.disable()  # as the reference training does while it imports torch
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # type: ignore[import-not-found]

    from trainer.checkpoint import Checkpointer
    from trainer.example.train import main as train

    client = RankMonitorClient()
    client.init_workload_monitoring()
    finish_step = Checkpointer.step

    def step(self: Checkpointer, *arguments: Any, **named: Any) -> bool:
        is_over = finish_step(self, *arguments, **named)
        client.send_heartbeat()
        return is_over

    Checkpointer.step = step  # type: ignore[method-assign]
    code = train()
    client.shutdown_workload_monitoring()
    return code


if __name__ == "__main__":
    sys.exit(main())
