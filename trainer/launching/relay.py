"""An srun that runs on another node than the launcher and is gone once its work is done: starting the agents.

slurmstepd tells srun how each task ended. When the host of that srun has lost its power it tries six times, two
seconds each, and its node stays COMPLETING for as long: the next job would wait for it. A host that is alive refuses
at once. So the agents of all nodes are started by an srun on a node that isn't the launcher's, and this srun is killed
when all agents have said hello, with the step that it ran in. The agents' step goes on without it.

`python -m trainer.launching.relay srun ...` runs the command until its own input ends. A signal would not do: Slurm
gives it to every process of the step, and srun passes it on to the agents.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

_LOOK_S = 0.05


def relayed(command: Sequence[str], node: str, python: Sequence[str]) -> list[str]:
    """The srun that has `command`, an srun too, run on `node`, and leaves it to itself when its own input ends.

    `python`: how an interpreter of ours is called there. What the tasks of `command` say after that is lost, unless
    they say it to a file of their own.
    """
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--nodelist={node}",
        "--job-name=relay",
        "--overlap",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--input=0",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        *python,
        "-m",
        "trainer.launching.relay",
        *command,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Always 0: the step of a relay that fails would be told of as if it were its node's agent."""
    command = sys.argv[1:] if argv is None else list(argv)
    srun = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while srun.poll() is None:
        if _has_ended(sys.stdin.fileno()):
            # Both of its processes, and SIGKILL: on anything else srun would end its step.
            os.killpg(srun.pid, signal.SIGKILL)
            srun.wait()
    return 0


def _has_ended(source: int) -> bool:
    ready, _, _ = select.select([source], [], [], _LOOK_S)
    return bool(ready) and not os.read(source, 4096)


if __name__ == "__main__":
    sys.exit(main())
