"""What a person asks of sbatch: command line, SBATCH_* variables and `#SBATCH` lines, read as sbatch reads them. Pure.

    command_line = parse_command_line(sys.argv[1:])
    directives = parse_directives(check_text(data))
    wanted = effective(command_line, read_variables(os.environ), directives)
    refusal(wanted)  # a sentence, or None

Of an option given several times the last counts: script, then variables, then command line. What sbatch refuses
before it asks Slurm raises `BadSubmission` with sbatch's own words and exit code; what only this service can't do is a
sentence of `refusal`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm.hostlist import HostlistUnreadable, expand_nodes
from slurm.sbatch_options import (
    INVALID_OPTION_EXIT,
    QUESTIONS,
    BadSubmission,
    name_of,
    read_options,
    value_of,
)

__all__ = [
    "OF_THE_CALL",
    "BadSubmission",
    "CommandLine",
    "Directives",
    "Effective",
    "NodeCount",
    "check_text",
    "effective",
    "merge_export",
    "parse_command_line",
    "parse_directives",
    "parse_node_count",
    "read_variables",
    "refusal",
    "render_log_path",
    "render_submitted",
    "wrap_text",
]

MAX_SCRIPT_BYTES = 4 * 1024 * 1024  # slurmctld's default (SchedulerParameters=max_script_size)
DEFAULT_OUTPUT = "slurm-%j.out"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """sbatch's words: canonical options, the script as it was given, its arguments."""

    options: tuple[str, ...] = ()
    script: str | None = None  # None: from standard input, or --wrap
    arguments: tuple[str, ...] = ()
    is_het: bool = False  # several components, separated by ":"


@dataclass(frozen=True, slots=True, kw_only=True)
class Directives:
    """Options of a script's `#SBATCH` lines, canonical, and the words of its `#SUPERVISE` lines."""

    options: tuple[str, ...] = ()
    supervise: tuple[str, ...] = ()
    is_het: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """What --nodes asks for; `sizes` where it lists them (23.02 and later), else every count between is meant."""

    least: int
    most: int
    sizes: tuple[int, ...] = ()


# ---------------------------------------------------------------- the three sources


def parse_command_line(words: Sequence[str]) -> CommandLine:
    """What stands after `sbatch`.

    Raises:
        BadSubmission: what sbatch itself can't read.
    """
    options, used = read_options(words)
    rest = words[used:]
    if any(name_of(option) in QUESTIONS for option in options):
        return CommandLine(options=options)
    if rest and rest[0] == ":":
        return CommandLine(options=options, is_het=True)
    return CommandLine(options=options, script=rest[0] if rest else None, arguments=tuple(rest[1:]))


_VARIABLES = """
IGNORE_PBS DEBUG:verbose ACCOUNT ARRAY_INX:array ACCTG_FREQ BATCH BURST_BUFFER:bb CLUSTER_CONSTRAINT CLUSTERS
CONSOLIDATE_SEGMENTS CONTAINER CONTAINER_ID CONSTRAINT CORE_SPEC CPU_FREQ_REQ:cpu-freq CPUS_PER_GPU DELAY_BOOT
DISTRIBUTION EXCLUSIVE EXPORT GET_USER_ENV GRES GRES_FLAGS GPUS GPU_BIND GPU_FREQ GPUS_PER_NODE GPUS_PER_SOCKET
GPUS_PER_TASK HINT JOB_NAME MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE:mem NETWORK NO_KILL NO_REQUEUE OPEN_MODE
OVERCOMMIT PARTITION POWER PROFILE QOS REQUEUE RESERVATION SEGMENT_SIZE:segment SIGNAL SPREAD_JOB SPREAD_SEGMENTS
THREAD_SPEC THREADS_PER_CORE TIMELIMIT:time TRES_BIND TRES_PER_TASK USE_MIN_NODES WAIT WAIT_ALL_NODES WCKEY ERROR INPUT
OUTPUT
"""
_ALSO = {"SLURM_CLUSTERS": "clusters", "SLURM_HINT": "hint"}  # an SBATCH_ variable of the same meaning wins
_FLAGS = frozenset(
    {"ignore-pbs", "verbose", "consolidate-segments", "no-requeue", "overcommit", "spread-job", "spread-segments"}
    | {"use-min-nodes", "wait", "requeue"}
)


def _name_variables() -> dict[str, str]:
    named = {}
    for word in _VARIABLES.split():
        variable, _, option = word.partition(":")
        named[f"SBATCH_{variable}"] = option or variable.lower().replace("_", "-")
    return named


_OPTION_OF_VARIABLE = {**_ALSO, **_name_variables()}


def read_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """The input variables of sbatch in an environment, as canonical options; other variables are ignored.

    sbatch turns a flag off by a variable of another value than empty, `yes` or a number; here such a flag is left out.
    """
    options = [
        option
        for variable, name in _OPTION_OF_VARIABLE.items()
        if variable in env and (option := _render_variable(name, env[variable]))
    ]
    if "SBATCH_REQ_SWITCH" in env:  # two variables for one option
        wait = f"@{env['SBATCH_WAIT4SWITCH']}" if env.get("SBATCH_WAIT4SWITCH") else ""
        options.append(f"--switches={env['SBATCH_REQ_SWITCH']}{wait}")
    return tuple(options)


def _render_variable(name: str, value: str) -> str | None:
    if name == "requeue" and value == "expedite":  # 25.11 and later
        return "--requeue=expedite"
    if name not in _FLAGS:
        return f"--{name}={value}"
    is_on = value == "" or value.lower() == "yes" or (_is_integer(value) and int(value) != 0)
    return f"--{name}" if is_on else None


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"\s*[+-]?[0-9]{1,18}", text) is not None


_BLANKS = " \t\n\v\f\r"
_HET = re.compile(r"(?:packjob|hetjob)(?=[ \t\n\v\f\r]|$)", re.IGNORECASE)
# sbatch looks for these on its command line alone.
_ONLY_ON_THE_COMMAND_LINE = frozenset({"quiet", "verbose", "wrap", "help", "usage", "version", "autocomplete"})


def parse_directives(text: str, *, name: str = "script") -> Directives:
    """Options of a batch script's `#SBATCH` lines, and words of its `#SUPERVISE` lines, up to the first command.

    `name`: the script's base name, for the words of an error.

    Raises:
        BadSubmission: as sbatch says it: an unmatched quote, an unknown option, a word that is no option.
    """
    words: list[str] = []
    supervise: list[str] = []
    is_het = False
    for number, line in enumerate(text.split("\n"), start=1):
        marked = _after_mark(line)
        if marked is None:
            if line.strip(_BLANKS) and not line.lstrip(_BLANKS).startswith("#"):
                break
            continue
        mark, rest = marked[0], marked[1].lstrip(_BLANKS)
        if mark == "#SUPERVISE":
            supervise.extend(_split_line(rest, name, number))
        elif _HET.match(rest):
            is_het = True  # what follows is of another component
        elif not is_het:
            words.extend(_split_line(rest, name, number))
    options, used = read_options(words)
    if used < len(words):
        message = f"Invalid directive found in batch script: {words[used]}"
        raise BadSubmission(message, exit_code=INVALID_OPTION_EXIT)
    kept = tuple(option for option in options if name_of(option) not in _ONLY_ON_THE_COMMAND_LINE)
    return Directives(options=kept, supervise=tuple(supervise), is_het=is_het)


def _after_mark(line: str) -> tuple[str, str] | None:
    for mark in ("#SBATCH", "#SLURM"):  # the second is an old spelling, which sbatch takes with a complaint
        if line.startswith(mark):
            return mark, line[len(mark) :]
    mark = "#SUPERVISE"
    if line.startswith(mark) and (line == mark or line[len(mark)] in _BLANKS):
        return mark, line[len(mark) :]
    return None


def _split_line(line: str, name: str, number: int) -> list[str]:
    """Words of one line by sbatch's own rules: they are not the shell's."""
    words: list[str] = []
    while True:
        start = line.lstrip(_BLANKS)
        if _HET.match(start):
            return words
        if start.startswith(":"):
            raise _broken_line(f"{name}: line {number}: Unexpected `:` in [{line}]")
        word, rest = _take_word(line, start, name, number)
        if word is None:  # the end, a comment, or an empty pair of quotes: the rest of the line is not read
            return words
        words.append(word)
        line = rest


def _take_word(line: str, start: str, name: str, number: int) -> tuple[str | None, str]:
    word: list[str] = []
    quote = ""
    position = 0
    is_escaped = False
    while position < len(start) and (quote or start[position] not in _BLANKS):
        character = start[position]
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            if start[position + 1 : position + 2] == " ":  # 25.11; to 22.05 the blank still ends the word
                word.append(" ")
                position += 2
            else:
                is_escaped = True
                position += 1
            continue
        elif quote:
            if character == quote:
                quote = ""
                position += 1
                continue
        elif character in "\"'":
            quote = character
            position += 1
            continue
        elif character == "#":
            break
        word.append(character)
        position += 1
    if quote:
        raise _broken_line(f"{name}: line {number}: Unmatched `{quote}` in [{line}]")
    return ("".join(word) if word else None), start[position:]


def _broken_line(message: str) -> BadSubmission:
    return BadSubmission(message, stderr=f"sbatch: fatal: {message}\n")


# ---------------------------------------------------------------- what counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """All three sources together. Texts are as they were given: Slurm judges what they mean."""

    script_options: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # of the variables, then of the command line
    script: str | None = None
    arguments: tuple[str, ...] = ()
    is_het: bool = False

    def value(self, *names: str) -> str | None:
        """The value that counts of an option with one of these names: the last; None: not given."""
        given = (*self.script_options, *self.options)
        return next((value_of(option) for option in reversed(given) if name_of(option) in names), None)

    def has(self, *names: str) -> bool:
        """True when an option of one of these names is given anywhere."""
        return self.value(*names) is not None

    @property
    def question(self) -> str | None:
        """`help`, `usage`, `version` or `autocomplete`, which sbatch answers at once."""
        return next((name_of(option) for option in self.options if name_of(option) in QUESTIONS), None)

    @property
    def submit_options(self) -> tuple[str, ...]:
        """`options` without those that are about this one call of sbatch rather than about the job."""
        return tuple(option for option in self.options if name_of(option) not in OF_THE_CALL)

    @property
    def is_wrap(self) -> bool:
        return self.wrap is not None

    @property
    def wrap(self) -> str | None:
        """The command of --wrap, which stands for a script."""
        return self.value("wrap")

    @property
    def job_name(self) -> str:
        """As sbatch names the job when nobody does: after the script, "wrap", or "sbatch" for standard input."""
        given = self.value("job-name")
        if given is not None:
            return given
        if self.is_wrap:
            return "wrap"
        return posixpath.basename(self.script) if self.script else "sbatch"

    @property
    def nodes(self) -> NodeCount | None:
        """None when no number of nodes is given."""
        given = self.value("nodes")
        return None if given is None else parse_node_count(given)

    @property
    def ntasks(self) -> str | None:
        return self.value("ntasks")

    @property
    def output(self) -> str:
        """Pattern of the standard output's file, perhaps relative to the working directory."""
        return self.value("output") or DEFAULT_OUTPUT

    @property
    def error(self) -> str | None:
        """Pattern of the standard error's file; None: it goes where the output goes."""
        return self.value("error")

    @property
    def chdir(self) -> str | None:
        return self.value("chdir")

    @property
    def time_limit(self) -> str | None:
        return self.value("time")

    @property
    def signal(self) -> str | None:
        return self.value("signal")

    @property
    def dependency(self) -> str | None:
        return self.value("dependency")

    @property
    def export(self) -> str | None:
        return self.value("export")

    @property
    def exclude(self) -> str | None:
        """A host list, or with a `/` in it the name of a file that holds one."""
        return self.value("exclude")

    @property
    def nodelist(self) -> str | None:
        """As `exclude`."""
        return self.value("nodelist")

    @property
    def partition(self) -> str | None:
        return self.value("partition")

    @property
    def account(self) -> str | None:
        return self.value("account")

    @property
    def qos(self) -> str | None:
        return self.value("qos")

    @property
    def gpus_per_node(self) -> str | None:
        return self.value("gpus-per-node")

    @property
    def array(self) -> str | None:
        return self.value("array")

    @property
    def clusters(self) -> str | None:
        return self.value("clusters")

    @property
    def is_requeue_wanted(self) -> bool | None:
        """Whether Slurm may requeue the job; None: as the cluster's configuration says."""
        given = (*self.script_options, *self.options)
        said = [name_of(option) for option in given if name_of(option) in ("requeue", "no-requeue")]
        return said[-1] == "requeue" if said else None

    @property
    def is_wait(self) -> bool:
        return self.has("wait")

    @property
    def is_parsable(self) -> bool:
        return self.has("parsable")

    @property
    def is_quiet(self) -> bool:
        return self.has("quiet")

    @property
    def is_verbose(self) -> bool:
        return self.has("verbose")


# About one call of sbatch rather than about the job.
OF_THE_CALL = frozenset({"wait", "quiet", "verbose", "parsable", "test-only", "wrap"}) | QUESTIONS


def effective(
    command_line: CommandLine, variables: tuple[str, ...] = (), directives: Directives | None = None
) -> Effective:
    """The three sources put together, checked as sbatch checks them before it asks Slurm.

    Raises:
        BadSubmission: a script beside --wrap, a number of nodes that is none, --verbose beside --quiet.
    """
    directives = directives or Directives()
    found = Effective(
        script_options=directives.options,
        options=(*variables, *command_line.options),
        script=command_line.script,
        arguments=command_line.arguments,
        is_het=command_line.is_het or directives.is_het,
    )
    if found.is_wrap and found.script is not None:
        raise BadSubmission("Script arguments not permitted with --wrap option")
    for option in (*found.script_options, *found.options):
        if name_of(option) == "nodes":
            _check_node_count(value_of(option))
    if found.is_quiet and found.is_verbose:
        raise BadSubmission("don't specify both --verbose (-v) and --quiet (-Q)")
    return found


_SIZE = re.compile(r"([0-9]{1,18})([kK]?)([mM]?)\s*")
_LISTED = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_MAX_LISTED = 65_536  # nodes of one cluster
_INT_MAX = 2**31 - 1


def parse_node_count(text: str) -> NodeCount:
    """`4`, `2-4`, and from 23.02 on `1-15:4` and `2,4,8`; `1k` is 1024.

    Raises:
        BadSubmission: in sbatch's words.
    """
    if _is_list(text):
        return _parse_sizes(text)
    least, dash, most = text.partition("-")
    first = 1 if dash and not least.strip() else _parse_size(least)
    second = (_parse_size(most) if most.strip() else -1) if dash else first
    if second and second < first:
        message = f"Maximum node count {second} is less than minimum node count {first}"
        raise BadSubmission(message, exit_code=INVALID_OPTION_EXIT)
    return NodeCount(least=first, most=second or first)


def _parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip(_BLANKS))
    size = int(found[1]) * (1024 if found[2] else 1) * (1024**2 if found[3] else 1) if found else -1
    if not 0 <= size <= _INT_MAX:
        raise _no_count(text)
    return size


def _is_list(text: str) -> bool:
    return "," in text or ":" in text


def _check_node_count(text: str) -> None:
    """As `parse_node_count`, without its work: a script may have thousands of such lines, of which one counts."""
    if _is_list(text):
        _parse_ranges(text)
    else:
        parse_node_count(text)


def _parse_sizes(text: str) -> NodeCount:
    sizes: set[int] = set()
    for listed in _parse_ranges(text):
        sizes.update(listed)
    return NodeCount(least=min(sizes), most=max(sizes), sizes=tuple(sorted(sizes)))


def _parse_ranges(text: str) -> list[range]:
    ranges: list[range] = []
    for part in text.split(","):
        found = _LISTED.fullmatch(part.strip())
        if found is None:
            raise _no_count(text)
        first, last = int(found[1]), int(found[2] or found[1])
        step = int(found[3] or 1)
        if last < first or last > _MAX_LISTED or step < 1:
            raise _no_count(text)
        ranges.append(range(first, last + 1, step))
    if sum(map(len, ranges)) > _MAX_LISTED:
        raise _no_count(text)
    return ranges


def _no_count(text: str) -> BadSubmission:
    return BadSubmission(f'"{text}" is not a valid node count', exit_code=INVALID_OPTION_EXIT)


def _expand(hosts: str | None) -> tuple[str, ...]:
    """Names of a host list, each once; empty for a file of them, and for what is left to Slurm to judge."""
    if hosts is None or "/" in hosts:
        return ()
    try:
        return tuple(dict.fromkeys(expand_nodes(hosts)))
    except HostlistUnreadable:
        return ()


# ---------------------------------------------------------------- what can't be supervised


def refusal(wanted: Effective) -> str | None:
    """Why a submission that sbatch might take can't be supervised, as a sentence; None when it can."""
    if wanted.array is not None:
        return (
            f"job arrays are not supervised (--array={wanted.array}): a run is one job at a time; submit the elements "
            "as runs of their own, or use sbatch"
        )
    if wanted.is_het:
        return "heterogeneous jobs are not supervised: a run is one job; use sbatch"
    if wanted.clusters is not None:
        return (
            f"jobs of other clusters are not supervised (--clusters={wanted.clusters}): this service watches the "
            "cluster it runs on"
        )
    if wanted.has("external"):
        return "a job of --external has no script, so there is nothing to start again"
    for name in ("wait", "test-only"):
        if any(name_of(option) == name for option in wanted.script_options):
            return f"the script asks for --{name} in an #SBATCH line: give it on the command line instead"
    named = _expand(wanted.nodelist)
    if wanted.nodes is not None and len(named) > wanted.nodes.most:  # a fault to older releases, not to newer ones
        return f"--nodelist names {len(named)} nodes, and --nodes allows {wanted.nodes.most} at most"
    both = set(named) & set(_expand(wanted.exclude))
    if both:
        return f"{', '.join(sorted(both))}: asked for by --nodelist and left out by --exclude"
    return None


# ---------------------------------------------------------------- the script


def check_text(data: bytes) -> str:
    """A batch script's text, checked as sbatch checks it; bytes that are not UTF-8 stay (surrogate escapes).

    Raises:
        BadSubmission: empty, no interpreter in the first line, NUL bytes, DOS line breaks, or too large for Slurm.
    """
    if not data:
        raise BadSubmission("Batch script is empty!")
    if not data.split(b"\0", 1)[0].strip(_BLANKS.encode()):
        raise BadSubmission("Batch script contains only whitespace!")
    if not data.startswith(b"#!"):
        raise BadSubmission(
            "This does not look like a batch script.  The first\n"
            "line must start with #! followed by the path to an interpreter.\n"
            "For instance: #!/bin/sh"
        )
    if b"\0" in data:
        raise BadSubmission("The Slurm controller does not allow scripts that\ncontain a NULL character '\\0'.")
    if b"\r\n" in data:
        raise BadSubmission(
            "Batch script contains DOS line breaks (\\r\\n)\ninstead of expected UNIX line breaks (\\n)."
        )
    if len(data) >= MAX_SCRIPT_BYTES:
        raise BadSubmission("Batch job submission failed: Pathname of a file, directory or other parameter too long")
    return data.decode("utf-8", errors="surrogateescape")


def wrap_text(command: str) -> str:
    """The script that sbatch makes of --wrap."""
    return f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{command}\n"


# ---------------------------------------------------------------- --export


def merge_export(
    export: str | None, environment: Mapping[str, str], names: Iterable[str]
) -> tuple[str, dict[str, str]]:
    """The value of --export and the environment of an sbatch that must also hand on the variables `names`.

    `ALL,X=1` becomes `ALL,X` with X in the environment, and ALL alone stays alone: of anything else Slurm loads the
    login environment on the node besides. NIL stays: who asks for it gets none of ours.
    """
    parts = _split_export(export or "")
    words = [part.upper() for part in parts]
    if words == ["NIL"]:
        return "NIL", dict(environment)
    if not parts or "ALL" in words:
        named = dict.fromkeys(part.partition("=")[0] for part in parts if part.upper() != "ALL")
        return ",".join(["ALL", *named]), _assign(parts, environment)
    kept = [] if words == ["NONE"] else parts
    return ",".join([*kept, *names]) or "NONE", dict(environment)


def _assign(parts: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """As sbatch: from left to right, ALL being the whole environment."""
    assigned: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if equals:
            assigned[name] = value
        elif part.upper() == "ALL":
            assigned = {**assigned, **environment}
    return {**environment, **assigned}


def _split_export(text: str) -> list[str]:
    """Parts between commas that stand outside quotes; the quotes stay in a value, as with sbatch."""
    return [part for part in re.findall(r"""(?:"[^"]*"|'[^']*'|[^,])+""", text) if part]


# ---------------------------------------------------------------- where the log is


_PATTERN = re.compile(r"%(?:%|([0-9]{0,18})([A-Za-z]))")


def render_log_path(pattern: str, *, job_id: int, job_name: str, user: str, node: str) -> str | None:
    """The file that a pattern of --output names for a batch script; None when that is not known beforehand.

    `node`: the batch host; where its short host name is not its name in Slurm, older releases put the host name (22.05)
    and newer ones the name in Slurm (25.11). A pattern with a backslash is taken as it is, without the backslashes.
    Letters that only some releases know (%b, %r), and array elements (%a), give None.
    """
    if "\\" in pattern:
        # Releases differ in what they make of two backslashes.
        return None if "\\\\" in pattern else pattern.replace("\\", "")
    numbers = {"j": job_id, "A": job_id, "J": job_id, "n": 0, "t": 0}  # a batch script is task 0 on node 0
    texts = {"x": job_name, "u": user, "N": node, "s": "batch"}
    rendered: list[str] = []
    end = 0
    for found in _PATTERN.finditer(pattern):
        rendered.append(pattern[end : found.start()])
        end = found.end()
        width, letter = found[1], found[2]
        if letter is None:
            rendered.append("%")
        elif letter in numbers:
            rendered.append(str(numbers[letter]).zfill(min(int(width or 0), 10)))
        elif texts.get(letter):
            rendered.append(texts[letter])
        else:
            return None
    rendered.append(pattern[end:])
    return None if "%" in "".join(rendered[::2]) else "".join(rendered)


# ---------------------------------------------------------------- what sbatch says


def render_submitted(job_id: int, *, cluster: str = "", is_parsable: bool = False, is_quiet: bool = False) -> str:
    """What sbatch prints for an accepted job, line break included; its exit code is then 0.

    `cluster`: only named when --clusters chose it.
    """
    if is_quiet:
        return ""
    if is_parsable:
        return f"{job_id};{cluster}\n" if cluster else f"{job_id}\n"
    return f"Submitted batch job {job_id}{f' on cluster {cluster}' if cluster else ''}\n"


def render_unreadable_script(path: str) -> str:
    """What sbatch prints as its error for a script that it can't open; its exit code is then 1."""
    return f"sbatch: error: Unable to open file {path}\n"


def render_refused(reason: str) -> str:
    """What sbatch prints as its error for a job that Slurm does not take; its exit code is then 1."""
    return f"sbatch: error: Batch job submission failed: {reason}\n"
