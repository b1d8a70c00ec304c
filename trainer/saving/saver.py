"""The rank's side of saving: begin a save, go on training, hear how it ended.

`begin` blocks for the staging only: until the state is copied, or until it is protected and its own small parts are
copied. Everything else happens in the writer, a process of its own (trainer.saving.writer). What goes wrong there,
here or at another rank ends the save on every rank with its reason, and never the training; a writer that is gone is
replaced. A file system that hangs makes a save stay in flight: nothing here waits for it.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from trainer.contract import checkpoint_name
from trainer.saving.image import Image
from trainer.saving.link import LinkLost, Message
from trainer.saving.meeting import meet
from trainer.saving.memory import StagingMemory
from trainer.saving.process import WriterProcess
from trainer.saving.protect import Region
from trainer.saving.staging import (
    Binding,
    DeviceCopies,
    Source,
    bind,
    copy_now,
    copy_regions,
    is_on_device,
    locate,
    touch_pages,
    use_huge_pages,
)
from trainer.session.claims import Claim

log = logging.getLogger("trainer.saving.saver")

ANSWER_LIMIT_S = 3.0  # for what the writer answers at once: the training waits for it
PREPARE_LIMIT_S = 300.0
HUGE_PAGES_WAIT_S = 10.0  # in `prepare`: they make saves cheaper, and are not worth a long wait at a start
STAGE_LIMIT_S = 3.0  # until a writer that protects gets on with its copy: the training may wait for it
_LOOK_S = 5.0

Staging = Literal["auto", "copy", "protect"]


class SaveInFlight(RuntimeError):
    """The save before has not ended yet."""


class Plan(Protocol):
    """What is saved: see trainer.saving.planning.SavePlan."""

    @property
    def image(self) -> Image: ...
    @property
    def metadata(self) -> bytes | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How one save ended. `blocking_s`: time that training waited; `total_s`: until it was read back."""

    step: int
    path: Path
    is_complete: bool
    is_verified: bool
    blocking_s: float
    total_s: float
    error: str = ""


@dataclass(slots=True, kw_only=True)
class _InFlight:
    save: str
    step: int
    began: float
    blocking_s: float = 0.0
    held: Sequence[Source] | None = None  # what is still copied behind us must not be freed


class Saver:
    """One rank's saves into the folder `checkpoints`; every rank makes one and the same calls in the same order.

    `gather` (all_gather_object, say) is called once, here. `node_size`: ranks on a node, so that another node reads
    back where there is one. `staging`: "protect" raises RuntimeError where write protection does not work, "auto"
    copies there. `keep_last`: prune older checkpoints; None where a service does. `claim`: nothing is published without
    it (trainer.session.claims); None where nobody else can be there. `nice`: of what writes.
    """

    def __init__(
        self,
        checkpoints: Path,
        *,
        run: str,
        attempt: int,
        rank: int,
        world: int,
        node_size: int,
        gather: Callable[[Any], list[Any]],
        staging: Staging = "auto",
        local_dir: Path | None = None,
        upload_bytes_per_s: float = 0.0,
        keep_last: int | None = None,
        claim: Claim | None = None,
        nice: int = 19,
        stage_limit_s: float = STAGE_LIMIT_S,
    ) -> None:
        self._checkpoints = checkpoints
        self._attempt = attempt
        self._rank = rank
        self._stage_limit_s = stage_limit_s
        self._in_use: tuple[str, ...] = ()
        self._meeting = meet(gather, rank=rank, world=world)
        self._config: dict[str, Any] = {
            "checkpoints": str(checkpoints),
            "run": run,
            "attempt": attempt,
            "rank": rank,
            "world": world,
            "node_size": node_size,
            "addresses": self._meeting.addresses,
            "secret": self._meeting.secret,
            "keep_last": keep_last,
            "claim": asdict(claim) if claim is not None else None,
            "nice": nice,
            "local_dir": str(local_dir) if local_dir is not None else "",
            "upload_bytes_per_s": upload_bytes_per_s,
        }
        self._wants_protection = staging != "copy"
        self._is_protecting = False
        self._writer: WriterProcess | None = None
        self._image: Image | None = None
        self._metadata: bytes | None = None
        self._memory: StagingMemory | None = None
        self._device: DeviceCopies | None = None
        self._binding: Binding | None = None
        self._huge_pages: threading.Thread | None = None
        self._begun: dict[int, int] = {}
        self._current: _InFlight | None = None
        self._results: deque[SaveResult] = deque()
        self._phase = "idle"
        self._is_closed = False
        self._lost: Message | None = None  # the save that went with its writer
        self._declined = ""  # what protection was last declined for
        self._await_writer()
        if self._wants_protection:
            self._choose_protection(is_needed=staging == "protect")

    # ------------------------------------------------------------ what a training calls

    @property
    def is_busy(self) -> bool:
        """True while a save is in flight on this rank."""
        self._hear()
        return self._current is not None

    @property
    def phase(self) -> str:
        """Where the save in flight is: "staging", "writing" or "verifying"; "idle" without one."""
        self._hear()
        return self._phase

    @property
    def is_protecting(self) -> bool:
        """True when large tensors are protected and copied behind the training, False when copied at once."""
        return self._is_protecting

    @property
    def holds_sources(self) -> bool:
        """True while tensors of the save in flight are still being copied behind the training."""
        self._hear()
        return self._current is not None and self._current.held is not None

    @property
    def writer_pid(self) -> int | None:
        """The process of this rank's writer."""
        return self._writer.pid if self._writer is not None else None

    def keep(self, paths: Sequence[Path]) -> None:
        """Never prune these: a training that resumed from one may want it again."""
        self._in_use = tuple(str(path) for path in paths)

    def prepare(self, plan: Plan, sources: Sequence[Source]) -> None:
        """Get everything ready for saves by this plan, so that the first one costs no more than the others.

        Raises OSError or RuntimeError when the memory is not there; `begin` does it again then, and only the save
        fails.
        """
        if self._is_closed:
            raise RuntimeError("prepare after close()")
        if self._current is not None:
            raise SaveInFlight("prepare while a save is in flight")
        try:
            self._prepare(plan, sources)
            if self._huge_pages is not None:
                self._huge_pages.join(HUGE_PAGES_WAIT_S)
        except LinkLost as error:
            self._writer_gone(str(error))
            raise RuntimeError(f"the writer does not answer: {error}") from error

    def begin(
        self,
        plan: Plan,
        sources: Sequence[Source] | Exception,
        *,
        step: int,
        samples: int,
        tokens: int | None = None,
        is_elastic: bool = True,
        is_held: bool = False,
        libraries: Mapping[str, str] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> float:
        """Begin a save of the sources as they are now; returns the seconds that the caller was blocked.

        They may be changed as soon as it returns. An exception in their place says that this rank has nothing to
        save: it fails then. With `is_held` everything is written, and published once rank 0 calls `confirm`.
        `meanwhile` is called while the writer protects memory, if it does; it must not raise nor ask this Saver
        anything. Raises `SaveInFlight`, RuntimeError after `close`, and nothing else for a save that fails: its
        result says why, on every rank.
        """
        if self._is_closed:
            raise RuntimeError("a save is begun after close(): nothing would write it")
        began = time.monotonic()
        self._hear()
        if self._current is not None:
            raise SaveInFlight(f"step {self._current.step} is still {self._phase}")
        count = self._begun[step] = self._begun.get(step, 0) + 1
        self._current = current = _InFlight(save=f"{step}.{count}", step=step, began=began)
        self._phase = "staging"
        request = {
            "step": step,
            "samples": samples,
            "tokens": tokens,
            "is_elastic": is_elastic,
            "is_held": is_held,
            "libraries": dict(libraries) if libraries is not None else read_versions(),
            "in_use": self._in_use,
        }
        try:
            if isinstance(sources, Exception):
                self._refuse(current, f"{type(sources).__name__}: {sources}")
            else:
                self._stage(plan, sources, request, current, meanwhile)
        except LinkLost as error:
            self._writer_gone(str(error))
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            self._refuse(current, f"{type(error).__name__}: {error}")
        current.blocking_s = time.monotonic() - began
        return current.blocking_s

    def confirm(self) -> None:
        """Let a save that is held be published; only rank 0's word counts."""
        self._tell_of_current({"kind": "confirm"})

    def cancel(self, reason: str) -> None:
        """Give up a save that is held; its result carries the reason, on every rank."""
        self._tell_of_current({"kind": "refuse", "error": reason})

    def _tell_of_current(self, message: Mapping[str, Any]) -> None:
        if self._rank == 0 and self._current is not None and self._writer is not None:
            try:
                self._writer.send({**message, "save": self._current.save})
            except LinkLost as error:
                self._writer_gone(str(error))

    def poll(self) -> SaveResult | None:
        """The result of the save that has ended since the last call, else None; never blocks."""
        self._hear()
        return self._results.popleft() if self._results else None

    def wait(self, timeout_s: float | None = None) -> SaveResult | None:
        """Wait for the save in flight and return its result; None if there is nothing new, or not in time."""
        self._await_end(timeout_s)
        return self._results.popleft() if self._results else None

    def close(self, timeout_s: float = 0.0, *, finishes: bool = False) -> None:
        """End the writer, after `timeout_s` also in the middle of a save; harmless when called again.

        With 0 s the save in flight is given up, unless `finishes`: then the writer is left to end it by itself.
        """
        if self._is_closed:
            return
        self._await_end(timeout_s)
        self._is_closed = True
        if self._writer is not None:
            if finishes and self._current is not None:
                self._writer.leave()
            else:
                self._writer.end(is_idle=self._current is None)
        self._writer = self._current = None
        self._phase = "idle"
        if self._device is not None:
            self._device.close()
        if self._memory is not None:
            self._memory.close()
        if self._meeting.listener is not None:
            self._meeting.listener.close()

    # ------------------------------------------------------------ staging

    def _stage(
        self,
        plan: Plan,
        sources: Sequence[Source],
        request: Mapping[str, Any],
        current: _InFlight,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        self._prepare(plan, sources)
        assert self._binding is not None
        assert self._memory is not None
        binding, image = self._binding, plan.image
        is_protecting = bool(binding.ranges)
        writer = self._await_writer()
        if is_protecting and writer.descriptor is not None and writer.descriptor.needs_pages:
            touch_pages(binding)
        writer.send(
            {
                "kind": "begin",
                "save": current.save,
                "request": request,
                "is_protecting": is_protecting,
                "limit_s": self._stage_limit_s,
            }
        )
        copied = self._device.begin(image, sources) if self._device is not None else None
        copy_now(image, sources, binding, self._memory)  # while the writer protects the rest
        if is_protecting:
            current.held = sources
            if meanwhile is not None:
                meanwhile()
            answer = writer.await_answer("protected", ANSWER_LIMIT_S, self._handle)
            self._copy_declined(answer["declined"], binding, self._memory)
        if copied is None:
            writer.send({"kind": "filled", "save": current.save})
        else:
            current.held = sources
            threading.Thread(target=_fill_after, args=(copied, writer, current.save), daemon=True).start()

    def _copy_declined(self, declined: Sequence[tuple[int, int, str]], binding: Binding, memory: StagingMemory) -> None:
        if not declined:
            return
        copy_regions(binding, [Region(address, size) for address, size, _ in declined], memory)
        why = "; ".join(sorted({why for _, _, why in declined}))
        if why != self._declined:  # not again in each save
            total = sum(size for _, size, _ in declined) / 2**20
            log.warning("%.1f MiB of the state can't be protected and are copied at once: %s", total, why)
            self._binding = None  # what lies between tensors may have changed: looked at anew for the next save
        self._declined = why

    def _prepare(self, plan: Plan, sources: Sequence[Source]) -> None:
        writer = self._await_writer()
        image = plan.image
        if self._image is None or image.signature != self._image.signature or plan.metadata != self._metadata:
            self._allocate(plan, needs_device=any(is_on_device(source) for source in sources))
        if not writer.has_memory:
            self._hand_over_memory(writer)
        if self._binding is None or self._binding.key != locate(sources):
            if self._device is None and self._memory is not None and any(is_on_device(s) for s in sources):
                self._device = DeviceCopies(self._memory)  # a state that was moved there since it was planned
            self._bind(writer, image, sources)

    def _allocate(self, plan: Plan, *, needs_device: bool) -> None:
        if self._device is not None:
            self._device.close()
        if self._memory is not None:
            self._memory.close()
        self._image = self._memory = self._device = self._binding = None
        if self._writer is not None:
            self._writer.has_memory = False
        memory = StagingMemory.allocate(plan.image.size)
        memory.fill(plan.image.frame)
        if not self._is_protecting:
            memory.touch()
        self._device = DeviceCopies(memory) if needs_device else None
        self._memory, self._image, self._metadata = memory, plan.image, plan.metadata

    def _hand_over_memory(self, writer: WriterProcess) -> None:
        assert self._image is not None
        assert self._memory is not None
        self._binding = None  # this writer has none yet
        message = {
            "kind": "prepare",
            "name": self._image.name,
            "size": self._image.size,
            "slots": [(slot.offset, slot.size, slot.crc_at) for slot in self._image.slots],
            "has_metadata": self._metadata is not None,
        }
        fds = [self._memory.fd]
        if self._metadata is not None:
            fds.append(_in_memory(self._metadata))
        try:
            writer.send(message, fds)
        finally:
            for fd in fds[1:]:
                os.close(fd)
        writer.await_answer("prepared", PREPARE_LIMIT_S, self._handle)
        writer.has_memory = True

    def _bind(self, writer: WriterProcess, image: Image, sources: Sequence[Source]) -> None:
        binding = bind(image, sources, is_protecting=self._is_protecting)
        self._huge_pages = use_huge_pages(binding) if binding.ranges else None
        writer.send(
            {
                "kind": "bind",
                "regions": [(region.address, region.size) for region in binding.regions],
                "ranges": [(part.address, part.size, part.offset) for part in binding.ranges],
                "twins": [(twin.offset, twin.source, twin.size) for twin in binding.twins],
            }
        )
        self._binding = binding

    def _refuse(self, current: _InFlight, error: str) -> None:
        if self._writer is not None:
            with suppress(LinkLost):
                self._writer.send({"kind": "refuse", "save": current.save, "error": error})
        self._end(current, error=f"rank {self._rank}: {error}")

    # ------------------------------------------------------------ the writer

    def _await_writer(self) -> WriterProcess:
        """The writer, ready to serve; a new one where there is none. Raises `LinkLost`."""
        writer = self._writer or self._start_writer()
        writer.await_ready()
        return writer

    def _start_writer(self) -> WriterProcess:
        self._binding = None
        writer = self._writer = WriterProcess(
            self._config, listener=self._meeting.listener, has_descriptor=self._wants_protection
        )
        if self._lost is not None:  # rank 0's may not have known of it yet when it lost ours
            with suppress(LinkLost):
                writer.send(self._lost)
        return writer

    def _choose_protection(self, *, is_needed: bool) -> None:
        try:
            problem = self._await_writer().probe()
        except LinkLost as error:
            self._writer_gone(str(error))
            problem = str(error)
        self._is_protecting = not problem
        if problem and is_needed:
            self.close()
            raise RuntimeError(f"write protection does not work here: {problem}")
        if problem:
            log.info("states are copied at once: %s", problem)
            self._wants_protection = False

    def _hear(self, within_s: float = 0.0) -> None:
        """Handle what the writer has said, having waited for its first word."""
        writer = self._writer
        if writer is None:
            return
        try:
            while (message := writer.hear(within_s)) is not None:
                self._handle(message)
                within_s = 0.0
        except LinkLost as error:
            self._writer_gone(str(error))

    def _await_end(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._current is not None:
            left = _LOOK_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return
            self._hear(within_s=left)

    def _handle(self, message: Message) -> None:
        current = self._current
        match message["kind"]:
            case "phase" if current is not None:
                self._phase = str(message["phase"])
            case "staged" if current is not None and current.save == message["save"]:
                current.held = None
            case "ended" if current is not None and current.save == message["save"]:
                self._end(
                    current,
                    is_complete=bool(message["is_complete"]),
                    is_verified=bool(message["is_verified"]),
                    error=str(message["error"]),
                )

    def _end(self, current: _InFlight, *, error: str, is_complete: bool = False, is_verified: bool = False) -> None:
        self._results.append(
            SaveResult(
                step=current.step,
                path=self._checkpoints / checkpoint_name(current.step, self._attempt),
                is_complete=is_complete,
                is_verified=is_verified,
                blocking_s=current.blocking_s,
                total_s=time.monotonic() - current.began,
                error=error,
            )
        )
        self._current = None
        self._phase = "idle"

    def _writer_gone(self, why: str) -> None:
        writer, self._writer = self._writer, None
        how = writer.end(is_idle=False) if writer is not None else "ended"
        if self._current is not None:
            self._lost = {"kind": "refuse", "save": self._current.save, "error": f"its writer {how}: {why}"}
            self._end(self._current, error=f"rank {self._rank}: its writer {how}: {why}")
        if writer is not None and writer.is_ready and not self._is_closed:
            self._start_writer()  # ready by the next save; one that never was is not started over and over


def _fill_after(copied: Callable[[], Any], writer: WriterProcess, save: str) -> None:
    """Say that the rank's part is in place when its copies from the GPU are done."""
    message: Message = {"kind": "filled", "save": save}
    try:
        copied()
    except RuntimeError as error:
        message = {"kind": "refuse", "save": save, "error": f"staging failed: {error}"}
    with suppress(LinkLost):
        writer.send(message)


def read_versions() -> dict[str, str]:
    """Versions of what writes a checkpoint."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    numpy = sys.modules.get("numpy")
    return versions | ({"numpy": str(numpy.__version__)} if numpy is not None else {})


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("checkpoint-metadata", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as stream:
        stream.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
