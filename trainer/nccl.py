"""NCCL and fail-fast environment, what NCCL's log says of the transport, and an all-reduce bandwidth test."""

from __future__ import annotations

from collections.abc import Mapping


def nccl_environment(evidence_dir: str, given: Mapping[str, str]) -> dict[str, str]:
    """Thin."""
    return {}
