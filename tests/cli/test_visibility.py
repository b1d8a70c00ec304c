"""Whether the nodes see the run directory: what an answer means, and real answers of real nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.client import CliClient
from slurm.sandbox import Sandbox
from slurm.types import NodeBase, NodeRecord
from supervisor.cli.acceptance import measure_room
from supervisor.model import NodesSpec, RunSpec, SlurmSpec
from supervisor.visibility import Visibility, check_visibility, is_candidate, judge_answer, srun_argv
from tests.cli.conftest import Service

FOLDER = Path("/shared/a")


def spec(**slurm: object) -> RunSpec:
    return RunSpec(
        name="a",
        command=("train.py",),
        root=Path("/shared"),
        nodes=NodesSpec(min=1, max=1),
        slurm=SlurmSpec(**slurm),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("output", "is_seen"),
    [
        ("node=n1\nsecret\nwritable\n", True),
        ("node=n1\nsecret\n", False),
        ("node=n1\nabsent\n", False),
    ],
)
def test_an_answer_says_whether_the_folder_is_there_and_writable(output: str, is_seen: bool) -> None:
    answer = judge_answer(output, "secret", FOLDER)
    assert answer is not None
    assert (answer.is_seen, answer.node) == (is_seen, "n1")


@pytest.mark.parametrize("output", ["", "node=n1\n", "node=n1\nanother secret\nwritable\n", "Welcome to the cluster\n"])
def test_anything_else_is_no_answer(output: str) -> None:
    assert judge_answer(output, "secret", FOLDER) is None


def test_the_question_is_bounded_and_goes_where_the_run_will_go() -> None:
    argv = srun_argv(FOLDER, "f", spec(partition="gpu", account="ml", options=("--reservation=r", "--mem=0")))
    assert {"--partition=gpu", "--account=ml", "--reservation=r", "--immediate=5", "--time=1"} <= set(argv)
    assert "--mem=0" not in argv


def test_only_a_node_of_the_partition_that_has_room_is_asked() -> None:
    idle = NodeRecord(name="n1", base=NodeBase.IDLE, partitions=("gpu",))
    busy = NodeRecord(name="n2", base=NodeBase.ALLOCATED, partitions=("gpu",))
    partly = NodeRecord(name="n4", base=NodeBase.MIXED, partitions=("gpu",))
    drained = NodeRecord(name="n3", base=NodeBase.IDLE, flags=frozenset({"DRAIN"}), partitions=("gpu",))
    seen = [is_candidate(record, "cpu,gpu") for record in (idle, busy, drained, partly)]
    assert seen == [True, False, False, True]
    assert not is_candidate(idle, "cpu")
    assert is_candidate(idle, None)


# ---------------------------------------------------------------- on a real Slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Sandbox]:
    with Sandbox.start(nodes=2) as sandbox:
        yield sandbox


def await_idle(client: CliClient) -> None:
    deadline = time.monotonic() + 20
    while not all(node.is_idle for node in client.fetch_nodes().nodes):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask(cluster: Sandbox, folder: Path, run: RunSpec | None = None) -> Visibility:
    env = {**os.environ, **cluster.env}
    return check_visibility(folder, run or spec(), CliClient(parent=env, timeout_s=10), env)


@pytest.mark.slurm
def test_a_shared_folder_is_seen_by_a_real_node(cluster: Sandbox, tmp_path: Path) -> None:
    seen = ask(cluster, tmp_path)
    assert (seen.is_seen, seen.node in cluster.node_names) == (True, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slurm
def test_a_node_that_is_busy_in_part_is_asked_too(cluster: Sandbox, tmp_path: Path) -> None:
    client = CliClient(parent={**os.environ, **cluster.env}, timeout_s=10)
    script = ("-N2", "-n2", "-c1", "--mem=1", "-o/dev/null", "--parsable", "--wrap=sleep 60")
    job_id = int(cluster.run("sbatch", *script).stdout)
    try:
        deadline = time.monotonic() + 20
        while any(node.base is not NodeBase.MIXED for node in client.fetch_nodes().nodes):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        seen = ask(cluster, tmp_path, spec(options=("--mem=1",)))
    finally:
        client.cancel(job_id)
        await_idle(client)
    assert seen.is_seen is True


@pytest.mark.slurm
def test_after_the_question_every_node_is_idle_again(cluster: Sandbox, tmp_path: Path) -> None:
    ask(cluster, tmp_path)
    nodes = CliClient(parent={**os.environ, **cluster.env}, timeout_s=10).fetch_nodes().nodes
    assert all(node.is_idle for node in nodes)


@pytest.mark.slurm
def test_a_run_on_a_folder_that_only_the_head_has_is_refused_and_leaves_nothing(
    cluster: Sandbox, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cluster.mode != "isolated":
        pytest.skip("loopback nodes see everything that the head sees")
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    root = Path("/dev/shm") / f"only-here-{os.getpid()}"  # nodes have a shared memory of their own
    path = service.write_run_file(lambda text: text.replace('"runs"', f'"{root}"'))
    root.mkdir()
    try:
        with service.running():
            result = service.call("submit", path)
        assert list(root.iterdir()) == []
    finally:
        root.rmdir()
    assert result.exit_code == 2
    assert "is not visible from node" in result.stderr
    assert result.stderr.count("\n") == 1
    assert service.load_run() is None


@pytest.mark.slurm
def test_a_checkpoint_folder_that_is_another_one_on_the_nodes_is_refused(
    cluster: Sandbox, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-20: each node would save to its own disk, and the head would find nothing to go on from."""
    if cluster.mode != "isolated":
        pytest.skip("loopback nodes see everything that the head sees")
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    saves = Path("/dev/shm") / f"saves-{os.getpid()}"  # nodes have a shared memory of their own
    table = f'[checkpoint]\ndirectory = "{saves}"\nlayout = "dcp"\n'
    path = service.write_run_file(lambda text: text + table)
    with service.running():
        unmade = service.call("submit", path, "--dry-run")
        saves.mkdir()
        try:
            result = service.call("submit", path)
        finally:
            saves.rmdir()
    assert unmade.exit_code == 0
    assert result.exit_code == 2
    assert "[checkpoint] directory" in result.stderr
    assert "is not visible from node" in result.stderr
    assert service.load_run() is None


@pytest.mark.slurm
def test_an_unknown_partition_is_refused_with_the_known_ones(
    cluster: Sandbox, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    path = service.write_run_file(lambda text: f'{text}[slurm]\npartition = "gpu"\n')
    with service.running():
        result = service.call("submit", path)
    assert result.exit_code == 2
    assert 'no partition "gpu"; there are: main' in result.stderr
    assert list(service.runs.iterdir()) == []


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("min = 1\nmax = 2", "min = 3\nmax = 4", "[nodes] min is 3, and partition main has 2 nodes"),
        ("[nodes]", "[slurm]\ngpus_per_node = 8\n[nodes]", "Invalid generic resource (gres) specification"),
        ("[nodes]", "[slurm]\noptions = ['--constraint=h100']\n[nodes]", "Invalid feature specification"),
        ("[nodes]", "[slurm]\noptions = ['--mem=900G']\n[nodes]", "Requested node configuration is not available"),
    ],
)
def test_what_slurm_would_never_take_is_refused_with_its_words(
    cluster: Sandbox, service: Service, monkeypatch: pytest.MonkeyPatch, old: str, new: str, part: str
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    path = service.write_run_file(lambda text: text.replace(old, new))
    with service.running():
        result = service.call("submit", path)
    assert result.exit_code == 2
    assert part in result.stderr
    assert result.stderr.count("\n") == 1
    assert service.load_run() is None
    assert list(service.runs.iterdir()) == []


def test_a_node_that_has_not_registered_since_the_controllers_start_cannot_be_used_yet() -> None:
    """Slurm refuses then what it will take some seconds later: such a refusal is only noted."""
    records = [NodeRecord(name="n1", base=NodeBase.UNKNOWN), NodeRecord(name="n2", base=NodeBase.IDLE)]
    room = measure_room(records, None)
    assert (room.nodes, room.usable) == (2, 1)


@pytest.mark.slurm
def test_nodes_that_are_drained_now_are_noted_and_no_refusal(
    cluster: Sandbox, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    path = service.write_run_file(lambda text: text.replace("min = 1", "min = 2"))
    client = CliClient(parent={**os.environ, **cluster.env}, timeout_s=10)
    client.drain("n1", "a test")
    try:
        with service.running():
            result = service.call("submit", path, "--dry-run")
    finally:
        client.undrain("n1")
        await_idle(client)
    assert result.exit_code == 0, result.output
    assert "only 1 of the 2 nodes of partition main can be used now" in result.stdout
    assert "drained or down" in result.stdout


@pytest.mark.slurm
def test_a_good_run_is_checked_on_a_node_and_submitted(
    cluster: Sandbox, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    with service.running():
        result = service.call("submit", service.write_run_file())
    assert result.exit_code == 0, result.output
    assert "is visible from node" in result.stdout
    assert service.load_run() is not None


@pytest.mark.slurm
def test_nodes_shows_slurms_states_beside_ours(
    cluster: Sandbox, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    service.keep()
    shown = service.call("nodes").stdout
    assert all(name in shown for name in cluster.node_names)
    assert "does not answer" not in shown


@pytest.mark.slurm
def test_a_silent_controller_means_not_checked_and_not_refused(cluster: Sandbox, tmp_path: Path) -> None:
    env = {**os.environ, **cluster.env}
    cluster.freeze_controller()
    try:
        seen = check_visibility(tmp_path, spec(), CliClient(parent=env, timeout_s=1), env)
    finally:
        cluster.thaw_controller()
    assert seen.is_seen is None
    assert "does not answer" in seen.why
