"""A checkpoint of our own layout with real metadata, and other ways to spoil it than a hand would."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import xxhash

from tests.trainer.pickles import Place, chunk, metadata, tensor
from trainer.contract import MANIFEST_NAME, VERIFIED_NAME, Manifest, ManifestFile, RunPaths, write_json
from trainer.contract import VerificationRecord as Record
from trainer.format.manifest import parse_manifest, seal_manifest

SHARD_BYTES = 9000
SHARDS = ("__0_0.distcp", "__1_0.distcp")


def described(length: int = SHARD_BYTES) -> bytes:
    """The `.metadata` of one tensor of 2 x 1000 numbers, a row in each file."""
    parts = [chunk([row, 0], [1, 1000]) for row in range(2)]
    places = [Place("w", (row, 0), name, 0, length) for row, name in enumerate(SHARDS)]
    return metadata({"w": tensor([2, 1000], parts)}, places)


def publish(
    run_dir: Path, step: int = 10, attempt: int = 1, *, is_sealed: bool = True, meta: bytes | None = None
) -> Path:
    """A complete checkpoint of the run that the folder is named after."""
    folder = RunPaths(run_dir).checkpoint(step, attempt)
    folder.mkdir(parents=True)
    contents = {name: os.urandom(SHARD_BYTES) for name in SHARDS}
    for name, data in {**contents, ".metadata": described() if meta is None else meta}.items():
        (folder / name).write_bytes(data)
    manifest = Manifest(
        run=run_dir.name,
        attempt=attempt,
        step=step,
        samples=step * 8,
        world_size=2,
        time=1.0,
        libraries={"torch": "2.13"} if is_sealed else {},
        files=tuple(describe(folder, name) for name in (".metadata", *SHARDS)),
    )
    if is_sealed:
        (folder / MANIFEST_NAME).write_bytes(seal_manifest(manifest))
    else:
        write_json(folder / MANIFEST_NAME, manifest)
    return folder


def describe(folder: Path, name: str) -> ManifestFile:
    data = (folder / name).read_bytes()
    return ManifestFile(path=name, size_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def reseal(folder: Path, **changes: object) -> None:
    """Publish the manifest again, for the files as they are now: what a writer with a defect would do."""
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    files = tuple(describe(folder, file.path) for file in manifest.files)
    (folder / MANIFEST_NAME).write_bytes(seal_manifest(replace(manifest, files=files, **changes)))  # type: ignore[arg-type]


def vouch(folder: Path, *, ok: bool = True, bad_files: tuple[str, ...] = ()) -> None:
    """The record of the job's nodes."""
    data = (folder / MANIFEST_NAME).read_bytes()
    manifest = parse_manifest(data)
    record = Record(
        attempt=manifest.attempt,
        step=manifest.step,
        ok=ok,
        manifest_xxh3_128=xxhash.xxh3_128_hexdigest(data),
        bad_files=bad_files,
        time=1.0,
    )
    write_json(folder / VERIFIED_NAME, record)


def flip(file: Path, offset: int = 4321) -> None:
    data = bytearray(file.read_bytes())
    data[offset % len(data)] ^= 1
    file.write_bytes(bytes(data))


def contents(folder: Path) -> Mapping[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
