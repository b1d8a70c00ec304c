"""The agent of a node; the ranks that it starts need no torch."""

import sys

from trainer import node

sys.exit(node.main(sys.argv[1:2]))
