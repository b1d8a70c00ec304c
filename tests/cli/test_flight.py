"""`supervisor flight-recorder`: what it may be given, its exit codes, and what it tells."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Service, run
from trainer import contract
from trainer.contract import AttemptSpec, LaunchReport, RunPaths

DATA = Path(__file__).parents[1] / "data" / "flight"
STUCK, NOTHING_STUCK, NONE_THERE, UNREAD = 1, 0, 2, 6


def tell(service: Service, *words: str, code: int = STUCK) -> dict[str, Any]:
    result = service.call("flight-recorder", *words, "--json")
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture
def run_dir(service: Service) -> Path:
    """A run whose second attempt has dumps of its only start: four ranks on n1 and n2, and rank 2 sleeps."""
    kept = run()
    kept = replace(kept, spec=replace(kept.spec, root=service.runs))
    service.keep(kept)
    paths = RunPaths(kept.spec.run_dir)
    shutil.copytree(DATA / "killed", paths.evidence(1, 0))
    shutil.copytree(DATA / "sleeper", paths.evidence(2, 0))
    paths.evidence(2, 1).mkdir()
    spec = AttemptSpec(run="llama", attempt=2, command=("x",), nodes=2, procs_per_node=2)
    contract.write_json(paths.attempt_spec(2), spec)
    report = LaunchReport(
        attempt=2, job_id=1, seq=1, time=1.0, host="n1", phase="ending", nodes={}, launch=0, training=("n1", "n2")
    )
    contract.write_json(paths.launch_report(2), report)
    return kept.spec.run_dir


def test_a_folder_of_dumps_is_told_and_the_exit_code_says_that_something_is_stuck(service: Service) -> None:
    result = service.call("flight-recorder", str(DATA / "sleeper"))
    assert result.exit_code == STUCK
    assert "rank 2 did not join all_reduce #4" in result.stdout
    assert tell(service, str(DATA / "sleeper"))["culprits"] == [{"rank": 2, "node": None}]


def test_dumps_in_which_no_rank_waits_give_0(service: Service) -> None:
    assert tell(service, str(DATA / "all_well"), code=NOTHING_STUCK)["kind"] == "none"


def test_files_are_taken_by_the_rank_in_their_names_and_missing_ranks_are_told(service: Service) -> None:
    files = [str(DATA / "sleeper" / f"fr_trace_rank_{rank}") for rank in (0, 1, 3)]
    answer = tell(service, *files, "--world-size", "4")
    assert (answer["ranks"], answer["no_dump"], answer["confidence"]) == ([0, 1, 3], [2], "medium")


def test_a_run_its_directory_and_an_attempt_s_folder_mean_the_newest_start_with_dumps(
    service: Service, run_dir: Path
) -> None:
    for given in ("llama", str(run_dir), str(run_dir / "attempts/2"), str(run_dir / "attempts/2/evidence/0")):
        answer = tell(service, given)
        assert (answer["attempt"], answer["launch"]) == (2, 0)
        assert answer["culprits"] == [{"rank": 2, "node": "n2"}]
    assert "rank 2 on n2" in service.call("flight-recorder", "llama").stdout


def test_an_earlier_attempt_can_be_asked_for(service: Service, run_dir: Path) -> None:
    assert tell(service, str(run_dir), "--attempt", "1")["no_dump"] == [3]
    result = service.call("flight-recorder", str(run_dir), "--attempt", "1", "--launch", "7")
    assert result.exit_code == NONE_THERE
    assert "start 7" in result.stderr


def test_what_is_no_dump_nor_a_run_is_wrong_input(service: Service, tmp_path: Path) -> None:
    (tmp_path / "dump").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for given in ("no-such-run", str(tmp_path / "none"), str(tmp_path / "empty"), str(tmp_path / "dump")):
        result = service.call("flight-recorder", given)
        assert result.exit_code == NONE_THERE, given
        assert len(result.stderr.splitlines()) == 1


def test_dumps_of_which_none_can_be_read_say_nothing_and_nothing_of_them_runs(service: Service, tmp_path: Path) -> None:
    """FR-05"""

    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Harm(), protocol=2))
    result = service.call("flight-recorder", str(tmp_path))
    assert result.exit_code == UNREAD
    assert "mkdir" in result.stderr
    assert not (tmp_path / "pwned").exists()


def test_words_of_a_dump_can_t_paint_on_the_terminal(service: Service, tmp_path: Path) -> None:
    raw = pickle.loads((DATA / "sleeper" / "fr_trace_rank_0").read_bytes())
    for entry in raw["entries"]:
        entry["profiling_name"] = "gloo:\x1b[2Jall\nreduce"
        entry["process_group"] = ("\x1b]0;x\x07", "default_pg")
    (tmp_path / "fr_trace_rank_0").write_bytes(pickle.dumps(raw, protocol=2))
    result = service.call("flight-recorder", str(tmp_path))
    assert result.exit_code == STUCK
    assert not set(result.stdout) & {"\x1b", "\x07"}


def test_it_starts_without_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from supervisor.cli.main import main; "
        f"r = CliRunner().invoke(main, ['flight-recorder', {str(DATA / 'sleeper')!r}]); "
        "assert r.exit_code == 1, r.output; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
