"""`supervisor sbatch`: sbatch with supervision. The person's script, options and output stay as they are."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import click

from slurm.commands import sbatch_argv
from slurm.inherited import Inherited, read_inherited
from slurm.sbatch_line import Effective, parse_command_line, render_submitted, wrap_text
from slurm.sbatch_options import INVALID_OPTION_EXIT, QUESTIONS, BadSubmission, name_of
from supervisor.cli.main import EXIT_BAD_INPUT, EXIT_DAEMON_DOWN, EXIT_FAILED, CommandError
from supervisor.cli.options import load_chosen, start_hint
from supervisor.config import Settings
from supervisor.control import DaemonDown, DaemonSilent, ask
from supervisor.model import EPOCH, Attempt, Run, RunSpec
from supervisor.scripts import MAX_SCRIPT_BYTES, Handed, NotSupervised, Script, read_script, render_submission
from supervisor.supervision import BadSupervision, render_help, take_options
from trainer.contract import ENV_RUN

EXIT_NO_JOB_YET = 5  # accepted, and no job within the wait

_WAIT_S = 60.0
_POLL_MAX_S = 0.5
_POLL_OVER_S = 2.0
_OVER = frozenset({"finished", "stopped", "held"})
_SAYS = "; sbatch says: "


class PassingCommand(click.Command):
    """A command whose words are another program's: click reads none of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """All words, as they are."""
        ctx.params = {"words": tuple(args)}
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """What stands behind the command's name in its usage line."""
        return ["[SBATCH OPTIONS] [--supervise-...]", "SCRIPT [ARGUMENTS]"]


@click.command(cls=PassingCommand, epilog=f"\b\nSupervision options:\n{render_help()}")
@click.pass_context
def sbatch(context: click.Context, *, words: tuple[str, ...]) -> int:
    """Submit a batch script as sbatch does, and keep it running.

    Takes what sbatch takes: its options, its SBATCH_* variables, a script with #SBATCH lines and arguments, --wrap, or
    a script from standard input; prints what sbatch prints. When the job ends before its work is done, it is submitted
    again: the same script, arguments and environment, on healthy nodes. Supervision options stand among sbatch's, or
    in the script as "#SUPERVISE --NAME=VALUE". {resume_from}, {resume_step}, {run}, {attempt} and {run_dir} in the
    arguments are replaced in each submission.

    Exit codes: sbatch's own (0 submitted, 1 or 255 refused); 2 can't be supervised; 3 the daemon is not running,
    nothing was submitted; 5 accepted, and no job after 60 s, or no answer of the daemon: it may have been accepted, so
    look with `supervisor status` before a retry. With --wait: that of the last job.
    """
    try:
        own, given = take_options(words)
        line = parse_command_line(own)
    except BadSubmission as error:
        click.echo(error.stderr, err=True, nl=False)
        return error.exit_code
    except BadSupervision as error:
        raise CommandError(str(error), EXIT_BAD_INPUT) from None
    names = {name_of(option) for option in line.options}
    if "help" in names:
        click.echo(context.get_help())
        return 0
    settings = load_chosen(context, Path(given["config"]) if "config" in given else None)
    if names & (QUESTIONS | {"test-only"}):
        return _hand_on(own, settings)
    try:
        handed = read_handed_in(words)
        script = read_script(handed)
    except BadSubmission as error:
        click.echo(error.stderr, err=True, nl=False)
        return error.exit_code
    except NotSupervised as error:
        raise CommandError(str(error), EXIT_BAD_INPUT) from None
    check_checkpoints(script)
    surroundings = look_around(script, os.environ)
    if "dry-run" in given:
        return _tell_dry_run(settings, handed, script, surroundings, as_json="json" in given)
    tell_notes(list(surroundings))
    return submit(settings, request_of("sbatch", handed), script)


def check_checkpoints(script: Script) -> None:
    """Raise CommandError for a checkpoint directory that is there and that the person can't read."""
    directory = script.spec.checkpoint.directory
    try:
        if directory is not None:
            os.listdir(directory)  # noqa: PTH208 - the error says what is wrong
    except FileNotFoundError:
        if directory is not None and directory.is_symlink():
            message = f"--supervise-checkpoint-dir={directory}: it is a link to a folder that is not there"
            raise CommandError(message, EXIT_BAD_INPUT) from None
    except OSError as error:
        message = f"--supervise-checkpoint-dir={directory}: {error.strerror or error}"
        raise CommandError(message, EXIT_BAD_INPUT) from None


def look_around(script: Script, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What only the person's own eyes see, and what sbatch does not say."""
    notes = []
    folders = {os.path.dirname(p) for p in (script.wanted.output, script.wanted.error) if p}  # noqa: PTH120 - a pattern
    for folder in sorted(folders):
        path = script.spec.workdir / folder
        if "%" not in folder and "\\" not in folder and not path.is_dir():
            notes.append(
                f"{path}: no such folder here; without it on the node Slurm ends the job at once, without a log"
            )
    saves = script.spec.checkpoint.directory
    if saves is not None and not os.path.lexists(saves):
        notes.append(f"--supervise-checkpoint-dir={saves}: not there yet; the training has to make it")
    outer = environment.get(ENV_RUN)
    if outer and "SLURM_JOB_ID" in environment:
        notes.append(
            f"called inside a job of run {outer}, which is submitted again by itself: what is handed in here is "
            "another run beside it"
        )
    return tuple(notes)


# ---------------------------------------------------------------- what sbatch would look at


def read_handed_in(words: tuple[str, ...], *, text: str | None = None, path: str = "") -> Handed:
    """Everything that sbatch would look at, read as the person who submits. `text`: of a script that is known already.

    Raises BadSubmission in sbatch's words, NotSupervised.
    """
    line = parse_command_line(take_options(words)[0])
    wrapped = next((o.partition("=")[2] for o in reversed(line.options) if name_of(o) == "wrap"), None)
    if text is None:
        if wrapped is not None and line.script is None:
            text, path = wrap_text(wrapped), "--wrap"
        else:
            text, path = _read_text(line.script), line.script or "-"
    return Handed(
        text=text,
        path=path,
        words=words,
        environment=dict(os.environ),
        cwd=_working_directory(),
        inherited=read_inherited(),
    )


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - text is what is handed in
    except FileNotFoundError as error:
        raise BadSubmission(f"getcwd failed: {error.strerror}", exit_code=INVALID_OPTION_EXIT) from None


def _read_text(script: str | None) -> str:
    try:
        if script is None:
            data = _read_bounded(sys.stdin.buffer)
        else:
            with _open_script(script) as stream:
                data = _read_bounded(stream)
    except OSError:
        raise BadSubmission(f"Unable to open file {script}") from None
    return data.decode("utf-8", "surrogateescape")


def _open_script(name: str) -> BinaryIO:
    """The script as sbatch finds it: here, else on PATH. Raises OSError."""
    places = [Path(name)]
    if "/" not in name:
        places += [Path(folder, name) for folder in os.environ.get("PATH", "").split(":") if folder]
    found = next((place for place in places if os.access(place, os.R_OK)), places[0])
    stream = found.open("rb")
    kind = os.fstat(stream.fileno()).st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISFIFO(kind):  # a pipe: of a shell's <(...)
        stream.close()
        raise OSError("neither a file nor a pipe")
    return stream


def _read_bounded(stream: BinaryIO) -> bytes:
    data = stream.read(MAX_SCRIPT_BYTES + 1)
    if len(data) > MAX_SCRIPT_BYTES:
        raise NotSupervised(f"the script is larger than {MAX_SCRIPT_BYTES // 1024} KiB")
    return data


def request_of(verb: str, handed: Handed) -> dict[str, Any]:
    """What is asked of the daemon."""
    return {
        "verb": verb,
        "script": handed.text,
        "path": as_utf8(handed.path),
        "argv": [as_utf8(word) for word in handed.words],
        "environment": {as_utf8(name): as_utf8(value) for name, value in handed.environment.items()},
        "cwd": as_utf8(handed.cwd),
        **describe_shell(handed.inherited),
    }


def as_utf8(text: str, encoding: str = sys.getfilesystemencoding()) -> str:
    """A word, a name or a value of the shell as the daemon, which speaks UTF-8, would read its bytes."""
    return text.encode(encoding, "surrogateescape").decode("utf-8", "surrogateescape")


def describe_shell(shell: Inherited) -> dict[str, Any]:
    """The part of a request that says what jobs are to inherit."""
    return {"umask": shell.umask, "limits": {limit.name: limit.value for limit in shell.limits}}


def _hand_on(words: tuple[str, ...], settings: Settings) -> int:
    """What only sbatch can answer, sbatch answers."""
    env = {**os.environ, **({"SLURM_CONF": str(settings.slurm.conf)} if settings.slurm.conf else {})}
    sys.stdout.flush()
    return subprocess.run(["sbatch", *words], env=env, check=False).returncode


# ---------------------------------------------------------------- submitting


def submit(settings: Settings, request: dict[str, Any], script: Script, *, wait_s: float = _WAIT_S) -> int:
    """Hand it in, wait for its job, and say what sbatch says. The exit code."""
    wanted = script.wanted
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    is_made = make_root(script.spec.root)
    try:
        reply = ask(settings.control.socket, request, start_hint=start_hint())
    except DaemonSilent:
        raise
    except DaemonDown as error:
        remove_root(script.spec.root, is_made=is_made)
        message = f"{error}. Nothing was submitted; plain sbatch would run it unsupervised"
        raise CommandError(message, EXIT_DAEMON_DOWN) from None
    except BaseException:
        remove_root(script.spec.root, is_made=is_made)
        raise
    tell_notes([str(note) for note in reply.get("notes", ())])
    run = str(reply.get("run"))
    try:
        report = _await_job(settings, run, wait_s)
    except KeyboardInterrupt:
        tell_notes([f"accepted as run {run}: `supervisor stop {run}` takes it back"])
        raise
    if report.get("end") == "refused" or (report.get("job_id") is None and report["state"] in _OVER):
        return _tell_refused(report)
    if report.get("job_id") is None:
        why = f" ({report['reason']})" if report.get("reason") else ""
        tell_notes([f"accepted as run {run}, which has no job yet{why}; follow it with `supervisor status {run}`"])
        return EXIT_NO_JOB_YET
    _tell_submitted(report, run, wanted)
    return _await_end(settings, run) if wanted.is_wait else 0


def make_root(root: Path) -> bool:
    """The folder that holds the run's directory; True when it was made now."""
    try:
        root.mkdir()
    except FileExistsError:
        if root.is_dir() and os.access(root, os.W_OK | os.X_OK):
            return False
        raise CommandError(f"{root}: not a folder that you can write to; {_ROOT_HINT}", EXIT_BAD_INPUT) from None
    except OSError as error:
        raise CommandError(f"{root}: {error.strerror or error}; {_ROOT_HINT}", EXIT_BAD_INPUT) from None
    return True


_ROOT_HINT = "give --supervise-root=DIR, a folder that the nodes see too"


def remove_root(root: Path, *, is_made: bool) -> None:
    """Take the folder away again that was made for a run that was refused."""
    if is_made:
        with suppress(OSError):
            root.rmdir()


def tell_notes(notes: list[str]) -> None:
    """What only the supervisor says: on standard error, so that scripts read sbatch's answer as before."""
    for note in notes:
        click.echo(f"supervisor: {note}", err=True)


def _await_job(settings: Settings, run: str, wait_s: float) -> dict[str, Any]:
    """What has become of the first submission, at the latest after the wait."""
    until, pause_s = time.monotonic() + wait_s, 0.05
    report: dict[str, Any] = {"state": "active"}
    while time.monotonic() < until:
        with suppress(DaemonDown):  # it has the run: another daemon goes on with it
            report = ask(settings.control.socket, {"verb": "job", "run": run})
        if report.get("job_id") is not None or report["state"] in _OVER:
            break
        time.sleep(pause_s)
        pause_s = min(_POLL_MAX_S, pause_s * 1.5)
    return report


def _tell_refused(report: dict[str, Any]) -> int:
    text = str(report.get("outcome") or "") if report.get("end") == "refused" else ""
    if not text:
        raise CommandError(str(report.get("reason") or "the run did not start"), EXIT_FAILED)
    click.echo(text.rstrip("\n"), err=True)
    return INVALID_OPTION_EXIT if report.get("exit_code") == INVALID_OPTION_EXIT else 1


def _tell_submitted(report: dict[str, Any], run: str, wanted: Effective) -> None:
    says = str(report.get("outcome") or "").partition(_SAYS)[2]
    if says:
        click.echo(says.rstrip("\n"), err=True)
    if not wanted.is_quiet:
        tell_notes([f"supervised as run {run}; `supervisor status {run}` shows how it goes"])
    text = render_submitted(int(report["job_id"]), is_parsable=wanted.is_parsable, is_quiet=wanted.is_quiet)
    click.echo(text, nl=False)
    sys.stdout.flush()


def _await_end(settings: Settings, run: str) -> int:
    """As sbatch --wait: until all is over; the exit code of the last job. A daemon that is down is waited for."""
    while True:
        with suppress(DaemonDown):
            report = ask(settings.control.socket, {"verb": "job", "run": run})
            if report["state"] in _OVER:
                break
        time.sleep(_POLL_OVER_S)
    if report["state"] == "finished":
        return int(report.get("exit_code") or 0)
    tell_notes([f"run {run} is {report['state']}: {report.get('reason')}"])
    return int(report.get("exit_code") or 1)


# ---------------------------------------------------------------- dry run


def _tell_dry_run(
    settings: Settings, handed: Handed, script: Script, surroundings: tuple[str, ...], *, as_json: bool
) -> int:
    notes, run_name, job_name = list(script.notes), script.spec.name, script.script.job_name
    try:
        reply = ask(settings.control.socket, {**request_of("sbatch", handed), "dry_run": True}, start_hint=start_hint())
        notes, run_name, job_name = list(reply.get("notes", ())), str(reply["run"]), str(reply.get("job_name"))
    except DaemonDown as error:
        notes.append(f"name and rights not checked: {error}")
    notes = [*surroundings, *notes]
    argv, supervision = (
        _first_argv(script, run_name, job_name),
        describe_supervision(replace(script.spec, name=run_name)),
    )
    run_dir = str(script.spec.root / run_name)
    if as_json:
        report = {"ok": True, "dry_run": True, "run": run_name, "run_dir": run_dir, "argv": argv, "notes": notes}
        click.echo(json.dumps({**report, "supervision": supervision}, indent=2))
        return 0
    tell_notes(notes)
    click.echo(f"dry run: would make {run_dir} and submit, as run {run_name},\n{shlex.join(argv)}")
    click.echo(render_supervision(supervision))
    return 0


def describe_supervision(spec: RunSpec) -> dict[str, Any]:
    """The settings of supervision that apply, given or by default, under the names of the options. No pattern: null."""
    from supervisor.layouts.registry import pattern_of  # and what it needs; a submission does not

    saves = spec.checkpoint
    return {
        "min-nodes": spec.nodes.min,
        "max-nodes": spec.nodes.max,
        "multiple-of": spec.nodes.multiple_of,
        "elastic": {True: "yes", False: "no", None: "as checkpoints tell"}[spec.nodes.elastic],
        "checkpoint-dir": str(saves.directory or spec.run_dir / "checkpoints"),
        "layout": saves.layout,
        "progress-pattern": spec.progress.pattern or pattern_of(saves.layout) or None,
        "stall-s": spec.progress.step_max_s,
        "max-restarts": spec.restart.max_without_progress,
        "max-node-failures": spec.restart.max_node_failures,
        "backoff-s": spec.restart.backoff_s,
        "queue-ahead-s": spec.restart.queue_ahead_s,
        "warn-s": spec.slurm.warn_before_limit_s,
    }


def render_supervision(supervision: Mapping[str, Any]) -> str:
    """The same for people, one a line."""
    width = max(map(len, supervision))
    lines = (f"  {name:{width}}  {'none' if value is None else value}" for name, value in supervision.items())
    return "\n".join(["supervised with", *lines])


def _first_argv(script: Script, run_name: str, job_name: str) -> list[str]:
    spec = replace(script.spec, name=run_name)
    run = Run(spec=spec, script=replace(script.script, job_name=job_name))
    attempt = Attempt(run=run_name, number=1, token=f"sup:{run_name}:1", nodes_wanted=spec.nodes.max, planned_at=EPOCH)
    batch = Path(script.script.submit_dir, script.script.path)
    request = render_submission(run, attempt, batch=batch, environment={}, identity=None, is_first=True)
    return list(sbatch_argv(request))
