"""What `supervisor doctor` says of Slurm, from answers as Slurm's tools give them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.client import CliClient
from slurm.run_tool import Completed
from slurm.types import ClusterFacts
from supervisor.cli.doctor_slurm import (
    Bench,
    look_at_accounting,
    look_at_accounts,
    look_at_drains,
    look_at_json,
    look_at_slurm,
    look_at_submissions,
    look_at_tools,
)
from supervisor.config import DrainSettings, Settings
from supervisor.submissions import Submission, Submissions

DATA = Path(__file__).parents[1] / "data"
FACTS = ClusterFacts(
    cluster="c",
    version="22.05.8",
    has_accounting=True,
    partitions=("main",),
    slurmd_timeout_s=300,
    min_job_age_s=300,
    message_timeout_s=10,
)
NO_ACCOUNTING = Completed(returncode=1, stderr="Slurm accounting storage is disabled\n")
ADMIN = Completed(returncode=0, stdout="Administrator\n")
DOWN = Completed(returncode=1, stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
CONFIG = Completed(returncode=0, stdout="SlurmUser               = slurm(64030)\n")


def bench(
    answers: Mapping[str, Completed] | None = None, *, uid: int = 1001, settings: Settings | None = None
) -> Bench:
    """Tools that answer as told, by name; the others are not there. `scontrol_config`: of `show config`."""

    def answer(argv: tuple[str, ...]) -> Completed:
        name = argv[0] + ("_version" if argv[1:] == ("--version",) else "")
        name += "_config" if argv[1:3] == ("show", "config") else ""
        return (answers or {}).get(name, Completed(returncode=None, stderr="not there"))

    def run(argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        return answer(argv)

    notices: list[str] = []
    return Bench(
        settings=settings or Settings(),
        ask=answer,
        client=CliClient(run=run, parent={}),
        json_client=CliClient(run=run, parent={}, form="json", on_notice=notices.append),
        notices=notices,
        uid=uid,
    )


def versions(default: str, **others: str) -> dict[str, Completed]:
    found = {tool: others.get(tool, default) for tool in ("sbatch", "scontrol", "squeue", "scancel")}
    return {f"{tool}_version": Completed(returncode=0, stdout=f"slurm-wlm {text}\n") for tool, text in found.items()}


@pytest.mark.parametrize(
    ("answers", "status", "says"),
    [
        (versions("22.05.8"), "ok", "22.05.8"),
        (versions("22.05.2"), "ok", "22.05.8"),
        (versions("22.05.8", squeue="21.08.1"), "warn", "squeue is 21.08, older"),
        (versions("22.05.8", sbatch="23.02.7"), "fail", "sbatch is 23.02, newer"),
        (versions("22.05.8", sbatch="?"), "fail", "sbatch: not on PATH"),
        ({}, "fail", "sbatch, scontrol, squeue, scancel: not on PATH"),
    ],
)
def test_commands_of_another_release_than_the_controllers_are_told(
    answers: dict[str, Completed], status: str, says: str
) -> None:
    found = look_at_tools(bench(answers), FACTS)
    assert (found.status, says in found.detail) == (status, True), found.detail


def test_json_is_usable_or_it_is_said_why_not() -> None:
    good = Completed(returncode=0, stdout=(DATA / "slurm-24.11/squeue.json").read_text())
    without = Completed(returncode=1, stderr="squeue: error: Unable to find serializer plugin\n")
    assert look_at_json(bench({"squeue": good})).status == "ok"
    as_text = bench({"squeue": without})
    assert look_at_json(as_text).status == "warn"  # its text does not answer here either
    silent = look_at_json(bench({"squeue": DOWN}))
    assert (silent.status, "no answer" in silent.detail) == ("warn", True)


@pytest.mark.parametrize(
    ("facts", "sacct", "status", "says"),
    [
        (FACTS, Completed(returncode=0), "ok", "it answers"),
        (FACTS, NO_ACCOUNTING, "warn", "AccountingStorageType"),
        (FACTS, Completed(returncode=1, stderr="sacct: error: Problem talking to the database"), "warn", "not answer"),
        (replace(FACTS, has_accounting=False), NO_ACCOUNTING, "warn", "MinJobAge, 300 s"),
        (replace(FACTS, has_accounting=False, min_job_age_s=10), NO_ACCOUNTING, "warn", "raise it to 300"),
    ],
)
def test_what_is_missing_without_accounting_is_told(
    facts: ClusterFacts, sacct: Completed, status: str, says: str
) -> None:
    found = look_at_accounting(bench({"sacct": sacct}), facts)
    assert (found.status, says in found.detail) == (status, True), found.detail


@pytest.mark.parametrize(
    ("uid", "sacctmgr", "status"),
    [
        (0, NO_ACCOUNTING, "ok"),
        (64030, NO_ACCOUNTING, "ok"),  # SlurmUser
        (1001, ADMIN, "ok"),
        (1001, Completed(returncode=0, stdout="Operator\n"), "warn"),  # not enough for nodes
        (1001, NO_ACCOUNTING, "warn"),
    ],
)
def test_whether_we_may_drain_is_read_and_not_tried(uid: int, sacctmgr: Completed, status: str) -> None:
    found = look_at_drains(bench({"sacctmgr": sacctmgr, "scontrol_config": CONFIG}, uid=uid))
    assert (found.status, "adminlevel=Administrator" in found.detail) == (status, status == "warn")


def test_drains_that_are_turned_off_need_no_right() -> None:
    settings = replace(Settings(), drain=DrainSettings(enabled=False))
    assert look_at_drains(bench(settings=settings)).status == ""


def test_an_account_of_its_own_is_told_whom_it_serves() -> None:
    found = look_at_accounts(bench(uid=65534))
    assert (found.status, "others' runs are refused" in found.detail) == ("", True)


def test_for_a_user_the_rights_are_those_of_the_service_that_another_account_runs() -> None:
    """A user needs no right of an administrator where root's service drains."""
    user = replace(bench({"sacctmgr": NO_ACCOUNTING, "scontrol_config": CONFIG}, uid=1001), service_uid=0)
    assert [(f.status, f.detail) for f in (look_at_drains(user), look_at_accounts(user))] == [
        ("ok", "root may drain nodes"),
        ("ok", "the service runs as root, and submits each job as its owner"),
    ]


def stand_in(folder: Path, script: str) -> Bench:
    """A bench of root's on whose PATH there is an sbatch that any account can run."""
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)
    (folder / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "sbatch").chmod(0o755)
    return replace(bench(uid=0), parent={"PATH": f"{folder}:/usr/bin:/bin"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_root_runs_sbatch_as_the_owner_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert look_at_accounts(stand_in(tmp_path, '[ "$(id -u)" != 0 ]')).status == "ok"
    found = look_at_accounts(stand_in(tmp_path, "echo slurm.conf: Permission denied >&2; exit 1"))
    assert (found.status, "Permission denied; can all read slurm.conf?" in found.detail) == ("fail", True)


def test_root_without_sbatch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert look_at_accounts(bench(uid=0)).status == "fail"


def test_without_an_answer_of_the_controller_only_that_is_told() -> None:
    found = {f.what: f.status for f in look_at_slurm(bench({"scontrol_config": DOWN, "scontrol": DOWN}))}
    assert found == {"slurm": "fail"}


@pytest.mark.parametrize(
    ("name", "mode", "says"),
    [
        ("submissions", 0o755, "chmod 0700"),
        ("batch", 0o777, "chmod 0711"),
        ("submissions/train.json", 0o644, "chmod 0600"),
    ],
)
def test_kept_scripts_that_others_could_read_are_a_fault_with_its_cure(
    tmp_path: Path, name: str, mode: int, says: str
) -> None:
    ledger, uid = tmp_path / "ledger.db", os.geteuid()
    assert look_at_submissions(ledger, uid=uid).status == "ok"
    kept = Submissions(ledger)
    kept.keep("train", Submission(text="#!/bin/sh\n", environment={"KEY": "hunter2"}))
    kept.write_batch("train", 1, "#!/bin/sh\n", None)
    good = look_at_submissions(ledger, uid=uid)
    assert (good.status, "1 kept" in good.detail) == ("ok", True)
    (tmp_path / name).chmod(mode)
    found = look_at_submissions(ledger, uid=uid)
    assert (found.status, says in found.detail) == ("fail", True)
