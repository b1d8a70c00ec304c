"""What each process of a supervised function goes through before Python: environment, setup, command. Pure.

As the batch script of submitit's Slurm executor, and under the same name (`paths.submission_file`); the difference is
that it runs once for each process of each attempt, under torchrun. It holds the submitter's environment, secrets
included: its file is the submitter's alone, and the service learns its path only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

STEP_MODULE = "slurm.submitit_step"

# What the script tells the step, by environment: arguments of a process are everybody's to see.
ENV_PYTHONPATH = "SUBMITIT_SUPERVISED_PYTHONPATH"
ENV_GPUS_PER_TASK = "SUBMITIT_SUPERVISED_GPUS_PER_TASK"
ENV_ONE_LOG = "SUBMITIT_SUPERVISED_ONE_LOG"
ENV_RETRY = "SUBMITIT_SUPERVISED_RETRY"

# Another job's, another host's, or another process's: they must be this one's own.
_OTHERS_PREFIXES = (
    *("PMI_", "PMI2_", "PMIX_", "SALLOC_", "SBATCH_", "SLURM_", "SLURMD_", "SRUN_"),
    *("SUBMITIT_", "SUPERVISOR_", "TORCHELASTIC_", "WATCHDOG_"),
)
_OTHERS = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("BASHOPTS", "EUID", "PPID", "SHELLOPTS", "UID"),  # bash refuses to set them
        *("HOSTNAME", "NOTIFY_SOCKET", "OLDPWD", "PWD", "SHLVL", "ZE_AFFINITY_MASK", "_"),
        "PYTHONPATH",  # set once this package is imported: a folder `slurm` there must not take its place
    }
)
_KEPT = frozenset({"SUBMITIT_PREEMPT_SIGNAL"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FUNCTION = re.compile(r"BASH_FUNC_([A-Za-z_][A-Za-z0-9_.:-]*)(?:%%|\(\))")


def choose_environment(submitter: Mapping[str, str], export: str = "ALL") -> dict[str, str]:
    """The submitter's variables that the function sees, as sbatch's `--export` says; see `_OTHERS` for what is left."""
    chosen: dict[str, str] = {}
    for part in [word.strip() for word in export.split(",")]:
        name, is_set, value = part.partition("=")
        if is_set:
            chosen[name] = value
        elif part == "ALL":
            chosen = {**submitter, **chosen}
        elif part in submitter:
            chosen[part] = submitter[part]
    return {name: value for name, value in chosen.items() if not _is_others(name)}


def _is_others(name: str) -> bool:
    return name not in _KEPT and (name in _OTHERS or name.startswith(_OTHERS_PREFIXES))


def render_script(
    *,
    environment: Mapping[str, str],
    settings: Mapping[str, str],
    setup: Sequence[str],
    python: str,
    folder: str,
    signal_name: str,
) -> str:
    """The script of one submission; its arguments are the job id and what its logs' names begin with.

    `python`: a shell command, as submitit's executor takes it. `settings`: what the script tells the step.
    """
    lines = [
        "#!/bin/bash",
        "# One process of a submitted function.",
        "# The warning before the time limit may come before the function can take it: it must not end this shell.",
        f"trap '' {shlex.quote(signal_name)}",
        "",
        "# environment of the submission",
        *(_render_variable(name, value) for name, value in sorted(environment.items())),
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(settings.items())),
    ]
    if setup:
        # In this shell, so that what they set stays; what they say goes to submitit's logs and to the attempt's.
        logs = (("out", ""), ("out" if ENV_ONE_LOG in settings else "err", " >&2"))
        tees = [f'> >(exec tee -a -- "$2_${{RANK}}_log.{end}"{to})' for end, to in logs]
        lines += ["", "# setup", "{", *setup, f"}} {tees[0]} 2{tees[1]}"]
    # "-u" first: with "-m" there, torchrun would run under the function's Python, which may have no torch.
    command = f'exec {python} -u -P -m {STEP_MODULE} {shlex.quote(folder)} "$1"'
    return "\n".join([*lines, "", "# command", command, ""])


def _render_variable(name: str, value: str) -> str:
    if _NAME.fullmatch(name):
        return f"export {name}={shlex.quote(value)}"
    function = _FUNCTION.fullmatch(name)
    if function is None:
        return f"# {name!r} is no name that a shell can set"
    # A function that bash exported, such as `module`; in an eval, where a faulty one ends nothing.
    definition = f"{function[1]} {value}\nexport -f {function[1]}"
    return f"eval {shlex.quote(definition)} 2>/dev/null"
