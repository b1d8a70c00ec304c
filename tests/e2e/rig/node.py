"""The agent of a node, with a runner that needs no torch."""

import sys
from pathlib import Path

from trainer import node

RUNNER = (sys.executable, str(Path(__file__).parents[2] / "trainer" / "launch_rig" / "runner.py"))

sys.exit(node.main(sys.argv[1:2], runner_command=lambda _program: RUNNER))
