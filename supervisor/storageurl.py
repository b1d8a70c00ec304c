"""What can be told of a URL of object storage before a training uses it: whether fsspec knows its protocol.

The training's own Python does the copying and may know more than this one, so nothing here is a refusal.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any


def describe_storage(url: str, *, find: Callable[[str], object | None] = importlib.util.find_spec) -> list[str]:
    """Notes on what `url` needs that is not here; none where all is well, or where there is no fsspec to ask."""
    if not url or find("fsspec") is None:
        return []
    protocol = url.partition("://")[0]
    known = _known_protocols()
    if protocol not in known:
        what = f'fsspec knows no protocol "{protocol}"; unless the Python of the training has a package for it'
    elif find(package := known[protocol].partition(".")[0]) is None:
        what = f"{protocol}:// needs the package {package}, which is not here; unless the training's Python has it"
    else:
        return []
    return [f"[checkpoint] object_url: {what}, no checkpoint is copied to object storage"]


def _known_protocols() -> Mapping[str, str]:
    """Protocols and the class behind each, those that packages announce included."""
    from fsspec.registry import get_filesystem_class, known_implementations, registry

    known = {name: str(entry["class"]) for name, entry in known_implementations.items()}
    return known | {name: _path(get_filesystem_class(name)) for name in registry}


def _path(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__name__}"
