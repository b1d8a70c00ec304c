"""The client over pyslurm, with a module of that name in its child that fails as the real one does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slurm.client import CliClient
from slurm.errors import SlurmUnavailable, SlurmUnreadable
from slurm.pyslurm_client import Choice, PyslurmClient, choose_client, parse_job_row, parse_node_row
from slurm.types import JobFlag, JobRecord, JobState, NodeAvailability, NodeBase
from tests.fakes import FakeClock, FakeSlurm

STAND_IN = Path(__file__).with_name("stand_in") / "pyslurm.py"
AT = int(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp())

CONFIG = {
    "cluster_name": "big",
    "version": "25.11.1",
    "accounting_storage_type": "accounting_storage/slurmdbd",
    "slurmd_timeout": 300,
    "min_job_age": 300,
    "message_timeout": 10,
    "slurmd_port": 6818,
}
JOB = {
    "id": 7,
    "state": "RUNNING",
    "name": "gpt",
    "user_id": 1000,
    "user_name": "ann",
    "partition": "gpu",
    "comment": "sup:gpt:1",
    "state_reason": "None",
    "allocated_nodes": "n[1-2]",
    "submit_time": AT,
    "start_time": AT + 1,
    "end_time": AT + 3600,
    "exit_status": 0,  # Slurm's own word, which the stand-in splits as pyslurm does
    "requeue_count": 0,
}
NODE = {
    "name": "n1",
    "state": "IDLE+DRAIN",
    "address": "10.0.0.1",
    "hostname": "node1",
    "slurmd_port": 6818,
    "partitions": ["gpu", "all"],
    "reason": "sup: disk",
    "reason_user": "root",
    "reason_time": AT,
    "total_cpus": 64,
    "real_memory": 512000,
    "configured_gres": {"gpu:h100": 8},
    "boot_time": AT,
    "slurm_version": "25.11.1",
}
PARTITIONS = [{"name": "all", "is_default": False}, {"name": "gpu", "is_default": True}]
PLAN = {"version": "25.11.2", "config": CONFIG, "partitions": PARTITIONS, "jobs": [JOB], "nodes": [NODE]}


class Rig:
    """A folder with the stand-in, an environment that leads to it, and a command line that is another cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(STAND_IN, folder)
        self.cli = FakeSlurm(clock=FakeClock(), nodes=4)
        self.parent = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
        self.plan()

    def plan(self, **changes: Any) -> None:
        (self.folder / "plan.json").write_text(json.dumps({**PLAN, **changes}))

    def client(self, *, timeout_s: float = 15.0, **more: Any) -> PyslurmClient:
        return PyslurmClient(cli=self.cli, parent=self.parent, timeout_s=timeout_s, **more)

    def choose(self, **more: Any) -> Choice:
        return choose_client("auto", cli=self.cli, parent=self.parent, timeout_s=5.0, **more)

    def children(self) -> set[str]:
        """Process ids of the children that were asked for something."""
        return {line.split()[1] for line in (self.folder / "loads").read_text().splitlines()}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def client(rig: Rig) -> Iterator[Callable[..., PyslurmClient]]:
    with ExitStack() as stack:

        def make(**more: Any) -> PyslurmClient:
            made = rig.client(**more)
            stack.callback(made.close)
            return made

        yield make


def test_jobs_nodes_and_cluster_are_read_by_one_child(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    pyslurm = client()
    assert [(job.job_id, job.nodes) for job in pyslurm.fetch_jobs().jobs] == [(7, ("n1", "n2"))]
    assert [node.name for node in pyslurm.fetch_nodes().nodes] == ["n1"]
    facts = pyslurm.fetch_cluster()
    assert (facts.cluster, facts.version, facts.has_accounting) == ("big", "25.11.1", True)
    assert (facts.partitions, facts.default_partition) == (("all", "gpu"), "gpu")
    assert len(rig.children()) == 1


def test_what_changes_something_goes_to_the_command_line(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    client().drain("n2", "sup: test")
    assert [node.name for node in rig.cli.fetch_nodes().nodes if node.is_drain_set] == ["n2"]
    assert not (rig.folder / "loads").exists()


def test_an_import_that_ends_the_process_is_no_answer_with_its_last_words(
    rig: Rig, client: Callable[..., PyslurmClient]
) -> None:
    rig.plan(import_ends=True)
    with pytest.raises(SlurmUnavailable, match=r"exit code 1: fatal: Could not establish a configuration source"):
        client().fetch_jobs()


def test_a_child_that_died_is_replaced_at_the_next_question(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    pyslurm = client()
    rig.plan(dies="jobs")
    with pytest.raises(SlurmUnavailable, match="exit code 11"):
        pyslurm.fetch_jobs()
    rig.plan()
    assert len(pyslurm.fetch_jobs().jobs) == 1
    assert len(rig.children()) == 2


def test_a_load_that_hangs_costs_its_deadline_and_its_child(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    rig.plan(hangs="nodes")
    pyslurm = client(timeout_s=3.0)
    begun = time.monotonic()
    with pytest.raises(SlurmUnavailable, match="no answer in time"):
        pyslurm.fetch_nodes()
    assert time.monotonic() - begun < 8
    (child,) = rig.children()
    assert not Path("/proc", child).exists()
    rig.plan()
    assert len(pyslurm.fetch_nodes().nodes) == 1


def test_garbage_in_place_of_an_answer_is_no_answer(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    rig.plan(garbage="jobs")
    with pytest.raises(SlurmUnavailable, match="no JSON"):
        client().fetch_jobs()


def test_an_error_of_the_library_is_told_in_its_words_and_keeps_the_child(
    rig: Rig, client: Callable[..., PyslurmClient]
) -> None:
    rig.plan(refuses="jobs")
    pyslurm = client()
    with pytest.raises(SlurmUnavailable, match="RPCError: Unable to contact slurm controller"):
        pyslurm.fetch_jobs()
    pyslurm.fetch_nodes()
    assert len(rig.children()) == 1


def test_one_bad_row_is_reported_and_hides_no_other(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    rig.plan(jobs=[{**JOB, "allocated_nodes": "n[1-"}, {"id": 8}, JOB])
    listing = client().fetch_jobs()
    assert [job.job_id for job in listing.jobs] == [7]
    assert len(listing.unreadable) == 2


def test_no_node_at_all_is_unreadable(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    rig.plan(nodes=[])
    with pytest.raises(SlurmUnreadable):
        client().fetch_nodes()


def test_after_three_failures_in_a_row_the_command_line_is_asked_and_it_is_said_once(
    rig: Rig, client: Callable[..., PyslurmClient]
) -> None:
    said: list[str] = []
    rig.plan(dies="jobs")
    pyslurm = client(on_notice=said.append)
    for _ in range(2):
        with pytest.raises(SlurmUnavailable):
            pyslurm.fetch_jobs()
        assert len(pyslurm.fetch_nodes().nodes) == 1  # which the library can read: that excuses nothing
    assert said == []
    assert [pyslurm.fetch_jobs().jobs for _ in range(3)] == [(), (), ()]
    assert len(said) == 1
    assert "jobs by the commands" in said[0]
    assert len(pyslurm.fetch_nodes().nodes) == 1


def test_a_child_whose_library_fails_again_and_again_is_replaced_and_reads_the_configuration_anew(
    rig: Rig, client: Callable[..., PyslurmClient]
) -> None:
    rig.plan(refuses="jobs")
    pyslurm = client()
    for _ in range(2):
        with pytest.raises(SlurmUnavailable):
            pyslurm.fetch_jobs()
    assert len(rig.children()) == 1
    pyslurm.fetch_jobs()
    pyslurm.fetch_nodes()
    assert len(rig.children()) == 2


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_a_hundred_questions_leave_one_child_and_no_open_files(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    pyslurm = client()
    pyslurm.fetch_jobs()
    before = open_files()
    for _ in range(50):
        pyslurm.fetch_jobs()
        pyslurm.fetch_nodes()
    assert len(rig.children()) == 1
    assert open_files() == before


def test_children_that_die_leave_no_open_files_and_no_dead_behind(
    rig: Rig, client: Callable[..., PyslurmClient]
) -> None:
    rig.plan(dies="jobs")
    before = open_files()
    for _ in range(3):
        with pytest.raises(SlurmUnavailable):
            client().fetch_jobs()
    assert open_files() == before
    assert [pid for pid in rig.children() if Path("/proc", pid).exists()] == []


# ---- choosing


def test_a_pyslurm_of_the_clusters_release_is_chosen(rig: Rig) -> None:
    choice = rig.choose(check_limit_s=15.0)
    assert choice.kind == "pyslurm"
    assert isinstance(choice.client, PyslurmClient)
    choice.client.close()


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"import_ends": True}, "does not import"),
        ({"version": "25.05.0"}, r"not of the cluster's release \(25.11.1\)"),
    ],
    ids=["import ends the process", "other release"],
)
def test_otherwise_the_command_line_is_with_the_reason(rig: Rig, plan: dict[str, Any], why: str) -> None:
    rig.plan(**plan)
    choice = rig.choose(check_limit_s=15.0)
    assert choice.kind == "cli"
    assert choice.client is rig.cli
    assert re.search(why, choice.reason)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"refuses": "config"}, "release is not known"),
        ({"hangs": "config"}, "no answer in time"),
        ({"config": {**CONFIG, "version": None}}, "no version"),
    ],
    ids=["controller down", "controller frozen", "garbage"],
)
@pytest.mark.parametrize("version", ["25.11.4", "24.05.1"])
def test_a_cluster_that_does_not_answer_at_first_is_asked_by_pyslurm_once_it_has_said_a_release_that_fits(
    rig: Rig, plan: dict[str, Any], why: str, version: str
) -> None:
    rig.plan(**plan)
    choice = rig.choose(check_limit_s=1.5 if "hangs" in plan else 15.0)
    assert choice.kind == "cli"
    assert re.search(why, choice.reason)
    assert isinstance(choice.client, PyslurmClient)
    with closing(choice.client) as chosen:
        rig.plan()
        assert chosen.fetch_jobs().jobs == ()  # the command line's
        rig.cli.version = version
        assert chosen.fetch_cluster().version == version
        assert [job.job_id for job in chosen.fetch_jobs().jobs] == ([7] if version == "25.11.4" else [])


def test_without_pyslurm_the_choice_takes_no_time_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder, "pyslurm").exists()])
    begun = time.monotonic()
    choice = choose_client("auto", cli=CliClient(), parent={}, timeout_s=5.0)
    assert (choice.kind, choice.reason) == ("cli", "pyslurm is not installed")
    assert time.monotonic() - begun < 0.5


# ---- rows


def job(**changes: Any) -> JobRecord:
    return parse_job_row({**JOB, "exit_code": 0, "exit_code_signal": 0, **changes})


def test_a_running_job_has_no_end_and_no_exit_status() -> None:
    record = job()
    assert (record.state, record.end_at, record.exit_code) == (JobState.RUNNING, None, None)
    assert record.start_at == datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
    assert record.reason == ""


def test_a_waiting_job_has_no_nodes_and_no_start() -> None:
    record = job(state="PENDING", state_reason="Resources")
    assert (record.nodes, record.start_at, record.reason) == ((), None, "Resources")


def test_a_completing_job_has_ended_though_its_base_state_is_hidden() -> None:
    record = job(state="COMPLETING", exit_code=75)
    assert record.state is None
    assert record.flags == {JobFlag.COMPLETING}
    assert record.is_ended
    assert record.exit_code == 75


@pytest.mark.parametrize(("status", "exit_code", "exit_signal"), [(137 << 8, 137, 0), (128 << 8, 128, 0), (9, 0, 9)])
def test_an_exit_code_is_what_it_was_though_the_library_takes_128_from_it(
    rig: Rig, client: Callable[..., PyslurmClient], status: int, exit_code: int, exit_signal: int
) -> None:
    rig.plan(jobs=[{**JOB, "state": "FAILED", "exit_status": status}])
    (record,) = client().fetch_jobs().jobs
    assert (record.exit_code, record.exit_signal) == (exit_code, exit_signal)


def test_of_a_pyslurm_that_is_built_otherwise_a_failure_without_status_and_signal_had_status_128(
    rig: Rig, client: Callable[..., PyslurmClient]
) -> None:
    ends = {"FAILED": 128 << 8, "COMPLETED": 0}
    rig.plan(
        built_otherwise=True,
        jobs=[{**JOB, "id": 7 + n, "state": w, "exit_status": ends[w]} for n, w in enumerate(ends)],
    )
    assert [record.exit_code for record in client().fetch_jobs().jobs] == [128, 0]


def test_a_node_is_read_as_scontrol_shows_it() -> None:
    node = parse_node_row(NODE)
    assert (node.base, node.availability) == (NodeBase.IDLE, NodeAvailability.DRAINED)
    assert (node.reason, node.reason_user, node.reason_at) == ("sup: disk", "root", "2026-01-02T03:04:05")
    assert (node.partitions, node.gres, node.port) == (("gpu", "all"), "gpu:h100:8", 6818)


def test_a_node_without_a_reason_has_none_of_its_parts(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    rig.plan(nodes=[{**NODE, "state": "IDLE", "reason": None, "reason_user": "root", "reason_time": None}])
    (node,) = client().fetch_nodes().nodes
    assert (node.reason, node.reason_user, node.reason_at) == ("", "", "")


def test_rows_of_one_job_are_one_record_of_the_copy_that_counts(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    """A job of a federation stands there once for each cluster that it was offered to."""
    rig.plan(jobs=[{**JOB, "state": "REVOKED"}, {**JOB, "state": "RUNNING"}])
    assert [record.state for record in client().fetch_jobs().jobs] == [JobState.RUNNING]


def test_a_user_is_looked_up_once_for_all_their_jobs(rig: Rig, client: Callable[..., PyslurmClient]) -> None:
    users = [(1000, "ann"), (1001, "bob"), (1000, "ann"), (1000, "ann")]
    rig.plan(jobs=[{**JOB, "id": 7 + i, "user_id": uid, "user_name": name} for i, (uid, name) in enumerate(users)])
    assert [job.user for job in client().fetch_jobs().jobs] == ["ann", "bob", "ann", "ann"]
    assert (rig.folder / "lookups").read_text().split() == ["ann", "bob"]


# ---- what the service makes of it


def doctor_finding(rig: Rig, wanted: str, **environment: str) -> dict[str, Any]:
    config = rig.folder / "supervisor.toml"
    config.write_text(f'[slurm]\nclient = "{wanted}"\n')
    done = subprocess.run(
        [sys.executable, "-P", "-m", "supervisor", "doctor", "--json", "--config", str(config)],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return next(check for check in json.loads(done.stdout)["checks"] if check["what"] == "slurm client")


def test_doctor_says_which_client_is_used_and_why(rig: Rig) -> None:
    assert doctor_finding(rig, "cli", PYTHONPATH=str(rig.folder))["detail"] == "commands: as configured"
    found = doctor_finding(rig, "auto", PYTHONPATH=str(rig.folder))
    assert (found["ok"], found["detail"]) == (None, "pyslurm: pyslurm is of the cluster's release")


def test_a_pyslurm_that_was_asked_for_and_does_not_fit_is_a_fault(rig: Rig) -> None:
    rig.plan(version="24.05.0")
    found = doctor_finding(rig, "pyslurm", PYTHONPATH=str(rig.folder))
    assert (found["ok"], found["detail"]) == (
        False,
        "commands: pyslurm 24.05.0 is not of the cluster's release (25.11.1)",
    )
