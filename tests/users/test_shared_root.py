"""A root for run directories that another person may write to, and who uses it: nothing of the owner's is reached."""

from __future__ import annotations

from functools import partial

import pytest

from tests.users.conftest import Service

pytestmark = pytest.mark.slurm

SCRIPT = """\
#!/bin/bash
#SUPERVISE --backoff-s=0
until [ -e "end.$SUPERVISOR_ATTEMPT" ]; do sleep 0.1; done
exit $(cat "end.$SUPERVISOR_ATTEMPT")
"""


def test_folders_that_another_person_swaps_are_not_written_to_with_the_owners_rights(service: Service) -> None:
    stage, a, b = service.stage, service.a, service.b
    root = stage.directory / "shared"
    root.mkdir()
    root.chmod(0o777)
    a.write("waits.sh", SCRIPT)
    private = a.write("private/job.log", "what a keeps from b\n").parent
    ended = a.supervisor("sbatch", "--supervise-name=swapped", f"--supervise-root={root}", "waits.sh")
    assert ended.returncode == 0, ended.stderr

    planted = f"mv swapped away && mkdir -p swapped/attempts && ln -s {private} swapped/attempts/1"
    assert b.run("sh", "-c", f"{planted} && ln -s {private} swapped/attempts/2", cwd=root).returncode == 0
    a.write("end.1", "75")
    said = f"belongs to uid {b.uid}, not to uid {a.uid}"
    stage.wait("that the folder is another's", lambda: said in stage.daemon_log.read_text())
    assert [path.name for path in private.iterdir()] == ["job.log"]
    assert b"what a keeps from b" not in (stage.directory / "ledger.db-wal").read_bytes()

    assert b.run("sh", "-c", "rm -r swapped && mv away swapped", cwd=root).returncode == 0
    stage.wait("the next attempt", partial(service.has_attempt, "swapped", 2))
    a.write("end.2", "0")
    stage.await_state("finished", "swapped")
