"""Run by test_crash: moves two nodes in step, in one plan each, until it is killed.

python -m tests.store.write_for_ever LEDGER
"""

import itertools
import sys
from pathlib import Path

from supervisor.model import NodeMemory
from supervisor.store import Store
from tests.store.records import NOW, plan


def main(path: Path) -> None:
    with Store.open(path, now=NOW) as store:
        for count in itertools.count(1):
            store.commit(plan(*(NodeMemory(node=node, failed_sweeps=count) for node in ("n1", "n2"))), NOW)
            print(count, flush=True)  # said only once it is committed


if __name__ == "__main__":
    main(Path(sys.argv[1]))
