"""The launcher of an attempt, with an agent on each node that needs no torch."""

import sys
from pathlib import Path

from trainer import launch

AGENT = (sys.executable, str(Path(__file__).with_name("node.py")))

sys.exit(launch.main(sys.argv[1:2], agent=AGENT, limits=launch.Limits(peer_grace_s=1.0)))
