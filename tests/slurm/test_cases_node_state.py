"""Node states as bug reports brought them. What the service makes of them is in tests/core/test_slurm_cases.py."""

from __future__ import annotations

from typing import Any

import pytest

from slurm.parse import parse_nodes
from slurm.parse_json import parse_nodes_json
from slurm.states import classify_node, find_unknown_words, parse_node_state
from slurm.types import NodeAvailability, NodeBase, NodeRecord


def by_text(state: str) -> NodeRecord:
    (node,) = parse_nodes(f"NodeName=gpu01 State={state} ThreadsPerCore=1\n").nodes
    return node


def by_json(**fields: Any) -> NodeRecord:
    (node,) = parse_nodes_json({"nodes": [{"name": "gpu01", **fields}]}).nodes
    return node


def test_a_node_that_works_and_drains_is_draining() -> None:
    """NS-02: flags are apart from the base state."""
    node = by_text("MIXED+DRAIN")
    assert (node.base, node.flags) == (NodeBase.MIXED, frozenset({"DRAIN"}))
    assert (node.availability, node.is_idle) == (NodeAvailability.DRAINING, False)


def test_an_idle_node_in_maintenance_is_neither_usable_nor_broken() -> None:
    """NS-02."""
    node = by_text("IDLE+DYNAMIC_NORM+MAINTENANCE+RESERVED+PLANNED")
    assert node.flags == {"DYNAMIC_NORM", "MAINTENANCE", "RESERVED", "PLANNED"}
    assert (node.availability, node.is_responding) == (NodeAvailability.UNAVAILABLE, True)


@pytest.mark.parametrize(
    ("word", "base"), [("idle*", NodeBase.IDLE), ("down*", NodeBase.DOWN), ("alloc*", NodeBase.ALLOCATED)]
)
def test_a_star_is_not_responding_whatever_the_base_state(word: str, base: NodeBase) -> None:
    """NS-04."""
    assert parse_node_state(word) == (base, frozenset({"NOT_RESPONDING"}))
    assert classify_node(*parse_node_state(word)) is not NodeAvailability.USABLE


@pytest.mark.parametrize(
    ("word", "full", "shown"),
    [
        ("DOWN~", "DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING", "POWERED_DOWN"),
        ("DRAINED$", "IDLE+DRAIN+MAINTENANCE+NOT_RESPONDING", "MAINTENANCE"),
    ],
)
def test_one_suffix_hides_others_and_the_full_list_tells(word: str, full: str, shown: str) -> None:
    """NS-06: the absence of `*` says nothing, so nothing is asked of sinfo's words (see slurm.commands)."""
    _, flags = parse_node_state(word)
    assert shown in flags
    assert "NOT_RESPONDING" not in flags
    assert not by_text(full).is_responding
    assert by_text(full).availability is NodeAvailability.DOWN


@pytest.mark.parametrize(
    "state",
    ["mix@", "alloc@", "REBOOT*+DRAIN", "reboot^", "boot^", "IDLE+DRAIN+REBOOT_ISSUED+NOT_RESPONDING"],
)
def test_a_planned_reboot_is_out_of_use_and_neither_down_nor_drained(state: str) -> None:
    """NS-08."""
    base, flags = parse_node_state(state)
    assert flags & {"REBOOT_REQUESTED", "REBOOT_ISSUED"}
    assert classify_node(base, flags) is NodeAvailability.UNAVAILABLE


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "idle", "state_flags": ["DRAIN"]},
        {"state": ["IDLE", "DRAIN"]},
        {"state": ["idle", "drain"]},
        {"state": "IDLE", "state_flags": "DRAIN"},
    ],
)
def test_drain_is_seen_in_each_json_shape(fields: dict[str, Any]) -> None:
    """NS-09."""
    node = by_json(**fields)
    assert (node.base, node.flags) == (NodeBase.IDLE, frozenset({"DRAIN"}))


@pytest.mark.parametrize("flags", [{}, {"state_flags": []}, {"state_flags": ""}, {"state_flags": None}])
def test_missing_or_empty_flags_are_none(flags: dict[str, Any]) -> None:
    """NS-09."""
    node = by_json(state="idle", **flags)
    assert (node.base, node.flags) == (NodeBase.IDLE, frozenset())


@pytest.mark.parametrize("flag", ["BLOCKED", "EXTERNAL", "?", "SOMETHING_NEW"])
def test_a_flag_of_another_release_is_kept_and_makes_the_node_unusable_but_not_broken(flag: str) -> None:
    """NS-10."""
    for node in (by_text(f"IDLE+{flag}"), by_json(state=["IDLE", flag])):
        assert (node.base, node.flags) == (NodeBase.IDLE, frozenset({flag}))
        assert node.availability is NodeAvailability.UNAVAILABLE
        assert not node.is_drain_set


def test_flags_that_are_not_known_are_named_for_the_log() -> None:
    """NS-10: one line per flag, not per node."""
    nodes = [by_text("IDLE+SOMETHING_NEW"), by_text("MIXED+SOMETHING_NEW"), by_text("IDLE+DRAIN"), by_text("NEW_BASE")]
    assert find_unknown_words([], nodes) == {"node flag SOMETHING_NEW", "node state NEW_BASE"}


@pytest.mark.parametrize(
    ("word", "flag", "availability"),
    [
        ("drain", "DRAIN", "drained"),
        ("drained", "DRAIN", "drained"),
        ("drng", "DRAIN", "draining"),
        ("draining", "DRAIN", "draining"),
        ("fail", "FAIL", "drained"),
        ("failg", "FAIL", "draining"),
        ("drained$", "DRAIN", "drained"),
    ],
)
def test_words_of_draining_and_failing_tell_whether_work_is_left(word: str, flag: str, availability: str) -> None:
    """NS-12."""
    base, flags = parse_node_state(word)
    assert flag in flags
    assert classify_node(base, flags) is NodeAvailability(availability)


def test_a_draining_node_that_does_not_respond_is_down() -> None:
    """NS-12: `draining*`."""
    base, flags = parse_node_state("draining*")
    assert (base, flags) == (NodeBase.ALLOCATED, frozenset({"DRAIN", "NOT_RESPONDING"}))
    assert classify_node(base, flags) is NodeAvailability.DOWN


@pytest.mark.parametrize(
    ("state", "is_empty"),
    [
        ("ALLOCATED+DRAIN", False),
        ("MIXED+DRAIN+COMPLETING", False),
        ("IDLE+DRAIN+COMPLETING", False),
        ("IDLE+DRAIN", True),
    ],
)
def test_only_a_drained_node_without_work_is_drained(state: str, *, is_empty: bool) -> None:
    """NS-13: a node is reset, or handed to repair, in the last case alone."""
    assert (by_text(state).availability is NodeAvailability.DRAINED) is is_empty


def test_a_node_in_two_partitions_is_one_node() -> None:
    """NS-14."""
    rows = [("gpu01", "IDLE"), ("gpu01", "IDLE"), ("gpu02", "IDLE+DRAIN"), ("gpu02", "IDLE+DRAIN")]
    text = "".join(f"NodeName={name} State={state} Partitions=batch,preempt\n" for name, state in rows)
    as_json = parse_nodes_json({"nodes": [{"name": name, "state": state.split("+")} for name, state in rows]})
    for listing in (parse_nodes(text), as_json):
        assert [node.availability.value for node in listing.nodes] == ["usable", "drained"]


@pytest.mark.parametrize("state", ["allocated+", "alloc+", "ALLOCATED+COMPLETING"])
def test_a_plus_behind_allocated_is_completing(state: str) -> None:
    """NS-15."""
    assert parse_node_state(state) == (NodeBase.ALLOCATED, frozenset({"COMPLETING"}))


@pytest.mark.parametrize("state", ["IDLE+", "MIXED+DRAIN+"])
def test_an_empty_part_behind_the_last_plus_is_no_flag(state: str) -> None:
    """NS-15."""
    assert "" not in parse_node_state(state)[1]
    assert parse_node_state(state) == parse_node_state(state.rstrip("+"))


@pytest.mark.parametrize("word", ["BLOCK", "EXT", "POW_DN", "POW_UP", "POWRING_DN", "POWERED_DN", "CANC_R", "RESM"])
def test_the_short_words_of_sinfo_are_no_usable_nodes(word: str) -> None:
    base, flags = parse_node_state(word)
    assert base is not NodeBase.UNRECOGNIZED
    assert classify_node(base, flags) is not NodeAvailability.USABLE
