"""The `.metadata` of a distributed checkpoint, read without unpickling and held against the files that it names.

Some 3 million parts (a thousand ranks, a thousand parameters) take 10 s and 1 GB. What could take more than 3 GB is not
read: that says nothing of the checkpoint, and is never called damage.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Mapping

from supervisor.jobfiles import open_regular
from supervisor.layouts.tree import Broken
from trainer.format.coverage import NotCovered, check_coverage
from trainer.format.metadata import (
    MAX_METADATA_BYTES,
    METADATA_NAME,
    Metadata,
    MetadataRefused,
    MetadataTooLarge,
)
from trainer.format.metadata import read_metadata as _read_metadata

__all__ = ["METADATA_NAME", "Metadata", "TooLarge", "check_files", "open_metadata", "read_metadata", "read_opened"]


class TooLarge(OSError):
    """It is larger than is read here; nothing is known of what it describes."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EFBIG, f"larger than is read here: {why}", path)


def open_metadata(folder: int, name: str = METADATA_NAME) -> Metadata:
    """The content of the file in an open folder; raises Broken, TooLarge, NotAFile and OSError."""
    with open_regular(name, dir_fd=folder) as fd:
        return read_opened(fd, name)


def read_opened(fd: int, name: str) -> Metadata:
    """The content of an open file; raises Broken, TooLarge and OSError."""
    size = os.fstat(fd).st_size
    if size > MAX_METADATA_BYTES:
        raise TooLarge(name, f"{size} bytes")
    data = io.BufferedReader(io.FileIO(fd, closefd=False)).read(size)  # in one piece: it may have hundreds of MB
    return read_metadata(data, name)


def read_metadata(data: bytes, name: str = METADATA_NAME) -> Metadata:
    """The content of a `.metadata` file; raises Broken for anything else, and TooLarge."""
    try:
        return _read_metadata(data)
    except MetadataTooLarge as error:
        raise TooLarge(name, str(error)) from None
    except MetadataRefused as error:
        raise Broken(str(error)) from None


def check_files(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Raise Broken unless all that it describes lies in files of these sizes, by the paths that it gives them."""
    try:
        check_coverage(metadata, sizes)
    except NotCovered as error:
        raise Broken(str(error)) from None
