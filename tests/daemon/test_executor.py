"""One committed intent at a time: done, refused or open, by looking and never by guessing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slurm.types import JobState, SubmitRequest
from supervisor.config import NotifySettings, Settings
from supervisor.execute import Executor, render_attempt_spec
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Checkpoint,
    CheckpointSpec,
    CheckpointState,
    Fact,
    Intent,
    IntentKind,
    IntentState,
    NodeMemory,
    NodesSpec,
    Plan,
    Record,
    Run,
    RunSpec,
    RunState,
    Verdict,
)
from supervisor.store import Store
from tests.fakes import FakeClock, FakeSlurm, Fault
from tests.sim.standins import Disk, SimOwners, SimReadbacks, SimReader
from trainer.contract import ExitRecord, LaunchReport, attempt_environment

SPEC = RunSpec(
    name="gpt",
    command=("train.py", "--resume={resume_from}"),
    root=Path("/shared/runs"),
    nodes=NodesSpec(min=2, max=3),
)


@dataclass
class Bench:
    """An executor over a real ledger and a simulated cluster."""

    store: Store
    clock: FakeClock = field(default_factory=FakeClock)
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        self.slurm = FakeSlurm(clock=self.clock)
        self.disk = Disk(run_dir=SPEC.run_dir)
        self.verifier = SimReadbacks(self.disk, self.clock)
        owners = SimOwners(SimReader(self.disk, self.clock, lambda _what: None))
        self.executor = Executor(self.slurm, self.store, self.settings, self.clock, owners, self.verifier)
        self.store.add_run(Run(spec=SPEC), self.clock.now())

    def mean(self, intent: Intent, *records: Record) -> None:
        facts = tuple(Fact(record=r, reason="test") for r in records)
        self.store.commit(Plan(facts=facts, intents=(intent,)), self.clock.now())

    def settle(self, *, is_slurm_answering: bool = True) -> int:
        world = self.store.load_world(self.clock.now())
        return self.executor.settle(world.open_intents, world, is_slurm_answering=is_slurm_answering)

    def after(self, seconds: float) -> int:
        self.slurm.advance(seconds)
        return self.settle()

    @property
    def intent(self) -> Intent:
        return self.store.load_intents()[-1]

    @property
    def attempt(self) -> Attempt:
        return self.store.load_attempts("gpt")[-1]

    def set_run(self, **changes: object) -> None:
        run = self.store.load_run("gpt")
        assert run is not None
        self.store.set_run(replace(run, **changes), self.clock.now(), "test")  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    clock = FakeClock()
    with Store.open(tmp_path / "ledger.db", now=clock.now()) as store:
        yield Bench(store, clock)


def planned(bench: Bench, **changes: object) -> Attempt:
    one = Attempt(run="gpt", number=1, token="sup:gpt:1", nodes_wanted=2, planned_at=bench.clock.now())
    return replace(one, **changes)  # type: ignore[arg-type]


def submit(bench: Bench) -> None:
    intent = Intent(kind=IntentKind.SUBMIT, key="submit:gpt:1", reason="go", run="gpt", attempt=1)
    bench.mean(intent, planned(bench))


# ---------------------------------------------------------------- submit


def test_a_submission_is_done_once_and_its_job_is_known(bench: Bench) -> None:
    submit(bench)
    assert bench.settle() == 1
    assert (bench.intent.state, bench.intent.tries) == (IntentState.DONE, 1)
    assert (bench.attempt.state, bench.attempt.job_id) == (AttemptState.SUBMITTED, 1)
    assert bench.settle() == 0


def test_the_attempts_files_are_there_before_its_job(bench: Bench) -> None:
    bench.disk.is_hanging = True
    submit(bench)
    bench.settle()
    assert (bench.slurm.jobs(), bench.intent.state, bench.intent.tries) == ((), IntentState.OPEN, 0)


def test_a_job_whose_reply_was_lost_is_found_by_its_token(bench: Bench) -> None:
    """SB-05."""
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    submit(bench)
    bench.settle()
    assert bench.intent.state is IntentState.OPEN
    bench.after(1.5)
    assert (bench.attempt.job_id, len(bench.slurm.jobs())) == (1, 1)


def test_a_request_that_was_lost_is_repeated_only_after_its_time(bench: Bench) -> None:
    """SB-05: after both sources were asked, and longer than Slurm may take it in."""
    bench.slurm.plan("submit", Fault.LOST_REQUEST)
    submit(bench)
    bench.settle()
    bench.after(5)
    bench.after(9)
    assert bench.slurm.jobs() == ()
    bench.after(2)
    assert (bench.attempt.job_id, bench.intent.tries) == (1, 2)


def test_a_request_that_arrives_late_is_not_repeated(bench: Bench) -> None:
    """SB-06."""
    bench.slurm.plan("submit", Fault.LATE)
    submit(bench)
    bench.settle()
    for _ in range(8):
        bench.after(3)
    assert len(bench.slurm.jobs()) == 1
    assert bench.attempt.job_id == 1


def test_of_two_jobs_with_one_token_the_older_stays(bench: Bench) -> None:
    """SB-06: and it is told."""
    bench.slurm.late = bench.slurm.late * 10
    bench.slurm.plan("submit", Fault.LATE, Fault.LOST_REPLY)
    submit(bench)
    bench.settle()
    bench.after(16)
    bench.after(40)
    states = {j.job_id: j.is_live for j in bench.slurm.jobs()}
    assert states == {1: True, 2: False}
    assert bench.attempt.job_id == 1
    assert bench.slurm.job(2).start_at is None
    assert "twin 2 was cancelled" in bench.intent.outcome


def test_a_controller_that_cannot_be_reached_costs_the_run_nothing(bench: Bench) -> None:
    """SB-10: tried again more and more seldom, the attempt stays the same."""
    bench.slurm.plan("submit", *[Fault.UNAVAILABLE] * 3)
    submit(bench)
    tried_after: list[int] = []
    for second in range(60):
        before = bench.slurm.calls.count("submit")
        bench.after(1)
        if bench.slurm.calls.count("submit") > before:
            tried_after.append(second)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried_after)]
    assert (bench.attempt.number, bench.attempt.state, len(bench.slurm.jobs())) == (1, AttemptState.SUBMITTED, 1)
    assert len(tried_after) == 4
    assert gaps == sorted(gaps)


def test_a_look_up_that_does_not_answer_settles_nothing(bench: Bench) -> None:
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    bench.slurm.plan("find_by_token", Fault.UNAVAILABLE)
    submit(bench)
    bench.settle()
    bench.after(60)
    assert (bench.intent.state, bench.attempt.state) == (IntentState.OPEN, AttemptState.PLANNED)
    bench.after(60)
    assert (bench.attempt.job_id, len(bench.slurm.jobs())) == (1, 1)


def test_a_look_up_that_is_refused_does_not_mean_that_the_submission_was(bench: Bench) -> None:
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    bench.slurm.plan("find_by_token", Fault.REFUSED)
    submit(bench)
    bench.settle()
    bench.after(60)
    assert bench.attempt.state is AttemptState.PLANNED
    bench.after(60)
    assert bench.attempt.job_id == 1


def test_a_submission_that_slurm_refuses_ends_its_attempt(bench: Bench) -> None:
    """SB-10: with Slurm's words; the run is held by it (core)."""
    bench.slurm.plan("submit", Fault.REFUSED)
    submit(bench)
    bench.settle()
    assert bench.intent.state is IntentState.REFUSED
    assert (bench.attempt.end, bench.attempt.is_job_gone) == (AttemptEnd.REFUSED, True)


def test_a_stop_between_a_lost_request_and_its_repetition_ends_the_attempt(bench: Bench) -> None:
    bench.slurm.plan("submit", Fault.LOST_REQUEST)
    submit(bench)
    bench.settle()
    bench.set_run(state=RunState.STOPPING)
    bench.after(20)
    assert (bench.attempt.end, bench.slurm.jobs()) == (AttemptEnd.STOPPED, ())


def test_a_stop_after_a_lost_reply_still_adopts_the_job_so_that_it_can_be_cancelled(bench: Bench) -> None:
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    submit(bench)
    bench.settle()
    bench.set_run(state=RunState.STOPPING)
    bench.after(20)
    assert bench.attempt.job_id == 1


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_job_that_ran_and_was_forgotten_while_the_daemon_was_down_is_known_by_its_traces(
    bench: Bench, has_ended: bool
) -> None:
    """Without accounting its token is found nowhere; a second submission would do all the work again."""
    bench.slurm.min_job_age_s = 30
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    submit(bench)
    bench.settle()
    bench.slurm.advance(20)
    bench.slurm.end_job(1)
    if has_ended:
        bench.disk.exits[1] = ExitRecord(attempt=1, job_id=1, exit_code=0, reason="finished", time=0.0)
    else:
        bench.disk.launches[1] = LaunchReport(
            attempt=1, job_id=1, seq=1, time=0.0, host="n1", phase="running", nodes={}
        )
    bench.after(900)
    assert (bench.attempt.job_id, len(bench.slurm.jobs())) == (1, 1)


def test_a_trace_that_names_somebody_elses_live_job_is_not_believed(bench: Bench) -> None:
    """The owner of the run directory wrote the number; as root we would cancel it one day."""
    bench.slurm.plan("submit", Fault.LOST_REQUEST)
    submit(bench)
    bench.settle()
    theirs = SubmitRequest(
        script=Path("/x/batch.sh"), token="other", job_name="theirs", nodes=1, output=Path("/x/job.log")
    )
    victim = bench.slurm.submit(theirs).job_id
    bench.disk.exits[1] = ExitRecord(attempt=1, job_id=victim, exit_code=0, reason="finished", time=0.0)
    bench.after(60)
    assert bench.attempt.job_id not in (None, victim)


def test_a_lost_submission_is_not_repeated_while_its_traces_cannot_be_looked_for(bench: Bench) -> None:
    bench.slurm.plan("submit", Fault.LOST_REQUEST)
    submit(bench)
    bench.settle()
    bench.disk.is_hanging = True
    bench.after(60)
    assert (bench.slurm.jobs(), bench.intent.state) == ((), IntentState.OPEN)


def test_an_attempt_that_is_not_planned_any_more_is_not_submitted(bench: Bench) -> None:
    intent = Intent(kind=IntentKind.SUBMIT, key="submit:gpt:1", reason="go", run="gpt", attempt=1)
    bench.mean(intent, planned(bench, state=AttemptState.OVER))
    bench.settle()
    assert (bench.intent.state, bench.slurm.jobs()) == (IntentState.WITHDRAWN, ())


def test_a_job_of_another_run_under_our_token_is_not_adopted(bench: Bench) -> None:
    bench.slurm.plan("submit", Fault.LOST_REPLY)
    submit(bench)
    bench.settle()
    forged = replace(bench.slurm.request_of(1), job_name="somebody-elses")
    bench.slurm.end_job(1)
    bench.slurm.next_job_id = 1
    bench.slurm.submit(forged)
    bench.after(5)
    assert bench.attempt.job_id is None


@pytest.mark.parametrize("is_whole_service", [True, False])
def test_what_was_meant_before_a_pause_waits_for_its_end(bench: Bench, is_whole_service: bool) -> None:
    submit(bench)
    if is_whole_service:
        bench.store.set_paused(True, bench.clock.now(), "alice")
    else:
        bench.set_run(is_paused=True)
    bench.settle()
    assert (bench.slurm.jobs(), bench.intent.state) == ((), IntentState.OPEN)
    bench.store.set_paused(False, bench.clock.now(), "alice")
    bench.set_run(is_paused=False)
    bench.settle()
    assert bench.attempt.job_id == 1


def test_in_a_pause_a_lost_reply_is_looked_up_and_a_lost_request_not_repeated(bench: Bench) -> None:
    bench.slurm.plan("submit", Fault.LOST_REQUEST)
    submit(bench)
    bench.settle()
    bench.store.set_paused(True, bench.clock.now(), "alice")
    bench.after(60)
    assert (bench.slurm.jobs(), bench.slurm.calls[-1]) == ((), "find_by_token")


def test_while_slurm_does_not_answer_nothing_is_tried(bench: Bench) -> None:
    submit(bench)
    assert bench.settle(is_slurm_answering=False) == 0
    assert "submit" not in bench.slurm.calls


def test_the_launcher_is_told_where_to_resume_and_how_many_nodes_train(bench: Bench) -> None:
    one = planned(bench, resume_path="/shared/runs/gpt/checkpoints/step-5.a1", resume_step=5, spares=1)
    spec = render_attempt_spec(Run(spec=SPEC), one, bench.settings)
    assert spec.command == ("train.py", "--resume=/shared/runs/gpt/checkpoints/step-5.a1")
    assert (spec.nodes, spec.resume_step, spec.attempt) == (2, 5, 1)


def test_the_training_is_told_of_the_tiers_of_its_checkpoints(bench: Bench) -> None:
    tiers = CheckpointSpec(local_dir="$TMPDIR", object_url="s3://b/p", object_keep_last=5, upload_mb_per_s=1.5)
    spec = render_attempt_spec(Run(spec=replace(SPEC, checkpoint=tiers)), planned(bench), bench.settings)
    told = attempt_environment(spec, SPEC.run_dir)
    assert (told["SUPERVISOR_LOCAL_DIR"], told["SUPERVISOR_OBJECT_URL"]) == ("$TMPDIR", "s3://b/p")
    assert (told["SUPERVISOR_OBJECT_KEEP_LAST"], told["SUPERVISOR_UPLOAD_BYTES_PER_S"]) == ("5", "1500000")


# ---------------------------------------------------------------- cancel


def test_a_cancel_ends_the_job(bench: Bench) -> None:
    submit(bench)
    bench.settle()
    bench.mean(Intent(kind=IntentKind.CANCEL, key="cancel:1", reason="over", run="gpt", attempt=1, job_id=1))
    bench.settle()
    assert bench.slurm.job(1).state is JobState.CANCELLED
    assert bench.intent.state is IntentState.DONE


def test_a_cancel_without_an_answer_is_tried_again(bench: Bench) -> None:
    submit(bench)
    bench.settle()
    bench.slurm.plan("cancel", Fault.LOST_REQUEST)
    bench.mean(Intent(kind=IntentKind.CANCEL, key="cancel:1", reason="over", run="gpt", attempt=1, job_id=1))
    bench.settle()
    assert (bench.intent.state, bench.slurm.job(1).is_live) == (IntentState.OPEN, True)
    bench.after(2)
    assert (bench.intent.state, bench.slurm.job(1).is_live) == (IntentState.DONE, False)


def test_a_number_that_somebody_else_has_got_while_slurm_was_away_is_not_cancelled(bench: Bench) -> None:
    """A controller that lost its state begins at job 1 again."""
    submit(bench)
    bench.settle()
    bench.mean(Intent(kind=IntentKind.CANCEL, key="cancel:1", reason="over", run="gpt", attempt=1, job_id=1))
    bench.settle(is_slurm_answering=False)
    theirs = replace(bench.slurm.request_of(1), token="", job_name="theirs")
    bench.slurm._jobs.clear()
    bench.slurm.next_job_id = 1
    assert bench.slurm.add_job(theirs, user="bob") == 1
    bench.after(60)
    assert bench.intent.state is IntentState.DONE
    assert bench.slurm.job(1).is_live


# ---------------------------------------------------------------- drain


def drain(bench: Bench, node: str = "n1") -> None:
    intent = Intent(
        kind=IntentKind.DRAIN, key=f"drain:{node}", reason="disk full", node=node, text="supervisor: disk full"
    )
    bench.mean(intent, NodeMemory(node=node, verdict=Verdict.BROKEN, reason="disk full"))


def memory(bench: Bench, node: str = "n1") -> NodeMemory:
    return next(m for m in bench.store.load_nodes() if m.node == node)


def test_a_drain_is_read_back_and_is_ours(bench: Bench) -> None:
    drain(bench)
    bench.settle()
    assert bench.slurm.node("n1").reason == "supervisor: disk full"
    assert (bench.intent.state, memory(bench).is_drained_by_us) == (IntentState.DONE, True)
    assert [e.event for e in bench.store.load_node_events("n1")] == ["node.drained"]


def test_a_drain_of_another_is_never_changed(bench: Bench) -> None:
    """Case DP-01."""
    bench.slurm.set_drain("n1", "ADMIN SHUTDOWN bad PSU", user="alice")
    drain(bench)
    bench.settle()
    assert bench.slurm.node("n1").reason == "ADMIN SHUTDOWN bad PSU"
    assert (bench.intent.state, memory(bench).is_drained_by_us) == (IntentState.REFUSED, False)
    assert "drain" not in bench.slurm.calls


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.LOST_REQUEST])
def test_a_drain_without_an_answer_is_looked_at_again_and_set_once(bench: Bench, fault: Fault) -> None:
    bench.slurm.plan("drain", fault)
    drain(bench)
    bench.settle()
    assert bench.intent.state is IntentState.OPEN
    bench.after(2)
    assert (bench.intent.state, memory(bench).is_drained_by_us) == (IntentState.DONE, True)
    assert bench.slurm.calls.count("drain") == (1 if fault is Fault.LOST_REPLY else 2)


def test_a_drain_that_slurm_refuses_is_an_event_of_the_node(bench: Bench) -> None:
    bench.slurm.plan("drain", Fault.REFUSED)
    drain(bench)
    bench.settle()
    assert (bench.intent.state, memory(bench).is_drained_by_us) == (IntentState.REFUSED, False)
    assert [e.event for e in bench.store.load_node_events("n1")] == ["drain.refused"]


def test_a_node_that_left_the_cluster_is_not_drained(bench: Bench) -> None:
    drain(bench, "n9")
    bench.settle()
    assert bench.intent.state is IntentState.REFUSED


# ---------------------------------------------------------------- checkpoints


def stored(bench: Bench) -> Checkpoint:
    bench.disk.publish(5, 1, bench.clock.now())
    path = str(SPEC.paths.checkpoint(5, 1))
    return Checkpoint(
        run="gpt",
        step=5,
        attempt=1,
        state=CheckpointState.COMPLETE,
        path=path,
        first_seen_at=bench.clock.now(),
    )


def test_a_reading_is_started_once_and_stays_open_until_its_result_is_observed(bench: Bench) -> None:
    bench.mean(
        Intent(kind=IntentKind.VERIFY, key="verify:gpt:5:1", reason="new", run="gpt", attempt=1, step=5), stored(bench)
    )
    assert bench.settle() == 0
    assert bench.verifier.is_busy("gpt", 5, 1)
    assert bench.intent.state is IntentState.OPEN
    bench.after(5)
    assert [v.ok for v in bench.verifier.collect()] == [True]


def test_a_pruned_checkpoint_is_gone_and_known_to_be(bench: Bench) -> None:
    bench.mean(Intent(kind=IntentKind.PRUNE, key="p", reason="old", run="gpt", attempt=1, step=5), stored(bench))
    bench.settle()
    assert bench.disk.checkpoints == {}
    assert [c.state for c in bench.store.load_checkpoints("gpt")] == [CheckpointState.PRUNED]


def test_a_prune_while_the_file_system_hangs_is_tried_again(bench: Bench) -> None:
    bench.mean(Intent(kind=IntentKind.PRUNE, key="p", reason="old", run="gpt", attempt=1, step=5), stored(bench))
    bench.disk.is_hanging = True
    bench.settle()
    waiting = bench.intent.state
    bench.disk.is_hanging = False
    bench.after(2)
    assert (waiting, bench.intent.state) == (IntentState.OPEN, IntentState.DONE)


@pytest.mark.parametrize("kind", [IntentKind.PRUNE, IntentKind.VERIFY])
def test_work_on_a_run_that_is_gone_is_withdrawn(bench: Bench, kind: IntentKind) -> None:
    bench.mean(Intent(kind=kind, key="x", reason="old", run="other", attempt=1, step=5))
    bench.settle()
    assert bench.intent.state is IntentState.WITHDRAWN


# ---------------------------------------------------------------- notify


@pytest.mark.parametrize(
    ("command", "state"),
    [
        ((), IntentState.DONE),
        ((sys.executable, "-c", "pass"), IntentState.DONE),
        ((sys.executable, "-c", "raise SystemExit(3)"), IntentState.REFUSED),
        (("/nowhere/notify",), IntentState.REFUSED),
    ],
    ids=["log only", "command", "command fails", "no such command"],
)
def test_a_person_is_told_once_whatever_comes_of_it(
    tmp_path: Path, command: tuple[str, ...], state: IntentState
) -> None:
    clock = FakeClock()
    with Store.open(tmp_path / "ledger.db", now=clock.now()) as store:
        bench = Bench(store, clock, replace(Settings(), notify=NotifySettings(command=command)))
        bench.mean(Intent(kind=IntentKind.NOTIFY, key="n", reason="held", run="gpt", text="run gpt is held"))
        bench.settle()
        assert bench.intent.state is state
        assert bench.settle() == 0


def test_acts_are_done_in_their_order_with_the_cancel_first(bench: Bench) -> None:
    drain(bench)
    submit(bench)
    bench.mean(Intent(kind=IntentKind.CANCEL, key="cancel:7", reason="over", run="gpt", attempt=1, job_id=7))
    bench.settle()
    acts = [c for c in bench.slurm.calls if c in ("submit", "cancel", "drain")]
    assert acts == ["cancel", "submit", "drain"]
