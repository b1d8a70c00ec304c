"""The launcher with short limits and agents that need no torch."""

import json
import os
import sys
import time
from pathlib import Path

from trainer import launch
from trainer.launching.ports import fetch_addresses

AGENT = (sys.executable, str(Path(__file__).with_name("node.py")))
SILENT_S = float(os.environ.get("RIG_SILENT_S", "0.5"))
CONNECT_S = float(os.environ.get("RIG_CONNECT_S", "15"))
PORTS = os.environ.get("RIG_PORTS")  # absent: what Slurm says
told = json.loads(PORTS or "{}")
LIMITS = launch.Limits(
    connect_s=CONNECT_S, spare_grace_s=0.3, peer_grace_s=0.5, silent_s=SILENT_S, closed_s=0.4, respawn_s=8.0
)

if step_s := float(os.environ.get("RIG_CLOCK_STEP_S", "0")):  # the wall clock is set two seconds after the start
    clock, begun = time.time, time.monotonic()
    time.time = lambda: clock() + (step_s if time.monotonic() - begun > 2 else 0)

sys.exit(
    launch.main(
        sys.argv[1:2],
        agent=AGENT,
        limits=LIMITS,
        addresses=fetch_addresses if PORTS is None else lambda _nodes: {n: (h, p) for n, (h, p) in told.items()},
    )
)
