"""The smallest checkpoint that counts as verified, without torch."""

from __future__ import annotations

from trainer.contract import MANIFEST_NAME, Manifest, RunPaths
from trainer.format.manifest import seal_manifest
from trainer.storage.stored import describe_file, publish_verification


def write_checkpoint(paths: RunPaths, step: int, *, attempt: int, is_verified: bool = True) -> None:
    """A complete checkpoint of one file."""
    path = paths.checkpoint(step, attempt)
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"x")
    files = (describe_file(path, "data"),)
    manifest = Manifest(run="r", attempt=attempt, step=step, samples=step, world_size=1, time=1.0, files=files)
    (path / MANIFEST_NAME).write_bytes(seal_manifest(manifest))
    if is_verified:
        publish_verification(path, ok=True, now=1.0)
