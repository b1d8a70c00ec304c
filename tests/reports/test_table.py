"""Tables and words for people."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta, timezone

import pytest

from supervisor.reports.history import History, summary_line
from supervisor.reports.nodes import merge_nodes, natural_key
from supervisor.reports.table import Table, duration, instant, one_line, print_table, render_json, render_plain

TABLE = Table(columns=("name", "n"), rows=(("a", "1"), ("longer", "100")), numeric=frozenset({"n"}))


def test_columns_are_aligned_and_numbers_stand_to_the_right() -> None:
    assert render_plain(TABLE) == "NAME      N\na         1\nlonger  100"


def test_a_table_for_a_file_is_plain_text() -> None:
    stream = io.StringIO()
    print_table(TABLE, stream)
    assert stream.getvalue() == render_plain(TABLE) + "\n"


def test_brackets_are_no_markup_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    print_table(Table(columns=("nodes",), rows=(("n[1-3] [red]",),)), stream)
    assert "n[1-3] [red]" in stream.getvalue()


def test_instants_in_json_are_utc_whatever_their_zone() -> None:
    noon = datetime(2026, 1, 2, 12, tzinfo=timezone(timedelta(hours=2)))
    assert json.loads(render_json({"at": noon})) == {"at": "2026-01-02T10:00:00.000Z"}


def test_a_number_that_is_none_never_reaches_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render_json({"mtbf_h": float("inf")})


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0, "0.0 s"), (4.94, "4.9 s"), (153, "2.5 min"), (7200, "2.0 h"), (260_000, "3.0 d")],
)
def test_a_duration_is_told_in_the_unit_that_fits(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_an_instant_is_told_in_utc() -> None:
    assert instant(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "2026-01-02 03:04:05"
    assert instant(None) == "-"


def test_text_of_others_is_one_bounded_line() -> None:
    assert one_line("a\n\x1b[31mb\t c") == "a [31mb c"
    assert len(one_line("x" * 1000)) == 200


def test_nodes_are_in_the_order_people_count() -> None:
    names = ["n10", "n2", "gpu1", "n2b", "n1-3", "n"]
    assert sorted(names, key=natural_key) == ["gpu1", "n", "n1-3", "n2", "n2b", "n10"]


def test_no_node_that_either_side_knows_is_left_out() -> None:
    assert merge_nodes((), (), {}) == ()
    (shared,) = merge_nodes((), (), {"n1": ("a", "b")})
    assert shared.runs == ("a", "b")


def test_a_history_without_interruptions_gives_a_bound() -> None:
    assert "> 10.0 h" in summary_line(History(interruptions=(), observed_s=3600 * 30, since=None))
    assert "MTBF -" in summary_line(History(interruptions=(), observed_s=0, since=None))


def test_on_a_narrow_terminal_only_the_sentence_at_the_end_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    print_table(Table(columns=("run", "state", "reason"), rows=(("llama-70b", "recovering", "word " * 12),)), stream)
    lines = stream.getvalue().splitlines()
    assert any("llama-70b  recovering  word word" in line for line in lines)
    assert len(lines) > 2
