"""How a job was submitted, as far as Slurm tells: the options, the script and the arguments of its sbatch line. Pure.

Slurm keeps a line of words joined by blanks, and not where a word ends: `train.sh "a b"` and `train.sh a b` are the
same line. So options are taken from a line only where they agree with the job, and arguments are certain only where no
other words give the same line: none, or one.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from slurm.commands import sacct_delimiter
from slurm.sbatch_line import BadSubmission, CommandLine, effective, parse_command_line
from slurm.types import JobDescription

# Up to here Command holds the arguments (seen on 22.05); later it is the script alone (seen on 24.11 and 25.11).
_LAST_WITH_ARGUMENTS = (22, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedAs:
    """What is known of a job's sbatch line.

    `options`: canonical, of the command line alone; None: no line is known, or its options can't be told apart.
    `script`: as Slurm names it; empty: from standard input or --wrap. `arguments`: None when Slurm does not tell them;
    otherwise one reading, and the only one where `is_certain`.
    """

    options: tuple[str, ...] | None
    script: str
    arguments: tuple[str, ...] | None
    is_certain: bool


def read_submitted(job: JobDescription, *, release: tuple[int, int] | None) -> SubmittedAs:
    """`release`: the controller's (year, month); None: not known, and the newer reading counts."""
    line = _parse(job.submit_line)
    if not job.command:
        is_own = line is not None and line.script is None and _agrees(line, job)
        return SubmittedAs(
            options=line.options if line is not None and is_own else None, script="", arguments=(), is_certain=True
        )
    script, arguments = _split_command(job, is_old=release is not None and release <= _LAST_WITH_ARGUMENTS)
    options: tuple[str, ...] | None = None
    if line is not None and _is_same_file(line.script, script) and _agrees(line, job):
        options = line.options
        arguments = line.arguments if arguments is None else arguments
    if arguments is None:
        arguments = _words_behind(script, job.submit_line)
    return SubmittedAs(
        options=options,
        script=script,
        arguments=arguments,
        is_certain=arguments is not None and _can_be_no_other(arguments) and not _is_script_cut(job, script),
    )


def read_release(version: str) -> tuple[int, int] | None:
    """(year, month) of a version such as "22.05.8"."""
    found = re.match(r"([0-9]{2})\.([0-9]{2})(?![0-9])", version)
    return (int(found[1]), int(found[2])) if found else None


def parse_submit_line(text: str, *, mark: str, job: JobDescription) -> str:
    """The submit line that `sacct` printed for `slurm.commands.submit_line_argv`; empty: none, or of another job.

    Job ids come round again, and accounting may not have heard of the new job yet.
    """
    values = text.split(sacct_delimiter(mark))
    return values[2] if len(values) == 4 and values[:2] == [job.user, job.name] else ""


def _split_command(job: JobDescription, *, is_old: bool) -> tuple[str, tuple[str, ...] | None]:
    """(script, arguments) of Command; None: it holds none of them."""
    if not is_old:
        return job.command, None
    script, *arguments = job.command.split(" ")
    return script, tuple(arguments)


def _parse(text: str) -> CommandLine | None:
    """A submit line; None: there is none, or it can't be one of sbatch's as it stands."""
    words = text.split(" ")[1:]
    if not text:
        return None
    try:
        line = parse_command_line(words)
        effective(line)
    except BadSubmission:
        return None
    return None if line.is_het else line


def _agrees(line: CommandLine, job: JobDescription) -> bool:
    """A value with a blank in it shifts what follows: what is read must be what the job has."""
    wanted = effective(line)
    if wanted.value("job-name") not in (None, job.name):
        return False
    if wanted.value("comment") not in (None, job.comment):
        return False
    return wanted.nodes is None or wanted.nodes.least <= job.nodes <= wanted.nodes.most


def _is_same_file(given: str | None, command: str) -> bool:
    return given is not None and posixpath.basename(given) == posixpath.basename(command)


def _words_behind(script: str, line: str) -> tuple[str, ...] | None:
    """What follows the script in a line whose options can't be read; None: not just one place for the script."""
    name = re.escape(posixpath.basename(script))
    places = list(re.finditer(rf"(?<=[ /]){name}(?= |$)", line))
    if len(places) != 1:
        return None
    rest = line[places[0].end() :]
    return tuple(rest[1:].split(" ")) if rest else ()


def _can_be_no_other(arguments: tuple[str, ...]) -> bool:
    return not arguments or (len(arguments) == 1 and arguments[0] != "")


def _is_script_cut(job: JobDescription, script: str) -> bool:
    """An old Command may have a blank in the script's path. Jobs are named after their script."""
    is_named_so = re.search(rf"/{re.escape(job.name)}(?: |$)", f"/{job.command}") is not None
    return is_named_so and posixpath.basename(script) != job.name
