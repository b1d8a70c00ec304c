"""Run by test_crash: commits in children that kill themselves before their n-th statement, for every n.

    python -m tests.store.kill_in_commit FOLDER

Prints the number of children that were killed. FOLDER/<n>.db is what the n-th child left behind.
"""

import os
import shutil
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from supervisor.model import AttemptState
from supervisor.store import Store
from tests.store.records import NOW, attempt, intent, interruption, plan, run

BEFORE = plan(run(), attempt(1))
CHANGE = plan(
    attempt(1, AttemptState.OVER), attempt(2, AttemptState.PLANNED), interruption(1), intents=(intent("submit:gpt:2"),)
)


def commit_and_die(path: Path, at: int) -> None:
    with Store.open(path, now=NOW) as store:
        seen = 0

        def count(_: str) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

        store._connection.set_trace_callback(count)
        store.commit(replace(CHANGE), NOW + timedelta(seconds=1))


def main(folder: Path) -> None:
    original = folder / "original.db"
    with Store.open(original, now=NOW) as store:
        store.commit(BEFORE, NOW)
    killed = 0
    for at in range(1, 1000):
        path = folder / f"{at}.db"
        shutil.copyfile(original, path)
        child = os.fork()
        if child == 0:
            commit_and_die(path, at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        killed += 1
    print(killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
