"""Who is slow: judged on drawn step times, over the totals that ranks tell now and then."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract import AttemptSpec, Straggler
from trainer.launching.stragglers import RankTimes, StragglerPolicy, StragglerWatch, judge_stragglers

COMM_S = 0.01
NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2", 4: "n3", 5: "n3"}


def spec(**changes: object) -> AttemptSpec:
    given = {"straggler_ratio": 1.5, "straggler_window": 20, **changes}
    return AttemptSpec(run="r", attempt=1, command=("t",), nodes=3, **given)  # type: ignore[arg-type]


class Training:
    """Synchronous ranks: a step lasts as long as the slowest one works. Told to the watch every `told_every` steps."""

    def __init__(self, watch: StragglerWatch, nodes: Mapping[int, str] = NODES, *, told_every: int = 3) -> None:
        self.watch, self.nodes, self.told_every = watch, nodes, told_every
        self.now, self.step = 1000.0, 0
        self.timed = dict.fromkeys(nodes, 0)
        self.step_s = dict.fromkeys(nodes, 0.0)
        self.own_s = dict.fromkeys(nodes, 0.0)
        watch.begin(self.now, nodes)

    def run(self, steps: int, own: Callable[[int, int], float]) -> tuple[Straggler, ...]:
        """So many steps in which rank r works own(r, step) seconds; what is judged at the end."""
        found: tuple[Straggler, ...] = ()
        for _ in range(steps):
            self.step += 1
            took = {rank: own(rank, self.step) for rank in self.nodes}
            whole = max(took.values()) + COMM_S
            self.now += whole
            for rank, seconds in took.items():
                self.timed[rank] += 1
                self.step_s[rank] += whole
                self.own_s[rank] += seconds
            if self.step % self.told_every == 0:
                self.tell()
                found = self.watch.judge(self.now)
        return found

    def tell(self) -> None:
        for node in sorted(set(self.nodes.values())):
            ranks = [
                {
                    "rank": rank,
                    "step": self.step,
                    "timed_step": self.step,
                    "timed": self.timed[rank],
                    "step_s": self.step_s[rank],
                    "own_s": self.own_s[rank],
                }
                for rank, where in self.nodes.items()
                if where == node
            ]
            self.watch.feed(self.now, node, ranks)


def named(found: Sequence[Straggler]) -> set[str]:
    return {straggler.node for straggler in found}


# ---------------------------------------------------------------- those that are


def test_a_node_whose_ranks_are_slow_is_named_with_the_figures() -> None:
    training = Training(StragglerWatch(spec()))
    found = training.run(45, lambda rank, _: 0.4 if NODES[rank] == "n2" else 0.2)
    assert named(found) == {"n2"}
    assert {s.rank for s in found} == {2, 3}
    assert found[0].ratio == pytest.approx(2.0, abs=0.01)
    assert "400 ms" in found[0].detail
    assert "200 ms" in found[0].detail
    assert "all 2 ranks of n2" in found[0].detail


def test_pulses_that_spare_most_steps_are_seen() -> None:
    """Stopped for half a second in each second: four of five steps are as fast as ever."""
    training = Training(StragglerWatch(spec(straggler_window=25)))
    found = training.run(80, lambda rank, step: 0.7 if rank == 4 and step % 5 == 0 else 0.1)
    assert {s.rank for s in found} == {4}


def test_of_two_nodes_the_slow_one_is_named_when_the_evidence_is_clear() -> None:
    nodes = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    training = Training(StragglerWatch(spec()), nodes)
    assert training.run(45, lambda rank, _: 0.36 if rank > 1 else 0.2) == ()
    assert named(training.run(45, lambda rank, _: 0.6 if rank > 1 else 0.2)) == {"n2"}


@given(seed=st.integers(0, 2**32), slow=st.sampled_from(sorted(NODES)), factor=st.floats(1.8, 20))
def test_one_slow_rank_among_noisy_ones_is_named_and_no_other(seed: int, slow: int, factor: float) -> None:
    draw = random.Random(seed)
    training = Training(StragglerWatch(spec()), told_every=draw.choice((1, 2, 5, 7)))
    found = training.run(70, lambda rank, _: 0.2 * draw.uniform(0.9, 1.1) * (factor if rank == slow else 1))
    assert [s.rank for s in found] == [slow]


# ---------------------------------------------------------------- those that aren't


@given(seed=st.integers(0, 2**32), spread=st.floats(0, 0.6), slowdown=st.floats(0, 3))
def test_healthy_ranks_with_noise_common_slowness_and_single_pauses_are_never_named(
    seed: int, spread: float, slowdown: float
) -> None:
    draw = random.Random(seed)
    training = Training(StragglerWatch(spec()), told_every=draw.choice((1, 3, 5)))
    pauses = {(draw.randrange(6), draw.randrange(100)): draw.uniform(1, 30)}

    def own(rank: int, step: int) -> float:
        common = 1 + slowdown * (step > 50)  # the data got longer, the clocks lower: for all alike
        return 0.2 * common * (1 + spread * draw.random()) + pauses.get((rank, step), 0)

    for _ in range(10):
        assert training.run(10, own) == ()


@given(own=st.lists(st.floats(0.001, 10), min_size=2, max_size=12))
def test_never_more_than_half_of_the_ranks_are_named_and_none_faster_than_the_median(own: list[float]) -> None:
    step_s = max(own)
    times = [
        RankTimes(rank=rank, node=f"n{rank}", parts_own_s=(s,) * 5, own_s=s, step_s=step_s)
        for rank, s in enumerate(own)
    ]
    found = judge_stragglers(times, StragglerPolicy(ratio=1.3, window=20))
    assert 2 * len(found) <= len(own)
    assert all(own[s.rank] > sorted(own)[(len(own) - 1) // 2] for s in found)


def test_ranks_that_wait_for_a_slow_one_are_not_named_though_the_step_takes_as_long_for_them() -> None:
    training = Training(StragglerWatch(spec()))
    found = training.run(45, lambda rank, _: 5.0 if rank == 1 else 0.05)
    assert [s.rank for s in found] == [1]


def test_where_waits_are_not_seen_all_look_slow_and_none_is_named() -> None:
    training = Training(StragglerWatch(spec()))
    assert training.run(45, lambda *_: 2.0) == ()


def test_a_slow_rank_that_holds_nobody_up_is_none() -> None:
    """Its own time is three times the median, and a hundredth of the step."""
    times = [
        RankTimes(rank=r, node=f"n{r}", parts_own_s=(s,) * 5, own_s=s, step_s=1.0)
        for r, s in enumerate((0.005, 0.005, 0.005, 0.015))
    ]
    assert judge_stragglers(times, StragglerPolicy(ratio=1.5)) == ()


def test_one_fast_rank_makes_nobody_slow_and_a_rank_below_the_limit_is_none() -> None:
    own = (0.15, 0.2, 0.2, 0.2, 0.2, 0.27)
    training = Training(StragglerWatch(spec()))
    assert training.run(45, lambda rank, _: own[rank]) == ()


def test_a_node_speaks_for_its_own_ranks_only() -> None:
    watch = StragglerWatch(spec())
    watch.begin(0.0, NODES)
    for step in range(1, 60):
        for rank, node in NODES.items():
            told = {"rank": rank, "timed_step": step, "timed": step, "step_s": 0.3 * step, "own_s": 0.2 * step}
            watch.feed(float(step), node, [told])
        lie = {"rank": 4, "timed_step": step, "timed": step, "step_s": 0.3 * step, "own_s": 9.0 * step}
        watch.feed(float(step), "n1", [lie])
        assert watch.judge(float(step)) == ()


def test_with_two_of_three_slow_nobody_is_named() -> None:
    nodes = {0: "n1", 1: "n2", 2: "n3"}
    training = Training(StragglerWatch(spec()), nodes)
    assert training.run(60, lambda rank, _: 0.2 if rank == 0 else 0.6) == ()


def test_without_a_ratio_nothing_is_looked_for() -> None:
    training = Training(StragglerWatch(spec(straggler_ratio=0.0)))
    assert training.run(60, lambda rank, _: 9.0 if rank == 0 else 0.1) == ()


def test_what_a_beat_says_is_not_believed_blindly() -> None:
    watch = StragglerWatch(spec())
    watch.begin(0.0, NODES)
    strange: list[dict[str, object]] = [
        {},
        {"rank": 99, "timed_step": 1, "timed": 1, "step_s": 1, "own_s": 1},
        {"rank": 0, "timed_step": "x", "timed": 1, "step_s": 1, "own_s": 1},
        {"rank": [0], "timed_step": 1, "timed": 1, "step_s": 1, "own_s": 1},
        {"rank": 0, "timed_step": float("nan"), "timed": 1, "step_s": 1, "own_s": float("inf")},
        {"rank": 4, "timed_step": 1, "timed": 1, "step_s": 1, "own_s": 1},  # another node's
    ]
    watch.feed(1.0, "n1", strange)
    assert watch.judge(2.0) == ()


# ---------------------------------------------------------------- over time


def test_a_straggler_stays_one_until_it_is_clearly_better() -> None:
    training = Training(StragglerWatch(spec()))
    assert named(training.run(45, lambda rank, _: 0.32 if rank == 0 else 0.2)) == {"n1"}
    assert named(training.run(45, lambda rank, _: 0.28 if rank == 0 else 0.2)) == {"n1"}  # under the limit of 0.3
    assert training.run(45, lambda rank, _: 0.22 if rank == 0 else 0.2) == ()


def test_a_new_start_forgets_what_was_found() -> None:
    watch = StragglerWatch(spec())
    assert Training(watch).run(45, lambda rank, _: 1.0 if rank == 0 else 0.2)
    assert Training(watch, {0: "n4", 1: "n2", 2: "n3"}).run(12, lambda *_: 0.2) == ()


def test_steps_spent_saving_do_not_count_against_a_rank() -> None:
    """Rank 0 saves in each fifth step; such steps are left out by the rank itself: its totals stand still."""
    training = Training(StragglerWatch(spec()))
    for _ in range(12):
        assert training.run(4, lambda *_: 0.2) == ()
        training.step += 1
        training.now += 3.0
        training.tell()
        assert training.watch.judge(training.now) == ()


def test_a_slow_node_is_replaced_once_a_checkpoint_newer_than_the_finding_is_verified_and_a_spare_is_there() -> None:
    watch = StragglerWatch(spec(straggler_action="replace"))
    training = Training(watch)
    training.run(45, lambda rank, _: 0.6 if NODES[rank] == "n3" else 0.2)
    assert watch.replacement(3, has_spare=True) is None  # older than the finding: work would be lost
    assert watch.replacement(training.step, has_spare=False) is None
    found = watch.replacement(training.step, has_spare=True)
    assert found is not None
    assert found.node == "n3"


def test_a_slow_node_is_only_reported_when_that_is_the_action() -> None:
    watch = StragglerWatch(spec())
    Training(watch).run(45, lambda rank, _: 0.6 if rank == 0 else 0.2)
    assert watch.replacement(1000, has_spare=True) is None
