"""The process that copies checkpoints to object storage, one on each node beside the training, and its handle.

It follows the training and nothing in the training waits for it: it ends with its parent, is ended by `close`, and
heeds no signal that is meant for the training. What it does is in trainer.storage.uploads.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict

from trainer.children import python_command
from trainer.storage.uploads import Mover, MoverPlace

log = logging.getLogger("trainer.storage.mover")

KILL_AFTER_S = 2.0
DRAIN_TRIES = 5  # failed ones in a row after which the last checkpoint is left to the next attempt
DRAIN_WAIT_S = 5.0
DRAIN_IDLE_S = 45.0  # after which a copy that gets on nowhere is left, too: storage may hang instead of refusing


# ---------------------------------------------------------------- the parent's side


class MoverHandle:
    """A running mover. Its end is noticed by nobody but `close`: a training goes on without copies."""

    def __init__(self, place: MoverPlace) -> None:
        self._process = subprocess.Popen(
            python_command("trainer.storage.mover", json.dumps(asdict(place))),
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poke(self) -> None:
        """Have it look now: a checkpoint was verified."""
        self._say("poke")

    def close(self, wait_s: float = 0.0) -> bool:
        """End it, at the latest after `wait_s`; True when the newest verified checkpoint is in object storage.

        It ends sooner where storage is away: what is left is copied by the next attempt, or by hand.
        """
        is_done = False
        if wait_s > 0:
            self._say("drain")
            with suppress(subprocess.TimeoutExpired):
                is_done = self._process.wait(wait_s) == 0
        stdin = self._process.stdin
        if stdin is not None:
            with suppress(OSError):
                stdin.close()  # it ends upon that
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_AFTER_S)
        if self._process.poll() is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that the kernel holds is left to it
                self._process.wait(KILL_AFTER_S)
        return is_done

    def _say(self, wish: str) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            with suppress(OSError, ValueError):
                stdin.write(wish + "\n")
                stdin.flush()


def start_mover(place: MoverPlace) -> MoverHandle | None:
    """Start this node's mover; None, with a line in the log, when no process can be started."""
    try:
        return MoverHandle(place)
    except OSError as error:
        log.warning("checkpoints are not copied to object storage from this node: %s", error)
        return None


# ---------------------------------------------------------------- the process


def main(argv: list[str]) -> int:
    """Copy until the parent ends, closes our input, or (after the line "drain" in it) nothing is left to copy."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    for meant_for_training in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(meant_for_training, signal.SIG_IGN)
    os.nice(10)
    place = MoverPlace(**json.loads(argv[1]))
    wishes = _Wishes(os.getppid())
    mover = Mover(place, wait=wishes.wait, is_ending=lambda: wishes.is_draining)
    threading.Thread(target=_end_idle, args=(mover, wishes), daemon=True).start()
    in_vain = 0
    while True:
        delay_s = mover.step()
        if wishes.is_draining:
            if mover.is_done():
                return 0
            in_vain = in_vain + 1 if mover.is_failing else 0
            if in_vain >= DRAIN_TRIES:
                return 1  # nodes are not kept for storage that is away
            delay_s = min(delay_s, DRAIN_WAIT_S)
        wishes.wait(delay_s)


def _end_idle(mover: Mover, wishes: _Wishes) -> None:
    """End the process when nothing gets on after the training's end: no node is kept for that."""
    while not wishes.is_draining:
        time.sleep(0.5)
    began = time.monotonic()
    while time.monotonic() - max(began, mover.moved_at) < DRAIN_IDLE_S:
        time.sleep(0.5)
    log.warning("object storage: nothing has got on for %.0f s; the last checkpoint is left uncopied", DRAIN_IDLE_S)
    os._exit(1)


class _Wishes:
    """What the parent wants. It has us end at once when it is gone: a new one starts its own."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._woken = threading.Event()
        self.is_draining = False
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, seconds: float) -> None:
        self._woken.wait(seconds)
        self._woken.clear()

    def _read(self) -> None:
        for line in sys.stdin:
            self.is_draining = self.is_draining or line.strip() == "drain"
            self._woken.set()
        os._exit(0)

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(0.5)
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
