"""While Slurm is silent one command is waited for, not one for every act that is due."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.config import LedgerSettings, Settings
from supervisor.execute import Executor
from supervisor.model import Intent, IntentKind, IntentState, Plan, World
from supervisor.owners import Owners
from supervisor.store import Store
from supervisor.verify import Verifier
from tests.fakes import FakeSlurm


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "ledger.db", now=FakeSlurm().clock.now()) as store:
        yield store


def test_once_slurm_is_silent_other_acts_on_it_wait_for_the_next_cycle(store: Store, tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.outage = True
    settings = Settings(ledger=LedgerSettings(path=tmp_path / "ledger.db"))
    executor = Executor(slurm, store, settings, slurm.clock, Owners(is_root=False), Verifier(lambda: None))
    meant = [Intent(kind=IntentKind.CANCEL, key=f"cancel:{n}", reason="over", job_id=n) for n in (1, 2, 3)]
    told = Intent(kind=IntentKind.NOTIFY, key="notify:x", reason="told", text="look at this")
    intents = store.commit(Plan(intents=(*meant, told)), slurm.clock.now())
    executor.settle(intents, World(), is_slurm_answering=True)
    assert slurm.calls == ["cancel"]
    assert sorted(i.tries for i in store.load_intents(IntentState.OPEN)) == [0, 0, 1]
    assert [i.kind for i in store.load_intents(IntentState.DONE)] == [IntentKind.NOTIFY]
