"""What a person's shell hands on to its commands beside the environment: the umask and the soft limits.

sbatch gives both to the job (`PropagateResourceLimits` of slurm.conf). A service that submits for a person would give
its own instead, so they are read where the person is, and set again before sbatch is started (slurm.exec_as).
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from slurm.exec_as import LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftLimit:
    """A soft resource limit by Slurm's name for it (NOFILE, MEMLOCK and so on); -1: unlimited."""

    name: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What a command and its job have from the shell that it is called in, beside the environment."""

    umask: int | None = None  # None: the service's own
    limits: tuple[SoftLimit, ...] = ()  # those that are not named: the service's own


AS_THE_SERVICE = Inherited()


def read_inherited() -> Inherited:
    """Of this process."""
    umask = os.umask(0)
    os.umask(umask)
    limits = tuple(SoftLimit(name=name, value=resource.getrlimit(number)[0]) for name, number in LIMITS.items())
    return Inherited(umask=umask, limits=limits)


def check_inherited(umask: object, limits: object) -> Inherited:
    """What somebody says of his shell; an absent value (None) stands for the service's own.

    `limits`: soft limits by name; -1: unlimited. Unknown names are passed over: a newer client may send them.

    Raises:
        ValueError: no umask, or no limits.
    """
    if umask is not None and (type(umask) is not int or not 0 <= umask <= 0o777):
        raise ValueError("a umask is a whole number from 0 to 0777")
    if limits is None:
        return Inherited(umask=umask)
    if not isinstance(limits, dict) or not all(type(v) is int and -1 <= v < 2**63 for v in limits.values()):
        raise ValueError("limits are whole numbers by their name, -1 for none")
    kept = tuple(SoftLimit(name=name, value=limits[name]) for name in LIMITS if name in limits)
    return Inherited(umask=umask, limits=kept)
