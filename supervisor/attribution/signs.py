"""What single lines of a job's output say: an ordered table of shapes, each with its kind and its weight as evidence.

Weights follow one rule: hardware line > Python traceback > network completion error > collective time-out > SIGTERM.
The ranks that complain loudest are usually victims: a closed connection says that a peer is gone, not why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from supervisor.probes.kernel_log import find_fault

MAX_TRACEBACKS = 64  # of one text; the first ones are nearest to the cause
MAX_SIGNS = 1000
MAX_LINE = 1000  # of a line; the rest says no more
_RANK_PREFIX = re.compile(r"^\s*(?:\[(?:rank|default)(\d+)\]:\s?)+")
_PATH_IN_QUOTES = re.compile(r"'(/[^']{1,300})'")


class Weight(IntEnum):
    """How much a sign counts; the smaller the more."""

    HARDWARE = 0
    MEMORY = 1  # the kernel or Slurm killed a process for its memory
    START = 2  # the program could not even be started
    TRACEBACK = 3
    CRASH = 4  # a signal that the process brought upon itself
    DESYNC = 5  # ranks that called different collectives
    NETWORK = 6
    HANG = 7
    TIMEOUT = 8
    KILLED = 9  # SIGKILL from somewhere
    EXIT = 10  # a code of its own choice
    VICTIM = 11
    TERMINATED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One thing that a source says. `node` None: the source does not know."""

    kind: str
    weight: Weight
    text: str  # for people
    node: str | None = None
    rank: int | None = None
    is_curable: bool = True
    blames_node: bool = False
    position: int = 0  # line number in its source: earlier beats later


@dataclass(frozen=True, slots=True)
class _Shape:
    pattern: re.Pattern[str]
    kind: str
    weight: Weight
    is_curable: bool = True
    blames_node: bool = False


def _shape(pattern: str, kind: str, weight: Weight, *, is_curable: bool = True, blames_node: bool = False) -> _Shape:
    return _Shape(re.compile(pattern, re.MULTILINE), kind, weight, is_curable, blames_node)


# First match wins, so the particular stands before the general.
_SHAPES: tuple[_Shape, ...] = (
    # the GPU or its surroundings, from the rank that sits on it
    _shape(r"uncorrectable ECC error|uncorrectable NVLink error", "gpu", Weight.HARDWARE, blames_node=True),
    _shape(r"NV_ERR_RESET_REQUIRED|GPU requires? (?:a )?reset", "gpu", Weight.HARDWARE, blames_node=True),
    _shape(r"CUDA error: system not yet initialized", "gpu", Weight.HARDWARE, blames_node=True),
    _shape(r"fallen off the bus|CUDA error: .*GPU is lost", "gpu", Weight.HARDWARE, blames_node=True),
    _shape(r"NET/IB ?: .*async fatal event|Got (?:non-)?fatal async event: port error", "network", Weight.HARDWARE),
    # leftovers and memory
    _shape(r"CUDA-capable device\(s\) is/are busy or unavailable", "leftover_process", Weight.TRACEBACK),
    _shape(r"(?i:CUDA out of memory)", "gpu_memory", Weight.TRACEBACK),
    _shape(r"(?i)detected \d+ oom[-_ ]kill events?(?:\(s\))? in ", "host_memory", Weight.MEMORY),
    _shape(r"srun: error: \S+: tasks? \S+: Out Of Memory", "host_memory", Weight.MEMORY),
    _shape(r"Out of memory: Killed process|Memory cgroup out of memory", "host_memory", Weight.MEMORY),
    # file systems, by the kernel's words
    _shape(r"No space left on device", "disk_full", Weight.TRACEBACK, is_curable=False),
    _shape(r"Disk quota exceeded", "disk_full", Weight.TRACEBACK, is_curable=False),
    _shape(r"Stale file handle", "filesystem", Weight.TRACEBACK),
    _shape(r"[Tt]ransport endpoint (?:shutdown|is not connected)", "filesystem", Weight.TRACEBACK),
    _shape(r"Read-only file system", "filesystem", Weight.TRACEBACK),
    _shape(r"\[Errno 5\] Input/output error", "filesystem", Weight.TRACEBACK),
    _shape(r"PytorchStreamWriter failed writing file", "filesystem", Weight.TRACEBACK),
    # peers that went away: consequences
    _shape(r"Connection (?:closed|reset) by (?:remote )?peer", "peer_lost", Weight.VICTIM),
    _shape(r"ncclRemoteError|remote process exited or there was a network error", "peer_lost", Weight.VICTIM),
    _shape(r"failed to send a keep-alive heartbeat to the rendezvous", "peer_lost", Weight.VICTIM),
    _shape(
        r"RendezvousConnectionError|Broken pipe|Connection refused, exceeded error retry", "peer_lost", Weight.VICTIM
    ),
    _shape(r"client socket has timed out after .* while trying to connect", "rendezvous", Weight.NETWORK),
    # NCCL's completion errors; 5 (flushed) only follows another fault
    _shape(r"Got completion .*with (?:error|status)[ =](?:\w+\()?5\b", "peer_lost", Weight.VICTIM),
    _shape(r"Got completion .*with (?:error|status)[ =](?:\w+\()?\d+", "network", Weight.NETWORK),
    # collectives that did not end
    _shape(r"watchdog got stuck for|Heartbeat monitor timed out", "hang", Weight.HANG),
    _shape(r"Watchdog caught collective operation timeout", "collective_timeout", Weight.TIMEOUT),
    _shape(r"failure detected by watchdog at work sequence id", "collective_timeout", Weight.TIMEOUT),
    # torn down from outside
    _shape(r"Signal 15 \(SIGTERM\)|SignalException|Process got signal: 15", "terminated", Weight.TERMINATED),
    # could not start
    _shape(r"^(?:SyntaxError|IndentationError): ", "configuration", Weight.START, is_curable=False),
    _shape(r"(?:^|: )(?:command not found|\S+: command not found)$", "configuration", Weight.START, is_curable=False),
    _shape(r"Error while finding module specification for ", "configuration", Weight.START, is_curable=False),
    _shape(r"exec: .*: cannot execute", "configuration", Weight.START, is_curable=False),
    _shape(r"can't open file '[^']*': \[Errno 2\]", "configuration", Weight.START, is_curable=False),
    _shape(r"execve\(\): .*: (?:No such file|Permission denied)", "configuration", Weight.START, is_curable=False),
)

# Exceptions that mean that the program as written can't run here, whichever node it is.
_CONFIGURATION = re.compile(r"^(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError)\b")
# What is missing on a first try, with its cure.
_NO_TORCH = re.compile(r"^ModuleNotFoundError: No module named '(?:torch|torch\.[\w.]+)'")
_TORCH_CURE = "give that Python torch (pip install '.[train]'), or begin command with the path of one that has it"
# What torchrun and its peers raise about somebody else's failure.
_SECOND_HAND = re.compile(
    r"(?:ChildFailedError|SignalException|KeyboardInterrupt|Rendezvous\w+Error|DistNetworkError)\b"
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|[A-Z]\w*)\b(?::|$)")
_KERNEL = re.compile(r"NVRM: |(?i:remounting filesystem read-only)")
_FRAME = re.compile(r'^\s*File "([^"]{1,400})", line (\d+)')
_FOREIGN_MEMORY = re.compile(r"Process \d+ has ([\d.]+) GiB memory in use")
_TOTAL_MEMORY = re.compile(r"total capac\w* of ([\d.]+) GiB")
_LOCAL_PATHS = ("/tmp", "/scratch", "/local", "/dev/shm", "/var")  # noqa: S108 - recognised, not used


def find_signs(text: str, node: str | None = None) -> tuple[Sign, ...]:
    """Everything that a text of any origin says, in its order."""
    lines = [_strip(line) for line in text.splitlines() if line]
    whole = "\n".join(line for _, line in lines)
    # most texts hold none of most shapes: one search of the whole spares one of each line
    shapes = tuple(shape for shape in _SHAPES if shape.pattern.search(whole))
    has_kernel_lines = bool(_KERNEL.search(whole))
    signs = list(_find_tracebacks(lines, node))
    told = {sign.position for sign in signs}
    for position, (rank, line) in enumerate(lines) if shapes or has_kernel_lines else ():
        sign = None if position in told else _read_line(line, node, rank, position, shapes)
        if sign is not None:
            signs.append(sign)
    return tuple(sorted(signs, key=lambda s: s.position)[:MAX_SIGNS])


def _strip(line: str) -> tuple[int | None, str]:
    line = line[:MAX_LINE]
    found = _RANK_PREFIX.match(line)
    if found is None:
        return None, line.rstrip()
    return int(found[1][:9]), line[found.end() :].rstrip()


def _read_line(
    line: str, node: str | None, rank: int | None, position: int, shapes: tuple[_Shape, ...] = _SHAPES
) -> Sign | None:
    fault = find_fault(line) if _KERNEL.search(line) else ""
    if fault:
        return Sign(
            kind="gpu" if "GPU" in fault else "filesystem",
            weight=Weight.HARDWARE,
            text=line.strip(),
            node=node,
            rank=rank,
            blames_node=True,
            position=position,
        )
    shape = next((shape for shape in shapes if shape.pattern.search(line)), None)
    if shape is None:
        return None
    sign = Sign(
        kind=shape.kind,
        weight=shape.weight,
        text=line.strip(),
        node=_named_node(line) or node,
        rank=rank,
        is_curable=shape.is_curable,
        blames_node=shape.blames_node,
        position=position,
    )
    return _refine(sign)


def _named_node(line: str) -> str | None:
    """The host that srun or NCCL puts in front of its own lines."""
    found = re.match(r"srun: error: ([\w.-]{1,255}): tasks? ", line) or re.match(
        r"(?:\[[^\]]*\] )?([\w.-]{1,255}):\d+:\d+ \[", line
    )
    return found[1] if found else None


def _refine(sign: Sign) -> Sign:
    """What further words of the line change."""
    if sign.kind == "gpu_memory" and _is_held_by_others(sign.text):
        return _with(sign, kind="leftover_process")
    path = _PATH_IN_QUOTES.search(sign.text)
    if sign.kind == "disk_full" and path and path[1].startswith(_LOCAL_PATHS):
        return _with(sign, is_curable=True)  # a disk of that node; another node has its own
    return sign


def _is_held_by_others(text: str) -> bool:
    total = _TOTAL_MEMORY.search(text)
    held = sum(float(size) for size in _FOREIGN_MEMORY.findall(text) if size.count(".") <= 1 and size != ".")
    return total is not None and held > 0.5 * float(total[1].strip(".") or "inf")


def _with(sign: Sign, *, kind: str | None = None, is_curable: bool | None = None) -> Sign:
    return Sign(
        kind=sign.kind if kind is None else kind,
        weight=sign.weight,
        text=sign.text,
        node=sign.node,
        rank=sign.rank,
        is_curable=sign.is_curable if is_curable is None else is_curable,
        blames_node=sign.blames_node,
        position=sign.position,
    )


# ---------------------------------------------------------------- tracebacks


def _find_tracebacks(lines: list[tuple[int | None, str]], node: str | None) -> Iterator[Sign]:
    """The last line of each Python traceback, with the place it came from. Ranks may be interleaved."""
    starts = [i for i, (_, line) in enumerate(lines) if line.lstrip().startswith("Traceback (most recent call last)")]
    for start in starts[:MAX_TRACEBACKS]:
        rank = lines[start][0]
        own = [(i, text) for i, (other, text) in enumerate(lines[start + 1 : start + 400], start + 1) if other == rank]
        sign = _read_traceback(own, node, rank)
        if sign is not None:
            yield sign


def _read_traceback(lines: list[tuple[int, str]], node: str | None, rank: int | None) -> Sign | None:
    place = ""
    for position, line in lines:
        frame = _FRAME.match(line)
        if frame:
            place = f"{frame[1].rpartition('/')[2]}:{frame[2]}"
        elif line and not line[0].isspace():
            return _read_exception(line, place, node, rank, position) if _EXCEPTION.match(line) else None
    return None


def _read_exception(line: str, place: str, node: str | None, rank: int | None, position: int) -> Sign | None:
    particular = _read_line(line, node, rank, position)
    if particular is not None:
        return particular
    if _SECOND_HAND.search(line.partition(":")[0]):
        return None
    text = f"{line} ({place})" if place else line
    text += f"; {_TORCH_CURE}" if _NO_TORCH.match(line) else ""
    is_configuration = bool(_CONFIGURATION.match(line))
    return Sign(
        kind="configuration" if is_configuration else "python_traceback",
        weight=Weight.TRACEBACK,
        text=text,
        node=node,
        rank=rank,
        is_curable=not is_configuration,
        position=position,
    )
