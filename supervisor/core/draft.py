"""A plan in the making: the world with what this cycle has learnt laid over it. It never leaves the core."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from slurm.types import NodeRecord
from supervisor.model import (
    Attempt,
    Checkpoint,
    CheckRow,
    Fact,
    Fresh,
    Intent,
    IntentKind,
    IntentState,
    Interruption,
    NodeEvent,
    NodeMemory,
    Plan,
    Policy,
    Record,
    Run,
    RunState,
    RunView,
    Snapshot,
    World,
)

_HANDED_IN = re.compile(r"(?:submitted|adopted) by \S+")  # a reason that makes room for any other
_SPANS = re.compile(r"[0-9.]+ s\b")  # that one waits longer and longer is no news


class Draft:
    """Collects facts and intents; later rules read what earlier rules of the same cycle wrote."""

    def __init__(self, world: World, snapshot: Snapshot, policy: Policy, now: datetime) -> None:
        self.world = world
        self.snapshot = snapshot
        self.policy = policy
        self.now = now
        self.runs: dict[str, Run] = {run.name: run for run in world.runs}
        self.nodes: dict[str, NodeMemory] = dict(world.nodes)
        self._attempts = {name: {a.number: a for a in items} for name, items in world.attempts.items()}
        self._aside = {name: {a.number: a for a in items} for name, items in world.aside.items()}
        self._checkpoints = {name: {c.key: c for c in items} for name, items in world.checkpoints.items()}
        self._interruptions = {(i.run, i.attempt, i.launch): i for i in world.interruptions}
        self._facts: dict[object, Fact] = {}
        self._events: list[Fact] = []
        self._intents: dict[str, Intent] = {}
        self._withdrawn: dict[str, Intent] = {}
        self._settled: dict[str, Intent] = {}
        self._open = {intent.key: intent for intent in world.open_intents}
        self._probe: set[str] = set()
        self._notes: list[str] = []
        self._ask_slurm = False
        self._wake_after_s = policy.idle_interval_s

    # ---- reading

    def view(self, run: str) -> RunView | None:
        """What the run directory says; None: it could not be read, or not yet."""
        view = self.snapshot.runs.get(run)
        return view.value if isinstance(view, Fresh) else None

    @property
    def records(self) -> Mapping[str, NodeRecord] | None:
        """Slurm's nodes; None: Slurm did not answer."""
        return self.snapshot.nodes.value if isinstance(self.snapshot.nodes, Fresh) else None

    def attempts(self, run: str) -> tuple[Attempt, ...]:
        """The run's course: all attempts but those that are or were queued ahead."""
        return tuple(a for _, a in sorted(self._attempts.get(run, {}).items()))

    def last_attempt(self, run: str) -> Attempt | None:
        attempts = self._attempts.get(run)
        return attempts[max(attempts)] if attempts else None

    def aside(self, run: str) -> tuple[Attempt, ...]:
        """Attempts that are queued ahead, or were and were not needed."""
        return tuple(a for _, a in sorted(self._aside.get(run, {}).items()))

    def ahead(self, run: str) -> Attempt | None:
        """The attempt that is queued behind the running one."""
        return next((a for a in self.aside(run) if not a.is_over), None)

    def next_number(self, run: str) -> int:
        return max((*self._attempts.get(run, ()), *self._aside.get(run, ())), default=0) + 1

    def checkpoints(self, run: str) -> tuple[Checkpoint, ...]:
        return tuple(c for _, c in sorted(self._checkpoints.get(run, {}).items()))

    def checkpoint(self, run: str, step: int, attempt: int) -> Checkpoint | None:
        return self._checkpoints.get(run, {}).get((step, attempt))

    def interruptions(self, run: str) -> tuple[Interruption, ...]:
        return tuple(i for i in self._interruptions.values() if i.run == run)

    def node(self, name: str) -> NodeMemory:
        return self.nodes.get(name) or NodeMemory(node=name)

    def open_intent(self, key: str) -> Intent | None:
        """The intent that stands open under this key, from the ledger or from this cycle."""
        if key in self._withdrawn or key in self._settled:
            return None
        return self._intents.get(key) or self._open.get(key)

    def open_intents(self, kind: IntentKind) -> tuple[Intent, ...]:
        every = {**self._open, **self._intents}
        gone = {*self._withdrawn, *self._settled}
        return tuple(i for key, i in every.items() if i.kind is kind and key not in gone)

    def settled_intents(self, kind: IntentKind, *, within_s: float | None = None) -> tuple[Intent, ...]:
        """Settled intents of a kind, oldest first, of the last `within_s` seconds (all that are loaded by default)."""
        since = None if within_s is None else self.now - timedelta(seconds=within_s)
        return tuple(
            i
            for i in self.world.settled_intents
            if i.kind is kind and (since is None or (i.settled_at is not None and i.settled_at >= since))
        )

    # ---- writing

    def put(self, record: Record, reason: str) -> None:
        """Note a record as it is now; an unchanged one is no fact."""
        if isinstance(record, NodeEvent | CheckRow):
            self._events.append(Fact(record=record, reason=reason))
            return
        key, known = self._place(record)
        if known != record:
            self._facts[key] = Fact(record=record, reason=reason)

    def _place(self, record: Run | Attempt | Interruption | Checkpoint | NodeMemory) -> tuple[object, object]:
        if isinstance(record, Run):
            known: object = self.runs.get(record.name)
            self.runs[record.name] = record
            return ("run", record.name), known
        if isinstance(record, Attempt):
            attempts, aside = self._attempts.setdefault(record.run, {}), self._aside.setdefault(record.run, {})
            known = attempts.pop(record.number, None) or aside.pop(record.number, None)
            (aside if record.is_aside else attempts)[record.number] = record
            return ("attempt", record.run, record.number), known
        if isinstance(record, Checkpoint):
            checkpoints = self._checkpoints.setdefault(record.run, {})
            known = checkpoints.get(record.key)
            checkpoints[record.key] = record
            return ("checkpoint", record.run, record.key), known
        if isinstance(record, Interruption):
            place = (record.run, record.attempt, record.launch)
            known = self._interruptions.get(place)
            self._interruptions[place] = record
            return ("interruption", *place), known
        known = self.nodes.get(record.node)
        self.nodes[record.node] = record
        return ("node", record.node), known

    def intend(self, intent: Intent) -> None:
        """Mean a side effect, unless the same one stands open already."""
        if self.open_intent(intent.key) is None:
            self._intents[intent.key] = replace(intent, created_at=self.now)

    def withdraw(self, intent: Intent, why: str) -> None:
        """Take back an intent that was never tried."""
        if self._intents.pop(intent.key, None) is None:
            self._withdrawn[intent.key] = replace(intent, state=IntentState.WITHDRAWN, settled_at=self.now, outcome=why)

    def settle(self, intent: Intent, state: IntentState, outcome: str) -> None:
        """Close an open intent whose outcome was observed."""
        self._settled[intent.key] = replace(intent, state=state, settled_at=self.now, outcome=outcome)

    def tell(self, key: str, text: str, *, run: str = "", node: str = "") -> None:
        """Tell someone, once per key."""
        told = {i.key for i in self.world.settled_intents if i.kind is IntentKind.NOTIFY}
        if f"notify:{key}" not in told:
            self.intend(Intent(kind=IntentKind.NOTIFY, key=f"notify:{key}", reason=text, text=text, run=run, node=node))

    def show(self, name: str, mark: str, text: str) -> None:
        """Have `text`, which begins with `mark`, stand as an active run's reason while no other does.

        Empty: it has passed.
        """
        run = self.runs[name]
        if run.state is not RunState.ACTIVE:
            return
        is_ours = run.reason.startswith(mark)
        has_room = is_ours or not run.reason or _HANDED_IN.fullmatch(run.reason) is not None
        if text and has_room and _SPANS.sub("", text) != _SPANS.sub("", run.reason):
            self.put(replace(run, reason=text), text)
        elif not text and is_ours:
            self.put(replace(run, reason=""), f"passed: {run.reason}")

    def note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def watch(self, nodes: frozenset[str]) -> None:
        """Ask for close looks at these nodes' slurmd ports."""
        self._probe |= nodes

    def ask_slurm(self) -> None:
        self._ask_slurm = True

    def wake_within(self, seconds: float) -> None:
        self._wake_after_s = min(self._wake_after_s, max(0.0, seconds))

    def plan(self) -> Plan:
        return Plan(
            facts=(*self._facts.values(), *self._events),
            intents=tuple(self._intents.values()),
            withdrawn=tuple(self._withdrawn.values()),
            settled=tuple(self._settled.values()),
            probe=frozenset(self._probe),
            ask_slurm=self._ask_slurm,
            wake_after_s=self._wake_after_s,
            notes=tuple(self._notes),
        )
