"""Who a run's files belong to: as root, they are only touched by children that act as the owner."""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisor.model import Run
from supervisor.rundir import RunDirReader


@dataclass(slots=True)
class Owners:
    """One reader of run directories per owner: as root, files are only touched as the user whom they belong to."""

    is_root: bool
    _readers: dict[tuple[int, int] | None, RunDirReader] = field(default_factory=dict)

    def identity(self, run: Run) -> tuple[int | None, int | None]:
        """(uid, gid) to act as for this run; (None, None) when that is our own account."""
        return (run.owner_uid, run.owner_gid) if self.is_root and run.owner_uid != 0 else (None, None)

    def reader(self, run: Run) -> RunDirReader:
        """The reader that acts as this run's owner."""
        uid, gid = self.identity(run)
        key = None if uid is None or gid is None else (uid, gid)
        if key not in self._readers:
            self._readers[key] = RunDirReader(uid, gid)
        return self._readers[key]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
