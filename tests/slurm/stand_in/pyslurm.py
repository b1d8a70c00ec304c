"""Stands in for pyslurm 25.11 in its child process: the same few names, and the ways in which the real one fails.

A test copies it to a folder of its own, beside a plan.json that says what it gives and how it fails.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PLAN: dict[str, Any] = json.loads((Path(__file__).with_name("plan.json")).read_text())

if _PLAN.get("import_ends"):
    os.write(2, b"fatal: Could not establish a configuration source\n")
    os._exit(1)

__version__: str = _PLAN["version"]


class RPCError(Exception):
    pass


def _load(what: str) -> Any:
    with Path(__file__).with_name("loads").open("a") as log:
        log.write(f"{what} {os.getpid()}\n")
    print("libslurm: debug: where it likes")
    if _PLAN.get("hangs") == what:
        time.sleep(600)
    if _PLAN.get("dies") == what:
        os._exit(11)
    if _PLAN.get("garbage") == what:
        os.write(3, b"%%% no answer\n")
        time.sleep(600)
    if _PLAN.get("refuses") == what:
        raise RPCError("Unable to contact slurm controller (connect failure)")
    return _PLAN[what]


def _collection(what: str) -> Any:
    return {number: SimpleNamespace(**row) for number, row in enumerate(_load(what))}


Jobs = SimpleNamespace(load=lambda: _collection("jobs"))
Nodes = SimpleNamespace(load=lambda: _collection("nodes"))
Partitions = SimpleNamespace(load=lambda: _collection("partitions"))
slurmctld = SimpleNamespace(Config=SimpleNamespace(load=lambda: SimpleNamespace(**_load("config"))))
