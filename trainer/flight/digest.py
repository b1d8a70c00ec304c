"""The part of a Flight Recorder dump that tells where a rank is, small and quick to read: for who judges thousands.

Reading a whole dump takes a tenth of a second. Each node shortens those of its own ranks beside them, and the launcher
reads the short ones. The form is that of PyTorch's JSON dumps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.flight.files import SHORT, DumpFile, find_dumps, read_plain
from trainer.flight.reader import MAX_BYTES, FlightUnreadable, load_dump

MAX_OVER = 10  # of the calls of a group that have ended; all that have not are kept
MAX_ENTRIES = 5000

_KEYS = ("version", "comm_lib_version", "nccl_version", "pg_config", "pg_status")


def shorten(data: bytes) -> bytes:
    """A short dump of these bytes. Raises FlightUnreadable."""
    raw = load_dump(data)
    items = raw.get("entries")
    kept = _keep(items) if isinstance(items, list) else []
    try:
        return json.dumps({**{key: raw[key] for key in _KEYS if key in raw}, "entries": kept}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FlightUnreadable(f"it can't be shortened: {str(error)[:100]}") from None


def _keep(items: list[Any]) -> list[Any]:
    """Newest entries first in, in their order: all that are not over, and some of each group that are."""
    kept: list[Any] = []
    over: Counter[str] = Counter()
    for item in reversed(items):
        if not isinstance(item, dict) or len(kept) >= MAX_ENTRIES:
            continue
        if item.get("retired") is True or item.get("state") == "completed":
            group = str(item.get("process_group"))[:200]
            over[group] += 1
            if over[group] > MAX_OVER:
                continue
            if over[group] > 1:  # of those that are over only the newest place is told
                item = {key: value for key, value in item.items() if key != "frames"}  # noqa: PLW2901
        kept.append(item)
    return kept[::-1]


def shorten_folder(folder: Path, ranks: frozenset[int], *, until: float, now: Callable[[], float]) -> list[str]:
    """Shorten the dumps of these ranks in a folder, while `now()` is before `until`; the names of what was written.

    What can't be read or written is left out: who judges reads the whole dump then.
    """
    written: list[str] = []
    for file in find_dumps(folder):
        if now() >= until:
            break
        if file.rank in ranks and not file.is_short:
            name = _shorten_file(file)
            written += [name] if name else []
    return written


def _shorten_file(file: DumpFile) -> str:
    target = file.path.with_name(file.path.name + SHORT)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        temporary.write_bytes(shorten(read_plain(file.path, MAX_BYTES)))
        temporary.replace(target)
    except (OSError, FlightUnreadable):
        return ""
    return target.name
