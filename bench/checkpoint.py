"""`make bench-checkpoint`: what a save, a verification and a restore cost, against DCP's own and against bare copies.

Ends with 1 when a target is missed, and says which. Everyone is measured in turns in the same run, on the same disk, in
fresh folders, after a round that warms up; times are of the slowest rank, numbers are ratios of medians.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.checkpoint_ranks import run_ranks
from bench.checkpoint_verify import measure_verify
from bench.report import RESULTS, Target, describe_machine, finish, render_table, say
from bench.stage import BenchFailed

WORLD = 2
REPEATS = {0.25: 9, 1.0: 7, 4.0: 3}  # of each way, by the size of the state in GB
STEPS_GB, READ_GB = 0.25, 1.0
RESHARDED = (4, 2)  # numbers of ranks: from the one to the other, and back
_READS = 5
_ROUNDS, _QUIET_STEPS = 6, 4  # of saves while training steps, and of undisturbed steps before each

DEFINITIONS = {
    "block_vs_sync": "median time of dcp.save / median time that training stands still for our save, both with "
    "collecting the state; of the slowest of the ranks",
    "block_vs_thread": "our blocking time / that of dcp.async_save with a thread and a stager that keeps its memory",
    "block_vs_process": "the same with a process and a stager that keeps its shared memory",
    "block_vs_memcpy": "our blocking time / time to copy the tensors of the state into memory that was touched before",
    "durable_vs_sync": "from the call of our save until it is verified / dcp.save and fsync of its files and folder",
    "step_slowdown": "mean time by the step from the call of a save until it is verified, the call included / mean "
    "undisturbed step just before; median of the rounds. 1.05 is 5 % slower",
    "worst_step": "longest step in such a period / mean undisturbed step; median of the rounds",
    "verify_vs_read": "bandwidth of verify --full as it tells it / of a plain read loop, neither in the page cache",
    "restore_vs_dcp": "our restore, every byte verified / get_state_dict, dcp.load and set_state_dict of a checkpoint "
    "by dcp.save, neither in the page cache; the worse of 4 to 2 and 2 to 4 ranks",
    "copy_...": "the same with staging by a copy alone: what machines without userfaultfd get",
}


OF_EACH_SIZE = (
    Target(key="block_vs_sync", at_least=40, what="time of dcp.save / our blocking time"),
    Target(key="block_vs_thread", at_most=1, what="our blocking time / that of async_save, THREAD"),
    Target(key="block_vs_process", at_most=1, what="our blocking time / that of async_save, PROCESS"),
    Target(key="block_vs_memcpy", at_most=1.4, what="our blocking time / a bare copy of the same bytes"),
    Target(key="durable_vs_sync", at_most=1.3, what="our time until verified / dcp.save and fsync"),
)
OF_THE_WHOLE = (
    Target(key="step_slowdown", at_most=1.1, what="step while a save is made / undisturbed step"),
    Target(key="verify_vs_read", at_least=0.8, what="bandwidth of verify --full / of a plain read loop"),
    Target(key="restore_vs_dcp", at_most=1.15, what="our verified restore / dcp.load, the worse resharding"),
)


def judge(result: Mapping[str, Any]) -> list[str]:
    """The targets that were missed, or not measured, a sentence each."""
    sizes = result.get("sizes", [])
    measured = {size["state_gb"] for size in sizes}
    missed = [f"{gb:g} GB were not measured" for gb in REPEATS if gb not in measured]
    for size in sizes:
        missed += [f"{size['state_gb']:g} GB: {said}" for target in OF_EACH_SIZE if (said := _miss(target, size))]
    return missed + [said for target in OF_THE_WHOLE if (said := _miss(target, result))]


def _miss(target: Target, numbers: Mapping[str, Any]) -> str:
    value = numbers.get(target.key)
    if value is None:
        return f"{target.key} was not measured"
    return "" if target.is_met(value) else f"{target.key} is {value:g}, the target {target.bound} ({target.what})"


# ---------------------------------------------------------------- from times to ratios


def rate_size(state_gb: float, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one size of state; of each ratio, both times come from the same turns."""
    plain, thread, process, copy = measured["groups"]
    return {
        "state_gb": state_gb,
        "block_vs_sync": _ratio(plain["sync"]["block_s"], plain["ours"]["block_s"]),
        "block_vs_thread": _ratio(thread["ours"]["block_s"], thread["thread"]["block_s"]),
        "block_vs_process": _ratio(process["ours"]["block_s"], process["process"]["block_s"]),
        "block_vs_memcpy": _ratio(plain["ours"]["block_s"], plain["memcpy"]["block_s"]),
        "durable_vs_sync": _ratio(plain["ours"]["total_s"], plain["sync"]["total_s"]),
        "copy_block_vs_sync": _ratio(copy["sync"]["block_s"], copy["copy"]["block_s"]),
        "copy_block_vs_thread": _ratio(copy["copy"]["block_s"], thread["thread"]["block_s"]),
        "copy_block_vs_process": _ratio(copy["copy"]["block_s"], process["process"]["block_s"]),
        "copy_block_vs_memcpy": _ratio(copy["copy"]["block_s"], copy["memcpy"]["block_s"]),
        "copy_durable_vs_sync": _ratio(copy["copy"]["total_s"], copy["sync"]["total_s"]),
        **measured,
    }


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return round(statistics.median(over) / statistics.median(under), 3)


def rate_steps(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Slowdown and worst step of each way, medians of the rounds; the target is for the default staging."""
    rated = {
        name: {
            "step_slowdown": round(statistics.median(each["slowdown"]), 3),
            "worst_step": round(statistics.median(each["worst"]), 3),
            "steps_of_a_save": statistics.median(each["steps"]),
        }
        for name, each in measured.items()
    }
    return {
        "step_slowdown": rated["ours"]["step_slowdown"],
        "worst_step": rated["ours"]["worst_step"],
        "copy_step_slowdown": rated["copy"]["step_slowdown"],
        "copy_worst_step": rated["copy"]["worst_step"],
        "steps": {"of_each_way": rated, "measured": measured},
    }


def rate_restores(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Of each resharding our time over DCP's, and the worse of them."""
    ratios = {name: _ratio(times["ours"], times["dcp"]) for name, times in measured.items()}
    return {"restore_vs_dcp": max(ratios.values()), "restores": {"ratios": ratios, "measured": measured}}


def rate_verify(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Bandwidth of `verify --full` over that of reading the same files."""
    return {"verify_vs_read": _ratio(measured["verify_gb_s"], measured["read_gb_s"]), "verify": measured}


def rate_gpu(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Blocking time over that of a bare copy to pinned memory, where there is a GPU."""
    return {"gpu_block_vs_copy": _ratio(measured["block_s"], measured["copy_s"]), "gpu": measured}


# ---------------------------------------------------------------- measuring


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="on the disk to measure; left as it was")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part only: misses the others")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ranks are ended and files removed on the way out
    machine = describe_machine()
    try:
        result = _measure(options.folder, options.only or PARTS)
    except BenchFailed as error:
        print(f"bench-checkpoint: {error}", file=sys.stderr)
        return 1
    result = {**result, "definitions": DEFINITIONS, "missed": judge(result)}
    _tell(result)
    finish("checkpoint", result, machine)
    for sentence in result["missed"]:
        print(f"bench-checkpoint: {sentence}", file=sys.stderr)
    return 1 if result["missed"] else 0


def _measure(parent: Path, parts: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"ranks": WORLD, "sizes": []}
    parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
            measured = _MEASURES[part](Path(folder))
        result |= {"sizes": [*result["sizes"], measured]} if part.endswith("GB") else measured
        say(f"{part}: measured")
    return result


def _measure_size(state_gb: float, folder: Path) -> dict[str, Any]:
    return rate_size(state_gb, run_ranks(WORLD, folder, "saves:measure_saves", state_gb, REPEATS[state_gb]))


def _measure_steps(folder: Path) -> dict[str, Any]:
    ways = ("ours", "copy", "thread", "process")
    return rate_steps(run_ranks(WORLD, folder, "steps:measure_steps", STEPS_GB, ways, _ROUNDS, _QUIET_STEPS))


def _measure_reads(folder: Path) -> dict[str, Any]:
    for world in RESHARDED:
        run_ranks(world, folder, "reads:write_checkpoints", READ_GB)
    restores = {
        f"{before} to {after}": run_ranks(after, folder, "reads:measure_restores", READ_GB, before, _READS)
        for before, after in (RESHARDED, RESHARDED[::-1])
    }
    verify = measure_verify(folder / f"ours-{RESHARDED[0]}", _READS)
    return {**rate_restores(restores), **rate_verify(verify)}


def _measure_gpu(folder: Path) -> dict[str, Any]:
    if not has_gpu():
        return {"gpu": "none here"}
    return rate_gpu(run_ranks(1, folder, "gpu:measure_gpu", _READS))


_MEASURES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    **{f"{gb:g} GB": partial(_measure_size, gb) for gb in REPEATS},
    "steps": _measure_steps,
    "reads": _measure_reads,
    "gpu": _measure_gpu,
}
PARTS = tuple(_MEASURES)


def has_gpu() -> bool:
    """True when torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


# ---------------------------------------------------------------- the result


def _tell(result: Mapping[str, Any]) -> None:
    for size in result["sizes"]:
        print(f"\nSaving {size['bytes'] / 1e9:.2f} GB on {WORLD} ranks, seconds: median (least to most)")
        print(render_table(("save", "in turns with", "training stands still", "until done"), _time_rows(size)))
    print()
    print(render_table(("what", "in the result", "measured", "target"), _target_rows(result)))


def _time_rows(size: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            ", ".join(other for other in group if other != name),
            _spread(times["block_s"]),
            _spread(times["total_s"]),
        )
        for group in size["groups"]
        for name, times in group.items()
    ]


def _spread(times_s: Sequence[float]) -> str:
    return f"{statistics.median(times_s):.4f} ({min(times_s):.4f} to {max(times_s):.4f})"


def _target_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    of_sizes: list[tuple[str, ...]] = [
        (f"{target.what}, {size['state_gb']:g} GB", target.key, f"{size[target.key]:g}", target.bound)
        for target in OF_EACH_SIZE
        for size in result["sizes"]
    ]
    of_all = [(t.what, t.key, f"{result[t.key]:g}", t.bound) for t in OF_THE_WHOLE if t.key in result]
    return of_sizes + of_all


if __name__ == "__main__":
    sys.exit(main())
