"""A daemon under one person's account: it serves that person, and tells others whose it is."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.sandbox.processes import die_with_parent
from tests.users.conftest import Place, Service

pytestmark = pytest.mark.slurm

SAYS = """\
#!/bin/bash
echo "$(id -u) $(umask) $(ulimit -Sn) $API_KEY" >said
"""
RUN = """
name = "file"
command = ["/bin/true"]
root = "{root}"
[nodes]
min = 1
max = 1
"""


@pytest.fixture(scope="module")
def service(place: Place) -> Iterator[Service]:
    """The service of a."""
    stage = place.stage("one-account")
    a, b = place.people(stage)
    for path in (stage.directory, *stage.directory.iterdir()):
        os.chown(path, a.uid, a.gid)
    with stage.daemon_log.open("ab") as log:
        stage.daemon = subprocess.Popen(
            [a.python, "-P", "-s", "-m", "supervisor", "daemon"],
            user=a.uid,
            group=a.gid,
            extra_groups=[],
            umask=0o022,
            cwd="/",
            env={**a.env, "HOME": str(a.home)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - tests that are killed leave no daemon behind
        )
    try:
        stage.wait("the daemon's socket", (stage.directory / "control.sock").exists)
        yield Service(stage=stage, a=a, b=b, admin_gid=place.accounts.group.gr_gid)
    finally:
        stage.close()


def test_a_service_of_one_person_serves_that_person_and_refuses_others_with_a_sentence(service: Service) -> None:
    stage, a, b = service.stage, service.a, service.b
    a.write("says.sh", SAYS)
    limits = {resource.RLIMIT_NOFILE: 555}
    ended = a.supervisor("sbatch", "--supervise-name=says", "says.sh", umask=0o027, limits=limits, API_KEY="x y")
    assert ended.returncode == 0, ended.stderr
    stage.await_state("finished", "says")
    assert (a.home / "said").read_text() == f"{a.uid} 0027 555 x y\n"

    b.write("says.sh", SAYS)
    b.write("run.toml", RUN.format(root=b.home))
    own_job = b.run("sbatch", "--parsable", "--wrap=sleep 60").stdout.strip()
    before = names(b.home)
    for words in (("sbatch", "says.sh"), ("submit", "run.toml"), ("adopt", own_job)):
        refused = b.supervisor(*words)
        assert refused.returncode == 4, refused
        whose = f"this service runs as {a.name} and can submit only that account's jobs, not those of {b.name}"
        assert whose in refused.stderr
    assert names(b.home) == before  # nothing was made for what was refused
    assert b.run("scancel", own_job).returncode == 0
    stopped = b.supervisor("stop", "says")
    assert (stopped.returncode, f"{b.name} may not stop run says" in stopped.stderr) == (4, True)
    assert "says" in b.supervisor("status").stdout


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("slurm-")}


def test_root_is_told_too_that_the_service_is_one_persons(service: Service) -> None:
    refused = service.stage.supervisor("sbatch", "--wrap=true")
    assert (refused.returncode, f"runs as {service.a.name}" in refused.stderr) == (4, True)
