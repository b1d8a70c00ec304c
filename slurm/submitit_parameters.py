"""submitit's words for a job, and what becomes of each in a supervised run. Pure.

Every word of submitit and of its Slurm executor either has its effect or is refused with a sentence.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CLUSTER = "supervised"
DEFAULT_TIME_MIN = 5  # submitit's own
DEFAULT_SIGNAL = "USR2"
RETRY_WORDS = ("machine", "all", "none")

_SIGNAL_DELAY_S = 90  # submitit's own default
_NAME_CHARS = 60

_RUN_WORDS = frozenset({"job_name", "time", "nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "mem"})
_SLURM_WORDS = frozenset({"partition", "account", "qos"})
_OPTION_WORDS: Mapping[str, str] = {
    "constraint": "--constraint",
    "cpus_per_gpu": "--cpus-per-gpu",
    "gres": "--gres",
    "mail_type": "--mail-type",
    "mail_user": "--mail-user",
    "mem_per_cpu": "--mem-per-cpu",
    "mem_per_gpu": "--mem-per-gpu",
    "wckey": "--wckey",
}
_OUR_WORDS = frozenset({"root", "max_without_progress", "retry_exceptions"})
_OTHER_WORDS = frozenset(
    {
        "additional_parameters",
        "array_parallelism",
        "chdir",
        "exclusive",
        "export",
        "gpus_per_task",
        "num_gpus",
        "setup",
        "signal_delay_s",
        "stderr_to_stdout",
        "use_srun",
    }
)
_REFUSED_WORDS: Mapping[str, str] = {
    "teardown": "no shell stays behind the function; put it into the function, under finally",
    "comment": "the supervisor finds a job whose submission answer was lost by it",
    "dependency": "the supervisor sets it, so that a run has one live job; submit when the other job is done",
    "nodelist": "a job bound to a node can't leave it when it breaks",
    "exclude": "the supervisor sets it to the nodes that it found broken; drain a node to keep every job off it",
    "srun_args": "the supervisor makes the steps of the job itself; options of the job go to additional_parameters",
    "signal": "write slurm_signal_delay_s for the time, and SUBMITIT_PREEMPT_SIGNAL in the environment for the signal",
    "array": "use map_array",
}
_VALID_WORDS = _RUN_WORDS | _SLURM_WORDS | _OPTION_WORDS.keys() | _OUR_WORDS | _OTHER_WORDS


# ---------------------------------------------------------------- words in


def our_words() -> set[str]:
    """The words that only this cluster has."""
    return set(_OUR_WORDS)


def take_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """The words of one `update_parameters`, checked and in one spelling.

    Raises:
        ValueError: a word that a supervised run can't have, or a value that it can't be, with the reason.
    """
    words = {word: value for word, value in given.items() if value is not None}
    has_extra = "additional_parameters" in words
    extra = words.pop("additional_parameters", None) or {}
    plain = {key.replace("-", "_"): value for key, value in extra.items()}
    # submitit's additional parameters win over its words; requeueing is what the supervisor does
    words |= {word: value for word, value in plain.items() if word in _VALID_WORDS}
    options = {
        word: value
        for word, value in plain.items()
        if word not in _VALID_WORDS and word not in _REFUSED_WORDS and word != "requeue"
    }
    words |= {word: value for word, value in plain.items() if word in _REFUSED_WORDS}
    if "num_gpus" in words:
        warnings.warn('"num_gpus" is deprecated, please use "gpus_per_node" instead', stacklevel=4)
        words["gpus_per_node"] = words.pop("num_gpus")
    _check(words)
    taken = {word: value for word, value in words.items() if word not in _REFUSED_WORDS and word != "use_srun"}
    return taken | ({"additional_parameters": options} if has_extra else {})


def _check(words: Mapping[str, Any]) -> None:
    for word, value in words.items():
        if word in _REFUSED_WORDS:
            if value not in (False, "", [], ()):
                raise _refusal(word, _REFUSED_WORDS[word])
        elif word not in _VALID_WORDS:
            known = ", ".join(sorted(_VALID_WORDS))
            raise ValueError(f'unknown parameter "{word}" for cluster="{CLUSTER}"; there are: {known}')
    if words.get("use_srun") is False:
        raise _refusal("use_srun=False", "torchrun starts the function once for each task, inside a step of the job")
    if isinstance(words.get("setup"), str):
        raise _refusal("setup", "it must be a list of shell lines")
    if words.get("retry_exceptions", "all") not in RETRY_WORDS:
        raise _refusal("retry_exceptions", f"it must be one of {', '.join(RETRY_WORDS)}")


def _refusal(word: str, why: str) -> ValueError:
    return ValueError(f'"{word}" can\'t be used with cluster="{CLUSTER}": {why}')


def split_parameters(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Words for AutoExecutor itself, and those for this executor: `slurm_x`, and before it `supervised_x`, as `x`."""
    prefixes = ("slurm_", f"{CLUSTER}_")  # the later one wins
    shared = {word: value for word, value in parameters.items() if not word.startswith(prefixes)}
    ours = {
        word.removeprefix(prefix): value
        for prefix in prefixes
        for word, value in parameters.items()
        if word.startswith(prefix)
    }
    return shared, ours


# ---------------------------------------------------------------- what they say


def check_array(parameters: Mapping[str, Any], functions: int) -> None:
    """Raise ValueError for an array whose functions must not all run at once."""
    allowed = parameters.get("array_parallelism")
    if allowed is not None and int(allowed) < functions:
        raise _refusal(
            f"array_parallelism={allowed}",
            f"each of the {functions} functions is a run of its own, and all of them may run at once; "
            "submit fewer at a time, or let a QOS or association limit of Slurm bound them",
        )


def tasks_per_node(parameters: Mapping[str, Any]) -> int:
    """Processes of each node."""
    return max(1, int(parameters.get("ntasks_per_node", 1)))


def count_tasks(parameters: Mapping[str, Any]) -> int:
    """Processes of a job: nodes times tasks per node."""
    return int(parameters.get("nodes", 1)) * tasks_per_node(parameters)


def time_limit(parameters: Mapping[str, Any]) -> str:
    """The time limit of one attempt, as sbatch takes it."""
    return str(parameters.get("time", DEFAULT_TIME_MIN))


def time_limit_min(parameters: Mapping[str, Any]) -> int:
    """The same in whole minutes; what can't be read counts as submitit's default."""
    text = time_limit(parameters).strip()
    days, _, clock = text.rpartition("-")
    fields = clock.split(":")
    if not all(part.isdecimal() for part in (*fields, *([days] if days else []))) or len(fields) > 3:
        return DEFAULT_TIME_MIN
    numbers = [int(field) for field in fields]
    if days:  # days-hours[:minutes[:seconds]]
        hours, minutes, _seconds = (*numbers, 0, 0, 0)[:3]
        return (int(days) * 24 + hours) * 60 + minutes
    if len(numbers) == 3:
        return numbers[0] * 60 + numbers[1]
    return numbers[0]  # minutes[:seconds]


def run_name(parameters: Mapping[str, Any], suffix: str) -> str:
    """A run name out of the job name and a suffix that makes it unique.

    Without underscores, though run names may have them: submitit reads what follows one as an array index.
    """
    wanted = re.sub(r"[^A-Za-z0-9.-]+|\.\.+", "-", str(parameters.get("job_name", "submitit"))).strip("-.")
    return f"{wanted[:_NAME_CHARS].strip('-.') or 'submitit'}-{suffix}"


# ---------------------------------------------------------------- the run file


def render_run_file(
    parameters: Mapping[str, Any],
    *,
    name: str,
    command: Sequence[str],
    root: Path,
    workdir: Path,
    signal_name: str = DEFAULT_SIGNAL,
) -> str:
    """The run file (TOML) of one function.

    The number of nodes is fixed: a function's results are counted by its tasks. Silence at the start has no limit,
    since a function need not report progress; one that does is watched from its first step on.
    """
    nodes = int(parameters.get("nodes", 1))
    restart: dict[str, Any] = {}
    if "max_without_progress" in parameters:
        restart["max_without_progress"] = int(parameters["max_without_progress"])
    sections: dict[str, dict[str, Any]] = {
        "nodes": {"min": nodes, "max": nodes, "procs_per_node": tasks_per_node(parameters)},
        "slurm": _slurm_section(parameters, signal_name),
        "restart": restart,
        "progress": {"start_max_s": 0},
    }
    top = {"name": name, "command": list(command), "root": str(root), "workdir": str(workdir)}
    lines = [f"{key} = {_toml(value)}" for key, value in top.items()]
    for section, values in sections.items():
        if values:
            lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _slurm_section(parameters: Mapping[str, Any], signal_name: str) -> dict[str, Any]:
    section: dict[str, Any] = {word: str(parameters[word]) for word in sorted(_SLURM_WORDS & parameters.keys())}
    section["time_limit"] = time_limit(parameters)
    gpus = _gpus_per_node(parameters)
    if gpus.isdecimal() and int(gpus):
        section["gpus_per_node"] = int(gpus)
    section["options"] = _sbatch_options(parameters, signal_name)
    return section


def _gpus_per_node(parameters: Mapping[str, Any]) -> str:
    """A number, perhaps behind a type (`h100:4`); 0 for none."""
    per_task = int(parameters.get("gpus_per_task") or 0)
    return str(parameters.get("gpus_per_node") or per_task * tasks_per_node(parameters))


def _sbatch_options(parameters: Mapping[str, Any], signal_name: str) -> list[str]:
    options = [f"{option}={parameters[word]}" for word, option in _OPTION_WORDS.items() if word in parameters]
    if "cpus_per_task" in parameters:  # the job has one task per node, which starts all of the node's processes
        options.append(f"--cpus-per-task={int(parameters['cpus_per_task']) * tasks_per_node(parameters)}")
    if not _gpus_per_node(parameters).isdecimal():  # the run file's key is a number
        options.append(f"--gres=gpu:{_gpus_per_node(parameters)}")
    if "mem" in parameters:
        options.append(f"--mem={parameters['mem']}")
    if parameters.get("exclusive"):
        value = parameters["exclusive"]
        options.append("--exclusive" if value is True else f"--exclusive={value}")
    # To the batch step only: the launcher there passes it on to the processes of all nodes.
    options.append(f"--signal=B:{signal_name}@{int(parameters.get('signal_delay_s', _SIGNAL_DELAY_S))}")
    for key, value in (parameters.get("additional_parameters") or {}).items():
        options.append(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return options


def _toml(value: object) -> str:
    # JSON's strings, numbers and lists are TOML's, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
