"""What NCCL's settings and log lines come to."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.agent.surroundings import choose_nccl_settings
from trainer.contract import AttemptSpec, RunPaths
from trainer.example.options import parse_options
from trainer.nccl import (
    ENV_PG_TIMEOUT,
    PAIRS,
    check_environment,
    compute_bandwidth,
    judge_transport,
    nccl_environment,
    parse_transport,
    process_group_timeout,
    tell_settings,
)

ROOT = Path(__file__).parents[2]

INFINIBAND = """\
node7:4242:4242 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>
node7:4242:4242 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
node7:4242:4299 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB[RO] [1]mlx5_1:1/IB[RO] ; OOB eth0:10.0.0.7<0>
node7:4242:4299 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
node7:4242:4299 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1'
node7:4242:4299 [0] NCCL INFO Using network IB
a line of the training, Using network Socket
node7:4242:4299 [0] NCCL INFO NVLS multicast support is available on dev 0
node7:4242:4305 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
node7:4242:4305 [0] NCCL INFO Channel 01/0 : 7[7] -> 8[0] [send] via NET/IB/1
node7:4242:4305 [0] NCCL INFO Channel 02/0 : 7[7] -> 8[0] [receive] via NET/IB/3(5)/GDRDMA(PCI)/Shared
node7:4242:4305 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node7:4242:4305 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC
"""

SOCKET = """\
[2026-11-30 03:55:00] node1:77:90 [1] NCCL INFO NET/IB : No device found.
[2026-11-30 03:55:00] node1:77:90 [1] NCCL INFO Using network Socket
node1:77:91 [1] NCCL INFO NVLS multicast support is not available on dev 1
node1:77:95 [1] NCCL INFO Channel 00 : 0[0] -> 1[0] [send] via NET/Socket/0
node1:77:95 [1] NCCL INFO Channel 00 : 2[2] -> 3[3] via SHM/direct/direct
node1:77:95 [1] transport/net_ib.cc:1295 NCCL WARN NET/IB : mlx5_0:1 async fatal event: local catastrophic error
"""


def test_the_way_over_infiniband_is_read_from_the_log() -> None:
    found = parse_transport(INFINIBAND)
    assert (found.version, found.networks, found.hcas) == ("2.27.3", ("IB",), ("mlx5_0:1", "mlx5_1:1"))
    assert found.channels == {"NET/IB": 3, "P2P": 2}
    assert (found.net_channels_staged, found.gpu_direct_off, found.has_nvls) == (1, ("mlx5_1",), True)


def test_the_way_over_sockets_is_read_from_lines_with_a_time() -> None:
    found = parse_transport(SOCKET)
    assert (found.networks, found.hcas, found.has_nvls) == (("Socket",), (), False)
    assert found.channels == {"NET/Socket": 1, "SHM": 1}
    assert found.warnings == ("NET/IB : mlx5_0:1 async fatal event: local catastrophic error",)


@pytest.mark.parametrize("text", ["", "nonsense", "node1:1:2 [0] NCCL INFO", "\0\n" * 50, "NCCL INFO Channel via"])
def test_a_log_without_such_lines_says_nothing(text: str) -> None:
    found = parse_transport(text)
    assert (found.networks, dict(found.channels), found.has_nvls) == ((), {}, None)
    assert judge_transport(found, has_infiniband=True) == ()


def test_sockets_beside_infiniband_are_told() -> None:
    told = judge_transport(parse_transport(SOCKET), has_infiniband=True)
    assert any("sockets" in sentence for sentence in told)
    assert not any("sockets" in sentence for sentence in judge_transport(parse_transport(SOCKET), has_infiniband=False))


def test_channels_without_gpudirect_are_told() -> None:
    told = " ".join(judge_transport(parse_transport(INFINIBAND), has_infiniband=True))
    assert "1 channels" in told
    assert "mlx5_1" in told


def test_ranks_on_different_networks_are_told() -> None:
    told = " ".join(judge_transport(parse_transport(INFINIBAND + SOCKET), has_infiniband=True))
    assert "disagree" in told


def test_both_generations_of_names_get_the_same_value() -> None:
    settings = nccl_environment("/evidence", {})
    assert settings["TORCH_FR_BUFFER_SIZE"] == settings["TORCH_NCCL_TRACE_BUFFER_SIZE"]
    assert settings["TORCH_FR_DUMP_TEMP_FILE"] == settings["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    assert settings["TORCH_FR_DUMP_TEMP_FILE"].startswith("/evidence/")


@pytest.mark.parametrize(
    ("version", "has_older"), [("2.13.0+cpu", False), ("2.11.1", False), ("2.6.0", True), ("", True)]
)
def test_a_torch_that_reads_the_newer_names_is_not_given_the_older_ones(version: str, has_older: bool) -> None:
    settings = nccl_environment("/evidence", {}, torch_version=version)
    assert "TORCH_FR_BUFFER_SIZE" in settings
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in settings) is has_older
    assert ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in settings) is has_older


def test_both_generations_are_given_to_a_torch_that_reads_either_and_a_user_s_one_leads() -> None:
    """FR-01"""
    for name, other in (PAIRS[0], PAIRS[0][::-1], PAIRS[1], PAIRS[1][::-1]):
        settings = nccl_environment("/evidence", {name: "77"})
        assert settings[other] == "77"
        assert f"{other} follows your {name}" in tell_settings(settings, {name: "77"})


def test_one_setting_under_two_names_with_two_values_is_told() -> None:
    """FR-01"""
    given = {"TORCH_FR_BUFFER_SIZE": "5", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    assert not set(nccl_environment("/evidence", given)) & set(given)
    (told,) = check_environment(given)
    assert "TORCH_FR_BUFFER_SIZE=5" in told
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE=7" in told
    (alone,) = check_environment({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"})
    assert "older name of TORCH_FR_BUFFER_SIZE" in alone


def test_each_start_of_each_attempt_dumps_into_a_folder_of_its_own() -> None:
    """FR-04"""
    paths = RunPaths(Path("/shared/gpt"))
    places = {
        nccl_environment(str(paths.evidence(attempt, launch)), {})["TORCH_FR_DUMP_TEMP_FILE"]
        for attempt in (1, 2)
        for launch in (0, 1)
    }
    assert len(places) == 4
    assert all(place.startswith("/shared/gpt/attempts/") for place in places)


def test_what_was_set_and_what_the_user_had_set_are_told_in_one_line() -> None:
    given = {"NCCL_DEBUG": "INFO", "HOME": "/root", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    line = tell_settings(nccl_environment("/evidence", given, torch_version="2.13.0"), given)
    ours, _, yours = line.partition("; yours: ")
    assert "TORCH_FR_BUFFER_SIZE=2000" in ours
    assert yours == "NCCL_DEBUG=INFO, TORCH_NCCL_DUMP_ON_TIMEOUT=1"
    assert tell_settings({}, {}).endswith("yours: none")


def test_a_pipe_and_timing_are_set_where_they_are_asked_for() -> None:
    plain, asked = nccl_environment("/e", {}), nccl_environment("/e", {}, pipe_dir="/node", has_timing=True)
    assert set(asked) - set(plain) == {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_ENABLE_TIMING"}
    assert asked["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"].startswith("/node/")
    off = nccl_environment("/e", {"NCCL_ENABLE_TIMING": "0"}, has_timing=True)
    assert "TORCH_NCCL_ENABLE_TIMING" not in off


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, 600), ("90", 90), ("0.5", 0.5), ("0", 600), ("-3", 600), ("x", 600), ("inf", 600), ("nan", 600), ("", 600)],
)
def test_the_limit_of_a_collective_is_ours_where_the_script_asks_for_it(given: str | None, seconds: float) -> None:
    environment = {} if given is None else {ENV_PG_TIMEOUT: given}
    assert process_group_timeout(environment).total_seconds() == seconds
    assert nccl_environment("/e", {})[ENV_PG_TIMEOUT] == "600"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("command", "prefix", "has_older"),
    [
        (("train.py",), (), False),
        (("python", "-m", "train"), (), False),
        (("/shared/envs/llm/bin/python", "train.py"), (), True),  # a PyTorch of its own, maybe an older one
        (("sh", "-c", "exec python train.py"), (), True),
        (("train.py",), ("apptainer", "exec", "x.sif"), True),
    ],
)
def test_a_pytorch_that_is_not_known_is_given_both_generations_of_names(
    command: tuple[str, ...], prefix: tuple[str, ...], has_older: bool
) -> None:
    """FR-01"""
    spec = AttemptSpec(run="r", attempt=1, command=command, nodes=1, command_prefix=prefix)
    settings = choose_nccl_settings(spec, Path("/run"), {}, launch=0, socket=Path("/node/socket"))
    assert "TORCH_FR_BUFFER_SIZE" in settings
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in settings) is has_older


@pytest.mark.torch
def test_every_name_that_is_set_is_one_that_the_installed_torch_reads() -> None:
    """Strings of its library and of its headers: the part for NCCL is not in a library for CPUs."""
    folder = Path(torch_folder())
    c10d = folder / "include/torch/csrc/distributed/c10d"
    headers = b"".join(path.read_bytes() for path in sorted(c10d.glob("*.hpp")))
    library = (folder / "lib/libtorch_cpu.so").read_bytes()
    names = nccl_environment("/e", {}, pipe_dir="/node", has_timing=True)
    torch_s = {name for name in names if name.startswith("TORCH_")}
    assert len(torch_s) == 10
    for name in torch_s | {newer for newer, _ in PAIRS}:
        assert name.encode() in headers or name.encode() in library, name
    assert ENV_PG_TIMEOUT.encode() not in headers + library


def test_the_example_takes_the_limit_of_a_collective_from_there() -> None:
    options, _ = parse_options(["--run-dir=/r"], {ENV_PG_TIMEOUT: "45"})
    assert options.timeout_s == 45.0


@pytest.mark.torch
def test_torch_has_no_variable_for_the_limit_of_a_collective() -> None:
    """When it gets one, the launcher is to set it: documented as missing."""
    folder = Path(torch_folder())
    text = (folder / "distributed/distributed_c10d.py").read_text() + (folder / "distributed/constants.py").read_text()
    read = set(re.findall(r"""environ(?:\.get\(|\[)\s*["'](\w+)""", text))
    assert not {name for name in read if "TIMEOUT" in name}


def torch_folder() -> str:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent)


def test_what_the_user_set_is_never_overridden() -> None:
    given = {"NCCL_DEBUG": "INFO", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "NCCL_ASYNC_ERROR_HANDLING": "1"}
    settings = nccl_environment("/evidence", given)
    assert not set(settings) & set(given)
    assert settings["TORCH_FR_BUFFER_SIZE"] == "7"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in settings


def test_our_own_settings_are_no_leftovers() -> None:
    assert check_environment(nccl_environment("/evidence", {}, pipe_dir="/node", has_timing=True)) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_ALGO", "RING"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("TORCH_FR_BUFFER_SIZE", "0"),
    ],
)
def test_leftovers_of_debugging_are_told_by_name(name: str, value: str) -> None:
    (told,) = check_environment({name: value})
    assert name in told


def test_harmless_values_are_not_told() -> None:
    assert check_environment({"NCCL_IB_DISABLE": "0", "NCCL_NVLS_ENABLE": "2", "NCCL_DEBUG": "INFO"}) == ()


def test_bus_bandwidth_of_an_all_reduce_follows_its_formula() -> None:
    assert compute_bandwidth(size_bytes=8_000_000_000, time_s=1.0, ranks=8) == (8.0, 14.0)
    assert compute_bandwidth(size_bytes=1_000_000_000, time_s=0.5, ranks=1) == (2.0, 0.0)


@pytest.mark.torch
def test_the_bandwidth_test_prints_one_result_for_two_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "trainer.nccl", "--size-mb=1", "--iterations=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ranks"], result["size_bytes"]) == (2, 1_000_000)
    assert result["busbw"] == pytest.approx(result["algbw"])
