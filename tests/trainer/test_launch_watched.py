"""Files that the launcher watches: whoever owns the folder may put anything there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.trainer.attempts import eventually
from trainer.contract import Advice, AttemptSpec, Progress, RunPaths, write_json
from trainer.launching import reading, watched
from trainer.launching.reading import read_regular
from trainer.launching.watched import WatchedFiles

SPEC = AttemptSpec(run="r", attempt=1, command=("x",), nodes=1)


@pytest.mark.parametrize(
    "put",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/dev/tty"),
        Path.mkdir,
        lambda path: path.write_bytes(b"x" * (reading.MAX_BYTES + 1)),
    ],
    ids=["pipe", "device", "terminal", "folder", "large"],
)
def test_what_is_no_small_regular_file_is_refused_at_once(tmp_path: Path, put: Callable[[Path], object]) -> None:
    path = tmp_path / "advice.json"
    put(path)
    with pytest.raises(OSError, match="advice"):
        read_regular(path)


def test_a_pipe_in_place_of_the_advice_is_passed_over_and_the_next_advice_is_read(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.attempt_dir(1).mkdir(parents=True)
    os.mkfifo(paths.advice(1))
    files = WatchedFiles(tmp_path, SPEC)
    files.start()
    write_json(paths.progress(1), Progress(attempt=1, step=3, time=1.0))
    assert eventually(lambda: files.progress is not None)
    paths.advice(1).unlink()
    write_json(paths.advice(1), Advice(attempt=1, seq=1, checkpoint_every_s=60))
    files.look_soon()
    assert eventually(lambda: files.advice is not None)


def has_read(files: WatchedFiles, step: int) -> bool:
    return files.progress is not None and files.progress.step == step


def test_a_read_that_hangs_holds_up_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, released = RunPaths(tmp_path), threading.Event()
    write_json(paths.advice(1), Advice(attempt=1, seq=1, checkpoint_every_s=60))

    def read(path: Path) -> bytes:
        if path == paths.advice(1):
            released.wait(60)
        return read_regular(path)

    monkeypatch.setattr(watched, "read_regular", read)
    monkeypatch.setattr(watched, "READ_LIMIT_S", 0.1)
    files = WatchedFiles(tmp_path, SPEC)
    files.start()
    for step in (1, 2):
        write_json(paths.progress(1), Progress(attempt=1, step=step, time=1.0))
        files.look_soon()
        assert eventually(partial(has_read, files, step))
    assert files.advice is None
    released.set()
    assert eventually(lambda: files.advice is not None)
