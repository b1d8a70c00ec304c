"""What exit codes and signals say by themselves: the weakest words of a process, used when it left no others."""

from __future__ import annotations

from supervisor.attribution.signs import Sign, Weight
from trainer import contract

_SIGNAL_NAMES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_CONTRACT_CODES = frozenset(
    {
        contract.EXIT_RESUBMIT,
        contract.EXIT_DO_NOT_RESTART,
        contract.EXIT_NODE_CHECK_FAILED,
        contract.EXIT_NODE_SILENT,
        contract.EXIT_CHECKPOINT_REJECTED,
        contract.EXIT_DIVERGED,
    }
)
_CRASHES = frozenset({4, 7, 8, 11})


def read_exit(code: int | None, who: str, *, node: str | None = None, rank: int | None = None) -> Sign | None:
    """The sign in an exit code (128+n or -n for signal n); None for success, no code, 1 and the contract's codes."""
    if code == 127:
        return _sign("configuration", Weight.START, f"{who}: command not found (127)", node, rank, is_curable=False)
    if code == 126:
        return _sign("configuration", Weight.START, f"{who}: not executable (126)", node, rank, is_curable=False)
    number = signal_of(code)
    if number is None:
        # 1 is what every unhandled exception ends with, a victim's too; the contract's codes are judged elsewhere
        is_own = code is not None and code > 1 and code not in _CONTRACT_CODES
        return _sign("exit_code", Weight.EXIT, f"{who}: exit code {code}", node, rank) if is_own else None
    text = f"{who}: {_SIGNAL_NAMES.get(number, f'signal {number}')}"
    if number == 15:
        return _sign("terminated", Weight.TERMINATED, text, node, rank)
    if number == 9:
        # the kernel's memory killer leaves nothing else behind, but so does everybody else's SIGKILL
        return _sign("killed", Weight.KILLED, text, node, rank)
    # SIGABRT is how NCCL's watchdog and failed assertions end a process: by itself a consequence
    weight = Weight.CRASH if number in _CRASHES else Weight.KILLED
    return _sign("crash", weight, text, node, rank)


def signal_of(code: int | None) -> int | None:
    """The signal's number in an exit code, or None."""
    if code is None:
        return None
    if code < 0:
        return -code
    return code - 128 if 128 < code < 128 + 65 else None


def _sign(kind: str, weight: Weight, text: str, node: str | None, rank: int | None, *, is_curable: bool = True) -> Sign:
    return Sign(kind=kind, weight=weight, text=text, node=node, rank=rank, is_curable=is_curable)
