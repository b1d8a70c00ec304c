"""Become another account, and then the tool: started by root as `python -I -S exec_as.py`, its order on standard input.

`--uid` of sbatch would not do: sbatch, the site's submit filters and every file that options name would still act with
root's rights on what a person wrote. Here groups, gid and uid are dropped first, the working directory is entered with
the person's rights, and only then the tool is started, with the person's environment. That environment comes in the
order, not as this process's own: its LD_PRELOAD must not be loaded while we are root.

Standard library only, and nothing of this package: `-I -S` leaves both out.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# What Slurm hands on to a job, by its own names.
LIMITS = {
    "CPU": resource.RLIMIT_CPU,
    "FSIZE": resource.RLIMIT_FSIZE,
    "DATA": resource.RLIMIT_DATA,
    "STACK": resource.RLIMIT_STACK,
    "CORE": resource.RLIMIT_CORE,
    "RSS": resource.RLIMIT_RSS,
    "NPROC": resource.RLIMIT_NPROC,
    "NOFILE": resource.RLIMIT_NOFILE,
    "AS": resource.RLIMIT_AS,
    "MEMLOCK": resource.RLIMIT_MEMLOCK,
}
FAILED_EXIT = 119  # none of Slurm's tools ends so
MARK = "exec_as: "  # what its own errors begin with


def render_order(
    tool: str,
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    uid: int | None = None,
    gid: int | None = None,
    umask: int | None = None,
    directory: str | None = None,
    limits: Mapping[str, int] | None = None,
) -> bytes:
    """What this program reads: run the file `tool` as `argv`, with exactly `environment`. None: as it is.

    `limits`: soft limits by name, -1 for unlimited. A hard limit of the service is the most that anybody gets.
    """
    order = {
        "tool": tool,
        "argv": argv,
        "environment": dict(environment),
        "uid": uid,
        "gid": gid,
        "umask": umask,
        "directory": directory,
        "limits": dict(limits or {}),
    }
    return json.dumps(order).encode("ascii")  # what is not UTF-8 stands in it as lone surrogates


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    tool: str
    argv: list[str]
    environment: dict[str, str]
    uid: int | None
    gid: int | None
    umask: int | None
    directory: str | None
    limits: dict[str, int]


def main() -> int:
    """Never returns when all went well: this process is the tool then."""
    try:
        order = _Order(**json.loads(sys.stdin.buffer.read()))
        _close_input()
    except (ValueError, TypeError, OSError) as error:
        return _fail(f"the order can't be read: {error}")
    if (order.uid is None) is not (order.gid is None):
        return _fail("a uid needs a gid, and a gid a uid")
    if order.uid is not None and order.gid is not None:
        try:
            _become(order.uid, order.gid)
        except (OSError, OverflowError) as error:
            return _fail(f"can't run as uid {order.uid}, gid {order.gid}: {_words(error)}")
    if order.umask is not None:
        os.umask(order.umask)
    return _run(order)


def _run(order: _Order) -> int:
    if order.directory is not None:
        try:
            os.chdir(order.directory)
        except (OSError, ValueError) as error:
            return _fail(f"{order.directory}: {_words(error)}")
    try:
        _set_limits(order.limits)  # last: they are for the tool, and may be too small for an interpreter
        os.execve(order.tool, order.argv, order.environment)  # noqa: S606 - that is what it is for
    except (OSError, ValueError, KeyError, OverflowError) as error:
        return _fail(f"{order.tool}: {_words(error)}")


def _set_limits(limits: Mapping[str, int]) -> None:
    """Soft limits, none above the hard one: that is whoever runs the service's to raise, not a request's."""
    for name, wanted in limits.items():
        hard = resource.getrlimit(LIMITS[name])[1]
        is_beyond = hard != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > hard)
        resource.setrlimit(LIMITS[name], (hard if is_beyond else wanted, hard))


def _close_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _become(uid: int, gid: int) -> None:
    """Groups first: without root's rights they could not be set any more."""
    if os.geteuid() == 0:
        os.setgroups(_groups_of(uid, gid))
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise PermissionError(f"the service is uid {os.geteuid()}, gid {os.getegid()}")


def _groups_of(uid: int, gid: int) -> list[int]:
    import pwd

    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return [gid]
    return os.getgrouplist(name, gid)


def _words(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _fail(words: str) -> int:
    sys.stderr.write(f"{MARK}{words}\n")
    return FAILED_EXIT


if __name__ == "__main__":
    sys.exit(main())
