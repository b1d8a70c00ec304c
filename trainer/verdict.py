"""Which nodes train, and how a step that is over ended. Pure: trainer.launch asks, and acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.beats import Message
from trainer.contract import EXIT_NODE_CHECK_FAILED, EXIT_NODE_SILENT, Outcome

EXIT_NOT_STARTED = 1  # no node can be blamed
EXIT_MISCONFIGURED = 127  # what was asked for cannot be started, as a shell says it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the step ended or is to end: the job's exit code and why."""

    exit_code: int
    reason: str
    node: str | None = None
    next: str = ""  # what is left to do, as in the exit record
    bad_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """The nodes that train, in rank order."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is known of a node before training starts. `failed`: why it cannot train, empty while it may."""

    node: str
    is_connected: bool = False
    is_checked: bool = False
    is_silent: bool = False
    failed: str = ""
    exit_code: int | None = None  # of an agent that ended already


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """One node's end, as it told us or as srun did."""

    node: str
    exit_code: int
    reason: str
    is_victim: bool = False  # it failed because another one did


def choose_nodes(
    candidates: Sequence[Candidate], wanted: int, *, may_wait_for_spares: bool, is_too_late: bool
) -> Go | Verdict | None:
    """The nodes to train on, a refusal that names the nodes at fault, or None while it is too early to tell."""
    healthy = [c.node for c in candidates if c.is_checked and not c.failed and not c.is_silent]
    failed = [c for c in candidates if c.failed]
    silent = [c for c in candidates if c.is_silent and not c.failed]
    missing = [c for c in candidates if not (c.is_checked or c.failed or c.is_silent)]
    if len(healthy) >= wanted and (not missing or not may_wait_for_spares):
        return Go(nodes=tuple(healthy[:wanted]))
    is_misconfigured = bool(failed) and all(c.exit_code == EXIT_MISCONFIGURED for c in failed) and not silent
    if len(healthy) + len(missing) < wanted:
        if is_misconfigured and len(failed) == len(candidates):
            return Verdict(exit_code=EXIT_MISCONFIGURED, reason=f"on every node: {failed[0].failed}")
        if is_misconfigured and missing and not is_too_late:
            return None  # is it this node, or every node? the others tell
        return _refuse_start(failed, silent, wanted, len(candidates))
    if not is_too_late:
        return None
    if not any(c.is_connected for c in candidates):
        return Verdict(exit_code=EXIT_NOT_STARTED, reason="no node reported: the training step did not start")
    return _refuse_start(failed, sorted([*silent, *missing], key=lambda c: c.is_connected), wanted, len(candidates))


def _refuse_start(failed: Sequence[Candidate], silent: Sequence[Candidate], wanted: int, count: int) -> Verdict:
    said = [f"{c.node}: no report in time" for c in silent] + [f"{c.node}: {c.failed}" for c in failed]
    reason = f"fewer than {wanted} nodes can start: {'; '.join(said)}"
    broken = [c for c in failed if c.exit_code not in (None, EXIT_NODE_CHECK_FAILED)]
    if not silent and broken == list(failed) and 2 * len(broken) > count:
        return Verdict(exit_code=EXIT_NOT_STARTED, reason=f"agents ended before their checks: {reason}")
    return Verdict(
        exit_code=EXIT_NODE_SILENT if silent else EXIT_NODE_CHECK_FAILED,
        reason=reason,
        node=next(c.node for c in (*silent, *failed)),
    )


def judge_ends(
    ends: Sequence[NodeEnd], trained: Sequence[str], alive: Sequence[str], outcome: Outcome | None
) -> Verdict:
    """The verdict on a step that ended by itself, from its nodes' ends in the order of their arrival.

    The first failure counts, but whoever lost its peer may well tell of it before that peer's own end is known: those
    that say so themselves come last. `alive`: the nodes that still answer; when the step ended under them it was not
    their doing.
    """
    failures = sorted((end for end in ends if end.exit_code != 0), key=lambda end: end.is_victim)
    failed = failures[0] if failures else None
    if outcome is not None and outcome.exit_code != 0:
        node = failed.node if failed else None
        return Verdict(exit_code=outcome.exit_code, reason=outcome.message or "as outcome.json says", node=node)
    if failed is not None:
        return Verdict(exit_code=failed.exit_code, reason=f"{failed.node}: {failed.reason}", node=failed.node)
    missing = [node for node in trained if node not in {end.node for end in ends}]
    lost = [node for node in missing if node not in alive]
    if lost:
        reason = f"the step ended without a word from {', '.join(lost)}"
        return Verdict(exit_code=EXIT_NODE_SILENT, reason=reason, node=lost[0])
    if missing:
        return Verdict(exit_code=EXIT_NOT_STARTED, reason="srun ended while the nodes were training")
    return Verdict(exit_code=0, reason="finished")


def describe_failed_check(message: Message) -> str:
    """The first failed check of a node's report, or an empty string."""
    checks = message.get("checks")
    for check in checks if isinstance(checks, list) else []:
        if isinstance(check, dict) and check.get("ok") is False:
            return f"{check.get('check')}: {check.get('detail') or 'failed'}"
    return ""
