"""Run files and the service's own settings: TOML in, checked frozen records out, one clear line when it is wrong.

Parsing is pure; `read_run_file`, `check_script` and `load_settings` are what looks at the file system.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from supervisor.containers import container_problems
from supervisor.model import (
    MAX_WARNING_S,
    CheckpointSpec,
    DivergenceSpec,
    DrainPolicy,
    LivenessSpec,
    Policy,
    RunSpec,
)
from supervisor.sbatch_options import option_problem
from supervisor.tomlfile import (
    ConfigError,
    Problem,
    absolute,
    convert_record,
    has_control,
    load_toml,
    one_line,
    read_text,
    refuse_first,
    render_record,
    shown,
)

__all__ = [
    "ConfigError",
    "Settings",
    "check_script",
    "check_slurm_conf",
    "check_supervision",
    "is_fixed_interval",
    "load_settings",
    "parse_run_file",
    "parse_settings",
    "pattern_problem",
    "read_run_file",
    "render_run_file",
    "script_of",
    "state_dir",
]

ENV_CONFIG = "SUPERVISOR_CONFIG"
ENV_LEDGER = "SUPERVISOR_LEDGER"
ENV_SOCKET = "SUPERVISOR_SOCKET"

SYSTEM_CONFIG = Path("/etc/supervisor/supervisor.toml")
SYSTEM_LEDGER = Path("/var/lib/supervisor/ledger.db")
SYSTEM_SOCKET = Path("/run/supervisor/control.sock")


# ---------------------------------------------------------------- the service's settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """Where the ledger is."""

    path: Path = SYSTEM_LEDGER  # on a local disk
    force_network: bool = False  # keep the ledger on a network file system in spite of the risk


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Who may change runs, and through which socket."""

    socket: Path = SYSTEM_SOCKET  # what the commands that change something speak to
    admin_group: str | None = None  # members of this group may change every run


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """How Slurm is asked."""

    conf: Path | None = None  # SLURM_CONF for every Slurm command; default: the environment's, or Slurm's own
    client: Literal["auto", "cli", "pyslurm"] = "auto"  # auto: pyslurm when it fits the release, else commands
    form: Literal["text", "json"] = "text"  # of the commands' answers; json is left for text where it can't be used
    poll_interval_s: float = 15.0  # between questions to Slurm when nothing is suspected
    command_timeout_s: float = 20.0  # a command that runs longer has not answered
    submit_lookup_wait_s: float = 15.0  # after a lost answer of sbatch, before the job is looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How often the daemon looks."""

    cycle_interval_s: float = 1.0  # while an attempt is live
    idle_interval_s: float = 15.0  # while none is


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSettings:
    """What may be drained."""

    enabled: bool = True  # false: broken nodes are only excluded from our own jobs
    max_nodes: int = 5  # per window
    max_fraction: float = 0.1  # of the cluster's nodes, per window; at least one node
    window_s: float = 3600.0  # over which drains are counted
    sweeps_to_drain: int = 2  # failed sweeps in a row before a check drains a node
    owner_tag: str = "supervisor"  # first word of our drain reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLimits:
    """What a node must have to pass the host probes."""

    disk_paths: tuple[str, ...] = ("/tmp",)  # noqa: S108 - the scratch disk most sites have; watched, not written to
    disk_min_free_fraction: float = 0.05  # of each of disk_paths
    disk_min_free_bytes: int = 1024**3  # of each of disk_paths
    memory_min_available_fraction: float = 0.05  # of the node's memory
    shm_min_free_fraction: float = 0.05  # of /dev/shm
    shm_min_total_bytes: int = 0  # 0: any size
    clock_max_skew_s: float = 1.0  # against the head node
    shared_paths: tuple[str, ...] = ()  # must be visible and writable on every node
    gpu_count: int = 0  # GPUs that every node must have; 0: GPUs are not looked at
    kernel_log_window_s: float = 0.0  # how far back the kernel log is read for GPU errors; 0: not at all


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How often idle nodes are checked, and against what."""

    interval_s: float = 300.0  # 0: never
    timeout_s: float = 20.0  # a node that has not answered by then is unknown
    limits: SweepLimits = field(default_factory=SweepLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings:
    """What runs the launcher on the nodes: must exist there under the same path."""

    python: str = sys.executable  # the interpreter, with this package, and torch unless commands name a Python
    pythonpath: str = ""  # put in front of PYTHONPATH of the launcher; empty: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySettings:
    """Whom to tell when a person is needed."""

    command: tuple[str, ...] = ()  # run with the message as its last argument; empty: only the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set for the service; every key has a default."""

    observe_only: bool = False  # plan and record, act on nothing
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    control: ControlSettings = field(default_factory=ControlSettings)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    drain: DrainSettings = field(default_factory=DrainSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    launcher: LauncherSettings = field(default_factory=LauncherSettings)
    notify: NotifySettings = field(default_factory=NotifySettings)

    @property
    def policy(self) -> Policy:
        """The part that decisions depend on."""
        return Policy(
            drain=DrainPolicy(
                is_enabled=self.drain.enabled,
                max_nodes=self.drain.max_nodes,
                max_fraction=self.drain.max_fraction,
                window_s=self.drain.window_s,
                sweeps_to_drain=self.drain.sweeps_to_drain,
            ),
            is_observe_only=self.observe_only,
            poll_interval_s=self.slurm.poll_interval_s,
            cycle_interval_s=self.loop.cycle_interval_s,
            idle_interval_s=self.loop.idle_interval_s,
            submit_lookup_wait_s=self.slurm.submit_lookup_wait_s,
            owner_tag=self.drain.owner_tag,
        )

    @property
    def sweep_limits(self) -> dict[str, Any]:
        """The limits as the node probes take them: a plain mapping that survives JSON."""
        limits = dataclasses.asdict(self.sweep.limits)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in limits.items()}


# ---------------------------------------------------------------- run files


def read_run_file(path: Path) -> RunSpec:
    """A run file, checked as the user who reads it: the training script must be there too.

    Raises ConfigError for anything that a person has to mend.
    """
    where = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links that nodes may not have
    spec = parse_run_file(read_text(path), path=where)
    check_script(spec, source=path.name)
    return spec


def parse_run_file(text: str, *, path: Path) -> RunSpec:
    """The run that the text of a run file asks for. `path` (absolute) gives the folder that relative paths start at.

    Looks at no other file: whether the script exists is `check_script`'s question.
    """
    source = path.name
    raw = load_toml(text, source)
    _refuse_misplaced(raw, source)
    spec = convert_record(RunSpec, raw, source)
    spec = dataclasses.replace(
        spec,
        root=absolute(spec.root, path.parent, f'{source}: "root"'),
        workdir=absolute(spec.workdir if "workdir" in raw else Path(), path.parent, f'{source}: "workdir"'),
    )
    directory = spec.checkpoint.directory
    if directory is not None:
        directory = absolute(directory, path.parent, f"{source}: [checkpoint] directory")
        spec = dataclasses.replace(spec, checkpoint=dataclasses.replace(spec.checkpoint, directory=directory))
    if is_fixed_interval(raw.get("checkpoint", {})):
        spec = dataclasses.replace(spec, checkpoint=dataclasses.replace(spec.checkpoint, interval="fixed"))
    refuse_first(source, _run_problems(spec))
    return spec


_RENAMED = {
    ("health", ""): "[health] is called [liveness]",
    ("restart", "worker_restarts"): "[restart] worker_restarts is gone: in_job = true restarts the training in its job",
}
_AT_TOP = ("name", "command", "root", "workdir", "environment")


def _refuse_misplaced(raw: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for keys of earlier versions, and for those that stand below a section without belonging there.

    In TOML every key below a section is part of it: what is meant for the file must stand above the first one.
    """
    tables = {name: table for name, table in raw.items() if isinstance(table, dict)}
    for (name, key), text in _RENAMED.items():
        if name in tables and (not key or key in tables[name]):
            raise ConfigError(f"{source}: {text}")
    if "environment" in tables:
        raise ConfigError(
            f'{source}: environment: a list is expected, environment = ["NAME=text"], above the first [section]'
        )
    known = {f.name for f in dataclasses.fields(RunSpec)}
    for name, table in tables.items():
        stray = next((key for key in _AT_TOP if key in table), None)
        if stray is not None and name in known:
            raise ConfigError(f'{source}: "{stray}" stands below [{name}]; it belongs above the first [section]')


def is_fixed_interval(table: Mapping[str, Any]) -> bool:
    """True for a [checkpoint] table that gives the interval itself: nobody changes it unasked."""
    return "every_s" in table and "interval" not in table


def check_supervision(spec: RunSpec, *, source: str) -> None:
    """Raise ConfigError for what is wrong with the supervision of a script of the person's own (it has no command)."""
    refuse_first(source, _run_problems(dataclasses.replace(spec, command=("script",))))


def check_script(spec: RunSpec, *, source: str = "run.toml") -> None:
    """Raise ConfigError when the working directory or the training script is not there."""
    if not spec.workdir.is_dir():
        raise ConfigError(f"{source}: workdir {spec.workdir} is not a directory")
    script = script_of(spec)
    if script is not None and not script.is_file():
        raise ConfigError(f"{source}: script {script} not found (the first .py word of command, from workdir)")


def script_of(spec: RunSpec) -> Path | None:
    """The training script: the first word of the command that ends in .py; None for a command without one."""
    word = next((word for word in spec.command if word.endswith(".py")), None)
    return spec.workdir / word if word else None


def render_run_file(spec: RunSpec) -> str:
    """The canonical run file: every key written out, every path absolute. Parsing it gives the same spec."""
    return render_record(spec)


# ---------------------------------------------------------------- settings


def load_settings(path: Path | None, env: Mapping[str, str], *, uid: int | None = None) -> Settings:
    """The service's settings: from `path`, else $SUPERVISOR_CONFIG, else the system's file, else the defaults.

    $SUPERVISOR_LEDGER and $SUPERVISOR_SOCKET go before the file. Without any file, an account other than root gets
    paths in its own state directory, unless a system-wide service is there. Raises ConfigError.
    """
    uid = os.geteuid() if uid is None else uid
    chosen = path or (Path(env[ENV_CONFIG]) if env.get(ENV_CONFIG) else None)
    if chosen is None and SYSTEM_CONFIG.exists():
        chosen = SYSTEM_CONFIG
    if chosen is not None:
        settings = parse_settings(read_text(chosen), path=chosen)
    else:
        settings = Settings()
        if uid != 0 and not SYSTEM_SOCKET.parent.exists():
            settings = _in_state_dir(settings, state_dir(env))
    return _with_environment(settings, env)


def parse_settings(text: str, *, path: Path) -> Settings:
    """The settings in the text of a configuration file; `path` gives the folder that relative paths start at."""
    source = path.name
    settings = convert_record(Settings, load_toml(text, source), source)
    base = Path(os.path.abspath(path)).parent  # noqa: PTH100 - as in read_run_file
    conf = settings.slurm.conf
    settings = dataclasses.replace(
        settings,
        ledger=dataclasses.replace(settings.ledger, path=absolute(settings.ledger.path, base, source)),
        control=dataclasses.replace(settings.control, socket=absolute(settings.control.socket, base, source)),
        slurm=dataclasses.replace(settings.slurm, conf=absolute(conf, base, source) if conf else None),
    )
    refuse_first(source, _settings_problems(settings))
    return settings


def check_slurm_conf(settings: Settings) -> None:
    """Raise ConfigError when the Slurm configuration that was chosen is not there: no waiting brings it."""
    conf = settings.slurm.conf
    if conf is not None and not conf.is_file():
        raise ConfigError(f"{conf}: no such file; [slurm] conf (or SLURM_CONF) names Slurm's configuration, slurm.conf")


def state_dir(env: Mapping[str, str]) -> Path:
    """Where an account without root keeps the service's state (XDG)."""
    base = env.get("XDG_STATE_HOME", "")
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    return (Path(base) if base.startswith("/") else home / ".local/state") / "supervisor"


def _in_state_dir(settings: Settings, folder: Path) -> Settings:
    return dataclasses.replace(
        settings,
        ledger=dataclasses.replace(settings.ledger, path=folder / "ledger.db"),
        control=dataclasses.replace(settings.control, socket=folder / "control.sock"),
    )


def _with_environment(settings: Settings, env: Mapping[str, str]) -> Settings:
    if env.get(ENV_LEDGER):
        settings = dataclasses.replace(
            settings, ledger=dataclasses.replace(settings.ledger, path=Path(env[ENV_LEDGER]).absolute())
        )
    if env.get(ENV_SOCKET):
        settings = dataclasses.replace(
            settings, control=dataclasses.replace(settings.control, socket=Path(env[ENV_SOCKET]).absolute())
        )
    if settings.slurm.conf is None and env.get("SLURM_CONF"):
        settings = dataclasses.replace(
            settings, slurm=dataclasses.replace(settings.slurm, conf=Path(env["SLURM_CONF"]))
        )
    return settings


# ---------------------------------------------------------------- what is wrong with a run file


def _run_problems(spec: RunSpec) -> Iterator[Problem]:
    from trainer.contract import is_run_name

    yield (
        not is_run_name(spec.name),
        (
            f'name "{shown(spec.name)}": letters, digits, dot, dash and underscore, at most 100, '
            "not starting with a dot or a dash"
        ),
    )
    yield from _command_problems(spec.command)
    for key, path in (("root", spec.root), ("workdir", spec.workdir)):
        yield has_control(str(path)), f"{key}: control characters are not allowed"
    yield from _environment_problems(spec.environment)
    yield from _nodes_problems(spec)
    yield from _slurm_problems(spec)
    checkpoint, restart = spec.checkpoint, spec.restart
    yield _is_below(checkpoint.every_s, above=0), f"[checkpoint] every_s must be above 0, not {checkpoint.every_s:g}"
    yield from _interval_problems(checkpoint)
    yield (
        checkpoint.keep_last < 2,
        f"[checkpoint] keep_last must be at least 2, not {checkpoint.keep_last}: the newest may turn out to be damaged",
    )
    yield (
        checkpoint.verify_on_head_max_bytes < 0,
        f"[checkpoint] verify_on_head_max_bytes must not be negative: {checkpoint.verify_on_head_max_bytes}",
    )
    yield from _tier_problems(checkpoint)
    yield from _layout_problems(spec)
    yield from _progress_problems(spec)
    for key in (
        "max_without_progress",
        "max_node_failures",
        "backoff_s",
        "backoff_max_s",
        "stop_grace_s",
        "queue_ahead_s",
    ):
        value = getattr(restart, key)
        yield _is_below(value), f"[restart] {key} must be 0 or more, not {value:g}"
    yield (
        restart.backoff_max_s < restart.backoff_s,
        f"[restart] backoff_max_s ({restart.backoff_max_s:g}) is less than backoff_s ({restart.backoff_s:g})",
    )
    yield from _divergence_problems(spec.divergence)
    yield from _liveness_problems(spec.liveness)
    yield from _straggler_problems(spec)
    yield from container_problems(spec)


def _interval_problems(checkpoint: CheckpointSpec) -> Iterator[Problem]:
    low, high = checkpoint.every_min_s, checkpoint.every_max_s
    yield _is_below(low, above=0), f"[checkpoint] every_min_s must be above 0, not {low:g}"
    yield high < low, f"[checkpoint] every_min_s ({low:g}) is more than every_max_s ({high:g})"
    alert_s = checkpoint.alert_after_s
    yield _is_below(alert_s), f"[checkpoint] alert_after_s must be 0 (three intervals) or more, not {alert_s:g}"
    for mark in checkpoint.unfinished_markers:
        is_odd = not mark or "/" in mark or has_control(mark)
        yield is_odd, f'[checkpoint] unfinished_markers: "{shown(mark)}" is no end of a file\'s name'


def _tier_problems(checkpoint: CheckpointSpec) -> Iterator[Problem]:
    local, url = checkpoint.local_dir, checkpoint.object_url
    yield (
        bool(local) and (not local.startswith(("/", "$")) or has_control(local)),
        f'[checkpoint] local_dir "{shown(local)}" is not an absolute path (it may begin with a $VARIABLE of the job)',
    )
    scheme, colon, place = url.partition("://")
    yield (
        bool(url) and (not scheme.isidentifier() or not colon or not place or has_control(url)),
        f'[checkpoint] object_url "{shown(url)}" is no URL such as "s3://bucket/prefix"',
    )
    yield (
        "@" in place.partition("/")[0] or "?" in place,
        "[checkpoint] object_url: credentials and options do not belong in a run file, but in the job's environment",
    )
    yield (
        checkpoint.object_keep_last < 2,
        f"[checkpoint] object_keep_last must be at least 2, not {checkpoint.object_keep_last}",
    )
    rate = checkpoint.upload_mb_per_s
    yield _is_below(rate), f"[checkpoint] upload_mb_per_s must be 0 (no bound) or more, not {rate:g}"


def _divergence_problems(divergence: DivergenceSpec) -> Iterator[Problem]:
    count, score, window = divergence.rollback_checkpoints, divergence.spike_score, divergence.spike_window
    yield count < 1, f"[divergence] rollback_checkpoints must be at least 1, not {count}"
    yield divergence.max_rollbacks < 0, f"[divergence] max_rollbacks must be 0 or more, not {divergence.max_rollbacks}"
    yield _is_below(score), f"[divergence] spike_score must be 0 (off) or more, not {score:g}"
    yield (
        0 < score < _MIN_SPIKE_SCORE,
        f"[divergence] spike_score {score:g} is met by ordinary noise: 6 is a good start",
    )
    yield window < _MIN_SPIKE_WINDOW, f"[divergence] spike_window must be at least {_MIN_SPIKE_WINDOW}, not {window}"


_MIN_SPIKE_SCORE = 3.0
_MIN_SPIKE_WINDOW = 32


def _command_problems(command: tuple[str, ...]) -> Iterator[Problem]:
    yield not command, 'command is empty: give the training program as a list, e.g. ["train.py", "--lr", "1e-4"]'
    yield not command[0].strip(), "command: its first word is empty"
    yield any("\0" in word for word in command), "command: a word holds a NUL character"
    starter = Path(command[0]).name
    yield (
        starter in {"torchrun", "srun", "sbatch", "mpirun"},
        (
            f'command starts with "{starter}": the supervisor starts the nodes and torchrun itself; '
            "give only the training script and its arguments"
        ),
    )


_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_OWN_PREFIXES = ("SUPERVISOR_", "SLURM_", "SBATCH_", "TORCHELASTIC_")
_OWN_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


def _environment_problems(environment: tuple[str, ...]) -> Iterator[Problem]:
    names = [word.partition("=")[0] for word in environment]
    for word, name in zip(environment, names, strict=True):
        yield not _VARIABLE.match(word), f'environment: "{shown(word)}" is no NAME=text'
        yield has_control(word), f"environment: the text of {shown(name)} holds a control character"
        is_own = name.startswith(_OWN_PREFIXES) or name in _OWN_VARIABLES
        yield is_own, f"environment: {shown(name)} is set by the launcher or by Slurm"
        yield names.count(name) > 1, f"environment: {shown(name)} is given twice"


def _nodes_problems(spec: RunSpec) -> Iterator[Problem]:
    nodes = spec.nodes
    yield nodes.min < 1, f"[nodes] min must be at least 1, not {nodes.min}"
    yield nodes.max < nodes.min, f"[nodes] min ({nodes.min}) is more than max ({nodes.max})"
    yield nodes.multiple_of < 1, f"[nodes] multiple_of must be at least 1, not {nodes.multiple_of}"
    yield (
        nodes.multiple_of >= 1 and nodes.max // nodes.multiple_of * nodes.multiple_of < nodes.min,
        f"[nodes] no multiple of {nodes.multiple_of} lies between min ({nodes.min}) and max ({nodes.max})",
    )
    yield nodes.spares < 0, f"[nodes] spares must be 0 or more, not {nodes.spares}"
    yield (
        nodes.procs_per_node is not None and nodes.procs_per_node < 1,
        f"[nodes] procs_per_node must be at least 1, not {nodes.procs_per_node}",
    )


def _layout_problems(spec: RunSpec) -> Iterator[Problem]:
    checkpoint = spec.checkpoint
    yield (
        checkpoint.directory is not None and checkpoint.layout == "supervisor",
        (
            "[checkpoint] directory is where a training that knows nothing of the supervisor saves: name its layout "
            'too, or write layout = "auto"'
        ),
    )
    yield has_control(str(checkpoint.directory)), "[checkpoint] directory: control characters are not allowed"
    yield (
        str(checkpoint.directory) == "/",
        "[checkpoint] directory is the root of the file system: name the folder that holds the checkpoints",
    )


def pattern_problem(pattern: str) -> str:
    """What is wrong with a pattern that finds the step in a log; empty when nothing is."""
    if len(pattern) > _MAX_PATTERN:
        return f"is longer than {_MAX_PATTERN} characters"
    if has_control(pattern):
        return "holds a control character: the log is searched line by line"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forms that will change their meaning one day
            groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {one_line(str(error))}"
    return "" if groups == 1 else f"must have one group, the number of the step; it has {groups}"


_MAX_PATTERN = 500


def _progress_problems(spec: RunSpec) -> Iterator[Problem]:
    problem = pattern_problem(spec.progress.pattern) if spec.progress.pattern else ""
    yield bool(problem), f'[progress] pattern "{shown(spec.progress.pattern)}" {problem}'
    from trainer.contract import PHASES

    for phase in PHASES:
        low, high = spec.progress.bounds(phase)
        yield _is_below(low), f"[progress] {phase}_min_s must be 0 or more, not {low:g}"
        yield _is_below(high), f"[progress] {phase}_max_s must be 0 (off) or more, not {high:g}"
        yield (
            0 < high < low,
            f"[progress] {phase}_min_s ({low:g}) is more than {phase}_max_s ({high:g})",
        )


def _liveness_problems(liveness: LivenessSpec) -> Iterator[Problem]:
    for key in ("timeout_s", "beat_interval_s", "suspect_after_s"):
        value = getattr(liveness, key)
        yield _is_below(value, above=0), f"[liveness] {key} must be above 0, not {value:g}"
    yield _is_below(liveness.confirm_s), f"[liveness] confirm_s must be 0 or more, not {liveness.confirm_s:g}"
    yield (
        0 < liveness.timeout_s < liveness.suspect_after_s and liveness.timeout_s >= 2 * liveness.beat_interval_s,
        (
            f"[liveness] timeout_s ({liveness.timeout_s:g}) is less than suspect_after_s "
            f"({liveness.suspect_after_s:g}): a node would be given up before it is suspected"
        ),
    )
    for key in ("suspect_after_s", "timeout_s"):
        value = getattr(liveness, key)
        yield (
            value < 2 * liveness.beat_interval_s,
            (
                f"[liveness] {key} ({value:g}) must be at least twice "
                f"beat_interval_s ({liveness.beat_interval_s:g}): one late heartbeat is no failure"
            ),
        )


def _straggler_problems(spec: RunSpec) -> Iterator[Problem]:
    ratio, window, replaces = spec.straggler.ratio, spec.straggler.window_steps, spec.straggler.action == "replace"
    yield replaces and not spec.nodes.spares, '[straggler] action = "replace" needs a spare: [nodes] spares is 0'
    yield (
        replaces and not spec.restart.in_job,
        '[straggler] action = "replace" needs [restart] in_job = true: a node is replaced inside the job',
    )
    yield (
        ratio != 0 and ratio < _MIN_STRAGGLER_RATIO,
        f"[straggler] ratio must be 0 (off) or at least {_MIN_STRAGGLER_RATIO:g}, not {ratio:g}",
    )
    yield window < 1, f"[straggler] window_steps must be at least 1, not {window}"


_MIN_STRAGGLER_RATIO = 1.1


_TIME_LIMIT = re.compile(r"^(\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE)$", re.IGNORECASE)
_SLURM_WORD = re.compile(r"^[^\s,\-=][^\s,=]*$")
_SLURM_WORDS = re.compile(r"^[^\s,\-=][^\s,=]*(,[^\s,\-=][^\s,=]*)*$")

_SLURM_FORMS = {"partition": _SLURM_WORDS, "account": _SLURM_WORD, "qos": _SLURM_WORD, "time_limit": _TIME_LIMIT}


def is_slurm_value(key: str, value: str) -> bool:
    """True when a text can stand for this key of [slurm]."""
    return _SLURM_FORMS[key].match(value) is not None


def _slurm_problems(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.slurm
    yield (
        slurm.partition is not None and not _SLURM_WORDS.match(slurm.partition),
        f'[slurm] partition "{shown(slurm.partition)}" is not a partition name',
    )
    for key, value in (("account", slurm.account), ("qos", slurm.qos)):
        is_wrong = value is not None and not _SLURM_WORD.match(value)
        yield is_wrong, f'[slurm] {key} "{shown(value)}" is not a name'
    yield (
        slurm.time_limit is not None and not _TIME_LIMIT.match(slurm.time_limit),
        (
            f'[slurm] time_limit "{shown(slurm.time_limit)}": write minutes, "hours:minutes:seconds", '
            '"days-hours:minutes:seconds" or "UNLIMITED"'
        ),
    )
    yield (
        slurm.gpus_per_node is not None and slurm.gpus_per_node < 1,
        f"[slurm] gpus_per_node must be at least 1, not {slurm.gpus_per_node}; leave it out for none",
    )
    yield (
        not 0 <= slurm.warn_before_limit_s <= MAX_WARNING_S,
        f"[slurm] warn_before_limit_s must lie between 0 (no warning) and {MAX_WARNING_S}: {slurm.warn_before_limit_s}",
    )
    for option in slurm.options:
        problem = option_problem(option)
        yield problem is not None, f'[slurm] options: "{shown(option)}" {problem}'


# ---------------------------------------------------------------- what is wrong with the settings

_OWNER_TAG = re.compile(r"^[A-Za-z0-9_.-]{1,32}$")


def _settings_problems(settings: Settings) -> Iterator[Problem]:
    slurm, loop, drain, sweep = settings.slurm, settings.loop, settings.drain, settings.sweep
    above_0 = (
        ("[slurm] poll_interval_s", slurm.poll_interval_s),
        ("[slurm] command_timeout_s", slurm.command_timeout_s),
        ("[loop] cycle_interval_s", loop.cycle_interval_s),
        ("[loop] idle_interval_s", loop.idle_interval_s),
        ("[drain] window_s", drain.window_s),
        ("[sweep] timeout_s", sweep.timeout_s),
        ("[sweep.limits] clock_max_skew_s", sweep.limits.clock_max_skew_s),
    )
    for key, value in above_0:
        yield _is_below(value, above=0), f"{key} must be above 0, not {value:g}"
    at_least_0 = (
        ("[slurm] submit_lookup_wait_s", slurm.submit_lookup_wait_s),
        ("[drain] max_nodes", drain.max_nodes),
        ("[sweep] interval_s", sweep.interval_s),
        ("[sweep.limits] disk_min_free_bytes", sweep.limits.disk_min_free_bytes),
        ("[sweep.limits] shm_min_total_bytes", sweep.limits.shm_min_total_bytes),
        ("[sweep.limits] gpu_count", sweep.limits.gpu_count),
        ("[sweep.limits] kernel_log_window_s", sweep.limits.kernel_log_window_s),
    )
    for key, value in at_least_0:
        yield _is_below(value), f"{key} must be 0 or more, not {value:g}"
    fractions = (
        ("[drain] max_fraction", drain.max_fraction),
        ("[sweep.limits] disk_min_free_fraction", sweep.limits.disk_min_free_fraction),
        ("[sweep.limits] memory_min_available_fraction", sweep.limits.memory_min_available_fraction),
        ("[sweep.limits] shm_min_free_fraction", sweep.limits.shm_min_free_fraction),
    )
    for key, value in fractions:
        yield not 0 <= value <= 1, f"{key} must lie between 0 and 1, not {value:g}"
    yield drain.sweeps_to_drain < 1, f"[drain] sweeps_to_drain must be at least 1, not {drain.sweeps_to_drain}"
    yield not _OWNER_TAG.match(drain.owner_tag), f'[drain] owner_tag "{shown(drain.owner_tag)}" is not one word'
    for key, paths in (("disk_paths", sweep.limits.disk_paths), ("shared_paths", sweep.limits.shared_paths)):
        for path in paths:
            yield not path.startswith("/"), f'[sweep.limits] {key}: "{shown(path)}" is not an absolute path'
    yield not settings.launcher.python, "[launcher] python is empty"
    yield bool(settings.notify.command) and not settings.notify.command[0], "[notify] command: its first word is empty"


def _is_below(value: float, *, above: float | None = None) -> bool:
    return value < 0 if above is None else value <= above
