"""Which sbatch options a run file may give: those that would break supervision are refused with the reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.tomlfile import has_control

_SET_BY_US = "is set by the supervisor"
_NOT_EVERYONES = "is not possible: Slurm would grant a service that is root what it grants no user"
_HAS_A_KEY = "has a key of its own: write it as "

# Options that would break supervision, with the reason. Order does not matter; long names without dashes.
_REFUSED_OPTIONS: Mapping[str, str] = {
    "job-name": f"{_SET_BY_US}: one constant name per run keeps two of its jobs from running at once",
    "comment": f"{_SET_BY_US}: a job whose submission answer was lost is found by it",
    "dependency": f"{_SET_BY_US}: singleton keeps two jobs of a run from running at once",
    "requeue": "must stay off: the supervisor resubmits, on nodes that it chose and from a verified checkpoint",
    "array": "is not possible: a run has one job at a time",
    "nodes": f"{_HAS_A_KEY}[nodes] min and max",
    "ntasks": "is not possible: fewer tasks than nodes would shrink the job; see [nodes] procs_per_node",
    "nodelist": "is not possible: a job bound to one node can't leave it when it breaks",
    "nodefile": "is not possible: a job bound to listed nodes can't leave them when they break",
    "exclude": f"{_SET_BY_US}: it holds the broken nodes; drain a node to keep every job off it",
    "parsable": f"{_SET_BY_US}: it reads sbatch's answer",
    "wait": "is not possible: sbatch would block until the job ends",
    "output": f"{_SET_BY_US}: one log per attempt, in the run directory",
    "error": f"{_SET_BY_US}: one log per attempt, in the run directory",
    "open-mode": f"{_SET_BY_US}: logs are never truncated",
    "export": f"{_SET_BY_US}: it carries the variables of the contract",
    "export-file": f"{_SET_BY_US}: it carries the variables of the contract",
    "chdir": f'{_HAS_A_KEY}"workdir"',
    "bbf": "is not possible: sbatch would read that file with the service's rights",
    "uid": f"{_SET_BY_US}: jobs run as the run's owner",
    "gid": f"{_SET_BY_US}: jobs run as the run's owner",
    "priority": _NOT_EVERYONES,
    "reboot": _NOT_EVERYONES,
    "wrap": "is not possible: the supervisor brings the batch script",
    "test-only": "is not possible: nothing would be submitted",
    "hold": "is not possible: the job would never start",
    "clusters": "is not possible: job ids of another cluster mean nothing here",
    "help": "is not possible: nothing would be submitted",
    "usage": "is not possible: nothing would be submitted",
    "version": "is not possible: nothing would be submitted",
    "partition": f"{_HAS_A_KEY}[slurm] partition",
    "account": f"{_HAS_A_KEY}[slurm] account",
    "qos": f"{_HAS_A_KEY}[slurm] qos",
    "time": f"{_HAS_A_KEY}[slurm] time_limit",
    "gpus-per-node": f"{_HAS_A_KEY}[slurm] gpus_per_node",
}
# Full names that begin like a refused option, or are what an abbreviation of one would be ambiguous with.
_ALLOWED_OPTIONS = frozenset({"wait-all-nodes", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "time-min"})
_SHORT_OPTIONS: Mapping[str, str] = {
    "J": "job-name",
    "d": "dependency",
    "a": "array",
    "N": "nodes",
    "n": "ntasks",
    "w": "nodelist",
    "F": "nodefile",
    "x": "exclude",
    "W": "wait",
    "o": "output",
    "e": "error",
    "D": "chdir",
    "H": "hold",
    "M": "clusters",
    "h": "help",
    "V": "version",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "t": "time",
}
_SHORT_FLAGS = frozenset("kOQsv")  # sbatch's short options that take no value


def option_problem(option: str) -> str | None:
    """Why an sbatch option can't be given in a run file, or None when it can.

    sbatch takes any unambiguous beginning of a long name (`--nod=3`), so a beginning of a refused name is refused.
    """
    if has_control(option):
        return "holds control characters"
    if not option.startswith("-") or option in {"-", "--"}:
        return 'is no option: each is one element that starts with a dash, e.g. "--constraint=a100"'
    if not option.startswith("--"):
        return _short_option_problem(option)
    name, _, value = option[2:].partition("=")
    if "no-kill".startswith(name) and value == "off":
        return f"{_SET_BY_US}: the launcher goes on when a node is lost"
    if "nice".startswith(name) and "-" in value:
        return f"{_NOT_EVERYONES}: a negative value"
    if name in _ALLOWED_OPTIONS:
        return None
    full = next((known for known in _REFUSED_OPTIONS if known.startswith(name)), None)
    return _REFUSED_OPTIONS[full] if full else None


def _short_option_problem(option: str) -> str | None:
    letter, value = option[1], option[2:]
    if letter in _SHORT_OPTIONS:
        return _REFUSED_OPTIONS[_SHORT_OPTIONS[letter]]
    if letter in _SHORT_FLAGS:
        following = value.lstrip("".join(_SHORT_FLAGS))
        return _short_option_problem(f"-{following}") if following else None
    return None if value else 'has no value: write both in one element, e.g. "-Ca100" or "--constraint=a100"'
