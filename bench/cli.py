"""`make bench-cli`: how long `supervisor status` takes to start and answer, against a Python that does nothing."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.built import fill_ledger
from bench.report import describe_machine, finish, median, render_table, show
from bench.starts import as_installed
from supervisor.store import Store

_HEAVY = ("torch", "submitit", "pyslurm", "rich", "numpy", "sqlite_utils", "structlog", "ClusterShell")

_LISTING_MODULES = """\
import sys
from supervisor.cli.main import main
try:
    main(["status"])
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cli", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="starts of each command, in turns")
    options = parser.parse_args(argv)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        env = _prepare(Path(folder))
        commands = {
            "python -c pass": (sys.executable, "-c", "pass"),
            "supervisor --help": (sys.executable, "-m", "supervisor", "--help"),
            "supervisor status": (sys.executable, "-m", "supervisor", "status"),
            "supervisor status --json": (sys.executable, "-m", "supervisor", "status", "--json"),
        }
        times = _measure(commands, env, options.repeats)
        heavy = _find_heavy_imports(env)
    medians = {name: median([s * 1000 for s in values], 0) for name, values in times.items()}
    result: dict[str, Any] = {"ms": medians, "heavy_imports": heavy, "repeats": options.repeats}
    base = medians["python -c pass"] or 0.0
    rows = [(name, show(ms, 0), show((ms or 0.0) - base, 0)) for name, ms in medians.items()]
    print(f"\nMilliseconds from start to end, median of {options.repeats} (a ledger of 20 runs, no daemon)")
    print(render_table(("command", "ms", "above Python's own"), rows))
    print(f"\nheavy packages that `supervisor status` imports: {', '.join(heavy) or 'none'}")
    finish("cli", result, machine)
    return 0


def _prepare(folder: Path) -> dict[str, str]:
    """A ledger with runs in it, and the environment that points to it."""
    ledger = folder / "ledger.db"
    with Store.open(ledger, now=datetime.now(UTC)) as store:
        fill_ledger(store)
    env = {**os.environ, "SUPERVISOR_LEDGER": str(ledger), "SUPERVISOR_SOCKET": str(folder / "control.sock")}
    return as_installed(env, folder / "bytecode")


def _measure(commands: Mapping[str, Sequence[str]], env: Mapping[str, str], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats + 1):
        for name, command in commands.items():
            began = time.monotonic()
            subprocess.run(
                command, env=env, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=60
            )
            times[name].append(time.monotonic() - began)
    return {name: each[1:] for name, each in times.items()}  # the first start compiles


def _find_heavy_imports(env: Mapping[str, str]) -> list[str]:
    command = (sys.executable, "-c", _LISTING_MODULES)
    shown = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stderr
    imported = set(shown.split())
    return [name for name in _HEAVY if name in imported]


if __name__ == "__main__":
    sys.exit(main())
