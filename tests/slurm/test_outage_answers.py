"""What Slurm's tools say while controller or database are away is no answer, whatever they printed before."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from slurm.client import CliClient
from slurm.errors import SlurmRefused, SlurmUnavailable
from slurm.run_tool import Completed

SINCE = datetime(2026, 3, 2, tzinfo=UTC)
HALF_A_LIST = "55\x1fRUNNING\x1f0"
SAID = [
    "slurm_load_jobs error: Slurm backup controller in standby mode",
    "slurm_load_jobs error: Protocol authentication error",
    "slurm_load_jobs error: Incompatible versions of client and server code",
    "slurm_load_jobs error: Rate limit exceeded, please retry later",
    "slurm_load_jobs error: Invalid argument of a release to come",
    "squeue: error: Zero Bytes were transmitted or received",
]


def client(done: Completed) -> CliClient:
    def run(argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        return done

    return CliClient(run=run, parent={})


@pytest.mark.parametrize("returncode", [0, 1])
@pytest.mark.parametrize("stdout", ["", HALF_A_LIST])
@pytest.mark.parametrize("stderr", SAID)
def test_an_error_of_the_controller_is_no_answer(stderr: str, stdout: str, returncode: int) -> None:
    """Case CO-01."""
    asked = client(Completed(returncode=returncode, stdout=stdout, stderr=f"{stderr}\n"))
    with pytest.raises(SlurmUnavailable):
        asked.fetch_jobs()


@pytest.mark.parametrize(
    "stderr",
    [
        "sacct: error: _open_persist_conn: failed to open persistent connection to host:ctl1:6819: Connection refused",
        "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:ctl1:6819",
        "sacct: error: Problem talking to the database: Connection refused",
        "sacct: error: Sending PersistInit msg: Connection refused",
    ],
)
@pytest.mark.parametrize("returncode", [0, 1])
def test_a_database_that_is_away_is_no_answer_and_what_was_printed_is_not_used(stderr: str, returncode: int) -> None:
    """Case CO-03."""
    asked = client(Completed(returncode=returncode, stdout=HALF_A_LIST, stderr=stderr))
    with pytest.raises(SlurmUnavailable):
        asked.fetch_ended_jobs(since=SINCE)


def test_a_cluster_without_accounting_says_no_and_that_is_not_an_outage() -> None:
    """Case CO-04."""
    asked = client(Completed(returncode=1, stderr="Slurm accounting storage is disabled\n"))
    with pytest.raises(SlurmRefused):
        asked.fetch_ended_jobs(since=SINCE)


def test_a_warning_about_the_configuration_is_no_error() -> None:
    asked = client(Completed(returncode=0, stderr="squeue: error: Ignoring obsolete FastSchedule=1 option.\n"))
    assert asked.fetch_jobs().jobs == ()
