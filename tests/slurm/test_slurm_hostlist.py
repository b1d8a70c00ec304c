"""Host lists as Slurm writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.hostlist import HostlistUnreadable, expand_nodes, fold_nodes, is_node_name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "rack[1-2]n[01-03]",
            ["rack1n01", "rack1n02", "rack1n03", "rack2n01", "rack2n02", "rack2n03"],
        ),
        ("cpn-m[11-12]-[08-09]", ["cpn-m11-08", "cpn-m11-09", "cpn-m12-08", "cpn-m12-09"]),
        ("node[001,003-004,006]", ["node001", "node003", "node004", "node006"]),
        ("b1u01n1,b2u[05,02]n3,b3u03n4", ["b1u01n1", "b2u05n3", "b2u02n3", "b3u03n4"]),
        ("gpu_07", ["gpu_07"]),
        ("n03d", ["n03d"]),
        ("a", ["a"]),
        ("dgx-1.cluster.local", ["dgx-1.cluster.local"]),
        ("h200-183-[001-003]", ["h200-183-001", "h200-183-002", "h200-183-003"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[7,001-003]", ["n7", "n001", "n002", "n003"]),
    ],
)
def test_host_lists_expand_in_the_order_written(text: str, names: list[str]) -> None:
    assert list(expand_nodes(text)) == names


@pytest.mark.parametrize("text", ["", "(null)", "None assigned", "N/A", " "])
def test_slurms_words_for_no_node_are_no_nodes(text: str) -> None:
    assert expand_nodes(text) == ()


@pytest.mark.parametrize(
    "text",
    ["node[0-2000000]", "n[0-999][0-999]", "n[0-99999999999999999]", ",".join(["n[0-40000]"] * 2)],
)
def test_a_list_of_millions_is_refused(text: str) -> None:
    with pytest.raises(HostlistUnreadable):
        expand_nodes(text)


@pytest.mark.parametrize("text", ["n[1", "n1]", "n[[1]]", "n[]", "n[3-1]", "n[a-b]", "n1,,n2", "n 1", "n1;reboot"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(HostlistUnreadable):
        expand_nodes(text)


@given(text=st.text(alphabet="n[]-,01 \nx", max_size=30))
def test_any_text_expands_to_node_names_or_is_refused(text: str) -> None:
    try:
        names = expand_nodes(text)
    except HostlistUnreadable:
        return
    assert all(is_node_name(name) for name in names)


_NAMES = st.sets(st.from_regex(r"(gpu|rack[1-3]n)(0?[0-9]{1,2})", fullmatch=True), min_size=1, max_size=20)


@given(names=_NAMES)
def test_folding_and_expanding_gives_the_same_names(names: set[str]) -> None:
    assert set(expand_nodes(fold_nodes(names))) == names


def test_folding_is_short_and_the_same_for_any_order() -> None:
    assert fold_nodes(["gpu03", "gpu01", "gpu02", "gpu01"]) == "gpu[01-03]"


@pytest.mark.parametrize("name", ["@all", "*", "n[1-2]", "/n1", "-n1", "", "n1\n", "x" * 256])
def test_groups_patterns_and_paths_are_no_node_names(name: str) -> None:
    assert not is_node_name(name)
