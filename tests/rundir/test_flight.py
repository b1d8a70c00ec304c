"""The Flight Recorder dumps of an attempt: read at its end, by the process that reads as the run's owner."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from pathlib import Path

import pytest

from supervisor.flightread import Start, find_starts
from supervisor.rundir import RunDirReader
from trainer import contract
from trainer.contract import AttemptSpec, ExitRecord, InterruptionRecord, LaunchReport, RunPaths

DATA = Path(__file__).parents[1] / "data" / "flight"


@pytest.fixture
def attempt(paths: RunPaths) -> RunPaths:
    """Four ranks on two nodes, in the second start of the attempt; its rank 2 sleeps."""
    spec = AttemptSpec(run="run", attempt=1, command=("x",), nodes=2, procs_per_node=2)
    contract.write_json(paths.attempt_spec(1), spec)
    before = InterruptionRecord(
        attempt=1, launch=0, kind="hang", cause="x", trained=("n4", "n5"), training=("n4", "n2"), detected_at=1.0
    )
    paths.interruption(1, 0).parent.mkdir()
    contract.write_json(paths.interruption(1, 0), before)
    paths.evidence(1, 0).mkdir(parents=True)
    shutil.copytree(DATA / "sleeper", paths.evidence(1, 1))
    return paths


def end(paths: RunPaths, *, launches: int = 2) -> None:
    record = ExitRecord(attempt=1, job_id=1, exit_code=1, reason="hang", time=1.0, launches=launches)
    contract.write_json(paths.exit_record(1), record)


def test_the_dumps_of_the_last_start_are_read_at_the_end_and_its_node_is_told(
    attempt: RunPaths, reader: RunDirReader
) -> None:
    end(attempt)
    running = reader.read("run", attempt.run_dir, 1, is_final=False, deadline_s=10.0)
    assert running.flight is None
    view = reader.read("run", attempt.run_dir, 1, is_final=True, deadline_s=10.0)
    assert view.flight is not None
    assert (view.flight.launch, view.flight.kind, view.flight.ranks, view.flight.nodes) == (1, "absent", (2,), ("n2",))
    assert view.unreadable == ()


def test_dumps_of_an_earlier_start_say_nothing_of_the_end(attempt: RunPaths, reader: RunDirReader) -> None:
    end(attempt, launches=3)
    assert reader.read("run", attempt.run_dir, 1, is_final=True, deadline_s=10.0).flight is None


def test_a_dump_that_would_run_code_is_passed_over_and_so_is_what_is_no_file(
    attempt: RunPaths, reader: RunDirReader, tmp_path: Path
) -> None:
    """FR-05"""

    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    folder = attempt.evidence(1, 1)
    (folder / "fr_trace_rank_2").write_bytes(pickle.dumps(Harm(), protocol=2))
    (folder / "fr_trace_rank_3").unlink()
    (folder / "fr_trace_rank_3").symlink_to(DATA / "sleeper" / "fr_trace_rank_3")
    os.mkfifo(folder / "fr_trace_rank_4")
    end(attempt)
    view = reader.read("run", attempt.run_dir, 1, is_final=True, deadline_s=10.0)
    assert view.flight is not None
    assert (view.flight.kind, view.flight.ranks, view.flight.confidence) == ("absent", (2, 3), "low")
    assert not (tmp_path / "pwned").exists()


def test_a_small_dump_that_takes_long_to_read_does_not_hold_the_cycle_up(
    attempt: RunPaths, reader: RunDirReader
) -> None:
    raw = pickle.loads((DATA / "sleeper" / "fr_trace_rank_0").read_bytes())
    raw["entries"] = [raw["entries"][0]] * 400_000  # less than a megabyte
    for rank in range(4):
        (attempt.evidence(1, 1) / f"fr_trace_rank_{rank}").write_bytes(pickle.dumps(raw, protocol=2))
    end(attempt)
    began = time.monotonic()
    view = reader.read("run", attempt.run_dir, 1, is_final=True, deadline_s=20.0)
    assert (view.exit is not None, view.flight) == (True, None)
    assert time.monotonic() - began < 10.0


def test_two_starts_keep_their_dumps_apart(attempt: RunPaths) -> None:
    """FR-04: each start of each attempt has a folder of its own, and no later dump takes an earlier one's place."""
    shutil.copytree(DATA / "killed", attempt.evidence(2, 0))
    first, second = find_starts(attempt.run_dir, 1)
    (other,) = find_starts(attempt.run_dir, 2)
    assert len({first.folder, second.folder, other.folder}) == 3


def test_nodes_are_told_of_the_start_that_the_launcher_reports(attempt: RunPaths) -> None:
    report = LaunchReport(
        attempt=1, job_id=1, seq=1, time=1.0, host="n1", phase="running", nodes={}, launch=1, training=("n1", "n3")
    )
    contract.write_json(attempt.launch_report(1), report)
    first, second = find_starts(attempt.run_dir, 1)
    assert (first.nodes, second.nodes) == (("n4", "n5"), ("n1", "n3"))
    assert [second.node_of(rank) for rank in (0, 1, 2, 3, 4)] == ["n1", "n1", "n3", "n3", None]
    assert Start(folder=Path(), attempt=1, launch=0).node_of(0) is None


def test_an_attempt_without_a_word_of_its_starts_has_none(paths: RunPaths) -> None:
    assert find_starts(paths.run_dir, 1) == ()
