"""When a training is called hung, and which rank is named: on built beats, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.trainer.hangs.replay import make_spec
from trainer.contract import Progress
from trainer.launching.hangs import Hang, HangWatch

NODES = ("n0", "n1")


class Told:
    """A launcher's watch, told of two ranks on each of two nodes; time passes in cycles of 0.1 s or more."""

    def __init__(self, *, start_s: float = 1000.0, **options: Any) -> None:
        self.watch = HangWatch(make_spec(**options))
        self.now = start_s
        self.ranks: dict[int, dict[str, Any]] = {}
        self.silent_nodes: set[str] = set()
        self.progress: Progress | None = None
        self.watch.begin(0, NODES, self.now)
        for rank in range(4):
            self.tell(rank)

    def tell(self, rank: int, *, step: int = 10, phase: str = "step", limit_s: float | None = 5.0, **more: Any) -> None:
        self.ranks[rank] = {"rank": rank, "step": step, "phase": phase, "limit_s": limit_s, "age_s": 0.0, **more}

    def tell_all(self, **news: Any) -> None:
        for rank in range(4):
            self.tell(rank, **news)

    def pass_time(self, seconds: float) -> Hang | None:
        """Let everybody be silent for so long; the first hang that is judged."""
        until = self.now + seconds
        cycle_s = 0.1 if seconds <= 60 else 0.5
        while self.now < until:
            self.now += cycle_s
            for entry in self.ranks.values():
                entry["age_s"] += cycle_s
            self.feed()
            self.watch.feed_progress(self.progress, self.now)
            hang = self.watch.judge(self.now)
            if hang is not None:
                return hang
        return None

    def feed(self) -> None:
        for index, node in enumerate(NODES):
            if node not in self.silent_nodes:
                self.watch.feed(node, [self.ranks[r] for r in self.ranks if r // 2 == index], self.now)


def test_a_step_that_does_not_end_is_a_hang_seven_seconds_later() -> None:
    told = Told()

    assert told.pass_time(6.9) is None
    hang = told.pass_time(0.5)

    assert hang is not None
    assert hang.kind == "hang"
    assert hang.cause.startswith("no progress for 7.1 s in phase step after step 10 (limit 7.0 s)")
    assert (hang.ranks, hang.hint, hang.nodes) == ((), "", ())


def test_evidence_is_asked_for_before_the_limit_is_reached() -> None:
    told = Told()
    told.pass_time(4.5)
    assert not told.watch.suspects(told.now)
    told.pass_time(1.0)

    assert told.watch.suspects(told.now)


def test_the_first_step_has_the_limit_of_a_start_and_after_each_start_again() -> None:
    """HD-01."""
    told = Told(phase_bounds_s={"start": (60.0, 7200.0), "step": (7.0, 600.0)})
    told.tell_all(step=-1, phase="start", limit_s=7200.0)
    assert told.pass_time(48 * 60) is None
    told.tell_all(step=1, limit_s=600.0)
    assert told.pass_time(8.0) is None
    told.tell_all(step=2, limit_s=40.0)

    told.watch.begin(1, NODES, told.now)
    told.tell_all(step=2, phase="start", limit_s=7200.0)

    assert told.pass_time(48 * 60) is None
    assert told.pass_time(80 * 60) is not None


def test_after_the_last_step_there_is_time_to_end() -> None:
    """HD-05."""
    told = Told()
    told.tell_all(step=10000, phase="end", limit_s=20.0)  # whatever was announced

    assert told.pass_time(299) is None


def test_one_rank_that_ends_slowly_is_no_hang_of_those_that_wait_for_it() -> None:
    """HD-05."""
    told = Told()
    told.tell_all(step=10000)
    told.tell(0, step=10000, phase="end", limit_s=300.0)

    assert told.pass_time(240) is None


@pytest.mark.parametrize("jump_s", [90.0, 3600.0, -3600.0])
def test_the_time_of_day_plays_no_part(jump_s: float) -> None:
    """HD-06: the writer's clock jumps; ages are of the nodes' monotonic clocks."""
    told = Told()
    for step in range(10, 30):
        told.tell_all(step=step)
        told.progress = Progress(
            attempt=1, step=step, seq=step, phase="step", limit_s=5.0, time=1e9 + jump_s * (step % 2)
        )
        assert told.pass_time(2.0) is None

    assert told.pass_time(10.0) is not None


def test_a_rank_that_stalls_twice_is_found_twice_and_its_node_is_then_to_blame() -> None:
    """HD-07: the finding is cleared when progress is seen."""
    told = Told()
    told.tell(3, step=9)
    first = told.pass_time(600)
    assert first is not None
    first = told.watch.settle(first)
    told.tell_all(step=11)
    assert told.pass_time(1.0) is None
    told.tell_all(step=12)
    told.tell(3, step=11)

    second = told.pass_time(3600)

    assert second is not None
    second = told.watch.settle(second)
    assert (first.ranks, first.hint, first.nodes) == ((3,), "n1", ())
    assert (second.ranks, second.hint, second.nodes) == ((3,), "n1", ("n1",))


@pytest.mark.parametrize("phase", ["step", "save", "eval", "start", "restore", "compile", "end"])
def test_a_maximum_of_zero_turns_a_phase_off(phase: str) -> None:
    """HD-08."""
    told = Told(phase_bounds_s={phase: (7.0, 0.0)})
    told.tell_all(phase=phase)

    assert told.pass_time(4000) is None


def test_a_maximum_bounds_what_is_announced() -> None:
    """HD-08."""
    told = Told(phase_bounds_s={"step": (7.0, 300.0)})
    told.tell_all(limit_s=7200.0)

    assert told.pass_time(299.0) is None
    assert told.pass_time(2.0) is not None


def test_the_rank_that_is_behind_is_named_and_its_node_is_a_hint() -> None:
    told = Told()
    told.tell_all(step=11)
    told.tell(2, step=10)

    hang = told.pass_time(10)

    assert hang is not None
    assert (hang.ranks, hang.hint, hang.nodes) == ((2,), "n1", ())
    assert "waiting for rank 2 on n1" in hang.cause
    assert hang.evidence == ("rank 2 is at step 10, others at 11",)


@pytest.mark.parametrize(("state", "by"), [("T", "process"), ("D", "kernel")])
def test_a_stopped_process_is_named_though_all_did_the_same_steps(state: str, by: str) -> None:
    told = Told()
    told.tell(1, state=state)
    told.tell(0, state="S")

    hang = told.pass_time(10)

    assert hang is not None
    assert (hang.ranks, hang.named_by) == ((1,), by)


def test_others_wait_for_one_that_announces_an_evaluation_until_its_own_limit_has_passed() -> None:
    told = Told()
    told.tell(0, phase="eval", limit_s=100.0)

    assert told.pass_time(99) is None
    assert told.pass_time(2) is not None


def test_a_rank_that_does_not_come_to_a_save_that_all_make_together_is_missed_at_once() -> None:
    told = Told()
    saved = {"entered": {"save": 3}}
    told.tell_all(phase="save", limit_s=60.0, **saved)
    told.tell(3, entered={"save": 2})

    hang = told.pass_time(8)

    assert hang is not None
    assert hang.ranks == (3,)


def test_a_rank_that_makes_saves_alone_is_waited_for() -> None:
    told = Told()
    told.tell(0, phase="save", limit_s=60.0, entered={"save": 3})

    assert told.pass_time(55) is None


def test_a_rank_that_computes_or_reads_has_three_times_as_long() -> None:
    told = Told()
    told.tell_all(busy=True)

    assert told.pass_time(20.5) is None
    assert told.pass_time(2) is not None


def test_a_rank_that_is_told_nothing_of_while_the_others_go_on_is_not_called_hung_at_once() -> None:
    told = Told()
    for step in range(11, 140):
        for rank in range(3):
            told.tell(rank, step=step)
        assert told.pass_time(2.0) is None

    for step in range(140, 200):
        for rank in range(3):
            told.tell(rank, step=step)
        hang = told.pass_time(2.0)
        if hang is not None:
            break
    assert hang is not None
    assert hang.ranks == (3,)


def test_a_debugger_may_hold_a_rank_as_long_as_it_likes() -> None:
    told = Told()
    told.tell(1, state="t")

    assert told.pass_time(3600) is None


def test_a_silence_that_ended_by_itself_is_allowed_twice_as_long_from_then_on() -> None:
    told = Told()
    assert told.pass_time(6.5) is None
    told.tell_all(step=11)

    assert told.pass_time(12.5) is None
    told.tell_all(step=12)
    assert told.pass_time(24.5) is None
    assert told.pass_time(2.0) is not None


def test_an_evaluation_that_nobody_announces_is_stopped_once_or_twice_and_not_for_ever() -> None:
    told = Told()
    stopped = 0
    for launch in range(1, 6):
        hang = told.pass_time(60.0)
        if hang is None:
            break
        assert any("if it was no hang" in sentence for sentence in told.watch.settle(hang).evidence)
        stopped += 1
        told.watch.begin(launch, NODES, told.now)
        told.tell_all(step=launch)

    assert stopped == 2


def test_a_process_that_is_stopped_gives_nobody_more_time() -> None:
    told = Told()
    for launch in range(1, 4):
        told.tell(1, state="T")
        hang = told.pass_time(8.0)
        assert hang is not None
        told.watch.settle(hang)
        told.watch.begin(launch, NODES, told.now)
        told.tell_all(step=launch)


def test_nothing_is_judged_while_a_node_has_no_news() -> None:
    told = Told()
    told.pass_time(2.0)
    told.silent_nodes = {"n1"}

    assert told.pass_time(60) is None


def test_a_launcher_that_was_stopped_calls_nobody_hung_for_it() -> None:
    told = Told()
    told.pass_time(5.0)
    told.now += 600.0  # the launcher alone: when it goes on, the news is what it was

    assert told.watch.judge(told.now) is None
    told.tell_all(step=4000)
    assert told.pass_time(6.0) is None


def test_malformed_and_foreign_news_is_passed_over() -> None:
    told = Told()
    told.watch.feed("n9", [{"rank": 9, "step": 1, "phase": "step", "age_s": 1e9}], told.now)
    bad: Sequence[Mapping[str, Any]] = [{}, {"rank": "x"}, {"rank": 0, "step": None, "phase": 1, "age_s": []}]
    told.watch.feed("n0", bad, told.now)

    assert told.watch.judge(told.now) is None


# ---------------------------------------------------------------- without ranks that tell


def _unlinked(**options: Any) -> Told:
    told = Told(**options)
    told.ranks.clear()
    return told


def _progress(seq: int, **news: Any) -> Progress:
    return Progress(**{"attempt": 1, "step": seq, "seq": seq, "phase": "step", "limit_s": 20.0, "time": 0.0, **news})


def test_the_progress_file_is_judged_where_no_rank_has_a_line() -> None:
    told = _unlinked()
    told.progress = _progress(1)
    assert told.pass_time(19.0) is None
    told.progress = _progress(2)
    assert told.pass_time(19.0) is None

    hang = told.pass_time(2.0)

    assert hang is not None
    assert (hang.step, hang.ranks) == (2, ())


def test_a_progress_file_that_cannot_be_read_proves_nothing() -> None:
    told = _unlinked()
    told.progress = _progress(1)
    told.pass_time(15.0)
    told.progress = None

    assert told.pass_time(3600) is None


def test_the_progress_of_another_start_is_not_this_ones() -> None:
    told = _unlinked()
    told.progress = _progress(1, launch=4)

    assert told.pass_time(3600) is None


def _prints(told: Told, seconds: float, size: int, *, cpu: Sequence[float]) -> Hang | None:
    """Ranks that only print: their logs and CPU times are looked at every five seconds."""
    until = told.now + seconds
    hang = None
    while told.now < until and hang is None:
        for rank in range(4):
            before = told.ranks.get(rank, {}).get("cpu_s", 0.0)
            told.ranks[rank] = {"rank": rank, "log_bytes": size, "cpu_s": before + 5 * cpu[rank], "age_s": 0.0}
        hang = told.pass_time(5.0)
    return hang


def test_a_program_that_only_prints_is_judged_by_its_usual_pauses_and_widely() -> None:
    told = _unlinked()
    for size in range(15):
        assert _prints(told, 200.0, size, cpu=[0, 0, 0, 0]) is None

    assert _prints(told, 1750, 14, cpu=[0, 0, 0, 0]) is None
    hang = _prints(told, 300, 14, cpu=[0, 0, 0, 0])

    assert hang is not None
    assert "nothing new in the logs" in hang.cause
    told.watch.settle(hang)
    told.watch.begin(1, NODES, told.now)
    for size in range(15):
        _prints(told, 200.0, 100 + size, cpu=[0, 0, 0, 0])
    assert _prints(told, 3000, 114, cpu=[0, 0, 0, 0]) is None, "it was stopped for a pause once, and is given longer"


def test_of_programs_that_only_print_the_one_that_alone_is_idle_is_named() -> None:
    told = _unlinked()
    for size in range(15):
        _prints(told, 10.0, size, cpu=[1, 1, 1, 1])

    hang = _prints(told, 4000, 14, cpu=[1, 1, 0, 1])

    assert hang is not None
    assert (hang.ranks, hang.hint) == ((2,), "n1")


@pytest.mark.parametrize(("most_s", "after_s"), [(600.0, 600.0), (0.0, None)])
def test_the_bound_of_a_start_is_that_of_a_program_that_only_prints(most_s: float, after_s: float | None) -> None:
    told = _unlinked(phase_bounds_s={"start": (60.0, most_s)})
    for size in range(3):
        _prints(told, 10.0, size, cpu=[0, 0, 0, 0])

    hang = _prints(told, 4000, 2, cpu=[0, 0, 0, 0])

    assert (hang and hang.silent_s) == (after_s and pytest.approx(after_s, abs=10.0))


def test_a_program_of_which_nothing_is_known_is_not_judged() -> None:
    told = _unlinked()

    assert told.pass_time(10_000) is None
