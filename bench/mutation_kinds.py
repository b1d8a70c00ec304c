"""What can happen to a checkpoint on its way through storage and people's hands: one drawn mutation at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bench.mutation_scene import KEPT, OTHER_RUN, RUN, TARGET, Library
from trainer.contract import MANIFEST_NAME, VERIFIED_NAME, checkpoint_name

METADATA_NAME = ".metadata"
SHARDS = ("__0_0.distcp", "__1_0.distcp")
PAYLOAD = (*SHARDS, METADATA_NAME)
CONTENT = (*PAYLOAD, MANIFEST_NAME)
PAGE_BYTES = 4096


class Nothing(Exception):
    """What was drawn changes no byte: draw again."""


@dataclass(slots=True)
class Scene:
    """A run directory whose newest checkpoint is to be mutated. Files are links: they are replaced, not edited."""

    library: Library
    run_dir: Path
    target: Path

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def read(self, name: str) -> bytes:
        return (self.target / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Put other bytes under a name, as the same file that somebody wrote at the same time."""
        path = self.target / name
        before = path.stat()
        if path.read_bytes() == data:
            raise Nothing
        path.unlink()
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def take(self, name: str, source: Path) -> None:
        """Put another checkpoint's file in the place of one."""
        self.write(name, source.read_bytes())


def lay_out(library: Library, folder: Path) -> Scene:
    """The target and two older ones, whole."""
    checkpoints = folder / RUN / "checkpoints"
    for name in (TARGET, *KEPT):
        _link(library.checkpoint(name), checkpoints / name)
    return Scene(library=library, run_dir=folder / RUN, target=checkpoints / TARGET)


def put_back(scene: Scene) -> None:
    """Whole again: whatever stands where the target was, under its name or another one, is replaced."""
    for entry in os.scandir(scene.checkpoints):
        if entry.name in KEPT:
            continue
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o755)  # noqa: PTH101
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)  # noqa: PTH108
    _link(scene.library.checkpoint(TARGET), scene.target)


def _link(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in (*CONTENT, VERIFIED_NAME):
        os.link(source / name, target / name)


# ---------------------------------------------------------------- what touches content


def _flip(draw: Random, data: bytes, bits: int) -> bytes:
    changed = bytearray(data)
    for place in draw.sample(range(len(data) * 8), min(bits, len(data) * 8)):
        changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def flip_shard(draw: Random, scene: Scene) -> str:
    name, bits = draw.choice(SHARDS), draw.choice((1, 1, 1, 2, 8))
    scene.write(name, _flip(draw, scene.read(name), bits))
    return f"{bits} bits of {name}"


def flip_metadata(draw: Random, scene: Scene) -> str:
    bits = draw.choice((1, 1, 2, 8))
    scene.write(METADATA_NAME, _flip(draw, scene.read(METADATA_NAME), bits))
    return f"{bits} bits"


def flip_manifest(draw: Random, scene: Scene) -> str:
    """The record of the nodes goes with it half of the time: without it nothing else guards the manifest."""
    scene.write(MANIFEST_NAME, _flip(draw, scene.read(MANIFEST_NAME), draw.choice((1, 1, 1, 2))))
    return _maybe_forget(draw, scene)


def _maybe_forget(draw: Random, scene: Scene) -> str:
    if draw.random() < 0.5:
        (scene.target / VERIFIED_NAME).unlink()
        return f"without {VERIFIED_NAME}"
    return f"with {VERIFIED_NAME}"


def truncate(draw: Random, scene: Scene) -> str:
    name = draw.choice(CONTENT)
    data = scene.read(name)
    keep = draw.choice((draw.randrange(len(data)), len(data) - 1, len(data) // PAGE_BYTES * PAGE_BYTES))
    scene.write(name, data[:keep])
    return f"{name} to {keep} bytes"


def extend(draw: Random, scene: Scene) -> str:
    name, count = draw.choice(CONTENT), draw.choice((1, 8, PAGE_BYTES))
    scene.write(name, scene.read(name) + draw.choice((bytes(count), draw.randbytes(count))))
    return f"{name} by {count} bytes"


def empty(draw: Random, scene: Scene) -> str:
    """What a power cut leaves of files that were not synced."""
    names = draw.sample(CONTENT, draw.choice((1, 1, 2, len(CONTENT))))
    for name in names:
        scene.write(name, b"")
    return ", ".join(names)


def lose_page(draw: Random, scene: Scene) -> str:
    """A block that never reached the storage reads as zeros, or as what stood there before."""
    name = draw.choice(SHARDS)
    data = bytearray(scene.read(name))
    at = draw.randrange(0, len(data), PAGE_BYTES)
    end = min(at + PAGE_BYTES, len(data))
    other = scene.library.checkpoint("step-20.a2") / name
    data[at:end] = draw.choice((bytes(end - at), other.read_bytes()[at:end]))
    scene.write(name, bytes(data))
    return f"{name} at {at}"


def swap_pages(draw: Random, scene: Scene) -> str:
    name = draw.choice(SHARDS)
    data = bytearray(scene.read(name))
    first, second = (place * PAGE_BYTES for place in draw.sample(range(max(2, len(data) // PAGE_BYTES)), 2))
    data[first : first + PAGE_BYTES], data[second : second + PAGE_BYTES] = (
        data[second : second + PAGE_BYTES],
        data[first : first + PAGE_BYTES],
    )
    scene.write(name, bytes(data))
    return f"{name}: {first} and {second}"


def lose_file(draw: Random, scene: Scene) -> str:
    names = draw.sample(CONTENT, draw.choice((1, 1, 1, 2)))
    for name in names:
        (scene.target / name).unlink()
    return ", ".join(names)


def swap_files(draw: Random, scene: Scene) -> str:
    first, second = draw.choice((SHARDS, (SHARDS[0], METADATA_NAME), (SHARDS[1], MANIFEST_NAME)))
    one, other = scene.read(first), scene.read(second)
    scene.write(first, other)
    scene.write(second, one)
    return f"{first} and {second}"


def file_of_another_attempt(draw: Random, scene: Scene) -> str:
    name = draw.choice(SHARDS)
    scene.take(name, scene.library.checkpoint("step-30.a1") / name)
    return name


def file_of_another_step(draw: Random, scene: Scene) -> str:
    name, other = draw.choice(SHARDS), draw.choice(("step-10.a1", "step-20.a1", "step-20.a2"))
    scene.take(name, scene.library.checkpoint(other) / name)
    return f"{name} of {other}"


def file_of_another_run(draw: Random, scene: Scene) -> str:
    """All of it together is whole, and only its manifest says whose it is."""
    names = draw.choice(((SHARDS[0],), SHARDS, (*CONTENT, VERIFIED_NAME)))
    for name in names:
        source = scene.library.checkpoint(TARGET, OTHER_RUN) / name
        if source.read_bytes() != scene.read(name):
            scene.take(name, source)
    return ", ".join(names)


def stale_manifest(draw: Random, scene: Scene) -> str:
    """The manifest of another save, with what its nodes said of it: the claims fit each other, and not the files."""
    other = draw.choice(("step-30.a1", "step-20.a2", "step-20.a1", "step-10.a1"))
    names = draw.choice(((MANIFEST_NAME,), (MANIFEST_NAME, VERIFIED_NAME)))
    for name in names:
        scene.take(name, scene.library.checkpoint(other) / name)
    return f"of {other}: {', '.join(names)}"


def renamed_manifest(draw: Random, scene: Scene) -> str:
    """A manifest that was edited to fit the folder; whoever edits does not know of the seal."""
    other = scene.library.checkpoint("step-30.a1") / MANIFEST_NAME
    record = json.loads(other.read_bytes()) | {"attempt": 2}
    if draw.random() < 0.5:
        record.pop("self_xxh3_128")
    scene.write(MANIFEST_NAME, json.dumps(record, separators=(",", ":")).encode())
    return _maybe_forget(draw, scene)


def wrong_name(draw: Random, scene: Scene) -> str:
    step, attempt = draw.choice(((31, 2), (40, 2), (30, 1), (300, 2), (3, 2), (30, 20)))
    name = draw.choice((checkpoint_name(step, attempt), f"step-0{step}.a{attempt}", f"step-{step}.a0{attempt}"))
    if (scene.checkpoints / name).exists():
        raise Nothing
    scene.target.rename(scene.checkpoints / name)
    return name


def copied_under_another_name(draw: Random, scene: Scene) -> str:
    """A whole older one, under the name of the newest."""
    other = scene.library.checkpoint(draw.choice(("step-20.a1", "step-10.a1", "step-30.a1")))
    for name in (*CONTENT, VERIFIED_NAME):
        if (other / name).read_bytes() != scene.read(name):
            scene.take(name, other / name)
    return other.name


def false_claim(draw: Random, scene: Scene) -> str:
    """Damaged files, and a record that says that all of them were read back."""
    name = draw.choice(PAYLOAD)
    scene.write(name, _flip(draw, scene.read(name), 1))
    record = json.loads(scene.read(VERIFIED_NAME)) | {"time": draw.random() * 4e9, "ok": True, "bad_files": []}
    scene.write(VERIFIED_NAME, json.dumps(record).encode())
    return name


def no_file(draw: Random, scene: Scene) -> str:
    """A link, a FIFO or a folder stands where a file was."""
    name = draw.choice(CONTENT)
    kind = draw.choice(("link to nothing", "folder", *(["fifo"] if name in SHARDS else [])))
    path = scene.target / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("gone")
    return f"{kind} at {name}"


# ---------------------------------------------------------------- what can't be read: nothing is known of it


def forbid(draw: Random, scene: Scene) -> str:
    name = draw.choice((*CONTENT, ""))
    path = scene.target / name if name else scene.target
    if name:  # a file of its own: the mode of a link's other names would change with it
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    path.chmod(0)
    return name or "the folder"


# ---------------------------------------------------------------- what touches no content


def touch(draw: Random, scene: Scene) -> str:
    name = draw.choice((*CONTENT, VERIFIED_NAME))
    path = scene.target / name
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    os.utime(path, (draw.random() * 4e9,) * 2)
    return name


def add_file(draw: Random, scene: Scene) -> str:
    name = draw.choice(("notes.txt", "__7_0.distcp", ".nfs0001", "MANIFEST.json.bak", ".MANIFEST.json.17.tmp"))
    (scene.target / name).write_bytes(draw.randbytes(100))
    return name


def add_hint(draw: Random, scene: Scene) -> str:
    name, target = draw.choice((("latest", KEPT[1]), ("latest", "gone"), ("best", TARGET)))
    (scene.checkpoints / name).symlink_to(target)
    return f"{name} -> {target}"


def add_unfinished(draw: Random, scene: Scene) -> str:
    """A newer save that did not end lies beside it."""
    folder = scene.checkpoints / "step-40.a2"
    folder.mkdir()
    for name in draw.sample(PAYLOAD, 2):
        (folder / name).write_bytes(scene.read(name))
    return folder.name


def lose_record(_draw: Random, scene: Scene) -> str:
    (scene.target / VERIFIED_NAME).unlink()
    return VERIFIED_NAME


def spoil_record(draw: Random, scene: Scene) -> str:
    """What the nodes said can't be read any more, or is of another: the files are still what their manifest says."""
    other = scene.library.checkpoint("step-20.a2") / VERIFIED_NAME
    data = draw.choice((_flip(draw, scene.read(VERIFIED_NAME), 1), other.read_bytes(), b""))
    scene.write(VERIFIED_NAME, data)
    return VERIFIED_NAME


Kind = Callable[[Random, Scene], str]

DAMAGES: Mapping[Kind, int] = {  # how often each is drawn
    flip_shard: 30,
    flip_metadata: 8,
    flip_manifest: 14,
    truncate: 8,
    extend: 4,
    empty: 4,
    lose_page: 6,
    swap_pages: 3,
    lose_file: 4,
    swap_files: 3,
    file_of_another_attempt: 3,
    file_of_another_step: 3,
    file_of_another_run: 3,
    stale_manifest: 4,
    renamed_manifest: 2,
    wrong_name: 3,
    copied_under_another_name: 2,
    false_claim: 4,
    no_file: 3,
}
FORBIDDEN: Mapping[Kind, int] = {forbid: 4}
HARMLESS: Mapping[Kind, int] = {
    touch: 2,
    add_file: 2,
    add_hint: 1,
    add_unfinished: 1,
    lose_record: 1,
    spoil_record: 1,
}
