"""The kernel's log: GPU faults (Xid) that call for a reset, a reboot or the vendor, and file systems gone read-only."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trainer.contract import CheckResult

MAX_RECORDS = 20_000

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\).*?: (\d+),(.*)")
_OFF_THE_BUS = re.compile(r"NVRM: .*\b([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}).*fallen off the bus")
_READ_ONLY = re.compile(r"Remounting filesystem read-only", re.IGNORECASE)

# What the node needs before it may work again. Xids that end one program, are consequences of others (43, 45) or mere
# records (63, 92, 94) are not here: they condemn no node.
_NEEDS = {
    **dict.fromkeys((46, 48, 62, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158), "a GPU reset"),
    **dict.fromkeys((79, 167, 168), "a node reboot"),
    **dict.fromkeys((54, 64), "the vendor"),
}
_RECOVERY_ACTION = 154  # says itself what is needed: "... from 0x0 (None) to 0x1 (GPU Reset Required)"
_NEW_ACTION = re.compile(r"to 0x[0-9a-fA-F]+ \(([^)]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """One record of the kernel's log and how long ago it was written."""

    age_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    """Records of the window, oldest first."""

    lines: tuple[KernelLine, ...]


def measure(window_s: float) -> KernelLog:
    """Records not older than `window_s`; raises PermissionError where users may not read the kernel's log."""
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return parse_records(_read_records(fd), uptime_s=time.monotonic(), window_s=window_s)
    finally:
        os.close(fd)


def _read_records(fd: int) -> Iterator[bytes]:
    for _ in range(MAX_RECORDS):
        try:
            yield os.read(fd, 8192)  # one record a read
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # overwritten while we read: go on with the oldest that is left


def parse_records(records: Iterable[bytes], *, uptime_s: float, window_s: float) -> KernelLog:
    """Records of /dev/kmsg ("priority,sequence,microseconds,flags;text"); those of another shape are left out."""
    lines = []
    for record in records:
        head, _, text = record.decode("utf-8", "replace").partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not fields[2].isdigit():
            continue
        age_s = max(0.0, uptime_s - int(fields[2]) / 1e6)
        if age_s <= window_s:
            lines.append(KernelLine(age_s=age_s, text=text.partition("\n")[0]))
    return KernelLog(lines=tuple(lines))


def judge(log: KernelLog) -> CheckResult:
    """Fails with the newest record that says the node can't go on as it is."""
    for line in reversed(log.lines):
        fault = find_fault(line.text)
        if fault:
            return CheckResult(check="kernel_log", ok=False, detail=f"{line.age_s:.0f} s ago: {fault}")
    return CheckResult(check="kernel_log", ok=True)


def find_fault(text: str) -> str:
    """What one line of the kernel's log says is broken, or an empty text."""
    if found := _XID.search(text):
        bus_id, number, rest = found[1], int(found[2]), found[3]
        action = _NEW_ACTION.search(rest)
        if number == _RECOVERY_ACTION and action and action[1] != "None":
            return f"Xid 154 on GPU {bus_id}: {action[1]}"
        needs = _NEEDS.get(number)
        return f"Xid {number} on GPU {bus_id}: needs {needs}" if needs else ""
    if found := _OFF_THE_BUS.search(text):
        return f"GPU {found[1]} has fallen off the bus"
    return "a file system went read-only" if _READ_ONLY.search(text) else ""
