"""What this machine offers a sandbox: Slurm's programs and plugins, MariaDB, and the right to make namespaces."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from slurm.sandbox.conf import SlurmShape
from slurm.sandbox.spec import SandboxUnavailable

# Debian keeps daemons out of an ordinary user's PATH.
_SYSTEM_DIRS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_SLURM_TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
_SLURM_PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins"
_ACCOUNTING_PACKAGES = "slurmdbd slurm-wlm-mysql-plugin mariadb-server-core mariadb-client-core"
_NAMESPACE_TOOLS = ("unshare", "nsenter", "ip", "mount")
_CGROUP_DISABLED_SINCE = (24, 5)
_PROBE_TIMEOUT_S = 10


def search_path(path: str | None = None, *, prefix: str = "") -> str:
    """PATH with the system's folders for daemons added at its end, and those of the Slurm in `prefix` at its start."""
    first = [f"{prefix}/sbin", f"{prefix}/bin"] if prefix else []
    given = [
        d for d in (os.environ.get("PATH", "") if path is None else path).split(os.pathsep) if d and d not in first
    ]
    return os.pathsep.join([*first, *given, *(d for d in _SYSTEM_DIRS if d not in given)])


def find_tool(name: str, *, prefix: str = "") -> str | None:
    """Full path of a program, or None."""
    return shutil.which(name, path=search_path(prefix=prefix))


def read_slurm_shape(*, prefix: str = "") -> SlurmShape:
    """What the installed Slurm has, or the one in `prefix`; SandboxUnavailable saying what is not there."""
    if prefix and not os.access(f"{prefix}/sbin/slurmctld", os.X_OK):
        raise SandboxUnavailable(f"no Slurm in {prefix}: there is no sbin/slurmctld")
    missing = [tool for tool in _SLURM_TOOLS if find_tool(tool, prefix=prefix) is None]
    if missing:
        raise SandboxUnavailable(
            f"Slurm is not installed here ({', '.join(missing)} not found): apt-get install {_SLURM_PACKAGES}"
        )
    slurmctld = find_tool("slurmctld", prefix=prefix) or "slurmctld"
    shown = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S)
    found = re.search(r"(\d+)\.(\d+)(\.\S+)?", shown.stdout)
    if found is None:
        raise SandboxUnavailable(f"slurmctld -V does not name a version: {shown.stdout.strip()!r}")
    plugins = _plugin_dir(prefix)
    if plugins is not None and not (plugins / "auth_none.so").exists():
        raise SandboxUnavailable(
            f"Slurm's plugin auth_none.so is missing in {plugins}: apt-get install slurm-wlm-basic-plugins"
        )
    return SlurmShape(
        version=found[0],
        has_cred_none=plugins is None or (plugins / "cred_none.so").exists(),
        has_cgroup_disabled=(int(found[1]), int(found[2])) >= _CGROUP_DISABLED_SINCE,
    )


def _plugin_dir(prefix: str) -> Path | None:
    slurmctld = Path(find_tool("slurmctld", prefix=prefix) or "/usr/sbin/slurmctld").resolve()
    patterns = ("lib/*/slurm-wlm", "lib*/slurm-wlm", "lib*/slurm", "lib/*/slurm")
    above = slurmctld.parent.parent
    found = [d for pattern in patterns for d in above.glob(pattern) if any(d.glob("select_*.so"))]
    return found[0] if found else None


def require_accounting(*, prefix: str = "") -> None:
    """SandboxUnavailable naming the packages when slurmdbd or MariaDB is not there."""
    plugins = _plugin_dir(prefix)
    tools = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacct")
    missing = [tool for tool in tools if find_tool(tool, prefix=prefix) is None]
    if plugins is not None and not (plugins / "accounting_storage_mysql.so").exists():
        missing.append("accounting_storage_mysql.so")
    if missing:
        raise SandboxUnavailable(
            f"accounting needs what is not installed here ({', '.join(missing)}): "
            f"apt-get install {_ACCOUNTING_PACKAGES}"
        )


def why_not_isolated() -> str | None:
    """Why nodes cannot have namespaces of their own here, in one sentence; None when they can."""
    if os.geteuid() != 0:
        return "isolated nodes need root"
    missing = [tool for tool in _NAMESPACE_TOOLS if find_tool(tool) is None]
    if missing:
        return f"isolated nodes need {', '.join(missing)} (apt-get install util-linux iproute2 mount)"
    # One try of all that a node needs: namespaces, a bridge, a virtual cable and a small file system.
    script = (
        "ip link add probe-br type bridge && ip link add probe-a type veth peer name probe-b && "
        "ip link set probe-a master probe-br && mount -t tmpfs -o size=1m none /dev/shm"
    )
    argv = [
        find_tool("unshare") or "unshare",
        *("--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts", "--ipc"),
        *("sh", "-c", script),
    ]
    try:
        tried = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_TIMEOUT_S,
            env={"PATH": search_path(), "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces could not be tried here: {error}"
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines()
    return f"namespaces or bridges are not permitted here ({said[-1] if said else 'no reason given'})"
