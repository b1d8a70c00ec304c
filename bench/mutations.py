"""`make mutate`: real checkpoints, damaged in thousands of drawn ways; nothing damaged may be believed or resumed from.

Each mutation hits the newest of three checkpoints. The service and the training are then asked what they would resume
from: the older one next to it, and nothing else. What touches no content must not cost a checkpoint, and what can't be
read must not be called corrupt. Exits 1 when one of these fails; --only NUMBER does one of them again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from bench.mutation_judges import ask_loader, ask_service, ask_training
from bench.mutation_kinds import DAMAGES, FORBIDDEN, HARMLESS, Kind, Nothing, Scene, lay_out, put_back
from bench.mutation_scene import BEFORE, KEPT, TARGET, Library, make_library
from bench.report import describe_machine, finish, render_table, say
from bench.stage import BenchFailed
from trainer.contract import MANIFEST_NAME

MUTATIONS = 10_000
HARMLESS_SHARE = 0.08  # beside them
LOAD_EVERY = 20  # so many mutations are tried with the loader as well, which needs torch
LIMIT_S = 1800  # for all of them
PART = 250  # that one process does at a time
SEED = 4
NOBODY = 65534
SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One mutation and what came of it. `fault` empty: as it must be."""

    number: int
    kind: str
    what: str
    is_harmless: bool
    is_loaded: bool = False
    is_resumed: bool = False
    fault: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mutations", description=__doc__)
    parser.add_argument("--count", type=int, default=MUTATIONS, help="mutations that touch content")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", type=int, help="do this one alone, and say what came of it")
    options = parser.parse_args(argv)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="mutate-") as place:
        folder = Path(place)
        folder.chmod(0o755)  # what a file forbids is tried as somebody else, who must get to it
        say("saving the checkpoints that are damaged")
        library = make_library(folder / "library")
        if options.only is not None:
            scene = lay_out(library, folder / "only")
            trial = run_trial(scene, options.seed, options.only, is_harmless=options.only >= options.count)
            print(json.dumps(asdict(trial), indent=2))
            return 0
        began = time.monotonic()
        trials = run_trials(library, folder, options.seed, options.count, options.processes)
    result = summarize(trials, options.seed, time.monotonic() - began)
    _tell(result)
    finish("mutations", result, machine)
    return 0 if is_clean(result) else 1


# ---------------------------------------------------------------- trials


def run_trials(library: Library, folder: Path, seed: int, count: int, processes: int) -> list[Trial]:
    """Mutations 0 to `count` - 1 touch content, those after them are harmless; in several processes, sorted."""
    total = count + int(count * HARMLESS_SHARE)
    parts = [range(at, min(at + PART, total)) for at in range(0, total, PART)]
    shares = [_Share(library=library, folder=folder, seed=seed, count=count, numbers=part) for part in parts]
    trials: list[Trial] = []
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("forkserver")) as pool:
        for done in pool.map(_run_share, shares, timeout=LIMIT_S):
            trials += done
            if len(trials) % (10 * PART) < PART:
                say(f"{len(trials)} of {total}")
    return sorted(trials, key=lambda trial: trial.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    library: Library
    folder: Path
    seed: int
    count: int
    numbers: range


def _run_share(share: _Share) -> list[Trial]:
    folder = share.folder / f"scene-{share.numbers.start}"
    scene = lay_out(share.library, folder)
    try:
        return [run_trial(scene, share.seed, n, is_harmless=n >= share.count) for n in share.numbers]
    finally:
        shutil.rmtree(folder)


def run_trial(scene: Scene, seed: int, number: int, *, is_harmless: bool) -> Trial:
    """One mutation of the scene's target, which is whole again afterwards."""
    draw = Random(f"{seed}/{number}")
    kind, what = _mutate(draw, scene, HARMLESS if is_harmless else {**DAMAGES, **FORBIDDEN})
    trial = Trial(number=number, kind=kind.__name__, what=what, is_harmless=is_harmless)
    try:
        if is_harmless:
            return _judge_harmless(scene, trial)
        if kind in FORBIDDEN:
            return _judge_forbidden(scene, trial)
        return _judge_damaged(scene, trial, is_loaded=number % LOAD_EVERY == 0)
    finally:
        put_back(scene)


def _mutate(draw: Random, scene: Scene, kinds: Mapping[Kind, int]) -> tuple[Kind, str]:
    while True:
        (kind,) = draw.choices(list(kinds), list(kinds.values()))
        try:
            return kind, kind(draw, scene)
        except Nothing:
            put_back(scene)


# ---------------------------------------------------------------- what must come of one


def _judge_damaged(scene: Scene, trial: Trial, *, is_loaded: bool) -> Trial:
    answers = {"the service": ask_service(scene.run_dir), "the training": ask_training(scene.run_dir)}
    blind = [who for who, answer in answers.items() if answer.resumed != BEFORE]
    resumed = [who for who, answer in answers.items() if answer.resumed not in ("", *KEPT)]
    if is_loaded and scene.target.is_dir() and ask_loader(scene.target):
        blind.append("the loader")
        resumed.append("the loader")
    fault = f"{' and '.join(blind)} did not go back to {BEFORE}: {answers}" if blind else ""
    return replace(trial, is_loaded=is_loaded, is_resumed=bool(resumed), fault=fault)


def _judge_forbidden(scene: Scene, trial: Trial) -> Trial:
    """Nobody may say that it is bad, and nobody may start from it."""
    with _as_nobody():
        if not os.access(scene.checkpoints / BEFORE / MANIFEST_NAME, os.R_OK, effective_ids=True):
            raise BenchFailed(f"uid {NOBODY} can't read {scene.checkpoints}: set TMPDIR to a folder that all can enter")
        answers = {"the service": ask_service(scene.run_dir), "the training": ask_training(scene.run_dir)}
    resumed = [who for who, answer in answers.items() if answer.resumed not in ("", *KEPT)]
    condemned = [who for who, answer in answers.items() if TARGET in answer.condemned]
    words = [f"{who} would resume from it" for who in resumed] + [f"{who} calls it corrupt" for who in condemned]
    return replace(trial, is_resumed=bool(resumed), fault="; ".join(words))


def _judge_harmless(scene: Scene, trial: Trial) -> Trial:
    answers = {"the service": ask_service(scene.run_dir), "the training": ask_training(scene.run_dir)}
    refused = [who for who, answer in answers.items() if answer.resumed != TARGET]
    return replace(trial, fault=f"{' and '.join(refused)} refused it: {answers}" if refused else "")


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may read everything: what a file forbids shows only as somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# ---------------------------------------------------------------- the result


def summarize(trials: Sequence[Trial], seed: int, seconds: float) -> dict[str, Any]:
    """Counts, in all and of each kind, and the first faults with the numbers that do them again."""
    touching = [trial for trial in trials if not trial.is_harmless]
    harmless = [trial for trial in trials if trial.is_harmless]
    kinds: dict[str, Counter[str]] = {}
    for trial in trials:
        kinds.setdefault(trial.kind, Counter()).update(count=1, faults=bool(trial.fault), resumed=trial.is_resumed)
    return {
        "mutations": len(touching),
        "undetected": sum(bool(trial.fault) for trial in touching),
        "resumed": sum(trial.is_resumed for trial in touching),
        "loaded": sum(trial.is_loaded for trial in touching),
        "harmless": len(harmless),
        "false_alarms": sum(bool(trial.fault) for trial in harmless),
        "seed": seed,
        "seconds": round(seconds, 1),
        "kinds": {name: dict(counts) for name, counts in sorted(kinds.items())},
        "faults": [asdict(trial) for trial in trials if trial.fault][:SHOWN],
    }


def is_clean(result: Mapping[str, Any]) -> bool:
    """True when nothing was missed, nothing resumed from, and nothing refused that is whole."""
    return not any(result[key] for key in ("undetected", "resumed", "false_alarms"))


def _tell(result: Mapping[str, Any]) -> None:
    print(
        f"\n{result['mutations']} mutations of real checkpoints: {result['undetected']} not found, "
        f"{result['resumed']} resumed from; {result['harmless']} changes that touch no content: "
        f"{result['false_alarms']} refused; {result['seconds']} s, seed {result['seed']}"
    )
    rows = [(name, c["count"], c["faults"], c["resumed"]) for name, c in result["kinds"].items()]
    print("\n" + render_table(("kind", "drawn", "faults", "resumed"), rows))
    for fault in result["faults"]:
        print(f"{fault['number']} {fault['kind']} ({fault['what']}): {fault['fault']}")


if __name__ == "__main__":
    sys.exit(main())
