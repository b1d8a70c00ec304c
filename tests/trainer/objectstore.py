"""A real S3 server on loopback (rclone's), which can be killed, started again, and slowed down."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

KEY, SECRET = "key", "secret"
BUCKET = "bucket"


def find_server() -> str | None:
    """The server's program: of the environment that runs the tests, else from PATH."""
    return shutil.which("rclone", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


class S3Server:
    """Objects lie as files below `root`; what was acknowledged outlives a kill."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / BUCKET).mkdir(parents=True)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/checkpoints"

    def environment(self, *, secret: str = SECRET) -> Mapping[str, str]:
        """What a job has in its environment to reach it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def start(self, *, bwlimit: str = "off") -> None:
        program = find_server()
        assert program is not None
        self._process = subprocess.Popen(
            [
                program, "serve", "s3", "--addr", f"127.0.0.1:{self.port}", "--auth-key", f"{KEY},{SECRET}",
                "--bwlimit", bwlimit, "--config", os.devnull, "--vfs-cache-mode", "off", str(self.root),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5)
        except urllib.error.HTTPError:
            return True  # it refuses whoever has no key
        except OSError:
            return False
        return True

    def freeze(self) -> None:
        """Have it take connections and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def objects(self) -> list[str]:
        """Keys below the URL that are there, as the server's own files."""
        top = self.root / BUCKET / "checkpoints"
        files = (path for path in top.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(top)) for path in files if not path.name.startswith(".rclone_temp"))

    def object(self, key: str) -> Path:
        return self.root / BUCKET / "checkpoints" / key


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
