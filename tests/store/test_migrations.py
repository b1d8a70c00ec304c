"""Each released schema is kept as a dump with rows in it (schema-<n>.sql) and must open in this release.

Until the first release, `python -m tests.store.test_migrations` writes the dump anew after a change of the schema;
a released dump is never written again.
"""

import dataclasses
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from sqlite_utils import Database

from supervisor import migrations, model
from supervisor.migrations import APPLICATION_ID, STEPS, migrate, schema_version
from supervisor.model import AttemptState, CheckRow, Intent, IntentState, NodeMemory
from supervisor.store import _TABLES, DaemonRow, RequestRow, RunChange, Store
from tests.store.records import NOW, attempt, checkpoint, event, intent, interruption, plan, run
from trainer.contract import CheckResult

HERE = Path(__file__).parent
DUMPS = sorted(HERE.glob("schema-*.sql"))
TABLE_OF = {getattr(model, kind): table.name for kind, table in _TABLES.items()} | {
    Intent: "intents",
    DaemonRow: "daemon",
    RequestRow: "requests",
    RunChange: "run_changes",
}


def memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None)


def schema_of(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
    return [(name, " ".join(sql.split())) for name, sql in rows]


def load_dump(dump: Path, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(dump.read_text())


@pytest.mark.parametrize("kind", list(TABLE_OF), ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_has_a_column(kind: type) -> None:
    with closing(memory()) as connection:
        migrate(Database(connection), NOW)
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({TABLE_OF[kind]})")}
    assert {field.name for field in dataclasses.fields(kind)} <= columns, "add a migration step for the new field"


def test_every_step_is_recorded_with_its_time_and_raises_the_version() -> None:
    with closing(memory()) as connection:
        db = Database(connection)
        assert migrate(db, NOW) == tuple(step.__name__ for step in STEPS)
        assert schema_version(db) == len(STEPS)
        assert [row["name"] for row in db.query("SELECT * FROM migrations")] == [step.__name__ for step in STEPS]
        assert migrate(db, NOW) == ()


def test_a_step_that_fails_leaves_the_version_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(db: Database) -> None:
        db.execute("CREATE TABLE half (x)")
        db.execute("SELECT * FROM no_such_table")

    monkeypatch.setattr(migrations, "STEPS", (*STEPS, half))
    with closing(memory()) as connection:
        db = Database(connection)
        with pytest.raises(sqlite3.OperationalError):
            migrate(db, NOW)
        assert schema_version(db) == len(STEPS)
        assert "half" not in db.table_names()


@pytest.mark.parametrize("dump", DUMPS, ids=lambda dump: dump.stem)
def test_a_released_schema_is_never_edited(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = int(dump.stem.removeprefix("schema-"))
    monkeypatch.setattr(migrations, "STEPS", STEPS[:version])
    with closing(memory()) as released, closing(memory()) as ours:
        released.executescript(dump.read_text())
        migrate(Database(ours), NOW)
        assert schema_of(ours) == schema_of(released)


@pytest.mark.parametrize("dump", DUMPS, ids=lambda dump: dump.stem)
def test_a_ledger_of_a_released_schema_opens_with_all_that_it_holds(dump: Path, path: Path) -> None:
    load_dump(dump, path)
    with Store.open(path, now=NOW + timedelta(days=1)) as store:
        world = store.load_world(NOW)
        with closing(memory()) as fresh:
            migrate(Database(fresh), NOW)
            assert schema_of(store._connection) == schema_of(fresh)
    assert [r.name for r in world.runs] == ["gpt"]
    assert (len(world.attempts["gpt"]), len(world.checkpoints["gpt"]), len(world.interruptions)) == (2, 1, 1)
    assert (len(world.nodes), len(world.open_intents), len(world.settled_intents)) == (1, 1, 1)
    assert world.is_paused


def test_there_is_a_dump_of_the_newest_schema() -> None:
    assert HERE / f"schema-{len(STEPS)}.sql" in DUMPS


def write_dump(folder: Path) -> None:
    with Store.open(folder / "ledger.db", now=NOW) as store:
        store.claim(NOW, pid=4711, host="head1", version="0.1.0")
        store.add_run(run(), NOW)
        check = CheckRow(node="n2", at=NOW, result=CheckResult(check="disk_free", ok=False, value=1.0, limit=5.0))
        records = (
            attempt(1, AttemptState.OVER),
            attempt(2),
            checkpoint(40),
            interruption(1),
            NodeMemory(node="n2"),
            event(),
            check,
        )
        done, _ = store.commit(plan(*records, intents=(intent("submit:gpt:1"), intent("submit:gpt:2"))), NOW)
        store.settle(done, IntentState.DONE, "job 7", NOW)
        store.set_paused(True, NOW, "uid 0")
        store.record_request(0, "pause", NOW)
        version = schema_version(store._db)
        lines = [f"PRAGMA application_id = {APPLICATION_ID};", f"PRAGMA user_version = {version};"]
        lines += store._connection.iterdump()
    (HERE / f"schema-{version}.sql").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        write_dump(Path(temporary))
