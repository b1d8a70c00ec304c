"""A training of one rank that begins a save and then dies where a test wants it to: `python -m` with ROOT and WHEN."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from tests.trainer.saving.crew import Crew
from tests.trainer.saving.waiting import await_that


def main(root: Path, when: str) -> None:
    crew = Crew(root, [[torch.full((16_000_000,), 1.0)]])
    saver = crew.savers[0]
    crew.save(1)
    if when == "staging":
        assert saver.writer_pid is not None
        crew.begin(2)
        os.kill(saver.writer_pid, signal.SIGSTOP)
        print(saver.writer_pid, saver.phase, flush=True)
    else:
        crew.begin(2)
        await_that(lambda: saver.phase != "staging")
        print(saver.writer_pid, saver.phase, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
