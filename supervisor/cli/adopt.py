"""`supervisor adopt`: a job that is there already is supervised from now on."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from slurm.errors import SlurmRefused
from slurm.inherited import AS_THE_SERVICE
from slurm.sbatch_line import BadSubmission
from slurm.submitted import SubmittedAs, read_release, read_submitted
from slurm.types import JobDescription
from supervisor.cli.main import EXIT_BAD_INPUT, EXIT_DAEMON_DOWN, EXIT_REFUSED, CommandError
from supervisor.cli.nodes import slurm_client
from supervisor.cli.options import load_chosen, start_hint
from supervisor.cli.sbatch import (
    PassingCommand,
    check_checkpoints,
    describe_supervision,
    look_around,
    make_root,
    read_handed_in,
    remove_root,
    render_supervision,
    request_of,
    tell_notes,
)
from supervisor.config import Settings
from supervisor.control import DaemonDown, DaemonSilent, Refused, ask
from supervisor.scripts import NotSupervised, Resubmission, describe_resubmission, read_script
from supervisor.supervision import PREFIX, BadSupervision, render_help, take_options

_SLURM_TIMEOUT_S = 10.0
_ANSWER_WAIT_S = 30.0
_AGAIN_S = 0.2


class _AdoptCommand(PassingCommand):
    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return ["[--supervise-...]", "JOBID", "[-- [ARGUMENTS]]"]


@click.command(cls=_AdoptCommand, epilog=f"\b\nSupervision options:\n{render_help()}")
@click.pass_context
def adopt(context: click.Context, *, words: tuple[str, ...]) -> int:
    """Supervise a job that runs or waits already.

    The job goes on as it is. When it ends before its work is done, its script is submitted again, with the options
    that Slurm knows of it and with the environment of the shell that this command runs in. Slurm's own requeueing is
    turned off for it, and its comment is replaced.

    Slurm keeps the line that submitted a job without the ends of its words, and before 25.11 only in accounting. Where
    the script's arguments can't be known for sure, nothing is adopted until they are given behind "--", which alone
    means none.

    Exit codes: 0 adopted; 2 no such job, or one that can't be supervised; 3 the daemon is not running; 4 it is
    another's, has ended, or is supervised already; 5 it may have been adopted: look with `supervisor status`.
    """
    job_id, given, arguments = _read_words(words, context)
    if job_id is None:
        click.echo(context.get_help())
        return 0
    settings = load_chosen(context, Path(given["config"]) if "config" in given else None)
    described, text, submitted = _fetch(settings, job_id)
    options = [f"{PREFIX}{name}" + (f"={value}" if value else "") for name, value in given.items()]
    try:
        arguments = choose_arguments(described, submitted, arguments)
        again = describe_resubmission(described, text, submitted, arguments)
        handed = read_handed_in((*options, *again.words), text=text, path=again.script or "-")
        handed = replace(handed, cwd=described.work_dir, environment=_choose_environment(described))
        if described.uid != os.getuid():
            handed = replace(handed, inherited=AS_THE_SERVICE)
        script = read_script(handed)
    except (BadSubmission, NotSupervised) as error:
        raise CommandError(f"job {job_id}: {' '.join(str(error).split())}", EXIT_BAD_INPUT) from None
    check_checkpoints(script)
    request = {**request_of("adopt", handed), "job_id": job_id, "dry_run": "dry-run" in given}
    is_made = "dry-run" not in given and described.uid == os.getuid() and make_root(script.spec.root)
    try:
        reply = _ask(settings, request)
    except DaemonSilent:  # it may have accepted
        raise
    except BaseException:
        remove_root(script.spec.root, is_made=is_made)
        raise
    seen = look_around(script, os.environ) if described.uid == os.getuid() else ()
    notes = [_describe_again(again, submitted), _describe_environment(described), *seen]
    notes += map(str, reply.get("notes", ()))
    spec = replace(script.spec, name=str(reply.get("run")))
    supervision = describe_supervision(spec) if "dry-run" in given else {}
    _tell(reply, notes, again, supervision, as_json="json" in given)
    return 0


def _read_words(
    words: tuple[str, ...], context: click.Context
) -> tuple[int | None, Mapping[str, str], tuple[str, ...] | None]:
    """(job id, supervision options, arguments); no id when help is asked for, and None where no "--" stands."""
    arguments = None
    if "--" in words:
        place = words.index("--")
        words, arguments = words[:place], words[place + 1 :]
    if {"--help", "-h"} & set(words):
        return None, {}, None
    jobs = [word for word in words if not word.startswith(PREFIX)]
    try:
        _, given = take_options([word for word in words if word.startswith(PREFIX)])
    except (BadSupervision, BadSubmission) as error:
        raise CommandError(str(error), EXIT_BAD_INPUT) from None
    if len(jobs) != 1:
        raise click.UsageError("one job id is needed", ctx=context)
    if "_" in jobs[0] or "+" in jobs[0] or "." in jobs[0]:
        kind = "an element of an array or of a heterogeneous job, or a step"
        raise CommandError(f'"{jobs[0]}" is {kind}: only whole jobs can be adopted', EXIT_BAD_INPUT)
    if not jobs[0].isascii() or not jobs[0].isdecimal() or len(jobs[0]) > 10 or int(jobs[0]) == 0:
        raise CommandError(f'"{jobs[0][:40]}" is not a job id', EXIT_BAD_INPUT)
    return int(jobs[0]), given, arguments


def _fetch(settings: Settings, job_id: int) -> tuple[JobDescription, str, SubmittedAs]:
    """What Slurm tells the person about the job, its script, and how it was submitted."""
    client = slurm_client(settings, timeout_s=_SLURM_TIMEOUT_S)
    try:
        described = client.describe_job(job_id)
    except SlurmRefused:
        raise CommandError(f"Slurm knows no job {job_id}", EXIT_BAD_INPUT) from None
    why_not = _why_not(described)
    if why_not:
        raise CommandError(f"job {job_id} {why_not}", EXIT_BAD_INPUT)
    if described.state is not None and described.state.value in _ENDED:
        message = f"job {job_id} has ended already ({described.raw_state}); `supervisor sbatch` submits anew"
        raise CommandError(message, EXIT_REFUSED)
    try:
        text = client.fetch_script(job_id)
    except SlurmRefused as error:
        if described.uid != os.getuid():
            raise CommandError(f"job {job_id} belongs to {described.user}", EXIT_REFUSED) from None
        raise CommandError(f"job {job_id}: Slurm does not give its script: {error}", EXIT_BAD_INPUT) from None
    return described, text, read_submitted(described, release=read_release(client.fetch_cluster().version))


_ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"}) | {
    "OUT_OF_MEMORY"
}


def _why_not(described: JobDescription) -> str:
    if described.is_array:
        return "belongs to a job array: only whole jobs can be adopted"
    if described.is_het:
        return "belongs to a heterogeneous job: only whole jobs can be adopted"
    if not described.is_batch:
        return "is interactive (salloc or srun): it has no script to submit again"
    return ""


def choose_arguments(
    described: JobDescription, submitted: SubmittedAs, given: tuple[str, ...] | None
) -> tuple[str, ...]:
    """The script's arguments: the person's word, else Slurm's where it can mean nothing else."""
    job_id, told = described.job_id, submitted.arguments
    if given is not None:
        if given and not submitted.script:
            message = f"job {job_id} was made of --wrap or of standard input: it takes no arguments"
            raise CommandError(message, EXIT_BAD_INPUT)
        return given
    if told is not None and submitted.is_certain:
        return told
    if told is None:
        why = "Slurm does not tell the arguments of its script"
        way = f"`supervisor adopt {job_id} -- ARGUMENTS`, or `supervisor adopt {job_id} --` if it has none"
    else:
        why = f"Slurm does not tell which blanks part the arguments of its script: {' '.join(told)!r}"
        words = [word for word in told if word]
        example = f"; quote what belongs together, e.g. -- {words[0]} {' '.join(words[1:])!r}" if len(words) > 2 else ""
        example = example or f"; quote what belongs together, e.g. -- {' '.join(words)!r}"
        way = f"`supervisor adopt {job_id} -- {shlex.join(words)}` if each of them does{example}"
    raise CommandError(f"job {job_id}: {why}. Give them: {way}", EXIT_BAD_INPUT)


def _describe_again(again: Resubmission, submitted: SubmittedAs) -> str:
    options = "its own options" if submitted.options is not None else "the options that Slurm tells of the job"
    script = () if again.script else ("< its script",)
    return " ".join([f"submitted again with {options}: sbatch", shlex.join(again.words), *script])


def _choose_environment(described: JobDescription) -> dict[str, str]:
    """This shell's, for one's own job; for another's job nothing of it: it may hold secrets."""
    if described.uid == os.getuid():
        return dict(os.environ)
    try:
        home = pwd.getpwuid(described.uid).pw_dir
    except KeyError:
        home = "/"
    return {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": home, "USER": described.user, "LOGNAME": described.user}


def _describe_environment(described: JobDescription) -> str:
    kept = "the environment of this shell" if described.uid == os.getuid() else "a bare environment"
    return f"{kept} is kept for its resubmissions: Slurm does not tell the job's own"


def _ask(settings: Settings, request: dict[str, Any]) -> dict[str, Any]:
    """The daemon's answer, once it has one of Slurm that is new enough."""
    since = time.monotonic()
    until = since + _ANSWER_WAIT_S
    while True:
        waited = {"waited_s": time.monotonic() - since}
        try:
            return ask(settings.control.socket, {**request, **waited}, start_hint=start_hint())
        except DaemonSilent:
            raise
        except DaemonDown as error:
            raise CommandError(f"{error}. Nothing was changed: the job goes on as it is", EXIT_DAEMON_DOWN) from None
        except Refused as error:
            if error.code != "look_again" or time.monotonic() > until:
                raise
        time.sleep(_AGAIN_S)


def _tell(
    reply: dict[str, Any], notes: list[str], again: Resubmission, supervision: dict[str, Any], *, as_json: bool
) -> None:
    if as_json:
        parts = {"options": list(again.options), "script": again.script, "arguments": list(again.arguments)}
        more = {"supervision": supervision} if supervision else {}
        click.echo(json.dumps({**reply, "notes": notes, "resubmission": parts, **more}, indent=2))
        return
    tell_notes(notes)
    if supervision:
        click.echo(f"{reply.get('message')}\n{render_supervision(supervision)}")
        return
    click.echo(f"{reply.get('message')}; follow it with `supervisor status {reply.get('run')}`")
