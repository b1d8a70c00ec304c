"""The mutations themselves: they change what they say, and a judge that believes everything is found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench import mutations
from bench.mutation_judges import Answer, ask_service, ask_training
from bench.mutation_kinds import DAMAGES, FORBIDDEN, HARMLESS, Kind, Nothing, Scene, lay_out, put_back
from bench.mutation_scene import BEFORE, SAVED, TARGET, Library
from bench.mutations import Trial, is_clean, run_trial, run_trials, summarize
from tests.verify.folders import publish, vouch
from trainer.contract import MANIFEST_NAME

ALL: Mapping[str, Kind] = {kind.__name__: kind for kind in (*DAMAGES, *FORBIDDEN, *HARMLESS)}


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """As the trainer's engine leaves them, with less in them."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    for run, step, attempt in SAVED:
        vouch(publish(tmp_path / "library" / run, step, attempt))
    return Library(folder=tmp_path / "library")


@pytest.fixture
def scene(library: Library, tmp_path: Path) -> Scene:
    return lay_out(library, tmp_path / "scene")


def snapshot(scene: Scene) -> dict[str, bytes | None]:
    files = scene.checkpoints.rglob("*")
    return {str(f.relative_to(scene.checkpoints)): f.read_bytes() if f.is_file() else None for f in files}


def test_nothing_damaged_is_believed_and_nothing_whole_is_refused(library: Library, tmp_path: Path) -> None:
    trials = run_trials(library, tmp_path, seed=1, count=60, processes=2)
    result = summarize(trials, 1, 1.0)
    assert (result["mutations"], result["harmless"]) == (60, 4)
    assert is_clean(result), result["faults"]


@pytest.mark.parametrize("name", ALL)
def test_each_kind_changes_the_scene_and_it_is_whole_again_afterwards(name: str, scene: Scene) -> None:
    whole, modes = snapshot(scene), scene.target.stat().st_mode
    for number in range(20):
        try:
            assert ALL[name](Random(number), scene)
            break
        except Nothing:
            put_back(scene)
    if name not in ("forbid", "touch"):
        assert snapshot(scene) != whole
    put_back(scene)
    assert snapshot(scene) == whole
    assert scene.target.stat().st_mode == modes


def test_a_whole_scene_is_resumed_from_its_newest(scene: Scene) -> None:
    assert (ask_service(scene.run_dir).resumed, ask_training(scene.run_dir).resumed) == (TARGET, TARGET)


@pytest.mark.parametrize("judge", ["ask_service", "ask_training"])
def test_a_judge_that_believes_what_is_damaged_is_found_out(
    judge: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, judge, lambda _run_dir: Answer(resumed=TARGET))
    trials = [run_trial(scene, 2, number, is_harmless=False) for number in range(1, 15)]
    result = summarize(trials, 2, 1.0)
    assert result["undetected"] == result["resumed"] == 14
    assert not is_clean(result)


def test_a_judge_that_believes_nothing_is_found_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "ask_training", lambda _run_dir: Answer(resumed=BEFORE, condemned=(TARGET,)))
    harmless = [run_trial(scene, 2, number, is_harmless=True) for number in range(5)]
    assert summarize(harmless, 2, 1.0)["false_alarms"] == 5
    forbidden = next(
        trial
        for number in range(1, 500)
        if number % mutations.LOAD_EVERY and (trial := run_trial(scene, 2, number, is_harmless=False)).kind == "forbid"
    )
    assert "calls it corrupt" in forbidden.fault


def test_the_same_number_is_the_same_mutation(scene: Scene) -> None:
    def what(number: int) -> Trial:
        return run_trial(scene, 7, number, is_harmless=False)

    assert what(3) == what(3)
    assert what(3) != replace(what(4), number=3)


def test_the_files_of_a_scene_are_links_that_no_mutation_writes_through(library: Library, scene: Scene) -> None:
    before = {file: file.read_bytes() for file in library.folder.rglob("*") if file.is_file()}
    for number in range(1, 60):
        if number % mutations.LOAD_EVERY:
            run_trial(scene, 3, number, is_harmless=False)
    assert {file: file.read_bytes() for file in before} == before
    assert (library.checkpoint(TARGET) / MANIFEST_NAME).stat().st_mode & 0o400
