"""Over the whole life of a run: every file of its owner's is touched by processes with the owner's rights alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from supervisor.model import AttemptEnd
from tests.users.accounts import Person
from tests.users.conftest import Service
from tests.users.watching import STRACE, read_touches, watched

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(STRACE is None, reason="no strace")]

SCRIPT = """\
#!/bin/bash
#SBATCH --output=all.log
#SUPERVISE --backoff-s=0 --checkpoint-dir=out --layout=megatron --progress-pattern="step ([0-9]+)"
n=$SUPERVISOR_ATTEMPT
echo "step $n"
mkdir -p out
[ $n = 1 ] && mkfifo out/latest_checkpointed_iteration.txt
[ $n = 2 ] && rm out/latest_checkpointed_iteration.txt && ln -s /etc/shadow out/latest_checkpointed_iteration.txt
until [ -e "end.$n" ]; do sleep 0.1; done
exit $(cat "end.$n")
"""


def test_whatever_becomes_of_a_run_its_files_are_touched_by_its_owner_alone(service: Service, tmp_path: Path) -> None:
    stage, a, b = service.stage, service.a, service.b
    service.restart()  # a new daemon has no children yet: whatever it starts is watched
    assert stage.daemon is not None
    with watched(stage.daemon.pid, tmp_path / "record"):
        for person, name in ((a, "watched-a"), (b, "watched-b")):
            person.write("watched.sh", SCRIPT)
            ended = person.supervisor("sbatch", f"--supervise-name={name}", "watched.sh")
            assert ended.returncode == 0, ended.stderr + stage.log_tail()
        stage.wait("logs", lambda: all((p.home / "all.log").exists() for p in (a, b)))
        # b's folders lead to a's, and a's script is another by now: the copy that was handed in is submitted.
        (a.home / "watched.sh").unlink()
        (a.home / "watched.sh").symlink_to("/etc/shadow")
        b.run("sh", "-c", f"mv .supervisor/watched-b/progress x && ln -s {a.home} .supervisor/watched-b/progress")
        b.run("sh", "-c", f"mv out y && ln -s {a.home}/out out")
        for number, code in ((1, 1), (2, 75), (3, 0)):
            stage.wait("the next attempt", partial(service.has_attempt, "watched-a", number))
            a.write(f"end.{number}", str(code))
        stage.await_state("finished", "watched-a")
        assert b.supervisor("stop", "watched-b").returncode == 0
        stage.wait("the end of b's run", lambda: stage.run("watched-b").state in {"stopped", "held"})
    assert [x.end for x in stage.attempts("watched-a")] == [AttemptEnd.CRASHED, AttemptEnd.SAVED, AttemptEnd.FINISHED]
    assert_own(a, tmp_path / "record", others=b)
    assert_own(b, tmp_path / "record", others=a)
    assert {touch.uid for touch in read_touches(tmp_path / "record", Path("/etc/shadow"))} <= {a.uid}


def assert_own(person: Person, record: Path, *, others: Person) -> None:
    """Nothing below the home was touched with another's rights; what b's links led to was refused by the kernel."""
    touches = read_touches(record, person.home)
    own = [touch for touch in touches if touch.uid == person.uid]
    assert any("openat(" in touch.call and "all.log" in touch.call for touch in own)
    assert any("mkdir" in touch.call for touch in own)
    assert any(touch.call.startswith("chdir(") for touch in own)  # sbatch, in the directory of the submission
    for touch in touches:
        if touch.uid != person.uid:
            assert touch.uid == others.uid, touch
            assert " = -1 E" in touch.call or f'"{others.home}' in touch.call or "symlink" in touch.call, touch
