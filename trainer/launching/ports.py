"""Asks the slurmd ports of quiet nodes whether their kernels still answer: by connects, from a thread."""

from __future__ import annotations

import errno
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.step import run_scontrol

DEFAULT_PORT = 6818
PAUSE_S = 0.1  # between two rounds of connects
ROUNDS = 2  # a port is silent when it was so this often in a row: one lost packet is no silence
LOOKUP_PAUSE_S = 30.0

Address = tuple[str, int]


def parse_addresses(nodes_text: str, config_text: str) -> dict[str, Address]:
    """Each node's slurmd, from `scontrol -o show node` and `scontrol show config`."""
    found = re.search(r"^SlurmdPort\s*=\s*(\d+)", config_text, re.MULTILINE)
    usual = int(found[1]) if found else DEFAULT_PORT
    addresses: dict[str, Address] = {}
    for line in nodes_text.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(NodeName|NodeAddr|Port)=(\S+)", line))
        if {"NodeName", "NodeAddr"} <= set(fields):
            port = fields.get("Port", "")
            addresses[fields["NodeName"]] = (fields["NodeAddr"], int(port) if port.isdecimal() else usual)
    return addresses


def fetch_addresses(nodes: Sequence[str]) -> dict[str, Address]:
    """The slurmds of all the nodes, by one call each for nodes and configuration; empty when Slurm does not answer."""
    text = run_scontrol("-o", "show", "node", ",".join(nodes))
    return parse_addresses(text, "" if not text else run_scontrol("show", "config"))


def knock(addresses: Mapping[str, Address], limit_s: float) -> dict[str, bool]:
    """Whether a kernel answers at each address within the limit; a refusal is an answer."""
    answers = dict.fromkeys(addresses, False)
    waiting: dict[int, tuple[str, socket.socket]] = {}
    poller = select.poll()
    for node, address in addresses.items():
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            error = sock.connect_ex(address)
        except OSError:  # no descriptor, or a name that cannot be resolved
            continue
        waiting[sock.fileno()] = (node, sock)
        if error == errno.EINPROGRESS:
            poller.register(sock, select.POLLOUT)
        else:
            answers[node] = error in (0, errno.ECONNREFUSED)
            waiting.pop(sock.fileno())[1].close()
    deadline = time.monotonic() + limit_s
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for fileno, _ in poller.poll(left_s * 1000):
            node, sock = waiting.pop(fileno)
            poller.unregister(fileno)
            answers[node] = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED)
            sock.close()
    for _, sock in waiting.values():
        sock.close()
    return answers


@dataclass(slots=True)
class _Answers:
    since: float  # when it was first asked about in this silence
    silent_rounds: int = 0
    answers: bool | None = None


class PortWatch(threading.Thread):
    """Knocks at the ports of the nodes that it is told of, as long as it is told of them."""

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        limit_s: float,
        fetch: Callable[[Sequence[str]], Mapping[str, Address]] = fetch_addresses,
    ) -> None:
        super().__init__(name="ports", daemon=True)
        self._nodes = nodes
        self._limit_s = limit_s
        self._fetch = fetch
        self._addresses: Mapping[str, Address] = {}
        self._fetched_at = 0.0
        self._changed = threading.Condition()
        self._watched: dict[str, _Answers] = {}

    def watch(self, nodes: Iterable[str], *, beside: str | None) -> None:
        """Knock at these from now on, and at `beside`, a node that beats; what was known of all others is dropped."""
        wanted = {*nodes}
        if wanted and beside is not None:
            wanted.add(beside)
        with self._changed:
            if wanted == set(self._watched):
                return
            now = time.monotonic()
            self._watched = {node: self._watched.get(node) or _Answers(since=now) for node in wanted}
            self._changed.notify()

    def answers(self, node: str) -> bool | None:
        """Whether the kernel of a watched node answers; None while that is not known."""
        with self._changed:
            found = self._watched.get(node)
            return found.answers if found else None

    def knows(self, node: str) -> bool:
        """True when there is an address to knock at."""
        return node in self._addresses

    def run(self) -> None:
        """Knock while there is somebody to knock at; ends with the process."""
        self._look_up()
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
                names = list(self._watched)
            if not self._addresses and time.monotonic() - self._fetched_at > LOOKUP_PAUSE_S:
                self._look_up()
            known = {name: self._addresses[name] for name in names if name in self._addresses}
            self._take(knock(known, self._limit_s))
            time.sleep(PAUSE_S)

    def _look_up(self) -> None:
        self._addresses = dict(self._fetch(self._nodes))
        self._fetched_at = time.monotonic()

    def _take(self, answers: Mapping[str, bool]) -> None:
        with self._changed:
            for node, is_there in answers.items():
                found = self._watched.get(node)
                if found is None:
                    continue
                found.silent_rounds = 0 if is_there else found.silent_rounds + 1
                if is_there:
                    found.answers = True
                elif found.silent_rounds >= ROUNDS:
                    found.answers = False
