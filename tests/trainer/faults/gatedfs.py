"""A file system whose calls a test can hold, slow down or refuse, one by one: FUSE, spoken to the kernel directly.

It hands everything on to a folder behind it. A held call is not answered, so that whoever made it waits in the kernel,
while all other calls go on: a writer can be stopped exactly where a test wants it. It runs in a process of its own;
when that ends, waiting calls fail with ENOTCONN and nobody is left hanging.

    python -m tests.trainer.faults.gatedfs BEHIND MOUNTED     needs root and /dev/fuse
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import json
import os
import select
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ANY = "*"
_MAX_WRITE = 1024 * 1024
_HEADER = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ROOT = 1
_DIRECT_IO = 1  # every read and write comes here, none stays in the page cache
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2

_NAMES = {
    1: "lookup",
    3: "getattr",
    4: "setattr",
    5: "readlink",
    6: "symlink",
    9: "mkdir",
    10: "unlink",
    11: "rmdir",
    12: "rename",
    14: "open",
    15: "read",
    16: "write",
    17: "statfs",
    18: "release",
    20: "fsync",
    25: "flush",
    26: "init",
    27: "opendir",
    28: "readdir",
    29: "releasedir",
    30: "fsyncdir",
    35: "create",
    45: "rename2",
}
_INTERRUPT = 36
_CLOSING = frozenset({"flush", "release", "releasedir"})  # of a process that ends: could not be interrupted any more
_UNANSWERED = frozenset({2, 42})  # forget, batch_forget


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to calls of an operation on names that match: `held`, refused with `error`, or late by `delay_s`."""

    operation: str
    pattern: str
    held: bool = False
    error: int = 0
    delay_s: float = 0.0

    def matches(self, operation: str, name: str) -> bool:
        return fnmatch.fnmatch(operation, self.operation) and fnmatch.fnmatch(name, self.pattern)


@dataclass(slots=True)
class Request:
    """One call of the kernel; `name` is the path below the mount that it is about."""

    operation: str
    unique: int
    node: int
    body: bytes
    name: str


@dataclass(slots=True)
class GatedFs:
    """Serves one mount until its descriptor ends. Rules come as JSON lines on stdin, held calls are told on stdout."""

    behind: Path
    device: int
    rules: list[Rule] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)
    late: list[tuple[float, Request]] = field(default_factory=list)
    paths: dict[int, str] = field(default_factory=lambda: {_ROOT: ""})
    nodes: dict[str, int] = field(default_factory=lambda: {"": _ROOT})
    last_node: int = _ROOT

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.device, select.POLLIN)
        poll.register(0, select.POLLIN)
        while True:
            ready = dict(poll.poll(self._until_next_ms()))
            self._answer_late()
            if 0 in ready and not self._take_rules():
                return
            if self.device in ready and not self._take_request():
                return

    def _until_next_ms(self) -> float | None:
        return max(0.0, min(at for at, _ in self.late) - time.monotonic()) * 1000 if self.late else None

    def _answer_late(self) -> None:
        now = time.monotonic()
        due = [request for at, request in self.late if at <= now]
        self.late = [(at, request) for at, request in self.late if at > now]
        for request in due:
            self._answer(request)

    def _take_rules(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        self.rules = [Rule(**rule) for rule in json.loads(line)]
        freed, self.held = self.held, []
        for request in freed:
            self._dispatch(request)
        print(json.dumps({"rules": len(self.rules)}), flush=True)
        return True

    def _take_request(self) -> bool:
        try:
            data = os.read(self.device, _MAX_WRITE + 4096)
        except OSError as error:
            return error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT)  # ENOENT: the call was interrupted
        size, opcode, unique, node, *_ = _HEADER.unpack_from(data)
        if opcode in _UNANSWERED:
            return True
        if opcode == _INTERRUPT:
            self._let_go(struct.unpack_from("<Q", data, _HEADER.size)[0])
            return True
        operation, body = _NAMES.get(opcode, ""), data[_HEADER.size : size]
        self._dispatch(Request(operation, unique, node, body, self._name(operation, node, body)))
        return True

    def _let_go(self, unique: int) -> None:
        """A caller of a held call got a signal: as with NFS, it ends if it is to be killed, or calls again."""
        for request in [request for request in self.held if request.unique == unique]:
            self.held.remove(request)
            self._reply(request, -errno.EINTR)

    def _name(self, operation: str, node: int, body: bytes) -> str:
        skipped = {
            "lookup": 0,
            "symlink": 0,
            "unlink": 0,
            "rmdir": 0,
            "mkdir": 8,
            "rename": 8,
            "rename2": 16,
            "create": 16,
        }
        path = self.paths.get(node, "")
        if operation not in skipped:
            return path
        names = body[skipped[operation] :].split(b"\0")
        name = names[1 if operation.startswith("rename") else 0].decode()  # a file that is renamed: its new name
        return f"{path}/{name}".lstrip("/")

    def _dispatch(self, request: Request) -> None:
        rule = next((rule for rule in self.rules if rule.matches(request.operation, request.name)), None)
        if rule is None or request.operation in _CLOSING:
            self._answer(request)
        elif rule.held:
            self.held.append(request)
            print(json.dumps({"held": request.operation, "name": request.name}), flush=True)
        elif rule.error:
            self._reply(request, -rule.error)
        else:
            self.late.append((time.monotonic() + rule.delay_s, request))

    def _answer(self, request: Request) -> None:
        work: Callable[[Request], bytes] | None = getattr(self, f"_{request.operation}_call", None)
        if work is None:
            self._reply(request, -errno.ENOSYS)
            return
        try:
            self._reply(request, 0, work(request))
        except OSError as error:
            self._reply(request, -(error.errno or errno.EIO))

    def _reply(self, request: Request, error: int, data: bytes = b"") -> None:
        try:
            os.write(self.device, _ANSWER.pack(_ANSWER.size + len(data), error, request.unique) + data)
        except FileNotFoundError:
            return  # whoever called was killed meanwhile

    # ------------------------------------------------------------ what the calls do

    def _path(self, name: str) -> Path:
        return self.behind / name

    def _entry(self, name: str) -> bytes:
        found = self._path(name).lstat()
        if name not in self.nodes:
            self.last_node += 1
            self.nodes[name], self.paths[self.last_node] = self.last_node, name
        return struct.pack("<QQQQII", self.nodes[name], 0, 0, 0, 0, 0) + self._attr(self.nodes[name], found)

    def _attr(self, node: int, found: os.stat_result) -> bytes:
        times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime), 0, 0, 0)
        kind = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
        return _ATTR.pack(node, found.st_size, found.st_blocks, *times, *kind)

    def _init_call(self, request: Request) -> bytes:
        major, minor, ahead, flags = struct.unpack_from("<IIII", request.body)
        wanted = flags & (1 << 0 | 1 << 5 | 1 << 18 | 1 << 22)  # async reads, big writes, parallel lookups, max_pages
        return struct.pack(
            "<IIIIHHIIHHII6I", major, min(minor, 38), ahead, wanted, 64, 48, _MAX_WRITE, 1, 256, 0, 0, 0, *([0] * 6)
        )

    def _lookup_call(self, request: Request) -> bytes:
        return self._entry(request.name)

    def _getattr_call(self, request: Request) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attr(request.node, self._path(request.name).lstat())

    def _setattr_call(self, request: Request) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", request.body)
        if valid & 8:
            os.truncate(self._path(request.name), size)
        return self._getattr_call(request)

    def _mkdir_call(self, request: Request) -> bytes:
        self._path(request.name).mkdir()
        return self._entry(request.name)

    def _symlink_call(self, request: Request) -> bytes:
        self._path(request.name).symlink_to(request.body.split(b"\0")[1].decode())
        return self._entry(request.name)

    def _readlink_call(self, request: Request) -> bytes:
        return bytes(self._path(request.name).readlink())

    def _unlink_call(self, request: Request) -> bytes:
        self._path(request.name).unlink()
        self._forget(request.name)
        return b""

    def _rmdir_call(self, request: Request) -> bytes:
        self._path(request.name).rmdir()
        self._forget(request.name)
        return b""

    def _forget(self, name: str) -> None:
        self.nodes.pop(name, None)  # its number may still be in use by an open file; a new file gets another

    def _rename_call(self, request: Request) -> bytes:
        return self._rename(request, 8)

    def _rename2_call(self, request: Request) -> bytes:
        return self._rename(request, 16)

    def _rename(self, request: Request, skipped: int) -> bytes:
        (folder,) = struct.unpack_from("<Q", request.body)
        old_name, new_name = (name.decode() for name in request.body[skipped:].split(b"\0")[:2])
        old = f"{self.paths[request.node]}/{old_name}".lstrip("/")
        new = f"{self.paths[folder]}/{new_name}".lstrip("/")
        self._path(old).rename(self._path(new))
        self._forget(new)
        for name in [name for name in self.nodes if name == old or name.startswith(f"{old}/")]:
            node = self.nodes.pop(name)
            self.paths[node] = new + name[len(old) :]
            self.nodes[self.paths[node]] = node
        return b""

    def _open_call(self, request: Request) -> bytes:
        (flags,) = struct.unpack_from("<I", request.body)
        return self._opened(request.name, flags)

    def _create_call(self, request: Request) -> bytes:
        flags, mode = struct.unpack_from("<II", request.body)
        os.close(os.open(self._path(request.name), flags & ~os.O_DIRECT | os.O_CREAT, mode))
        return self._entry(request.name) + self._opened(request.name, flags & ~(os.O_EXCL | os.O_CREAT))

    def _opened(self, name: str, flags: int) -> bytes:
        return struct.pack("<QIi", os.open(self._path(name), flags & ~(os.O_DIRECT | os.O_APPEND)), _DIRECT_IO, 0)

    def _read_call(self, request: Request) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", request.body)
        return os.pread(handle, size, offset)

    def _write_call(self, request: Request) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", request.body)
        return struct.pack("<II", os.pwrite(handle, request.body[40 : 40 + size], offset), 0)

    def _release_call(self, request: Request) -> bytes:
        os.close(struct.unpack_from("<Q", request.body)[0])
        return b""

    def _fsync_call(self, request: Request) -> bytes:
        os.fsync(struct.unpack_from("<Q", request.body)[0])
        return b""

    def _flush_call(self, request: Request) -> bytes:
        return b""

    def _opendir_call(self, request: Request) -> bytes:
        return struct.pack("<QIi", os.open(self._path(request.name), os.O_RDONLY | os.O_DIRECTORY), 0, 0)

    def _readdir_call(self, request: Request) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", request.body)
        found = b""
        for number, entry in enumerate(_list(self._path(request.name))):
            raw = entry.name.encode()
            kind = 4 if entry.is_dir(follow_symlinks=False) else 10 if entry.is_symlink() else 8
            record = struct.pack("<QQII", entry.inode(), number + 1, len(raw), kind) + raw
            record += bytes(-len(record) % 8)
            if number >= offset and len(found) + len(record) <= size:
                found += record
        return found

    def _releasedir_call(self, request: Request) -> bytes:
        return self._release_call(request)

    def _fsyncdir_call(self, request: Request) -> bytes:
        return self._fsync_call(request)

    def _statfs_call(self, request: Request) -> bytes:
        found = os.statvfs(self.behind)
        sizes = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I6I", *sizes, found.f_bsize, 255, found.f_frsize, 0, *([0] * 6))


def _list(path: Path) -> Iterator[os.DirEntry[str]]:
    return iter(sorted(os.scandir(path), key=lambda entry: entry.name))


def mount(mounted: Path) -> int:
    """The kernel's end of a new FUSE mount; raises OSError without root or /dev/fuse."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)  # a call that was heard of may be taken back
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"gatedfs", os.fsencode(mounted), b"fuse", _MS_NOSUID | _MS_NODEV, options):
        number = ctypes.get_errno()
        os.close(device)
        raise OSError(number, os.strerror(number), str(mounted))
    return device


def unmount(mounted: Path) -> None:
    """Take a mount away, also one that is in use or whose server is gone."""
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(mounted), _MNT_DETACH)


def main(behind: str, mounted: str) -> None:
    device = mount(Path(mounted))
    print(json.dumps({"rules": 0}), flush=True)
    GatedFs(Path(behind), device).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
