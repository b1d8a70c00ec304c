"""A daemon that is root and two users: each one's script and files are touched with that user's rights alone."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm.sandbox import Sandbox
from supervisor.model import AttemptEnd
from tests.e2e.stage import RIG, Stage

pytestmark = pytest.mark.slurm

ANN, BOB = 65534, 1  # nobody and daemon: accounts that every host has

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=train
#SUPERVISE --backoff-s=0
n=${SUPERVISOR_ATTEMPT:-0}
echo "the first script, attempt $n as $(id -u) with umask $(umask)" >"said.$n"
until [ -e "end.$n" ]; do sleep 0.1; done
exit $(cat "end.$n")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """An account at a shell, in a folder that nobody else may enter."""

    stage: Stage
    uid: int
    home: Path

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**self.stage.env, "HOME": str(self.home), "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(
            [sys.executable, str(RIG / "as_user.py"), str(self.uid), *words],
            cwd=self.home,
            env=env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def write(self, name: str, text: str) -> None:
        (self.home / name).write_text(text)
        os.chown(self.home / name, self.uid, self.uid)

    def await_said(self, number: int) -> str:
        path = self.home / f"said.{number}"
        return self.stage.wait(f"{path.name}", lambda: path.read_text() if path.exists() else "")


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A cluster and a root daemon where every user gets to the socket."""
    if os.geteuid() != 0:
        pytest.fail("a daemon that serves several users is root: run the tests that need Slurm as root")
    folder = Path(tempfile.mkdtemp(prefix="users-"))
    folder.chmod(0o755)
    try:
        with Sandbox.start(nodes=2, directory=folder / "sandbox") as sandbox:
            made = Stage(folder / "stage", sandbox)
            try:
                made.start_daemon()
                yield made
            finally:
                made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def user(stage: Stage, name: str, uid: int) -> User:
    home = stage.directory / name
    home.mkdir(mode=0o700)
    os.chown(home, uid, uid)
    made = User(stage=stage, uid=uid, home=home)
    made.write("train.sh", SCRIPT)
    return made


def test_each_users_script_is_submitted_and_read_as_that_user_and_nobody_elses(stage: Stage) -> None:
    ann, bob = user(stage, "ann", ANN), user(stage, "bob", BOB)
    submitted = ann.call("sbatch", "--parsable", "train.sh")
    assert submitted.returncode == 0, submitted.stderr
    assert ann.await_said(1) == f"the first script, attempt 1 as {ANN} with umask 0077\n"
    assert {job.user for job in stage.jobs()} == {"nobody"}

    # What bob may: see it. What he may not: change it, take it, or hand in a script of hers.
    assert "train" in bob.call("status").stdout
    for words in (("stop", "train"), ("pause", "train"), ("adopt", submitted.stdout.strip())):
        refused = bob.call(*words)
        assert refused.returncode == 4, (words, refused.stderr)
    stolen = bob.call("sbatch", str(ann.home / "train.sh"))
    assert (stolen.returncode, "Unable to open file" in stolen.stderr) == (1, True)
    unread = bob.call("sbatch", f"--supervise-checkpoint-dir={ann.home}", "train.sh")
    assert (unread.returncode, "Permission denied" in unread.stderr) == (2, True)

    # Her script is swapped for another, and her run directory for a link to bob's: the one is not used, the other
    # is followed with her rights alone.
    (ann.home / "train.sh").unlink()
    (ann.home / "train.sh").symlink_to("/etc/shadow")
    ann.write("end.1", "75")
    assert ann.await_said(2).startswith("the first script, attempt 2")
    run_dir = ann.home / ".supervisor/train"
    assert {p.stat().st_uid for p in (run_dir, *run_dir.rglob("*"))} == {ANN}
    run_dir.rename(run_dir.with_name("away"))
    run_dir.symlink_to(bob.home)
    ann.write("end.2", "1")
    stage.wait("a run directory that can't be read", lambda: "run directory of train" in stage.daemon_log.read_text())
    assert sorted(p.name for p in bob.home.iterdir()) == ["train.sh"]
    run_dir.unlink()
    run_dir.with_name("away").rename(run_dir)
    ann.write("end.3", "0")
    stage.await_state("finished", "train")
    assert [a.end for a in stage.attempts("train")] == [AttemptEnd.SAVED, AttemptEnd.CRASHED, AttemptEnd.FINISHED]
    assert stat.S_IMODE((stage.directory / "submissions").stat().st_mode) == 0o700
