"""Why an attempt ended: everything that it left behind, ranked into one cause. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from slurm.pending import explain_start_failure
from slurm.types import JobRecord, JobState
from supervisor.attribution.exits import read_exit
from supervisor.attribution.flight import read_flight
from supervisor.attribution.signs import Sign, Weight, find_signs
from supervisor.attribution.torchrun import parse_failures
from supervisor.model import Cause, RunView
from trainer.contract import Divergence

MAX_EVIDENCE = 10
MAX_TEXT = 64 * 1024  # of each source
MAX_TOTAL = 4 * 1024 * 1024  # of all node reports; those of nodes that ended badly are read first


def attribute(view: RunView, job: JobRecord | None) -> Cause:
    """One cause with its evidence, best first; kind "unknown" when nothing says anything."""
    if view.divergence is not None:
        return _read_divergence(view.divergence)
    signs = _tell_rendezvous(_name_nodes(_translate_hosts(_gather(view, job), view, job)))
    if not signs:
        return Cause(kind="unknown", sentence=_last_resort(view, job))
    ranked = _rank(signs, view)
    best = ranked[0]
    node = _blamed_node(best, signs, view)
    return Cause(
        kind=best.kind,
        sentence=_sentence(best, node),
        node=node,
        evidence=_evidence(ranked),
        is_curable=best.is_curable or _is_one_node_s_disk(best, signs, view),
        blames_node=best.blames_node and node is not None,
    )


def _read_divergence(record: Divergence) -> Cause:
    """What the training found of its own loss comes first, and is no node's fault: what follows are consequences."""
    what = "jumped" if record.kind == "spike" else "is not a number"
    return Cause(kind="divergence", sentence=f"the loss {what} since step {record.onset_step}")


# ---------------------------------------------------------------- gathering


def _gather(view: RunView, job: JobRecord | None) -> list[Sign]:
    signs = list(_read_reports(view))
    signs += _read_job_log(view)
    signs += _read_exits(view)
    signs += _read_job_exit(view, job)
    signs += _read_launcher_end(view, job)
    signs += read_flight(view.flight)
    if job is not None and job.state is JobState.OUT_OF_MEMORY:
        signs.append(Sign(kind="host_memory", weight=Weight.MEMORY, text=f"Slurm: job {job.job_id} OUT_OF_MEMORY"))
    return signs


def _read_reports(view: RunView) -> Iterator[Sign]:
    reports = sorted(view.node_reports, key=lambda report: not report.exit_code)
    left = MAX_TOTAL
    for report in reports:
        text = report.log_tail[-MAX_TEXT:]
        left -= len(text)
        if left < 0:
            return
        yield from find_signs(text, report.node)
        yield from _read_torchrun(text)


def _read_job_log(view: RunView) -> Iterator[Sign]:
    text = view.log_tail[-4 * MAX_TEXT :]
    only_node = view.node_reports[0].node if len(view.node_reports) == 1 else None
    yield from find_signs(text, only_node)
    yield from _read_torchrun(text)


def _read_torchrun(text: str) -> Iterator[Sign]:
    for failure in parse_failures(text):
        who = f"rank {failure.rank} on {failure.host}"
        sign = read_exit(failure.exit_code, who, node=failure.host or None, rank=failure.rank)
        if sign is not None:
            yield sign


def _read_exits(view: RunView) -> Iterator[Sign]:
    codes = dict(view.exit.nodes) if view.exit is not None else {}
    codes |= {report.node: report.exit_code for report in view.node_reports if report.exit_code is not None}
    for node, code in codes.items():
        sign = read_exit(code, node, node=node)
        if sign is not None:
            yield sign


_NOT_FOUND = re.compile(r"^.*: \S+: (?:command )?not found$", re.MULTILINE)
_CANNOT_START = frozenset({126, 127})


def _read_job_exit(view: RunView, job: JobRecord | None) -> Iterator[Sign]:
    """A job that ended with a shell's own "there is no such program", and the line that names it.

    Only with that code: scripts say "not found" of things that they can do without.
    """
    code = view.exit.exit_code if view.exit is not None else job.exit_code if job is not None else None
    if code not in _CANNOT_START:
        return
    sign = read_exit(code, "the job")
    lines = _NOT_FOUND.findall(view.log_tail[-MAX_TEXT:])
    if sign is not None:
        yield replace(sign, text=lines[-1].strip()[:300]) if lines else sign


def _read_launcher_end(view: RunView, job: JobRecord | None) -> Iterator[Sign]:
    """A signal that ended the launcher itself: Slurm then ends the nodes' agents, whose SIGTERM explains nothing."""
    if view.exit is not None or job is None or job.state is not JobState.FAILED or not job.exit_signal:
        return
    sign = read_exit(128 + job.exit_signal, "the launcher, on the batch host")
    if sign is not None:
        yield replace(sign, weight=min(sign.weight, Weight.KILLED))


# ---------------------------------------------------------------- ranking


def _rank(signs: list[Sign], view: RunView) -> list[Sign]:
    """Best first, each text once. Between equals: the node that the launcher names, then what stands first."""
    named = view.exit.node if view.exit is not None else None
    order = sorted(signs, key=lambda s: (s.weight, s.node != named if named else False, s.position))
    seen: set[str] = set()
    ranked = []
    for sign in order:
        if sign.text not in seen:
            seen.add(sign.text)
            ranked.append(sign)
    return ranked


def _name_nodes(signs: list[Sign]) -> list[Sign]:
    """The job's log repeats the nodes' words without saying whose they are: take the node from where it is known."""
    by_text = {sign.text: sign.node for sign in reversed(signs) if sign.node is not None}
    by_rank: dict[int | None, str] = {
        sign.rank: sign.node for sign in signs if sign.rank is not None and sign.node is not None
    }
    return [sign if sign.node else _on(sign, by_text.get(sign.text) or by_rank.get(sign.rank)) for sign in signs]


def _tell_rendezvous(signs: list[Sign]) -> list[Sign]:
    """Of several nodes that never reached the store, it is the store: its address, or who should have served it.

    Of one, it is that node's own network.
    """
    nodes = {sign.node for sign in signs if sign.kind == "rendezvous"}
    if len(nodes) == 1:
        return signs
    return [replace(sign, kind="rendezvous_start", node=None) if sign.kind == "rendezvous" else sign for sign in signs]


def _translate_hosts(signs: list[Sign], view: RunView, job: JobRecord | None) -> list[Sign]:
    """Tools name hosts; nodes of the attempt are what we know. A host that is none of them names nobody."""
    nodes = {report.node for report in view.node_reports} | set(view.exit.nodes if view.exit is not None else ())
    nodes |= set(job.nodes if job is not None else ())
    if not nodes:
        return signs
    hosts = {report.host: report.node for report in view.node_reports} | {node: node for node in nodes}
    return [
        sign
        if sign.node is None or sign.node in nodes
        else _on(sign, hosts.get(sign.node) or hosts.get(sign.node.partition(".")[0]))
        for sign in signs
    ]


def _on(sign: Sign, node: str | None) -> Sign:
    return Sign(
        kind=sign.kind,
        weight=sign.weight,
        text=sign.text,
        node=node,
        rank=sign.rank,
        is_curable=sign.is_curable,
        blames_node=sign.blames_node,
        position=sign.position,
    )


def _blamed_node(best: Sign, signs: list[Sign], view: RunView) -> str | None:
    """The node that the best sign is about. Of mere victims nobody is named but the one node that said nothing."""
    if best.weight in (Weight.VICTIM, Weight.TIMEOUT, Weight.TERMINATED):
        return _silent_node(signs, view)
    same = {sign.node for sign in signs if sign.weight is best.weight and sign.kind == best.kind}
    if best.weight is Weight.TRACEBACK and len(same) > 1:
        return None  # the same everywhere: the program, not a node
    return best.node


def _is_one_node_s_disk(best: Sign, signs: list[Sign], view: RunView) -> bool:
    """A full disk that only one node of several meets, and that names no shared path: other nodes have their own."""
    full = [sign for sign in signs if sign.kind == "disk_full"]
    is_local = "No space left" in best.text and "'/" not in best.text
    is_one = len({sign.node for sign in full}) == 1 and full[0].node is not None if full else False
    return best.kind == "disk_full" and is_local and is_one and len(view.node_reports) > 1


def _silent_node(signs: list[Sign], view: RunView) -> str | None:
    """The only node of the attempt that left no word and no exit code, when all others did."""
    if view.exit is None:
        return None
    spoke = {sign.node for sign in signs} | {report.node for report in view.node_reports}
    silent = [node for node, code in view.exit.nodes.items() if code is None and node not in spoke]
    return silent[0] if len(silent) == 1 and len(view.exit.nodes) > 1 else None


# ---------------------------------------------------------------- words

_MEANINGS = {
    "peer_lost": "ranks lost their peers",
    "collective_timeout": "a collective did not end in time",
    "terminated": "terminated from outside",
    "rendezvous_start": "no node could reach the ranks' meeting point: is its address right, and does it listen there?",
}


def _sentence(best: Sign, node: str | None) -> str:
    meaning = _MEANINGS.get(best.kind)
    if meaning is not None:
        return f"{meaning}; {node} left no word" if node else f"{meaning} ({best.text[:160]})"
    where = node or best.node
    is_named = where is None or where in best.text
    return best.text[:300] if is_named else f"{where}: {best.text[:300]}"


def _evidence(signs: list[Sign]) -> tuple[str, ...]:
    return tuple(
        f"{sign.node}: {sign.text[:300]}" if sign.node and sign.node not in sign.text else sign.text[:300]
        for sign in signs[:MAX_EVIDENCE]
    )


def _last_resort(view: RunView, job: JobRecord | None) -> str:
    if view.exit is not None:
        return view.exit.reason or f"exit code {view.exit.exit_code}"
    if job is None:
        return "it left no trace"
    code = f" with exit code {job.exit_code}" if job.state is JobState.FAILED and job.exit_code else ""
    return f"Slurm: job {job.job_id} {job.raw_state}{explain_start_failure(job.reason) or code}"
