"""The agent of a node that gives its launcher up soon."""

import os
import sys

from trainer import node
from trainer.agent.client import Patience

PATIENCE_S = float(os.environ.get("RIG_PATIENCE_S", "2"))

sys.exit(
    node.main(sys.argv[1:2], patience=Patience(unreachable_s=PATIENCE_S, silent_s=PATIENCE_S, answer_s=PATIENCE_S / 5))
)
