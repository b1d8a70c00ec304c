"""The client over the real pyslurm, on a Slurm of its release: `make test-pyslurm`. Holds the stand-in to it, too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from slurm.client import CliClient
from slurm.errors import SlurmUnavailable
from slurm.pyslurm_client import PyslurmClient, child_environment, choose_client
from slurm.sandbox import Sandbox, SandboxUnavailable
from slurm.sandbox.installed import read_slurm_shape
from slurm.types import ENDED_STATES, JobListing, JobState, NodeListing, SubmitRequest

pytestmark = [pytest.mark.slurm, pytest.mark.pyslurm]


OTHER = Path("/usr")  # where Debian's Slurm is, whatever stands first on PATH


def is_another_slurm_there() -> bool:
    try:
        return read_slurm_shape(prefix=str(OTHER)).version.split(".")[:2] != read_slurm_shape().version.split(".")[:2]
    except SandboxUnavailable:
        return False


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.start(nodes=3, mode="loopback", gpus_per_node=2, slurmd_timeout_s=4) as started:
        yield started


@pytest.fixture
def parent(sandbox: Sandbox) -> dict[str, str]:
    return {**os.environ, **sandbox.env}


@pytest.fixture
def cli(parent: dict[str, str]) -> CliClient:
    return CliClient(parent=parent)


@pytest.fixture
def client(cli: CliClient, parent: dict[str, str]) -> Iterator[PyslurmClient]:
    with closing(PyslurmClient(cli=cli, parent=parent, timeout_s=30)) as made:
        yield made


def until(condition: Callable[[], bool], *, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


def child_of(client: PyslurmClient) -> psutil.Process:
    assert client._child is not None
    return psutil.Process(client._child._process.pid)


# ---- what it reads


def submit(cli: CliClient, folder: Path, name: str, body: str, *options: str) -> int:
    script = folder / f"{name}.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --mem=10\n{body}\n")
    request = SubmitRequest(
        script=script, token=name, job_name=name, nodes=1, output=Path("/dev/null"), options=("--ntasks=1", *options)
    )
    return cli.submit(request).job_id


def settled(cli: CliClient, *, ended: set[int], running: int) -> bool:
    states = {job.job_id: job.state for job in cli.fetch_jobs().jobs}
    return all(states[job_id] in ENDED_STATES for job_id in ended) and states[running] is JobState.RUNNING


def jobs_of(listing: JobListing) -> dict[int, object]:
    assert listing.unreadable == ()
    return {job.job_id: job for job in listing.jobs}


def nodes_of(listing: NodeListing) -> dict[str, dict[str, object]]:
    assert listing.unreadable == ()
    # Of a node with the usual port scontrol prints none.
    return {
        node.name: {field: getattr(node, field) for field in node.__slots__ if field != "port"}
        for node in listing.nodes
    }


def test_pyslurm_text_and_json_say_the_same_of_jobs_nodes_and_cluster(
    sandbox: Sandbox, cli: CliClient, client: PyslurmClient, parent: dict[str, str], tmp_path: Path
) -> None:
    ended = {
        submit(cli, tmp_path, "good", "exit 0"),
        submit(cli, tmp_path, "oom", "exit 137"),
        submit(cli, tmp_path, "half", "exit 128"),
        submit(cli, tmp_path, "again", "exit 75"),
        submit(cli, tmp_path, "signal", "kill -9 $$"),
        submit(cli, tmp_path, "gone", "exec sleep 600", "--begin=now+1hour"),
    }
    cli.cancel(max(ended))
    running = submit(cli, tmp_path, "runs", "exec sleep 600")
    waiting = submit(cli, tmp_path, "waits", "exec sleep 600", "--hold")
    array = submit(cli, tmp_path, "array", "exec sleep 600", "--array=1-4%1")
    sandbox.run("sbatch", "-o/dev/null", "--job-name=a|b,é", "--comment=two\nlines", "--hold", "--wrap=exit")
    until(lambda: settled(cli, ended=ended, running=running))
    cli.drain("n3", "sup#41 xid48: memory = bad")
    sandbox.power_cut("n2")
    until(lambda: "n2" in {node.name for node in cli.fetch_nodes().nodes if not node.is_responding}, within_s=60)
    try:
        assert jobs_of(client.fetch_jobs()) == jobs_of(cli.fetch_jobs())
        assert nodes_of(client.fetch_nodes()) == nodes_of(cli.fetch_nodes())
        assert client.fetch_cluster() == cli.fetch_cluster()
        noticed: list[str] = []
        by_json = CliClient(parent=parent, form="json", on_notice=noticed.append)
        assert jobs_of(by_json.fetch_jobs()) == jobs_of(cli.fetch_jobs())
        assert nodes_of(by_json.fetch_nodes()) == nodes_of(cli.fetch_nodes())
        assert noticed == []  # the JSON was used
    finally:
        sandbox.revive("n2")
        cli.undrain("n3")
        for job_id in (running, waiting, array):
            cli.cancel(job_id)
        until(lambda: all(node.is_idle for node in cli.fetch_nodes().nodes), within_s=60)


def test_the_stand_in_is_built_as_pyslurm_is(cli: CliClient, parent: dict[str, str]) -> None:
    code = """
import json, sys, pyslurm
cut = sys.modules["pyslurm.core.job.job"]._get_exit_code
config, node = pyslurm.slurmctld.Config.load(), next(iter(pyslurm.Nodes.load().values()))
(partition,) = pyslurm.Partitions.load().values()
print(json.dumps({
    "version": pyslurm.__version__.split(".")[:2], "error": pyslurm.RPCError.__mro__[1].__name__,
    "cut": [cut(137 << 8), cut(9)],
    "timeout": config.slurmd_timeout, "storage": config.accounting_storage_type, "gres": node.configured_gres,
    "partitions": node.partitions, "boot": type(node.boot_time).__name__, "reason": node.reason,
    "default": [partition.name, partition.is_default],
}))
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(parent), capture_output=True, timeout=30, check=True
    )
    assert json.loads(shown.stdout) == {
        "version": cli.fetch_cluster().version.split(".")[:2],
        "error": "PyslurmError",
        "cut": [[9, 0], [0, 9]],
        "timeout": 4,
        "storage": None,
        "gres": {"gpu": 2},
        "partitions": ["main"],
        "boot": "int",
        "reason": None,
        "default": ["main", True],
    }


# ---- how it fails


def test_a_child_killed_in_the_middle_of_a_question_is_no_answer_and_is_replaced(
    sandbox: Sandbox, client: PyslurmClient
) -> None:
    client.fetch_jobs()
    first = child_of(client)
    errors: list[SlurmUnavailable] = []

    def ask() -> None:
        with pytest.raises(SlurmUnavailable) as caught:
            client.fetch_jobs()
        errors.append(caught.value)

    sandbox.freeze_controller()
    try:
        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: bool(first.net_connections()))
        first.send_signal(signal.SIGKILL)
        asking.join(4)  # before the library gives up on the controller
        assert "exit code -9" in str(errors[0])
    finally:
        sandbox.thaw_controller()
    client.fetch_jobs()
    assert child_of(client).pid != first.pid
    assert not first.is_running()


def test_a_frozen_controller_costs_the_deadline_and_comes_back_by_itself(
    sandbox: Sandbox, cli: CliClient, parent: dict[str, str]
) -> None:
    with closing(PyslurmClient(cli=cli, parent=parent, timeout_s=2)) as hasty:
        assert hasty.fetch_jobs().unreadable == ()
        sandbox.freeze_controller()
        try:
            begun = time.monotonic()
            with pytest.raises(SlurmUnavailable, match="no answer in time"):
                hasty.fetch_jobs()
            assert time.monotonic() - begun < 4
        finally:
            sandbox.thaw_controller()
        assert hasty.fetch_jobs().unreadable == ()
        assert len(hasty.fetch_nodes().nodes) == 3


def test_a_frozen_controller_ends_the_librarys_own_patience_and_keeps_the_child(
    sandbox: Sandbox, client: PyslurmClient
) -> None:
    client.fetch_nodes()
    child = child_of(client)
    sandbox.freeze_controller()
    try:
        with pytest.raises(SlurmUnavailable, match="RPCError"):
            client.fetch_nodes()
    finally:
        sandbox.thaw_controller()
    assert len(client.fetch_nodes().nodes) == 3
    assert child_of(client) == child


def test_without_a_reachable_configuration_the_import_ends_the_child_with_exit_code_1(
    cli: CliClient, parent: dict[str, str]
) -> None:
    nowhere = {name: value for name, value in parent.items() if name != "SLURM_CONF"}
    choice = choose_client("auto", cli=cli, parent=nowhere, timeout_s=30, check_limit_s=20)
    assert choice.kind == "cli"
    assert "exit code 1" in choice.reason


def test_a_configuration_that_is_not_there_costs_the_limit_of_the_choice(
    cli: CliClient, parent: dict[str, str]
) -> None:
    begun = time.monotonic()
    choice = choose_client("auto", cli=cli, parent={**parent, "SLURM_CONF": "/nowhere/slurm.conf"}, timeout_s=30)
    assert choice.kind == "cli"
    assert time.monotonic() - begun < 10  # the library itself would look for that file for a minute


def test_pyslurm_is_chosen_on_a_cluster_of_its_release(cli: CliClient, parent: dict[str, str]) -> None:
    choice = choose_client("auto", cli=cli, parent=parent, timeout_s=30)
    assert choice.kind == "pyslurm"
    assert isinstance(choice.client, PyslurmClient)
    choice.client.close()


@pytest.mark.skipif(not is_another_slurm_there(), reason="no Slurm of another release under /usr")
def test_a_controller_of_a_release_that_the_library_cannot_speak_to_is_left_to_the_commands() -> None:
    with Sandbox.start(nodes=1, mode="loopback", slurm=OTHER) as other:
        parent = {**os.environ, **other.env}
        cli = CliClient(parent=parent)
        choice = choose_client("auto", cli=cli, parent=parent, timeout_s=30, check_limit_s=20)
        assert (choice.kind, choice.client) == ("cli", cli)
        assert re.search(r"release .*pyslurm", choice.reason) or "does not import" in choice.reason
        with closing(PyslurmClient(cli=cli, parent=parent, timeout_s=30)) as forced:
            for _ in range(2):
                with pytest.raises(SlurmUnavailable):
                    forced.fetch_nodes()
            assert len(forced.fetch_nodes().nodes) == 1  # by the commands, after three failures


def test_hundreds_of_questions_leave_one_child_of_the_same_size(client: PyslurmClient) -> None:
    def ask(times: int) -> None:
        for _ in range(times):
            client.fetch_jobs()
            client.fetch_nodes()
            client.fetch_cluster()

    ask(100)
    child, own_files = child_of(client), psutil.Process().num_fds()
    before = child.num_fds(), child.num_threads(), child.memory_info().rss
    ask(200)
    assert child_of(client) == child
    assert psutil.Process().num_fds() == own_files
    assert (child.num_fds(), child.num_threads()) == before[:2]
    assert child.memory_info().rss - before[2] < 2 * 2**20
