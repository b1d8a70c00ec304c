"""Run one of Slurm's tools as another account, or in another directory: `slurm.run_tool` through `slurm.exec_as`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from slurm import exec_as
from slurm.errors import SlurmRefused
from slurm.inherited import AS_THE_SERVICE, Inherited
from slurm.run_tool import Completed, run_tool
from slurm.types import Identity


class RunAs(Protocol):
    """Runs `argv` with exactly `env`, as `identity` and in `directory`; None: as the service, where it is.

    `inherited`: umask and soft limits; what it leaves open is the identity's, or the service's.

    OSError when the tool can't be started; SlurmRefused when it may not: no such directory, or no right to enter it.
    """

    def __call__(
        self,
        argv: tuple[str, ...],
        timeout_s: float,
        env: Mapping[str, str],
        *,
        identity: Identity | None,
        directory: Path | None,
        inherited: Inherited = AS_THE_SERVICE,
    ) -> Completed: ...


def run_as(
    argv: tuple[str, ...],
    timeout_s: float,
    env: Mapping[str, str],
    *,
    identity: Identity | None,
    directory: Path | None,
    inherited: Inherited = AS_THE_SERVICE,
    path: str | None = None,
) -> Completed:
    """`run_tool` as `identity`, in `directory`, which is entered with that account's rights.

    The tool is looked up on `path` (None: this process's PATH), never on the PATH in `env`.

    Raises:
        OSError: the tool is not there or can't be started.
        SlurmRefused: the account, or the directory as that account; nothing was started.
    """
    tool = shutil.which(argv[0], path=path)
    if tool is None:
        raise FileNotFoundError(f"{argv[0]} is not on PATH")
    order = exec_as.render_order(
        tool,
        argv,
        env,
        uid=identity.uid if identity else None,
        gid=identity.gid if identity else None,
        umask=inherited.umask if inherited.umask is not None or not identity else identity.umask,
        directory=str(directory) if directory is not None else None,
        limits={limit.name: limit.value for limit in inherited.limits},
    )
    # Nothing of `env` here: until it has become the person, it must not load what the person names.
    done = run_tool((sys.executable, "-I", "-S", exec_as.__file__), timeout_s, {}, stdin=order)
    if done.returncode == exec_as.FAILED_EXIT and done.stderr.startswith(exec_as.MARK):
        why = done.stderr.removeprefix(exec_as.MARK).strip()
        raise SlurmRefused(
            f"{argv[0]} was not started: {why}",
            argv=argv,
            returncode=done.returncode,
            stderr=done.stderr,
        )
    return done
