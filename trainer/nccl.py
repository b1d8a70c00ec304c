"""NCCL: fail-fast and evidence settings, what its log says of the transport, and an all-reduce bandwidth test.

`torchrun … -m trainer.nccl --size-mb 256` prints one JSON object with the bandwidth that the nodes reach together
(nccl on GPUs, gloo on CPUs). Everything but the test is pure, and needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

BUFFER_ENTRIES = 2000  # of the Flight Recorder: several steps of a large model; 20000 take 4 s to dump instead of 0.4
HEARTBEAT_TIMEOUT_S = 300  # of NCCL's watchdog, for a driver that does not answer; PyTorch's own: 480
DUMP_WAIT_MS = 5000  # PyTorch waits four times this before it ends the process, for the dumps; its own: 15000
PG_TIMEOUT_S = 600  # of a collective: PyTorch's own for NCCL (1800 for other backends)
ENV_PG_TIMEOUT = "SUPERVISOR_PG_TIMEOUT_S"

_NEWER_NAMES_SINCE = (2, 11)  # of PyTorch: the first of which it is known for certain

# The same setting under its newer name, which wins where both are set, and its older one.
PAIRS = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
    ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"),
)
_RECORDER_PAIRS = PAIRS[:2]

_OURS_OR_YOURS = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", ENV_PG_TIMEOUT)
_MAX_TIMEOUT_S = 365 * 86400.0

_PREFIX = re.compile(
    r"^(?:\[[\d :.-]+\] )?(?P<host>\S+?):\d+:\d+ \[\S+\] (?:\S+ )?NCCL (?P<level>INFO|WARN) (?P<text>.*)$"
)
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_NETWORK = re.compile(r"Using network (.+?)\s*$")
_HCA_LIST = re.compile(r"NET/IB\s?: Using (.+?)(?: ?; OOB|$)")
_HCA = re.compile(r"\[\d+\](\S+?:\d+)/")
_GPU_DIRECT = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for HCA \d+ '([^']+)'")
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : \S+ -> \S+ (?:\[\w+\] )?via (\S+)")
_NVLS = re.compile(r"NVLS multicast support is (available|not available) on dev")


# ---------------------------------------------------------------- environment


def nccl_environment(
    evidence_dir: str,
    given: Mapping[str, str],
    *,
    torch_version: str = "",
    pipe_dir: str = "",
    has_timing: bool = False,
) -> dict[str, str]:
    """Settings that make a hang end with evidence, for every variable that `given` leaves open.

    Errors end the process at once, without a clean-up that may hang itself; the Flight Recorder is on, and dumps
    into `evidence_dir` (which must exist: its default is one path for all jobs of a user), one file a rank; NCCL's
    warnings go to one file for each process there, so that their lines stay whole. A PyTorch of `torch_version` that
    reads the newer names warns of the older ones, so it gets none of them; one that is not known gets both.

    `pipe_dir`: a folder of this node in which each rank on NCCL keeps a pipe that has it dump, also while its program
    is stuck; it must be able to hold pipes, or the ranks do not start. `has_timing`: the recorder tells when each
    collective began and how long it took, at the price of two timed events for each instead of one without a time.
    """
    wanted = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT_TIMEOUT_S),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(DUMP_WAIT_MS),
        "TORCH_FR_BUFFER_SIZE": str(BUFFER_ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": f"{evidence_dir}/fr_trace_rank_",
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": f"{evidence_dir}/nccl.%h.%p.log",
        ENV_PG_TIMEOUT: str(PG_TIMEOUT_S),
    }
    if pipe_dir:
        wanted["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{pipe_dir}/fr_rank_"
    if has_timing and "NCCL_ENABLE_TIMING" not in given:
        wanted["TORCH_NCCL_ENABLE_TIMING"] = "1"
    if "NCCL_ASYNC_ERROR_HANDLING" not in given:  # the older name, still read
        # torchrun would set 1, which first aborts the communicators: on a broken network that may take for ever
        wanted["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    for newer, older in _RECORDER_PAIRS:
        wanted[newer] = given.get(newer) or given.get(older) or wanted[newer]
        if not _reads_newer_names(torch_version):
            wanted[older] = wanted[newer]
    return {name: value for name, value in wanted.items() if name not in given}


def process_group_timeout(environment: Mapping[str, str] = os.environ) -> timedelta:
    """The limit of a collective, for `init_process_group(timeout=…)`: PyTorch reads no variable for it.

    $SUPERVISOR_PG_TIMEOUT_S where it is a positive number of seconds, else 600.
    """
    try:
        seconds = float(environment.get(ENV_PG_TIMEOUT, ""))
    except ValueError:
        seconds = 0.0
    return timedelta(seconds=seconds if 0 < seconds < _MAX_TIMEOUT_S else PG_TIMEOUT_S)


def tell_settings(ours: Mapping[str, str], given: Mapping[str, str]) -> str:
    """One line for people: what `nccl_environment` has set, and what the user has (which wins)."""
    yours = {name: value for name, value in given.items() if name.startswith(_OURS_OR_YOURS) and name not in ours}
    copied = [
        f"{mine} follows your {theirs}"
        for pair in PAIRS
        for mine, theirs in (pair, pair[::-1])
        if mine in ours and theirs in given
    ]
    return "; ".join((f"NCCL settings: {_tell(ours)}", f"yours: {_tell(yours)}", *copied))


def _tell(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={settings[name]}" for name in sorted(settings)) or "none"


def _reads_newer_names(torch_version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    return found is not None and (int(found[1]), int(found[2])) >= _NEWER_NAMES_SINCE


# (variable, values that are harmless, what any other value does). Left behind by someone's debugging, each costs
# bandwidth or hides errors for as long as nobody looks.
_LEFTOVERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("NCCL_IB_DISABLE", ("0",), "keeps NCCL off InfiniBand: traffic goes over sockets"),
    ("NCCL_P2P_DISABLE", ("0",), "keeps the GPUs of a node from reading each other over NVLink or PCIe"),
    ("NCCL_SHM_DISABLE", ("0",), "sends traffic inside a node over the network"),
    ("NCCL_NVLS_ENABLE", ("1", "2"), "rules out NVSwitch multicast"),
    ("NCCL_DMABUF_ENABLE", ("1",), "may rule out GPUDirect"),
    ("NCCL_NET_GDR_LEVEL", (), "limits GPUDirect by distance"),
    ("NCCL_ALGO", (), "fixes the algorithm for every size"),
    ("NCCL_PROTO", (), "fixes the protocol for every size"),
    ("NCCL_MAX_NCHANNELS", (), "limits the channels"),
    ("NCCL_BUFFSIZE", (), "changes the buffers"),
    ("CUDA_LAUNCH_BLOCKING", ("0",), "makes every kernel launch wait"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("0",), "makes the host wait for every collective"),
    ("TORCH_NCCL_ENABLE_MONITORING", ("1",), "switches the watchdog's monitor off: a stuck rank stays stuck"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", ("1",), "leaves no Flight Recorder dump after a hang"),
    ("TORCH_NCCL_DESYNC_DEBUG", ("0",), "slows every collective down"),
    ("TORCH_DISTRIBUTED_DEBUG", ("OFF", "INFO"), "checks every collective with a second one"),
)
_LOUD_LEVELS = ("INFO", "TRACE")


def check_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    """One sentence for each setting that looks like a leftover of debugging; nothing for a clean environment."""
    found = [
        f"{name}={environment[name]} {effect}"
        for name, harmless, effect in _LEFTOVERS
        if name in environment and environment[name] not in harmless
    ]
    buffer = environment.get("TORCH_FR_BUFFER_SIZE", environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE"))
    if buffer == "0":
        found.append(
            "a buffer size of 0 (TORCH_FR_BUFFER_SIZE) switches the Flight Recorder off: no evidence of a hang"
        )
    found += [sentence for newer, older in PAIRS if (sentence := _check_pair(newer, older, environment))]
    if environment.get("NCCL_DEBUG", "").upper() in _LOUD_LEVELS and "COLL" in environment.get("NCCL_DEBUG_SUBSYS", ""):
        found.append("NCCL_DEBUG_SUBSYS with COLL writes a line for every collective")
    return tuple(found)


def _check_pair(newer: str, older: str, environment: Mapping[str, str]) -> str:
    """What is to be said of a setting that has an older name too."""
    new, old = environment.get(newer), environment.get(older)
    if old is None or new == old:
        return ""
    if new is None:
        return f"{older}={old} is the older name of {newer}, of which newer PyTorch warns"
    return f"{newer}={new} and {older}={old} are one setting under two names: newer PyTorch takes the first"


# ---------------------------------------------------------------- transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What NCCL's log says of the way its data goes. Counts are lines of the log, over all its ranks."""

    version: str = ""
    networks: tuple[str, ...] = ()  # "IB", "Socket", a plugin's name; more than one: the ranks disagree
    hcas: tuple[str, ...] = ()
    gpu_direct_off: tuple[str, ...] = ()  # HCAs that said that GPUDirect RDMA is disabled
    channels: Mapping[str, int] = field(default_factory=dict)  # "NET/IB", "NET/Socket", "P2P", "SHM", ...
    net_channels_staged: int = 0  # channels over the network without GPUDirect: staged through host memory
    has_nvls: bool | None = None  # NVSwitch multicast; None when the log says nothing
    warnings: tuple[str, ...] = ()


def parse_transport(log_text: str) -> Transport:
    """The transport told by the lines of NCCL_DEBUG=INFO; lines that others wrote into the log are passed over."""
    lines = [found for line in log_text.splitlines() if (found := _PREFIX.search(line))]
    texts = [line["text"] for line in lines]
    channels = [found[1] for text in texts if (found := _CHANNEL.search(text))]
    hcas = [found[1] for text in texts if (found := _HCA_LIST.search(text))]
    nvls = {found[1] for text in texts if (found := _NVLS.search(text))}
    version = _VERSION.search(log_text)
    return Transport(
        version=version[1] if version else "",
        networks=_unique(found[1] for text in texts if (found := _NETWORK.search(text))),
        hcas=_unique(name for text in hcas for name in _HCA.findall(text)),
        gpu_direct_off=_unique(
            found[2] for text in texts if (found := _GPU_DIRECT.search(text)) and found[1] == "Disabled"
        ),
        channels=_count(_name_path(path) for path in channels),
        net_channels_staged=sum(path.startswith("NET/") and "GDRDMA" not in path for path in channels),
        has_nvls="not available" not in nvls if nvls else None,
        warnings=_unique(line["text"] for line in lines if line["level"] == "WARN"),
    )


def _name_path(path: str) -> str:
    # NET/IB/3(5)/GDRDMA -> NET/IB, P2P/CUMEM/read -> P2P, SHM/direct/direct -> SHM
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] in ("NET", "COLLNET") else parts[0]


def _unique(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _count(values: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def judge_transport(transport: Transport, *, has_infiniband: bool) -> tuple[str, ...]:
    """One sentence for each way in which the data goes a slower way than the hardware has."""
    rules = (
        (
            has_infiniband and "Socket" in transport.networks,
            "NCCL uses sockets although the node has InfiniBand",
        ),
        (len(transport.networks) > 1, f"the ranks disagree on the network: {', '.join(transport.networks)}"),
        (
            bool(transport.gpu_direct_off),
            f"GPUDirect RDMA is disabled for {', '.join(transport.gpu_direct_off)}",
        ),
        (
            "NET/IB" in transport.channels and transport.net_channels_staged > 0,
            f"{transport.net_channels_staged} channels over the network are staged through host memory",
        ),
        (
            "SHM" in transport.channels and "P2P" in transport.channels,
            "some GPUs of a node talk through host memory",
        ),
        (transport.has_nvls is False, "NVSwitch multicast is not available: is the fabric manager running?"),
    )
    return tuple(sentence for is_so, sentence in rules if is_so)


# ---------------------------------------------------------------- bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The result of an all-reduce test; bandwidths in GB/s (1e9 bytes)."""

    backend: str
    ranks: int
    size_bytes: int
    iterations: int
    time_s: float  # of one all-reduce, on the slowest rank
    algbw: float
    busbw: float


def compute_bandwidth(*, size_bytes: int, time_s: float, ranks: int) -> tuple[float, float]:
    """(algbw, busbw) of an all-reduce in GB/s.

    algbw = size / time; busbw = algbw * 2(n-1)/n, the rate at which each link must have carried data, which is
    comparable between numbers of ranks (NVIDIA nccl-tests, doc/PERFORMANCE.md, "AllReduce").
    """
    algbw = size_bytes / time_s / 1e9
    return algbw, algbw * 2 * (ranks - 1) / ranks


def measure_bandwidth(*, size_bytes: int, iterations: int, warm_up: int = 5) -> Bandwidth:
    """All-reduce `size_bytes` of float32 over the initialised default process group."""
    import torch
    from torch import distributed

    backend = distributed.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    data = torch.ones(max(1, size_bytes // 4), dtype=torch.float32, device=device)

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(warm_up):
        distributed.all_reduce(data)
    settle()
    distributed.barrier()
    begun = time.perf_counter()
    for _ in range(iterations):
        distributed.all_reduce(data)
    settle()
    slowest = torch.tensor([(time.perf_counter() - begun) / iterations], dtype=torch.float64, device=device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    ranks, time_s = distributed.get_world_size(), float(slowest.item())
    algbw, busbw = compute_bandwidth(size_bytes=data.numel() * 4, time_s=time_s, ranks=ranks)
    return Bandwidth(
        backend=backend,
        ranks=ranks,
        size_bytes=data.numel() * 4,
        iterations=iterations,
        time_s=time_s,
        algbw=algbw,
        busbw=busbw,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure under torchrun; rank 0 prints the result as JSON."""
    import torch
    from torch import distributed

    parser = argparse.ArgumentParser(prog="python -m trainer.nccl", description=__doc__)
    parser.add_argument("--size-mb", type=float, default=64.0, help="size of the reduced tensor in MB (1e6 bytes)")
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("run it under torchrun: it takes rank and world size from there")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        result = measure_bandwidth(size_bytes=int(options.size_mb * 1e6), iterations=max(1, options.iterations))
        if distributed.get_rank() == 0:
            print(json.dumps({name: getattr(result, name) for name in Bandwidth.__slots__}), flush=True)
    finally:
        distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
