"""Which way the ranks of a node are started, as the attempt's specification asks and the command allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from trainer.agent.program import Program
from trainer.agent.workers import Setting, Workers, is_python, say_nothing_kept, say_to_log
from trainer.agent.workers_direct import DirectWorkers
from trainer.agent.workers_torchrun import TorchrunWorkers
from trainer.agent.workers_warm import WarmWorkers
from trainer.contract import AttemptSpec


def refuse_warm(spec: AttemptSpec, program: Program) -> str:
    """Why nothing can be prepared in an interpreter beside this attempt's ranks; empty when it can."""
    if spec.command_prefix or spec.srun_options:
        return "the ranks run in a container"
    if not is_python(program):
        return "the command is no Python program"
    return ""


def create_workers(
    spec: AttemptSpec,
    program: Program,
    environment: Mapping[str, str],
    *,
    log_dir: Path,
    local_addr: Callable[[], str],
    others: Callable[[], Collection[int]] = say_nothing_kept,
    say: Callable[[str], None] = say_to_log,
) -> Workers:
    """The ranks of this node, in the way that `spec.worker_start` names.

    `program`, `environment`: as they are known before a start. `local_addr`: this node's address towards the others.
    `others`: children of this process that are not the training's, such as a running check.
    """
    setting = Setting(
        procs=spec.procs_per_node,
        log_dir=log_dir,
        prefix=spec.command_prefix,
        retries=spec.max_without_progress if spec.in_job else 0,
        others=others,
        say=say,
    )
    if spec.worker_start == "torchrun":
        return TorchrunWorkers(setting, program, environment, local_addr=local_addr)
    refusal = refuse_warm(spec, program)
    if spec.worker_start != "warm" or refusal:
        if spec.worker_start == "warm":
            say(f"no warm start: {refusal}; fresh processes are started")
        return DirectWorkers(setting, program, environment, can_serve=not refusal)
    return WarmWorkers(setting, program, environment)
