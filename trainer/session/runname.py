"""The name of a run, which its checkpoints carry: given by the environment, or kept in the run directory.

Without a service a run is called what its folder is called at the first start. A folder may be renamed, copied or
mounted elsewhere afterwards, so the name is written down then, and read again at every later start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from trainer.contract import CONTRACT_VERSION, ContractError, RunPaths, parse, write_json
from trainer.format.stale import retry_stale
from trainer.session.place import Place

log = logging.getLogger("trainer.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """run.json of a run directory."""

    version: int = CONTRACT_VERSION
    run: str


def settle_name(place: Place) -> str:
    """The run's name, now in its run directory as well, where that takes a file. Call it on one rank.

    A name that the environment gives counts, and replaces the one that was kept.
    """
    if place.run_dir is None:
        return place.run
    paths = RunPaths(place.run_dir)
    try:
        kept = _read(paths)
    except OSError as error:  # it may stand there, so nothing is put in its place
        log.warning("%s can't be read: %s", paths.run_name(), error.strerror)
        return place.run
    name = place.run if place.is_named else kept or place.run
    if name != kept:
        try:
            write_json(paths.run_name(), RunName(run=name))
        except OSError as error:
            log.warning("%s is not written: %s", paths.run_name(), error.strerror)
    return name


def _read(paths: RunPaths) -> str:
    try:
        name = parse(RunName, retry_stale(paths.run_name().read_bytes)).run
    except (FileNotFoundError, NotADirectoryError, ContractError):
        return ""
    return name if name not in {".", ".."} and "/" not in name and name.isprintable() else ""
