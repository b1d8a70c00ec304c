"""What each verb does to the ledger, who may ask for it, and that nothing a client says is believed."""

from __future__ import annotations

import dataclasses
import pwd
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slurm.inherited import Inherited, SoftLimit
from supervisor.control import Peer, Request
from supervisor.ledger import LedgerUnusable
from supervisor.model import Attempt, Intent, IntentState, NodesSpec, Run, RunSpec, RunState
from supervisor.requests import handle
from supervisor.store import Store
from supervisor.verbs import Rights, authorise

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ANN, BOB, ADMIN_GROUP = 1000, 1001, 500
FILE = 'name = "llama"\ncommand = ["train.py"]\nroot = "/shared"\n[nodes]\nmin = 1\nmax = 2\n'
RIGHTS = Rights(admin_gid=ADMIN_GROUP)


class Ledger:
    """Keeps what is committed."""

    def __init__(self, *runs: Run) -> None:
        self.runs = {run.name: run for run in runs}
        self.is_paused: bool | None = None
        self.requests: list[tuple[int, str]] = []

    def load_run(self, name: str) -> Run | None:
        return self.runs.get(name)

    def load_runs(self) -> tuple[Run, ...]:
        return tuple(self.runs.values())

    def load_aside(self, run: str) -> tuple[Attempt, ...]:
        return ()

    def load_attempts(self, run: str) -> tuple[Attempt, ...]:
        return ()

    def load_intents(self, state: IntentState | None = None) -> tuple[Intent, ...]:
        return ()

    def add_run(self, run: Run, now: datetime, **_: Any) -> Run:
        assert run.name not in self.runs
        self.runs[run.name] = run
        return run

    def set_run(self, run: Run, now: datetime, why: str) -> Run:
        assert why
        self.runs[run.name] = run
        return run

    def set_paused(self, is_paused: bool, now: datetime, who: str) -> None:
        self.is_paused = is_paused

    def record_request(self, who_uid: int, text: str, now: datetime) -> None:
        self.requests.append((who_uid, text))


class FullDisk(Ledger):
    """Can't be written."""

    def add_run(self, run: Run, now: datetime, **_: Any) -> Run:
        raise LedgerUnusable("/l.db can't be used now: database or disk is full")


def run(state: RunState = RunState.ACTIVE, *, is_paused: bool = False) -> Run:
    spec = RunSpec(name="llama", command=("train.py",), root=Path("/shared"), nodes=NodesSpec(min=1, max=2))
    return Run(spec=spec, state=state, owner_uid=ANN, owner_gid=ANN, is_paused=is_paused)


def peer(uid: int = ANN, *groups: int) -> Peer:
    return Peer(pid=1, uid=uid, gid=uid, groups=frozenset({uid, *groups}))


def asked(ledger: Ledger, verb: str, who: Peer | None = None, rights: Rights = RIGHTS, **body: Any) -> dict[str, Any]:
    request = Request(verb=verb, body={"verb": verb, **body}, peer=who or peer())
    return handle(request, ledger, NOW, rights)


def submit(ledger: Ledger, who: Peer | None = None, rights: Rights = RIGHTS, **body: Any) -> dict[str, Any]:
    return asked(ledger, "submit", who, rights, **{"text": FILE, "path": "/home/ann/run.toml", **body})


# ---------------------------------------------------------------- submit


def test_a_submitted_run_is_a_row_of_the_peer_before_it_is_answered() -> None:
    ledger = Ledger()
    reply = submit(ledger)
    assert (reply["ok"], reply["run"], reply["state"]) == (True, "llama", "active")
    kept = ledger.runs["llama"]
    assert (kept.state, kept.owner_uid, kept.owner_gid, kept.created_at) == (RunState.ACTIVE, ANN, ANN, NOW)
    assert kept.spec.workdir == Path("/home/ann")
    assert ledger.requests == [(ANN, "submit llama")]


def test_a_name_in_use_is_refused_and_the_old_run_stays() -> None:
    ledger = Ledger(run(RunState.FINISHED))
    reply = submit(ledger)
    assert (reply["ok"], reply["code"]) == (False, "name_in_use")
    assert ledger.runs["llama"].state is RunState.FINISHED


@pytest.mark.parametrize(
    ("state", "part"),
    [(RunState.FINISHED, "choose another"), (RunState.STOPPED, "supervisor release llama"), (RunState.HELD, "release")],
)
def test_a_name_in_use_comes_with_the_way_out(state: RunState, part: str) -> None:
    assert part in submit(Ledger(run(state)))["message"]


def test_the_run_file_is_checked_again() -> None:
    reply = submit(Ledger(), text=FILE.replace("max = 2", "max = 0"))
    assert reply["code"] == "bad_input"
    assert "min (1) is more than max (0)" in reply["message"]


@pytest.mark.parametrize(
    "body",
    [{"text": 3}, {"path": "run.toml"}, {"path": None}, {"text": "x" * 600_000}, {"path": "/a\0b"}, {"text": "["}],
)
def test_a_malformed_submission_is_refused(body: dict[str, Any]) -> None:
    ledger = Ledger()
    assert submit(ledger, **body)["code"] == "bad_input"
    assert not ledger.runs


def test_nobody_but_root_submits_for_another() -> None:
    ledger = Ledger()
    assert submit(ledger, peer(BOB), uid=ANN, gid=ANN)["code"] == "not_allowed"
    assert submit(ledger, peer(0), uid=ANN, gid=ANN)["ok"]
    assert ledger.runs["llama"].owner_uid == ANN


def test_who_is_submitted_for_by_root_has_their_own_group_and_never_roots() -> None:
    ledger = Ledger()
    nobody = pwd.getpwnam("nobody")
    assert submit(ledger, peer(0), uid=nobody.pw_uid)["ok"]
    assert (ledger.runs["llama"].owner_uid, ledger.runs["llama"].owner_gid) == (nobody.pw_uid, nobody.pw_gid)
    unknown = submit(Ledger(), peer(0), uid=2**31 - 7)
    assert (unknown["code"], "give its gid too" in unknown["message"]) == ("bad_input", True)


def test_the_umask_and_limits_of_the_persons_shell_are_kept_with_the_run() -> None:
    ledger = Ledger()
    assert submit(ledger, umask=0o007, limits={"MEMLOCK": -1})["ok"]
    assert ledger.runs["llama"].inherited == Inherited(umask=0o007, limits=(SoftLimit(name="MEMLOCK", value=-1),))
    for wrong in ({"umask": 0o1000}, {"umask": True}, {"limits": [1]}, {"limits": {"NOFILE": 2**63}}):
        assert submit(Ledger(), **wrong)["code"] == "bad_input"


@pytest.mark.parametrize("uid", ["0", -1, 2**32, True, None, 1.5])
def test_an_owner_that_is_no_account_is_refused(uid: object) -> None:
    assert submit(Ledger(), peer(0), uid=uid)["code"] == "bad_input"


def test_a_service_without_root_takes_only_its_own_accounts_runs() -> None:
    rights = Rights(service_uid=ANN)
    assert submit(Ledger(), peer(BOB), rights)["code"] == "not_allowed"
    assert submit(Ledger(), peer(ANN), rights)["ok"]


def test_a_dry_run_changes_nothing() -> None:
    ledger = Ledger(run())
    reply = asked(ledger, "stop", run="llama", dry_run=True)
    assert (reply["ok"], reply["dry_run"], reply["state"]) == (True, True, "active")
    assert ledger.runs["llama"].state is RunState.ACTIVE
    empty = Ledger()
    assert submit(empty, dry_run=True)["ok"]
    assert not empty.runs
    assert not empty.requests


@pytest.mark.parametrize(
    ("verb", "body", "words"),
    [
        ("stop", {"run": "llama"}, "dry run: would stop run llama"),
        ("pause", {"run": "llama"}, "dry run: would pause run llama"),
        ("resume", {"run": "llama"}, "dry run: nothing would change: run llama is not paused"),
        ("pause", {}, "dry run: would pause the whole service"),
    ],
)
def test_a_dry_run_says_what_would_happen(verb: str, body: dict[str, Any], words: str) -> None:
    assert asked(Ledger(run()), verb, peer(0), dry_run=True, **body)["message"] == words


def test_a_ledger_that_cannot_be_written_is_an_answer_not_a_crash() -> None:
    reply = submit(FullDisk())
    assert (reply["ok"], reply["code"]) == (False, "ledger")
    assert "nothing was changed" in reply["message"]


def test_the_real_ledger_keeps_what_was_asked(tmp_path: Path) -> None:
    with Store.open(tmp_path / "ledger.db", now=NOW, force_network=True) as store:
        for verb in ("stop", "pause"):
            request = Request(verb=verb, body={"verb": verb, "run": "llama"}, peer=peer())
            assert handle(request, store, NOW, RIGHTS)["code"] == "unknown_run"
        text = {"text": FILE, "path": "/home/ann/run.toml"}
        handle(Request(verb="submit", body=text, peer=peer()), store, NOW, RIGHTS)
        handle(Request(verb="stop", body={"run": "llama"}, peer=peer()), store, NOW, RIGHTS)
        handle(Request(verb="pause", body={}, peer=peer(0)), store, NOW, RIGHTS)
    with Store.open_readonly(tmp_path / "ledger.db") as store:
        assert [(r.name, r.state, r.owner_uid) for r in store.load_runs()] == [("llama", RunState.STOPPING, ANN)]
        assert [r.text for r in store.load_requests()] == ["submit llama", "stop llama", "pause"]
        assert store.load_world(NOW).is_paused


# ---------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("verb", "before", "after"),
    [
        ("stop", RunState.ACTIVE, RunState.STOPPING),
        ("stop", RunState.HELD, RunState.STOPPING),
        ("release", RunState.HELD, RunState.ACTIVE),
        ("release", RunState.STOPPED, RunState.ACTIVE),
    ],
)
def test_a_verb_moves_a_run(verb: str, before: RunState, after: RunState) -> None:
    ledger = Ledger(run(before))
    assert asked(ledger, verb, run="llama")["state"] == after
    assert ledger.runs["llama"].state is after
    assert ledger.runs["llama"].changed_at == NOW


@pytest.mark.parametrize(
    ("verb", "state"),
    [
        ("stop", RunState.STOPPED),
        ("stop", RunState.FINISHED),
        ("release", RunState.ACTIVE),
        ("release", RunState.FINISHED),
        ("release", RunState.STOPPING),
        ("pause", RunState.FINISHED),
        ("resume", RunState.STOPPED),
    ],
)
def test_a_verb_that_makes_no_sense_now_is_refused(verb: str, state: RunState) -> None:
    ledger = Ledger(run(state))
    assert asked(ledger, verb, run="llama")["code"] == "conflict"
    assert ledger.runs["llama"] == run(state)


def test_a_release_forgives_the_restarts_before_it() -> None:
    ledger = Ledger(run(RunState.HELD))
    asked(ledger, "release", run="llama")
    assert ledger.runs["llama"].released_at == NOW


def test_asking_twice_is_as_asking_once() -> None:
    ledger = Ledger(run())
    assert asked(ledger, "stop", run="llama")["ok"]
    assert asked(ledger, "stop", run="llama")["ok"]
    assert len(ledger.requests) == 1


def test_a_run_is_paused_and_resumed() -> None:
    ledger = Ledger(run())
    asked(ledger, "pause", run="llama")
    assert ledger.runs["llama"].is_paused
    asked(ledger, "resume", run="llama")
    assert not ledger.runs["llama"].is_paused


def test_a_resumed_run_does_not_keep_the_pause_as_its_reason() -> None:
    ledger = Ledger(run())
    asked(ledger, "pause", peer(0), run="llama")
    assert ledger.runs["llama"].reason == "paused by root"
    asked(ledger, "resume", peer(0), run="llama")
    assert ledger.runs["llama"].reason == ""


def test_a_pause_does_not_hide_why_a_run_is_held() -> None:
    ledger = Ledger(dataclasses.replace(run(RunState.HELD), reason="three fruitless attempts"))
    for verb in ("pause", "resume"):
        asked(ledger, verb, run="llama")
        assert ledger.runs["llama"].reason == "three fruitless attempts"


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_pausing_a_stopped_run_points_to_release(verb: str) -> None:
    assert "supervisor release llama" in asked(Ledger(run(RunState.STOPPED)), verb, run="llama")["message"]


def test_an_account_without_a_name_is_told_by_its_number() -> None:
    assert "uid 3999999999 may not" in asked(Ledger(run()), "stop", peer(3999999999), run="llama")["message"]


def test_stopping_a_paused_run_does_not_wait_for_its_resumption() -> None:
    ledger = Ledger(run(is_paused=True))
    asked(ledger, "stop", run="llama")
    assert not ledger.runs["llama"].is_paused


def test_the_service_is_paused_by_root_and_not_by_a_user() -> None:
    ledger = Ledger()
    seen = [ledger.is_paused]
    for verb, who in (("pause", peer(BOB)), ("pause", peer(0)), ("resume", peer(BOB, ADMIN_GROUP))):
        asked(ledger, verb, who, run=None)
        seen.append(ledger.is_paused)
    assert seen == [None, None, True, False]
    refused = asked(ledger, "pause", peer(BOB), run=None)["message"]
    assert refused.endswith("may not pause the whole service: root, the service's own account and the admin group may")


def test_resuming_a_stopped_run_names_the_way_on_once() -> None:
    message = asked(Ledger(run(state=RunState.STOPPED)), "resume", run="llama")["message"]
    assert message == "run llama is stopped: `supervisor release llama` starts it again"


@pytest.mark.parametrize("verb", ["stop", "pause", "resume", "release"])
def test_another_user_may_not_change_a_run(verb: str) -> None:
    ledger = Ledger(run())
    assert asked(ledger, verb, peer(BOB), run="llama")["code"] == "not_allowed"
    assert ledger.runs["llama"] == run()


@pytest.mark.parametrize("verb", ["stop", "pause", "resume", "release"])
def test_an_unknown_run_is_told(verb: str) -> None:
    assert asked(Ledger(), verb, run="other")["code"] == "unknown_run"


@pytest.mark.parametrize("name", [3, "../x", "", ["a"], "a b"])
def test_a_name_that_is_none_is_refused(name: object) -> None:
    assert asked(Ledger(run()), "stop", run=name)["code"] == "bad_input"


def test_an_unknown_verb_is_refused_with_the_known_ones() -> None:
    reply = asked(Ledger(), "reboot")
    assert reply["code"] == "bad_input"
    assert "submit" in reply["message"]


def test_pausing_with_a_bad_name_does_not_pause_the_service() -> None:
    ledger = Ledger()
    assert not asked(ledger, "pause", peer(0), run="../x")["ok"]
    assert ledger.is_paused is None


# ---------------------------------------------------------------- rights


@pytest.mark.parametrize(
    ("who", "is_allowed"),
    [(peer(ANN), True), (peer(0), True), (peer(BOB, ADMIN_GROUP), True), (peer(BOB), False), (peer(BOB, ANN), False)],
)
def test_owner_root_and_admins_may_change_a_run(who: Peer, is_allowed: bool) -> None:
    assert authorise("stop", who, ANN, RIGHTS) is is_allowed


def test_anyone_may_submit_and_ask_whether_it_is_there() -> None:
    assert authorise("submit", peer(BOB), None, Rights())
    assert authorise("ping", peer(BOB), None, Rights())
    assert not authorise("pause", peer(BOB), None, Rights())


def test_without_an_admin_group_no_group_helps() -> None:
    assert not authorise("stop", peer(BOB, ADMIN_GROUP), ANN, Rights())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a = " + "9" * 100_000, id="a number of 100,000 digits"),
        pytest.param("a = " + "[" * 100_000, id="nested lists"),
        pytest.param(".".join("a" * 60_000) + " = 1", id="a key of 60,000 parts"),
        pytest.param(f"[{'.'.join('a' * 250)}]\n" + "".join(f"k{n} = 1\n" for n in range(10_000)), id="a deep table"),
        pytest.param("".join(f"k{n}.{'.'.join('a' * 120)} = 1\n" for n in range(500)), id="many deep keys"),
        pytest.param("x = [{" + ".".join("a" * 60_000) + " = 1}]", id="a key in an inline table"),
    ],
)
def test_a_run_file_made_to_break_its_parser_is_refused_at_once(text: str) -> None:
    started = time.process_time()
    reply = submit(Ledger(), text=text)
    assert reply["code"] == "bad_input"
    assert time.process_time() - started < 3
