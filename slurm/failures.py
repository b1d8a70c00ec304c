"""What a failed Slurm command means: which of `slurm.errors` its exit and its words stand for. Pure.

The texts are those of Slurm's error table (22.05 to 26.05); they are matched, because the exit code is 1 for all.
"""

from __future__ import annotations

import re
from typing import Final

from slurm.errors import SlurmError, SlurmRefused, SlurmUnavailable, SlurmUnreadable, SubmitUnconfirmed
from slurm.run_tool import Completed

Argv = tuple[str, ...]


def _any_of(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)), re.IGNORECASE)


# No request was accepted: no connection was made, the request was turned away at the door, or it was put off.
_NOT_ACCEPTED: Final = _any_of(
    "Unable to contact slurm controller (connect failure)",
    "Unable to establish configuration source",
    "Could not establish a configuration source",
    "standby mode",
    "Protocol authentication error",
    "Invalid authentication credential",
    "Munge decode failed",
    "Failed to connect to authentication agent",
    "Slurm job queue full",
    "temporarily unable to accept job",
    "Unable to create job record, try again",
    "System submissions disabled",
    "Rate limit exceeded",
)

# It was the answer that could not be read: then the same words of authentication are not about the request.
_ANSWER_NOT_OPENED: Final = _any_of("slurm_unpack_received_msg", "slurm_receive_msg")

# The request may have been accepted; the answer was lost.
_ANSWER_LOST: Final = _any_of(
    "Unable to contact slurm controller",  # (send failure), (receive failure), (shutdown failure)
    "Socket timed out on send/recv operation",
    "Zero Bytes were transmitted or received",
    "Message receive failure",
    "Message send failure",
    "Unexpected message received",
    "Insane message length",
    "Incompatible versions of client and server code",
    "Protocol version has changed",
    "I/O stream version number error",
    "Communication shutdown failure",
    "Received zero length message",
    "Received message length < 0",
    "Failed to send entire message",
    "Unexpected missing socket error",
    "Slurm internal error",
    "Resource temporarily unavailable",
    "No route to host",
    "Network is unreachable",
    "Cannot allocate memory",
    "Too many open files",
    "Address already in use",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "Interrupted system call",
    "Transport endpoint is not connected",
    "Broken pipe",
    "Communication connection failure",
    "Header lengths are longer than data received",
)

_DATABASE_DOWN: Final = _any_of(
    "Problem talking to the database",
    "failed to open persistent connection",
    "slurm_persist_conn_open",
    "Unable to contact slurmdbd",
    "Sending PersistInit msg",
)

# How a tool begins the line that says that it got no list; a list that it printed before is half of one.
_LOAD_FAILED: Final = re.compile(r"^(?:\w+: error: )?slurm_(?:load|receive|persist)_\w+(?: error)?: ", re.MULTILINE)

_NO_ACCOUNTING: Final = _any_of("Slurm accounting storage is disabled")

_JOB_IS_GONE: Final = _any_of("Invalid job id specified", "already completing or completed")

_NO_RIGHTS: Final = _any_of("Invalid user id", "Access/permission denied", "Permission denied")

# How Slurm's error table words a "no" to a job: it was read, and found wrong or not allowed.
_JOB_REFUSED: Final = re.compile(
    r"invalid|\bspecif|violat|permi(?:tted|ssion)|denied|disabled|unsupported|not supported|not available|unavailable"
    r"|exceed|breached|limit|more than|more processors|too (?:long|large|many)|larger than|not in this partition"
    r"|in use|are busy|down state|dependency|reservation|immediate|fragmented|insufficient|memory required"
    r"|requires? |only batch jobs|not found on host|unable to open|is missing|must |cannot request"
    r"|i/o error writing script|unable to change directory|duplicate|circular|not permit",
    re.IGNORECASE,
)
_TOOL_SAYS: Final = re.compile(r"^sbatch: (?:error: |fatal: )?", re.MULTILINE)

_SUBMISSION_FAILED: Final = re.compile(r"(?:Batch job submission failed|allocation failure):?\s*(.*)", re.DOTALL)


def read_failure(argv: Argv, done: Completed) -> SlurmError | None:
    """Why a reading command gave no answer; None when it gave one.

    Text that says "no connection" counts even with exit 0, and what was printed before it does not: a partial list is
    no list.
    """
    if done.is_truncated:
        return _error(SlurmUnreadable, argv, done, "printed more than can be read")
    if done.returncode is None:
        return _error(SlurmUnavailable, argv, done, "did not answer in time")
    if _NO_ACCOUNTING.search(done.stderr):
        return _error(SlurmRefused, argv, done, "the cluster has no accounting")
    for pattern in (_NOT_ACCEPTED, _ANSWER_LOST, _DATABASE_DOWN):
        if pattern.search(done.stderr):
            return _error(SlurmUnavailable, argv, done, "got no answer")
    if done.returncode == 0:
        return _error(SlurmUnavailable, argv, done, "got no answer") if _LOAD_FAILED.search(done.stderr) else None
    # A fixed command that failed for another reason: still no answer, so unknown, unless rights are missing.
    kind = SlurmRefused if _NO_RIGHTS.search(done.stderr) else SlurmUnavailable
    return _error(kind, argv, done, "failed")


def change_failure(argv: Argv, done: Completed) -> SlurmError | None:
    """Why scontrol update or scancel did not do it; None when it did. A job that is gone counts as cancelled."""
    if done.returncode is None:
        return _error(SlurmUnavailable, argv, done, "did not answer in time")
    if argv[0] == "scancel" and _JOB_IS_GONE.search(done.stderr):
        return None
    if _NOT_ACCEPTED.search(done.stderr) or _ANSWER_LOST.search(done.stderr):
        return _error(SlurmUnavailable, argv, done, "got no answer")
    return None if done.returncode == 0 else _error(SlurmRefused, argv, done, "was refused")


def submit_failure(argv: Argv, done: Completed) -> SlurmError | None:
    """Why there is no job, or why that is not sure; None when sbatch says that it was accepted.

    Standard error does not count on success: submit filters write notes there, the word "error" included.
    """
    if done.returncode is None or done.returncode < 0:
        return _error(SubmitUnconfirmed, argv, done, "was killed before it answered")
    if done.returncode == 0:
        return None
    said = _SUBMISSION_FAILED.search(done.stderr)
    words = said[1] if said else done.stderr
    if _NOT_ACCEPTED.search(words) and not _ANSWER_NOT_OPENED.search(done.stderr):
        return _error(SlurmUnavailable, argv, done, "did not get the job accepted")
    if _ANSWER_LOST.search(words) or _ANSWER_NOT_OPENED.search(done.stderr) or not _is_understood(done, said):
        return _error(SubmitUnconfirmed, argv, done, "lost the answer")
    return SlurmRefused(
        _read_refusal(done, said) or f"{argv[0]} ended with {done.returncode} and said nothing",
        argv=argv,
        returncode=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
    )


def _is_understood(done: Completed, said: re.Match[str] | None) -> bool:
    """Whether a failure is Slurm's "no" to this job.

    A text that nobody knows is not: a job that is looked up and sent again costs little, a run that is held for a
    fault of the network waits for a person. A submit filter says what it likes, in lines of its own.
    """
    if said is None:  # without its own sentence sbatch ended before it asked; a wrapper might have printed something
        return not done.stdout.strip()
    if _JOB_REFUSED.search(said[1]):
        return True
    before = done.stderr[: said.start()].removesuffix("sbatch: error: ").strip()
    return bool(before) and not _ANSWER_LOST.search(before) and not _NOT_ACCEPTED.search(before)


def _read_refusal(done: Completed, said: re.Match[str] | None) -> str:
    """Slurm's reason, without the tool's own words around it; a submit filter's lines go before it."""
    before = done.stderr[: said.start()] if said else done.stderr
    lines = [" ".join(line.split()) for line in _TOOL_SAYS.sub("", before).splitlines()]
    reason = " ".join(said[1].split()) if said else ""
    return "; ".join(line for line in (*lines, reason) if line)[:300]


def is_no_accounting(error: SlurmError) -> bool:
    """True when a failure says that the cluster keeps no accounting at all, rather than that it did not answer."""
    return bool(_NO_ACCOUNTING.search(error.stderr))


def is_job_gone(done: Completed) -> bool:
    """True when a tool says that the controller does not know the job, or does not show it to this account.

    `scontrol write batch_script` ends with 0 then (22.05).
    """
    return done.returncode is not None and bool(_JOB_IS_GONE.search(done.stderr) or _NO_RIGHTS.search(done.stderr))


def refused(argv: Argv, done: Completed, what: str) -> SlurmRefused:
    """Slurm's "no", with its words."""
    error = _error(SlurmRefused, argv, done, what)
    assert isinstance(error, SlurmRefused)
    return error


def not_started(argv: Argv, error: OSError) -> SlurmUnavailable:
    """The tool itself could not be started, so nothing was asked."""
    return SlurmUnavailable(f"{argv[0]} could not be started: {error}", argv=argv)


def unreadable(argv: Argv, done: Completed, why: str) -> SlurmUnreadable:
    """The tool answered with something else than what it documents."""
    error = _error(SlurmUnreadable, argv, done, f"can't be read: {why}")
    assert isinstance(error, SlurmUnreadable)
    return error


def unconfirmed(argv: Argv, done: Completed) -> SubmitUnconfirmed:
    """The answer lost although sbatch ended well: it named no job, or several."""
    error = _error(SubmitUnconfirmed, argv, done, "ended well, but its answer names no single job")
    assert isinstance(error, SubmitUnconfirmed)
    return error


def _error(kind: type[SlurmError], argv: Argv, done: Completed, what: str) -> SlurmError:
    words = " ".join((done.stderr or done.stdout).split())[:300]
    verb = next((word for word in argv[1:] if not word.startswith("-")), "")
    command = f"{argv[0]} {verb}" if argv[0] == "scontrol" else argv[0]
    return kind(
        f"{command} {what}" + (f": {words}" if words else ""),
        argv=argv,
        returncode=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
    )
