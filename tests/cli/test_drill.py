"""`supervisor drill`: what it refuses, and what it would do. Failures that are made: tests/e2e/test_drill.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.drill import Before
from supervisor.drillmake import find_ranks
from supervisor.drillrun import standing, where
from supervisor.drillwatch import look
from supervisor.model import Attempt, AttemptState, Checkpoint, CheckpointState, Run, RunState
from tests.cli.conftest import NOW, Service, run
from trainer.contract import LaunchReport, NodeBeat, Progress, RunPaths, write_json


@pytest.fixture(autouse=True)
def on_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)


def keep_training(
    service: Service, *, verified: bool = True, step: int = 24, phase: str = "running", tells_progress: bool = True
) -> None:
    """A run that trains on n1 (the launcher's) and n2, with a spare n3."""
    spec = run().spec
    changed = Run(spec=type(spec)(name="llama", command=("t",), root=service.runs, nodes=spec.nodes), created_at=NOW)
    attempt = Attempt(
        run="llama",
        number=1,
        token=changed.token(1),
        state=AttemptState.RUNNING,
        nodes_wanted=2,
        job_id=7,
        nodes=("n1", "n2", "n3"),
        planned_at=NOW,
        stepped_at=NOW,
    )
    state = CheckpointState.VERIFIED if verified else CheckpointState.COMPLETE
    checkpoint = Checkpoint(run="llama", step=20, attempt=1, state=state, path="/gone", first_seen_at=NOW)
    service.keep(changed, attempt, checkpoint)
    paths = RunPaths(service.runs / "llama")
    beats = {name: NodeBeat(state="running", age_s=0.1) for name in ("n1", "n2", "n3")}
    report = LaunchReport(
        attempt=1, job_id=7, seq=3, time=0.0, host="n1", phase=phase, nodes=beats, training=("n1", "n2")
    )
    write_json(paths.launch_report(1), report)
    if tells_progress:
        write_json(paths.progress(1), Progress(attempt=1, step=step, phase="step", time=0.0, final_step=100))


def test_an_unknown_run_is_wrong_input(service: Service) -> None:
    with service.running():
        result = service.call("drill", "nobody", "--kill", "node")
    assert result.exit_code == 2
    assert 'there is no run "nobody"' in result.stderr


def test_another_kind_of_failure_is_wrong_input(service: Service) -> None:
    result = service.call("drill", "llama", "--kill", "meteorite")
    assert result.exit_code == 2
    assert "node" in result.stderr


def test_without_the_daemon_nothing_is_made(service: Service) -> None:
    keep_training(service)
    assert service.call("drill", "llama", "--kill", "node", "--yes").exit_code == 3


@pytest.mark.parametrize("changes", [{"state": RunState.HELD}, {"state": RunState.FINISHED}, {"is_paused": True}, {}])
def test_a_run_that_does_not_train_is_refused(service: Service, changes: dict[str, Any]) -> None:
    service.keep(run(**changes))
    with service.running():
        result = service.call("drill", "llama", "--kill", "process", "--yes")
    assert result.exit_code == 4
    assert result.stderr.startswith("supervisor: no drill: llama is")


def test_a_run_that_is_recovering_is_left_alone(service: Service) -> None:
    keep_training(service, phase="recovering")
    with service.running():
        assert service.call("drill", "llama", "--kill", "process", "--yes").exit_code == 4


def test_a_run_without_a_verified_checkpoint_is_refused(service: Service) -> None:
    keep_training(service, verified=False)
    with service.running():
        result = service.call("drill", "llama", "--kill", "process", "--yes")
    assert result.exit_code == 4
    assert "no verified checkpoint" in result.stderr


def test_a_run_that_has_not_stepped_is_refused(service: Service) -> None:
    keep_training(service, step=-1)
    with service.running():
        assert service.call("drill", "llama", "--kill", "process", "--yes").exit_code == 4


def test_a_training_without_a_progress_file_is_refused_with_the_true_reason(service: Service) -> None:
    keep_training(service, tells_progress=False)
    with service.running():
        result = service.call("drill", "llama", "--kill", "process", "--yes")
    assert result.exit_code == 4
    assert "writes no progress file" in result.stderr


def test_a_step_that_the_training_never_goes_on_from_is_wrong_input(service: Service) -> None:
    keep_training(service)
    with service.running():
        result = service.call("drill", "llama", "--kill", "node", "--at-step", "100", "--dry-run")
        assert service.call("drill", "llama", "--kill", "node", "--at-step", "99", "--dry-run").exit_code == 0
    assert result.exit_code == 2
    assert "ends with step 100" in result.stderr


@pytest.mark.parametrize(
    ("phase", "words"), [("running", "started again after n2 is lost"), ("recovering", "recovering from n2 is lost")]
)
def test_what_goes_on_is_told_in_the_words_of_the_phase(service: Service, phase: str, words: str) -> None:
    keep_training(service)
    sight = look(service.ledger, "llama")
    assert sight is not None
    assert sight.launch is not None
    assert words in where(replace(sight, launch=replace(sight.launch, phase=phase, why="n2 is lost")))


def test_a_node_that_does_not_train_is_wrong_input(service: Service) -> None:
    keep_training(service)
    with service.running():
        result = service.call("drill", "llama", "--kill", "node", "--node", "n3", "--yes")
    assert result.exit_code == 2
    assert "n1, n2 do" in result.stderr


def test_a_real_cluster_needs_yes_or_somebody_who_answers(service: Service) -> None:
    keep_training(service)
    with service.running():
        result = service.call("drill", "llama", "--kill", "node")
    assert result.exit_code == 4
    assert "--yes" in result.stderr
    with service.running():
        kept = service.load_run()
    assert kept is not None
    assert kept.drill is None


def test_a_dry_run_names_the_node_and_what_it_would_cost_and_makes_nothing(service: Service) -> None:
    keep_training(service)
    with service.running():
        result = service.call("drill", "llama", "--kill", "node", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert (plan["node"], plan["step"], plan["verified_step"], plan["sandbox"]) == ("n2", 24, 20, False)
    kept = service.load_run()
    assert kept is not None
    assert kept.drill is None


def test_a_dry_run_on_the_launchers_node_says_that_the_job_would_be_lost(service: Service) -> None:
    keep_training(service)
    with service.running():
        lost = service.call("drill", "llama", "--kill", "node", "--node", "n1", "--dry-run")
        kept = service.call("drill", "llama", "--kill", "process", "--node", "n1", "--dry-run")
    assert "the job would be lost" in lost.stdout
    assert "the job would be lost" not in kept.stdout


def test_a_step_that_does_not_come_in_time_makes_nothing(service: Service) -> None:
    keep_training(service)
    with service.running():
        result = service.call("drill", "llama", "--kill", "node", "--at-step", "99", "--timeout-s", "1", "--yes")
    assert result.exit_code == 1
    assert "nothing was done" in result.stderr
    kept = service.load_run()
    assert kept is not None
    assert kept.drill is None


def test_a_failure_that_nobody_recovers_from_fails_the_drill_and_is_reported(service: Service) -> None:
    keep_training(service)
    with service.running():
        result = service.call("drill", "llama", "--kill", "hang", "--timeout-s", "1", "--yes", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["ok"], found["recovered_s"]) == (False, None)
    (written,) = (service.runs / "llama/drills").glob("*-hang.json")
    assert json.loads(written.read_text()) == found
    assert "FAILED" in written.with_suffix(".txt").read_text()
    kept = service.load_run()
    assert kept is not None
    assert kept.drill is not None
    assert (kept.drill.kind, kept.drill.node) == ("hang", "n2")


def test_a_training_that_the_failure_has_not_hit_is_not_called_down(service: Service) -> None:
    keep_training(service, step=40)
    sight = look(service.ledger, "llama")
    assert sight is not None
    before = Before(
        run="llama",
        kind="hang",
        node="n2",
        how="SIGSTOP",
        attempt=1,
        launch=0,
        training=("n1", "n2"),
        host="n1",
        step=24,
        verified_step=20,
        made_at=NOW,
    )
    assert "trains on as before, now at step 40" in standing(sight, before)
    assert standing(sight, replace(before, step=40)) == where(sight)


def test_a_rank_is_told_from_its_children_and_from_other_runs(tmp_path: Path) -> None:
    def process(pid: int, parent: int, comm: str = "python3", **environment: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{comm}\n")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (py (x) thon) S {parent} 1 1")
        pairs = "\0".join(f"{name}={value}" for name, value in environment.items())
        (tmp_path / str(pid) / "environ").write_text(pairs)

    process(10, 1, SUPERVISOR_RUN="llama")  # the agent
    process(11, 10, SUPERVISOR_RUN="llama", RANK="2")
    process(12, 11, SUPERVISOR_RUN="llama", RANK="2")  # its data loader
    process(13, 10, SUPERVISOR_RUN="llama", RANK="3")
    process(14, 1, SUPERVISOR_RUN="other", RANK="0")
    process(16, 10, SUPERVISOR_RUN="llama")  # a prepared interpreter, and its fork: one environment to be seen
    process(17, 10, "rank4", SUPERVISOR_RUN="llama")
    assert find_ranks((*range(10, 18),), "llama", tmp_path) == {2: 11, 3: 13, 4: 17}
