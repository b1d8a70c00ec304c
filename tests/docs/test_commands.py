"""Every command that a page shows is one that `supervisor` has, with options that it takes."""

import re
import shlex
from pathlib import Path

import click
import pytest

from slurm.sbatch_line import BadSubmission, parse_command_line
from supervisor.cli.main import main as cli
from supervisor.cli.sbatch import PassingCommand
from supervisor.supervision import BadSupervision, take_options
from tests.docs.pages import PAGES, commands, name


def complaint(command_line: str) -> str | None:
    """What is wrong with a shown command: a word that is no command, or an option that it does not take."""
    words = shlex.split(command_line, comments=True)[1:]
    command: click.Command = cli
    context = click.Context(command, info_name="supervisor")
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        below = command.get_command(context, words[0])
        if below is None:
            return f"no command {words[0]}"
        command, words = below, words[1:]
        context = click.Context(command, info_name=command.name, parent=context)
    if isinstance(command, PassingCommand):  # takes sbatch's options
        return _misread(words)
    taken = {option for param in command.get_params(context) for option in [*param.opts, *param.secondary_opts]}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in taken]
    return f"{command.name} takes no {', '.join(unknown)}" if unknown else None


def _misread(words: list[str]) -> str | None:
    try:
        parse_command_line(take_options(words)[0])
    except (BadSubmission, BadSupervision) as error:
        return str(error)
    return None


def shown_commands(page: Path) -> list[str]:
    """The command lines of a page that call `supervisor`; optional parts in brackets count as given."""
    lines = [re.sub(r"[\[\]]", "", line) for line in commands(page.read_text())]
    return [line for line in lines if line.startswith("supervisor ") and "|" not in line]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    complaints = {line: complaint(line) for line in shown_commands(page)}
    assert {line: why for line, why in complaints.items() if why} == {}


def test_a_command_that_is_not_there_would_be_found() -> None:
    assert complaint("supervisor explode") == "no command explode"
    assert complaint("supervisor status --sideways") == "status takes no --sideways"
    assert complaint("supervisor status --json") is None
    assert "unrecognized option" in (complaint("supervisor sbatch --sideways x.sh") or "")
    assert "did you mean" in (complaint("supervisor sbatch --supervise-nmae=x x.sh") or "")
