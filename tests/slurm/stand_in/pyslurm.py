"""Stands in for pyslurm 25.11 in its child process: the same few names, and the ways in which the real one fails.

A test copies it to a folder of its own, beside a plan.json that says what it gives and how it fails. Held to the real
one by tests/slurm/test_pyslurm_real.py, which looks at the same names, types and failures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_PLAN: dict[str, Any] = json.loads((Path(__file__).with_name("plan.json")).read_text())

if _PLAN.get("import_ends"):
    os.write(2, b"fatal: Could not establish a configuration source\n")
    os._exit(1)

__version__: str = _PLAN["version"]


class PyslurmError(Exception):
    pass


class RPCError(PyslurmError):
    pass


def _get_exit_code(status: int) -> tuple[int, int]:
    code, signal = status >> 8, status & 0x7F
    return code - 128 if code >= 128 else code, signal


_jobs = ModuleType("pyslurm.core.job.job")
if not _PLAN.get("built_otherwise"):
    _jobs._get_exit_code = _get_exit_code  # type: ignore[attr-defined]
sys.modules[_jobs.__name__] = _jobs


class _Job(SimpleNamespace):
    exit_status: int

    def __init__(self, **row: Any) -> None:
        self._user_name: str | None = row.pop("user_name", None)
        super().__init__(**row)

    @property
    def user_name(self) -> str | None:
        with Path(__file__).with_name("lookups").open("a") as log:
            log.write(f"{self._user_name}\n")
        return self._user_name

    @property
    def exit_code(self) -> int:
        return getattr(_jobs, "_get_exit_code", _get_exit_code)(self.exit_status)[0]

    @property
    def exit_code_signal(self) -> int:
        return getattr(_jobs, "_get_exit_code", _get_exit_code)(self.exit_status)[1]


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


def _collection(what: str, kind: type[SimpleNamespace] = SimpleNamespace) -> Any:
    return {number: kind(**row) for number, row in enumerate(_load(what))}


Jobs = SimpleNamespace(load=lambda: _collection("jobs", _Job))
Nodes = SimpleNamespace(load=lambda: _collection("nodes"))
Partitions = SimpleNamespace(load=lambda: _collection("partitions"))
slurmctld = SimpleNamespace(Config=SimpleNamespace(load=lambda: SimpleNamespace(**_load("config"))))
