"""Checkpoints in object storage, by hand: `python -m trainer.storage.objects list|put|get|check`.

get     fetches a checkpoint into a folder of checkpoints (`<run directory>/checkpoints`) and has it read back by
        another process; cut short, the same command goes on where it ended; files that are whole already stay
put     copies a checkpoint there, such as the last one of a run that has ended
list    names what is there
check   reads a checkpoint's folder back and writes VERIFIED.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.contract import MANIFEST_NAME, Manifest, write_bytes
from trainer.storage.bandwidth import ByteBudget
from trainer.storage.objects import ObjectStorageFailed, ObjectTier
from trainer.storage.stored import (
    CheckpointRejected,
    CheckpointUnreadable,
    Condition,
    check_file,
    parse_manifest,
    publish_verification,
    read_manifest_bytes,
    verify_checkpoint,
)

EXIT_BAD = 1  # a checkpoint is not what its manifest says, or there is no such folder
EXIT_UNAVAILABLE = 75  # nothing is known: try again later
CHECK_LIMIT_S = 24 * 3600.0  # even many terabytes are read by then: a file system hangs


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns 0, 1 for what is refused or not there, 75 for storage that is away."""
    options = _parser().parse_args(argv)
    try:
        return int(options.do(options))
    except CheckpointRejected as error:
        print(error, file=sys.stderr)
        return EXIT_BAD
    except (ObjectStorageFailed, CheckpointUnreadable, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_UNAVAILABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.storage.objects", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    listing = commands.add_parser("list", help="what a run has there")
    listing.add_argument("url", help="of the run: object_url/RUN")
    listing.set_defaults(do=_list)
    for name, do, text in (("get", _get, "fetch a checkpoint"), ("put", _put, "copy a checkpoint there")):
        command = commands.add_parser(name, help=text)
        first, second = ("url", "folder") if name == "get" else ("folder", "url")
        command.add_argument(first)
        command.add_argument(second)
        command.add_argument("--mb-per-s", type=float, default=0.0, help="bound of the bandwidth; 0: none")
        command.set_defaults(do=do)
    check = commands.add_parser("check", help="read a fetched checkpoint back")
    check.add_argument("folder", type=Path)
    check.set_defaults(do=_check)
    return parser


def _list(options: argparse.Namespace) -> int:
    tier = ObjectTier(options.url)
    names = tier.names()
    if not names and not tier.exists():
        print(f"{options.url} is not there", file=sys.stderr)
        return EXIT_BAD
    for name, is_whole in sorted(names.items()):
        print(f"{name}  {'whole' if is_whole else 'not finished'}")
    return 0


def _put(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    tier = ObjectTier(options.url, budget=ByteBudget(options.mb_per_s * 1e6))
    data = read_manifest_bytes(folder)
    manifest = parse_manifest(folder, data)
    progress = _Progress(sum(file.size_bytes for file in manifest.files))
    for file in manifest.files:
        tier.put_file(folder.name, file, folder / file.path)
        progress.add(file.size_bytes)
    tier.put_manifest(folder.name, data)
    progress.end(f"{options.url.rstrip('/')}/{folder.name} is whole")
    return 0


def _get(options: argparse.Namespace) -> int:
    run_url, _, name = options.url.rstrip("/").rpartition("/")
    tier = ObjectTier(run_url, budget=ByteBudget(options.mb_per_s * 1e6))
    folder = Path(options.folder) / name
    fetch_checkpoint(tier, name, folder)
    # Its writer can't vouch for it: what the page cache still holds is not what is stored.
    check = [sys.executable, "-m", "trainer.storage.objects", "check", str(folder)]
    try:
        return subprocess.run(check, check=False, timeout=CHECK_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"{folder} could not be read back within {CHECK_LIMIT_S / 3600:g} h", file=sys.stderr)
        return EXIT_UNAVAILABLE


def fetch_checkpoint(tier: ObjectTier, name: str, folder: Path) -> Manifest:
    """Bring a checkpoint back; what is whole already stays. The manifest is published last.

    Raises `CheckpointRejected` when it is not there as a whole or another checkpoint has the folder, and
    `ObjectStorageFailed`.
    """
    data = tier.manifest(name)
    if data is None:
        raise CheckpointRejected(folder, [f"{tier.at(name, MANIFEST_NAME)} is not there: it was never finished"])
    manifest = parse_manifest(folder, data)
    if (folder / MANIFEST_NAME).exists() and read_manifest_bytes(folder) != data:
        raise CheckpointRejected(folder, ["it is there with another manifest: move it away first"])
    progress = _Progress(sum(file.size_bytes for file in manifest.files))
    for file in manifest.files:
        if check_file(folder, file).condition is Condition.GOOD:
            progress.add(file.size_bytes)
        else:
            tier.get_file(name, file, folder / file.path, told=progress.add)
    write_bytes(folder / MANIFEST_NAME, data)
    progress.end(f"{folder} is complete")
    return manifest


def _check(options: argparse.Namespace) -> int:
    folder = options.folder
    try:
        manifest = verify_checkpoint(folder)
    except CheckpointRejected as error:
        if error.files:
            publish_verification(folder, ok=False, bad_files=error.files, now=time.time())
        raise
    publish_verification(folder, ok=True, now=time.time())
    print(f"{folder} is verified: step {manifest.step}, {len(manifest.files)} files")
    return 0


class _Progress:
    """A line on standard error every other second, and one at the end."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = self._told_at = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._told_at >= 2.0:
            self._told_at = time.monotonic()
            self._tell()

    def end(self, what: str) -> None:
        self._tell()
        print(what)

    def _tell(self) -> None:
        seconds = max(1e-6, time.monotonic() - self._began)
        print(
            f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {self._done / seconds / 1e6:.0f} MB/s",
            file=sys.stderr,
            flush=True,
        )
