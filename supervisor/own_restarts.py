"""What a batch script does about itself: `scontrol requeue` of its job, `sbatch` of itself, where it lies. Pure.

Two owners of retries end in two trainings, or in none: a script whose `scontrol requeue` is refused and that then ends
with 0 looks finished. So it is looked for, and told. A text is searched, no shell is understood: a call that stands in
another file is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MAX_LINE_CHARS = 1000  # nobody's command; and what is searched can't take long
_REQUEUE = re.compile(r"""\bscontrol[\s"',]+(?:-\w+[\s"',]+){0,3}requeue""")
_SUBMISSION = re.compile(r"(?<![\w./$-])sbatch\s([^;|&]{0,300})")
_ITSELF = re.compile(r"\$\{?(?:0|BASH_SOURCE)\b")
_JOB_ID = re.compile(r"\$\{?SLURM_JOB_?ID\b")
_COMMAND = re.compile(r"\bCommand\b")
_KEPT = re.compile(r"ckpt|checkpoint|save|resume", re.IGNORECASE)


def asks_for_requeue(text: str) -> bool:
    """Whether a script has Slurm requeue a job: its own, as a rule."""
    return any(not _is_printed(line, at) for _, line in _lines(text) for at in _starts(_REQUEUE, line))


def find_resubmission(text: str, name: str) -> int | None:
    """The line in which a script of this base name hands itself in again; None: it does not."""
    for number, line in _lines(text):
        for found in _SUBMISSION.finditer(line):
            is_itself = _ITSELF.search(found[1]) or (name and name in re.split(r"[\s\"'/)]+", found[1]))
            if is_itself and not _is_printed(line, found.start()):
                return number
    return None


def find_path_by_job_id(text: str) -> int | None:
    """The line in which a script names its checkpoints by the job's number, which each submission has anew."""
    for number, line in _lines(text):
        words = re.split(r"[\s=]+", line) if _JOB_ID.search(line) else []
        for before, word in zip(["", *words], words, strict=False):
            if _JOB_ID.search(word) and _KEPT.search(f"{before} {word}"):
                return number
    return None


def find_own_path(text: str) -> int | None:
    """The line in which a script asks Slurm for its own path: it gets that of the copy that sbatch was given."""
    return next((number for number, line in _lines(text) if "scontrol" in line and _COMMAND.search(line)), None)


def _starts(pattern: re.Pattern[str], line: str) -> Iterator[int]:
    return (found.start() for found in pattern.finditer(line))


def _is_printed(line: str, at: int) -> bool:
    """True for what a line only prints: how to call the script, as a rule."""
    return re.split(r"[;|&({]", line[:at])[-1].lstrip().startswith(("echo ", "printf "))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their number, continued ones as one, without comments."""
    started, parts = 0, [""]
    for number, line in enumerate(text.split("\n"), start=1):
        started = number if len(parts) == 1 else started
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        whole = " ".join([*parts, line]).strip()
        parts = [""]
        if not whole.startswith("#") and len(whole) <= _MAX_LINE_CHARS:
            yield started, whole
