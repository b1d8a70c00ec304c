"""The signal ahead of the time limit stands on sbatch's line, and a person's own goes before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.model import SlurmSpec
from supervisor.store import Store
from tests.daemon.test_executor import SPEC, Bench, submit
from tests.fakes import FakeClock


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    clock = FakeClock()
    with Store.open(tmp_path / "ledger.db", now=clock.now()) as store:
        yield Bench(store, clock)


def options_of(bench: Bench, slurm: SlurmSpec) -> tuple[str, ...]:
    bench.set_run(spec=replace(SPEC, slurm=slurm))
    submit(bench)
    bench.settle()
    return bench.slurm.request_of(1).options


def test_the_launcher_is_warned_by_default(bench: Bench) -> None:
    assert options_of(bench, SlurmSpec()) == ("--signal=B:USR1@120",)


def test_a_signal_of_the_run_files_own_options_comes_last_and_so_counts(bench: Bench) -> None:
    own = "--signal=USR2@600"
    assert options_of(bench, SlurmSpec(options=(own,))) == ("--signal=B:USR1@120", own)


def test_no_warning_is_asked_for_when_it_is_turned_off(bench: Bench) -> None:
    assert options_of(bench, SlurmSpec(warn_before_limit_s=0)) == ()
