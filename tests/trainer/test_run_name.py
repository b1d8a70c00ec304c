"""A run keeps its name wherever its directory is, and however it is reached; its checkpoints with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainer import contract
from trainer.contract import RunPaths
from trainer.session.place import read_place
from trainer.session.runname import settle_name
from trainer.storage.stored import choose_resume, find_checkpoints, read_manifest

if TYPE_CHECKING:
    from trainer.checkpoint import Checkpointer

# ---------------------------------------------------------------- the name


def _name(run_dir: Path, **environment: str) -> str:
    return settle_name(read_place(environment, run_dir=run_dir))


def test_a_run_without_a_service_is_named_after_its_folder_at_its_first_start(tmp_path: Path) -> None:
    assert _name(tmp_path / "gpt") == "gpt"


def test_a_run_directory_that_was_moved_or_copied_keeps_the_name_of_its_run(tmp_path: Path) -> None:
    _name(tmp_path / "gpt")
    shutil.copytree(tmp_path / "gpt", tmp_path / "copy")
    (tmp_path / "gpt").rename(tmp_path / "moved")
    assert (_name(tmp_path / "copy"), _name(tmp_path / "moved")) == ("gpt", "gpt")


def test_a_link_and_a_dot_name_the_folder_that_they_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "gpt")
    assert read_place({}, run_dir=tmp_path / "link").run == "gpt"
    assert read_place({}, run_dir=tmp_path / "gpt/inner/..").run == "gpt"
    monkeypatch.chdir(tmp_path / "gpt")
    assert read_place({}, run_dir=Path()).run == "gpt"


def test_a_name_that_the_environment_gives_counts_and_stays(tmp_path: Path) -> None:
    _name(tmp_path)
    assert _name(tmp_path, SUPERVISOR_RUN="llama") == "llama"
    assert _name(tmp_path) == "llama"


@pytest.mark.parametrize("said", [b"", b"[]", b'{"run": ""}', b'{"run": "../gpt"}', b'{"run": ".."}', b"\xff"])
def test_a_file_that_names_no_run_counts_for_nothing(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "gpt").mkdir()
    RunPaths(tmp_path / "gpt").run_name().write_bytes(said)
    assert _name(tmp_path / "gpt") == "gpt"


def test_a_run_directory_that_takes_no_file_has_a_name_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "gpt").write_text("a file")
    assert _name(tmp_path / "gpt") == "gpt"


# ---------------------------------------------------------------- where it is


def test_folders_are_those_of_the_working_directory_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {contract.ENV_RESUME_FROM: "a/checkpoints/step-1.a1", contract.ENV_LOCAL_DIR: "local"}
    place = read_place(environment, run_dir=Path("b"))
    assert (place.run_dir, place.local_dir) == (tmp_path / "b", tmp_path / "local")
    assert place.resume_from == tmp_path / "a/checkpoints/step-1.a1"


# ---------------------------------------------------------------- what is resumed from


def _publish(folder: Path, *steps: int) -> list[Path]:
    from tests.verify.folders import publish

    return [publish(folder, step, 1) for step in steps]


def _choose(run_dir: Path, given: Path) -> list[Path]:
    found = find_checkpoints(run_dir / "checkpoints")
    return choose_resume(found, attempt=9, given=given, is_supervised=False)


def test_a_run_begins_from_another_runs_checkpoint_and_goes_on_from_its_own(tmp_path: Path) -> None:
    [other] = _publish(tmp_path / "gpt", 10)
    assert _choose(tmp_path / "tuned", other) == [other]
    own = _publish(tmp_path / "tuned", 15, 20)
    assert _choose(tmp_path / "tuned", other) == own[::-1]


def test_a_checkpoint_of_the_run_itself_that_is_named_is_gone_back_to(tmp_path: Path) -> None:
    older, _ = _publish(tmp_path / "gpt", 10, 20)
    assert _choose(tmp_path / "gpt", older) == [older]
    (tmp_path / "link").symlink_to(tmp_path / "gpt")
    assert _choose(tmp_path / "gpt", tmp_path / "link/checkpoints/step-10.a1") == [older]


# ---------------------------------------------------------------- a training


@pytest.fixture
def make() -> Iterator[Callable[..., Checkpointer]]:
    """Build Checkpointers of a small model."""
    import torch

    from trainer.checkpoint import Checkpointer

    made: list[Checkpointer] = []

    def build(run_dir: Path) -> Checkpointer:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append(Checkpointer(model=model, optimizer=optimizer, run_dir=run_dir, every_s=1e9))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.close(saves=False)


def _train(checkpointer: Checkpointer, steps: int = 1) -> Path:
    """Steps, and the checkpoint of the last one."""
    for _ in range(steps):
        checkpointer.step()
    checkpointer.save()
    result = checkpointer.wait()
    checkpointer.close(saves=False)
    assert result is not None
    assert result.is_verified
    return result.path


@pytest.mark.torch
def test_a_training_goes_on_in_a_directory_that_was_renamed(make: Callable[..., Checkpointer], tmp_path: Path) -> None:
    _train(make(tmp_path / "gpt"))
    (tmp_path / "gpt").rename(tmp_path / "moved")
    restored = make(tmp_path / "moved").restore()
    assert restored is not None
    assert restored.step == 1


@pytest.mark.torch
def test_a_training_that_changes_its_working_directory_still_has_its_run_directory(
    make: Callable[..., Checkpointer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _train(make(Path("gpt")))
    checkpointer = make(Path("gpt"))
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    assert checkpointer.restore() is not None
    _train(checkpointer)
    assert [found.step for found in find_checkpoints(tmp_path / "gpt/checkpoints")] == [1, 2]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.torch
def test_another_runs_checkpoint_among_a_runs_own_is_refused_with_what_to_do(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    from trainer.checkpoint import CheckpointRejected

    other = _train(make(tmp_path / "gpt"))
    make(tmp_path / "tuned").close(saves=False)
    shutil.copytree(other, tmp_path / "tuned/checkpoints" / other.name)
    with pytest.raises(CheckpointRejected, match=r"SUPERVISOR_RESUME_FROM.*SUPERVISOR_RUN=gpt"):
        make(tmp_path / "tuned").restore()


@pytest.mark.torch
def test_a_new_run_begins_from_another_runs_checkpoint_that_is_named(
    make: Callable[..., Checkpointer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _train(make(tmp_path / "gpt"), steps=2)
    monkeypatch.setenv(contract.ENV_RESUME_FROM, str(other))
    tuned = make(tmp_path / "tuned")
    restored = tuned.restore()
    assert restored is not None
    assert (restored.path, restored.step) == (other, 2)
    made = _train(tuned)
    assert read_manifest(made).run == "tuned"
    again = make(tmp_path / "tuned").restore()  # its own newer one counts, though the other is still named
    assert again is not None
    assert again.path == made
