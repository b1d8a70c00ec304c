"""Where a training process stands: its rank, and the run that it belongs to. No torch: this is read before it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer import contract
from trainer.losswatch import LossPolicy
from trainer.session.claims import Claim

log = logging.getLogger("trainer.session.place")

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Ranks and run of this process.

    `run_dir` None: nothing is written. `attempt` 0: not known yet; without a service the next free one is taken.
    `claim`: by which this start of the training publishes as that attempt; None before the ranks have met.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    is_launched: bool = False  # by torchrun or the like: the environment says where the ranks meet
    run: str = "run"
    is_named: bool = False  # the environment says how the run is called
    run_dir: Path | None = None
    attempt: int = 0
    claim: Claim | None = None
    resume_from: Path | None = None
    is_supervised: bool = False  # a service chose the attempt and the checkpoint
    every_s: float = 0.0  # seconds between two checkpoints, as the service wants them
    skip_samples: str = ""
    local_dir: Path | None = None
    object_url: str = ""
    upload_bytes_per_s: float = 0.0
    object_keep_last: int = 3
    loss_policy: LossPolicy = field(default_factory=LossPolicy)

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.rank // self.local_world


def read_place(environment: Mapping[str, str] = os.environ, *, run_dir: Path | None = None) -> Place:
    """Ranks as torchrun names them, the run as the contract names it; `run_dir` wins over the environment.

    Folders are those of the working directory as it is now, whatever it is later.
    """
    get = environment.get
    named, resume, local = (get(name, "") for name in _FOLDERS)
    folder = _absolute(run_dir or named)
    return Place(
        rank=int(get("RANK", "0")),
        world=int(get("WORLD_SIZE", "1")),
        local_rank=int(get("LOCAL_RANK", "0")),
        local_world=int(get("LOCAL_WORLD_SIZE", "1")),
        is_launched="MASTER_ADDR" in environment and "RANK" in environment,
        run=get(contract.ENV_RUN) or (_name(folder) if folder is not None else "") or "run",
        is_named=bool(get(contract.ENV_RUN)),
        run_dir=folder,
        attempt=int(get(contract.ENV_ATTEMPT) or 0),
        is_supervised=bool(get(contract.ENV_ATTEMPT)),
        resume_from=_absolute(resume),
        every_s=float(get(contract.ENV_CHECKPOINT_EVERY_S) or 0),
        skip_samples=get(contract.ENV_SKIP_SAMPLES, ""),
        local_dir=_fill_in(local, is_told=int(get("LOCAL_RANK", "0")) == 0),
        object_url=get(contract.ENV_OBJECT_URL, ""),
        upload_bytes_per_s=float(get(contract.ENV_UPLOAD_BYTES_PER_S) or 0),
        object_keep_last=int(get(contract.ENV_OBJECT_KEEP_LAST) or 3),
        loss_policy=_read_policy(environment),
    )


_FOLDERS = (contract.ENV_RUN_DIR, contract.ENV_RESUME_FROM, contract.ENV_LOCAL_DIR)


def _absolute(folder: Path | str) -> Path | None:
    return Path(folder).absolute() if folder else None


def _fill_in(folder: str, *, is_told: bool) -> Path | None:
    """A folder with the job's $VARIABLES; None where one isn't set: a folder called like it would never be found."""
    filled = os.path.expandvars(folder)
    unset = _VARIABLE.search(filled)
    if unset is None:
        return _absolute(filled)
    if is_told:
        name = unset[1].strip("{}")
        log.warning("local_dir %s: $%s is not set; nothing is kept on this node's own disk", folder, name)
    return None


def _name(folder: Path) -> str:
    try:
        return folder.resolve().name
    except (OSError, RuntimeError):  # links in a circle: whoever uses it is told
        return folder.name


def _read_policy(environment: Mapping[str, str]) -> LossPolicy:
    score = float(environment.get(contract.ENV_SPIKE_SCORE) or 0)
    window = int(environment.get(contract.ENV_SPIKE_WINDOW) or 0)
    if not window:
        return LossPolicy(spike_score=score)
    return LossPolicy(spike_score=score, window=max(2, window), least=max(2, min(LossPolicy().least, window)))
