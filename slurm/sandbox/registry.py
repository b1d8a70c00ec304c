"""Which sandboxes this user has running on this machine, and the removal of what a killed keeper left.

Processes are no part of that: they end with their keeper.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from slurm.sandbox.accounting import remove_database
from slurm.sandbox.network import remove_link
from slurm.sandbox.processes import is_alive, read_stat
from slurm.sandbox.spec import SandboxError, SandboxSpec, parse_spec, registry_dir, render_spec


def make_registry() -> None:
    """Make the registry; SandboxError when somebody else made a folder of its name."""
    folder = registry_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SandboxError(f"{folder} belongs to somebody else; remove it, or set XDG_RUNTIME_DIR")


def write_entry(spec: SandboxSpec) -> None:
    """Register the sandbox under the calling process, its keeper."""
    found = read_stat(os.getpid())
    started = found.started if found is not None else 0
    _entry(spec.sandbox_id).write_text(f"{os.getpid()} {started}\n{render_spec(spec)}")


def remove_entry(spec: SandboxSpec) -> None:
    """Forget the sandbox, and its directory if that was made for it."""
    spec.socket.unlink(missing_ok=True)
    _entry(spec.sandbox_id).unlink(missing_ok=True)
    if spec.is_temporary:
        shutil.rmtree(spec.root, ignore_errors=True)


def read_keeper(spec: SandboxSpec) -> tuple[int, int] | None:
    """The sandbox's keeper as (pid, start in clock ticks), or None when it does not live."""
    try:
        pid, started, _ = _read_entry(_entry(spec.sandbox_id))
    except (OSError, SandboxError):
        return None
    return (pid, started) if is_alive(pid, started) else None


def sweep_leftovers() -> tuple[str, ...]:
    """Remove what sandboxes left whose keeper is dead; their directories."""
    swept = []
    for path in sorted(registry_dir().glob("*.json")):
        try:
            pid, started, spec = _read_entry(path)
        except (OSError, SandboxError):
            continue  # just being written, or of another release
        if not is_alive(pid, started):
            remove_link(spec.head_link)
            remove_database(spec)
            remove_entry(spec)
            swept.append(spec.directory)
    return tuple(swept)


def _read_entry(path: Path) -> tuple[int, int, SandboxSpec]:
    head, _, text = path.read_text().partition("\n")
    try:
        pid, started = (int(word) for word in head.split())
    except ValueError:
        raise SandboxError(f"{path} is not an entry of the registry") from None
    return pid, started, parse_spec(text)


def _entry(sandbox_id: str) -> Path:
    return registry_dir() / f"{sandbox_id}.json"
