"""A path that a person gave: which checkpoints are meant, and whether each is whole.

The same tests as for what a training has published, wherever the files lie; no run, ledger or service is needed.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import xxhash

from supervisor.jobfiles import NotAFile, read_bounded
from supervisor.layouts.bulk import OnBytes
from supervisor.layouts.dcp import METADATA_NAME
from supervisor.layouts.found import Candidate
from supervisor.layouts.own import Identity, inspect_own, verify_checkpoint
from supervisor.layouts.readback import inspect_foreign, read_back
from supervisor.layouts.registry import LAYOUTS, choose, needs_of, tell_layout
from supervisor.layouts.tree import Broken, Unfinished
from supervisor.model import UNFINISHED_MARKERS
from trainer.contract import (
    MANIFEST_NAME,
    MAX_JSON_BYTES,
    VERIFIED_NAME,
    ContractError,
    VerificationRecord,
    parse,
    parse_checkpoint_name,
)
from trainer.format.stale import retry_stale

OWN = "supervisor"
MAX_NAMES = 20_000
_RECORD_BYTES = 65536
_INSIDE = ("", "checkpoints", "checkpoint")  # of a run directory of ours, and of torchtitan's


class NoCheckpoint(Exception):
    """The path is no checkpoint and holds none; the message says what would make it one."""


class Condition(StrEnum):
    """What may be said of one checkpoint, in the words that people see."""

    VERIFIED = "verified"  # every byte was read and matches its checksum
    COMPLETE = "complete"  # all of it is there
    UNFINISHED = "unfinished"  # its save has not ended, or never will
    CORRUPT = "corrupt"
    UNKNOWN = "unknown"  # it could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One checkpoint that is meant; `layout` is "supervisor" for our own."""

    path: Path
    layout: str
    step: int | None
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found of one. `read_bytes` in `seconds`: what was read back, 0 after a look that reads none."""

    given: Given
    condition: Condition
    detail: str
    size_bytes: int = 0
    files: int = 0
    stamp: str = ""
    read_bytes: int = 0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.condition in (Condition.VERIFIED, Condition.COMPLETE)


# ---------------------------------------------------------------- which ones are meant


def find_given(path: Path, layout: str | None = None) -> tuple[Given, ...]:
    """The checkpoint at a path, or all in the folder of them (or of the run) that it is, the newest first.

    `layout`: a name of `registry.LAYOUTS`, "supervisor", or None, told by what lies there. Raises NoCheckpoint and
    OSError.
    """
    place = _follow(path)
    if not place.exists():
        raise NoCheckpoint(f"{path} does not exist")
    one = _find_one(place, layout)
    if one is not None:
        return (one,)
    if place.is_dir():
        found = next((inside for name in _INSIDE if (inside := _find_in(place / name, layout))), ())
        if found:
            return tuple(sorted(found, key=_age, reverse=True))
        last = _by_number(place) if layout in (None, "dcp") else None
        if last is not None:
            return (last,)
    raise NoCheckpoint(_say_missing(place, layout))


def _follow(path: Path) -> Path:
    """Where a path leads: a link that a person names is meant to be followed."""
    place = Path(os.path.abspath(path))  # noqa: PTH100 - of a ".." the name counts, not the link
    try:
        place.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NoCheckpoint(f"{path} leads nowhere: its symbolic links go in a circle") from None
    return place.resolve()


def _age(given: Given) -> tuple[int, int, str]:
    return (-1 if given.step is None else given.step, given.attempt or 0, given.path.name)


def _find_one(place: Path, layout: str | None) -> Given | None:
    named = parse_checkpoint_name(place.name)
    if layout in (None, OWN) and place.is_dir() and (named is not None or (place / MANIFEST_NAME).exists()):
        step, attempt = named if named is not None else (None, None)
        return Given(path=place, layout=OWN, step=step, attempt=attempt)
    if layout == OWN:
        return None
    told = layout or tell_layout(place.name)
    if told and (candidates := LAYOUTS[told].find([place.name])) and (told != "dcp" or _has_metadata(place)):
        return Given(path=place, layout=told, step=candidates[0].step)
    if layout in (None, "dcp") and place.is_dir() and _has_metadata(place):
        return Given(path=place, layout="dcp", step=_step_of(place.name))
    return None


def _has_metadata(place: Path) -> bool:
    try:
        return (place / METADATA_NAME).exists() or (place / "__0.metadata").exists()
    except OSError:
        return True  # who looks closer is told why it can't be read


def _step_of(name: str) -> int | None:
    found: list[Candidate] = LAYOUTS["dcp"].find([name])
    return found[0].step if found else None


def _by_number(place: Path) -> Given | None:
    """Any name that ends in a number may be a distributed checkpoint of which nothing is there."""
    step = _step_of(place.name)
    return None if step is None else Given(path=place, layout="dcp", step=step)


def _find_in(folder: Path, layout: str | None) -> tuple[Given, ...]:
    if not folder.is_dir():
        return ()
    names = _list(folder)
    own = {name: named for name in names if (named := parse_checkpoint_name(name)) is not None}
    if layout in (None, OWN) and own:
        return tuple(Given(path=folder / n, layout=OWN, step=step, attempt=a) for n, (step, a) in own.items())
    if layout == OWN:
        return ()
    chosen = LAYOUTS[layout] if layout else choose(names)[0]
    found = chosen.find(names)
    if chosen.name == "dcp" and layout is None:  # many names end in a number
        found = [c for c in found if c.name.startswith("step-") or _has_metadata(folder / c.name)]
    return tuple(Given(path=folder / c.name, layout=chosen.name, step=c.step) for c in found)


def _list(folder: Path) -> list[str]:
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MAX_NAMES:
                raise OSError(errno.E2BIG, f"more than {MAX_NAMES:,} names", str(folder))
    return sorted(name for name in names if name.isprintable())


def _say_missing(place: Path, layout: str | None) -> str:
    if not place.is_dir():
        return f"{place} is a file, and of no layout that is known by its name: {needs_of('lightning')}"
    if layout:
        return (
            f"{place} holds no checkpoint of the layout {layout}: {needs_of(layout) or f'{MANIFEST_NAME} is missing'}"
        )
    with os.scandir(place) as entries:
        is_empty = next(entries, None) is None
    what = "is empty" if is_empty else f"holds neither {MANIFEST_NAME} nor {METADATA_NAME}, nor anything named as one"
    return f"{place} is no checkpoint and no folder of checkpoints: it {what}"


# ---------------------------------------------------------------- whether it is whole


def look_at(given: Given) -> Verdict:
    """By names, sizes and what the metadata describes; no payload is read."""
    verdict = Verdict(given=given, condition=Condition.COMPLETE, detail="")
    try:
        return _look_at_own(verdict) if given.layout == OWN else _look_at_foreign(verdict)
    except Unfinished as error:
        return replace(verdict, condition=Condition.UNFINISHED, detail=str(error))
    except Broken as error:
        return replace(verdict, condition=Condition.CORRUPT, detail=str(error))
    except OSError as error:
        return replace(verdict, condition=Condition.UNKNOWN, detail=_say_unread(error))


def _look_at_own(verdict: Verdict) -> Verdict:
    given = verdict.given
    manifest, unchecked = inspect_own(given.path, _whose(given))
    verdict = replace(
        verdict,
        given=replace(given, step=manifest.step, attempt=manifest.attempt),
        size_bytes=sum(file.size_bytes for file in manifest.files),
        files=len(manifest.files),
        detail=unchecked,
    )
    record = _read_record(given.path)
    if record is None:
        return verdict
    if not record.ok:
        bad = ", ".join(record.bad_files[:5])
        return replace(verdict, condition=Condition.CORRUPT, detail=f"the nodes of its job found bad: {bad}")
    return replace(
        verdict, detail="; ".join(filter(None, ("its job's nodes say that they have read it back", unchecked)))
    )


def _read_record(path: Path) -> VerificationRecord | None:
    """What the job's nodes have said of the manifest that lies there; None: nothing, or nothing that makes sense."""
    try:
        manifest = retry_stale(lambda: read_bounded(path / MANIFEST_NAME, MAX_JSON_BYTES))
        record = retry_stale(lambda: parse(VerificationRecord, read_bounded(path / VERIFIED_NAME, _RECORD_BYTES)))
    except (FileNotFoundError, NotAFile, ContractError):
        return None
    return record if record.manifest_xxh3_128 == xxhash.xxh3_128_hexdigest(manifest) else None


def _whose(given: Given) -> Identity:
    return Identity(step=given.step, attempt=given.attempt)


def _look_at_foreign(verdict: Verdict) -> Verdict:
    given = verdict.given
    found, view = inspect_foreign(given.path, given.layout, marks=UNFINISHED_MARKERS)
    return replace(
        verdict,
        given=replace(given, step=given.step if given.step is not None else found.step or None),
        size_bytes=view.size_bytes,
        files=view.files,
        stamp=view.stamp,
        detail=view.detail,
    )


def read_all(verdict: Verdict, *, on_bytes: OnBytes, readers: int, is_cached: bool) -> Verdict:
    """What `look_at` found whole, after every byte of it was read."""
    began = time.perf_counter()
    given = verdict.given
    try:
        if given.layout == OWN:
            after = _read_own(verdict, on_bytes, readers, is_cached=is_cached)
        else:
            after = _read_foreign(verdict, on_bytes, readers, is_cached=is_cached)
    except OSError as error:
        after = replace(verdict, condition=Condition.UNKNOWN, detail=_say_unread(error))
    return replace(after, seconds=time.perf_counter() - began)


def _read_own(verdict: Verdict, on_bytes: OnBytes, readers: int, *, is_cached: bool) -> Verdict:
    whose = _whose(verdict.given)
    result = verify_checkpoint(
        verdict.given.path,
        expect_step=whose.step,
        expect_attempt=whose.attempt,
        on_bytes=on_bytes,
        readers=readers,
        is_cached=is_cached,
    )
    condition = {True: Condition.VERIFIED, False: Condition.CORRUPT, None: Condition.UNKNOWN}[result.ok]
    return replace(verdict, condition=condition, detail=result.detail, read_bytes=result.bytes_read)


def _read_foreign(verdict: Verdict, on_bytes: OnBytes, readers: int, *, is_cached: bool) -> Verdict:
    given = verdict.given
    result = read_back(given.path, given.layout, verdict.stamp, on_bytes=on_bytes, readers=readers, is_cached=is_cached)
    condition = {True: Condition.COMPLETE, False: Condition.CORRUPT, None: Condition.UNKNOWN}[result.is_whole]
    detail = result.detail
    if result.is_whole and not result.unsealed:
        detail = f"{detail}; each matches the CRC32 that its file carries"
    return replace(verdict, condition=condition, detail=detail, read_bytes=result.size)


def _say_unread(error: OSError) -> str:
    what = f"{error.filename}: " if error.filename else ""
    return f"could not be read: {what}{error.strerror or error}"


def judge(verdicts: Sequence[Verdict]) -> bool | None:
    """True: all that is finished is good, and there is one; False: something is not; None: something is not known.

    In a folder of several, one that its save has not finished is no damage as long as another one is good.
    """
    if any(v.condition is Condition.CORRUPT for v in verdicts):
        return False
    if any(v.condition is Condition.UNKNOWN for v in verdicts):
        return None
    return any(v.is_good for v in verdicts)
