"""Metadata of distributed checkpoints of any origin: held against the files before anyone trusts it."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.layouts.given import Condition, Given, look_at
from supervisor.layouts.readback import read_back
from supervisor.layouts.survey import Survey
from supervisor.layouts.tree import Tree
from supervisor.verify import Verifier
from tests.layouts.folders import cut, graft, look, payload_files, rewrite, view_of, whole_steps
from tests.trainer.hostile import exploits
from tests.trainer.pickles import Place, chunk, metadata, record, tensor
from tests.verify.test_verify import collect
from trainer.format import stale
from trainer.format.metadata import Metadata, read_metadata

FILE = "__0_0.distcp"


def copy_of_dcp(folder: Path) -> Path:
    for name in ("step-2", "step-4"):
        graft(f"dcp/{name}", folder / name)
    return folder


@pytest.mark.parametrize("name", exploits(Path("mark")))
def test_hostile_metadata_is_refused_by_who_looks_for_the_daemon_and_runs_nothing(name: str, tmp_path: Path) -> None:
    mark, folder = tmp_path / "ran", copy_of_dcp(tmp_path / "checkpoints")
    rewrite(folder / "step-4/.metadata", exploits(mark)[name])
    assert whole_steps(folder, "auto") == [2]
    assert not view_of(folder, "auto", "step-4").is_complete
    assert not mark.exists()


def test_metadata_that_became_hostile_before_it_is_read_back_runs_nothing_in_the_daemons_child(tmp_path: Path) -> None:
    mark, folder = tmp_path / "ran", copy_of_dcp(tmp_path / "checkpoints")
    stamp = view_of(folder, "dcp", "step-4").stamp
    rewrite(folder / "step-4/.metadata", exploits(mark)["protocol 4"])
    verifier = Verifier()
    try:
        verifier.start("run", tmp_path, 4, 0, path=str(folder / "step-4"), layout="dcp", stamp=stamp)
        (result,) = collect(verifier, 1)
    finally:
        verifier.close()
    assert result.ok is not True
    assert not mark.exists()


@pytest.mark.parametrize(
    ("described", "places", "word"),
    [
        ({"opt": tensor([4], [chunk([0], [3])])}, [Place("opt", (0,), FILE, 0, 900)], "leave a hole"),
        ({"opt": tensor([4], [chunk([0], [4])])}, [], "names no file"),
        ({"opt": tensor([4], [chunk([0], [4])])}, [Place("other", (0,), FILE, 0, 900)], "lies in no file"),
        ({"opt": tensor([4], [chunk([0], [4])])}, [Place("opt", (0,), FILE, 0, 10**6)], "are needed"),
        ({"opt": tensor([400], [chunk([0], [400])])}, [Place("opt", (0,), FILE, 0, 900)], "has 900 bytes of 1600"),
        ({"opt": record("BytesStorageMetadata")}, [Place("x", None, FILE, 0, 900)], "has 0 entries"),
    ],
)
def test_what_is_described_and_lies_in_no_file_makes_it_no_checkpoint(
    described: dict[str, object], places: list[Place], word: str, tmp_path: Path
) -> None:
    folder = copy_of_dcp(tmp_path)
    rewrite(folder / "step-4/.metadata", metadata(described, places))
    assert whole_steps(folder, "dcp") == [2]
    assert word in view_of(folder, "dcp", "step-4").detail


def test_metadata_files_of_each_rank_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """What torch writes with use_collectives=False: no file says how many ranks there were."""
    folder = copy_of_dcp(tmp_path)
    (folder / "step-4/.metadata").rename(folder / "step-4/__0.metadata")
    view = view_of(folder, "dcp", "step-4")
    assert (view.is_complete, view.is_unfinished) == (False, False)
    assert "use_collectives=False" in view.detail


def test_files_of_zero_bytes_are_told_with_what_is_needed(tmp_path: Path) -> None:
    """CK-04."""
    folder = copy_of_dcp(tmp_path)
    for file in payload_files(folder / "step-4"):
        cut(file, 0.0)
    assert "has 0 bytes" in view_of(folder, "dcp", "step-4").detail


@pytest.mark.parametrize(("times", "is_whole"), [(1, True), (3, True), (99, None)])
def test_a_stale_handle_is_opened_again_and_if_it_lasts_nothing_is_known(
    times: int, is_whole: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-13."""
    folder = copy_of_dcp(tmp_path)
    stamp = view_of(folder, "dcp", "step-4").stamp
    left, real = Counter({f"step-4/{FILE}": times}), Tree.open

    @contextmanager
    def open_(tree: Tree, path: str) -> Iterator[int]:
        if left[path] > 0:
            left[path] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        with real(tree, path) as fd:
            yield fd

    monkeypatch.setattr(Tree, "open", open_)
    monkeypatch.setattr(stale, "WAIT_S", 0.0)
    if is_whole:
        assert read_back(folder / "step-4", "dcp", stamp).is_whole
    else:
        with pytest.raises(OSError, match="Stale"):
            read_back(folder / "step-4", "dcp", stamp)


def test_a_stale_handle_at_a_look_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CK-13."""
    folder = copy_of_dcp(tmp_path)

    def fail(_tree: Tree, path: str) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr(Tree, "open", fail)
    sight = look(folder, "dcp")
    assert sight.views == ()
    assert [Path(path).name for path in sight.unknown] == ["step-4", "step-2"]


def test_several_readers_find_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    graft("deepspeed-zero3", folder)
    stamp = view_of(folder, "deepspeed", "global_step4").stamp
    readings = [read_back(folder / "global_step4", "deepspeed", stamp, readers=n, is_cached=n == 3) for n in (1, 2, 3)]
    assert readings[0].is_whole
    assert readings[1:] == [readings[0]] * 2


def test_metadata_larger_than_is_read_is_unknown_and_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of_dcp(tmp_path)
    reads: list[bytes] = []

    def read(data: bytes) -> Metadata:
        reads.append(data)
        return read_metadata(data)

    monkeypatch.setattr("trainer.format.metadata.MAX_OPCODES", 50)
    monkeypatch.setattr("supervisor.layouts.metadata._read_metadata", read)
    survey = Survey()
    for _ in range(2):
        sight = survey.look(folder, "dcp", time.monotonic() + 30)
        assert (sight.views, len(sight.unknown)) == ((), 2)
        assert "larger than is read here" in " ".join(sight.notes)
    assert len(reads) == 2
    verdict = look_at(Given(path=folder / "step-4", layout="dcp", step=4))
    assert verdict.condition is Condition.UNKNOWN
