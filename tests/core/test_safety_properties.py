"""What must hold for every world and snapshot, however odd. Drawn; plans are laid over the world as a ledger would."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm.types import JobFlag, JobRecord, JobState, NodeBase, NodeRecord
from supervisor.core.drains import drain_limit
from supervisor.core.reconcile import reconcile
from supervisor.model import (
    Attempt,
    AttemptEnd,
    AttemptState,
    Cause,
    Checkpoint,
    CheckpointSpec,
    CheckpointState,
    CheckpointView,
    DrainPolicy,
    Fresh,
    Intent,
    IntentKind,
    IntentState,
    Interruption,
    LossFault,
    NodeChecks,
    NodeMemory,
    Plan,
    Policy,
    PortProbe,
    Run,
    RunState,
    RunView,
    Seen,
    Snapshot,
    Stale,
    Verdict,
    Verification,
    World,
)
from tests.core.builders import NOW, RUN, SPEC, STALE, ago, checkpoint, checkpoint_view, over, spec
from trainer.contract import (
    PHASES,
    CheckResult,
    Divergence,
    ExitRecord,
    InterruptionRecord,
    LaunchReport,
    NodeBeat,
    Outcome,
    Progress,
)

PROPERTY = settings(deadline=None, max_examples=100)
NAMES = [f"n{i}" for i in range(1, 6)]

ages = st.sampled_from([0.0, 0.5, 1.0, 3.5, 9.0, 25.0, 100.0, 4000.0])
instants = ages.map(ago)
names = st.sampled_from(NAMES)
launches = st.integers(0, 3)  # starts of the training inside one job


def maybe(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), of)


# ---------------------------------------------------------------- what the ledger may hold

specs = st.builds(
    lambda low, more, multiple, spares, complete, keep, ahead_s, on_nan, back: spec(
        nodes={"min": low, "max": low + more, "multiple_of": multiple, "spares": spares},
        checkpoint={"resume_from_complete": complete, "keep_last": keep, "verify_on_head_max_bytes": 100},
        restart={"queue_ahead_s": ahead_s},
        divergence={"on_nan": on_nan, "on_spike": on_nan, "rollback_checkpoints": back},
    ),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 2),
    st.integers(0, 2),
    st.booleans(),
    st.integers(2, 4),
    st.sampled_from([0.0, 600.0]),
    st.sampled_from(["hold", "rollback"]),
    st.integers(1, 2),
)
runs = st.builds(
    Run,
    spec=specs,
    state=st.sampled_from([RunState.ACTIVE, RunState.ACTIVE, RunState.HELD, RunState.STOPPING]),
    is_paused=st.booleans(),
    reason=st.sampled_from(["", "waiting"]),
    released_at=maybe(instants),
    save_asked_at=maybe(instants),
    final_step=maybe(st.just(300)),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Attempt, ...]:
    """Attempts as a ledger may hold them: all but the last one over."""
    count = draw(st.integers(0, 4))
    return tuple(_attempt(draw, n, is_last=n == count) for n in range(1, count + 1))


ENDS = [end for end in AttemptEnd if end is not AttemptEnd.NOT_NEEDED]


def _queued_ahead(draw: st.DrawFn, number: int) -> Attempt:
    """One that is queued behind the newest attempt, or was."""
    is_known, is_over = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    return Attempt(
        run="gpt",
        number=number,
        token=f"sup:gpt:{number}",
        state=AttemptState.OVER if is_over else AttemptState.AHEAD,
        nodes_wanted=draw(st.integers(1, 4)),
        exclude=tuple(draw(st.lists(names, unique=True, max_size=2))),
        planned_at=ago(5000),
        job_id=100 + number if is_known else None,
        submitted_at=draw(instants) if is_known else None,
        over_at=draw(instants) if is_over else None,
        end=AttemptEnd.NOT_NEEDED if is_over else None,
        end_detail="not needed" if is_over else "",
        is_job_gone=is_over and (not is_known or draw(st.booleans())),
    )


def _submission(draw: st.DrawFn, number: int) -> Intent:
    return Intent(
        kind=IntentKind.SUBMIT,
        key=f"submit:gpt:{number}",
        reason="go",
        run="gpt",
        attempt=number,
        tries=draw(st.integers(0, 2)),
        tried_at=draw(maybe(instants)),
    )


def _attempt(draw: st.DrawFn, number: int, *, is_last: bool) -> Attempt:
    states = [s for s in AttemptState if s is not AttemptState.AHEAD]
    state = draw(st.sampled_from(states)) if is_last else AttemptState.OVER
    is_known = state is not AttemptState.PLANNED and (state is not AttemptState.OVER or draw(st.booleans()))
    resumed = draw(st.sampled_from([0, 100, 200, 300]))
    return Attempt(
        run="gpt",
        number=number,
        token=f"sup:gpt:{number}",
        state=state,
        nodes_wanted=2,
        planned_at=ago(5000),
        resume_step=resumed,
        resume_path=str(SPEC.paths.checkpoint(resumed, 1)) if resumed else "",
        job_id=100 + number if is_known else None,
        submitted_at=draw(instants) if is_known else None,
        started_at=draw(maybe(instants)) if is_known else None,
        stepped_at=draw(maybe(instants)) if is_known else None,
        nodes=tuple(draw(st.lists(names, unique=True, max_size=3))) if is_known else (),
        over_at=draw(instants) if state is AttemptState.OVER else None,
        end=draw(st.sampled_from(ENDS)) if state is AttemptState.OVER else None,
        exit_code=draw(st.sampled_from([None, 0, 75, 1])),
        is_job_gone=state is AttemptState.OVER and draw(st.booleans()),
        phase=draw(st.sampled_from(["", "suspended", *PHASES])),
        progress_at=draw(maybe(instants)),
        last_step=draw(maybe(st.integers(0, 400))),
        save_costs_s=tuple(draw(st.lists(st.floats(0, 100), max_size=3))),
        saved_step=draw(st.sampled_from([None, None, None, 200])),
        loss_fault=draw(maybe(faults)) if state is AttemptState.OVER else None,
    )


faults = st.builds(
    LossFault,
    kind=st.sampled_from(["nan", "spike"]),
    onset_step=maybe(st.integers(0, 400)),
    first_sample=st.integers(0, 100),
    end_sample=st.integers(0, 200),
    repeats=st.integers(0, 3),
    is_rolled_back=st.booleans(),
)
divergences = st.builds(
    Divergence,
    attempt=st.just(0),
    kind=st.sampled_from(["nan", "spike", "odd"]),
    onset_step=st.integers(-10, 400),
    step=st.integers(-10, 400),
    first_sample=st.integers(-10, 4000),
    end_sample=st.integers(-10, 4000),
    time=st.just(0.0),
)


@st.composite
def checkpoint_rows(draw: st.DrawFn) -> tuple[Checkpoint, ...]:
    keys = draw(st.lists(st.tuples(st.sampled_from([100, 200, 300]), st.integers(1, 3)), unique=True, max_size=5))
    states = [s for s in CheckpointState if s is not CheckpointState.PRUNED]
    return tuple(
        checkpoint(
            step,
            number,
            draw(st.sampled_from(states)),
            size_bytes=draw(st.sampled_from([10, 1000])),
            verified_at=draw(maybe(instants)),
            load_failures=draw(st.integers(0, 2)),
        )
        for step, number in keys
    )


memories = st.builds(
    NodeMemory,
    node=names,
    verdict=st.sampled_from(Verdict),
    reason=st.just("disk full"),
    since_at=instants,
    failing=st.sampled_from([(), ("disk",)]),
    failed_sweeps=st.integers(0, 3),
    is_drained_by_us=st.booleans(),
    drain_reason=st.sampled_from(["", "ours"]),
    drained_at=maybe(instants),
)
settled = st.builds(
    Intent,
    kind=st.sampled_from([IntentKind.DRAIN, IntentKind.CANCEL]),
    key=st.uuids().map(str),
    reason=st.just("because"),
    node=names,
    job_id=st.integers(101, 104),
    state=st.sampled_from([IntentState.DONE, IntentState.REFUSED]),
    settled_at=maybe(instants),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    run, attempts = draw(runs), draw(histories())
    intents = []
    if attempts and attempts[-1].state is AttemptState.PLANNED and draw(st.booleans()):
        intents = [_submission(draw, attempts[-1].number)]
    has_aside = bool(attempts) and draw(st.booleans())
    aside = (_queued_ahead(draw, attempts[-1].number + 1),) if has_aside else ()
    intents += [_submission(draw, a.number) for a in aside if not a.is_over and a.job_id is None]
    drained = draw(st.lists(names, unique=True, max_size=2))
    intents += [Intent(kind=IntentKind.DRAIN, key=f"drain:{n}", reason="broken", node=n) for n in drained]
    return World(
        is_paused=draw(st.booleans()) and draw(st.booleans()),
        runs=(run,),
        attempts={"gpt": attempts},
        aside={"gpt": aside},
        checkpoints={"gpt": draw(checkpoint_rows())},
        nodes={m.node: m for m in draw(st.lists(memories, max_size=4))},
        open_intents=tuple(intents),
        settled_intents=tuple(draw(st.lists(settled, max_size=4))),
    )


# ---------------------------------------------------------------- what may be seen

job_records = st.builds(
    lambda number, extra, state, flags, comment, **rest: JobRecord(
        job_id=100 + number + extra,
        state=None if flags else state,
        raw_state="X",
        flags=flags,
        comment=comment or f"sup:gpt:{number}",
        **rest,
    ),
    number=st.integers(1, 5),
    limit_at=maybe(st.sampled_from([ago(-100), ago(-100_000)])),
    extra=st.sampled_from([0, 0, 0, 50]),
    state=st.sampled_from(JobState),
    flags=st.sampled_from([frozenset(), frozenset(), frozenset({JobFlag.COMPLETING}), frozenset({JobFlag.STOPPED})]),
    comment=st.sampled_from(["", "", "sup:other:1"]),
    name=st.sampled_from(["gpt", "other"]),
    nodes=st.lists(names, unique=True, max_size=3).map(tuple),
    submit_at=maybe(instants),
    exit_code=st.sampled_from([None, 0, 1, 75, 77, 93]),
    restarts=st.sampled_from([0, 0, 0, 1]),
)
node_records = st.builds(
    lambda name, base, flags, reason: NodeRecord(name=name, base=base, flags=flags, reason=reason),
    names,
    st.sampled_from(NodeBase),
    st.sets(st.sampled_from(["DRAIN", "NOT_RESPONDING", "COMPLETING", "MAINTENANCE"]), max_size=2).map(frozenset),
    st.sampled_from(["", "ours", "alice: bad PSU"]),
)
beats = st.dictionaries(
    names, st.builds(NodeBeat, state=st.sampled_from(["running", "spare", "ended", "starting"]), age_s=ages), max_size=4
)
checks = st.builds(
    NodeChecks,
    node=names,
    at=instants,
    is_complete=st.booleans(),
    results=st.lists(
        st.builds(CheckResult, check=st.sampled_from(["disk", "shm"]), ok=st.sampled_from([True, False, None])),
        max_size=2,
    ).map(tuple),
)


@st.composite
def views(draw: st.DrawFn, number: int) -> RunView:
    shown = draw(st.lists(st.tuples(st.sampled_from([100, 200, 300, 400]), st.integers(1, 4)), unique=True, max_size=5))
    return RunView(
        attempt=number,
        progress=draw(
            maybe(
                st.builds(
                    Seen,
                    value=st.builds(
                        Progress,
                        attempt=st.sampled_from([number, number, 99]),
                        step=st.integers(-1, 400),
                        phase=st.sampled_from(PHASES),
                        limit_s=maybe(st.just(5.0)),
                        final_step=maybe(st.just(300)),
                        launch=maybe(launches),
                        save_blocking_s=maybe(st.floats()),
                        save_total_s=maybe(st.floats()),
                        saved_step=maybe(st.just(200)),
                        save_failures=st.integers(-1, 3),
                        save_error=st.sampled_from(["", "[Errno 28] No space left on device"]),
                        time=st.just(0.0),
                    ),
                    unchanged_s=ages,
                )
            )
        ),
        launch=draw(
            maybe(
                st.builds(
                    Seen,
                    value=st.builds(
                        LaunchReport,
                        attempt=st.just(number),
                        job_id=st.just(100 + number),
                        seq=st.just(1),
                        time=st.just(0.0),
                        host=names,
                        phase=st.sampled_from(["running", "running", "checking", "recovering"]),
                        nodes=beats,
                        launch=launches,
                        training=st.lists(names, max_size=3).map(tuple),
                        resume_step=st.sampled_from([0, 100]),
                        why=st.sampled_from(["", "n2 is lost"]),
                    ),
                    unchanged_s=ages,
                )
            )
        ),
        exit=draw(
            maybe(
                st.builds(
                    ExitRecord,
                    attempt=st.just(number),
                    job_id=st.just(100 + number),
                    exit_code=st.sampled_from([0, 1, 75, 76, 77, 78, 79, 80, 81, 93, 137, 143]),
                    reason=st.sampled_from(["ended", ""]),
                    node=maybe(names),
                    time=st.just(0.0),
                    bad_nodes=st.lists(names, max_size=2).map(tuple),
                    launches=launches.map(lambda launch: launch + 1),
                    next=st.sampled_from(["", "resubmit", "hold"]),
                )
            )
        ),
        interruptions=tuple(_interruption(draw, number, launch) for launch in sorted(draw(st.sets(launches)))),
        divergence=draw(maybe(divergences.map(lambda found: replace(found, attempt=number)))),
        outcome=draw(maybe(st.just(Outcome(attempt=number, exit_code=78, message="bad shard")))),
        checkpoints=tuple(_checkpoint_view(draw, step, attempt) for step, attempt in shown),
        unknown_checkpoints=tuple(draw(st.lists(st.tuples(st.just(100), st.integers(1, 2)), max_size=1))),
    )


def _interruption(draw: st.DrawFn, attempt: int, launch: int) -> InterruptionRecord:
    return InterruptionRecord(
        attempt=attempt,
        launch=launch,
        kind=draw(st.sampled_from(["node_lost", "check_failed", "process", "hang", "?"])),
        cause=draw(st.sampled_from(["n2 is lost", ""])),
        nodes=tuple(draw(st.lists(names, max_size=2))),
        training=tuple(draw(st.lists(names, max_size=2))),
        last_step=draw(maybe(st.sampled_from([100, 250]))),
        detected_at=draw(instants).timestamp(),
        resumed_at=draw(maybe(instants.map(lambda at: at.timestamp()))),
    )


def _checkpoint_view(draw: st.DrawFn, step: int, attempt: int) -> CheckpointView:
    return checkpoint_view(
        step,
        attempt,
        size_bytes=draw(st.sampled_from([10, 1000])),
        is_complete=draw(st.integers(0, 3)) > 0,
        is_verified_by_nodes=draw(st.booleans()),
        is_rejected_by_nodes=draw(st.integers(0, 4)) == 0,
    )


@st.composite
def snapshots(draw: st.DrawFn, known: World) -> Snapshot:
    attempts = known.attempts["gpt"]
    number = attempts[-1].number if attempts else 0
    asked_at = draw(st.sampled_from([NOW, NOW, ago(20)]))

    def fresh(value: Any) -> Any:
        return (
            Stale(why="no answer", since_at=NOW)
            if draw(st.integers(0, 4)) == 0
            else Fresh(value=value, asked_at=asked_at)
        )

    jobs = {j.job_id: j for j in draw(st.lists(job_records, max_size=4))}
    nodes = {name: NodeRecord(name=name, base=NodeBase.IDLE) for name in NAMES[: draw(st.integers(0, 5))]}
    nodes |= {n.name: n for n in draw(st.lists(node_records, max_size=3))}
    verifications = st.builds(
        Verification,
        run=st.just("gpt"),
        step=st.sampled_from([100, 200, 300]),
        attempt=st.integers(1, 3),
        ok=st.sampled_from([True, False, None]),
        detail=st.just("read"),
        started_at=instants,
    )
    causes = st.builds(
        Cause,
        kind=st.just("gpu"),
        sentence=st.just("XID 79"),
        node=maybe(names),
        is_curable=st.booleans(),
        blames_node=st.booleans(),
    )
    cause = draw(maybe(causes))
    probes = draw(st.dictionaries(names, ages, max_size=5))
    return Snapshot(
        jobs=fresh(jobs),
        nodes=fresh(nodes),
        ended=draw(st.sampled_from([None, fresh({j.job_id: j for j in jobs.values() if j.is_ended})])),
        runs={} if draw(st.integers(0, 9)) == 0 else {"gpt": fresh(draw(views(number)))},
        causes={"gpt": cause} if cause else {},
        ports={n: PortProbe(node=n, address=n, silent_s=s, failures=3 if s else 0) for n, s in probes.items()},
        sweeps=tuple(draw(st.lists(checks, max_size=4))),
        verifications=tuple(draw(st.lists(verifications, max_size=2))),
    )


policies = st.builds(
    Policy,
    drain=st.builds(
        DrainPolicy,
        is_enabled=st.sampled_from([True, True, False]),
        max_nodes=st.integers(0, 3),
        max_fraction=st.sampled_from([0.1, 0.5, 1.0]),
    ),
    is_observe_only=st.sampled_from([False, False, False, True]),
)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[World, Snapshot, Policy]:
    known = draw(worlds())
    return known, draw(snapshots(known)), draw(policies)


# ---------------------------------------------------------------- a ledger in memory


def apply(known: World, plan: Plan) -> World:
    """The world as the ledger gives it back after this plan was committed, and nothing done."""
    rows: dict[Any, Any] = {("run", r.name): r for r in known.runs}
    rows |= {(a.run, a.number): a for a in (*known.attempts["gpt"], *known.aside.get("gpt", ()))}
    rows |= {("checkpoint", c.key): c for c in known.checkpoints["gpt"]}
    rows |= {("node", m.node): m for m in known.nodes.values()}
    rows |= {("interruption", i.attempt, i.launch): i for i in known.interruptions}
    for record in (f.record for f in plan.facts):
        if isinstance(record, Run):
            rows["run", record.name] = record
        elif isinstance(record, Attempt):
            rows[record.run, record.number] = record
        elif isinstance(record, Checkpoint):
            rows["checkpoint", record.key] = record
        elif isinstance(record, NodeMemory):
            rows["node", record.node] = record
        elif isinstance(record, Interruption):
            rows["interruption", record.attempt, record.launch] = record
    attempts = sorted((r for r in rows.values() if isinstance(r, Attempt)), key=lambda a: a.number)
    gone = {i.key for i in (*plan.withdrawn, *plan.settled)}
    still_open = [i for i in known.open_intents if i.key not in gone]
    return replace(
        known,
        runs=tuple(r for k, r in rows.items() if k[0] == "run"),
        attempts={"gpt": tuple(a for a in attempts if not a.is_aside)},
        aside={"gpt": tuple(a for a in attempts if a.is_aside)},
        checkpoints={"gpt": tuple(r for k, r in rows.items() if k[0] == "checkpoint")},
        nodes={r.node: r for k, r in rows.items() if k[0] == "node"},
        interruptions=tuple(r for k, r in rows.items() if k[0] == "interruption" and r.caught_up_at is None),
        open_intents=(*still_open, *plan.intents),
        settled_intents=(*known.settled_intents, *plan.settled, *plan.withdrawn),
    )


def submitted(known: World, plan: Plan) -> list[Attempt]:
    """Attempts that are meant to train: new ones, and those that were queued ahead and whose turn has come."""
    after = {a.number: a for a in apply(known, plan).attempts["gpt"]}
    meant = {i.attempt for i in plan.intents if i.kind in (IntentKind.SUBMIT, IntentKind.PROMOTE)}
    return [attempt for number, attempt in after.items() if number in meant]


# ---------------------------------------------------------------- properties


@PROPERTY
@given(scenes())
def test_no_world_and_no_snapshot_leads_to_two_live_attempts(scene: tuple[World, Snapshot, Policy]) -> None:
    known, seen, policy = scene
    after = apply(known, reconcile(known, seen, policy, NOW))
    assert sum(not a.is_over for a in after.attempts["gpt"]) <= 1
    assert sum(not a.is_over for a in after.aside["gpt"]) <= 1


@PROPERTY
@given(scenes())
def test_no_job_that_was_queued_ahead_is_left_behind(scene: tuple[World, Snapshot, Policy]) -> None:
    """A run that does not go on keeps none, and what was not needed is cancelled until Slurm has no more of it."""
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    after = apply(known, plan)
    (run,) = after.runs
    unsettled = {i.attempt for i in after.open_intents if i.kind is IntentKind.SUBMIT and i.tries > 0}
    if run.state is not RunState.ACTIVE:
        assert {a.number for a in after.aside["gpt"] if not a.is_over} <= unsettled
    over = [a for a in after.aside["gpt"] if a.is_over and not a.is_job_gone]
    assert all(a.job_id is not None for a in over)
    if (
        isinstance(seen.jobs, Fresh)
        and not known.is_paused
        and not policy.is_observe_only
        and not known.settled_intents
    ):
        meant = {i.job_id for i in reconcile(after, seen, policy, NOW).intents} | {i.job_id for i in after.open_intents}
        live = {j.job_id for j in seen.jobs.value.values() if j.is_live and j.comment.startswith("sup:gpt:")}
        assert {a.job_id for a in over} & live <= meant


@PROPERTY
@given(scenes())
def test_one_attempt_at_most_is_queued_ahead_of_each_and_none_of_a_run_that_does_not_ask_for_it(
    scene: tuple[World, Snapshot, Policy],
) -> None:
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    waits = [f.record for f in plan.facts if isinstance(f.record, Attempt) and f.record.state is AttemptState.AHEAD]
    if {a.number for a in waits} - {a.number for a in known.aside.get("gpt", ())}:
        (run,) = known.runs
        assert run.spec.restart.queue_ahead_s > 0
        assert known.attempts["gpt"][-1].state in (AttemptState.SUBMITTED, AttemptState.RUNNING)
        assert [a for a in known.aside["gpt"] if a.number > known.attempts["gpt"][-1].number] == []


@PROPERTY
@given(scenes())
def test_everything_that_is_learnt_or_meant_has_its_reason(scene: tuple[World, Snapshot, Policy]) -> None:
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    assert all(i.reason for i in plan.intents)
    assert all(f.reason for f in plan.facts)
    assert all(i.outcome for i in (*plan.withdrawn, *plan.settled))
    assert plan.wake_after_s >= 0


@PROPERTY
@given(scenes())
def test_nothing_is_drained_blind_over_the_budget_or_over_anothers_drain(
    scene: tuple[World, Snapshot, Policy],
) -> None:
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    meant = [i for i in plan.intents if i.kind is IntentKind.DRAIN]
    if isinstance(seen.nodes, Stale) or known.is_paused or policy.is_observe_only or not policy.drain.is_enabled:
        assert meant == []
        return
    assert all(not seen.nodes.value[i.node].is_drain_set for i in meant)
    since = NOW - timedelta(seconds=policy.drain.window_s)
    done = [
        i
        for i in known.settled_intents
        if i.kind is IntentKind.DRAIN and i.state is IntentState.DONE and i.settled_at and i.settled_at >= since
    ]
    under_way = [i for i in known.open_intents if i.kind is IntentKind.DRAIN]
    if meant:
        assert len(done) + len(under_way) + len(meant) <= drain_limit(policy, len(seen.nodes.value))


@PROPERTY
@given(scenes())
def test_a_run_resumes_only_from_what_is_verified_or_what_its_file_allows(
    scene: tuple[World, Snapshot, Policy],
) -> None:
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    (run,) = known.runs
    for attempt in submitted(known, plan):
        rows = apply(known, plan).checkpoints["gpt"]
        usable = {CheckpointState.VERIFIED}
        if run.spec.checkpoint.resume_from_complete:
            usable.add(CheckpointState.COMPLETE)
        chosen = [c for c in rows if c.path == attempt.resume_path]
        if attempt.resume_path:
            assert [c.state for c in chosen if c.step == attempt.resume_step and c.state in usable]
        else:
            assert all(c.state in (CheckpointState.FENCED, CheckpointState.PRUNED) for c in rows)


@PROPERTY
@given(scenes())
def test_no_attempt_starts_blind_or_while_an_earlier_job_may_live(scene: tuple[World, Snapshot, Policy]) -> None:
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    if submitted(known, plan):
        assert isinstance(seen.jobs, Fresh)
        assert isinstance(seen.nodes, Fresh)
        assert isinstance(seen.runs.get("gpt"), Fresh)
        after = apply(known, plan)
        earlier = [a for a in (*after.attempts["gpt"], *after.aside["gpt"]) if a.is_over]
        assert all(a.is_job_gone for a in earlier)
        ids = {a.job_id for a in earlier if a.job_id is not None}
        live = [j for i, j in seen.jobs.value.items() if i in ids and j.is_live and j.comment != "sup:other:1"]
        assert live == []


@PROPERTY
@given(scenes())
def test_only_our_own_jobs_are_cancelled(scene: tuple[World, Snapshot, Policy]) -> None:
    known, seen, policy = scene
    if not isinstance(seen.jobs, Fresh):
        return
    for intent in reconcile(known, seen, policy, NOW).intents:
        job = seen.jobs.value.get(intent.job_id or 0)
        if intent.kind is IntentKind.CANCEL and job is not None:
            assert job.comment.startswith("sup:gpt:")


@PROPERTY
@given(scenes())
def test_an_attempt_that_is_over_stays_over_and_its_late_checkpoints_never_count(
    scene: tuple[World, Snapshot, Policy],
) -> None:
    known, seen, policy = scene
    after = apply(known, reconcile(known, seen, policy, NOW))
    was_over = {a.number for a in known.attempts["gpt"] if a.is_over}
    assert was_over <= {a.number for a in after.attempts["gpt"] if a.is_over}
    before = {c.key for c in known.checkpoints["gpt"]}
    late = [c for c in after.checkpoints["gpt"] if c.key not in before and c.attempt in was_over]
    assert all(c.state is CheckpointState.FENCED for c in late)


@PROPERTY
@given(scenes())
def test_two_verified_checkpoints_are_never_pruned(scene: tuple[World, Snapshot, Policy]) -> None:
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    pruned = {(i.step, i.attempt) for i in plan.intents if i.kind is IntentKind.PRUNE}
    rows = apply(known, plan).checkpoints["gpt"]
    verified = sorted(c.key for c in rows if c.state is CheckpointState.VERIFIED)
    assert not pruned & set(verified[-2:])
    assert not (pruned and len(verified) < 2)


@PROPERTY
@given(scenes())
def test_a_plan_that_is_committed_adds_nothing_when_the_same_is_seen_again(
    scene: tuple[World, Snapshot, Policy],
) -> None:
    """Level-triggered: killed between commit and act and started again, the daemon means the same and no more."""
    known, seen, policy = scene
    once = replace(seen, sweeps=(), verifications=())  # these are events: each is told once
    after = apply(known, reconcile(known, once, policy, NOW))
    if known.aside["gpt"]:  # what is seen of its job counts once it is the newest; what it holds up goes on after it
        for _ in range(3):
            after = apply(after, reconcile(after, once, policy, NOW))
    again = reconcile(after, once, policy, NOW)
    assert (again.facts, again.intents, again.withdrawn, again.settled) == ((), (), (), ())


@PROPERTY
@given(scenes())
def test_while_every_source_is_silent_nothing_is_meant_but_what_needs_no_source(
    scene: tuple[World, Snapshot, Policy],
) -> None:
    known, _, policy = scene
    blind = Snapshot(jobs=STALE, nodes=STALE, ended=STALE, runs={"gpt": STALE})
    plan = reconcile(known, blind, policy, NOW)
    kinds = {i.kind for i in plan.intents}
    assert not kinds & {IntentKind.SUBMIT, IntentKind.DRAIN, IntentKind.PRUNE}
    ended = {a.number for a in apply(known, plan).attempts["gpt"] if a.is_over}
    was = {a.number for a in known.attempts["gpt"] if a.is_over}
    (run,) = known.runs
    assert ended == was or run.state is RunState.STOPPING


def test_the_scenes_are_not_vacuous() -> None:
    """A run that may start does start: the properties above are about something."""
    known = World(runs=(RUN,), attempts={"gpt": (over(),)}, checkpoints={"gpt": (checkpoint(100),)})
    nodes = {n: NodeRecord(name=n, base=NodeBase.IDLE) for n in NAMES}
    seen = Snapshot(
        jobs=Fresh(value={}, asked_at=NOW),
        nodes=Fresh(value=nodes, asked_at=NOW),
        runs={"gpt": Fresh(value=RunView(attempt=1, checkpoints=(checkpoint_view(100),)), asked_at=NOW)},
    )
    assert [a.resume_step for a in submitted(known, reconcile(known, seen, Policy(), NOW))] == [100]
    assert CheckpointSpec().keep_last >= 2


# ---------------------------------------------------------------- a loss that went wrong


@PROPERTY
@given(scenes())
def test_nothing_that_is_suspect_is_resumed_from_or_believed_again(scene: tuple[World, Snapshot, Policy]) -> None:
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    suspect = {c.path for c in known.checkpoints["gpt"] if c.state is CheckpointState.SUSPECT}
    changed = [f.record for f in plan.facts if isinstance(f.record, Checkpoint)]
    assert not [c for c in changed if c.path in suspect and c.state is not CheckpointState.SUSPECT]
    before = {a.number: a for a in (*known.attempts["gpt"], *known.aside.get("gpt", ()))}
    planned = [f.record for f in plan.facts if isinstance(f.record, Attempt) and f.record.number not in before]
    assert not [a for a in planned if a.resume_path in suspect]


@PROPERTY
@given(scenes())
def test_what_was_made_since_the_onset_is_suspect_with_the_end_itself(scene: tuple[World, Snapshot, Policy]) -> None:
    known, seen, policy = scene
    plan = reconcile(known, seen, policy, NOW)
    after = {c.key: c for c in known.checkpoints["gpt"]}
    after |= {f.record.key: f.record for f in plan.facts if isinstance(f.record, Checkpoint)}
    before = {a.number: a for a in known.attempts["gpt"]}
    for fact in plan.facts:
        ended = fact.record
        if not isinstance(ended, Attempt) or ended.loss_fault is None or before[ended.number].is_over:
            continue
        onset = ended.loss_fault.onset_step
        believed = [c for c in after.values() if c.state in (CheckpointState.VERIFIED, CheckpointState.COMPLETE)]
        assert onset is None or all(c.step < onset for c in believed)
        is_forgiven = known.runs[0].released_at == NOW
        if ended.end is AttemptEnd.DIVERGED and not ended.loss_fault.is_rolled_back and not is_forgiven:
            assert run_state_after(plan, known) is not RunState.ACTIVE


def run_state_after(plan: Plan, known: World) -> RunState:
    return next((f.record.state for f in plan.facts if isinstance(f.record, Run)), known.runs[0].state)
