"""Options of the reference training, and what it learns from its environment. No torch: this runs before it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer import contract
from trainer.nccl import ENV_PG_TIMEOUT, process_group_timeout
from trainer.session.place import Place, read_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to train, and how.

    `save_every_s` and `save_every_steps`: 0 means not by time, not by steps; `save_every_s` None: as the service says.
    """

    steps: int
    global_batch: int
    seq_len: int
    layers: int
    width: int
    heads: int
    dropout: float
    lr: float
    warmup: int
    seed: int
    save_every_steps: int
    save_every_s: float | None
    stop_after: int
    step_sleep_s: float
    text: Path | None
    log_every: int
    keep_last: int
    first_step_limit_s: float
    timeout_s: float


def parse_options(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[Options, Place]:
    """Options and place from the command line and the environment; the contract's variables fill what is not given."""
    given = _parser(environment).parse_args(argv)
    place = read_place(environment, run_dir=given.run_dir)
    options = Options(
        steps=given.steps,
        global_batch=given.global_batch,
        seq_len=given.seq_len,
        layers=given.layers,
        width=given.width,
        heads=given.heads,
        dropout=given.dropout,
        lr=given.lr,
        warmup=given.warmup,
        seed=given.seed,
        save_every_steps=given.save_every_steps,
        save_every_s=given.save_every_s,
        stop_after=given.stop_after,
        step_sleep_s=given.step_sleep,
        text=given.text,
        log_every=given.log_every,
        keep_last=given.keep_last,
        first_step_limit_s=given.first_step_limit_s,
        timeout_s=given.timeout_s,
    )
    return options, place


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.example.train",
        description="Train a small byte-level GPT. Run it under torchrun, alone, or under the supervisor.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps of the whole run")
    add("--global-batch", type=int, default=12, help="samples a step, over all ranks")
    add("--seq-len", type=int, default=64, help="bytes in a sample")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--width", type=int, default=128, help="width of the model")
    add("--heads", type=int, default=4, help="attention heads")
    add("--dropout", type=float, default=0.0, help="share of activations dropped")
    add("--lr", type=float, default=1e-3, help="highest learning rate")
    add("--warmup", type=int, default=20, help="steps until the highest learning rate")
    add("--seed", type=int, default=1, help="of the weights, the sample order and dropout")
    add("--save-every-steps", type=int, default=0, help="save after every so many steps; 0: not by steps")
    add(
        "--save-every-s",
        type=float,
        default=None,
        help=f"save every so many seconds; not given: {contract.ENV_CHECKPOINT_EVERY_S}, unless saved by steps",
    )
    add("--stop-after", type=int, default=0, metavar="STEP", help="save and exit after this step, as if asked to")
    add("--step-sleep", type=float, default=0.0, metavar="S", help="make a step last at least so many seconds")
    add("--text", type=Path, default=None, metavar="DIR", help="train on the files in DIR, not on Python's sources")
    add("--run-dir", type=Path, default=None, metavar="DIR", help=f"run directory; not given: {contract.ENV_RUN_DIR}")
    add("--keep-last", type=int, default=2, help="verified checkpoints to keep when no service looks after them")
    add("--log-every", type=int, default=10, help="steps between two lines of output")
    add("--first-step-limit-s", type=float, default=600.0, help="announced limit until the first step is done")
    limit_s = process_group_timeout(environment).total_seconds()
    add("--timeout-s", type=float, default=limit_s, help=f"of collectives; not given: {ENV_PG_TIMEOUT}, else 600")
    return parser
