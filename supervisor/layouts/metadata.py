"""The `.metadata` of a distributed checkpoint, read without unpickling and held against the files that it names."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.layouts.tree import Broken
from trainer.coverage import NotCovered, check_coverage
from trainer.metadata import MAX_METADATA_BYTES, METADATA_NAME, Entry, Metadata, MetadataRefused
from trainer.metadata import read_metadata as _read_metadata

__all__ = ["MAX_METADATA_BYTES", "METADATA_NAME", "Entry", "Metadata", "check_files", "read_metadata"]


def read_metadata(data: bytes) -> Metadata:
    """The content of a `.metadata` file; raises Broken for anything else."""
    try:
        return _read_metadata(data)
    except MetadataRefused as error:
        raise Broken(str(error)) from None


def check_files(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Raise Broken unless all that it describes lies in files of these sizes, by the paths that it gives them."""
    try:
        check_coverage(metadata, sizes)
    except NotCovered as error:
        raise Broken(str(error)) from None
