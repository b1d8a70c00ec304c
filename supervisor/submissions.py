"""What is kept of a person's own batch script beside the ledger: its text, and the environment it was handed in with.

Environments hold secrets, so nothing of this is ever in the ledger, in its backups, in a log or in an answer. One file
a run in a folder that only the service's account can enter; it is on disk before the run's row is committed, and goes
when the run is finished. What can't be removed is said in the log once, and stops nothing.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import xxhash

from supervisor.jobfiles import NotAFile, open_regular
from trainer.contract import fsync_dir, is_run_name

MAX_FILE_BYTES = 4 * 1024 * 1024  # bounds of a request, as JSON at its widest
KEEP_UNKNOWN_S = 86_400.0  # what no run of the ledger is known for: an older ledger may have been put back
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_BATCH_FOLDER_MODE = 0o711  # sbatch runs as the owner of the script, who must get to it by its name
_BATCH_FILE_MODE = 0o400


class SubmissionLost(Exception):
    """What was kept of a run's submission is not there, or not what was kept; the message is one line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A batch script as it was handed in. Its representation shows no value of the environment."""

    text: str
    environment: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Submission({len(self.text)} characters, {len(self.environment)} variables)"


def digest_of(text: str) -> str:
    """xxh3-128 of a script's text, as in ScriptSpec.digest."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


class Submissions:
    """The folders beside one ledger: `submissions/` for what is kept, `batch/` for what sbatch is given."""

    def __init__(self, ledger: Path) -> None:
        self._folder = ledger.parent / "submissions"
        self._batch = ledger.parent / "batch"
        self._told: set[str] = set()

    # ---- what is kept

    def keep(self, run: str, submission: Submission) -> None:
        """Keep it, on disk when the call returns; replaces what was kept under this name. Raises OSError."""
        _make_folder(self._folder, _FOLDER_MODE)
        _publish(self._path(run), _render(submission), _FILE_MODE)

    def load(self, run: str, *, digest: str) -> Submission:
        """What was kept for a run whose script has this digest. Raises SubmissionLost."""
        path = self._path(run)
        try:
            _require_own(self._folder)
            with open_regular(path) as fd:
                kept = _parse(_read(fd))
        except FileNotFoundError:
            raise SubmissionLost(f"the script and environment kept in {path} are gone; {_WAY_ON}") from None
        except (OSError, NotAFile, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise SubmissionLost(f"what is kept of the script in {path} can't be used: {why}; {_WAY_ON}") from None
        if digest != digest_of(kept.text):
            raise SubmissionLost(f"the script kept in {path} is not the one that was submitted; {_WAY_ON}")
        return kept

    def drop(self, run: str) -> None:
        """Remove what was kept for a run; what is gone is done."""
        if self._is_own(self._folder):
            self._remove(self._path(run))
        for path, (name, _) in self._batches():
            if name == run:
                self._remove(path)

    def drop_others(self, runs: Collection[str], *, known: Collection[str]) -> None:
        """Remove what no run of these names needs: of `known` ones at once, of others when it is a day old.

        Those are left by a request whose run was never committed, or belong to runs that a ledger put back has lost.
        """
        for path in self._files(self._folder):
            name = path.name.removesuffix(".json")
            is_half = path.name.startswith(".") and path.name.endswith(".tmp")  # the writer was killed
            is_other = path.name.endswith(".json") and name not in runs
            if is_half or (is_other and (name in known or self._age_s(path) > KEEP_UNKNOWN_S)):
                self._remove(path)

    # ---- what sbatch is given

    def write_batch(self, run: str, attempt: int, text: str, owner: tuple[int, int] | None) -> Path:
        """A new file with the script's text that nobody but the service can replace; `owner` may read it.

        Made anew in a folder that only the service can change: between this and sbatch's reading nobody can swap it.
        Raises OSError.
        """
        _make_folder(self._batch, _BATCH_FOLDER_MODE)
        path = self._batch / f"{run}.{attempt}.sh"
        path.unlink(missing_ok=True)
        _write_new(path, text.encode("utf-8", "surrogateescape"), _BATCH_FILE_MODE, owner)
        return path

    def remove_batch(self, run: str, attempt: int) -> None:
        """Remove what sbatch was given: Slurm has its own copy. Raises nothing: sbatch's answer must not be lost."""
        if self._is_own(self._batch):
            self._remove(self._batch / f"{run}.{attempt}.sh")

    def remove_batches(self, submitting: Collection[tuple[str, int]]) -> None:
        """Remove what a service that was killed left, but for the (run, attempt) that are being submitted."""
        for path, attempt in self._batches():
            if attempt not in submitting:
                self._remove(path)

    # ---- removing

    def _batches(self) -> Iterator[tuple[Path, tuple[str, int]]]:
        for path in self._files(self._batch):
            run, _, number = path.name.removesuffix(".sh").rpartition(".")
            if path.name.endswith(".sh") and is_run_name(run) and number.isascii() and number.isdigit():
                yield path, (run, int(number[:18]))

    def _files(self, folder: Path) -> list[Path]:
        """What lies in a folder of ours; none where something else stands there, or it can't be read."""
        if not self._is_own(folder):
            return []
        try:
            return [folder / name for name in os.listdir(folder)]  # noqa: PTH208 - to the end: files are removed
        except OSError as error:
            self._tell(folder, f"can't be read: {error.strerror}")
            return []

    def _is_own(self, folder: Path) -> bool:
        try:
            _require_own(folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._tell(folder, f"nothing in it is touched: {error.strerror}")
            return False
        return True

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._tell(path, f"can't be removed: {error.strerror}")

    def _tell(self, path: Path, what: str) -> None:
        shown = ascii(str(path))[1:-1]
        if shown not in self._told:
            self._told.add(shown)
            structlog.get_logger("submissions").warning("kept.stays", reason=f"{shown} {what}")

    def _age_s(self, path: Path) -> float:
        try:
            return time.time() - path.lstat().st_mtime
        except OSError:
            return 0.0

    def _path(self, run: str) -> Path:
        if not is_run_name(run):
            raise ValueError(f"{run!r} is not the name of a run")
        return self._folder / f"{run}.json"


_WAY_ON = "stop this run and submit the script again (its checkpoints stay)"


def _render(submission: Submission) -> bytes:
    record = {
        "text": submission.text,
        "environment": dict(submission.environment),
        "digest": _digest_of_all(submission),
    }
    return json.dumps(record).encode()  # ASCII: it carries what is no UTF-8, where other encoders refuse


def _parse(data: bytes) -> Submission:
    """Raises ValueError."""
    try:
        record = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    match record:
        case {"text": str(text), "environment": dict(environment), "digest": str(digest)}:
            kept = Submission(text=text, environment={str(name): str(value) for name, value in environment.items()})
        case _:
            raise ValueError("not a record of a submission")
    if digest != _digest_of_all(kept):
        raise ValueError("it was changed, or not written to its end")
    return kept


def _digest_of_all(submission: Submission) -> str:
    """Of everything that is kept; it stays in the file itself, because it says something of the secrets."""
    parts = [submission.text, *(f"{name}={value}" for name, value in sorted(submission.environment.items()))]
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def _make_folder(path: Path, mode: int) -> None:
    """A folder that is the service's own. Raises OSError, also when something else stands there."""
    with suppress(FileExistsError):
        path.mkdir(mode=mode, parents=True)
    if stat.S_IMODE(_require_own(path).st_mode) != mode:
        path.chmod(mode)


def _require_own(path: Path) -> os.stat_result:
    """Raises OSError where something else stands than a folder of this account's: a link of it leads elsewhere."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder of the service's own", str(path))
    return found


def _publish(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        _write_new(temporary, data, mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def _write_new(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fchmod(fd, mode)  # whatever the umask; first, for afterwards the file may be another's
        if owner is not None:
            os.fchown(fd, *owner)
        os.fsync(fd)


def _read(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    return data
