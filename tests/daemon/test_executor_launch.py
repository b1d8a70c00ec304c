"""What the launcher is told of starts inside its job: with the attempt, and while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.execute import render_attempt_spec
from supervisor.model import (
    AttemptState,
    ContainerSpec,
    Drill,
    Intent,
    IntentKind,
    IntentState,
    LivenessSpec,
    NodesSpec,
    RestartSpec,
    Run,
    StragglerSpec,
)
from supervisor.store import Store
from tests.daemon.test_executor import SPEC, Bench, planned
from tests.fakes import FakeClock
from trainer.contract import PHASES, AttemptSpec, DrillRequest


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    clock = FakeClock()
    with Store.open(tmp_path / "ledger.db", now=clock.now()) as store:
        yield Bench(store, clock)


def told(bench: Bench, **parts: Any) -> AttemptSpec:
    one = planned(bench, resume_path="/shared/runs/gpt/checkpoints/step-5.a1", resume_step=5)
    return render_attempt_spec(Run(spec=replace(SPEC, **parts)), one, bench.settings)


def test_each_start_fills_the_command_anew(bench: Bench) -> None:
    spec = told(bench)
    assert spec.command == ("train.py", "--resume=/shared/runs/gpt/checkpoints/step-5.a1")
    assert spec.command_template == SPEC.command


def test_the_run_file_says_when_a_node_is_given_up_and_how_a_training_is_started_again(bench: Bench) -> None:
    restart = RestartSpec(worker_start="warm", stop_grace_s=1.0, max_without_progress=4, backoff_s=7)
    spec = told(
        bench,
        restart=restart,
        liveness=LivenessSpec(timeout_s=20, suspect_after_s=5),
        straggler=StragglerSpec(ratio=2, window_steps=10, action="replace"),
    )
    assert (spec.in_job, spec.worker_start, spec.stop_grace_s) == (True, "warm", 1.0)
    assert (spec.max_without_progress, spec.backoff_s) == (4, 7)
    assert (spec.beat_interval_s, spec.suspect_after_s, spec.liveness_timeout_s) == (1.0, 5, 20)
    assert (spec.straggler_ratio, spec.straggler_window, spec.straggler_action) == (2, 10, "replace")
    assert set(spec.phase_bounds_s) == set(PHASES)
    assert spec.phase_bounds_s["step"] == (7.0, 900.0)


@pytest.mark.parametrize(("elastic", "least"), [(None, 1), (True, 1), (False, 2)])
def test_a_training_that_can_not_change_size_is_started_again_on_as_many_nodes(
    bench: Bench, elastic: bool | None, least: int
) -> None:
    assert told(bench, nodes=NodesSpec(min=1, max=2, elastic=elastic)).nodes_min == least


def test_a_container_is_asked_for_by_srun_or_in_front_of_each_rank(bench: Bench) -> None:
    in_image = told(bench, container=ContainerSpec(runtime="pyxis", image="/x.sqsh"))
    assert in_image.srun_options[0] == "--container-image=/x.sqsh"
    assert (in_image.command_prefix, in_image.start_checks) == ((), ())  # the image has no probes
    in_front = told(bench, container=ContainerSpec(runtime="apptainer", image="/x.sif"))
    assert in_front.command_prefix[:2] == ("apptainer", "exec")
    assert in_front.srun_options == ()
    assert in_front.start_checks


def test_variables_of_the_run_file_reach_the_ranks_and_ours_win(bench: Bench) -> None:
    assert told(bench, environment=("NCCL_DEBUG=INFO",)).environment["NCCL_DEBUG"] == "INFO"


def test_a_running_launcher_is_told_from_where_to_begin_and_what_to_break(bench: Bench) -> None:
    drill = Drill(id="ab12", kind="hang", node="n2", at_step=70, attempt=1)
    one = planned(
        bench, state=AttemptState.RUNNING, job_id=7, advised_path="/c/step-40.a1", advised_step=40, drill=drill
    )
    intent = Intent(kind=IntentKind.ADVISE, key="advise:gpt:1", reason="x", run="gpt", attempt=1)
    bench.mean(intent, one)
    bench.settle()
    assert bench.intent.state is IntentState.DONE
    advice = bench.disk.advice[1]
    assert (advice.resume_from, advice.resume_step) == ("/c/step-40.a1", 40)
    assert advice.drill == DrillRequest(id="ab12", kind="hang", node="n2", at_step=70)
