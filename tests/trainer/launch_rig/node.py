"""The agent of a node that gives its launcher up soon."""

import sys

from trainer import node
from trainer.agent.client import Patience

sys.exit(node.main(sys.argv[1:2], patience=Patience(unreachable_s=2.0, silent_s=2.0, answer_s=0.4)))
