"""A restore: into any number of ranks and any distribution, and only what is as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.saving import scenes
from tests.trainer.saving.groups import run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    run_ranks(4, scenes.save_kinds, folder, scenes.KINDS)
    return folder


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, scenes.save_kinds, folder, scenes.KINDS)
    return folder


def test_what_four_ranks_saved_is_loaded_by_two_in_any_distribution(saved_by_four: Path) -> None:
    run_ranks(2, scenes.load_kinds, saved_by_four, scenes.KINDS)


def test_what_two_ranks_saved_is_loaded_by_four_in_any_distribution(saved_by_two: Path) -> None:
    run_ranks(4, scenes.load_kinds, saved_by_two, scenes.KINDS)


def test_what_four_ranks_saved_is_loaded_by_one_process_without_a_group(saved_by_four: Path) -> None:
    scenes.load_kinds(0, saved_by_four, ["plain"])


def test_torch_itself_loads_what_was_saved_in_any_distribution(saved_by_four: Path) -> None:
    run_ranks(2, scenes.load_kinds_with_torch, saved_by_four, scenes.KINDS)


def test_a_model_that_is_tensor_parallel_and_sharded_comes_back_whole(tmp_path: Path) -> None:
    run_ranks(4, scenes.save_and_load_tensor_parallel, tmp_path)
