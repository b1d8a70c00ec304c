from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurm.sandbox import Sandbox
from slurm.sandbox.installed import why_not_isolated
from supervisor.config import Settings, SlurmSettings, SweepLimits, SweepSettings
from supervisor.model import NodeChecks
from supervisor.probes.runner import ProbeReport
from supervisor.sweep import Sweeper, judge_line, srun_argv
from trainer import contract
from trainer.contract import CheckResult

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def settings(**limits: object) -> Settings:
    checked = SweepLimits(disk_min_free_bytes=1, **limits)  # type: ignore[arg-type]
    return Settings(sweep=SweepSettings(timeout_s=12.0, limits=checked))


def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def sweep(sweeper: Sweeper, *nodes: str) -> dict[str, NodeChecks]:
    assert sweeper.start(nodes, NOW)
    wait_until(lambda: not sweeper.is_running)
    return {checks.node: checks for checks in sweeper.collect()}


def failures(checks: NodeChecks) -> list[str]:
    return [result.check for result in checks.results if result.ok is not True]


# ---------------------------------------------------------------- without Slurm


def write_srun(folder: Path, script: str) -> dict[str, str]:
    """A stand-in for srun, and the environment to find it in."""
    (folder / "srun").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "srun").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def line(node: str, *, started_at: float = 0.0) -> str:
    report = ProbeReport(
        node=node,
        started_at=started_at or time.time(),
        ended_at=started_at or time.time() + 0.001,
        results=(CheckResult(check="memory", ok=True),),
    )
    return contract.render_json(report).decode()


def test_without_srun_every_node_is_unknown(tmp_path: Path) -> None:
    sweeper = Sweeper(settings(), parent={"PATH": str(tmp_path)})
    found = sweep(sweeper, "n1", "n2")
    assert [(c.node, c.is_complete, c.results) for c in found.values()] == [("n1", False, ()), ("n2", False, ())]


def test_answers_of_other_nodes_and_garbage_do_not_count(tmp_path: Path) -> None:
    script = f"echo '{line('n1')}'; echo garbage; echo '{line('n9')}'; head -c 1000000 /dev/zero"
    sweeper = Sweeper(settings(), parent=write_srun(tmp_path, script))
    found = sweep(sweeper, "n1", "n2")
    assert {node: checks.is_complete for node, checks in found.items()} == {"n1": True, "n2": False}


def test_a_sweep_that_hangs_ends_at_its_limit_and_keeps_what_came(tmp_path: Path) -> None:
    sweeper = Sweeper(
        Settings(sweep=SweepSettings(timeout_s=0.5)),
        parent=write_srun(tmp_path, f"echo '{line('n1')}'; exec sleep 60"),
    )
    started = time.monotonic()
    found = sweep(sweeper, "n1", "n2")
    assert time.monotonic() - started < 5.0
    assert {node: checks.is_complete for node, checks in found.items()} == {"n1": True, "n2": False}


def test_one_sweep_at_a_time_and_closing_ends_it(tmp_path: Path) -> None:
    sweeper = Sweeper(settings(), parent=write_srun(tmp_path, "exec sleep 60"))
    assert sweeper.start(("n1",), NOW)
    assert not sweeper.start(("n1",), NOW)
    sweeper.close()
    assert not sweeper.is_running


def test_the_head_node_judges_the_clock_by_when_it_asked_and_was_answered() -> None:
    def skew_ok(node_at: float) -> bool | None:
        node, results = judge_line(line("n1", started_at=node_at).encode(), 1000.0, 1003.0, max_skew_s=1.0)
        assert node == "n1"
        return {result.check: result.ok for result in results}["clock"]

    assert [skew_ok(at) for at in (998.0, 999.5, 1001.0, 1003.9, 1005.0)] == [False, True, True, True, False]


def test_only_root_and_slurm_s_own_user_go_without_a_job() -> None:
    root, user = (srun_argv(("n1", "n2"), settings(), is_privileged=p) for p in (True, False))
    assert "--no-allocate" in root
    assert "--no-allocate" not in user
    assert "--immediate=5" in user
    assert "--nodelist=n[1-2]" in root


# ---------------------------------------------------------------- on a real Slurm


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    obstacle = why_not_isolated()
    if obstacle is not None:
        pytest.skip(obstacle)
    with Sandbox.start(nodes=4, mode="isolated") as sandbox:
        yield sandbox


def sweeper_of(sandbox: Sandbox, *, is_privileged: bool = True) -> Sweeper:
    limits = SweepLimits(disk_paths=(str(sandbox.scratch),), disk_min_free_bytes=1, shared_paths=("/tmp",))
    chosen = Settings(
        slurm=SlurmSettings(conf=Path(sandbox.env["SLURM_CONF"])), sweep=SweepSettings(timeout_s=12.0, limits=limits)
    )
    return Sweeper(chosen, parent={"PATH": sandbox.env["PATH"]}, is_privileged=is_privileged)


@pytest.mark.slurm
def test_healthy_nodes_pass_with_and_without_a_job(sandbox: Sandbox) -> None:
    for is_privileged in (True, False):
        found = sweep(sweeper_of(sandbox, is_privileged=is_privileged), "n1", "n2", "n3")
        assert {node: (c.is_complete, failures(c)) for node, c in found.items()} == {
            node: (True, []) for node in ("n1", "n2", "n3")
        }


@pytest.mark.slurm
def test_a_full_scratch_disk_shows_up_for_exactly_its_node(sandbox: Sandbox) -> None:
    sandbox.fill_scratch("n2")
    try:
        found = sweep(sweeper_of(sandbox), *sandbox.node_names)
    finally:
        sandbox.empty_scratch("n2")
    assert {node: failures(c) for node, c in found.items()} == {
        "n1": [],
        "n2": [f"disk:{sandbox.scratch}"],
        "n3": [],
        "n4": [],
    }


@pytest.mark.slurm
def test_a_node_without_power_is_unknown_and_the_others_are_known(sandbox: Sandbox) -> None:
    sandbox.power_cut("n4")
    try:
        found = sweep(sweeper_of(sandbox), *sandbox.node_names)
    finally:
        sandbox.revive("n4")
        wait_until(lambda: sweep(sweeper_of(sandbox), "n4")["n4"].is_complete)
    assert {node: c.is_complete for node, c in found.items()} == {"n1": True, "n2": True, "n3": True, "n4": False}
