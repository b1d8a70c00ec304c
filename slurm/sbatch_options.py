"""The options of sbatch, 22.05 to 26.05, and how it finds them in a list of words. Pure.

sbatch reads its command line and its `#SBATCH` lines with getopt_long: long names may be cut short while they are
unambiguous, short flags may be bundled, a value stands in the same word or in the next one, and the first word that is
no option ends the options. The result is canonical: one word `--name` or `--name=value` for each option, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

INVALID_OPTION_EXIT = 255  # sbatch's exit code for what it can't read; 1 for what it reads and refuses


class BadSubmission(ValueError):
    """What sbatch refuses before it asks Slurm: `stderr` is what sbatch prints then, `exit_code` how it ends."""

    def __init__(self, message: str, *, stderr: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.stderr = stderr or "".join(f"sbatch: error: {line}\n" for line in message.splitlines())


class Takes(StrEnum):
    """Whether an option has a value."""

    NOTHING = ""
    VALUE = "="
    PERHAPS = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionForm:
    """One option: its long name, its letter, whether it has a value."""

    name: str
    letter: str = ""
    takes: Takes = Takes.NOTHING
    is_everywhere: bool = True  # in all of these releases, without a plugin


# A letter or "-", the long name, and "=" for a value, "?" for one that may be left out.
_EVERYWHERE = """
A account= | - acctg-freq= | a array= | - batch= | - bb= | - bbf= | b begin= | D chdir= | - cluster-constraint=
M clusters= | - cluster= | - comment= | C constraint= | - container= | - contiguous | S core-spec=
- cores-per-socket= | - cpu-freq= | - cpus-per-gpu= | c cpus-per-task= | - deadline= | - delay-boot=
d dependency= | m distribution= | e error= | x exclude= | - exclusive? | - export= | - export-file=
B extra-node-info= | - get-user-env? | - gid= | - gpu-bind= | - gpu-freq= | G gpus= | - gpus-per-node=
- gpus-per-socket= | - gpus-per-task= | - gres= | - gres-flags= | h help | - hint= | H hold | - ignore-pbs
i input= | J job-name= | - kill-on-invalid-dep= | L licenses= | - mail-type= | - mail-user= | - mcs-label=
- mem= | - mem-bind= | - mem-per-cpu= | - mem-per-gpu= | - mincpus= | - network= | - nice? | k no-kill?
- no-requeue | F nodefile= | w nodelist= | N nodes= | n ntasks= | - ntasks-per-core= | - ntasks-per-gpu=
- ntasks-per-node= | - ntasks-per-socket= | - ntasks-per-tres= | - open-mode= | o output= | O overcommit
s oversubscribe | - parsable | p partition= | - prefer= | - priority= | - profile= | - propagate? | q qos=
Q quiet | - reboot | - requeue? | - reservation= | - signal= | - sockets-per-node= | - spread-job
- switches= | - tasks-per-node= | - test-only | - thread-spec= | - threads-per-core= | t time= | - time-min=
- tmp= | - uid= | - usage | - use-min-nodes | v verbose | V version | W wait | - wait-all-nodes= | - wckey=
- wrap=
"""
_IN_SOME_RELEASES = """
- power= | - autocomplete= | - consolidate-segments | - container-id= | - container-type= | - context=
- external | - extra= | - mem-update= | - oom-kill-step? | - resources= | - resv-ports? | - segment=
- spread-segments | - stepmgr | - tres-bind= | - tres-per-task=
"""
_OF_PYXIS = """
- container-image= | - container-mounts= | - container-workdir= | - container-name= | - container-save=
- container-mount-home | - no-container-mount-home | - container-remap-root | - no-container-remap-root
- container-entrypoint | - no-container-entrypoint | - container-entrypoint-log | - container-writable
- container-readonly | - container-env=
"""
_SAME_AS = {"tasks-per-node": "ntasks-per-node", "cluster": "clusters"}


def _read_table(text: str, *, is_everywhere: bool) -> tuple[OptionForm, ...]:
    forms = []
    for line in text.replace("\n", "|").split("|"):
        if line.strip():
            letter, word = line.split()
            name = word.rstrip("=?")
            forms.append(
                OptionForm(
                    name=name,
                    letter=letter.strip("-"),
                    takes=Takes(word[len(name) :]),
                    is_everywhere=is_everywhere,
                )
            )
    return tuple(forms)


OPTIONS = (
    *_read_table(_EVERYWHERE, is_everywhere=True),
    *_read_table(_IN_SOME_RELEASES, is_everywhere=False),
    *_read_table(_OF_PYXIS, is_everywhere=False),
)
_BY_NAME = {form.name: form for form in OPTIONS}
_BY_LETTER = {form.letter: form for form in OPTIONS if form.letter}

# Options that sbatch answers at once, without a look at the rest of the line.
QUESTIONS = frozenset({"help", "usage", "version", "autocomplete"})

REQUEUE = "--requeue"


def read_options(words: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The options that `words` begin with, canonical, and how many words they are.

    A question (`--help`) ends the reading, as it ends sbatch.

    Raises:
        BadSubmission: an option that sbatch does not know, cut too short, or without the value it needs. An unknown
            `--name=value` passes as it is: plugins of the site (SPANK) add options.
    """
    options: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return tuple(options), position + 1
        if not word.startswith("-") or word == "-":
            break
        following = words[position + 1] if position + 1 < len(words) else None
        found, is_next_used = _read_long(word, following) if word.startswith("--") else _read_short(word, following)
        options.extend(found)
        position += 2 if is_next_used else 1
        if any(name_of(option) in QUESTIONS for option in found):
            break
    return tuple(options), position


def name_of(option: str) -> str:
    """The long name of a canonical option."""
    return option[2:].partition("=")[0]


def value_of(option: str) -> str:
    """The value of a canonical option; empty without one."""
    return option.partition("=")[2]


def _read_long(word: str, following: str | None) -> tuple[list[str], bool]:
    name, equals, value = word[2:].partition("=")
    form = _find_long(name, word)
    if form is None:
        return [word], False
    written = f"--{_SAME_AS.get(form.name, form.name)}"
    if equals:
        if form.takes is Takes.NOTHING:
            raise _unreadable(f"option '--{form.name}' doesn't allow an argument")
        return [f"{written}={value}"], False
    if form.takes is not Takes.VALUE:
        return [written], False
    if following is None:
        raise _unreadable(f"option '--{form.name}' requires an argument")
    return [f"{written}={following}"], True


def _find_long(name: str, word: str) -> OptionForm | None:
    """The option that a name, cut short or not, stands for; None: one of a plugin, with its value."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    found = [form for form in OPTIONS if form.name.startswith(name)]
    # A name that only newer releases or a plugin make ambiguous: an sbatch without them takes it.
    found = [form for form in found if form.is_everywhere] or found
    if len({_SAME_AS.get(form.name, form.name) for form in found}) == 1:
        return found[0]
    if found:
        possible = " ".join(f"'--{form.name}'" for form in found)
        raise _unreadable(f"option '{word}' is ambiguous; possibilities: {possible}")
    if "=" in word and name:
        return None
    raise _unreadable(f"unrecognized option '{word}'")


def _read_short(word: str, following: str | None) -> tuple[list[str], bool]:
    found: list[str] = []
    for position, letter in enumerate(word[1:], start=2):
        form = _BY_LETTER.get(letter)
        if form is None:
            raise _unreadable(f"invalid option -- '{letter}'")
        rest = word[position:]
        if form.takes is Takes.NOTHING:
            found.append(f"--{form.name}")
            continue
        if rest:
            return [*found, f"--{form.name}={rest}"], False
        if form.takes is Takes.PERHAPS:
            return [*found, f"--{form.name}"], False
        if following is None:
            raise _unreadable(f"option requires an argument -- '{letter}'")
        return [*found, f"--{form.name}={following}"], True
    return found, False


def _unreadable(message: str) -> BadSubmission:
    stderr = f'sbatch: {message}\nTry "sbatch --help" for more information\n'
    return BadSubmission(message, stderr=stderr, exit_code=INVALID_OPTION_EXIT)
