"""One running sandbox per mode for the whole module, and what is left of one after its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm.sandbox import Sandbox, SandboxUnavailable
from slurm.sandbox.installed import require_accounting, why_not_isolated

NODES = 3


@pytest.fixture(scope="session")
def namespaces_permitted() -> None:
    obstacle = why_not_isolated()
    if obstacle is not None:
        pytest.skip(obstacle)


@pytest.fixture(scope="module")
def isolated(namespaces_permitted: None) -> Iterator[Sandbox]:
    with Sandbox.start(nodes=NODES, mode="isolated", gpus_per_node=2) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def loopback() -> Iterator[Sandbox]:
    with Sandbox.start(nodes=NODES, mode="loopback", gpus_per_node=2) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def accounting_installed() -> None:
    try:
        require_accounting()
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=["isolated", "loopback"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    running: Sandbox = request.getfixturevalue(request.param)
    return running


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Where a sandbox can be seen from outside."""

    directory: Path
    pids: frozenset[int]
    links: frozenset[str]


def read_traces(sandbox: Sandbox) -> Traces:
    pids = frozenset(pid for node in sandbox.node_names for pid in sandbox.node_pids(node)) | _pids_naming(
        sandbox.directory
    )
    return Traces(
        directory=sandbox.directory,
        pids=pids,
        links=frozenset(link.name for link in Path("/sys/class/net").glob(f"sbx-{sandbox.sandbox_id}")),
    )


def remains_of(traces: Traces) -> list[str]:
    """What is still there. A namespace lives only by a process in it or by a mount of it: those are counted."""
    live = [f"process {pid}" for pid in sorted(_live_pids() & traces.pids | _pids_naming(traces.directory))]
    links = {link.name for link in Path("/sys/class/net").iterdir()} & traces.links
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(traces.directory) in line]
    return live + sorted(links) + mounts


def _live_pids() -> frozenset[int]:
    return frozenset(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _is_live(p))


def _is_live(process: Path) -> bool:
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _pids_naming(directory: Path) -> frozenset[int]:
    marker = str(directory).encode()
    return frozenset(pid for pid in _live_pids() if marker in _read(f"/proc/{pid}/cmdline", f"/proc/{pid}/environ"))


def _read(*paths: str) -> bytes:
    parts = []
    for path in paths:
        try:
            parts.append(Path(path).read_bytes())
        except OSError:
            continue
    return b"\0".join(parts)
