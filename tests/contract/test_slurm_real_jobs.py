"""What a real job sees and does: its environment, its signals, its exit code, its paths."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.client import CliClient
from slurm.errors import SlurmUnavailable, SubmitUnconfirmed
from slurm.hostlist import expand_nodes
from slurm.sandbox import Sandbox
from slurm.submission import render_batch_script
from slurm.types import JobRecord, JobState, SubmitRequest

pytestmark = pytest.mark.slurm

# Stands in for the real launcher: tells that it started and which signal ended it.
LAUNCHER = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def end(number, frame):
    folder.joinpath("signal").write_text(str(number))
    os._exit(0)
signal.signal(signal.SIGTERM, end)
folder.joinpath("started").write_text(str(os.getpid()))
if folder.joinpath("exit").exists():
    sys.exit(int(folder.joinpath("exit").read_text()))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    # KillWait far above what a clean end may take: who waits for it fails the test.
    with Sandbox.start(nodes=2, mode="loopback", kill_wait_s=60) as started:
        yield started


@pytest.fixture
def client(sandbox: Sandbox) -> CliClient:
    daemon = {**os.environ, **sandbox.env, "API_KEY": "secret", "SLURM_CPU_BIND": "none", "SBATCH_COMMENT": "x"}
    return CliClient(parent=daemon)


@pytest.fixture
def attempt_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "a b'c $(touch x) 100%j" / "7"
    folder.mkdir(parents=True)
    # In the job's working directory stands another trainer, as it may in a user's own repository.
    for package, text in ((tmp_path / "src", LAUNCHER), (folder, "raise SystemExit('not the launcher')\n")):
        (package / "trainer").mkdir(parents=True)
        (package / "trainer" / "__init__.py").touch()
        (package / "trainer" / "launch.py").write_text(text)
    return folder


def until(condition: Callable[[], bool], *, within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


def submit_launcher(client: CliClient, attempt_dir: Path, token: str) -> int:
    script = attempt_dir / "batch.sh"
    script.write_text(
        render_batch_script(
            python=sys.executable,
            attempt_dir=attempt_dir,
            job_name=token,
            output=attempt_dir / "job.log",
            pythonpath=str(attempt_dir.parents[1] / "src"),
        )
    )
    request = SubmitRequest(
        script=script,
        token=token,
        job_name=token,
        nodes=1,
        output=attempt_dir / "job.log",
        chdir=attempt_dir,
    )
    return client.submit(request).job_id


def job(client: CliClient, job_id: int) -> JobRecord:
    return next(job for job in client.fetch_jobs().jobs if job.job_id == job_id)


def test_the_batch_script_becomes_the_launcher_whatever_its_path(client: CliClient, attempt_dir: Path) -> None:
    job_id = submit_launcher(client, attempt_dir, "starts")
    until((attempt_dir / "started").exists)
    assert (attempt_dir / "job.log").exists()
    client.cancel(job_id)


def test_cancelling_ends_the_launcher_at_once_with_a_term_signal(client: CliClient, attempt_dir: Path) -> None:
    job_id = submit_launcher(client, attempt_dir, "cancelled")
    until((attempt_dir / "started").exists)
    client.cancel(job_id)
    until(lambda: job(client, job_id).state is JobState.CANCELLED, within_s=5)
    assert (attempt_dir / "signal").read_text() == "15"


def test_the_exit_code_of_the_launcher_is_the_jobs(client: CliClient, attempt_dir: Path) -> None:
    (attempt_dir / "exit").write_text("75")
    job_id = submit_launcher(client, attempt_dir, "resubmit")
    until(lambda: job(client, job_id).state is JobState.FAILED)
    assert job(client, job_id).exit_code == 75


def test_a_job_and_its_steps_see_what_was_asked_for_and_nothing_of_the_daemon(
    client: CliClient, tmp_path: Path
) -> None:
    script = tmp_path / "env.sh"
    script.write_text("#!/bin/bash\nenv -0 > batch.env\nsrun -n1 env -0 > step.env\n")
    wanted = {"SUPERVISOR_RUN": "a,b=c 'd'\n$(e)", "EMPTY": ""}
    request = SubmitRequest(
        script=script,
        token="env",
        job_name="env",
        nodes=1,
        output=tmp_path / "log",
        chdir=tmp_path,
        environment=wanted,
    )
    job_id = client.submit(request).job_id
    until(lambda: job(client, job_id).state is JobState.COMPLETED)
    for name in ("batch.env", "step.env"):
        seen = dict(pair.split("=", 1) for pair in (tmp_path / name).read_text().split("\0") if pair)
        assert wanted.items() <= seen.items()
        assert {"PATH", "HOME", "USER", "LANG"} <= seen.keys()
        assert not {"API_KEY", "SBATCH_COMMENT", "SLURM_GET_USER_ENV"} & seen.keys()
        assert seen.get("SLURM_CPU_BIND") != "none"
    assert job(client, job_id).comment == "env"


def test_a_log_is_never_truncated(client: CliClient, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    script = tmp_path / "hello.sh"
    script.write_text("#!/bin/bash\necho hello\n")
    request = SubmitRequest(script=script, token="log", job_name="log", nodes=1, output=log)
    job_id = client.submit(request).job_id
    until(lambda: job(client, job_id).state is JobState.COMPLETED)
    assert log.read_text() == "before\nhello\n"


def test_names_and_comments_of_other_users_cannot_disturb_the_listing(
    client: CliClient, sandbox: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "true.sh").write_text("#!/bin/bash\n")
    for number, hostile in enumerate(("a|b,c", "line\n999\x1fRUNNING", "\x1f" * 30, "é\x1b[31m")):
        done = sandbox.run(
            "sbatch", "-o/dev/null", f"--job-name=n{hostile}", f"--comment=c{hostile}", str(tmp_path / "true.sh")
        )
        assert done.returncode == 0, (number, done.stderr)
    listing = client.fetch_jobs()
    assert 999 not in {job.job_id for job in listing.jobs}
    assert len(listing.unreadable) == 2  # those with the separator in them; the others are read
    assert "na|b,c" in {job.name for job in listing.jobs}


@pytest.mark.parametrize(
    "text", ["rack[1-2]n[01-03]", "node[001,003-004,006]", "b2u[05,02]", "n[9-11]", "a", "gpu_07,n03d"]
)
def test_host_lists_mean_to_us_what_they_mean_to_slurm(sandbox: Sandbox, text: str) -> None:
    said = sandbox.run("scontrol", "show", "hostnames", text).stdout.split()
    assert list(expand_nodes(text)) == said


def test_sbatch_that_finds_no_controller_certainly_submitted_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "true.sh"
    script.write_text("#!/bin/bash\n")
    # The same cluster's configuration with a port where nobody listens; one second of retries instead of ten.
    conf = tmp_path / "slurm.conf"
    lines = Path(sandbox.env["SLURM_CONF"]).read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("SlurmctldPort", "MessageTimeout"))]
    conf.write_text("\n".join([*kept, "SlurmctldPort=1", "MessageTimeout=2"]) + "\n")
    lost = CliClient(parent={**os.environ, **sandbox.env, "SLURM_CONF": str(conf)})
    request = SubmitRequest(script=script, token="t", job_name="t", nodes=1, output=tmp_path / "log")
    with pytest.raises(SlurmUnavailable, match="connect failure") as caught:
        lost.submit(request)
    assert not isinstance(caught.value, SubmitUnconfirmed)
    with pytest.raises(SlurmUnavailable, match="connect failure"):
        lost.fetch_jobs()


def test_reading_needs_no_submitit(tmp_path: Path) -> None:
    code = "import sys, slurm.client; sys.exit(bool({'submitit', 'ClusterShell', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
