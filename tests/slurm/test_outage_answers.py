"""What Slurm's tools say while controller or database are away is no answer, whatever they printed before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurm.client import CliClient
from slurm.errors import SlurmError, SlurmRefused, SlurmUnavailable, SubmitUnconfirmed
from slurm.run_tool import Completed
from slurm.types import SubmitRequest

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


# ---- what clients of another kind hear from a real slurmctld; recorded, but for the old credential

NO_MUNGED = """\
{tool}: error: If munged is up, restart with --num-threads=10
{tool}: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory
{tool}: error: slurm_send_node_msg: auth_g_create: {request} has authentication error
"""
NO_PLUGIN = """\
{tool}: error: Couldn't find the specified plugin name for auth/nosuch looking at all files
{tool}: error: cannot find auth plugin for auth/nosuch
{tool}: error: cannot create auth context for auth/nosuch
{tool}: error: slurm_send_node_msg: auth_g_create: {request} has authentication error
"""
OF_22_05_TO_25_11 = """\
{tool}: error: auth_g_unpack: authentication plugin unknown(1007) not found
{tool}: error: slurm_unpack_received_msg: [[head]:23515] Invalid Protocol Version 11264 from uid=4294967295: \
Incompatible versions of client and server code
{tool}: error: slurm_unpack_received_msg: [[head]:23515] Incompatible versions of client and server code
"""
OPENED_BY_NOBODY = """\
{tool}: error: Munge decode failed: Expired credential
{tool}: error: slurm_unpack_received_msg: [[head]:6817] auth_g_verify: RESPONSE has authentication error
"""
AUTH, ZERO = "Protocol authentication error", "Zero Bytes were transmitted or received"
STANDBY, CONNECT = "Slurm backup controller in standby mode", "Unable to contact slurm controller (connect failure)"
CLIENTS = {
    "no munged": (NO_MUNGED, AUTH, SlurmUnavailable),
    "auth plugin not installed": (NO_PLUGIN, AUTH, SlurmUnavailable),
    "auth/none to auth/slurm, 25.11": ("", AUTH, SlurmUnavailable),
    "auth/none to auth/munge, 22.05": ("", ZERO, SubmitUnconfirmed),
    "25.11 to 22.05": ("", ZERO, SubmitUnconfirmed),
    "22.05 to 25.11": (OF_22_05_TO_25_11, "Unspecified error", SubmitUnconfirmed),
    "the answer's credential was too old": (OPENED_BY_NOBODY, AUTH, SubmitUnconfirmed),
    "to a standby": ("", STANDBY, SlurmUnavailable),
    "to another port": ("", CONNECT, SlurmUnavailable),
}


@pytest.mark.parametrize("who", CLIENTS)
def test_a_client_that_the_controller_does_not_understand_has_no_answer_and_no_refusal(who: str) -> None:
    """Cases CO-01, SB-10. A submission is unconfirmed where the request may have been read and the answer was not."""
    before, error, of_a_submission = CLIENTS[who]

    def heard(tool: str, words: str, returncode: int = 1) -> Completed:
        lines = before.format(tool=tool, request="REQUEST_JOB_INFO")
        return Completed(returncode=returncode, stderr=f"{lines}{words}{error}\n")

    said: dict[Callable[[CliClient], object], Completed] = {
        CliClient.fetch_jobs: heard("squeue", "slurm_load_jobs error: "),
        CliClient.fetch_nodes: heard("scontrol", "slurm_load_node error: "),
        CliClient.fetch_cluster: heard("scontrol", "slurm_load_ctl_conf error:"),
        lambda c: c.drain("n1", "broken"): heard("scontrol", "slurm_update error: "),
        lambda c: c.cancel(1): heard("scancel", "scancel: error: Kill job error on job id 1: ", 0),  # 0: seen on 22.05
    }
    for ask, done in said.items():
        with pytest.raises(SlurmUnavailable):
            ask(client(done))
    request = SubmitRequest(script=Path("/r/job.sh"), token="sup:r:1", job_name="r", nodes=1, output=Path("/r/log"))
    with pytest.raises(SlurmError) as caught:
        client(heard("sbatch", "sbatch: error: Batch job submission failed: ")).submit(request)
    assert type(caught.value) is of_a_submission
