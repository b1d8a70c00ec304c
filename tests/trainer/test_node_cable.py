"""A node whose cable is really cut, both ways and one way only: in a network of its own, as a sandbox's nodes are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.trainer.agents import Commander

pytestmark = pytest.mark.slurm  # what a sandbox needs, this needs: root, and namespaces

NAMESPACE = f"node{os.getpid()}"
HEAD_LINK, NODE_LINK = f"h{os.getpid()}", f"n{os.getpid()}"
HEAD, NODE = "10.99.7.1", "10.99.7.2"
NOBODY = "02:00:00:00:00:99"


def ip(*words: str, inside: bool = False) -> None:
    prefix = ("ip", "netns", "exec", NAMESPACE) if inside else ()
    subprocess.run([*prefix, "ip", *words], check=True, timeout=10)


@pytest.fixture
def cabled(tmp_path: Path) -> Iterator[Commander]:
    """A launcher that is played here, and an agent at the other end of a cable."""
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", HEAD_LINK, "type", "veth", "peer", "name", NODE_LINK, "netns", NAMESPACE)
        ip("address", "add", f"{HEAD}/24", "dev", HEAD_LINK)
        ip("link", "set", HEAD_LINK, "up")
        ip("address", "add", f"{NODE}/24", "dev", NODE_LINK, inside=True)
        ip("link", "set", NODE_LINK, "up", inside=True)
        ip("link", "set", "lo", "up", inside=True)
        node = Commander(tmp_path, host=HEAD, suspect_after_s=0.7, beat_interval_s=0.1)
        with closing(node):
            node.start_agent(prefix=("ip", "netns", "exec", NAMESPACE))
            yield node
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=False, timeout=10)


def test_a_cable_that_is_cut_ends_the_ranks_and_a_blip_does_not(cabled: Commander) -> None:
    rank = cabled.begin(0)
    ip("link", "set", HEAD_LINK, "down")
    cabled.listen(0.4)
    ip("link", "set", HEAD_LINK, "up")
    cabled.listen(1.0)
    assert cabled.is_alive(rank)
    assert len(cabled.said("hello")) == 1
    ip("link", "set", HEAD_LINK, "down")
    cabled.until(lambda: not cabled.is_alive(rank), deadline_s=10)
    cabled.until(cabled.paths.cut_off(1, "n1").exists)
    ip("link", "set", HEAD_LINK, "up")
    cabled.until(lambda: cabled.said("hello")[-1]["cut_s"] > 0)


def test_a_cable_that_is_cut_one_way_ends_the_ranks_though_the_launcher_is_heard(cabled: Commander) -> None:
    rank = cabled.begin(0)
    ip("neighbour", "replace", HEAD, "lladdr", NOBODY, "nud", "permanent", "dev", NODE_LINK, inside=True)
    cabled.until(lambda: not cabled.is_alive(rank), deadline_s=10)
