"""Stages for the end-to-end tests, each with a cluster of its own (it is up in half a second)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Protocol

import pytest

from slurm.sandbox import Sandbox
from slurm.sandbox.installed import why_not_isolated
from tests.e2e.stage import NO_SWEEP, Stage


class OpenStage(Protocol):
    def __call__(
        self,
        *,
        nodes: int = 2,
        mode: Literal["auto", "isolated"] = "auto",
        sweep: str = NO_SWEEP,
        has_torch: bool = False,
        is_up: bool = True,
        extra_conf: str = "",
    ) -> Stage: ...


@pytest.fixture
def open_stage(tmp_path: Path) -> Iterator[OpenStage]:
    """Makes stages; at their end no attempt of theirs had two jobs."""
    stages: list[Stage] = []
    with ExitStack() as stack:

        def open_one(
            *,
            nodes: int = 2,
            mode: Literal["auto", "isolated"] = "auto",
            sweep: str = NO_SWEEP,
            has_torch: bool = False,
            is_up: bool = True,
            extra_conf: str = "",
        ) -> Stage:
            sandbox = stack.enter_context(
                Sandbox.start(nodes=nodes, mode=mode, directory=tmp_path / "sandbox", extra_conf=extra_conf)
            )
            stage = Stage(tmp_path / "stage", sandbox, sweep=sweep.format(scratch=sandbox.scratch), has_torch=has_torch)
            stack.callback(stage.close)
            stages.append(stage)
            if is_up:
                stage.start_daemon()
            return stage

        yield open_one
        for stage in stages:
            stage.assert_one_job_per_attempt()


@pytest.fixture
def stage(open_stage: OpenStage) -> Stage:
    """Two nodes and a daemon."""
    return open_stage()


@pytest.fixture(scope="session")
def namespaces_permitted() -> None:
    obstacle = why_not_isolated()
    if obstacle is not None:
        pytest.skip(obstacle)
