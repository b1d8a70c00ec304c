"""Host lists as bug reports brought them, and why they are not read by ClusterShell's NodeSet (docs/adr/0008)."""

from __future__ import annotations

import re

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from ClusterShell.NodeUtils import GroupResolverError
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm.hostlist import MAX_NODES, HostlistUnreadable, expand_nodes, fold_nodes, is_node_name


def by_nodeset(text: str) -> list[str]:
    return list(NodeSet(text, resolver=RESOLVER_NOGROUP))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- the cases


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("rack[1-2]n[01-03]", ["rack1n01", "rack1n02", "rack1n03", "rack2n01", "rack2n02", "rack2n03"]),
        ("cpn-m[11-12]-[08-09]", ["cpn-m11-08", "cpn-m11-09", "cpn-m12-08", "cpn-m12-09"]),
    ],
)
def test_several_brackets_are_a_cross_product_in_order(text: str, names: list[str]) -> None:
    """HL-02."""
    assert list(expand_nodes(text)) == names


def test_numbers_and_ranges_mix_in_one_bracket() -> None:
    """HL-03."""
    assert expand_nodes("node[001,003-004,006]") == ("node001", "node003", "node004", "node006")


def test_names_go_on_after_a_bracket_and_its_order_is_kept() -> None:
    """HL-04."""
    assert expand_nodes("b1u01n1,b2u[05,02]n3,b3u03n4") == ("b1u01n1", "b2u05n3", "b2u02n3", "b3u03n4")


@pytest.mark.parametrize("name", ["gpu_07", "n03d", "a", "dgx-1.cluster.local"])
def test_names_of_every_make_are_accepted(name: str) -> None:
    """HL-06."""
    assert expand_nodes(name) == (name,)
    assert is_node_name(name)


def test_a_name_with_two_dashes_before_its_bracket_is_accepted() -> None:
    """HL-06."""
    assert expand_nodes("h200-183-[001-003]") == ("h200-183-001", "h200-183-002", "h200-183-003")


def test_a_short_name_and_a_full_one_are_two_names() -> None:
    """HL-06: nobody has configured that they are one."""
    assert expand_nodes("dgx-1,dgx-1.cluster.local") == ("dgx-1", "dgx-1.cluster.local")
    assert fold_nodes(["dgx-1", "dgx-1.cluster.local"]).count("dgx-1") == 2


@pytest.mark.parametrize("text", ["node[0-2000000]", "a[0-9][0-9][0-9][0-9][0-9]", "n[0-65535],m", "n[1-9999999999]"])
def test_a_list_over_the_cap_is_refused_before_it_is_made(text: str) -> None:
    """HL-08."""
    with pytest.raises(HostlistUnreadable):
        expand_nodes(text)


def test_a_list_as_large_as_a_cluster_can_be_is_read() -> None:
    """HL-08: the cap itself is no typing error."""
    assert len(expand_nodes("n[0-65535]")) == MAX_NODES


# ---------------------------------------------------------------- NodeSet's faults, shown on NodeSet itself


def test_nodeset_loses_the_order_of_a_list() -> None:
    """HL-04: the first node of a job is where its batch script runs."""
    text = "b1u01n1,b2u[05,02]n3,b3u03n4"
    assert by_nodeset(text) != list(expand_nodes(text))
    assert set(by_nodeset(text)) == set(expand_nodes(text))


def test_nodeset_has_no_cap() -> None:
    """HL-08."""
    assert len(by_nodeset("n[0-70000]")) == 70_001


def test_nodeset_makes_groups_of_the_heads_files_out_of_a_name() -> None:
    """With its own defaults a name from outside reads files of this machine, and may run the commands in them."""
    assert by_nodeset("@all") == ["@all"]
    try:
        with_defaults = set(NodeSet("@all"))  # type: ignore[no-untyped-call]
    except (NodeSetException, GroupResolverError):
        with_defaults = set()
    assert with_defaults != {"@all"}  # none, or the groups of an example file
    with pytest.raises(HostlistUnreadable):
        expand_nodes("@all")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("n[1-4]!n[2-3]", ["n1", "n4"]),
        ("n[1-4]&n[3-9]", ["n3", "n4"]),
        ("n[1-3]^n[2-5]", ["n1", "n4", "n5"]),
        ("n[1-9/2]", ["n1", "n3", "n5", "n7", "n9"]),
        ("n1 n2", ["n1 n2"]),
        ("n*", ["n*"]),
    ],
)
def test_what_is_no_host_list_of_slurm_has_a_meaning_for_nodeset_and_is_refused_here(
    text: str, meant: list[str]
) -> None:
    assert sorted(by_nodeset(text)) == meant
    with pytest.raises(HostlistUnreadable):
        expand_nodes(text)


def test_nodeset_takes_digits_before_a_bracket_into_its_range() -> None:
    """`n1[0-10]` are the eleven nodes n10 to n19 and n110 for Slurm, and a hundred nodes for NodeSet."""
    assert len(by_nodeset("n1[0-10]")) == 101
    assert expand_nodes("n1[0-10]") == (*(f"n1{i}" for i in range(10)), "n110")


# ---------------------------------------------------------------- where both read a list, they read the same names

_NUMBER = st.from_regex(r"[0-9]{1,3}", fullmatch=True)
_RANGE = st.one_of(_NUMBER, st.tuples(_NUMBER, _NUMBER).map("-".join))
_BRACKET = st.lists(_RANGE, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
_LITERAL = st.from_regex(r"[a-z_.-]{0,3}[0-9]{0,2}[a-z-]{0,2}", fullmatch=True)
_PART = st.lists(st.one_of(_LITERAL, _BRACKET), min_size=1, max_size=4).map("".join)
_LISTS = st.one_of(
    st.lists(_PART, min_size=1, max_size=4).map(",".join),
    st.text(alphabet="n[]-,019x._", max_size=20),
)


_TAKES_DIGITS_IN = re.compile(r"[0-9]\[|\][0-9]")  # the fault above


@settings(max_examples=400, deadline=None)
@given(text=_LISTS.filter(lambda text: _TAKES_DIGITS_IN.search(text) is None))
def test_ours_and_nodeset_agree_on_everything_that_both_accept(text: str) -> None:
    try:
        ours = expand_nodes(text)
        theirs = by_nodeset(text)
    except (HostlistUnreadable, NodeSetException):
        return
    assert set(ours) == set(theirs)


@given(text=st.one_of(st.text(max_size=40), _LISTS))
def test_any_text_is_a_host_list_or_refused(text: str) -> None:
    try:
        names = expand_nodes(text)
    except HostlistUnreadable:
        return
    assert all(is_node_name(name) for name in names)
