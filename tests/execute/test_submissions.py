"""What is kept of a handed-in script: whole or not at all, for the service alone, gone when it is not needed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from supervisor.submissions import Submission, SubmissionLost, Submissions, digest_of

KEPT = Submission(text="#!/bin/sh\necho \udcff\n", environment={"KEY": "hunter2", "RAW": "\udcfe"})
DIGEST = digest_of(KEPT.text)


@pytest.fixture
def kept(tmp_path: Path) -> Submissions:
    submissions = Submissions(tmp_path / "ledger.db")
    submissions.keep("train", KEPT)
    return submissions


def test_what_is_kept_comes_back_as_it_was(kept: Submissions) -> None:
    found = kept.load("train", digest=DIGEST)
    assert (found.text, found.environment) == (KEPT.text, KEPT.environment)


@given(st.text(st.characters(codec=None), max_size=40), st.dictionaries(st.text(max_size=9), st.text(max_size=9)))
def test_any_text_and_any_environment_come_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, environment: dict[str, str]
) -> None:
    submissions = Submissions(tmp_path_factory.getbasetemp() / "any/ledger.db")
    submissions.keep("r", Submission(text=text, environment=environment))
    found = submissions.load("r", digest=digest_of(text))
    assert (found.text, found.environment) == (text, environment)


def test_only_the_service_can_read_it(kept: Submissions, tmp_path: Path) -> None:
    folder, file = tmp_path / "submissions", tmp_path / "submissions/train.json"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folder.chmod(0o755)
    kept.keep("train", KEPT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_its_representation_shows_no_value() -> None:
    assert "hunter2" not in f"{KEPT} {KEPT!r}"


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".x")))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(""),
        lambda path: path.write_text(path.read_text()[:-9]),
        lambda path: path.write_text(path.read_text().replace("hunter2", "hunter3")),
        lambda path: path.write_text("[1]"),
        lambda path: path.write_text("[" * 200_000),
        _replace_by_folder,
        _replace_by_pipe,
        _replace_by_link,
    ],
    ids=["gone", "empty", "torn", "changed", "no record", "nested", "a folder", "a pipe", "a link"],
)
def test_what_is_not_as_it_was_kept_is_not_used(
    kept: Submissions, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    damage(tmp_path / "submissions/train.json")
    with pytest.raises(SubmissionLost, match="submit the script again"):
        kept.load("train", digest=DIGEST)


def test_another_script_under_the_name_is_not_used(kept: Submissions) -> None:
    kept.keep("train", Submission(text="#!/bin/sh\nrm -rf /\n", environment={}))
    with pytest.raises(SubmissionLost, match="not the one that was submitted"):
        kept.load("train", digest=DIGEST)


def test_a_folder_that_is_not_the_services_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "submissions").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a folder of the service's own"):
        Submissions(tmp_path / "ledger.db").keep("train", KEPT)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_what_no_run_needs_is_removed(kept: Submissions, tmp_path: Path) -> None:
    kept.keep("other", KEPT)
    kept.drop_others({"other"}, known={"other", "train"})
    assert [path.name for path in (tmp_path / "submissions").iterdir()] == ["other.json"]
    kept.drop("other")
    kept.drop("other")
    assert not any((tmp_path / "submissions").iterdir())


def test_what_no_run_of_the_ledger_is_known_for_stays_for_a_day(kept: Submissions, tmp_path: Path) -> None:
    kept.keep("old", KEPT)
    os.utime(tmp_path / "submissions/old.json", (0, 0))
    kept.drop_others((), known=())
    assert [path.name for path in (tmp_path / "submissions").iterdir()] == ["train.json"]


def test_what_a_killed_writer_left_is_removed(kept: Submissions, tmp_path: Path) -> None:
    (tmp_path / "submissions/.train.json.77.tmp").write_text("half")
    kept.drop_others({"train"}, known={"train"})
    assert [path.name for path in (tmp_path / "submissions").iterdir()] == ["train.json"]


def test_what_cant_be_removed_is_told_once_and_the_rest_is_removed(kept: Submissions, tmp_path: Path) -> None:
    (tmp_path / "submissions/orphan.json").mkdir()
    kept.write_batch("train", 1, "x", None).unlink()
    (tmp_path / "batch/train.1.sh").mkdir()
    with capture_logs() as lines:
        for _ in range(2):
            kept.drop_others((), known={"train", "orphan"})
            kept.drop("orphan")
            kept.remove_batch("train", 1)
            kept.remove_batches(())
    assert not (tmp_path / "submissions/train.json").exists()
    assert [("orphan.json" in line["reason"], line["event"]) for line in lines] == [
        (True, "kept.stays"),
        (False, "kept.stays"),
    ]


def test_nothing_is_read_or_removed_behind_a_link(kept: Submissions, tmp_path: Path) -> None:
    kept.write_batch("train", 1, "x", None)
    for name in ("submissions", "batch"):
        (tmp_path / name).rename(tmp_path / f"{name}-elsewhere")
        (tmp_path / name).symlink_to(tmp_path / f"{name}-elsewhere")
    kept.drop("train")
    kept.drop_others((), known={"train"})
    kept.remove_batch("train", 1)
    kept.remove_batches(())
    with pytest.raises(SubmissionLost, match="not a folder of the service's own"):
        kept.load("train", digest=DIGEST)
    assert (tmp_path / "submissions-elsewhere/train.json").exists()
    assert (tmp_path / "batch-elsewhere/train.1.sh").exists()


# ---------------------------------------------------------------- what sbatch is given


def test_what_a_killed_service_left_for_sbatch_is_removed(kept: Submissions, tmp_path: Path) -> None:
    for run, attempt in (("train", 1), ("train", 2), ("other", 1)):
        kept.write_batch(run, attempt, "x", None)
    kept.remove_batches({("train", 2)})
    assert [path.name for path in (tmp_path / "batch").iterdir()] == ["train.2.sh"]


def test_sbatch_is_given_a_file_that_only_the_service_can_replace(kept: Submissions, tmp_path: Path) -> None:
    path = kept.write_batch("train", 3, KEPT.text, None)
    assert path.read_bytes() == KEPT.text.encode("utf-8", "surrogateescape")
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711
    kept.remove_batch("train", 3)
    assert not path.exists()


def test_what_stands_under_its_name_is_not_written_through(kept: Submissions, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    kept.write_batch("train", 1, "x", None).unlink()
    (tmp_path / "batch/train.1.sh").symlink_to(victim)
    kept.write_batch("train", 1, "#!/bin/sh\n", None)
    assert victim.read_text() == "untouched"
    assert not (tmp_path / "batch/train.1.sh").is_symlink()


def test_the_owner_of_the_script_may_read_it(kept: Submissions) -> None:
    owner = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    found = kept.write_batch("train", 1, "#!/bin/sh\n", owner).stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*owner, 0o400)
