"""The cluster as a user of Slurm sees it, and what faults do to its nodes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.sandbox import Sandbox, SandboxError
from slurm.sandbox.processes import await_true, read_stat

pytestmark = pytest.mark.slurm

DEADLINE_S = 20


def nodes_in_state(sandbox: Sandbox, state: str) -> set[str]:
    shown = sandbox.run("sinfo", "-h", "-N", "-o", "%N %T").stdout
    return {line.split()[0] for line in shown.splitlines() if line.split()[1] == state}


def idle_nodes(sandbox: Sandbox) -> set[str]:
    return nodes_in_state(sandbox, "idle")


def down_nodes(sandbox: Sandbox) -> set[str]:
    return nodes_in_state(sandbox, "down") | nodes_in_state(sandbox, "down*")


def eventually(condition: Callable[[], bool]) -> bool:
    return await_true(condition, deadline_s=DEADLINE_S, every_s=0.05)


def pids_of(sandbox: Sandbox, node: str, command: str) -> list[int]:
    return [pid for pid in sandbox.node_pids(node) if program_of(pid) == command]


def program_of(pid: int) -> str:
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
    except OSError:
        return ""


def state_of(pid: int) -> str:
    found = read_stat(pid)
    return "gone" if found is None else found.state


@pytest.fixture
def job(sandbox: Sandbox) -> Iterator[str]:
    """A job with one sleeping task on each node, gone again afterwards, with all nodes idle."""
    nodes = len(sandbox.node_names)
    sent = sandbox.run("sbatch", "--parsable", f"-N{nodes}", "--no-requeue", "-o/dev/null", "--wrap=srun sleep 1000")
    job_id = sent.stdout.strip()
    assert job_id.isdigit(), sent.stderr
    assert eventually(lambda: all(pids_of(sandbox, node, "sleep") for node in sandbox.node_names))
    yield job_id
    sandbox.run("scancel", job_id)
    for node in sandbox.node_names:
        sandbox.revive(node)
    assert eventually(lambda: idle_nodes(sandbox) == set(sandbox.node_names))


def test_it_is_ready_within_ten_seconds(sandbox: Sandbox) -> None:
    assert 0 < sandbox.cold_start_s < 10


def test_a_step_runs_on_every_node(sandbox: Sandbox) -> None:
    ran = sandbox.run("srun", f"-N{len(sandbox.node_names)}", "sh", "-c", "echo $SLURMD_NODENAME")
    assert sorted(ran.stdout.split()) == sorted(sandbox.node_names), ran.stderr


def test_a_batch_job_makes_steps_of_its_own(sandbox: Sandbox, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = sandbox.run("sbatch", "--wait", "-N3", f"-o{out}", "--wrap=srun sh -c 'echo $SLURMD_NODENAME'")
    assert ran.returncode == 0, ran.stderr
    assert sorted(out.read_text().split()) == sorted(sandbox.node_names)


def test_gpus_that_are_only_files_are_allocated(sandbox: Sandbox) -> None:
    two = sandbox.run("srun", "-N1", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert two.stdout.strip() == "0,1", two.stderr
    assert sandbox.run("srun", "-N1", "--gpus-per-node=3", "true").returncode != 0


def test_a_power_cut_kills_everything_on_the_node_and_nothing_elsewhere(sandbox: Sandbox, job: str) -> None:
    doomed = sandbox.node_pids("n2")
    elsewhere = pids_of(sandbox, "n3", "slurmd")
    sandbox.power_cut("n2")
    assert {state_of(pid) for pid in doomed} <= {"gone", "Z"}
    assert sandbox.node_pids("n2") == ()
    assert pids_of(sandbox, "n3", "slurmd") == elsewhere


def test_slurm_turns_lost_nodes_down_and_takes_them_back_when_they_are_revived(isolated: Sandbox) -> None:
    isolated.cable_cut("n2")
    isolated.power_cut("n3")
    assert await_true(lambda: down_nodes(isolated) == {"n2", "n3"}, deadline_s=60, every_s=0.2)
    isolated.revive("n2")
    isolated.revive("n3")
    assert eventually(lambda: idle_nodes(isolated) == set(isolated.node_names))


def test_a_drained_node_stays_drained_when_it_is_revived(isolated: Sandbox) -> None:
    isolated.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=disk")
    isolated.power_cut("n1")
    isolated.revive("n1")
    assert isolated.run("sinfo", "-h", "-nn1", "-o%T %E").stdout == "drained disk\n"
    isolated.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    assert eventually(lambda: idle_nodes(isolated) == set(isolated.node_names))


def test_a_power_cut_says_no_goodbye_to_open_connections(isolated: Sandbox) -> None:
    node = isolated._spec.node("n2")
    with socket.create_connection((node.address, node.port), timeout=0.5) as to_slurmd:
        isolated.power_cut("n2")
        with pytest.raises(TimeoutError):
            to_slurmd.recv(1)
    isolated.revive("n2")
    assert eventually(lambda: isolated.run("srun", "-wn2", "true").returncode == 0)


def test_a_frozen_node_stops_and_goes_on_where_it_was(sandbox: Sandbox, job: str) -> None:
    sleeper = pids_of(sandbox, "n2", "sleep")[0]
    sandbox.freeze("n2")
    assert {state_of(pid) for pid in sandbox.node_pids("n2")} == {"T"}
    sandbox.revive("n2")
    assert eventually(lambda: state_of(sleeper) == "S")


def test_a_node_whose_slurmd_died_gets_a_new_one(sandbox: Sandbox) -> None:
    os.kill(pids_of(sandbox, "n1", "slurmd")[0], signal.SIGKILL)
    assert eventually(lambda: not pids_of(sandbox, "n1", "slurmd"))
    sandbox.revive("n1")
    assert sandbox.run("srun", "-wn1", "true").returncode == 0


def test_a_frozen_controller_answers_again_after_the_thaw(sandbox: Sandbox) -> None:
    sandbox.freeze_controller()
    asked = sandbox.run("timeout", "1", "squeue")
    sandbox.thaw_controller()
    assert asked.returncode != 0
    assert sandbox.run("squeue").returncode == 0


def test_a_controller_that_was_stopped_still_knows_its_jobs(sandbox: Sandbox, job: str) -> None:
    sandbox.stop_controller()
    assert sandbox.run("timeout", "1", "squeue").returncode != 0
    sandbox.start_controller()
    assert sandbox.run("squeue", "-h", "-o%i %T").stdout.split() == [job, "RUNNING"]


def test_a_fault_on_an_unknown_node_names_the_known_ones(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="n1, n2, n3"):
        sandbox.power_cut("n9")


def test_a_cut_cable_leaves_processes_alive_but_out_of_reach(isolated: Sandbox) -> None:
    before = isolated.node_pids("n2")
    isolated.cable_cut("n2")
    assert isolated.node_pids("n2") == before
    assert isolated.run_on("n2", "timeout", "1", "scontrol", "ping").returncode != 0
    isolated.revive("n2")
    assert eventually(lambda: isolated.run("srun", "-wn2", "true").returncode == 0)


def test_isolated_nodes_have_names_and_addresses_that_all_of_them_know(isolated: Sandbox) -> None:
    ran = isolated.run("srun", "-N3", "sh", "-c", "hostname; getent hosts n1 n2 n3 head | md5sum")
    assert ran.stdout.split().count("-") == 3
    assert set(isolated.node_names) < set(ran.stdout.split())
    assert len(set(ran.stdout.split())) == 3 + 2


def test_filling_the_local_disk_fills_it_on_one_node_only(isolated: Sandbox, tmp_path: Path) -> None:
    isolated.fill_scratch("n2")
    script = f"touch {isolated.scratch}/x && echo y > {isolated.scratch}/x && echo $(hostname)"
    wrote = isolated.run("srun", "-N3", "sh", "-c", script)
    isolated.empty_scratch("n2")
    assert set(wrote.stdout.split()) == {"n1", "n3"}
    assert list(isolated.scratch.iterdir()) == []


def test_isolated_nodes_share_the_rest_of_the_file_system(isolated: Sandbox, tmp_path: Path) -> None:
    isolated.run("srun", "-N3", "sh", "-c", f"touch {tmp_path}/$(hostname)")
    assert {path.name for path in tmp_path.iterdir()} == set(isolated.node_names)


def test_loopback_refuses_what_it_cannot_do(loopback: Sandbox) -> None:
    with pytest.raises(SandboxError, match="isolated"):
        loopback.cable_cut("n1")
    with pytest.raises(SandboxError, match="isolated"):
        loopback.fill_scratch("n1")
