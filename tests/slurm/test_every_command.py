"""Whatever the service runs: an argument list, a time limit, a fixed language and time format, nothing inherited.

Builders, client verbs and sources are walked, so that a new one is held to it too.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm import commands, parse
from slurm.client import CliClient
from slurm.errors import SlurmError
from slurm.run_tool import Completed
from slurm.types import SubmitRequest

ROOT = Path(__file__).parents[2]
TOOLS = {"squeue", "sacct", "scontrol", "sinfo", "sbatch", "scancel", "sacctmgr"}
REQUEST = SubmitRequest(
    script=Path("/runs/a/batch.sh"), token="sup:a:1", job_name="a", nodes=2, output=Path("/runs/a/job.log")
)
# By parameter name. A builder or verb with a new one fails here until it has a value.
VALUES: dict[str, Any] = {
    "mark": "feedface",
    "since": datetime(2026, 3, 2, tzinfo=UTC),
    "request": REQUEST,
    "job_id": 55,
    "token": "sup:a:1",
    "node": "n1",
    "reason": "supervisor: n1 is silent",
    "user": "ann",
}
# What a daemon may have been started with: formats, filters and zones that change what tools print, and secrets.
PARENT = {
    "PATH": "/usr/bin",
    "HOME": "/root",
    "SLURM_CONF": "/etc/slurm.conf",
    "TZ": "America/New_York",
    "LANG": "de_DE.UTF-8",
    "LC_ALL": "tr_TR.UTF-8",
    "LC_TIME": "de_DE.UTF-8",
    "SQUEUE_FORMAT": "%i",
    "SQUEUE_STATES": "RUNNING",
    "SACCT_FORMAT": "JobID",
    "SINFO_FORMAT": "%n",
    "SCANCEL_USER": "bob",
    "SCONTROL_ALL": "1",
    "SLURM_CLUSTERS": "other",
    "SLURM_TIME_FORMAT": "relative",
    "SLURM_JOB_ID": "7",
    "SBATCH_PARTITION": "debug",
    "PMI_RANK": "0",
    "LD_PRELOAD": "/tmp/x.so",
    "API_KEY": "secret",
}


class Recorder:
    """A `Run` that notes what it is asked to run; every tool answers with nothing, or with an error."""

    def __init__(self, answer: Completed) -> None:
        self.answer = answer
        self.calls: list[tuple[tuple[str, ...], float, dict[str, str]]] = []

    def __call__(self, argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> Completed:
        self.calls.append((argv, timeout_s, dict(env)))
        return self.answer


def arguments_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: VALUES[p.name] for p in parameters if p.default is p.empty}


def builders() -> dict[str, Callable[..., tuple[str, ...]]]:
    return {name: made for name, made in vars(commands).items() if name.endswith("_argv")}


def verbs() -> list[str]:
    return [name for name, made in vars(CliClient).items() if not name.startswith("_") and callable(made)]


@pytest.mark.parametrize("name", sorted(builders()))
def test_every_builder_makes_an_argument_list_for_one_of_slurms_tools(name: str) -> None:
    argv = builders()[name](**arguments_of(builders()[name]))
    assert type(argv) is tuple
    assert argv[0] in TOOLS
    assert {type(word) for word in argv} == {str}
    assert "\0" not in "".join(argv)


@pytest.mark.parametrize("answer", [Completed(returncode=0), Completed(returncode=None)], ids=["answers", "silent"])
@pytest.mark.parametrize("verb", sorted(verbs()))
def test_every_verb_of_the_client_runs_its_tools_bounded_and_with_a_scrubbed_environment(
    verb: str, answer: Completed
) -> None:
    run = Recorder(answer)
    method = getattr(CliClient(run=run, timeout_s=7.5, parent=PARENT), verb)
    with suppress(SlurmError):
        method(**arguments_of(method))
    assert run.calls
    for argv, timeout_s, env in run.calls:
        assert type(argv) is tuple
        assert argv[0] in TOOLS
        assert 0 < timeout_s <= 7.5
        assert env["SLURM_CONF"] == "/etc/slurm.conf"
        assert not {n for n in env if n.startswith(("SBATCH_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_"))}
        assert not {"SLURM_CLUSTERS", "SLURM_JOB_ID", "PMI_RANK", "LD_PRELOAD", "API_KEY", "LC_TIME"} & env.keys()
        if argv[0] == "sbatch":  # its environment is the job's: the host's zone, and UTF-8 that the job may change
            assert env["LANG"] == "C.UTF-8"
            assert "LC_ALL" not in env
        else:
            assert (env["LC_ALL"], env["TZ"], env["SLURM_TIME_FORMAT"]) == ("C", "UTC", "standard")


# ---------------------------------------------------------------- times


def test_times_are_asked_for_and_read_in_utc_wherever_daemon_and_cluster_are() -> None:
    """Case AC-07: a bound given in local time lay in the future, and an hour that comes twice made negative spans."""
    new_york = datetime.fromisoformat("2026-11-01T01:10:00-05:00")  # the second 01:10 of that day
    argv = commands.sacct_argv(new_york, "m")
    assert argv[argv.index("-S") + 1] == "2026-11-01T06:10:00"
    assert commands.reading_environment(PARENT)["TZ"] == "UTC"


def test_the_hour_that_comes_twice_gives_no_negative_span() -> None:
    """Case AC-07: Start=01:30 and End=01:10 in New York's clock, 40 minutes apart."""
    separator = commands.sacct_delimiter("m")
    values = dict.fromkeys(commands.SACCT_FIELDS, "")
    values |= {"JobIDRaw": "55", "State": "COMPLETED", "ExitCode": "0:0"}
    values |= {"Submit": "2026-11-01T05:00:00", "Start": "2026-11-01T05:30:00", "End": "2026-11-01T06:10:00"}
    row = "".join(f"{values[name]}{separator}" for name in commands.SACCT_FIELDS)
    (job,) = parse.parse_sacct(row + "\n", mark="m").jobs
    assert job.start_at is not None
    assert job.end_at is not None
    assert job.end_at - job.start_at == timedelta(minutes=40)


# ---------------------------------------------------------------- the sources

# A person's own sbatch, handed through: it waits for as long as they do, and sees what they set.
_HANDED_THROUGH = {"supervisor/cli/sbatch.py"}
_BLOCKING = {"run", "call", "check_call", "check_output"}


def calls_in(*folders: str) -> Iterator[tuple[str, ast.Call]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            yield from ((name, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def where(name: str, call: ast.Call) -> str:
    return f"{name}:{call.lineno}"


def test_no_source_hands_a_string_to_a_shell() -> None:
    forbidden = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
    found = [
        where(name, call)
        for name, call in calls_in("slurm", "supervisor", "trainer")
        if ast.unparse(call.func) in forbidden
        or any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in call.keywords)
    ]
    assert found == []


def test_no_source_waits_for_a_process_without_a_time_limit_or_gives_it_one_string() -> None:
    found = []
    for name, call in calls_in("slurm", "supervisor", "trainer"):
        function = ast.unparse(call.func)
        if not function.startswith("subprocess."):
            continue
        first = call.args[0] if call.args else None
        if isinstance(first, ast.JoinedStr) or (isinstance(first, ast.Constant) and isinstance(first.value, str)):
            found.append(f"{where(name, call)}: a string, not a list")
        is_bounded = any(k.arg == "timeout" for k in call.keywords)
        is_blocking = function.removeprefix("subprocess.") in _BLOCKING
        if is_blocking and not is_bounded and name not in _HANDED_THROUGH:
            found.append(f"{where(name, call)}: no timeout")
    assert found == []
