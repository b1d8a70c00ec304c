"""What can go wrong at Slurm's edge, one name per thing the caller can do about it.

    SlurmError
    ├── SlurmUnavailable     the controller or database did not answer: unknown, ask again later
    │   └── SubmitUnconfirmed  sbatch's answer was lost: the job may exist; look it up by its token
    ├── SlurmRefused         Slurm understood and said no: asking again will not help
    └── SlurmUnreadable      an answer came that cannot be read: unknown

Each carries its evidence: argv, exit code, standard output and error (bounded).
"""

from __future__ import annotations

_EVIDENCE_CHARS = 2000


class SlurmError(Exception):
    """Base of all errors of this package."""

    def __init__(
        self,
        message: str,
        *,
        argv: tuple[str, ...] = (),
        returncode: int | None = None,
        stdout: str = "",
        stderr: str = "",
    ) -> None:
        super().__init__(message)
        self.argv = argv
        self.returncode = returncode
        self.stdout = stdout[:_EVIDENCE_CHARS]
        self.stderr = stderr[:_EVIDENCE_CHARS]


class SlurmUnavailable(SlurmError):
    """No answer: controller down, frozen, standby, rate-limited, or the command ran past its timeout."""


class SubmitUnconfirmed(SlurmUnavailable):
    """The submission may or may not have been accepted; only a look-up by token can tell."""


class SlurmRefused(SlurmError):
    """Slurm said no, for a reason that time alone does not cure (unknown partition, invalid node, no rights)."""


class SlurmUnreadable(SlurmError):
    """Slurm answered with text that is not what the tool documents."""
