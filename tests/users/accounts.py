"""Two real accounts of this host and a group, for the time of a test session; and a Python that they may run."""

from __future__ import annotations

import fcntl
import grp
import importlib.metadata
import os
import pwd
import resource
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[2]
_MAX_SESSIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """An account at a shell in its home, which is closed to others."""

    name: str
    uid: int
    gid: int
    home: Path
    python: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def run(
        self,
        *argv: str,
        groups: tuple[int, ...] = (),
        umask: int = 0o077,
        limits: Mapping[int, int] | None = None,
        cwd: Path | None = None,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        """A command as this person and nothing of root's; the caller reads its exit code."""

        def limit() -> None:
            for number, soft in (limits or {}).items():
                resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))

        return subprocess.run(
            argv,
            user=self.uid,
            group=self.gid,
            extra_groups=[self.gid, *groups],
            umask=umask,
            cwd=cwd or self.home,
            env={**self.env, "HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            preexec_fn=limit,
        )

    def supervisor(self, *words: str, **more: object) -> subprocess.CompletedProcess[str]:
        """A `supervisor` command; `more` as for run."""
        return self.run(str(self.python), "-P", "-s", "-m", "supervisor", *words, **more)  # type: ignore[arg-type]

    def write(self, name: str, text: str) -> Path:
        """A file of this person's in the home."""
        path = self.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        for made in {path, path.parent}:
            os.lchown(made, self.uid, self.gid)
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """Two accounts and a group."""

    people: tuple[pwd.struct_passwd, ...]
    group: grp.struct_group


@contextmanager
def accounts() -> Iterator[Accounts]:
    """Made now, or left by a session that was killed; at the end they and their processes are gone."""
    with _slot() as slot:
        names, group = (f"sup-test-a{slot}", f"sup-test-b{slot}"), f"sup-test-admin{slot}"
        _call("groupadd", "--force", group)
        for name in names:
            if not _exists(name):
                _call("useradd", "--no-create-home", "--home-dir=/nonexistent", "--user-group", name)
        people = tuple(pwd.getpwnam(name) for name in names)
        try:
            end_processes({entry.pw_uid for entry in people})
            yield Accounts(people=people, group=grp.getgrnam(group))
        finally:
            end_processes({entry.pw_uid for entry in people})
            for name in names:
                _call("userdel", "--force", name)
            _call("groupdel", group)


def _call(*argv: str) -> None:
    """One of the tools that change accounts: only one at a time may."""
    until = time.monotonic() + 20
    while True:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            return
        assert "lock" in done.stderr, done.stderr
        assert time.monotonic() < until, done.stderr
        time.sleep(0.1)


def _exists(name: str) -> bool:
    with suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


@contextmanager
def _slot() -> Iterator[str]:
    """What makes the names this session's own: several may run at once."""
    for number in range(_MAX_SESSIONS):
        with Path(f"/run/lock/sup-test-accounts.{number}").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield str(number) if number else ""
            return
    raise AssertionError(f"{_MAX_SESSIONS} other sessions use accounts for tests")


def end_processes(uids: set[int]) -> None:
    """Kill whatever runs under these accounts, until nothing does."""
    until = time.monotonic() + 10
    while (left := processes_of(uids)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_of(uids: set[int]) -> list[int]:
    """Numbers of the processes that run under these accounts."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            if int(folder.name) and int(lines["Uid"].split()[0]) in uids and lines["State"].split()[0] != "Z":
                found.append(int(folder.name))
    return found


# ---------------------------------------------------------------- a Python for everybody


def make_python(folder: Path) -> Path | None:
    """An interpreter in `folder` that any account may run, with this project in it; None when others get to none.

    Where others don't get to the checkout or to its packages (a clone in a folder of root's), both are copied.
    """
    base, packages = _find_interpreter(), Path(sysconfig.get_path("purelib"))
    if base is None:
        return None
    site = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    if _is_open(CHECKOUT) and _is_open(packages):
        (site / "places.pth").write_text(f"{CHECKOUT}\n{packages}\n")
    else:
        for package in ("slurm", "supervisor", "trainer"):
            shutil.copytree(CHECKOUT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in _needed("slurm-supervisor"):
            _copy_distribution(name, site)
    return folder / "bin/python"


def _needed(name: str) -> set[str]:
    """The distributions that one needs, those that they need too, without extras and without itself."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for line in importlib.metadata.requires(waiting.pop()) or ():
            requirement = Requirement(line)
            if requirement.name not in found and (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                found.add(requirement.name)
                waiting.append(requirement.name)
    return found


def _copy_distribution(name: str, site: Path) -> None:
    for file in importlib.metadata.files(name) or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:  # what lies outside are commands
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), target)


def _find_interpreter() -> Path | None:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sys.executable).resolve()
    others = (shutil.which(name, path=place) for place in ("/usr/bin", "/usr/local/bin", "/opt/bin"))
    candidates = [own, *(Path(path).resolve() for path in others if path)]
    return next((path for path in candidates if _is_open(path)), None)


def _is_open(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))
