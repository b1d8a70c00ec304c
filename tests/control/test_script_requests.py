"""A script that is handed in and a job that is adopted, at the control socket: read again, named, kept, then a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm.types import JobRecord, JobState
from supervisor import verbs
from supervisor.control import Peer, Request
from supervisor.ledger import LedgerUnusable
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    CheckpointSpec,
    Fresh,
    Intent,
    IntentKind,
    IntentState,
    NodesSpec,
    Run,
    RunSpec,
    RunState,
    ScriptSpec,
    Stale,
)
from supervisor.requests import handle
from supervisor.submissions import Submission
from supervisor.verbs import Rights

NOW = datetime(2026, 1, 2, tzinfo=UTC)
DAEMON, ANN, BOB, ADMIN_GROUP = 1, 65534, 1001, 500  # ann is an account that every host has
TEXT = "#!/bin/bash\n#SBATCH --job-name=train\necho\n"
RIGHTS = Rights(admin_gid=ADMIN_GROUP)


class Ledger:
    """Keeps what is committed."""

    def __init__(self, *runs: Run) -> None:
        self.runs = {run.name: run for run in runs}
        self.attempts: list[Attempt] = []
        self.intents: list[Intent] = []
        self.replaced: Run | None = None
        self.is_full = False

    def load_run(self, name: str) -> Run | None:
        return self.runs.get(name)

    def load_runs(self) -> tuple[Run, ...]:
        return tuple(self.runs.values())

    def load_aside(self, run: str) -> tuple[Attempt, ...]:
        return ()

    def load_attempts(self, run: str) -> tuple[Attempt, ...]:
        return tuple(a for a in self.attempts if a.run == run)

    def load_intents(self, state: IntentState | None = None) -> tuple[Intent, ...]:
        return tuple(i for i in self.intents if state in (None, i.state))

    def add_run(
        self,
        run: Run,
        now: datetime,
        *,
        attempts: tuple[Attempt, ...] = (),
        intents: tuple[Intent, ...] = (),
        in_place_of: Run | None = None,
    ) -> Run:
        if self.is_full:
            raise LedgerUnusable("the disk is full")
        assert self.runs.get(run.name) == in_place_of
        self.runs[run.name], self.replaced = run, in_place_of
        self.attempts += attempts
        self.intents += intents
        return run

    def set_run(self, run: Run, now: datetime, why: str) -> Run:
        raise AssertionError("not of these verbs")

    def set_paused(self, is_paused: bool, now: datetime, who: str) -> None:
        raise AssertionError("not of these verbs")

    def record_request(self, who_uid: int, text: str, now: datetime) -> None:
        assert "hunter2" not in text


class Keeper(dict[str, Submission]):
    """Keeps what was handed in."""

    is_full = False

    def keep(self, run: str, submission: Submission) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self[run] = submission

    def drop(self, run: str) -> None:
        self.pop(run, None)


def peer(uid: int = ANN, *groups: int) -> Peer:
    return Peer(pid=1, uid=uid, gid=uid, groups=frozenset({uid, *groups}))


class Bench:
    """A ledger, a keeper, Slurm's answer, and somebody who asks."""

    def __init__(self, *runs: Run, rights: Rights = RIGHTS) -> None:
        self.ledger, self.keeper, self.rights = Ledger(*runs), Keeper(), rights
        self.jobs: Fresh[Any] | Stale = Fresh(value={55: job()}, asked_at=NOW)

    def ask(self, verb: str, who: Peer | None = None, **body: Any) -> dict[str, Any]:
        request = Request(verb=verb, body={"verb": verb, **body}, peer=who or peer())
        return handle(request, self.ledger, NOW, self.rights, self.keeper, self.jobs)

    def hand_in(self, *words: str, who: Peer | None = None, verb: str = "sbatch", **body: Any) -> dict[str, Any]:
        handed = {
            "script": TEXT,
            "path": "train.sh",
            "argv": list(words or ("train.sh",)),
            "environment": {"KEY": "hunter2"},
            "cwd": "/home/ann",
            "umask": 0o022,
        }
        return self.ask(verb, who, **{**handed, **body})

    def adopt(self, job_id: object = 55, who: Peer | None = None, **body: Any) -> dict[str, Any]:
        return self.hand_in(who=who, verb="adopt", job_id=job_id, **body)


def job(**changes: Any) -> JobRecord:
    one = JobRecord(
        job_id=55,
        state=JobState.RUNNING,
        raw_state="RUNNING",
        name="theirs",
        user="nobody",
        nodes=("n1", "n2"),
        submit_at=NOW - timedelta(hours=1),
    )
    return replace(one, **changes)


def run(name: str = "train", *, job_name: str = "train", **changes: Any) -> Run:
    spec = RunSpec(name=name, command=(), root=Path("/shared"), nodes=NodesSpec(min=1, max=2))
    one = Run(spec=spec, script=ScriptSpec(path="t", digest="", job_name=job_name), owner_uid=ANN, owner_gid=ANN)
    return replace(one, **changes)


# ---------------------------------------------------------------- sbatch


def test_a_handed_in_script_is_kept_and_then_a_run_of_the_peer() -> None:
    bench = Bench()
    reply = bench.hand_in("-N2", "train.sh", "x")
    assert (reply["ok"], reply["run"], reply["job_name"]) == (True, "train", "train")
    kept = bench.ledger.runs["train"]
    assert (kept.owner_uid, kept.spec.nodes.max, kept.script and kept.script.arguments) == (ANN, 2, ("x",))
    assert bench.keeper["train"].environment == {"KEY": "hunter2"}
    assert "hunter2" not in f"{reply}{kept}"


def test_what_the_command_should_have_refused_the_daemon_refuses() -> None:
    bench = Bench()
    assert bench.hand_in("--array=1-2", "train.sh")["code"] == "bad_input"
    assert bench.hand_in(script="echo\n")["code"] == "sbatch"
    assert bench.hand_in(umask="022")["code"] == "bad_input"
    assert bench.hand_in(limits={"NOFILE": "many"})["code"] == "bad_input"
    assert bench.hand_in(script=TEXT + "\ud800")["code"] == "bad_input"
    assert (bench.ledger.runs, bench.keeper) == ({}, {})


def test_nothing_is_kept_for_a_dry_run_or_for_a_run_that_could_not_be_committed() -> None:
    bench = Bench()
    assert bench.hand_in(dry_run=True)["ok"]
    bench.ledger.is_full = True
    assert bench.hand_in()["code"] == "ledger"
    bench.ledger.is_full, bench.keeper.is_full = False, True
    assert bench.hand_in()["code"] == "ledger"
    assert (bench.ledger.runs, bench.keeper) == ({}, {})


def test_a_chosen_name_in_use_is_refused_and_one_made_of_the_job_is_counted_up() -> None:
    bench = Bench(run(state=RunState.FINISHED))
    assert bench.hand_in("--supervise-name=train", "train.sh")["code"] == "name_in_use"
    assert bench.hand_in()["run"] == "train-2"


def test_the_jobs_name_is_the_runs_while_another_run_of_the_owner_has_it() -> None:
    assert Bench(run()).hand_in()["job_name"] == "train-2"
    assert Bench(run(state=RunState.FINISHED)).hand_in()["job_name"] == "train"
    assert Bench(run(owner_uid=BOB)).hand_in()["job_name"] == "train"


def test_a_dependency_on_a_job_of_a_run_is_told_that_the_run_may_go_on_in_another() -> None:
    bench = Bench()
    bench.adopt(who=peer(0))
    assert "job 55 is attempt 1 of run" in bench.hand_in("-d", "afterok:7:55,singleton", "train.sh")["notes"][-1]
    assert "attempt 1" not in str(bench.hand_in("-d", "afterok:5:555", "train.sh")["notes"])


@pytest.mark.parametrize(
    ("state", "is_said"), [(RunState.ACTIVE, True), (RunState.HELD, True), (RunState.STOPPED, False)]
)
def test_a_live_run_that_saves_in_the_same_folder_is_said(state: RunState, *, is_said: bool) -> None:
    saves = CheckpointSpec(directory=Path("/home/ann/ckpt"), layout="dcp")
    other = run("other", state=state)
    bench = Bench(replace(other, spec=replace(other.spec, checkpoint=saves)))
    notes = bench.hand_in("--supervise-checkpoint-dir=./ckpt", "train.sh", dry_run=True)["notes"]
    assert any("run other" in note and "saves there" in note for note in notes) is is_said
    elsewhere = bench.hand_in("--supervise-checkpoint-dir=ckpt2", "train.sh", dry_run=True)["notes"]
    assert not any("saves there" in note for note in elsewhere)


def test_a_name_that_sbatch_has_refused_is_free_for_its_owner() -> None:
    refused = run(state=RunState.STOPPED, reason="sbatch refused the job: no such partition")
    bench = Bench(refused)
    assert bench.hand_in("--supervise-name=train", "train.sh")["ok"]
    assert bench.ledger.replaced == refused
    others = Bench(replace(refused, owner_uid=BOB))
    assert others.hand_in("--supervise-name=train", "train.sh")["code"] == "name_in_use"


def test_a_service_under_one_account_refuses_others_with_a_sentence() -> None:
    bench = Bench(rights=Rights(service_uid=DAEMON))
    for reply in (bench.hand_in(), bench.adopt()):
        assert reply["code"] == "not_allowed"
        assert "can submit only that account's jobs" in reply["message"]
    assert bench.ledger.runs == {}


def test_nobody_but_root_submits_for_another() -> None:
    assert Bench().hand_in(uid=BOB, gid=BOB)["code"] == "not_allowed"
    bench = Bench()
    assert bench.hand_in(who=peer(0), uid=BOB, gid=BOB)["ok"]
    assert bench.ledger.runs["train"].owner_uid == BOB


# ---------------------------------------------------------------- what becomes of it


def test_the_first_job_is_told_to_whoever_asks() -> None:
    bench = Bench(run())
    assert bench.ask("job", run="train")["job_id"] is None
    bench.ledger.attempts = [Attempt(run="train", number=1, token="t", nodes_wanted=1, planned_at=NOW, job_id=7)]
    assert bench.ask("job", peer(BOB), run="train")["job_id"] == 7
    assert bench.ask("job", run="other")["code"] == "unknown_run"
    assert bench.ask("job")["code"] == "unknown_run"


def test_what_sbatch_said_is_told_as_it_said_it_and_not_of_an_older_try() -> None:
    bench = Bench(run(created_at=NOW, state=RunState.STOPPED))
    over = Attempt(run="train", number=1, token="t", nodes_wanted=1, planned_at=NOW, end=AttemptEnd.REFUSED)
    said = Intent(
        kind=IntentKind.SUBMIT,
        key="submit:train:1",
        reason="go",
        run="train",
        outcome="sbatch: error: no\n",
        created_at=NOW,
        state=IntentState.REFUSED,
    )
    bench.ledger.attempts = [over]
    bench.ledger.intents = [said, replace(said, created_at=NOW - timedelta(hours=1), outcome="old")]
    reply = bench.ask("job", run="train")
    assert (reply["end"], reply["outcome"]) == ("refused", "sbatch: error: no\n")


# ---------------------------------------------------------------- adopt


def test_an_adopted_job_is_the_first_attempt_of_a_run_and_is_to_be_claimed() -> None:
    bench = Bench()
    reply = bench.adopt()
    assert (reply["ok"], reply["run"], reply["job_id"]) == (True, "train", 55)
    kept, (attempt,), (claim,) = bench.ledger.runs["train"], bench.ledger.attempts, bench.ledger.intents
    assert kept.job_name == "theirs"
    assert (attempt.state, attempt.job_id, attempt.nodes_wanted) == (AttemptState.SUBMITTED, 55, 2)
    assert (attempt.is_adopted, attempt.submitted_at) == (True, NOW - timedelta(hours=1))
    assert (claim.kind, claim.job_id, claim.attempt) == (IntentKind.CLAIM, 55, 1)
    assert bench.keeper["train"].text == TEXT


def test_root_adopts_as_the_jobs_owner() -> None:
    bench = Bench()
    assert bench.adopt(who=peer(0))["ok"]
    assert bench.ledger.runs["train"].owner_uid == ANN


def test_an_admin_who_is_not_root_hands_in_nothing_that_would_run_as_somebody_else() -> None:
    bench = Bench()
    reply = bench.adopt(who=peer(BOB, ADMIN_GROUP))
    assert (reply["code"], "its owner and root may" in reply["message"]) == ("not_allowed", True)
    assert (bench.ledger.runs, bench.keeper) == ({}, {})


def test_the_persons_umask_and_soft_limits_are_kept_for_all_attempts() -> None:
    bench = Bench()
    assert bench.hand_in(umask=0o077, limits={"NOFILE": 99, "CORE": -1, "NEWER": 1})["ok"]
    shell = bench.ledger.runs["train"].inherited
    assert (shell.umask, {limit.name: limit.value for limit in shell.limits}) == (0o077, {"NOFILE": 99, "CORE": -1})


def test_somebody_elses_job_is_not_adopted() -> None:
    reply = Bench().adopt(who=peer(BOB))
    assert (reply["code"], "belongs to nobody" in reply["message"]) == ("not_allowed", True)


@pytest.mark.parametrize("job_id", [None, "55", 0, -1, 2**40, True])
def test_what_is_no_number_of_a_job_is_refused(job_id: object) -> None:
    assert Bench().adopt(job_id)["code"] == verbs.BAD_INPUT


@pytest.mark.parametrize("waited_s", [10**400, -1, 3601, True, "1", None, [], float("nan"), float("inf")])
def test_what_is_no_number_of_seconds_is_refused(waited_s: object) -> None:
    assert Bench().adopt(waited_s=waited_s)["code"] == verbs.BAD_INPUT


def test_a_request_that_meets_a_defect_is_answered_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("hunter2")

    bench = Bench()
    monkeypatch.setattr(verbs, "read_handed", fail)
    reply = bench.hand_in()
    assert (reply["ok"], reply["code"]) == (False, verbs.INTERNAL)
    assert "hunter2" not in reply["message"]
    assert (bench.ledger.runs, bench.keeper) == ({}, {})


def test_a_job_is_adopted_by_what_slurm_says_now() -> None:
    bench = Bench()
    bench.jobs = Fresh(value={}, asked_at=NOW - timedelta(seconds=1))  # asked for before the request came
    assert bench.adopt()["code"] == verbs.LOOK_AGAIN
    assert bench.adopt(waited_s=0.5)["code"] == verbs.LOOK_AGAIN
    assert bench.adopt(waited_s=1.5)["code"] == verbs.UNKNOWN_JOB
    bench.jobs = Fresh(value={55: job()}, asked_at=NOW - timedelta(seconds=30))
    assert bench.adopt(waited_s=60)["code"] == verbs.LOOK_AGAIN
    bench.jobs = Stale(why="timed out", since_at=NOW)
    assert bench.adopt()["code"] == verbs.SLURM
    bench.jobs = Fresh(value={}, asked_at=NOW)
    assert bench.adopt()["code"] == verbs.UNKNOWN_JOB
    bench.jobs = Fresh(value={55: job(state=JobState.FAILED, raw_state="FAILED")}, asked_at=NOW)
    assert "ended already (FAILED)" in bench.adopt()["message"]
    bench.jobs = Fresh(value={55: job(user="no-such-user-here")}, asked_at=NOW)
    assert "does not know" in bench.adopt()["message"]
    assert bench.ledger.runs == {}


@pytest.mark.parametrize("is_by_token", [True, False])
def test_a_job_that_is_supervised_already_is_not_adopted_again(*, is_by_token: bool) -> None:
    bench = Bench(run("mine"))
    known = Attempt(run="mine", number=3, token="sup:mine:3", nodes_wanted=1, planned_at=NOW)
    if is_by_token:
        bench.jobs = Fresh(value={55: job(comment="sup:mine:3")}, asked_at=NOW)
    bench.ledger.attempts = [known if is_by_token else replace(known, job_id=55)]
    assert "attempt 3 of run mine" in bench.adopt()["message"]
