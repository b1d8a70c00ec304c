"""A root daemon on a real cluster, and two people who use it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm.sandbox import Sandbox
from tests.e2e.stage import RIG, Stage
from tests.users.accounts import Accounts, Person, accounts, make_python


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the tests of one file share: a folder that everybody gets through, a cluster, a Python, two accounts."""

    folder: Path
    sandbox: Sandbox
    python: Path
    accounts: Accounts

    def stage(self, name: str) -> Stage:
        """A service that is not started yet; members of a group are its admins."""
        made = Stage(self.folder / name, self.sandbox)
        tests, copied = RIG.parents[1], made.directory / "tests"  # others may not get to the checkout
        for rig in (RIG, tests / "trainer/launch_rig"):
            shutil.copytree(rig, copied / rig.relative_to(tests), ignore=shutil.ignore_patterns("__pycache__"))
        launcher = made.directory / "python"
        text = launcher.read_text().replace(sys.executable, str(self.python))
        launcher.write_text(text.replace(str(RIG), str(copied / RIG.relative_to(tests))))
        text, group = made.config.read_text(), self.accounts.group.gr_name
        made.config.write_text(text.replace("[control]", f'[control]\nadmin_group = "{group}"'))
        return made

    def people(self, stage: Stage) -> tuple[Person, Person]:
        """Both accounts at shells that know this service, in new homes."""
        env = {"PATH": os.environ["PATH"], **self.sandbox.env, "SUPERVISOR_CONFIG": str(stage.config)}
        first, second = (self._person(entry, env) for entry in self.accounts.people)
        return first, second

    def _person(self, entry: pwd.struct_passwd, env: dict[str, str]) -> Person:
        home = Path(tempfile.mkdtemp(prefix=f"home-{entry.pw_name}-", dir=self.folder))
        os.chown(home, entry.pw_uid, entry.pw_gid)
        return Person(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, home=home, python=self.python, env=env)


@pytest.fixture(scope="session")
def everybodys_python() -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("two real accounts are made: that needs root and useradd")
    folder = _make_folder()
    try:
        python = make_python(folder / "python")
        if python is None:
            pytest.skip("other accounts get to no Python of this version")
        yield python
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def place(everybodys_python: Path) -> Iterator[Place]:
    folder = _make_folder()
    try:
        with (
            accounts() as made,
            Sandbox.start(nodes=4, directory=folder / "sandbox", extra_conf="PropagateResourceLimits=ALL\n") as sandbox,
        ):
            yield Place(folder=folder, sandbox=sandbox, python=everybodys_python, accounts=made)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="users-"))
    folder.chmod(0o755)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A daemon that runs as root, and two people."""

    stage: Stage
    a: Person
    b: Person
    admin_gid: int

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the daemon; one that was only starting, or is killed, leaves its socket."""
        self.stage.end_daemon(number)
        (self.stage.directory / "control.sock").unlink(missing_ok=True)

    def restart(self) -> None:
        """Another daemon, which answers."""
        self.end()
        self.stage.start_daemon()

    def has_attempt(self, run: str, number: int) -> bool:
        """True once this attempt is planned."""
        return len(self.stage.attempts(run)) >= number


@pytest.fixture(scope="module")
def root_stage(place: Place) -> Iterator[Stage]:
    """A service that runs as root."""
    stage = place.stage("service")
    try:
        stage.start_daemon()
        yield stage
    finally:
        stage.close()


@pytest.fixture
def service(place: Place, root_stage: Stage) -> Service:
    """The service that runs as root, and two people who have nothing in their homes yet."""
    a, b = place.people(root_stage)
    return Service(stage=root_stage, a=a, b=b, admin_gid=place.accounts.group.gr_gid)
