import subprocess
import sys
import threading
from pathlib import Path

import pytest

from supervisor.model import NodeMemory
from supervisor.store import LedgerUnusable, Store
from tests.store.kill_in_commit import BEFORE, CHANGE
from tests.store.records import NOW, attempt, event, plan, run

ROOT = Path(__file__).parents[2]


def test_a_kill_before_any_statement_of_a_commit_leaves_the_old_state_or_the_new_never_half(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.store.kill_in_commit", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    killed = int(done.stdout)
    assert killed >= 10
    states = [state_of(tmp_path / f"{at}.db") for at in range(1, killed + 2)]
    old, new = expected_states(tmp_path)
    assert set(map(repr, states)) == {repr(old), repr(new)}
    assert states == sorted(states, key=lambda state: state == new)  # once new, it stays new


def expected_states(folder: Path) -> tuple[object, object]:
    with Store.open(folder / "expected.db", now=NOW) as store:
        store.commit(BEFORE, NOW)
        old = state_of(store.path)
        store.commit(CHANGE, NOW)
        return old, state_of(store.path)


def state_of(path: Path) -> object:
    with Store.open(path, now=NOW) as store:
        keys = [intent.key for intent in store.load_intents()]
        return store.load_attempts("gpt"), store.load_interruptions(), keys


def test_what_was_said_to_be_committed_survives_a_kill_at_any_moment(path: Path) -> None:
    for reached in (1, 7, 40):
        said = write_until(path, reached)
        with Store.open(path, now=NOW) as store:
            counts = [memory.failed_sweeps for memory in store.load_nodes()]
        assert len(set(counts)) == 1
        assert counts[0] in (said, said + 1)


def write_until(path: Path, reached: int) -> int:
    command = [sys.executable, "-m", "tests.store.write_for_ever", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= reached:
                break
        writer.kill()
        rest = writer.stdout.read().splitlines(keepends=True)
    whole = [int(one) for one in rest if one.endswith("\n")]
    return whole[-1] if whole else reached


def test_two_writers_take_turns(path: Path) -> None:
    Store.open(path, now=NOW).close()
    barrier = threading.Barrier(2, timeout=20)

    def write(node: str) -> None:
        with Store.open(path, now=NOW) as store:
            barrier.wait()
            for _ in range(30):
                store.commit(plan(event(node)), NOW)

    writers = [threading.Thread(target=write, args=(node,)) for node in ("n1", "n2")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    with Store.open_readonly(path) as store:
        assert [len(store.load_node_events(node)) for node in ("n1", "n2")] == [30, 30]


def test_a_write_that_waits_too_long_is_refused_whole(store: Store, path: Path) -> None:
    with Store.open(path, now=NOW) as other, other._writing():
        store._db.execute("PRAGMA busy_timeout=20")
        with pytest.raises(LedgerUnusable, match="locked"):
            store.commit(plan(event()), NOW)
    store.commit(plan(event()), NOW)
    assert store.load_node_events() == (event(),)


def test_a_full_disk_refuses_the_plan_whole_and_the_next_one_works(store: Store) -> None:
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(LedgerUnusable, match="full"):
        store.commit(plan(run(), *(event() for _ in range(2000))), NOW)
    assert store.load_runs() == ()
    store.commit(plan(run(), attempt()), NOW)
    assert len(store.load_attempts("gpt")) == 1


def test_a_reader_sees_one_state_while_the_daemon_writes(store: Store, path: Path) -> None:
    store.commit(plan(run("a")), NOW)
    with Store.open_readonly(path) as reader:
        with reader.reading():
            assert len(reader.load_runs()) == 1
            store.commit(plan(run("b"), NodeMemory(node="n1")), NOW)
            assert len(reader.load_runs()) == 1
            assert reader.load_nodes() == ()
        assert len(reader.load_runs()) == 2
