"""On each node of the training step: start checks, the ranks, beats, evidence when it ends.

`python -m trainer.node ATTEMPT_DIR`, started by trainer.launch through srun; trainer.agent holds what it is made of.
Standard library only, and nothing heavy: seconds here are seconds of every recovery.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer import contract
from trainer.agent.agent import NodeAgent
from trainer.agent.client import Patience
from trainer.agent.outage import derive_patience
from trainer.agent.surroundings import find_node_name
from trainer.contract import AttemptSpec, ContractError
from trainer.descendants import set_process_ties
from trainer.verdict import EXIT_MISCONFIGURED

ENV_AGENT_LOG = "SUPERVISOR_AGENT_LOG"  # where our output goes instead of to srun, which may be gone by then


def main(argv: Sequence[str] | None = None, patience: Patience | None = None) -> int:
    """Run one node of an attempt. `patience`: other limits than the attempt's own, in tests."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    secret = os.environ.pop(contract.ENV_LAUNCHER_SECRET, "")
    host, _, port = os.environ.pop(contract.ENV_LAUNCHER, "").rpartition(":")
    if len(arguments) != 1 or not secret or not host or not port.isdecimal():
        print("trainer.node is started by trainer.launch, with an attempt's folder", file=sys.stderr)
        return EXIT_MISCONFIGURED
    attempt_dir = Path(arguments[0])
    try:
        spec = contract.parse(AttemptSpec, (attempt_dir / "attempt.json").read_bytes())
    except (OSError, ContractError) as error:
        print(f"{find_node_name(os.environ)}: attempt.json: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    _speak_into(os.environ.pop(ENV_AGENT_LOG, ""))
    set_process_ties()
    agent = NodeAgent(
        spec=spec,
        attempt_dir=attempt_dir,
        node=find_node_name(os.environ),
        launcher=(host, int(port)),
        secret=secret,
        environment=os.environ,
        patience=patience or derive_patience(spec),
    )
    return agent.run()


def _speak_into(log: str) -> None:
    """Append our output and our ranks' to this file from now on; an empty name or one that cannot be had: no change."""
    if not log:
        return
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        print(f"{find_node_name(os.environ)}: {log}: {error}", file=sys.stderr, flush=True)
        return
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
