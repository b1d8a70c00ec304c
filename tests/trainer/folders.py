"""Checkpoint folders built by hand: shards with a manifest, and whatever is wrong with them."""

from __future__ import annotations

from pathlib import Path

from trainer.contract import MANIFEST_NAME, Manifest, checkpoint_name, write_json
from trainer.storage.stored import describe_file, publish_verification

SHARDS = {".metadata": b"metadata", "__0_0.distcp": b"a" * 5000, "__1_0.distcp": b"b" * 7000}


def make_checkpoint(
    root: Path, step: int, attempt: int = 1, *, complete: bool = True, verified: bool = True, shard_bytes: int = 0
) -> Path:
    """A folder as the trainer leaves it: being written, complete, or verified; of large shards where asked for."""
    path = root / checkpoint_name(step, attempt)
    path.mkdir(parents=True)
    for name, content in SHARDS.items():
        (path / name).write_bytes(content * max(1, shard_bytes // len(content)) if name != ".metadata" else content)
    if complete:
        manifest = Manifest(
            run="gpt",
            attempt=attempt,
            step=step,
            samples=step * 12,
            world_size=2,
            time=0.0,
            files=tuple(describe_file(path, name) for name in sorted(SHARDS)),
        )
        write_json(path / MANIFEST_NAME, manifest)
        if verified:
            publish_verification(path, ok=True, now=0.0)
    return path


def flip_byte(path: Path, offset: int = 100) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x01]))
