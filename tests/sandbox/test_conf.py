"""The configuration's text, and the sandbox's own record."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slurm.sandbox.conf import SlurmShape, render_cgroup_conf, render_gres_conf, render_hosts, render_slurm_conf
from slurm.sandbox.installed import find_tool, read_slurm_shape, search_path
from slurm.sandbox.spec import (
    NodeSpec,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    parse_spec,
    read_spec,
    render_spec,
)

DEBIAN_12 = SlurmShape(version="22.05.8", has_cred_none=True, has_cgroup_disabled=False)
DEBIAN_13 = SlurmShape(version="24.11.5", has_cred_none=True, has_cgroup_disabled=True)

SPEC = SandboxSpec(
    sandbox_id="0123abcd",
    directory="/srv/sandbox",
    is_temporary=False,
    mode="isolated",
    mode_reason="asked for",
    machine_host="laptop",
    head_host="head",
    head_address="10.200.1.1",
    is_local_only=True,
    controller_port=20001,
    nodes=(
        NodeSpec(name="n1", address="10.200.1.11", port=20002),
        NodeSpec(name="n2", address="10.200.1.12", port=20002),
    ),
    gpus_per_node=0,
    slurmd_timeout_s=10,
    kill_wait_s=5,
    user="root",
    owner_pid=None,
)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A folder that Slurm seems to be installed in."""
    for name in ("sbin/slurmctld", "sbin/slurmd", "bin/sbatch", "bin/srun", "bin/scontrol"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\necho slurm 25.11.7\n")
        (tmp_path / name).chmod(0o755)
    return str(tmp_path)


def test_a_slurm_that_is_named_is_found_before_the_one_on_path(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"/usr/bin:{prefix}/bin")
    assert search_path(prefix=prefix).split(":")[:3] == [f"{prefix}/sbin", f"{prefix}/bin", "/usr/bin"]
    assert search_path().split(":")[0] == "/usr/bin"
    assert find_tool("slurmctld", prefix=prefix) == f"{prefix}/sbin/slurmctld"


def test_a_folder_without_a_slurm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="there is no sbin/slurmctld"):
        read_slurm_shape(prefix=str(tmp_path))


def options(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def test_the_record_survives_its_file() -> None:
    assert parse_spec(render_spec(SPEC)) == SPEC


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": [1]}', '{"nodes": [{"name": "n1"}]}'])
def test_a_file_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(SandboxError):
        parse_spec(text)


def test_a_directory_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no sandbox"):
        read_spec(tmp_path)


def test_a_releases_own_plugins_are_named_only_where_it_has_them() -> None:
    without = dataclasses.replace(DEBIAN_12, has_cred_none=False)
    assert options(render_slurm_conf(SPEC, DEBIAN_12))["CredType"] == "cred/none"
    assert "CredType" not in options(render_slurm_conf(SPEC, without))
    assert render_cgroup_conf(DEBIAN_12) == ""
    assert render_cgroup_conf(DEBIAN_13) == "CgroupPlugin=disabled\n"


def test_lines_of_the_caller_come_last_and_so_win() -> None:
    spec = dataclasses.replace(SPEC, extra_conf="SlurmdTimeout=300")
    assert options(render_slurm_conf(spec, DEBIAN_12))["SlurmdTimeout"] == "300"
    assert options(render_slurm_conf(SPEC, DEBIAN_12))["SlurmdTimeout"] == "10"


def test_gpus_appear_everywhere_or_nowhere() -> None:
    spec = dataclasses.replace(SPEC, gpus_per_node=2)
    assert "gpu" not in render_slurm_conf(SPEC, DEBIAN_12) + render_gres_conf(SPEC)
    assert render_slurm_conf(spec, DEBIAN_12).count("Gres=gpu:2") == 2
    assert "gpu[0-1]" in render_gres_conf(spec)


def test_the_nodes_can_look_up_each_other_and_the_host_that_commands_come_from() -> None:
    known = {name: line.split()[0] for line in render_hosts(SPEC).splitlines() for name in line.split()[1:]}
    assert known["n2"] == "10.200.1.12"
    assert known["laptop"] == known["head"] == "10.200.1.1"


def test_how_long_an_ended_job_is_remembered_can_be_shortened() -> None:
    assert options(render_slurm_conf(SPEC, DEBIAN_12))["MinJobAge"] == "300"
    short = dataclasses.replace(SPEC, min_job_age_s=2)
    assert options(render_slurm_conf(short, DEBIAN_12))["MinJobAge"] == "2"
