"""How verified checkpoints get to object storage: what is copied next, by which node, and what goes there.

Node 0 leads: it looks for the newest verified checkpoint that is not there yet and names it in `uploading.json`, which
is a lease: nothing is pruned under it. Every node copies the files of its own ranks, from its own disk where they are,
and says so in its UploadReport; when all have, node 0 puts the manifest there and writes OBJECT.json. Whoever starts
anew goes on from these files. Storage that is away costs one warning; only the newest checkpoint waits for it.
trainer.storage.mover runs it beside the training.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from trainer.contract import (
    MANIFEST_NAME,
    OBJECT_NAME,
    ContractError,
    Manifest,
    ManifestFile,
    ObjectRecord,
    ReadLease,
    RunPaths,
    UploadReport,
    parse,
    parse_checkpoint_name,
    write_json,
)
from trainer.storage.bandwidth import ByteBudget
from trainer.storage.leases import hold_lease
from trainer.storage.objects import ObjectStorageFailed, ObjectTier
from trainer.storage.stored import (
    CheckpointRejected,
    Found,
    checksum_bytes,
    find_checkpoints,
    parse_manifest,
    read_manifest_bytes,
    share_files,
    writer_rank,
)
from trainer.storage.tiers import KEEP_AT_LEAST, LocalTier

log = logging.getLogger("trainer.storage.uploads")

POLL_S = 5.0
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 300.0
OTHERS_WITHIN_S = 600.0  # without a sign of the other nodes for so long, their part is given up for now
SIGN_S = 5.0  # how often a node says that it copies still, while it is at one file

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverPlace:
    """Whose checkpoints a mover copies, and where to."""

    run_dir: str
    run: str
    attempt: int
    node: int
    nodes: int
    world: int
    node_size: int
    object_url: str  # the run's folder is made below it
    bytes_per_s: float = 0.0
    keep_last: int = 3
    local_dir: str = ""
    resume_step: int | None = None  # where a service had this attempt begin; None: without a service
    poll_s: float = POLL_S
    first_wait_s: float = FIRST_WAIT_S

    @property
    def url(self) -> str:
        return f"{self.object_url.rstrip('/')}/{self.run}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checkpoint to copy: its folder, its manifest, and which of its files are this node's."""

    path: Path
    data: bytes
    manifest: Manifest
    mine: tuple[ManifestFile, ...]

    @property
    def name(self) -> str:
        return self.path.name


# ---------------------------------------------------------------- decisions


def _history(name: str) -> tuple[int, int]:
    step, attempt = parse_checkpoint_name(name) or (0, 0)
    return attempt, step  # an attempt that was sent back to an earlier step is newer all the same


def is_of_line(name: str, *, attempt: int, resume_step: int | None) -> bool:
    """True for a checkpoint that this attempt goes on from, or made.

    A step of an earlier attempt beyond the one that the service went back to is of a course that was given up: it may
    be as whole as any, and the loss had gone wrong.
    """
    made_by, step = _history(name)
    return made_by == attempt or (made_by < attempt and (resume_step is None or step <= resume_step))


def choose_pending(
    found: Iterable[Found], uploaded: Iterable[str], *, attempt: int, resume_step: int | None = None
) -> list[str]:
    """Verified checkpoints that are newer than all that were uploaded, the newest first: that one is copied next.

    An older one is not made up for: by the time that it is there, it is of no use.
    """
    newest = max((_history(name) for name in uploaded), default=(-1, -1))
    verified = [f.path.name for f in found if f.is_verified]
    names = [name for name in verified if is_of_line(name, attempt=attempt, resume_step=resume_step)]
    return sorted((name for name in names if _history(name) > newest), key=_history, reverse=True)


def choose_expired(
    there: dict[str, bool], *, keep_last: int, attempt: int, resume_step: int | None = None
) -> list[str]:
    """What may go in object storage: all that is older than the newest whole ones, of which at least two stay.

    `there`: names, and whether each has its manifest. What is not of this attempt's line neither counts nor goes.
    """
    of_line = {name for name in there if is_of_line(name, attempt=attempt, resume_step=resume_step)}
    whole = sorted((name for name in of_line if there[name]), key=_history)
    keep = max(keep_last, KEEP_AT_LEAST)
    if len(whole) < keep:
        return []
    oldest = _history(whole[-keep])
    return sorted(name for name in of_line if _history(name) < oldest)


def choose_part(manifest: Manifest, place: MoverPlace) -> tuple[ManifestFile, ...]:
    """The files that this node copies: those of its own ranks; of an attempt of another size, its share."""
    ranks = [writer_rank(file.path) for file in manifest.files]
    if manifest.attempt != place.attempt or manifest.world_size != place.world or None in ranks:
        return tuple(share_files(manifest.files, place.nodes)[place.node])
    nodes = [min((rank or 0) // place.node_size, place.nodes - 1) for rank in ranks]
    return tuple(file for file, node in zip(manifest.files, nodes, strict=True) if node == place.node)


# ---------------------------------------------------------------- the work


class Mover:
    """One node's copying. `step` does what is to be done now and returns the seconds until the next call."""

    def __init__(
        self,
        place: MoverPlace,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._place = place
        self._is_ending = is_ending  # the training is over: what is in the way now is not waited for
        self._paths = RunPaths(Path(place.run_dir))
        self._local = LocalTier(Path(place.local_dir) / place.run) if place.local_dir else None
        self._wall, self._clock, self._wait = wall, clock, wait
        self._tier: ObjectTier | None = None
        self._report = UploadReport(attempt=place.attempt, node=place.node, time=0.0)
        self._bad: set[str] = set()  # names of checkpoints that are not what their manifests say
        self._others: dict[int, UploadReport] = {}  # as they were seen last
        self._told_at = clock()
        self.moved_at = clock()  # when this node, or one that it waits for, got on last

    def step(self) -> float:
        """Copy what is to be copied next; never raises for what storage, files or records are like."""
        before = self._report
        try:
            self._lead() if self._place.node == 0 else self._follow()
        except (ObjectStorageFailed, CheckpointRejected, OSError) as error:
            return self._failed(error)
        if before.failures:
            log.warning("object storage: working again after %d failed tries", before.failures)
        if self._report.failures:
            self._tell(failures=0, error="")
        return self._place.poll_s * random.uniform(0.8, 1.2)

    def _failed(self, error: Exception) -> float:
        failures = self._report.failures + 1
        if failures == 1:
            log.warning("object storage: %s (training goes on, the newest checkpoint is tried again)", error)
        self._tier = None
        self._tell(failures=failures, error=str(error)[:2000])
        wait_s = min(LONGEST_WAIT_S, self._place.first_wait_s * 2.0 ** min(failures - 1, 20))
        return wait_s * random.uniform(0.8, 1.2)

    @property
    def is_failing(self) -> bool:
        """True when the newest try failed: this node's, or that of the one which leads it."""
        leader = self._others.get(0)
        return self._report.failures > 0 or (leader is not None and leader.failures > 0)

    def is_done(self) -> bool:
        """True when the newest verified checkpoint is in object storage, as far as it is up to this node."""
        pending = self._pending()
        is_my_part_there = self._report.is_done and self._report.checkpoint in pending[:1]
        return not pending or (self._place.node != 0 and is_my_part_there)

    def _lead(self) -> None:
        pending = self._pending()
        if not pending:
            return
        name = pending[0]
        with hold_lease(self._paths.upload_lease(self._place.attempt), attempt=self._place.attempt, names=[name]):
            job = self._open(name)
            if job is None:
                return
            self._tell(checkpoint=name, is_done=False, pending=len(pending))
            self._copy(job)
            self._await_others(name)
            self._tiers().put_manifest(name, job.data)
        self._note(job)
        self._tell(uploaded=name, pending=0)
        log.info("checkpoint %s is in object storage", name)
        there = self._tiers().names()
        place = self._place
        for old in choose_expired(
            there, keep_last=place.keep_last, attempt=place.attempt, resume_step=place.resume_step
        ):
            self._tiers().remove(old)

    def _follow(self) -> None:
        self._look_at(0)
        lease = _read(ReadLease, self._paths.upload_lease(self._place.attempt))
        name = lease.checkpoints[0] if lease is not None and lease.checkpoints else ""
        if not name or parse_checkpoint_name(name) is None:
            return
        if (self._report.checkpoint, self._report.is_done) == (name, True):
            return
        job = self._open(name)
        if job is not None:
            self._tell(checkpoint=name, is_done=False)
            self._copy(job)

    def _pending(self) -> list[str]:
        found = [f for f in find_checkpoints(self._paths.checkpoints()) if f.path.name not in self._bad]
        uploaded = [f.path.name for f in found if self._is_noted(f.path)]
        if self._report.uploaded:
            uploaded.append(self._report.uploaded)
        return choose_pending(found, uploaded, attempt=self._place.attempt, resume_step=self._place.resume_step)

    def _is_noted(self, path: Path) -> bool:
        record = _read(ObjectRecord, path / OBJECT_NAME)
        return record is not None and record.url == f"{self._place.url}/{path.name}"

    def _open(self, name: str) -> Job | None:
        """The checkpoint as it is now; None when it is gone: what was pruned needs no copy."""
        path = self._paths.checkpoints() / name
        if not (path / MANIFEST_NAME).exists():
            return None
        data = read_manifest_bytes(path)
        manifest = parse_manifest(path, data)
        if manifest.run != self._place.run:  # copied in among this run's by somebody
            self._bad.add(name)
            return None
        return Job(path=path, data=data, manifest=manifest, mine=choose_part(manifest, self._place))

    def _copy(self, job: Job) -> None:
        for file in job.mine:
            self._copy_file(job, file)
            self._tell(bytes_sent=self._report.bytes_sent + file.size_bytes)
        self._tell(is_done=True)

    def _copy_file(self, job: Job, file: ManifestFile) -> None:
        local = self._local
        if local is not None and local.has(job.name, file):
            try:
                self._tiers().put_file(job.name, file, local.path(job.name) / file.path)
            except (CheckpointRejected, OSError) as error:
                log.warning("%s; taking it from the shared file system", error)
                local.drop(job.name, file.path)
            else:
                return
        try:
            self._tiers().put_file(job.name, file, job.path / file.path)
        except CheckpointRejected:
            self._bad.add(job.name)  # the service finds it too, when it is to be resumed from
            raise

    def _await_others(self, name: str) -> None:
        missing = set(range(1, self._place.nodes))
        until = self._clock() + OTHERS_WITHIN_S
        while missing:
            for node in sorted(missing):
                report = self._look_at(node)
                if report is None or report.checkpoint != name:
                    continue
                if report.failures and self._is_ending():
                    raise ObjectStorageFailed(f"{name}: node {node} can't copy its part: {report.error}")
                if report.is_done:
                    missing.discard(node)
                    until = self._clock() + OTHERS_WITHIN_S
            if missing and self._clock() >= until:
                raise ObjectStorageFailed(f"{name}: nodes {sorted(missing)} have not copied their part")
            if missing:
                self._wait(min(1.0, self._place.poll_s))

    def _look_at(self, node: int) -> UploadReport | None:
        """Another node's report; a new one is a sign that something gets on."""
        report = _read(UploadReport, self._paths.upload_report(self._place.attempt, node))
        if report is not None and report != self._others.get(node):
            self._others[node] = report
            if not report.failures:
                self.moved_at = self._clock()
        return report

    def _moved(self) -> None:
        """A piece of a file was read or sent: the others are told now and then, for whom a file may take long."""
        self.moved_at = self._clock()
        if self.moved_at - self._told_at >= SIGN_S:
            self._tell()

    def _tiers(self) -> ObjectTier:
        if self._tier is None:
            self._tier = ObjectTier(self._place.url, budget=ByteBudget(self._place.bytes_per_s), moved=self._moved)
        return self._tier

    def _note(self, job: Job) -> None:
        record = ObjectRecord(
            attempt=job.manifest.attempt,
            step=job.manifest.step,
            url=f"{self._place.url}/{job.name}",
            manifest_xxh3_128=checksum_bytes(job.data),
            size_bytes=sum(file.size_bytes for file in job.manifest.files),
            time=self._wall(),
        )
        if job.path.is_dir():  # else it was removed meanwhile: no folder is made for the record alone
            write_json(job.path / OBJECT_NAME, record)

    def _tell(self, **changes: object) -> None:
        self._report = replace(self._report, **changes, time=self._wall())  # type: ignore[arg-type]
        self._told_at = self._clock()
        with suppress(OSError):
            write_json(self._paths.upload_report(self._place.attempt, self._place.node), self._report)


def _read(kind: type[T], path: Path) -> T | None:
    try:
        return parse(kind, path.read_bytes())
    except (OSError, ContractError):
        return None
