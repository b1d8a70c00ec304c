"""What the ends of ranks mean for the course of an attempt. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from trainer import contract
from trainer.contract import AttemptSpec, Outcome
from trainer.launching.choice import choose_training
from trainer.launching.interruptions import Finding
from trainer.launching.nodes import Node
from trainer.launching.training import Training
from trainer.verdict import EXIT_MISCONFIGURED, EXIT_NOT_STARTED, Candidate, Go, NodeEnd, Verdict

EXIT_TERMINATED = 128 + signal.SIGTERM
# What a training says on purpose: starting it again in the same attempt would only bring it there once more.
FINAL_CODES = frozenset(
    {
        contract.EXIT_RESUBMIT,
        contract.EXIT_CHECKPOINT_REJECTED,
        contract.EXIT_DIVERGED,
        contract.EXIT_DO_NOT_RESTART,
        EXIT_MISCONFIGURED,
    }
)


def is_final(ends: Sequence[NodeEnd], nodes: Iterable[Node], outcome: Outcome | None) -> bool:
    """True when the training meant to end, can't be started at all, or was ended by Slurm."""
    if outcome is not None or any(end.exit_code in FINAL_CODES for end in ends):
        return True
    return any(node.is_terminated for node in nodes)


def find_failure(training: Training, nodes: Mapping[str, Node]) -> Finding | None:
    """The failure that the ends tell of: the first one that is not the consequence of another."""
    failures = sorted((end for end in training.ends if end.exit_code != 0), key=lambda end: end.is_victim)
    if not failures:
        return None
    first = failures[0]
    cut = [node for node in nodes.values() if node.cut_s > 0]
    if nodes[first.node] in cut:
        return _cut_off(first, nodes[first.node].cut_s, is_common=2 * len(cut) > len(nodes))
    is_port_taken = nodes[first.node].is_port_taken
    others = [f"{end.node}: {end.reason} (exit code {end.exit_code})" for end in failures[1:9]]
    return Finding(
        kind="start_failed" if is_port_taken else "process",
        cause=f"{first.node}: {first.reason}",
        exit_code=first.exit_code,
        hint=first.node,
        evidence=(f"{first.node}: {first.reason} (exit code {first.exit_code})", *others),
        is_weak=first.is_victim,
    )


def find_unstarted(
    training: Training, nodes: Mapping[str, Node], now: float, limit_s: float, *, is_gated: bool
) -> Finding | None:
    """A node that was told its place and does not begin. `is_gated`: the others still wait for the first one."""
    if now - training.began_at <= limit_s:
        return None
    idle = [name for name in training.nodes if nodes[name].state in ("ready", "spare", "checking")]
    if not idle and not is_gated:
        return None
    slow = idle[0] if idle and not is_gated else training.nodes[0]
    return Finding(
        kind="start_failed",
        cause=f"{slow} did not begin within {limit_s:g} s of its order",
        exit_code=EXIT_NOT_STARTED,
        hint=slow,
    )


def _cut_off(end: NodeEnd, cut_s: float, *, is_common: bool) -> Finding:
    """A node that stopped its own ranks because it could not reach us. `is_common`: most did; then it was us."""
    cause = f"{end.node} could not reach the launcher for {cut_s:.1f} s and has stopped its ranks"
    common = f"most nodes did not hear the launcher for {cut_s:.1f} s: it was stopped or cut off itself"
    return Finding(
        kind="node_cut_off",
        cause=common if is_common else cause,
        exit_code=contract.EXIT_NODE_SILENT,
        nodes=() if is_common else (end.node,),
        evidence=(f"{end.node}: {end.reason}",),
        detect_s=cut_s,
    )


def choose_fewer(
    refusal: Verdict, candidates: Sequence[Candidate], spec: AttemptSpec, *, is_too_late: bool
) -> Verdict | Go | None:
    """A first start on fewer nodes than wanted, where that is allowed; None: the others may still come."""
    is_curable = spec.in_job and refusal.exit_code in (contract.EXIT_NODE_CHECK_FAILED, contract.EXIT_NODE_SILENT)
    if not is_curable:
        return refusal
    open_ = [c for c in candidates if not (c.is_checked or c.failed or c.is_silent)]
    healthy = [c.node for c in candidates if c.is_checked and not c.failed and not c.is_silent]
    minimum = spec.nodes_min or spec.nodes

    def choose(nodes: Sequence[str]) -> tuple[str, ...]:
        return choose_training((), nodes, wanted=spec.nodes, minimum=minimum, multiple=spec.node_multiple)

    bad = tuple(c.node for c in candidates if c.failed or c.is_silent or (is_too_late and not c.is_checked))
    if not choose([*healthy, *(c.node for c in open_)]) or (is_too_late and not choose(healthy)):
        return replace(refusal, next="resubmit", bad_nodes=bad)
    return Go(nodes=choose(healthy)) if is_too_late or not open_ else None
