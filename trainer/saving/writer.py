"""The process beside each rank that copies behind it, writes, checksums, publishes and reads back. No torch.

Its argument is the descriptor of its link to the rank. One loop hears the rank, the other writers and its own threads;
everything that may take long is done in threads, so that it always answers. What follows from a message is decided by
the coordinator in rank 0's writer.

When its rank is gone it ends, after the save in flight if all bytes of it are staged: the training's state was whole.
"""

from __future__ import annotations

import ctypes
import os
import queue
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.saving.coordinator import Action, Coordinator, Describe, Discard, Open, Publish, Tell, Vouch
from trainer.saving.door import Door
from trainer.saving.guard import Guard
from trainer.saving.image import Slot
from trainer.saving.job import Behind, Job, Prepared
from trainer.saving.link import Link, LinkLost, Message, connect
from trainer.saving.memory import StagingMemory
from trainer.saving.nearby import NearbyDisk
from trainer.saving.protect import Protector, Range, Region, leave_out, split
from trainer.saving.publish import Destination, Folder, describe, discard, open_folder, publish, vouch
from trainer.session.claims import Claim, ClaimLost

FINISH_LIMIT_S = 120.0  # for the save in flight when the rank is gone
_CONNECT_LIMIT_S = 5.0
_RECONNECT_S = 0.2
_REACHED_WITHIN_S = 60.0  # rank 0's writer, before a save is given up for it
_PROBE_LIMIT_S = 2.0
_LOOK_S = 1.0


class Writer:
    """The loop. `config` is the rank's first message."""

    def __init__(self, rank_link: Link, guard: Guard, config: Mapping[str, Any]) -> None:
        self._config = config
        self._rank = int(config["rank"])
        self._rank_link: Link | None = rank_link
        self._guard = guard
        self._secret = bytes.fromhex(str(config["secret"]))
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._protector: Protector | None = None
        self._prepared: Prepared | None = None
        self._behind = Behind()
        self._ranges: list[Range] = []
        self._regions: list[Region] = []
        self._job: Job | None = None
        self._finish_by: float | None = None
        self._rank_process = os.pidfd_open(int(config["pid"]))  # the link alone may live on in forked children of it
        self._destination = Destination(
            checkpoints=Path(config["checkpoints"]),
            run=str(config["run"]),
            attempt=int(config["attempt"]),
            world=int(config["world"]),
            keep_last=config["keep_last"],
            claim=Claim(**config["claim"]) if config["claim"] is not None else None,
        )
        local = str(config["local_dir"])
        self._nearby = NearbyDisk(Path(local) / self._destination.run) if local else None
        if config["has_descriptor"]:
            self._protector = Protector(rank_link.take_fd(), int(config["pid"]))
        self._hub = _Hub(self) if self._rank == 0 else None
        self._center: Link | None = None
        self._unsent: list[Message] = []
        if self._hub is not None:
            self._hub.listen(socket.socket(fileno=rank_link.take_fd()))
        else:
            self._connect()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until the rank is gone and nothing is left to finish."""
        while not self._is_done():
            for ready in self._wait():
                ready()
            while not self._events.empty():
                self._handle_event(self._events.get())
            self._close_job()

    def _is_done(self) -> bool:
        if self._finish_by is None:
            return False
        is_idle = self._job is None and (self._hub is None or self._hub.is_idle)
        return is_idle or time.monotonic() > self._finish_by

    def _wait(self) -> list[Callable[[], None]]:
        sources: dict[int, Callable[[], None]] = {self._bell: self._hear_bell}
        if self._rank_link is not None:
            sources[self._rank_link.fileno()] = self._hear_rank
            sources[self._rank_process] = self._rank_gone
        if self._center is not None:
            sources[self._center.fileno()] = self._hear_center
        if self._hub is not None:
            sources |= self._hub.sources()
        poll = select.poll()
        for fd in sources:
            poll.register(fd, select.POLLIN)
        return [sources[fd] for fd, _ in poll.poll(_LOOK_S * 1000)]

    def post(self, event: Message) -> None:
        """Let the loop handle an event; for any thread."""
        self._events.put(event)
        os.eventfd_write(self._bell, 1)

    def _hear_bell(self) -> None:
        os.eventfd_read(self._bell)

    # ------------------------------------------------------------ the rank

    def _hear_rank(self) -> None:
        assert self._rank_link is not None
        try:
            while (message := self._rank_link.receive(0.0)) is not None:
                self._handle_rank(message)
        except LinkLost:
            self._rank_gone()

    def _rank_gone(self) -> None:
        if self._rank_link is None:
            return
        self._rank_link.close()
        self._rank_link = None
        self._finish_by = time.monotonic() + FINISH_LIMIT_S
        if self._job is not None and not self._job.is_staged:
            self._report({"kind": "failed", "save": self._job.save, "error": "it ended before its state was staged"})
            self._job.end({"kind": "ended"})
        elif self._job is not None and self._hub is not None:
            self._hub.handle(0, {"kind": "orphaned", "save": self._job.save})

    def _tell_rank(self, message: Message) -> None:
        if self._rank_link is None:
            return
        try:
            self._rank_link.send(message)
        except LinkLost:
            self._rank_gone()

    def _handle_rank(self, message: Message) -> None:
        match message["kind"]:
            case "prepare":
                self._prepare(message)
            case "probe":
                self._probe(int(message["address"]), int(message["size"]))
            case "bind":
                self._bind(message)
            case "begin":
                self._begin(message)
            case "filled" if self._job is not None and self._job.save == message["save"]:
                self._job.fill()
            case "refuse":
                self._report({"kind": "failed", "save": message["save"], "error": message["error"]})
            case "confirm":
                self._report(message)

    def _prepare(self, message: Message) -> None:
        assert self._rank_link is not None
        memory = StagingMemory(self._rank_link.take_fd(), int(message["size"]))
        metadata = None
        if message["has_metadata"]:
            with open(self._rank_link.take_fd(), "rb") as stream:  # noqa: PTH123 - a descriptor, no path
                metadata = stream.read()
        if self._prepared is not None:
            self._prepared.memory.close()
        memory.touch()
        slots = tuple(Slot(offset=o, size=s, crc_at=tuple(crc_at)) for o, s, crc_at in message["slots"])
        self._prepared = Prepared(memory, str(message["name"]), slots, metadata)
        self._behind = Behind()
        self._tell_rank({"kind": "prepared"})

    def _bind(self, message: Message) -> None:
        self._ranges = [Range(*part) for part in message["ranges"]]
        self._regions = [Region(*region) for region in message["regions"]]
        self._behind = Behind(split(self._ranges, self._regions), message["twins"])
        if self._protector is not None:
            with suppress(OSError):  # told when they are to be protected
                self._protector.register(self._regions)

    def _probe(self, address: int, size: int) -> None:
        """Protect a page of the rank, wait until it is written to, and say what it held before."""
        held = bytearray(size)
        answer: Message = {"kind": "probed", "held": "", "error": ""}
        try:
            assert self._protector is not None
            region = Region(address, size)
            self._guard.arm(_PROBE_LIMIT_S * 2)
            answer["error"] = self._protector.protect([region]).get(region, "")
            if not answer["error"]:
                self._tell_rank({"kind": "protected"})
                if not self._protector.waiting(_PROBE_LIMIT_S):
                    answer["error"] = "a write to a protected page did not wait"
                _copy_and_release(self._protector, region, held)
        except OSError as error:
            answer["error"] = str(error)
        finally:
            self._guard.disarm()
        self._tell_rank({**answer, "held": bytes(held).hex()})

    def _begin(self, message: Message) -> None:
        assert self._prepared is not None
        save = str(message["save"])
        job = self._job = Job(save, self._prepared, message["request"], self.post, self._nearby)
        behind, protector = Behind(), None
        if message["is_protecting"]:
            behind, protector = self._behind, self._protector
            declined = self._protect(float(message["limit_s"]))
            if declined:  # the rank copies these itself
                behind = behind.without(declined)
            regions = [(region.address, region.size, why) for region, why in declined.items()]
            self._tell_rank({"kind": "protected", "save": save, "declined": regions})
        job.stage(behind, protector, self._guard)
        if self._hub is not None:
            self._hub.handle(0, {"kind": "begun", "save": save})  # from now on a rank that is lost is missed

    def _protect(self, limit_s: float) -> dict[Region, str]:
        if self._protector is None:
            return dict.fromkeys(self._regions, "no descriptor")
        try:
            self._guard.arm(limit_s)
        except OSError as error:
            return dict.fromkeys(self._regions, f"nobody would watch over it: {error}")
        return self._protector.protect(self._regions, self._guard.beat)

    def _leave_out(self, hindered: Sequence[int]) -> None:
        """From the next save on, protect nothing between tensors that kept the training from going on."""
        if hindered:
            self._regions = leave_out(self._regions, self._ranges, hindered)
            self._behind = Behind(split(self._ranges, self._regions), self._behind.twins)
            if self._protector is not None:
                self._protector.leave_out(self._regions)

    # ------------------------------------------------------------ events of threads

    def _handle_event(self, event: Message) -> None:
        match event["kind"]:
            case "thread_ended":
                return
            case "told":
                self.hear(event["message"])
            case "connected":
                self._connected(event["link"])
            case "carried_out" if self._hub is not None:
                self._hub.carried_out(event["event"])
            case "staged" if self._job is not None and event["save"] == self._job.save:
                self._job.is_staged = True
                self._tell_rank({"kind": "staged", "save": event["save"]})
                self._report(event)
                self._leave_out(self._job.hindered)
            case _:
                self._report(event)

    def _report(self, event: Message) -> None:
        """Say something to the coordinator."""
        if self._hub is not None:
            self._hub.handle(0, event)
        elif self._center is None:
            self._unsent.append(event)
        else:
            try:
                self._center.send(event)
            except LinkLost:
                self._center_gone()

    def hear(self, message: Message) -> None:
        """Handle a message of the coordinator."""
        job = self._job
        if job is None or job.save != message["save"] or job.ended is not None:
            return
        match message["kind"]:
            case "open":
                self._tell_rank({"kind": "phase", "phase": "writing"})
                job.open(Path(message["path"]), self._lower_priority)
            case "compare":
                job.compare(self._lower_priority)
            case "peer_written" | "peer_sealed":
                job.hear_peer(message)
            case "nearby" if self._nearby is not None and self._rank % int(self._config["node_size"]) == 0:
                self._nearby.publish(job.folder, str(message["manifest"]).encode())
            case "complete":
                self._tell_rank({"kind": "phase", "phase": "verifying"})
            case "ended":
                job.end(message)

    def _close_job(self) -> None:
        if self._job is not None and self._job.is_over:
            ended = self._job.ended
            self._job = None
            if ended is not None:
                self._tell_rank(ended)

    def _lower_priority(self) -> None:
        # For the threads that write, not for the one that the training may wait for in a page fault.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), int(self._config["nice"]))
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    # ------------------------------------------------------------ the writer of rank 0, seen from the others

    def _connect(self) -> None:
        threading.Thread(target=self._connect_for_ever, name="connect", daemon=True).start()

    def _connect_for_ever(self) -> None:
        while True:
            for host, port in self._config["addresses"]:
                with suppress(LinkLost):
                    link = connect((str(host), int(port)), self._secret, self._rank, _CONNECT_LIMIT_S)
                    self.post({"kind": "connected", "link": link})
                    return
            time.sleep(_RECONNECT_S)

    def _connected(self, link: Link) -> None:
        self._center = link
        unsent, self._unsent = self._unsent, []
        for event in unsent:
            self._report(event)

    def _hear_center(self) -> None:
        try:
            while self._center is not None and (message := self._center.receive(0.0)) is not None:
                self.hear(message)
        except LinkLost:
            self._center_gone()

    def _center_gone(self) -> None:
        if self._center is None:
            return
        self._center.close()
        self._center = None
        if self._job is not None and self._job.ended is None:
            self._job.end(
                {
                    "kind": "ended",
                    "save": self._job.save,
                    "is_complete": False,
                    "is_verified": False,
                    "error": "rank 0: its writer ended in the middle of the save",
                }
            )
        self._connect()


class _Hub:
    """What rank 0's writer does beyond the others': it hears them all, and publishes."""

    def __init__(self, writer: Writer) -> None:
        config = writer._config  # noqa: SLF001 - one thing in two parts
        self._writer = writer
        self._destination = writer._destination  # noqa: SLF001
        self._secret = writer._secret  # noqa: SLF001
        self._coordinator = Coordinator(world=int(config["world"]), node_size=int(config["node_size"]))
        self._members: dict[int, Link] = {}
        self._world = int(config["world"])
        self._door: Door | None = None
        self._work: queue.SimpleQueue[Callable[[], Message | None]] = queue.SimpleQueue()
        self._pending = 0
        self._folders: dict[str, Folder] = {}  # of the save in flight; the publisher's alone
        threading.Thread(target=self._publish_for_ever, name="publish", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """True when the publisher has nothing left to do."""
        return self._pending == 0

    def listen(self, listener: socket.socket) -> None:
        self._door = Door(listener, self._secret, world=self._world, welcome=self._welcome)

    def sources(self) -> dict[int, Callable[[], None]]:
        found: dict[int, Callable[[], None]] = {}
        if self._door is not None:
            found |= self._door.sources()
        for rank, link in self._members.items():
            found[link.fileno()] = lambda rank=rank, link=link: self._hear(rank, link)  # type: ignore[misc]
        return found

    def _welcome(self, rank: int, link: Link) -> None:
        self._lose(rank)  # a new writer of the rank: the old one is gone
        self._members[rank] = link

    def _hear(self, rank: int, link: Link) -> None:
        try:
            while self._members.get(rank) is link and (message := link.receive(0.0)) is not None:
                self.handle(rank, message)
        except LinkLost:
            if self._members.get(rank) is link:
                self._lose(rank)

    def _lose(self, rank: int) -> None:
        link = self._members.pop(rank, None)
        if link is not None:
            link.close()
            self._perform(self._coordinator.lose(rank))

    def carried_out(self, event: Message | None) -> None:
        self._pending -= 1
        if event is not None:
            self.handle(0, event)

    def handle(self, rank: int, message: Message) -> None:
        self._perform(self._coordinator.handle(rank, message))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell():
                    self._tell(action)
                case Open() | Describe() | Publish() | Vouch() | Discard():
                    self._pending += 1
                    self._work.put(lambda action=action: self._carry_out(action))  # type: ignore[misc]

    def _tell(self, action: Tell) -> None:
        if action.rank == 0:
            self._writer.post({"kind": "told", "message": action.message})
            return
        link = self._members.get(action.rank)
        if link is not None:
            try:
                link.send(action.message)
            except LinkLost:
                self._lose(action.rank)

    # ------------------------------------------------------------ in the publisher's thread

    def _publish_for_ever(self) -> None:
        while True:
            event = self._work.get()()
            self._writer.post({"kind": "carried_out", "event": event})

    def _open(self, save: str, step: int) -> Message:
        for folder in self._folders.values():  # of saves that have ended
            folder.close()
        self._folders.clear()
        opened: Message = {"kind": "opened", "save": save, "there": None, "path": str(self._destination.path(step))}
        match open_folder(self._destination, step):
            case Folder() as folder:
                self._folders[save] = folder
            case there:
                opened["there"] = there
        return opened

    def _carry_out(self, action: Open | Describe | Publish | Vouch | Discard) -> Message | None:
        destination, folder = self._destination, self._folders.get(action.save)
        try:
            match action:
                case Open():
                    return self._open(action.save, int(action.request["step"]))
                case Describe():
                    described = describe(destination, action.request, action.files).decode()
                    return {"kind": "described", "save": action.save, "manifest": described}
                case Publish():
                    assert folder is not None
                    manifest = action.manifest or describe(destination, action.request, action.files).decode()
                    publish(destination, folder, manifest.encode())
                    return {"kind": "published", "save": action.save, "manifest": manifest}
                case Vouch():
                    assert folder is not None
                    vouch(destination, folder, action.request, [str(file["path"]) for file in action.bad])
                    problems = "; ".join(f"{file['path']} {file['reason']}" for file in action.bad)
                    return {"kind": "vouched", "save": action.save, "error": problems}
                case Discard() if folder is not None:
                    discard(folder)
        except ClaimLost as error:
            return {"kind": "failed", "save": action.save, "error": str(error)}
        except OSError as error:
            return {"kind": "failed", "save": action.save, "error": f"{error.filename}: {error.strerror}"}
        except Exception as error:  # noqa: BLE001 - whatever it is: the ranks must hear of it
            return {"kind": "failed", "save": action.save, "error": f"{type(error).__name__}: {error}"}
        return None


def _copy_and_release(protector: Protector, region: Region, held: bytearray) -> None:
    try:
        part = Range(region.address, region.size, 0)
        protector.read([part], ctypes.addressof(ctypes.c_char.from_buffer(held)))
    finally:
        protector.release(region.address, region.size)


def main(arguments: list[str]) -> int:
    """Serve the rank at the other end of the descriptor that is the only argument."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training; we end with it
    connection = socket.socket(fileno=int(arguments[0]))
    _allow_many_files()
    guard = Guard()  # before there is a thread, and before there is anything that must end with this process
    link = Link(connection)
    try:
        config = link.receive()
        assert config is not None
        writer = Writer(link, guard, config)
        link.send({"kind": "ready"})
    except LinkLost:
        return 0
    writer.run()
    os._exit(0)  # threads that hang in a dead file system must not hold it


def _allow_many_files() -> None:
    """Rank 0's writer has a connection to each rank: the usual soft limit of 1,024 is a job of so many."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
