from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from supervisor.rundir import RunDirReader
from trainer import contract
from trainer.contract import Manifest, ManifestFile, RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.checkpoints().mkdir(parents=True)
    (paths.run_dir / "progress").mkdir()
    (paths.attempt_dir(1) / "nodes").mkdir(parents=True)
    return paths


@pytest.fixture
def reader() -> Iterator[RunDirReader]:
    reader = RunDirReader()
    yield reader
    reader.close()


@pytest.fixture
def publish(paths: RunPaths) -> Callable[..., Path]:
    """Writes a checkpoint of two files and its manifest."""

    def write(step: int, attempt: int = 1) -> Path:
        folder = paths.checkpoint(step, attempt)
        contents = {"a.distcp": b"x" * 1000, "sub/b.distcp": b"y" * 10}
        files = []
        for name, data in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
            files.append(ManifestFile(path=name, size_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data)))
        manifest = Manifest(
            run="run", attempt=attempt, step=step, samples=step * 8, world_size=2, time=1.0, files=tuple(files)
        )
        contract.write_json(folder / contract.MANIFEST_NAME, manifest)
        return folder

    return write
