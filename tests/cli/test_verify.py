"""`supervisor verify`: exit codes, words and numbers, for checkpoints of any layout, wherever they lie."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import supervisor.cli.verify  # noqa: F401 - loaded before anything is tried as somebody who can't read the code
from supervisor.cli.main import main
from tests.layouts.folders import LAYOUTS, copy_of, cut, flip_payload, graft
from tests.trainer.hostile import exploits
from tests.verify.folders import SHARDS, flip, publish, reseal, vouch
from trainer.contract import MANIFEST_NAME, VERIFIED_NAME

GOOD, BAD, NONE_THERE, UNREAD = 0, 1, 2, 6


def verify(path: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["verify", str(path), *words])


def report(path: Path, *words: str, code: int = GOOD) -> dict[str, Any]:
    result = verify(path, "--json", *words)
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    assert answer["ok"] is {GOOD: True, BAD: False, UNREAD: None}[code]
    return answer


def states(answer: dict[str, Any]) -> list[tuple[int, str]]:
    return [(one["step"], one["state"]) for one in answer["checkpoints"]]


# ---------------------------------------------------------------- our own


def test_a_look_says_complete_and_every_byte_makes_it_verified(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    assert states(report(folder)) == [(10, "complete")]
    answer = report(folder, "--full")
    assert states(answer) == [(10, "verified")]
    assert answer["bytes"] == sum(file.stat().st_size for file in folder.iterdir() if file.name != MANIFEST_NAME)
    assert answer["seconds"] > 0


def test_the_run_directory_and_its_folder_of_checkpoints_mean_all_of_them_newest_first(tmp_path: Path) -> None:
    for step, attempt in ((10, 1), (30, 2), (20, 1), (30, 1)):
        publish(tmp_path / "gpt", step, attempt)
    for place in (tmp_path / "gpt", tmp_path / "gpt/checkpoints"):
        answer = report(place, "--full")
        assert [(one["step"], one["attempt"]) for one in answer["checkpoints"]] == [(30, 2), (30, 1), (20, 1), (10, 1)]


def test_a_copy_on_a_nodes_own_disk_is_told_to_be_a_part_by_design(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    local = tmp_path / "scratch" / "gpt" / folder.name
    shutil.copytree(folder, local)
    (local / SHARDS[1]).unlink()
    (folder / SHARDS[1]).unlink()
    hint = "holds the files of its own ranks alone"
    assert hint in verify(local).stdout
    assert hint not in verify(folder).stdout
    (local / SHARDS[0]).write_bytes(b"short")
    assert hint not in verify(local).stdout


def test_a_flipped_bit_is_found_by_reading_and_a_missing_file_by_looking(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    flip(folder / SHARDS[0])
    assert states(report(folder)) == [(10, "complete")]
    assert states(report(folder, "--full", code=BAD)) == [(10, "corrupt")]
    (folder / SHARDS[0]).unlink()
    result = verify(folder)
    assert result.exit_code == BAD
    assert f"{SHARDS[0]} is missing" in result.stdout


def test_a_copy_under_another_name_is_judged_by_its_manifest_alone(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    shutil.copytree(folder, tmp_path / "backup")
    assert states(report(tmp_path / "backup", "--full")) == [(10, "verified")]
    folder.rename(folder.with_name("step-11.a1"))
    assert states(report(folder.with_name("step-11.a1"), code=BAD)) == [(11, "corrupt")]


def test_what_the_nodes_found_bad_is_corrupt_and_what_they_found_good_is_said(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    vouch(folder)
    assert "have read it back" in verify(folder).stdout
    record = (folder / VERIFIED_NAME).read_bytes()
    reseal(folder, time=2.0)
    assert "have read it back" not in verify(folder).stdout
    (folder / VERIFIED_NAME).write_bytes(record[:20])
    assert states(report(folder)) == [(10, "complete")]
    vouch(folder, ok=False, bad_files=(SHARDS[1],))
    assert SHARDS[1] in report(folder, "--full", code=BAD)["checkpoints"][0]["detail"]


def test_an_unfinished_one_counts_only_where_nothing_is_good(tmp_path: Path) -> None:
    older, newer = publish(tmp_path / "gpt", 10), publish(tmp_path / "gpt", 20)
    (newer / MANIFEST_NAME).unlink()
    assert states(report(tmp_path / "gpt", "--full")) == [(20, "unfinished"), (10, "verified")]
    assert states(report(newer, code=BAD)) == [(20, "unfinished")]
    (older / MANIFEST_NAME).unlink()
    report(tmp_path / "gpt", code=BAD)


def test_a_link_that_a_person_names_is_followed(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    (tmp_path / "latest").symlink_to(folder)
    assert states(report(tmp_path / "latest", "--full")) == [(10, "verified")]


# ---------------------------------------------------------------- other layouts


@pytest.mark.parametrize("fixture", LAYOUTS)
def test_every_layout_is_known_by_what_lies_there_and_stays_complete(fixture: str, tmp_path: Path) -> None:
    folder = copy_of(fixture, tmp_path)
    _, older, newest = LAYOUTS[fixture]
    for words in ((), ("--full",)):
        answer = report(folder, *words)
        assert [Path(one["path"]).name for one in answer["checkpoints"]] == [newest, older]
        assert states(answer) == [(4, "complete"), (2, "complete")]
        assert states(report(folder / newest, *words)) == [(4, "complete")]


@pytest.mark.parametrize("fixture", [name for name in LAYOUTS if name != "huggingface"])
def test_a_flipped_bit_of_a_payload_is_found_by_its_crc(fixture: str, tmp_path: Path) -> None:
    folder = copy_of(fixture, tmp_path)
    newest = LAYOUTS[fixture][2]
    flip_payload(folder / newest)
    assert states(report(folder / newest)) == [(4, "complete")]
    assert "CRC32" in report(folder / newest, "--full", code=BAD)["checkpoints"][0]["detail"]


def test_a_plain_distributed_checkpoint_needs_no_number_in_its_name(tmp_path: Path) -> None:
    graft("dcp/step-4", tmp_path / "final")
    assert [one["layout"] for one in report(tmp_path / "final", "--full")["checkpoints"]] == ["dcp"]
    cut(tmp_path / "final/__0_0.distcp")
    report(tmp_path / "final", code=BAD)


def test_one_that_is_marked_as_unfinished_is(tmp_path: Path) -> None:
    """CK-09."""
    folder = copy_of("dcp", tmp_path)
    (folder / "step-4-unfinished").touch()
    assert states(report(folder)) == [(4, "unfinished"), (2, "complete")]


def test_the_layout_can_be_named(tmp_path: Path) -> None:
    folder = copy_of("dcp", tmp_path)
    answer = report(folder / "step-4", "--layout", "torchtitan", code=BAD)
    assert "weights alone" in answer["checkpoints"][0]["detail"]


def test_metadata_of_each_rank_for_itself_is_told_from_none(tmp_path: Path) -> None:
    """What torch writes with use_collectives=False."""
    folder = copy_of("dcp", tmp_path)
    (folder / "step-4/.metadata").rename(folder / "step-4/__0.metadata")
    assert "use_collectives=False" in report(folder / "step-4", code=BAD)["checkpoints"][0]["detail"]


@pytest.mark.parametrize("name", ["protocol 4", "INST", "persistent id"])
def test_hostile_metadata_is_refused_and_runs_nothing(name: str, tmp_path: Path) -> None:
    folder = copy_of("dcp", tmp_path)
    (folder / "step-4/.metadata").write_bytes(exploits(tmp_path / "ran")[name])
    assert states(report(folder / "step-4", "--full", code=BAD)) == [(4, "corrupt")]
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- a path given by hand


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("step-2000", ".metadata is missing"),
        ("step-2000.a1", f"{MANIFEST_NAME} is missing"),
        ("checkpoint-2000", "trainer_state.json is missing"),
        ("iter_0002000", "metadata.json is missing"),
        ("global_step2000", "holds no model states"),
    ],
)
def test_a_folder_that_is_there_and_empty_is_refused_and_what_is_missing_named(
    name: str, missing: str, tmp_path: Path
) -> None:
    """CK-22."""
    (tmp_path / name).mkdir()
    assert missing in report(tmp_path / name, code=BAD)["checkpoints"][0]["detail"]


@pytest.mark.parametrize(("name", "word"), [("absent", "does not exist"), ("empty", "is empty"), ("src", "neither")])
def test_what_is_no_checkpoint_and_holds_none_is_an_error_of_the_input(name: str, word: str, tmp_path: Path) -> None:
    """CK-22."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text("")
    result = verify(tmp_path / name)
    assert result.exit_code == NONE_THERE
    assert word in result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("forbidden", [MANIFEST_NAME, ".metadata", SHARDS[0], ""])
def test_what_may_not_be_read_is_unknown_with_a_code_of_its_own(forbidden: str, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    checkpoint = publish(tmp_path / "gpt")
    (checkpoint / forbidden if forbidden else checkpoint).chmod(0)
    os.seteuid(65534)
    try:
        answer = report(checkpoint, "--full", code=UNREAD)
    finally:
        os.seteuid(0)
    assert "Permission denied" in answer["checkpoints"][0]["detail"]


# ---------------------------------------------------------------- progress


def test_progress_is_told_in_plain_lines_where_nobody_looks_at_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.cli.verify._LINE_EVERY_S", 0.0)
    result = verify(publish(tmp_path / "gpt"), "--full")
    assert "GB/s" in result.stderr
    assert "bytes in" in result.stdout.splitlines()[-1]


def test_neither_torch_nor_rich_is_imported_for_it(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    code = (
        "import sys; from supervisor.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print([m for m in ('torch', 'rich', 'submitit', 'sqlite_utils') if m in sys.modules])"
    )
    argv = [sys.executable, "-c", code, "verify", str(folder), "--full"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_bar_is_drawn_on_a_terminal(tmp_path: Path) -> None:
    folder = publish(tmp_path / "gpt")
    ours, theirs = os.openpty()
    try:
        argv = [sys.executable, "-m", "supervisor", "verify", str(folder), "--full"]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=False)
        assert b"\x1b[" in os.read(ours, 1 << 16)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == GOOD
    assert b"verified" in done.stdout


def test_links_in_a_circle_are_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a/checkpoints"):
        result = verify(path)
        assert result.exit_code == NONE_THERE, result.output
        assert "circle" in result.output
