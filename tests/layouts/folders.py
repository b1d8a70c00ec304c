"""Copies of the committed checkpoints, and what can go wrong with them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from supervisor.layouts.readback import Reading, read_back
from supervisor.layouts.survey import Sight, Survey
from supervisor.model import CheckpointView

REST = (1_700_000_000, 1_700_000_000)
DATA = Path(__file__).parents[1] / "data" / "checkpoints"

# fixture, the layout that it has, names of its two checkpoints (steps 2 and 4)
LAYOUTS = {
    "dcp": ("dcp", "step-2", "step-4"),
    "torchtitan/checkpoint": ("torchtitan", "step-2", "step-4"),
    "megatron": ("megatron", "iter_0000002", "iter_0000004"),
    "megatron-dist": ("megatron", "iter_0000002", "iter_0000004"),
    "huggingface": ("huggingface", "checkpoint-2", "checkpoint-4"),
    "lightning": ("lightning", "epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"),
    "lightning-sharded": ("lightning", "epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"),
    "deepspeed-zero1": ("deepspeed", "global_step2", "global_step4"),
    "deepspeed-zero3": ("deepspeed", "global_step2", "global_step4"),
}

# every payload byte lies in a zip file of torch.save
SEALED = [name for name in LAYOUTS if name != "huggingface"]


def copy_of(fixture: str, target: Path) -> Path:
    """A copy that may be damaged, without Lightning's `last.ckpt` (a second copy of the newest)."""
    copied = graft(fixture, target / fixture.replace("/", "-"))
    last = copied / "last.ckpt"
    if last.is_dir():
        shutil.rmtree(last)
    last.unlink(missing_ok=True)
    return copied


def graft(source: str | Path, target: Path) -> Path:
    """Copy a file or folder of the fixtures to a name, as if all of it had been written at once, long ago."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if (DATA / source).is_dir():
        shutil.copytree(DATA / source, target, dirs_exist_ok=True)
    else:
        shutil.copy(DATA / source, target)
    for path in (target, *target.rglob("*")):
        os.utime(path, REST)
    return target


def rewrite(file: Path, data: bytes) -> None:
    """Other content under the same times: what a medium does, and no writer."""
    found = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def look(folder: Path, layout: str = "auto", *, is_final: bool = True) -> Sight:
    """One look by somebody who has never looked before."""
    return Survey().look(folder, layout, time.monotonic() + 30, is_final=is_final)


def whole_steps(folder: Path, layout: str) -> list[int]:
    return [view.step for view in look(folder, layout).views if view.is_complete]


def view_of(folder: Path, layout: str, name: str) -> CheckpointView:
    return next(view for view in look(folder, layout).views if view.path.endswith(f"/{name}"))


def read(folder: Path, layout: str, name: str) -> Reading:
    return read_back(folder / name, layout, view_of(folder, layout, name).stamp)


def payload_files(checkpoint: Path) -> list[Path]:
    """Files that hold state: the checkpoint itself, or those in its folder."""
    if checkpoint.is_file():
        return [checkpoint]
    suffixes = (".distcp", ".pt", ".pth", ".safetensors")
    return sorted(p for p in checkpoint.rglob("*") if p.suffix in suffixes)


def cut(file: Path, keep: float = 0.5) -> None:
    data = file.read_bytes()
    rewrite(file, data[: int(len(data) * keep)])


def flip_payload(checkpoint: Path) -> None:
    """Change one byte of the pickle in the first file that holds state, under the same times."""
    words = (b"ctorch", b"cargparse")
    file = next(f for f in payload_files(checkpoint) if any(word in f.read_bytes() for word in words))
    whole = file.read_bytes()
    at = next(whole.index(word) for word in words if word in whole) + 1
    rewrite(file, whole[:at] + b"O" + whole[at + 1 :])
