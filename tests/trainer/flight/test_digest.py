"""Short dumps: they tell the same, and are read so quickly that a thousand of them can be."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.trainer.flight.nccl_dumps import dump, entry
from trainer.flight.analyse import analyse, analyse_folder
from trainer.flight.digest import MAX_OVER, shorten, shorten_folder
from trainer.flight.files import find_dumps, read_dumps
from trainer.flight.reader import FlightUnreadable, read_dump

DATA = Path(__file__).parents[2] / "data" / "flight"
SCENARIOS = sorted(path.name for path in DATA.iterdir())
LONG = [*(entry(seq) for seq in range(1, 2001)), entry(2001, state="started"), entry(2002, state="scheduled")]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_short_dumps_tell_the_same_as_whole_ones(scenario: str) -> None:
    whole = read_dumps(find_dumps(DATA / scenario)).dumps
    short = {
        rank: read_dump(shorten((DATA / scenario / f"fr_trace_rank_{rank}").read_bytes())) for rank in sorted(whole)
    }
    assert analyse(short, 4) == analyse(whole, 4)


def test_all_that_is_pending_and_the_newest_that_is_not_are_kept() -> None:
    short = read_dump(shorten(dump(LONG, groups={"0": "[0, 1]"})))
    assert [e.seq for e in short.entries] == list(range(2001 - MAX_OVER, 2003))
    pending = [entry(seq, state="scheduled") for seq in range(1, 200)]
    assert len(read_dump(shorten(dump(pending, groups={"0": "[0, 1]"}))).entries) == 199


def test_short_dumps_of_a_large_training_are_read_in_the_time_that_a_launcher_has(tmp_path: Path) -> None:
    data = shorten(dump(LONG, groups={"0": str(list(range(256)))}))
    behind = shorten(dump(LONG[:1990], groups={"0": str(list(range(256)))}))
    for rank in range(256):
        (tmp_path / f"rank{rank}.flight.short").write_bytes(behind if rank == 77 else data)
    began = time.monotonic()
    found = analyse_folder(tmp_path, 256, limit_s=30.0)
    assert found is not None
    assert (found.culprits, found.no_dump) == ((77,), ())
    assert time.monotonic() - began < 10.0


def test_dumps_that_were_not_come_to_make_no_rank_a_suspect(tmp_path: Path) -> None:
    shutil.copytree(DATA / "sleeper", tmp_path / "all")
    found = analyse_folder(tmp_path / "all", 4, limit_s=30.0)
    assert found is not None
    read = read_dumps(find_dumps(tmp_path / "all"))
    del read.dumps[1]
    assert analyse(read.dumps, 4, unread=frozenset({1})).no_dump == ()
    assert analyse(read.dumps, 4).no_dump == (1,)


def test_a_node_shortens_what_its_own_ranks_have_dumped_while_there_is_time(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        shutil.copy(DATA / "sleeper" / f"fr_trace_rank_{rank}", tmp_path / f"rank{rank}.flight")
    (tmp_path / "rank1.flight").write_bytes(b"nothing")
    written = shorten_folder(tmp_path, frozenset({0, 1}), until=1.0, now=lambda: 0.0)
    assert written == ["rank0.flight.short"]
    assert shorten_folder(tmp_path, frozenset({2}), until=0.0, now=lambda: 0.0) == []
    files = {file.path.name for file in find_dumps(tmp_path)}
    assert files == {"rank0.flight", "rank0.flight.short", "rank1.flight", "rank2.flight"}


def test_the_whole_dump_is_read_where_there_is_one_unless_the_short_one_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "rank0.flight").write_bytes(dump(LONG, groups={"0": "[0, 1]"}))
    shorten_folder(tmp_path, frozenset({0}), until=1.0, now=lambda: 0.0)
    assert len(read_dumps(find_dumps(tmp_path)).dumps[0].entries) == 2002
    assert len(read_dumps(find_dumps(tmp_path), prefers_short=True).dumps[0].entries) == MAX_OVER + 2
    (tmp_path / "rank0.flight").unlink()
    assert len(read_dumps(find_dumps(tmp_path)).dumps[0].entries) == MAX_OVER + 2


def test_what_is_no_dump_is_not_shortened() -> None:
    with pytest.raises(FlightUnreadable):
        shorten(b"nothing")
