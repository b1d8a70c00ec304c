"""The ledger as files: where it may stand, whether it is whole, its backups, and what can be wrong with it.

    LedgerError
    ├── LedgerMissing              no file: the daemon has never run with this path
    ├── LedgerTooNew               written by a newer release: upgrade
    ├── LedgerTooOld               not migrated yet (readers only): restart the daemon
    ├── LedgerOnNetworkFileSystem  move it to a local disk
    ├── LedgerDamaged              not whole and no backup: a person decides
    ├── LedgerForeign              an SQLite file of some other program
    ├── LedgerUnusable             locked, disk full, no rights, I/O error: nothing was written; cure it, try again
    └── LedgerTakenOver            another daemon owns it: this one must stop

FILE, FILE-wal and FILE-shm belong together: never copy or remove one of them alone. Backups stand beside the ledger
(FILE.backup-<UTC>), made by SQLite's backup interface. A ledger that is damaged or has vanished is replaced by its
newest whole backup; never by an empty one, which would submit every run a second time.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from supervisor.migrations import APPLICATION_ID

MOUNTINFO = Path("/proc/self/mountinfo")
BUSY_TIMEOUT_S = 10.0

# SQLite's WAL needs shared memory between all processes that use the file, and locks that are what they promise.
_NETWORK_TYPES = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fhgfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"}
)
_LOCAL_FUSE_TYPES = frozenset({"fuse.fuse-overlayfs"})  # the root of a container without root
_WAL_HEADER_BYTES = 32
_STAMP = "%Y%m%dT%H%M%S.%fZ"
_COMPANIONS = ("", "-wal", "-shm")

_DAMAGE_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_UNUSABLE_CODES = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_PERM,
    }
)


class LedgerError(Exception):
    """Base of what can be wrong with the ledger; the message is one sentence for people, with the way out."""


class LedgerMissing(LedgerError):
    """There is no such file."""


class LedgerTooNew(LedgerError):
    """The file's schema is newer than this release knows."""


class LedgerTooOld(LedgerError):
    """The file's schema is older than this release reads; only the daemon migrates."""


class LedgerOnNetworkFileSystem(LedgerError):
    """The file would stand on a network file system."""


class LedgerDamaged(LedgerError):
    """The file is not whole, and no backup is there."""


class LedgerForeign(LedgerError):
    """The file is a whole SQLite database, but no ledger."""


class LedgerUnusable(LedgerError):
    """SQLite could not read or write the file now; nothing of the transaction was written."""


class LedgerTakenOver(LedgerError):
    """Another daemon owns the ledger."""


# ---------------------------------------------------------------- where it may stand


def refuse_network(path: Path, mountinfo: str) -> None:
    """Raises LedgerOnNetworkFileSystem when `mountinfo` puts `path` on a file system that other machines share."""
    kind = file_system_type(path, mountinfo)
    if is_network_type(kind):
        raise LedgerOnNetworkFileSystem(
            f"{path} is on a network file system ({kind}), where SQLite loses data: set ledger.path to a file on a "
            "local disk of this machine, e.g. /var/lib/supervisor/ledger.db"
        )


def is_network_type(kind: str) -> bool:
    """True for file systems that several machines may write to."""
    return kind in _NETWORK_TYPES or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE_TYPES)


def file_system_type(path: Path, mountinfo: str) -> str:
    """Type of the file system that holds `path`, by the text of /proc/self/mountinfo; "" when it does not say."""
    where = path.resolve()
    found = ""
    depth = -1
    for mount_point, kind in _mounts(mountinfo):
        # A later line of the same mount point lies on top of the earlier one.
        if where.is_relative_to(mount_point) and len(mount_point.parts) >= depth:
            found, depth = kind, len(mount_point.parts)
    return found


def _mounts(mountinfo: str) -> Iterator[tuple[Path, str]]:
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) > 4 and kinds:
            yield Path(_unescape(fields[4])), kinds[0]


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash of a mount point as octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


# ---------------------------------------------------------------- connections and their errors


def connect(path: Path) -> sqlite3.Connection:
    """A connection for this thread that opens no transaction by itself and creates no file."""
    return _connect(path, "mode=rw")


def connect_readonly(path: Path) -> sqlite3.Connection:
    """A connection that cannot write.

    While the daemon is down, a reader without the right to write in the folder cannot create FILE-shm, which SQLite
    needs for a WAL database, nor mend one. With no FILE-wal, or nothing but a header in it (a daemon that was killed in
    its first commit: SQLite tries for 10 s, and gives up), there is nothing but the file itself to read: then it is
    opened as one that does not change.
    """
    connection = _connect(path, "mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if _size_of(path.with_name(path.name + "-wal")) > _WAL_HEADER_BYTES:
            raise
        connection = _connect(path, "mode=ro&immutable=1")
    return connection


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _connect(path: Path, parameters: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{parameters}"
    # isolation_level=None: the driver starts no transaction behind our back; the store says BEGIN IMMEDIATE itself.
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Gives SQLite's errors about the file itself our names; errors of the statement pass as they are."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = _primary_code(error)
        if code in _DAMAGE_CODES:
            raise LedgerDamaged(f"{path} is damaged ({error}): start the daemon again; it restores a backup") from error
        if code in _UNUSABLE_CODES:
            raise LedgerUnusable(f"{path} can't be used now: {error} ({error.sqlite_errorname})") from error
        raise


@contextmanager
def named_file_errors(path: Path) -> Iterator[None]:
    """Like `named_errors`, for opening: a path without rights, or below something that is no folder, is named too."""
    try:
        with named_errors(path):
            yield
    except OSError as error:
        raise LedgerUnusable(f"{path} can't be used: {error.strerror or error}") from error


def _primary_code(error: sqlite3.DatabaseError) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


# ---------------------------------------------------------------- damage and backups


def recover(path: Path, now: datetime) -> str | None:
    """Makes sure that `path` is a whole ledger or that none has ever been there.

    Returns the backup's path when the ledger had to be restored from it, else None. Raises LedgerDamaged when it is
    damaged or gone and there is no whole backup (nothing is changed then), LedgerForeign, LedgerUnusable.
    """
    if not path.exists() and not _was_here(path):
        return None
    damage = find_damage(path) if path.exists() else "it is gone, but it was here"
    if damage is None:
        return None
    backup = _newest_whole_backup(path)
    if backup is None:
        raise LedgerDamaged(_no_way_back(path, damage))
    _restore(path, backup, now)
    return str(backup)


def find_damage(path: Path) -> str | None:
    """What is wrong with the file, or None for a whole ledger. Raises LedgerForeign, LedgerUnusable."""
    try:
        with named_errors(path), closing(connect(path)) as connection:
            return _judge(path, connection)
    except LedgerDamaged as error:
        return str(error.__cause__)


def _judge(path: Path, connection: sqlite3.Connection) -> str | None:
    if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
        return "the file is empty"
    found = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if found != ["ok"]:
        return "; ".join(found)
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise LedgerForeign(f"{path} is a database of another program: set ledger.path to another file")
    return None


def list_backups(path: Path) -> list[Path]:
    """Backups beside the ledger, oldest first."""
    return sorted(_stamped(path, "backup"))


def backup_path(path: Path, now: datetime) -> Path:
    """Where the backup of this instant stands."""
    return _with_stamp(path, "backup", now)


def write_backup(connection: sqlite3.Connection, target: Path) -> None:
    """A whole copy of the live database at `target`: made under another name, checked, synced, then renamed."""
    temporary = target.with_name(target.name + ".tmp")
    _remove(temporary)
    with closing(sqlite3.connect(temporary, isolation_level=None)) as copy:
        connection.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file alone: a backup has no -wal beside it
        found = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise LedgerDamaged(f"the backup to {target} is not whole: {found}")
    publish(temporary, target)


def publish(temporary: Path, target: Path) -> None:
    """Renames a finished file to its name, durably."""
    from trainer.contract import fsync_dir

    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(target)
    fsync_dir(target.parent)


def remove_old_backups(path: Path, keep: int) -> None:
    """Keeps the newest `keep` backups beside the ledger."""
    for backup in list_backups(path)[:-keep]:
        backup.unlink(missing_ok=True)


def _restore(path: Path, backup: Path, now: datetime) -> None:
    """Puts a copy of the backup in place. A crash on the way leaves a damaged or missing ledger: restored next time."""
    import shutil

    temporary = path.with_name(path.name + ".restored")
    _remove(temporary)
    shutil.copyfile(backup, temporary)
    aside = _with_stamp(path, "damaged", now)
    # The -wal goes first: SQLite would replay a stale one into the restored file.
    for companion in reversed(_COMPANIONS):
        source = path.with_name(path.name + companion)
        if source.exists():
            source.replace(aside.with_name(aside.name + companion))
    publish(temporary, path)


def _newest_whole_backup(path: Path) -> Path | None:
    return next((backup for backup in reversed(list_backups(path)) if _is_whole(backup)), None)


def _is_whole(backup: Path) -> bool:
    try:
        return find_damage(backup) is None
    except LedgerError:
        return False


def _was_here(path: Path) -> bool:
    traces = (any(_stamped(path, word)) for word in ("backup", "damaged"))
    return any(traces) or _size_of(path.with_name(path.name + "-wal")) > 0


def _stamped(path: Path, word: str) -> Iterator[Path]:
    pattern = re.compile(re.escape(f"{path.name}.{word}-") + r"\d{8}T\d{6}\.\d{6}Z")
    if path.parent.is_dir():
        yield from (entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name))


def _with_stamp(path: Path, word: str, now: datetime) -> Path:
    return path.with_name(f"{path.name}.{word}-{now.astimezone(UTC).strftime(_STAMP)}")


def _remove(path: Path) -> None:
    for companion in (*_COMPANIONS, "-journal"):
        path.with_name(path.name + companion).unlink(missing_ok=True)


def _no_way_back(path: Path, damage: str) -> str:
    return (
        f"{path} is damaged ({damage}) and there is no whole backup beside it; nothing was changed. Put a backup in "
        f"its place; or, to start with an empty ledger, make sure with squeue that no job of a supervised run is left "
        f"(an empty ledger does not know them), then move {path.name}* out of {path.parent}"
    )
