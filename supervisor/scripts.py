"""A batch script of a person's own as a run: from what was handed in to the run, and from the run to a submission.

Pure, and used on both sides: the command checks with it as the person, and the daemon again, which believes nothing of
what it is told and opens no file of a person.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm.commands import RESTART_COUNT
from slurm.hostlist import HostlistUnreadable, expand_nodes, is_node_name
from slurm.inherited import AS_THE_SERVICE, Inherited, check_inherited
from slurm.sbatch_line import (
    OF_THE_CALL,
    CommandLine,
    Effective,
    check_text,
    effective,
    merge_export,
    parse_command_line,
    parse_directives,
    read_variables,
    refusal,
    render_log_path,
    wrap_text,
)
from slurm.sbatch_options import REQUEUE, name_of
from slurm.submitted import SubmittedAs
from slurm.types import Identity, JobDescription, SubmitRequest
from supervisor import own_restarts
from supervisor.config import check_supervision, is_fixed_interval, is_slurm_value
from supervisor.core.interval import first_every_s
from supervisor.model import Attempt, AttemptEnd, AttemptState, Run, RunSpec, ScriptSpec
from supervisor.submissions import digest_of
from supervisor.supervision import BadSupervision, find_unread, read_directives, render_tables, take_options
from supervisor.tomlfile import ConfigError, convert_record
from trainer import contract

MAX_SCRIPT_BYTES = 512 * 1024
MAX_ENVIRONMENT_BYTES = 256 * 1024
MAX_WORDS = 10_000
MAX_WORDS_CHARS = 128 * 1024
_MAX_PATH_CHARS = 4096
_MAX_LINE_CHARS = 16 * 1024  # a longer one takes long to read
_MAX_NAME_CHARS = 90  # of a run, so that "-2" and the like still fit
_ROOT = ".supervisor"
_EXPORTED = re.compile(r"""(?:"[^"]*"|'[^']*'|[^,])+""")  # parts of --export, between commas that stand outside quotes

_FIRST_ONLY = frozenset({"hold", "begin"})  # what the person meant for the submission that he made himself
_OURS = frozenset({"comment", "job-name", "dependency", "export", "nodes", "requeue", "no-requeue"})


class NotSupervised(ValueError):
    """A script or its options can't be supervised; the message is a sentence for the person who submits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a person hands in: everything that sbatch would look at itself."""

    text: str  # of the script; of a wrapped command, what sbatch makes of it
    path: str  # of the script as it was given; "-": standard input
    words: tuple[str, ...]  # after `supervisor sbatch`
    environment: Mapping[str, str]
    cwd: str
    inherited: Inherited = AS_THE_SERVICE

    def __repr__(self) -> str:
        return f"Handed({self.path!r}, {self.words!r}, {len(self.environment)} variables)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A handed-in script, read: all but the names that depend on what else runs."""

    wanted: Effective
    spec: RunSpec  # under the name that it would like
    script: ScriptSpec
    environment: Mapping[str, str] = field(repr=False)  # to be kept: with what --export assigns
    has_name: bool  # the person chose the run's name
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------- reading


def read_handed(body: Mapping[str, Any]) -> Handed:
    """What a request holds. Raises NotSupervised for what is of another shape, or too large."""
    text, path, cwd = body.get("script"), body.get("path"), body.get("cwd")
    words, environment = body.get("argv"), body.get("environment")
    if not isinstance(text, str) or not isinstance(path, str) or not isinstance(cwd, str):
        raise NotSupervised("a submission has a script, its path and a working directory")
    if not isinstance(words, list) or not isinstance(environment, dict):
        raise NotSupervised("a submission has argv, a list of words, and an environment")
    if len(words) > MAX_WORDS or not all(isinstance(word, str) for word in (*words, *environment.values())):
        raise NotSupervised(f"argv has at most {MAX_WORDS} words, and everything in it and in the environment is text")
    try:
        shell = check_inherited(body.get("umask"), body.get("limits"))
    except ValueError as error:
        raise NotSupervised(str(error)) from None
    handed = Handed(text=text, path=path, words=tuple(words), environment=environment, cwd=cwd, inherited=shell)
    check_sizes(handed)
    return handed


def check_sizes(handed: Handed) -> None:
    """Raise NotSupervised for what is larger than can be handed in, or no text."""
    pairs = "".join(f"{name}={value}\0" for name, value in handed.environment.items())
    try:
        script_bytes, size = len(os.fsencode(handed.text)), len(os.fsencode(pairs))
    except UnicodeEncodeError:
        raise NotSupervised("the script or the environment is not what a file or a process can hold") from None
    if script_bytes > MAX_SCRIPT_BYTES:
        raise NotSupervised(f"the script is larger than {MAX_SCRIPT_BYTES // 1024} KiB")
    if size > MAX_ENVIRONMENT_BYTES or len(handed.environment) > MAX_WORDS:
        raise NotSupervised(
            f"the environment is larger than {MAX_ENVIRONMENT_BYTES // 1024} KiB: submit from a smaller one (env -i)"
        )
    if sum(len(word) + 1 for word in handed.words) > MAX_WORDS_CHARS:
        raise NotSupervised(f"options and arguments are longer than {MAX_WORDS_CHARS // 1024} KiB")
    texts = (*handed.words, *handed.environment, *handed.environment.values(), handed.path, handed.cwd)
    if any("\0" in text for text in texts):
        raise NotSupervised("a NUL character can't stand in a word or in the environment")
    if not all(_is_utf8(text) for text in (*handed.words, handed.path, handed.cwd)):
        raise NotSupervised("a word or the working directory is not UTF-8 text")
    if len(handed.cwd) > _MAX_PATH_CHARS or not handed.cwd.startswith("/"):
        raise NotSupervised("the working directory is no absolute path")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_script(handed: Handed) -> Script:
    """The run that a handed-in script asks for.

    Raises:
        BadSubmission: what sbatch itself would refuse, in its words.
        NotSupervised: what only supervision can't do, as a sentence.
    """
    try:
        words, given = take_options(handed.words)
        wanted, text = _read_wanted(handed, words)
        settings = {**({} if wanted.is_wrap else read_directives(text)), **given}
        tables = render_tables(settings)
    except BadSupervision as error:
        raise NotSupervised(str(error)) from None
    why_not = refusal(wanted) or _refusal(wanted)
    if why_not is not None:
        raise NotSupervised(why_not)
    spec = _make_spec(handed, wanted, tables)
    export, environment = _take_values(wanted.export or "ALL", handed.environment)
    may_requeue = "may-requeue" in settings or own_restarts.asks_for_requeue(text)
    return Script(
        wanted=wanted,
        spec=spec,
        script=_make_script(handed, wanted, spec, export, may_requeue=may_requeue),
        environment=environment,
        has_name="name" in settings,
        notes=tuple(_notes(wanted, text, spec, may_requeue=may_requeue)),
    )


def _read_wanted(handed: Handed, words: tuple[str, ...]) -> tuple[Effective, str]:
    """What counts of the command line, the variables and the script's lines; and the script's text, checked."""
    line, variables = parse_command_line(words), read_variables(handed.environment)
    wanted = effective(line, variables)
    if wanted.wrap is not None:
        if handed.text != wrap_text(wanted.wrap):
            raise NotSupervised("the text handed in is not what --wrap makes")
        return wanted, handed.text
    text = check_text(handed.text.encode("utf-8", "surrogateescape"))
    if any(len(line) > _MAX_LINE_CHARS for line in text.split("\n") if line.startswith("#S")):
        raise NotSupervised(f"an #SBATCH or #SUPERVISE line is longer than {_MAX_LINE_CHARS} characters")
    name = handed.path.rpartition("/")[2] if line.script else "stdin"
    return effective(line, variables, parse_directives(text, name=name)), text


def _refusal(wanted: Effective) -> str | None:
    """Why an attempt could not be submitted again as it is asked for."""
    for name in ("uid", "gid"):
        if wanted.has(name):
            return f"--{name} is not possible: a job runs as the account that submits it"
    if any(name_of(option) == "hold" for option in wanted.script_options):
        return "#SBATCH --hold in the script would hold every resubmission: give it on the command line"
    if wanted.exclude is not None and not _can_expand(wanted.exclude):
        return f"--exclude={wanted.exclude}: give a list of nodes, not a file: broken nodes are added to it"
    if wanted.nodes is not None and len(wanted.nodes.sizes) > 1:
        return (
            f"--nodes={wanted.value('nodes')}: give one number or a range; --supervise-multiple-of says which numbers "
            "of a range will do"
        )
    return None


def _can_expand(hosts: str) -> bool:
    if "/" in hosts:
        return False
    try:
        return all(is_node_name(node) for node in expand_nodes(hosts))
    except HostlistUnreadable:
        return False


def _notes(wanted: Effective, text: str, spec: RunSpec, *, may_requeue: bool) -> list[str]:
    """What is otherwise than the person asked for."""
    notes = []
    if may_requeue:
        notes.append(
            "where scontrol requeue is called, the job is ended and submitted again, as a new job with "
            f"SLURM_RESTART_COUNT counted up{_say_bound(spec)}"
        )
    elif wanted.is_requeue_wanted:
        notes.append("--requeue is not passed on: the supervisor resubmits, Slurm does not requeue")
    if wanted.has("comment"):
        notes.append("--comment is not passed on: the supervisor finds the job by its own")
    if spec.slurm.warn_before_limit_s > 0 and wanted.has("signal"):
        notes.append("--supervise-warn-s is not used: --signal is given")
    if spec.restart.queue_ahead_s > 0 and any("{resume_step}" in word for word in wanted.arguments):
        notes.append(
            "{resume_step} is empty in a job that was queued ahead: nobody knows it yet; {resume_from} is a link "
            "to the checkpoint"
        )
    if wanted.nodelist is not None:
        notes.append("--nodelist binds every attempt to these nodes: a broken one of them can't be left out")
    unread = () if wanted.is_wrap else find_unread(text)
    if unread:
        notes.append(
            f"line {unread[0]} of the script: #SUPERVISE stands behind the first command, where it is not read, as "
            "#SBATCH is not"
        )
    name = (wanted.script or "").rpartition("/")[2]
    line = own_restarts.find_resubmission(text, name)
    if line is not None:
        notes.append(
            f"line {line} of the script hands it in again by itself: that job is not supervised, and would train "
            "beside the supervisor's own resubmission; take the line out"
        )
    line = own_restarts.find_path_by_job_id(text)
    if line is not None:
        notes.append(
            f"line {line} of the script names its checkpoints by SLURM_JOB_ID, which is another one in each "
            "submission: name them by ${SUPERVISOR_RUN:-$SLURM_JOB_ID}"
        )
    line = own_restarts.find_own_path(text)
    if line is not None:
        notes.append(
            f"line {line} of the script asks Slurm where the script lies: Command= names a copy that is gone by then; "
            "SLURM_SUBMIT_DIR is where it was handed in"
        )
    return notes


def _say_bound(spec: RunSpec) -> str:
    """How often a training may go on that nobody sees get further."""
    if spec.checkpoint.directory is not None or spec.progress.pattern:
        return ""
    return (
        f"; after {spec.restart.max_without_progress} times the run is held, unless --supervise-checkpoint-dir or "
        "--supervise-progress-pattern shows that it gets further"
    )


# ---------------------------------------------------------------- a job that is there already

_MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
_GRES_OPTIONS = ("gres", "gpus-per-node", "gpus", "gpus-per-task", "gpus-per-socket")
# Slurm tells these as the job has them: by whatever way they came, and with whole paths.
_AS_THE_JOB_HAS_IT = frozenset({"job-name", "chdir", "exclude", "nodelist"})
_NOT_AGAIN = OF_THE_CALL | {"uid", "gid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resubmission:
    """What submits an adopted job's script again. `script` empty: it has no path, being of --wrap or standard input."""

    options: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """As they stand after `sbatch`."""
        return (*self.options, self.script, *self.arguments) if self.script else self.options


def describe_resubmission(
    job: JobDescription, text: str, submitted: SubmittedAs, arguments: tuple[str, ...]
) -> Resubmission:
    """The options of the job's own line, where it is known, and for the rest what the job is; `text`: its script.

    What Slurm does not tell of a job is lost without its line: --signal, --mem-per-cpu, --exclusive and others.

    Raises BadSubmission, NotSupervised.
    """
    directives = parse_directives(text, name="script")
    given = tuple(o for o in submitted.options or () if name_of(o) not in _AS_THE_JOB_HAS_IT | _NOT_AGAIN)
    lines, known = effective(CommandLine(), (), directives), effective(CommandLine(options=given), (), directives)
    has = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "chdir": job.work_dir,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "reservation": job.reservation,
        "time": "" if job.time_limit == "Partition_Limit" else job.time_limit,
        "constraint": job.features,
        "exclude": job.exclude,
        "nodelist": job.node_list_asked,
        "cpus-per-task": "" if job.cpus_per_task == "1" else job.cpus_per_task,
        "mem": "" if job.memory_per_node == "0" or known.has(*_MEMORY_OPTIONS) else job.memory_per_node,
        "gres": "" if known.has(*_GRES_OPTIONS) else re.sub(r"\bgres[:/]", "", job.tres_per_node),
        "output": _describe_output(job, known),
        **_describe_tasks(job, known),
    }
    if has["output"]:
        given = tuple(o for o in given if name_of(o) != "output")
    named = {name_of(option) for option in given}
    # What an #SBATCH line says as well stands there.
    rebuilt = [
        f"--{name}={value}" for name, value in has.items() if value and name not in named and lines.value(name) != value
    ]
    return Resubmission(options=(*rebuilt, *given), script=submitted.script, arguments=arguments)


def _describe_tasks(job: JobDescription, lines: Effective) -> dict[str, str]:
    if job.ntasks is None or lines.has("ntasks", "ntasks-per-node"):
        return {}
    each, left = divmod(job.ntasks, max(1, job.nodes))
    if left:
        return {"ntasks": str(job.ntasks)}
    return {"ntasks-per-node": str(each)} if each > 1 else {}


def _describe_output(job: JobDescription, lines: Effective) -> str:
    """A pattern of the log that fits the job's own; empty: as the script says, or sbatch by itself."""
    by_itself = os.path.normpath(Path(job.work_dir, lines.output))
    rendered = render_log_path(
        by_itself, job_id=job.job_id, job_name=job.name, user=job.user, node=job.batch_host.split(".")[0]
    )
    if not job.stdout or job.stdout == rendered:
        return ""
    pattern = re.sub(rf"(?<![0-9]){job.job_id}(?![0-9])", "%j", job.stdout.replace("%", "%%"))
    return "" if os.path.normpath(pattern) == by_itself else pattern


# ---------------------------------------------------------------- the run


def _make_spec(handed: Handed, wanted: Effective, tables: Mapping[str, Any]) -> RunSpec:
    workdir = Path(os.path.normpath(Path(handed.cwd, wanted.chdir or ".")))
    least, most = _count_nodes(wanted, tables.get("nodes", {}))
    checkpoint = _make_checkpoint(tables.get("checkpoint", {}), handed.cwd)
    # Nobody has said how often a script prints: only where its steps are seen does silence mean something by itself.
    progress = {"start_max_s": 0.0, "step_min_s": 20.0, **tables.get("progress", {})}
    for phase in ("start", "step"):
        most_s = progress.get(f"{phase}_max_s", 0.0)
        if 0 < most_s < 60:
            progress[f"{phase}_min_s"] = min(most_s, 20.0)
    document = {
        "name": tables.get("name", name_run(wanted.job_name)),
        "command": ["script"],
        "root": str(Path(os.path.normpath(Path(handed.cwd, tables["root"])) if "root" in tables else workdir / _ROOT)),
        "nodes": {**tables.get("nodes", {}), "min": least, "max": most, "start_checks": False},
        "workdir": str(workdir),
        "slurm": {**_slurm_table(wanted), "warn_before_limit_s": 0, **tables.get("slurm", {})},
        "checkpoint": checkpoint,
        "progress": progress,
        "restart": tables.get("restart", {}),
    }
    try:
        spec = convert_record(RunSpec, document, "supervision")
        check_supervision(spec, source="supervision")
    except ConfigError as error:
        raise NotSupervised(str(error)) from None
    return replace(spec, command=())


def _make_checkpoint(table: Mapping[str, Any], cwd: str) -> dict[str, Any]:
    if is_fixed_interval(table):
        table = {"interval": "fixed", **table}
    if "directory" not in table:
        return {"resume_from_complete": True, **table}
    directory = os.path.normpath(Path(cwd, str(table["directory"])))
    return {"layout": "auto", "resume_from_complete": True, **table, "directory": directory}


def _slurm_table(wanted: Effective) -> dict[str, Any]:
    asked = {
        "partition": wanted.partition,
        "account": wanted.account,
        "qos": wanted.qos,
        "time_limit": wanted.time_limit,
    }
    # What is no such value is left to sbatch, which says so in its own words.
    table: dict[str, Any] = {key: value for key, value in asked.items() if value and is_slurm_value(key, value)}
    gpus = wanted.gpus_per_node
    if gpus is not None and re.fullmatch(r"[1-9][0-9]{0,5}", gpus):
        table["gpus_per_node"] = int(gpus)
    return table


def _count_nodes(wanted: Effective, table: Mapping[str, Any]) -> tuple[int, int]:
    """(min, max) of an attempt's nodes: the supervision options, else sbatch's, else one."""
    asked = wanted.nodes
    least = int(table.get("min", asked.least if asked else 1))
    most = int(table.get("max", asked.most if asked else least))
    if least > most:
        raise NotSupervised(f"conflicting nodes: at least {least} are asked for, and at most {most}")
    if least < 1:
        raise NotSupervised(f"{least} nodes are asked for: at least one is needed")
    if least < most and wanted.ntasks is not None:
        raise NotSupervised(
            f"--ntasks={wanted.ntasks} with {least} to {most} nodes: a number of tasks fixes the number of nodes; "
            "give --ntasks-per-node"
        )
    return least, most


def _take_values(export: str, environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """--export without the values that it assigns, and the environment with them: they may be secrets."""
    export, variables = merge_export(export, environment, ())
    names = []
    for part in _EXPORTED.findall(export):
        name, equals, value = part.partition("=")
        names.append(name)
        if equals:
            variables[name] = value
    return ",".join(names), variables


def _make_script(handed: Handed, wanted: Effective, spec: RunSpec, export: str, *, may_requeue: bool) -> ScriptSpec:
    options = tuple(o for o in wanted.submit_options if name_of(o) not in _OURS)
    if may_requeue:
        options = (*options, REQUEUE)  # or Slurm refuses the script's own scontrol
    if spec.slurm.warn_before_limit_s > 0 and not wanted.has("signal"):
        options = (*options, f"--signal=B:USR1@{spec.slurm.warn_before_limit_s}")
    return ScriptSpec(
        path="--wrap" if wanted.is_wrap else handed.path if wanted.script else "-",
        digest=digest_of(handed.text),
        arguments=wanted.arguments,
        options=options,
        job_name=wanted.job_name,
        nodes_given=wanted.nodes is not None or spec.nodes.max > 1 or spec.nodes.min > 1,
        exclude=wanted.exclude or "",
        dependency=wanted.dependency or "",
        export=export,
        submit_dir=Path(handed.cwd),
        output=os.path.normpath(spec.workdir / wanted.output),
    )


# ---------------------------------------------------------------- names


def name_run(job_name: str) -> str:
    """A legal name of a run, as near to the job's name as can be."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name).lstrip("-.")
    text = re.sub(r"\.{2,}", ".", text)[:_MAX_NAME_CHARS].rstrip("-.")
    return text or "job"


def choose_name(wish: str, taken: Collection[str]) -> str:
    """`wish`, or with -2, -3 and so on the first that is not taken."""
    if wish not in taken:
        return wish
    return next(name for n in range(2, len(taken) + 3) if (name := f"{wish}-{n}") not in taken)


def settle_names(script: Script, *, taken: Collection[str], job_names: Mapping[str, Run]) -> Script:
    """The script under names that nothing else has: `taken` by runs, `job_names` by the owner's runs that may go on.

    Raises:
        NotSupervised: the person chose a run's name that is taken.
    """
    name = script.spec.name
    if not script.has_name:
        name = choose_name(name, taken)
    job_name = script.script.job_name
    if job_name in job_names or not job_name:
        job_name = choose_name(name, job_names)
    notes = script.notes
    other = job_names.get(script.script.job_name)
    if other is not None:
        why = (
            f"run {other.name}, which is {other.state}, has jobs of its name, and Slurm would run one of them at a time"
        )
        notes = (*notes, f"the job is named {job_name!r}: {why} (`supervisor stop {other.name}` ends that run)")
    return replace(
        script,
        spec=replace(script.spec, name=name),
        script=replace(script.script, job_name=job_name),
        notes=notes,
    )


# ---------------------------------------------------------------- submitting


def render_submission(
    run: Run,
    attempt: Attempt,
    *,
    batch: Path,
    environment: Mapping[str, str],
    identity: tuple[int, int] | None,
    is_first: bool,
    behind: int | None = None,
) -> SubmitRequest:
    """One submission of a run's own script: what the person asked for, with what the attempt overrides.

    `batch`: the file that sbatch reads; `environment`: of the first submission; `is_first`: no job of the run has been
    before; `behind`: the job that one queued ahead waits for.
    """
    script = run.script
    if script is None:
        raise ValueError(f"run {run.name} has no script of its own")
    ours = contract_environment(run, attempt)
    export, variables = merge_export(script.export, {**environment, **ours}, ours)
    variables.pop(RESTART_COUNT, None)
    if not is_first:
        variables[RESTART_COUNT] = str(attempt.number - 1)
    values = placeholders(run, attempt)
    return SubmitRequest(
        script=batch,
        token=attempt.token,
        job_name=run.job_name,
        nodes=attempt.nodes_wanted if script.nodes_given else None,
        output=None,
        arguments=tuple(fill(word, values) for word in script.arguments),
        exclude=_merge_exclude(script.exclude, attempt.exclude),
        options=_choose_options(script, is_first=is_first),
        dependency=_choose_dependency(script.dependency if is_first else "", behind),
        export=export,
        environment=variables,
        is_own_environment=True,
        may_requeue=REQUEUE in script.options,
        submit_dir=script.submit_dir,
        identity=Identity(uid=identity[0], gid=identity[1]) if identity is not None else None,
        inherited=run.inherited,
    )


def _resume_of(run: Run, attempt: Attempt) -> tuple[str, str]:
    """(path, step) that an attempt is told. One that is queued ahead can't know them: a link, made and kept by us."""
    if attempt.state is AttemptState.AHEAD:
        return str(run.spec.paths.resume_link(attempt.number)), ""
    return attempt.resume_path, str(attempt.resume_step)


def contract_environment(run: Run, attempt: Attempt) -> dict[str, str]:
    """The contract's variables for one attempt of a script."""
    path, step = _resume_of(run, attempt)
    return {
        contract.ENV_RUN: run.name,
        contract.ENV_ATTEMPT: str(attempt.number),
        contract.ENV_RUN_DIR: str(run.spec.run_dir),
        contract.ENV_RESUME_FROM: path,
        contract.ENV_RESUME_STEP: step,
        contract.ENV_CHECKPOINT_EVERY_S: f"{every_s_of(run, attempt):g}",
        **_skip_environment(attempt),
        **loss_environment(run.spec),
    }


def _skip_environment(attempt: Attempt) -> dict[str, str]:
    parts = ",".join(f"{part.first}-{part.end}" for part in attempt.skip_samples)
    return {contract.ENV_SKIP_SAMPLES: parts} if parts else {}


def every_s_of(run: Run, attempt: Attempt) -> float:
    """Seconds between two saves that an attempt begins with."""
    return attempt.checkpoint_every_s or first_every_s(run.spec.checkpoint)


def loss_environment(spec: RunSpec) -> dict[str, str]:
    """What the training is told of spikes of its loss: nothing, where they are not looked for."""
    divergence = spec.divergence
    if divergence.spike_score <= 0:
        return {}
    return {
        contract.ENV_SPIKE_SCORE: f"{divergence.spike_score:g}",
        contract.ENV_SPIKE_WINDOW: str(divergence.spike_window),
    }


def placeholders(run: Run, attempt: Attempt) -> dict[str, str]:
    """What the placeholders in arguments stand for in one attempt."""
    path, step = _resume_of(run, attempt)
    return {
        "{resume_from}": path,
        "{resume_step}": step,
        "{run}": run.name,
        "{attempt}": str(attempt.number),
        "{run_dir}": str(run.spec.run_dir),
    }


def fill(word: str, values: Mapping[str, str]) -> str:
    """A word with its placeholders replaced."""
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word


def _choose_options(script: ScriptSpec, *, is_first: bool) -> tuple[str, ...]:
    options = script.options
    if not is_first:
        # --begin of an #SBATCH line is met by a time that has come.
        options = (*(o for o in options if name_of(o) not in _FIRST_ONLY), "--begin=now")
    return tuple(o for o in options if name_of(o) != "exclude")


def _merge_exclude(own: str, broken: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*(expand_nodes(own) if own else ()), *broken}))


def _choose_dependency(own: str, behind: int | None) -> str:
    """Singleton always; the person's own besides, where Slurm can join the two ("," is and, "?" is or)."""
    if not own:
        return "singleton" if behind is None else f"afterany:{behind},singleton"
    if "?" in own:
        return own
    return own if "singleton" in own.split(",") else f"{own},singleton"


def is_first_submission(attempts: Collection[Attempt], number: int) -> bool:
    """True while no job of a run has been: earlier attempts, if any, were refused."""
    return all(a.end is AttemptEnd.REFUSED for a in attempts if a.number < number)
