"""What is said of a URL of object storage when a run is handed in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from supervisor.storageurl import describe_storage


def _find(*packages: str) -> Callable[[str], object | None]:
    return lambda name: object() if name in packages else None


@pytest.mark.torch  # fsspec comes with it
def test_a_protocol_that_nothing_knows_is_said() -> None:
    (note,) = describe_storage("nope://x")
    assert 'no protocol "nope"' in note


@pytest.mark.torch
def test_a_package_that_is_missing_is_named() -> None:
    (note,) = describe_storage("s3://bucket/x", find=_find("fsspec"))
    assert "s3fs" in note


@pytest.mark.parametrize("url", ["", "file:///shared/copies", "memory://x"])
def test_nothing_is_said_of_what_works(url: str) -> None:
    assert describe_storage(url) == []


def test_nothing_is_said_where_there_is_no_fsspec() -> None:
    assert describe_storage("nope://x", find=_find()) == []
