"""Trainings drawn by chance, in virtual time: what ranks tell their nodes, and the nodes the launcher.

A training is a list of rounds. In each, every rank spends some time by itself, announced as a phase or not, and then
all meet. The line tells twice a second and at a change of phase, a beat goes twice a second: as the real ones do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.trainer.hangs.replay import Trace
from trainer.progress import PhaseLimits

TELL_S = 0.5
BEAT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """`own_s`: of each rank, before all meet. `phase` "": a step that ends with the meeting."""

    own_s: tuple[float, ...]
    phase: str = ""
    ranks: tuple[int, ...] = ()  # of a phase: those that announce it; the others are in their next step already


@dataclass(slots=True)
class _Rank:
    limits: PhaseLimits = field(default_factory=PhaseLimits)
    changes: list[tuple[float, int, str, float, dict[str, int]]] = field(default_factory=list)
    step: int = -1
    phase: str = "start"
    mark: float = 0.0
    entered: dict[str, int] = field(default_factory=dict)

    def change(self, at: float) -> None:
        limit = self.limits.limit_s(self.phase)
        self.changes.append((at, self.step, self.phase, limit, dict(self.entered)))

    def told(self, now: float, shift: float) -> tuple[float, tuple[float, int, str, float, dict[str, int]]] | None:
        """What the node knows at `now`, and since when."""
        known = None
        last_phase = ""
        for change in self.changes:
            tick = -(-(change[0] - shift) // TELL_S) * TELL_S + shift
            heard = change[0] if change[2] != last_phase else tick
            last_phase = change[2]
            if heard > now:
                break
            known = (heard, change)
        return known


def run(rounds: Sequence[Round], world: int, per_node: int, rng: random.Random, *, hung: int | None) -> Trace:
    """Play the rounds; after the last one, `hung` (a rank, or None) never comes to the next meeting."""
    ranks = [_Rank() for _ in range(world)]
    now = 0.0
    for rank in ranks:
        rank.change(0.0)
    for number, round_ in enumerate(rounds):
        now = _play(round_, number, ranks, now)
    hung_s = now if hung is not None else None
    end = now + (60.0 if hung is not None else 0.0)
    shifts = [rng.random() * TELL_S for _ in ranks]
    beats: list[list[Any]] = []
    nodes = [f"n{index}" for index in range(world // per_node)]
    for index, node in enumerate(nodes):
        at = rng.random() * BEAT_S
        while at < end:
            own = range(index * per_node, (index + 1) * per_node)
            told = [(rank, ranks[rank].told(at, shifts[rank])) for rank in own]
            beats.append([node, at, [_entry(rank, known, at) for rank, known in told if known is not None]])
            at += BEAT_S * (1 + 0.1 * rng.random())
    beats.sort(key=lambda beat: beat[1])
    return Trace(name="", nodes=tuple(nodes), beats=tuple(beats), hung_s=hung_s, rank=hung)


def _play(round_: Round, number: int, ranks: Sequence[_Rank], now: float) -> float:
    if round_.phase:
        for index in round_.ranks:
            rank = ranks[index]
            rank.entered = {**rank.entered, round_.phase: rank.entered.get(round_.phase, 0) + 1}
            before, rank.phase = rank.phase, round_.phase
            rank.change(now)
            rank.limits = rank.limits.learn(round_.phase, round_.own_s[index])
            rank.phase = before
            rank.change(now + round_.own_s[index])
            rank.mark += round_.own_s[index]
        return now + max(round_.own_s[index] for index in round_.ranks)
    met = now + max(round_.own_s)
    for rank in ranks:
        rank.limits = rank.limits.learn(rank.phase, max(0.0, met - rank.mark))
        rank.mark, rank.step, rank.phase = met, max(0, rank.step) + 1, "step"
        rank.change(met)
    return met


def _entry(rank: int, known: tuple[float, tuple[float, int, str, float, dict[str, int]]], at: float) -> dict[str, Any]:
    heard, (_, step, phase, limit_s, entered) = known
    return {"rank": rank, "step": step, "phase": phase, "age_s": at - heard, "limit_s": limit_s, "entered": entered}


# ---------------------------------------------------------------- kinds


def _steps(rng: random.Random, world: int, count: int, seconds: float, jitter: float = 0.2) -> list[Round]:
    return [Round(own_s=tuple(seconds * (1 + jitter * rng.random()) for _ in range(world))) for _ in range(count)]


def _stall(rng: random.Random, world: int, seconds: float, stall_s: float) -> Round:
    slow = rng.randrange(world)
    return Round(own_s=tuple(stall_s if rank == slow else seconds for rank in range(world)))


def _phase(rng: random.Random, world: int, name: str, seconds: float, *, joint: bool) -> Round:
    ranks = tuple(range(world)) if joint else (rng.randrange(world),)
    return Round(own_s=tuple(seconds * (0.5 + rng.random()) for _ in range(world)), phase=name, ranks=ranks)


Kind = Callable[[random.Random, int], list[Round]]


def saves_and_evaluations(rng: random.Random, world: int) -> list[Round]:
    rounds = _steps(rng, world, 3, 8.0)
    for _ in range(rng.randint(2, 8)):
        rounds += _steps(rng, world, rng.randint(1, 20), rng.choice((0.05, 0.2, 1.0)))
        rounds.append(_phase(rng, world, "save", rng.uniform(0.01, 35.0), joint=rng.random() < 0.7))
        rounds.append(_phase(rng, world, "eval", rng.uniform(1.0, 35.0), joint=rng.random() < 0.5))
    return rounds + _steps(rng, world, 5, 0.2)


def stalls(rng: random.Random, world: int) -> list[Round]:
    rounds = _steps(rng, world, 5, 1.0)
    longest = 5.9
    for _ in range(rng.randint(2, 10)):
        rounds += _steps(rng, world, rng.randint(3, 60), 0.2)
        stall_s = rng.uniform(0.5, longest)
        longest = max(longest, 1.7 * stall_s) if stall_s > 4.2 else longest
        rounds.append(_stall(rng, world, 0.2, stall_s))
    return rounds + _steps(rng, world, 5, 0.2)


def slow_steps(rng: random.Random, world: int) -> list[Round]:
    seconds = rng.choice((3.0, 10.0, 30.0))
    rounds = _steps(rng, world, 15, seconds, jitter=1.5)
    return [*rounds, _stall(rng, world, seconds, 4.5 * seconds), *_steps(rng, world, 3, seconds)]


def slow_starts(rng: random.Random, world: int) -> list[Round]:
    rounds = [_phase(rng, world, "restore", 25.0, joint=True), _phase(rng, world, "compile", 30.0, joint=True)]
    return [*rounds, *_steps(rng, world, 1, rng.uniform(10.0, 300.0)), *_steps(rng, world, 30, 0.2)]


def heavy_tails(rng: random.Random, world: int) -> list[Round]:
    spread = rng.uniform(0.3, 1.0)
    return [
        Round(own_s=tuple(min(5.9, rng.lognormvariate(-1.2, spread)) for _ in range(world)))
        for _ in range(rng.randint(50, 200))
    ]


def fast_steps(rng: random.Random, world: int) -> list[Round]:
    return _steps(rng, world, 300, rng.choice((0.1, 0.2)))


def after_saves(rng: random.Random, world: int) -> list[Round]:
    rounds = _steps(rng, world, 20, 0.2)
    for _ in range(3):
        rounds += [_phase(rng, world, "save", 0.5, joint=True), *_steps(rng, world, 15, 0.2)]
    return rounds


HEALTHY_KINDS: Sequence[Kind] = (saves_and_evaluations, stalls, slow_steps, slow_starts, heavy_tails)
HUNG_KINDS: Sequence[Kind] = (fast_steps, after_saves)


def draw(seed: int, kinds: Sequence[Kind]) -> Trace:
    """One training of a kind, from its seed."""
    rng = random.Random(seed)
    kind = kinds[seed % len(kinds)]
    per_node, nodes = rng.choice((1, 2, 4)), rng.choice((2, 3))
    world = per_node * nodes
    hung = rng.randrange(world) if kinds is HUNG_KINDS else None
    trace = run(kind(rng, world), world, per_node, rng, hung=hung)
    return Trace(
        name=f"{kind.__name__} {seed}",
        nodes=trace.nodes,
        beats=trace.beats,
        hung_s=trace.hung_s,
        rank=hung,
        within_s=9.0,
    )
