"""What a node can say of its ranks when the training hangs: stacks, Flight Recorder entries, /proc, last log lines.

Every rank gets something: one that has a line to the agent writes its own stacks; one whose interpreter is stuck has
faulthandler write them on a signal; of any other program py-spy reads them where it is installed and allowed to; and
/proc always tells whether a process runs, waits, or was stopped. Nothing waits for a rank that does not answer, and
the whole ends at its limit. It changes nothing in the ranks. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.agent.ranks import Linked, RankDesk
from trainer.agent.vitals import read_state
from trainer.agent.words import find_worker_log, read_tail
from trainer.descendants import choose_descendants, read_parents
from trainer.flight.digest import shorten_folder

LOG_TAIL_BYTES = 16 * 1024
MAX_STACKS_BYTES = 4 * 1024 * 1024
ANSWER_SHARE = 0.4  # of the limit that the ranks have for their own answers
SIGNAL_LIMIT_S = 0.5

_STATES = {"R": "running", "S": "waiting", "D": "waiting in the kernel", "T": "stopped", "t": "traced", "Z": "dead"}
_STATUS = ("Name", "State", "TracerPid", "Threads", "VmRSS", "SigPnd", "voluntary_ctxt_switches")


def collect_evidence(
    directory: Path, desk: RankDesk, pids: Mapping[int, int], log_dir: Path | None, limit_s: float
) -> list[str]:
    """Write what can be had of this node's ranks into `directory`; the names of the files, within `limit_s`.

    `pids`: {rank: pid} of those that have no line to the desk; they are looked for where none is given.
    """
    deadline = time.monotonic() + limit_s
    directory.mkdir(parents=True, exist_ok=True)
    linked = {line.rank: line for line in desk.linked()}
    processes = {**(pids or find_rank_processes(os.getpid())), **{rank: line.pid for rank, line in linked.items()}}
    request = desk.ask_evidence(directory)
    trigger_nccl_dumps(desk.path.parent)
    for rank, pid in processes.items():
        _write(directory / f"rank{rank}.proc.txt", describe_process(pid))
    _write_log_tails(directory, log_dir, sorted(processes))
    awake = frozenset(rank for rank, line in linked.items() if read_state(line.pid) not in ("T", "Z", ""))
    answers = desk.await_evidence(request, awake, limit_s * ANSWER_SHARE)
    silent = [rank for rank in processes if f"rank{rank}.stacks.txt" not in answers.get(rank, ())]
    told = signal_stuck(directory, [linked[rank] for rank in silent if rank in awake])
    without = {rank: processes[rank] for rank in silent if rank not in told}
    spy_on(directory, without, deadline)
    shorten_folder(directory, frozenset(processes), until=deadline, now=time.monotonic)
    return list_files(directory, processes)


def list_files(directory: Path, ranks: Mapping[int, int]) -> list[str]:
    """The names of what is there of these ranks."""
    starts = tuple(f"rank{rank}." for rank in ranks)
    ends = tuple(f"_rank_{rank}" for rank in ranks)
    with contextlib.suppress(OSError):
        return sorted(n for n in os.listdir(directory) if n.startswith(starts) or n.endswith(ends))  # noqa: PTH208
    return []


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(path)


def _write_log_tails(directory: Path, log_dir: Path | None, ranks: Sequence[int]) -> None:
    for local_rank, rank in enumerate(ranks):
        log = find_worker_log(log_dir, local_rank) if log_dir is not None else None
        if log is not None:
            _write(directory / f"rank{rank}.log.txt", read_tail(log, LOG_TAIL_BYTES))


# ---------------------------------------------------------------- which processes


def find_rank_processes(root: int) -> dict[int, int]:
    """{rank: pid} of the processes below `root` that were given a rank, without what these started."""
    parents = read_parents()
    ranks = {pid: rank for pid in choose_descendants(parents, root) if (rank := read_rank(pid)) is not None}
    found: dict[int, int] = {}
    for pid, rank in ranks.items():
        if ranks.get(parents[pid]) != rank:
            found.setdefault(rank, pid)
    return found


def read_rank(pid: int) -> int | None:
    """The rank in a process's environment, as it was started with; None: it has none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if item.startswith(b"RANK="):
                return int(item[5:])
    return None


# ---------------------------------------------------------------- /proc


def describe_process(pid: int) -> str:
    """A process and its threads as /proc has them."""
    fields = _read_status(pid)
    if not fields:
        return f"process {pid} is gone\n"
    state = read_state(pid)
    lines = [f"process {pid} is {_STATES.get(state, 'in an unknown state')} ({state})"]
    lines += [f"{name}: {fields[name]}" for name in _STATUS if name in fields]
    lines += ["command: " + _read_text(f"/proc/{pid}/cmdline").replace("\0", " ")[:500]]
    for thread in _list_threads(pid):
        base = f"/proc/{pid}/task/{thread}"
        letter = _read_text(f"{base}/stat").rpartition(")")[2].split()[:1]
        name, wchan = _read_text(f"{base}/comm").strip(), _read_text(f"{base}/wchan")
        lines.append(f"thread {thread} {name!r} {''.join(letter)} in {wchan or '?'}")
        lines += [f"    {call}" for call in _read_text(f"{base}/stack").splitlines()[:20]]
    return "\n".join(lines) + "\n"


def _list_threads(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:512]  # noqa: PTH208
    return []


def _read_status(pid: int) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in _read_text(f"/proc/{pid}/status").splitlines() if ":" in line)
    return {name: value.strip() for name, value in pairs}


def _read_text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


# ---------------------------------------------------------------- stacks of the silent


def signal_stuck(directory: Path, lines: Sequence[Linked]) -> set[int]:
    """Have faulthandler write the stacks of ranks whose own thread gets no turn; the ranks that did."""
    told: set[int] = set()
    sizes = {}
    for line in lines:
        if line.signal and line.stacks and is_caught(line.pid, line.signal):
            with contextlib.suppress(OSError):
                sizes[line] = os.stat(line.stacks).st_size  # noqa: PTH116
                os.kill(line.pid, line.signal)
    until = time.monotonic() + SIGNAL_LIMIT_S
    while sizes and time.monotonic() < until:
        time.sleep(0.05)
        for line, size in list(sizes.items()):
            text = _read_from(line.stacks, size)
            if text.endswith("\n") and "Current thread" in text:
                _write(directory / f"rank{line.rank}.stacks.txt", _turn_round(text))
                told.add(line.rank)
                del sizes[line]
    return told


def _read_from(path: str, offset: int) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as stream:  # noqa: PTH123
        stream.seek(offset)
        return stream.read(MAX_STACKS_BYTES).decode(errors="replace")
    return ""


def _turn_round(text: str) -> str:
    """The text of faulthandler with the thread that took the signal, the main thread as a rule, in front."""
    parts = [part.strip("\n") for part in text.split("\n\n")]
    parts.sort(key=lambda part: not part.startswith("Current thread"))
    return "written by faulthandler: the interpreter is stuck\n\n" + "\n\n".join(parts) + "\n"


def is_caught(pid: int, number: int) -> bool:
    """True when a process handles a signal; it would end one that doesn't."""
    with contextlib.suppress(KeyError, ValueError):
        return bool(int(_read_status(pid)["SigCgt"], 16) >> (number - 1) & 1)
    return False


def find_py_spy() -> str | None:
    """The program py-spy, on PATH or beside this Python; None where there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else None)


def spy_on(directory: Path, processes: Mapping[int, int], deadline: float) -> None:
    """Read the stacks of Python programs from outside, all at once, without stopping them."""
    program = find_py_spy()
    if program is None or not processes:
        return
    running = {}
    for rank, pid in processes.items():
        argv = [program, "dump", "--nonblocking", "--pid", str(pid)]
        with contextlib.suppress(OSError):
            running[rank] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
    for rank, process in running.items():
        try:
            text = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            continue
        if process.returncode == 0 and text:
            _write(directory / f"rank{rank}.stacks.txt", "read by py-spy\n\n" + text)


# ---------------------------------------------------------------- NCCL


def trigger_nccl_dumps(pipe_dir: Path) -> None:
    """Ask PyTorch for the Flight Recorder dumps of processes that listen on pipes of this folder."""
    with contextlib.suppress(OSError):
        for pipe in pipe_dir.glob("*.pipe"):
            with contextlib.suppress(OSError):
                fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # nobody reads: an error, not a wait
                try:
                    os.write(fd, b"1")
                finally:
                    os.close(fd)
