"""A controller that tells one account to back off: questions end in time, and no answer is made up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm.client import CliClient
from slurm.errors import SlurmUnavailable, SubmitUnconfirmed
from slurm.run_as import run_as
from slurm.run_tool import Completed
from slurm.sandbox import Sandbox, SandboxUnavailable
from slurm.sandbox.installed import read_slurm_shape
from slurm.types import Identity, SubmitRequest

NOBODY = Identity(uid=65534, gid=65534)  # the controller never limits root or its own account
LIMITED = "SlurmctldParameters=rl_enable,rl_bucket_size=4,rl_refill_rate=1,rl_refill_period=3600"


def why_not_here() -> str | None:
    try:
        release = read_slurm_shape().version.split(".")[:2]
    except SandboxUnavailable:
        return None  # the marker says it
    if [int(part) for part in release] < [23, 2]:
        return f"Slurm {'.'.join(release)} has no rate limits: make test-debian13 and make test-pyslurm have them"
    return "a question as another account needs root" if os.geteuid() != 0 else None


pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not_here()), reason=str(why_not_here()))]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.start(nodes=1, mode="loopback", extra_conf=LIMITED) as started:
        yield started


def client(sandbox: Sandbox) -> CliClient:
    """What a service sees that runs under an ordinary account."""

    def run(argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        return run_as(argv, timeout_s, env, identity=NOBODY, directory=None, path=sandbox.env["PATH"])

    return CliClient(run=run, parent={**os.environ, **sandbox.env}, timeout_s=3)


def answers_until_limited(client: CliClient) -> Iterator[tuple[str, ...]]:
    with suppress(SlurmUnavailable):
        for _ in range(10):
            yield tuple(node.name for node in client.fetch_nodes().nodes)


def test_a_limited_account_gets_its_answer_or_none_in_time_and_no_second_job(sandbox: Sandbox) -> None:
    limited, unlimited = client(sandbox), CliClient(parent={**os.environ, **sandbox.env})
    answers = list(answers_until_limited(limited))
    assert 0 < len(answers) < 10
    assert set(answers) == {("n1",)}

    begun = time.monotonic()
    with pytest.raises(SlurmUnavailable):
        limited.fetch_jobs()
    script = sandbox.directory / "exit.sh"  # which that account can read
    script.write_text("#!/bin/sh\nexit 0\n")
    request = SubmitRequest(script=script, token="limited", job_name="limited", nodes=1, output=Path("/dev/null"))
    with pytest.raises(SubmitUnconfirmed):  # killed while it backed off: only a look can tell
        limited.submit(request)
    assert time.monotonic() - begun < 30
    assert unlimited.find_by_token("limited", since=datetime.now(UTC) - timedelta(minutes=1)) == ()
