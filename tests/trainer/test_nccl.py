"""What NCCL's settings and log lines come to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.nccl import check_environment, compute_bandwidth, judge_transport, nccl_environment, parse_transport

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


def test_what_the_user_set_is_never_overridden() -> None:
    given = {"NCCL_DEBUG": "INFO", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "NCCL_ASYNC_ERROR_HANDLING": "1"}
    settings = nccl_environment("/evidence", given)
    assert not set(settings) & set(given)
    assert settings["TORCH_FR_BUFFER_SIZE"] == "7"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in settings


def test_our_own_settings_are_no_leftovers() -> None:
    assert check_environment(nccl_environment("/evidence", {})) == ()


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
