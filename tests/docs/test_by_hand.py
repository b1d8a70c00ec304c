"""What the README shows under "Try it by hand" works, command by command, on a real sandbox."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

README = Path(__file__).parents[2] / "README.md"
LIMIT_S = 90  # on a busy machine; some 30 on an idle one


def blocks() -> list[str]:
    """The shell blocks of that part of the page."""
    part = README.read_text().partition("## Try it by hand\n")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)


class Shell:
    """One bash, fed block by block, as a person would do it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "shell.log"
        with self.log.open("wb") as log:
            self._bash = subprocess.Popen(
                ["bash", "-e", "-m"],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def run(self, block: str) -> None:
        """Run a block to its end; it must not fail."""
        mark = self.folder / f"done-{time.monotonic_ns()}"
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{block}touch {mark.name}\n")
        self._bash.stdin.flush()
        self.await_true(mark.exists)

    def await_true(self, is_so: object) -> None:
        assert callable(is_so)
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert self._bash.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def status(self) -> dict[str, object]:
        env = {**os.environ, "SUPERVISOR_CONFIG": str(self.folder / ".try/supervisor.toml")}
        argv = [sys.executable, "-m", "supervisor", "status", "gpt", "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30, env=env)
        shown: dict[str, object] = json.loads(done.stdout)["runs"][0]
        return shown

    def close(self) -> None:
        directory = f"--directory={self.folder}/.try/cluster"
        argv = [sys.executable, "-m", "supervisor", "sandbox", "down", directory]
        subprocess.run(argv, capture_output=True, check=False, timeout=60)
        for process in psutil.process_iter():  # bash, and the daemon that a block left in the background
            with suppress(OSError):
                if os.getsid(process.pid) == self._bash.pid:
                    os.kill(process.pid, signal.SIGKILL)
        self._bash.communicate(timeout=30)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shell = Shell(tmp_path)
    yield shell
    shell.close()


@pytest.mark.slurm
@pytest.mark.torch
def test_what_the_readme_shows_by_hand_works(shell: Shell) -> None:
    start, submit, cut, look, end = blocks()
    shell.run(start)
    shell.await_true((shell.folder / ".try/control.sock").exists)
    shell.run(submit)
    shell.await_true(lambda: shell.status()["verified_step"])
    shell.run(cut)
    shell.await_true(lambda: (shell.status()["launch"], shell.status()["state"]) == (1, "running"))
    assert shell.status()["attempt"] == 1
    shell.run(look)
    said = shell.log.read_text()
    assert "drained by us" in said
    assert "1 unplanned" in said
    shell.run(end)
