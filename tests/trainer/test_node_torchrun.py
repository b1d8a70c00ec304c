"""Workers forked from the process that has torch imported: a program must not notice."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORK = """
import os, sys
from trainer.torchrun import ForkedWorker
secret = open(os.environ["KEPT"], "w")
os.set_inheritable(secret.fileno(), True)
with open("out", "wb") as out, open("err", "wb") as err:
    worker = ForkedWorker(sys.argv[1:], {**os.environ, "RANK": "5"}, (out, err))
    print(worker.wait())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    exit_code: int
    out: str
    err: str


def fork(folder: Path, program: str, *arguments: str, as_module: bool = False) -> Ended:
    (folder / "train.py").write_text(program)
    (folder / "beside.py").write_text("VALUE = 7\n")
    command = ["-m", "train"] if as_module else ["train.py"]
    done = subprocess.run(
        [sys.executable, "-c", FORK, *command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KEPT": str(folder / "kept")},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return Ended(exit_code=int(done.stdout), out=(folder / "out").read_text(), err=(folder / "err").read_text())


@pytest.mark.parametrize("as_module", [False, True])
def test_it_is_the_main_program_with_its_arguments_and_neighbours(tmp_path: Path, as_module: bool) -> None:
    program = "import os, sys, beside; print(__name__, sys.argv[1:], beside.VALUE, os.environ['RANK'])"
    ended = fork(tmp_path, program, "--lr", "1", as_module=as_module)
    assert (ended.exit_code, ended.out) == (0, "__main__ ['--lr', '1'] 7 5\n")


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("raise SystemExit(75)", 75),
        ("raise SystemExit", 0),
        ("import os; os._exit(42)", 42),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("raise SystemExit('no data')", 1),
        ("raise ValueError('boom')", 1),
    ],
)
def test_its_end_is_told_as_of_any_process(tmp_path: Path, program: str, code: int) -> None:
    assert fork(tmp_path, program).exit_code == code


def test_its_last_words_are_in_its_error_log(tmp_path: Path) -> None:
    err = fork(tmp_path, "raise ValueError('boom')").err
    assert "Traceback" in err
    assert err.endswith("ValueError: boom\n")


def test_it_waits_for_its_threads_and_cleans_up(tmp_path: Path) -> None:
    program = """
import atexit, threading, time
atexit.register(print, "cleaned up")
threading.Timer(0.1, print, ["thread is through"]).start()
"""
    assert fork(tmp_path, program).out == "thread is through\ncleaned up\n"


def test_it_has_a_session_and_no_files_of_its_parent(tmp_path: Path) -> None:
    program = """
import os
print(os.getsid(0) == os.getpid())
print([name for name in os.listdir("/proc/self/fd") if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")])
"""
    assert fork(tmp_path, program).out == "True\n[]\n"


def test_workers_of_one_node_draw_different_numbers(tmp_path: Path) -> None:
    program = "import random; print(random.random())"
    script = FORK.replace("import os, sys", "import os, sys, random; random.seed(1)")
    assert "random.seed(1)" in script
    (tmp_path / "train.py").write_text(program)
    drawn = set()
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", script, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "KEPT": str(tmp_path / "kept")},
            stdout=subprocess.DEVNULL,
            timeout=30,
            check=True,
        )
        drawn.add((tmp_path / "out").read_text())
    assert len(drawn) == 2
