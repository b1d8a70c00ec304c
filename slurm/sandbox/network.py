"""The isolated nodes' network: a bridge that stands in a network namespace of its own.

All that the machine itself sees is one end of a virtual cable. The bridge, and the node ends of all cables, live in
namespaces that exist only as long as their processes: when those end, however they end, the kernel removes the rest.
A bridge in its own namespace also stays clear of the machine's packet filter (a container engine's rules drop what
crosses a bridge they do not know).
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from slurm.sandbox.installed import find_tool
from slurm.sandbox.processes import await_true, die_with_parent
from slurm.sandbox.spec import SandboxError, SandboxSpec

_TIMEOUT_S = 10
_POOL = ipaddress.IPv4Network("10.192.0.0/11")


def choose_subnet() -> ipaddress.IPv4Network:
    """A private /24 that no address or route of this machine touches, drawn at random among thousands."""
    taken = tuple(_read_taken())
    for _ in range(1000):
        base = int(_POOL.network_address) + 256 * random.randrange(_POOL.num_addresses // 256)
        subnet = ipaddress.IPv4Network((base, 24))
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise SandboxError(f"no free /24 in {_POOL}: the machine's routes cover all of it")


def _read_taken() -> Iterable[ipaddress.IPv4Network]:
    for route in json.loads(_ip("-j", "-4", "route", "show", "table", "all") or "[]"):
        with suppress(ValueError):  # "default" and its like are no network
            yield ipaddress.IPv4Network(route["dst"], strict=False)


class Switch:
    """The bridge and its cables. It lives in the namespace of one small process, started here."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        # `cat` ends when the other end of its input closes: with this process, at the latest.
        self._process = subprocess.Popen(
            [find_tool("unshare") or "unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (this process has one thread)
        )

    def connect_head(self) -> None:
        """Make the bridge and the cable to this machine's own network."""
        pid = self._process.pid
        if not await_true(lambda: _namespace(pid) != _namespace(os.getpid()), deadline_s=_TIMEOUT_S, every_s=0.002):
            raise SandboxError("the network namespace of the sandbox did not appear")
        link = self._spec.head_link
        _batch(
            f"link add {link} type veth peer name head netns {pid}",
            *(f"addr add {a}/24 dev {link}" for a in (self._spec.head_address, self._spec.standby_address) if a),
            f"link set {link} up",
        )
        _batch(
            "link add bridge type bridge",
            "link set bridge up",
            "link set head master bridge",
            "link set head up",
            inside=pid,
        )

    def connect(self, cables: dict[str, int]) -> None:
        """A cable to each node, given the pid of a process in that node's network namespace."""
        lines: list[str] = []
        for node, pid in cables.items():
            # The same hardware address after every power cycle: the head's memory of it stays right.
            mac = _hardware_address(self._spec.node(node).address)
            lines += [
                f"link add {node} type veth peer name eth0 netns {pid} address {mac}",
                f"link set {node} master bridge",
                f"link set {node} up",
            ]
        _batch(*lines, inside=self._process.pid)

    def disconnect(self, node: str) -> None:
        """Remove the node's cable, both ends of it."""
        _batch(f"link del {node}", inside=self._process.pid)

    def cut(self, node: str) -> None:
        """Pull the node's cable."""
        _batch(f"link set {node} down", inside=self._process.pid)

    def mend(self, node: str) -> None:
        """Plug the node's cable in again."""
        _batch(f"link set {node} up", inside=self._process.pid)

    def remove(self) -> None:
        """End the bridge and every cable."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=_TIMEOUT_S)
        link = Path("/sys/class/net") / self._spec.head_link
        with suppress(SandboxError):  # the kernel takes it away by itself, a moment after the namespace
            _batch(f"link del {self._spec.head_link}")
        await_true(lambda: not link.exists(), deadline_s=_TIMEOUT_S)


def remove_link(name: str) -> None:
    """Remove the machine's end of the cable to a sandbox; one that is not there is no error."""
    with suppress(SandboxError):
        _batch(f"link del {name}")


def _hardware_address(address: str) -> str:
    return "02:00:" + ":".join(f"{byte:02x}" for byte in ipaddress.IPv4Address(address).packed)


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError as error:
        raise SandboxError(f"process {pid} of the sandbox's network ended: {error}") from None


def _batch(*lines: str, inside: int | None = None) -> None:
    enter = [] if inside is None else [find_tool("nsenter") or "nsenter", f"--net=/proc/{inside}/ns/net"]
    done = subprocess.run(
        [*enter, find_tool("ip") or "ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise SandboxError(f"ip refused {lines}: {done.stderr.strip()}")


def _ip(*args: str) -> str:
    return subprocess.run(
        [find_tool("ip") or "ip", *args], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout
