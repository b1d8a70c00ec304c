import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from supervisor import ledger
from supervisor.store import (
    LedgerDamaged,
    LedgerForeign,
    LedgerMissing,
    LedgerOnNetworkFileSystem,
    LedgerTakenOver,
    LedgerTooNew,
    LedgerTooOld,
    LedgerUnusable,
    Store,
)
from tests.store.records import NOW, attempt, event, plan, run

ROOT = Path(__file__).parents[2]
DAY = timedelta(days=1)


Opener = Callable[[Path], object]


def pragma(path: Path, text: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA {text}")


# ---------------------------------------------------------------- settings of SQLite


def test_the_ledger_is_in_wal_mode_and_every_commit_is_synced(store: Store) -> None:
    found = {name: store._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")}
    assert found == {"journal_mode": "wal", "synchronous": 2}
    assert store._db.execute("PRAGMA foreign_keys").fetchone()[0] == 1
    assert store._db.execute("PRAGMA busy_timeout").fetchone()[0] == 10_000


def test_a_reader_cannot_write(store: Store, path: Path) -> None:
    with Store.open_readonly(path) as reader, pytest.raises(LedgerUnusable, match="readonly"):
        reader.commit(plan(event()), NOW)


class SilentConnection:
    """What an account without the right to write gets from SQLite where the shared memory would have to be mended."""

    def execute(self, _: str) -> None:
        raise sqlite3.OperationalError("locking protocol")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("wal_bytes", "is_read"), [(None, True), (0, True), (32, True), (33, False)])
def test_a_reader_without_rights_reads_the_file_itself_where_the_log_beside_it_holds_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wal_bytes: int | None, *, is_read: bool
) -> None:
    path, asked = tmp_path / "l.db", list[str]()
    if wal_bytes is not None:
        (tmp_path / "l.db-wal").write_bytes(b"x" * wal_bytes)

    def connect(_: Path, parameters: str) -> SilentConnection:
        asked.append(parameters)
        return SilentConnection()

    monkeypatch.setattr(ledger, "_connect", connect)
    if is_read:
        ledger.connect_readonly(path)
        assert asked == ["mode=ro", "mode=ro&immutable=1"]
    else:
        with pytest.raises(sqlite3.OperationalError):
            ledger.connect_readonly(path)


def test_a_ledger_can_have_any_name_that_a_file_can_have(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=rw#c%20.db"
    with Store.open(path, now=NOW) as store:
        store.add_run(run(), NOW)
    with Store.open_readonly(path) as reader:
        assert reader.load_run("gpt") is not None
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(path.name)] == []


# ---------------------------------------------------------------- readers without a daemon


def test_reading_without_a_ledger_says_so_and_makes_none(path: Path) -> None:
    with pytest.raises(LedgerMissing, match="start the daemon"):
        Store.open_readonly(path)
    assert not path.exists()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other accounts can reach (pytest's own are private)."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


_READ_AS_ANOTHER = """
import os, sys
from pathlib import Path
from supervisor.store import Store
from tests.store import records
Path("/").as_uri()  # imports what it needs while Python's own folder can still be read
if os.geteuid() == 0:
    os.setuid(65534)
with Store.open_readonly(Path(sys.argv[1])) as reader:
    reader.load_world(records.NOW)
    print(len(reader.load_runs()))
"""


@pytest.mark.parametrize("is_daemon_up", [True, False])
def test_an_account_without_write_access_reads_with_and_without_a_daemon(open_folder: Path, is_daemon_up: bool) -> None:
    store = Store.open(open_folder / "ledger.db", now=NOW)
    store.add_run(run(), NOW)
    if not is_daemon_up:
        store.close()
    open_folder.chmod(0o555)
    command = [sys.executable, "-c", _READ_AS_ANOTHER, str(store.path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=30)
    store.close()
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("opens", [lambda path: Store.open(path, now=NOW), Store.open_readonly])
def test_a_path_that_cannot_hold_a_ledger_is_refused_in_one_line(tmp_path: Path, opens: Opener) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "ledger.db", tmp_path / "folder", tmp_path / ("x" * 300)):
        with pytest.raises((LedgerUnusable, LedgerMissing)) as caught:
            opens(path)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- versions


def test_a_ledger_of_a_newer_release_is_refused_and_left_as_it_is(path: Path) -> None:
    Store.open(path, now=NOW).close()
    pragma(path, "user_version=99")
    before = path.read_bytes()
    with pytest.raises(LedgerTooNew, match=rf"{path.name} has schema version 99.*up to \d+.*newer release"):
        Store.open(path, now=NOW)
    with pytest.raises(LedgerTooNew):
        Store.open_readonly(path)
    assert path.read_bytes() == before


def test_a_reader_does_not_migrate(path: Path) -> None:
    Store.open(path, now=NOW).close()
    pragma(path, "user_version=0")
    with pytest.raises(LedgerTooOld, match="restart the daemon"):
        Store.open_readonly(path)


# ---------------------------------------------------------------- network file systems

_MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
41 40 8:2 / /home/local rw - xfs /dev/sdb1 rw
40 22 0:40 / /home rw shared:2 - nfs4 filer:/home rw,vers=4.2
42 22 0:42 / /scratch rw - lustre mds@tcp:/scratch rw
43 22 0:43 / /with\\040space rw - beegfs beegfs_nodev rw
44 22 0:44 / /sshfs rw - fuse.sshfs login: rw
45 22 0:45 / /over rw - nfs filer:/over rw
46 45 0:46 / /over rw - tmpfs tmpfs rw
47 22 0:47 / /box rw - fuse.fuse-overlayfs fuse-overlayfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/supervisor/ledger.db", "ext4"),
        ("/home/svc/.sup/state.db", "nfs4"),
        ("/home/local/ledger.db", "xfs"),
        ("/homes/ledger.db", "ext4"),
        ("/scratch/a/../ledger.db", "lustre"),
        ("/with space/ledger.db", "beegfs"),
        ("/over/ledger.db", "tmpfs"),
    ],
)
def test_the_innermost_and_newest_mount_holds_the_path(path: str, kind: str) -> None:
    assert ledger.file_system_type(Path(path), _MOUNTS) == kind


@pytest.mark.parametrize(
    "path", ["/home/svc/state.db", "/scratch/state.db", "/with space/state.db", "/sshfs/deep/er/state.db"]
)
def test_a_ledger_on_a_network_file_system_is_refused_with_the_setting_to_change(path: str) -> None:
    with pytest.raises(LedgerOnNetworkFileSystem, match=r"ledger\.path"):
        ledger.refuse_network(Path(path), _MOUNTS)


@pytest.mark.parametrize("path", ["/var/lib/ledger.db", "/home/local/ledger.db", "/over/ledger.db", "/box/ledger.db"])
def test_a_ledger_on_a_local_disk_is_accepted(path: str) -> None:
    ledger.refuse_network(Path(path), _MOUNTS)


def test_mount_lines_of_an_unknown_shape_say_nothing() -> None:
    assert ledger.file_system_type(Path("/a"), "\n - \nnonsense\n1 2 3 / / rw - \n") == ""


def test_a_refused_ledger_is_not_made_and_a_forced_one_has_a_rollback_journal(path: Path, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("22 1 0:40 / / rw - nfs4 filer:/ rw\n")
    with pytest.raises(LedgerOnNetworkFileSystem):
        Store.open(path, now=NOW, mountinfo=mounts)
    assert not path.exists()
    with Store.open(path, now=NOW, mountinfo=mounts, force_network=True) as store:
        store.add_run(run(), NOW)
        assert store._db.execute("PRAGMA journal_mode").fetchone()[0] == "delete"


# ---------------------------------------------------------------- damage and backups


def damage_by_zeros(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"\0" * (size - 4096))


def damage_of_one_page(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'attempts'").fetchone()[0]
    with path.open("r+b") as stream:
        stream.seek((page - 1) * 4096 + 8)
        stream.write(b"\x5a" * 2000)


def damage_by_truncation(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_by_emptying(path: Path) -> None:
    os.truncate(path, 0)


def damage_of_the_header(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(b"\xff" * 100)


def loss(path: Path) -> None:
    path.unlink()


FAULTS = [damage_by_zeros, damage_of_one_page, damage_by_truncation, damage_by_emptying, damage_of_the_header, loss]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_ledger_is_moved_aside_and_its_newest_backup_restored(path: Path, fault: object) -> None:
    assert callable(fault)
    with Store.open(path, now=NOW) as store:
        store.backup_beside(NOW - DAY)
        store.commit(plan(run(), attempt()), NOW)
        store.backup_beside(NOW)
        store.commit(plan(run("late")), NOW)
    fault(path)
    broken = path.read_bytes() if path.exists() else None

    with Store.open(path, now=NOW + DAY) as store:
        assert store.recovered_from == str(ledger.backup_path(path, NOW))
        assert store.load_attempts("gpt") == (attempt(),)
    aside = [entry.read_bytes() for entry in path.parent.glob("*.damaged-20261201T030000.000000Z")]
    assert aside == ([] if broken is None else [broken])
    with Store.open(path, now=NOW + 2 * DAY) as store:
        assert store.recovered_from is None


@pytest.mark.parametrize("fault", FAULTS[:-1])
def test_a_damaged_ledger_without_a_backup_is_never_replaced_by_a_blank_one(path: Path, fault: object) -> None:
    assert callable(fault)
    with Store.open(path, now=NOW) as store:
        store.commit(plan(run(), attempt()), NOW)
    fault(path)
    before = path.read_bytes()
    for day in range(2):  # a restart must not find a blank slate either
        with pytest.raises(LedgerDamaged, match=r"no whole backup.*squeue"):
            Store.open(path, now=NOW + day * DAY)
    assert path.read_bytes() == before


def test_a_ledger_of_which_only_the_wal_is_left_is_not_begun_anew(path: Path) -> None:
    path.with_name(path.name + "-wal").write_bytes(b"left behind")
    with pytest.raises(LedgerDamaged, match="it is gone"):
        Store.open(path, now=NOW)
    assert not path.exists()


def test_a_damaged_backup_is_passed_over(path: Path) -> None:
    with Store.open(path, now=NOW) as store:
        store.add_run(run(), NOW)
        store.backup_beside(NOW)
        damage_by_zeros(store.backup_beside(NOW + DAY))
    damage_by_zeros(path)
    with Store.open(path, now=NOW + 2 * DAY) as store:
        assert store.recovered_from == str(ledger.backup_path(path, NOW))
        assert store.load_run("gpt") is not None


def test_a_stale_wal_is_not_replayed_into_a_restored_ledger(path: Path) -> None:
    with Store.open(path, now=NOW) as store:
        store.add_run(run(), NOW)
        store.backup_beside(NOW)
        store.add_run(run("late"), NOW)
        wal = path.with_name(path.name + "-wal")
        stale = wal.read_bytes()
    path.unlink()
    wal.write_bytes(stale)
    with Store.open(path, now=NOW + DAY) as store:
        assert [r.name for r in store.load_runs()] == ["gpt"]


def test_a_database_of_another_program_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(LedgerForeign, match=r"ledger\.path"):
        Store.open(path, now=NOW)
    assert path.read_bytes() == before


def test_a_backup_made_while_the_ledger_is_in_use_is_whole_and_one_file(store: Store, path: Path) -> None:
    store.add_run(run(), NOW)
    target = path.with_name("copy.db")
    store.backup(target)
    with Store.open_readonly(target) as copy:
        assert copy.load_run("gpt") == store.load_run("gpt")
    assert [entry.name for entry in path.parent.glob("copy*")] == ["copy.db"]


def test_only_the_newest_backups_are_kept(store: Store, path: Path) -> None:
    made = [store.backup_beside(NOW + day * DAY, keep=2) for day in range(4)]
    assert ledger.list_backups(path) == made[-2:]


def test_an_interrupted_creation_is_begun_again(path: Path) -> None:
    path.with_name(path.name + ".new").write_bytes(b"half")
    with Store.open(path, now=NOW) as store:
        store.add_run(run(), NOW)


def test_a_whole_open_ledger_shows_no_damage(store: Store) -> None:
    store.add_run(run(), NOW)
    assert store.find_damage() is None


def test_a_ledger_removed_or_replaced_under_the_daemon_is_noticed(store: Store, path: Path) -> None:
    copy = path.with_name("copy.db")
    store.backup(copy)
    wal = path.with_name(path.name + "-wal")
    store.add_run(run(), NOW)
    wal.unlink()
    assert "-wal was removed" in str(store.find_damage())
    path.unlink()
    assert "was removed" in str(store.find_damage())
    copy.replace(path)
    assert "was replaced" in str(store.find_damage())


# ---------------------------------------------------------------- owner


def test_the_daemon_row_says_who_runs_and_is_written_at_most_every_ten_seconds(store: Store) -> None:
    for second in range(12):
        store.heartbeat(NOW + timedelta(seconds=second), cycle=second, summary=f"cycle {second}", pid=42)
    row = store.load_daemon()
    assert row is not None
    assert (row.pid, row.started_at, row.cycle, row.summary, row.ended_at) == (42, NOW, 10, "cycle 10", None)
    store.end(NOW + DAY)
    ended = store.load_daemon()
    assert ended is not None
    assert ended.ended_at == NOW + DAY


def test_a_daemon_of_another_host_keeps_the_ledger_while_it_beats(store: Store, path: Path) -> None:
    store.claim(NOW, pid=1, host="head1")
    with Store.open(path, now=NOW) as other:
        with pytest.raises(LedgerTakenOver, match="pid 1 on head1"):
            other.claim(NOW + timedelta(seconds=30), pid=1, host="head2")
        other.claim(NOW + timedelta(seconds=61), pid=1, host="head2")


def test_a_daemon_that_ended_in_good_order_is_succeeded_at_once(store: Store, path: Path) -> None:
    store.claim(NOW, pid=1, host="head1")
    store.end(NOW)
    with Store.open(path, now=NOW) as other:
        other.claim(NOW, pid=1, host="head2")


def test_a_daemon_whose_ledger_was_taken_over_writes_nothing_more(store: Store, path: Path) -> None:
    store.claim(NOW, pid=1, host="head1")
    with Store.open(path, now=NOW) as other:
        other.claim(NOW, pid=2, host="head1")
    with pytest.raises(LedgerTakenOver, match="pid 2 on head1"):
        store.commit(plan(event()), NOW)
    assert store.load_node_events() == ()
