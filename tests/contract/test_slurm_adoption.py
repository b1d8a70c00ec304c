"""What an adoption relies on, held to FakeSlurm and to a real Slurm: describe a job, fetch its script, claim it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from slurm.errors import SlurmRefused
from slurm.sandbox import Sandbox
from slurm.submitted import read_release, read_submitted
from slurm.types import Identity, JobState
from tests.contract.subjects import Cluster, FakeSubject, RealSubject

NOBODY = Identity(uid=65534, gid=65534, umask=0o077)
DAEMON = Identity(uid=1, gid=1)  # an account that every machine has


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.start(nodes=2, mode="loopback") as started:
        yield started


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slurm)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    if request.param == "fake":
        yield Cluster(FakeSubject(tmp_path))
        return
    real = Cluster(RealSubject(tmp_path, request.getfixturevalue("sandbox")))
    yield real
    for job_id in real.submitted:
        real.client.cancel(job_id)
    real.until_idle()


def test_a_claimed_job_is_found_by_its_token_and_slurm_does_not_requeue_it(cluster: Cluster) -> None:
    since = cluster.subject.now() - timedelta(seconds=2)
    job_id = cluster.submit("before")
    cluster.until_state(job_id, JobState.RUNNING)
    cluster.client.claim(job_id, "sup:claimed:1")
    assert [job.job_id for job in cluster.client.find_by_token("sup:claimed:1", since=since)] == [job_id]
    assert cluster.client.find_by_token("before", since=since) == ()
    description = cluster.client.describe_job(job_id)
    assert (description.comment, description.is_requeue) == ("sup:claimed:1", False)
    assert cluster.job(job_id).state is JobState.RUNNING


def test_a_job_that_is_not_there_is_refused(cluster: Cluster) -> None:
    with pytest.raises(SlurmRefused):
        cluster.client.claim(4_000_000, "sup:run:1")
    with pytest.raises(SlurmRefused):
        cluster.client.describe_job(4_000_000)
    with pytest.raises(SlurmRefused):
        cluster.client.fetch_script(4_000_000)


def test_a_job_that_has_ended_can_still_be_described_and_not_claimed(cluster: Cluster) -> None:
    job_id = cluster.submit("over", body="exit 3")
    cluster.until_state(job_id, JobState.FAILED)
    assert cluster.client.describe_job(job_id).state is JobState.FAILED
    with pytest.raises(SlurmRefused):
        cluster.client.claim(job_id, "sup:over:1")
    assert cluster.job(job_id).comment == "over"


def test_a_job_is_described_as_it_was_submitted(cluster: Cluster) -> None:
    cluster.until_state(cluster.submit("holds", nodes=2), JobState.RUNNING)
    directory = cluster.subject.directory
    job_id = cluster.submit(
        "waits",
        nodes=1,
        arguments=("--lr=3", "a"),
        chdir=directory,
        exclude=("n2",),
        time_limit="1-02:00:00",
    )
    found = cluster.client.describe_job(job_id)
    assert (found.job_id, found.name, found.user, found.uid) == (job_id, "waits", "root", 0)
    assert (found.state, found.partition, found.nodes, found.exclude) == (JobState.PENDING, "main", 1, "n2")
    assert (found.time_limit, found.work_dir) == ("1-02:00:00", str(directory))
    release = read_release(cluster.client.fetch_cluster().version)
    submitted = read_submitted(found, release=release)
    is_told = bool(found.submit_line) or release is None or release <= (22, 5)  # else accounting alone would know
    told = ("--lr=3", "a") if is_told else None
    assert (submitted.script, submitted.arguments, submitted.is_certain) == (f"{directory}/waits.sh", told, False)
    assert found.stdout == str(directory / "waits.log")
    assert (found.is_batch, found.is_array, found.is_het) == (True, False, False)


def test_the_script_of_a_job_comes_back_as_it_was(cluster: Cluster) -> None:
    job_id = cluster.submit("script", body="echo 'é  %j' \"\\$x\"\n\n# end without a line break\nexec sleep 600")
    assert cluster.client.fetch_script(job_id) == (cluster.subject.directory / "script.sh").read_text()


# ---------------------------------------------------------------- as somebody else


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anybody may enter: not below pytest's own, which any session that starts closes again."""
    with tempfile.TemporaryDirectory(prefix="open-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_submission_and_a_claim_have_the_rights_of_the_person_and_no_others(
    sandbox: Sandbox, open_folder: Path
) -> None:
    real = Cluster(RealSubject(open_folder, sandbox))
    theirs = open_folder / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY.uid, NOBODY.gid)
    body = 'id -un; id -Gn; umask; echo "$SLURM_SUBMIT_DIR $LD_LIBRARY_PATH $1" ; exit 0'
    request = real.request(
        "theirs",
        body=body,
        identity=NOBODY,
        submit_dir=theirs,
        output=None,
        arguments=("two words",),
        environment={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/nowhere", "SLURM_JOB_ID": "7"},
        is_own_environment=True,
        options=("--output=log",),
    )
    job_id = real.client.submit(request).job_id
    real.until_state(job_id, JobState.COMPLETED)
    assert (theirs / "log").read_text() == f"nobody\nnogroup\n0077\n{theirs} /nowhere two words\n"
    assert (theirs / "log").stat().st_uid == NOBODY.uid

    held = real.client.submit(real.request("held", identity=NOBODY, submit_dir=theirs, options=("--hold",))).job_id
    real.submitted.append(held)
    with pytest.raises(SlurmRefused):
        real.client.claim(held, "sup:run:1", DAEMON)
    assert real.client.describe_job(held).comment == "held"
    real.client.claim(held, "sup:run:1", NOBODY)
    assert real.client.describe_job(held).comment == "sup:run:1"
    real.client.cancel(held)


@pytest.mark.slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_what_a_person_may_not_read_is_not_submitted_for_them(sandbox: Sandbox, open_folder: Path) -> None:
    real = Cluster(RealSubject(open_folder, sandbox))
    request = real.request("secret", identity=NOBODY, output=None)
    request.script.chmod(0o600)
    with pytest.raises(SlurmRefused, match="Unable to open file"):
        real.client.submit(request)
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(SlurmRefused, match="Permission denied"):
        real.client.submit(real.request("where", identity=NOBODY, output=None, submit_dir=closed))
    assert not [job for job in real.client.fetch_jobs().jobs if job.comment in ("secret", "where")]
