"""State words of jobs and of nodes to a base state and flags, and what a node can be used for. Pure and total.

Slurm shows a state in many forms: one word (squeue, sacct), a compact one (`PD`), words joined by `+` (scontrol), one
word with a suffix (sinfo), a list (JSON from 23.11 on). All of them are read here. What Slurm may say is an open set: a
word that is not known makes the base state UNRECOGNIZED, or is kept as a flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from slurm.types import JobFlag, JobRecord, JobState, NodeAvailability, NodeBase, NodeRecord

_REMEMBERED_WORDS = 1024  # a cluster shows a few dozen different ones

# ---------------------------------------------------------------- jobs

_COMPACT_STATES = {
    "PD": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "CD": "COMPLETED",
    "CA": "CANCELLED",
    "F": "FAILED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
    "PR": "PREEMPTED",
    "BF": "BOOT_FAIL",
    "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY",
    "CG": "COMPLETING",
    "CF": "CONFIGURING",
    "RQ": "REQUEUED",
    "RH": "REQUEUE_HOLD",
    "RF": "REQUEUE_FED",
    "SE": "SPECIAL_EXIT",
    "RD": "RESV_DEL_HOLD",
    "SO": "STAGE_OUT",
    "RS": "RESIZING",
    "ST": "STOPPED",
    "SI": "SIGNALING",
    "RV": "REVOKED",
}

# The base state that a flag shown alone stands for. COMPLETING, STAGE_OUT and REVOKED hide it: None.
_BASE_OF_FLAG = {
    JobFlag.CONFIGURING: JobState.RUNNING,
    JobFlag.RESIZING: JobState.RUNNING,
    JobFlag.STOPPED: JobState.RUNNING,
    JobFlag.SIGNALING: JobState.RUNNING,
    JobFlag.REQUEUED: JobState.PENDING,
    JobFlag.REQUEUE_HOLD: JobState.PENDING,
    JobFlag.REQUEUE_FED: JobState.PENDING,
    JobFlag.SPECIAL_EXIT: JobState.PENDING,
    JobFlag.RESV_DEL_HOLD: JobState.PENDING,
    JobFlag.EXPEDITING: JobState.PENDING,
}

_STATES = {state.value: state for state in JobState if state is not JobState.UNRECOGNIZED}
_FLAGS = {flag.value: flag for flag in JobFlag}


@lru_cache(maxsize=_REMEMBERED_WORDS)
def parse_job_state(text: str) -> tuple[JobState | None, frozenset[JobFlag]]:
    """Base state and flags of a state word of squeue or sacct, long or compact, or of several joined by `+` or `,`.

    None as base: only a flag was shown and it hides the base state (COMPLETING). `UNRECOGNIZED`: a word of another
    release. `CANCELLED by 1001` and the cut form `CANCELLED+` are CANCELLED.
    """
    return judge_job_words(_state_words(text))


def judge_job_words(shown: Iterable[str]) -> tuple[JobState | None, frozenset[JobFlag]]:
    """As `parse_job_state`, of words that come apart already (JSON's list)."""
    words = [_COMPACT_STATES.get(word, word) for word in shown]
    states = [_STATES[word] for word in words if word in _STATES]
    flags = frozenset(_FLAGS[word] for word in words if word in _FLAGS)
    if states:
        return states[0], flags
    if not words or any(word not in _FLAGS for word in words):
        return JobState.UNRECOGNIZED, flags
    return next((_BASE_OF_FLAG[flag] for flag in sorted(flags) if flag in _BASE_OF_FLAG), None), flags


def _state_words(text: str) -> list[str]:
    without_user = re.sub(r"\s+by\s+.*$", "", text.strip(), flags=re.IGNORECASE | re.DOTALL)
    return [word.upper() for word in re.split(r"[+,\s]+", without_user) if word]


# ---------------------------------------------------------------- nodes

# One letter that scontrol (old releases) and sinfo hang on a word, and the flag it stands for.
_NODE_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}

# sinfo's collapsed words. A word that hides the base state has base UNKNOWN: a drained node may be down as well.
_NODE_WORDS: Mapping[str, tuple[NodeBase | None, frozenset[str]]] = {
    "ALLOC": (NodeBase.ALLOCATED, frozenset()),
    "MIX": (NodeBase.MIXED, frozenset()),
    "UNK": (NodeBase.UNKNOWN, frozenset()),
    "ERR": (NodeBase.ERROR, frozenset()),
    "FUTR": (NodeBase.FUTURE, frozenset()),
    "DRAINED": (None, frozenset({"DRAIN"})),
    "DRAINING": (NodeBase.ALLOCATED, frozenset({"DRAIN"})),
    "DRNG": (NodeBase.ALLOCATED, frozenset({"DRAIN"})),
    "FAILING": (NodeBase.ALLOCATED, frozenset({"FAIL"})),
    "FAILG": (NodeBase.ALLOCATED, frozenset({"FAIL"})),
    "COMP": (NodeBase.IDLE, frozenset({"COMPLETING"})),
    "MAINT": (None, frozenset({"MAINTENANCE"})),
    "RESV": (NodeBase.IDLE, frozenset({"RESERVED"})),
    "PLND": (NodeBase.IDLE, frozenset({"PLANNED"})),
    "BOOT": (None, frozenset({"REBOOT_ISSUED"})),
    "REBOOT": (None, frozenset({"REBOOT_ISSUED"})),
    "INVAL": (None, frozenset({"INVALID_REG"})),
    "NO_RESPOND": (None, frozenset({"NOT_RESPONDING"})),
    "BLOCK": (NodeBase.IDLE, frozenset({"BLOCKED"})),
    "EXT": (None, frozenset({"EXTERNAL"})),
    "POW_DN": (None, frozenset({"POWER_DOWN"})),
    "POW_UP": (None, frozenset({"POWER_UP"})),
    "POWRING_DN": (None, frozenset({"POWERING_DOWN"})),
    "POWERED_DN": (None, frozenset({"POWERED_DOWN"})),
    "CANC_R": (None, frozenset({"CANCEL_REBOOT"})),
    "RESM": (None, frozenset({"RESUME"})),
}

_NODE_BASES = {base.value: base for base in NodeBase if base is not NodeBase.UNRECOGNIZED}

# Flags that say nothing about whether the node can be used.
_HARMLESS_FLAGS = frozenset(
    {"CLOUD", "DYNAMIC_FUTURE", "DYNAMIC_NORM", "PLANNED", "PERFCTRS", "RESUME", "UNDRAIN", "COMPLETING"}
)
_KNOWN_FLAGS = _HARMLESS_FLAGS | {
    "DRAIN",
    "FAIL",
    "NOT_RESPONDING",
    "INVALID_REG",
    "POWER_DOWN",
    "POWERED_DOWN",
    "POWERING_DOWN",
    "POWER_DRAIN",
    "POWER_UP",
    "POWERING_UP",
    "MAINTENANCE",
    "RESERVED",
    "REBOOT_REQUESTED",
    "REBOOT_ISSUED",
    "CANCEL_REBOOT",
    "BLOCKED",
    "EXTERNAL",
}

_Rule = tuple[Callable[[NodeBase, frozenset[str]], bool], NodeAvailability]

# First hit wins.
_NODE_RULES: tuple[_Rule, ...] = (
    # A planned reboot passes through NOT_RESPONDING and DRAIN; neither is a failure.
    (lambda _, flags: bool(flags & {"REBOOT_ISSUED", "POWERING_UP"}), NodeAvailability.UNAVAILABLE),
    (lambda base, _: base in {NodeBase.DOWN, NodeBase.ERROR}, NodeAvailability.DOWN),
    (
        lambda _, flags: bool(flags & {"NOT_RESPONDING", "INVALID_REG", "POWERED_DOWN", "POWERING_DOWN"}),
        NodeAvailability.DOWN,
    ),
    # Work is still on it: no repair, no reset, until it is DRAINED.
    (lambda base, flags: _has_drain(flags) and _has_work(base, flags), NodeAvailability.DRAINING),
    (lambda _, flags: _has_drain(flags), NodeAvailability.DRAINED),
    (lambda _, flags: bool(flags - _HARMLESS_FLAGS), NodeAvailability.UNAVAILABLE),  # unknown flags as well
    (lambda base, flags: base is NodeBase.IDLE and "COMPLETING" in flags, NodeAvailability.UNAVAILABLE),
    (
        lambda base, _: base in {NodeBase.IDLE, NodeBase.MIXED, NodeBase.ALLOCATED},
        NodeAvailability.USABLE,
    ),
)


def classify_node(base: NodeBase, flags: frozenset[str]) -> NodeAvailability:
    """What a node can be used for now. A flag that is not known makes it unavailable, never drained or down."""
    return next((found for holds, found in _NODE_RULES if holds(base, flags)), NodeAvailability.UNAVAILABLE)


def _has_drain(flags: frozenset[str]) -> bool:
    return bool(flags & {"DRAIN", "FAIL"})


def _has_work(base: NodeBase, flags: frozenset[str]) -> bool:
    return base in {NodeBase.ALLOCATED, NodeBase.MIXED} or "COMPLETING" in flags


def unknown_flags(flags: frozenset[str]) -> frozenset[str]:
    """The flags that this release does not know: worth one log line each."""
    return flags - _KNOWN_FLAGS


@lru_cache(maxsize=_REMEMBERED_WORDS)
def parse_node_state(text: str) -> tuple[NodeBase, frozenset[str]]:
    """Base state and flags of `IDLE+DRAIN+NOT_RESPONDING`, of the older `IDLE*+DRAIN`, and of sinfo's single words.

    sinfo shows at most one suffix: the absence of `*` in its words does not mean that the node responds.
    """
    base: NodeBase | None = None
    flags: set[str] = set()
    words = text.strip().upper().split("+")
    if len(words) == 2 and not words[1] and words[0].startswith("ALLOC"):
        flags.add("COMPLETING")  # `allocated+`: there the plus is a suffix, not a separator
    for word in words:
        plain = word.strip().rstrip("".join(_NODE_SUFFIXES))
        flags.update(_NODE_SUFFIXES[letter] for letter in word.strip()[len(plain) :])
        known, implied = _node_word(plain, is_first=word is words[0])
        base = base or known
        flags |= implied
    return base or (NodeBase.UNKNOWN if flags else NodeBase.UNRECOGNIZED), frozenset(flags)


def _node_word(word: str, *, is_first: bool) -> tuple[NodeBase | None, frozenset[str]]:
    if not word:
        return None, frozenset()
    if word in _NODE_BASES:
        return _NODE_BASES[word], frozenset()
    if word in _NODE_WORDS:
        return _NODE_WORDS[word]
    if is_first and word not in _KNOWN_FLAGS:
        return NodeBase.UNRECOGNIZED, frozenset()
    return None, frozenset({word})


# ---------------------------------------------------------------- news


def find_unknown_words(jobs: Iterable[JobRecord], nodes: Iterable[NodeRecord]) -> frozenset[str]:
    """States and flags that this release does not know, as sentences: worth one log line each."""
    words = {f"job state {job.raw_state or 'without a word'}" for job in jobs if job.state is JobState.UNRECOGNIZED}
    for node in nodes:
        words |= {f"node flag {flag}" for flag in unknown_flags(node.flags)}
        if node.base is NodeBase.UNRECOGNIZED:
            words.add(f"node state {node.raw_state}")
    return frozenset(words)
