"""Whether a node is lost, and how: by its beats, its connection and the port of its slurmd. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What is seen of one node from the batch host. Ages in seconds of the launcher's clock."""

    node: str
    age_s: float  # since its last beat
    closed_s: float | None = None  # since a kernel closed its connection, and none has come in its place
    is_told_dead: bool = False  # srun said that its agent ended
    answers: bool | None = None  # the kernel at its slurmd's port, several times since it is quiet; None: not known
    has_left_word: bool = False  # it says where others can read it that it lives and can't reach us
    others_answer: bool | None = None  # that of a node that beats: False when it is we who are cut off


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long which silence is none, in seconds."""

    suspect_s: float
    liveness_s: float
    closed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A node that can't be reckoned with any more. `is_blamed`: what is seen speaks against the node itself."""

    node: str
    kind: str
    cause: str
    evidence: tuple[str, ...] = ()
    is_blamed: bool = False
    age_s: float = 0.0


def judge_loss(signs: Signs, patience: Patience) -> Loss | None:
    """The loss of a node, or None while it may only be slow.

    One late beat is no loss: its slurmd's port has to be silent, too, while another node's answers, or the silence
    has to last. A connection that was closed was closed by a kernel that lives, unless its port is silent since.
    """
    if signs.closed_s is not None:
        return _judge_closed(signs, signs.closed_s, patience)
    if signs.age_s > patience.suspect_s and signs.has_left_word:
        return _cut_off(signs)
    if signs.age_s > patience.suspect_s and signs.answers is False and signs.others_answer:
        return _lost(signs)
    if signs.age_s > patience.liveness_s:
        return _frozen(signs) if signs.answers else _lost(signs)
    return None


def _judge_closed(signs: Signs, closed_s: float, patience: Patience) -> Loss | None:
    if not signs.is_told_dead and closed_s <= patience.closed_s:
        return None
    if signs.has_left_word:
        return _cut_off(signs)
    if signs.answers is False and signs.others_answer:
        return _lost(signs)
    # without its port: what goes down closes its connections too, and is silent as a node before long
    if signs.answers or closed_s > min(2 * patience.suspect_s, patience.liveness_s):
        return _killed(signs)
    return None


def _port(signs: Signs) -> str:
    return f"the port of slurmd on {signs.node}"


def _lost(signs: Signs) -> Loss:
    quiet = f"no beat from {signs.node} for {signs.age_s:.1f} s"
    seen = {
        True: f"{_port(signs)} accepts connections",
        False: f"{_port(signs)} does not answer",
        None: f"{_port(signs)} is not known",
    }[signs.answers]
    others = {
        True: ", that of another node does",
        False: ", nor does another node's: this host may be cut off itself",
        None: "",
    }
    return Loss(
        node=signs.node,
        kind="node_lost",
        cause=f"{signs.node} is lost: no beat for {signs.age_s:.1f} s and nothing of it answers",
        evidence=(quiet, seen + others[signs.others_answer]),
        is_blamed=signs.others_answer is not False,
        age_s=signs.age_s,
    )


def _cut_off(signs: Signs) -> Loss:
    return Loss(
        node=signs.node,
        kind="node_cut_off",
        cause=f"{signs.node} is cut off: no beat for {signs.age_s:.1f} s, though it lives",
        evidence=(f"no beat from {signs.node} for {signs.age_s:.1f} s", f"{signs.node} has left word that it lives"),
        is_blamed=True,
        age_s=signs.age_s,
    )


def _frozen(signs: Signs) -> Loss:
    return Loss(
        node=signs.node,
        kind="node_frozen",
        cause=f"{signs.node} is frozen: no beat for {signs.age_s:.1f} s though its kernel accepts connections",
        evidence=(f"no beat from {signs.node} for {signs.age_s:.1f} s", f"{_port(signs)} accepts connections"),
        is_blamed=True,
        age_s=signs.age_s,
    )


def _killed(signs: Signs) -> Loss:
    closed = f"the kernel of {signs.node} closed its agent's connection {signs.closed_s or 0:.1f} s ago"
    told = (f"srun says that the agent on {signs.node} ended",) if signs.is_told_dead else ()
    port = (f"{_port(signs)} accepts connections",) if signs.answers else ()
    return Loss(
        node=signs.node,
        kind="agent_killed",
        cause=f"the agent on {signs.node} was killed",
        evidence=(closed, *told, *port),
        age_s=signs.closed_s or 0.0,
    )
