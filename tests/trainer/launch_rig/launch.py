"""The launcher with short limits and agents that need no torch."""

import os
import sys
from pathlib import Path

from trainer import launch

AGENT = (sys.executable, str(Path(__file__).with_name("node.py")))
SILENT_S = float(os.environ.get("RIG_SILENT_S", "0.5"))
LIMITS = launch.Limits(connect_s=2.0, spare_grace_s=0.3, peer_grace_s=0.5, silent_s=SILENT_S)

sys.exit(launch.main(sys.argv[1:2], agent=AGENT, limits=LIMITS))
