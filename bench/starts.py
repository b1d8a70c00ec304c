"""Commands started as from an installation: pip has compiled it, so no start pays for compiling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def as_installed(env: Mapping[str, str], bytecode: Path) -> dict[str, str]:
    """`env`, with the bytecode of all modules kept in a folder of its own; the first start fills it.

    A clone has none, and a shell with PYTHONDONTWRITEBYTECODE never gets any.
    """
    kept = {name: value for name, value in env.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(bytecode)}
