"""Argument lists for Slurm's tools and the environment they run in. Pure: no I/O, no clock, same input, same output.

Fields are named here once; `slurm.parse` reads the tables by the same names.

Separators. Job names, comments and submit lines are free text that any user of the cluster may choose, `|` and line
breaks included. So fields are separated by the control character US (0x1f) and each row of squeue and sacct ends in a
mark that the caller draws anew for each command: text written by others can't imitate a row.

Times. Slurm's tools print local time of the process that runs them, so reading commands run with TZ=UTC
(`reading_environment`): no zone to guess, no hour that occurs twice. sbatch keeps the host's zone, because options
such as --begin=16:00 are meant in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from slurm.errors import SlurmRefused
from slurm.hostlist import fold_nodes, is_node_name
from slurm.types import SubmitRequest

Argv = tuple[str, ...]

FIELD_SEPARATOR = "\x1f"

# Free text last: reason may be set by plugins and administrators, name and comment by any user.
SQUEUE_FIELDS = (
    "JobID",
    "State",
    "RestartCnt",
    "exit_code",
    "UserName",
    "Partition",
    "NodeList",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "Reason",
    "Name",
    "Comment",
)

# JobIDRaw: the plain number also for array elements and heterogeneous jobs. SubmitLine holds the token even where
# the database does not keep comments (AccountingStoreFlags without job_comment, the default).
SACCT_FIELDS = (
    "JobIDRaw",
    "State",
    "ExitCode",
    "User",
    "Partition",
    "NodeList",
    "Submit",
    "Start",
    "End",
    "JobName",
    "Comment",
    "SubmitLine",
)

RESTART_COUNT = "SLURM_RESTART_COUNT"  # as Slurm counts for a requeued job: scripts look at it to resume

_SACCT_STATES = "BF,CA,CD,DL,F,NF,OOM,PD,PR,R,RQ,RS,RV,S,TO"

MAX_REASON_CHARS = 200  # slurmdbd keeps a reason in a tinytext (255 bytes)

_KEPT_VARIABLES = ("PATH", "HOME", "SLURM_CONF", "TZ")
_TOKEN = re.compile(r"[A-Za-z0-9._:/@+-]{1,200}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_A_JOB = ("SLURM_", "SLURMD_", "PMI_", "PMIX_")
_OF_THE_CALL = frozenset({"SBATCH_WAIT", "SBATCH_DEBUG"})  # the call that they were for has been answered
# The last four make libc load code or data of the caller's choice; a run file's variables are not a person's own.
_STEERS_SBATCH = ("SBATCH_", *_OF_A_JOB, "LD_", "GLIBC_TUNABLES", "GCONV_PATH", "LOCPATH")
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


# ---------------------------------------------------------------- reading


def squeue_argv(mark: str) -> Argv:
    """All jobs of all users in the controller's memory, ended ones too, array elements one by one."""
    return ("squeue", "-h", "-a", "-r", "-t", "all", "-O", _squeue_format(mark))


def row_end(mark: str) -> str:
    """What stands at the end of each row of squeue and sacct, before the line break."""
    return f"{FIELD_SEPARATOR}{mark}"


def _squeue_format(mark: str) -> str:
    # `Field:SUFFIX` prints the value at its full width, then SUFFIX. Without the colon a value is cut at 20 characters.
    *fields, last = SQUEUE_FIELDS
    return ",".join([*(f"{name}:{FIELD_SEPARATOR}" for name in fields), f"{last}:{row_end(mark)}"])


def sacct_argv(since: datetime, mark: str) -> Argv:
    """Every record of every job that was in the queue, ran or ended since then; -D keeps earlier runs of requeued jobs.

    All states are named: without that no release lists a job that ended before it became eligible (cancelled while it
    was held, depended on another or began later; seen on 22.05 and 25.11). With states sacct wants an end of the time,
    which lies ahead, since the controller's clock may be.

    -p rather than -P: the separator after the last field is what marks the end of a row whose submit line has line
    breaks.
    """
    return (
        "sacct",
        "-n",
        "-a",
        "-X",
        "-D",
        "-p",
        f"--delimiter={sacct_delimiter(mark)}",
        *_since(since),
        "-o",
        ",".join(SACCT_FIELDS),
    )


def _since(since: datetime) -> Argv:
    return ("-S", render_sacct_time(since), "-E", "now+1hour", "-s", _SACCT_STATES)


def sacct_delimiter(mark: str) -> str:
    """The separator of sacct's fields (one argument for all of them, so the mark is in each)."""
    return f"{FIELD_SEPARATOR}{mark}"


def render_sacct_time(at: datetime) -> str:
    """An instant as sacct reads it when it runs with TZ=UTC."""
    if at.tzinfo is None:
        raise ValueError("an aware datetime is needed: sacct would read a naive one in an unknown zone")
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def show_nodes_argv() -> Argv:
    """All nodes, one line each, nodes of hidden partitions too."""
    return ("scontrol", "-a", "-o", "show", "node")


def show_partitions_argv() -> Argv:
    """All partitions, one line each, hidden ones too."""
    return ("scontrol", "-a", "-o", "show", "partition")


def show_config_argv() -> Argv:
    """The controller's configuration, `name = value` a line."""
    return ("scontrol", "show", "config")


def squeue_json_argv() -> Argv:
    """All jobs in the controller's memory as JSON (22.05 gives all whatever the filters)."""
    return ("squeue", "-a", "-t", "all", "--json")


def show_nodes_json_argv() -> Argv:
    """All nodes as JSON, nodes of hidden partitions too; 23.02 on."""
    return ("scontrol", "-a", "show", "nodes", "--json")


def sinfo_json_argv() -> Argv:
    """All nodes as JSON for 22.05, where this is a plain list of nodes; later it is a table of states."""
    return ("sinfo", "-a", "--json")


def sacct_json_argv(since: datetime) -> Argv:
    """The records of `sacct_argv` as JSON."""
    return ("sacct", "-a", "-X", "-D", *_since(since), "--json")


# ---------------------------------------------------------------- changing


def sbatch_argv(request: SubmitRequest) -> Argv:
    """The submission of one attempt.

    The caller's options stand first, so ours, of which the last one counts, can't be switched off by them: no requeue
    by Slurm (unless the script itself asks for it), one live job per name and user, the log never truncated, the token
    in `--comment`. sbatch reads no option behind the script, so an argument may look like one.

    `--export=ALL` for our own launcher on purpose, with an sbatch whose environment is built by
    `submitting_environment`: a list of names would make Slurm load the user's login environment on the node
    (SLURM_GET_USER_ENV, seen on 22.05) and would leave srun inside the job with that list only, without PATH
    (SLURM_EXPORT_ENV); NONE and NIL do the like. For a person's script it is what `slurm.sbatch_line.merge_export`
    makes of theirs.

    Raises:
        SlurmRefused: a token, node name or number that can't stand on a command line.
    """
    return ("sbatch", *_sbatch_options(request), str(request.script), *request.arguments)


def test_only_argv(request: SubmitRequest) -> Argv:
    """The question whether Slurm would take a submission like this one; nothing is submitted.

    The script of our launcher is not there yet: a wrapped command stands for it. A person's script is, and its own
    options count. Slurm uses up a job id (seen on 22.05).
    """
    options = ("sbatch", "--test-only", *_sbatch_options(request))
    return (*options, str(request.script)) if request.is_own_environment else (*options, "--wrap=exit")


def _sbatch_options(request: SubmitRequest) -> Argv:
    _check_request(request)
    return (
        *request.options,
        *_chosen_options(request),
        "--parsable",
        *([] if request.may_requeue else ["--no-requeue"]),
        *([f"--dependency={request.dependency}"] if request.dependency else []),
        "--open-mode=append",
        f"--export={request.export}",
        f"--job-name={request.job_name}",
        f"--comment={request.token}",
        *([f"--nodes={request.nodes}"] if request.nodes is not None else []),
        *([f"--output={escape_pattern(request.output)}"] if request.output is not None else []),
    )


def escape_pattern(path: Path) -> str:
    """A path for sbatch's --output, where `%` starts a pattern (`%j` is the job id)."""
    return str(path).replace("%", "%%")


def _chosen_options(request: SubmitRequest) -> list[str]:
    chosen = {
        "--chdir": request.chdir,
        "--partition": request.partition,
        "--account": request.account,
        "--qos": request.qos,
        "--time": request.time_limit,
        "--gpus-per-node": request.gpus_per_node,
        "--exclude": fold_nodes(request.exclude) if request.exclude else None,
    }
    return [f"{option}={value}" for option, value in chosen.items() if value is not None]


def _check_token(token: str) -> None:
    if not _TOKEN.fullmatch(token):
        raise SlurmRefused(f"token {token!r}: letters, digits and . _ : / @ + - only, at most 200")


def _check_request(request: SubmitRequest) -> None:
    _check_token(request.token)
    if request.nodes is not None and request.nodes < 1:
        raise SlurmRefused(f"{request.nodes} nodes asked for")
    if not request.script.is_absolute():
        raise SlurmRefused(f"script {request.script} is not an absolute path")  # and so never looks like an option
    for node in request.exclude:
        if not is_node_name(node):
            raise SlurmRefused(f"{node!r} in the nodes to exclude is not a node name")
    for word in (*request.options, *request.arguments, request.dependency, request.export, request.job_name):
        if "\0" in word:
            raise SlurmRefused(f"{word!r} has a NUL in it: it can't stand on a command line")


def scancel_argv(job_id: int) -> Argv:
    """End a job: plain scancel, which is also the fastest clean way.

    Slurm then sends SIGCONT and SIGTERM to every step and to the batch step at once, and SIGKILL after KillWait (30 s
    by default). Our batch script replaces itself by the launcher (`exec`), so the launcher gets that SIGTERM and the
    job is over as soon as it exits (0.15 s on 22.05); a shell in between would sit until KillWait. `--signal`,
    `--batch` and `--full` only deliver signals; they would leave the job running.
    """
    return ("scancel", str(job_id))


def claim_argv(job_id: int, token: str, *, may_requeue: bool = False) -> Argv:
    """Put a token on a job that is already there, and keep Slurm from requeueing it, unless it may.

    Its owner may do both. The whole comment is replaced: the caller has looked whether there was one.

    Raises:
        SlurmRefused: a token that can't stand in a comment.
    """
    _check_token(token)
    requeue = () if may_requeue else ("Requeue=0",)
    return ("scontrol", "update", f"JobId={job_id}", f"Comment={token}", *requeue)


def show_job_argv(job_id: int) -> Argv:
    """All that the controller says of one job."""
    return ("scontrol", "-o", "show", "job", str(job_id))


def submit_line_argv(job_id: int, mark: str) -> Argv:
    """Owner, name and submit line of one job in accounting, of the newest job with that id."""
    delimiter = f"--delimiter={sacct_delimiter(mark)}"
    return ("sacct", "-n", "-X", "-p", delimiter, "-j", str(job_id), "-o", "User,JobName,SubmitLine")


def admin_level_argv(user: str) -> Argv:
    """What accounting lets a user do, e.g. "Administrator"; empty where it does not know them."""
    return ("sacctmgr", "-n", "-P", "show", "user", f"name={user}", "format=AdminLevel")


def write_script_argv(job_id: int) -> Argv:
    """The batch script of a job that the controller still has, to standard output; owner and administrators only."""
    return ("scontrol", "write", "batch_script", str(job_id), "-")


def drain_argv(node: str, reason: str) -> Argv:
    """Set DRAIN on one node, with a reason.

    Raises:
        SlurmRefused: not one plain node name, or a reason that is not one line of 1 to 200 printable ASCII characters
            (see `render_reason`).
    """
    _check_node(node)
    if not is_reason(reason):
        raise SlurmRefused(f"reason {reason!r}: one line of 1 to {MAX_REASON_CHARS} printable ASCII characters")
    return ("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")


def undrain_argv(node: str) -> Argv:
    """Lift DRAIN from one node, and with it the reason.

    UNDRAIN and not RESUME: it takes back what `drain_argv` did and nothing else. RESUME would also lift a DOWN that
    someone else set, and is an error on a node that is not drained. After either the node is `IDLE+NOT_RESPONDING`
    until slurmctld has pinged it (a second or two, seen on 22.05).
    """
    _check_node(node)
    return ("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")


def _check_node(node: str) -> None:
    if not is_node_name(node):
        raise SlurmRefused(f"{node!r} is not the name of one node")


def is_reason(text: str) -> bool:
    """True when Slurm and its database keep the text unchanged: one line, printable ASCII, not too long, not blank."""
    return 0 < len(text) <= MAX_REASON_CHARS and text.isascii() and text.isprintable() and text == text.strip()


def render_reason(text: str) -> str:
    """Any text as a drain reason: one line, printable ASCII (`?` for the rest), at most 200 characters, never empty."""
    ascii_text = "".join(c if c.isascii() and c.isprintable() else " " if c.isspace() else "?" for c in text)
    line = " ".join(ascii_text.split())
    if len(line) > MAX_REASON_CHARS:
        line = line[: MAX_REASON_CHARS - 3].rstrip() + "..."
    return line or "no reason given"


# ---------------------------------------------------------------- environment


def reading_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """Environment of every tool but sbatch: PATH and SLURM_CONF of the parent, everything else fixed.

    SQUEUE_FORMAT, SLURM_CLUSTERS, SLURM_TIME_FORMAT and their like would change what the tools print.
    """
    return {**_kept(parent), "LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}


def submitting_environment(
    parent: Mapping[str, str], wanted: Mapping[str, str], *, user: str, home: str
) -> dict[str, str]:
    """Environment of sbatch, which is also the job's (see `sbatch_argv`): a sane minimum and the wanted variables.

    No SBATCH_*, SLURM_* (but SLURM_CONF) or PMI* of the parent: they override the script's own lines and leak into
    the job; and no secret of the daemon.

    Raises:
        SlurmRefused: a wanted variable that would steer sbatch itself, or whose name or value can't be exported.
    """
    for name, value in wanted.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise SlurmRefused(f"environment: {name!r} can't be exported")
        if name.startswith(_STEERS_SBATCH):
            raise SlurmRefused(f"environment: {name} would steer sbatch itself; set it in the job's own command")
    # LANG, not LC_ALL: the job's programs keep UTF-8 and may still choose.
    base = {**_kept(parent), "HOME": home, "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}
    return {**base, **wanted}


def own_environment(parent: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Environment of an sbatch that runs as a person, with the environment of their first submission.

    All of it, shell functions and LD_* included, since sbatch has that person's rights. SBATCH_* stay for what the job
    submits in its turn: on our own sbatch's command line they are options by now, which win. Of a person who is in a
    job no SLURM_* and PMI*: they are that job's. SLURM_CONF is the service's. Nothing else of the service is in it.

    Raises:
        SlurmRefused: a variable that no process can have.
    """
    for name, value in wanted.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise SlurmRefused(f"environment: {name!r} can't be exported")
    is_in_job = "SLURM_JOB_ID" in wanted or "SLURM_JOBID" in wanted
    kept = {name: value for name, value in wanted.items() if not (is_in_job and name.startswith(_OF_A_JOB))}
    kept = {name: value for name, value in kept.items() if name not in _OF_THE_CALL}
    if RESTART_COUNT in wanted:
        kept[RESTART_COUNT] = wanted[RESTART_COUNT]
    return {**kept, **{name: parent[name] for name in ("SLURM_CONF",) if name in parent}}


def _kept(parent: Mapping[str, str]) -> dict[str, str]:
    kept = {name: parent[name] for name in _KEPT_VARIABLES if name in parent}
    return {"PATH": _DEFAULT_PATH, **kept}
