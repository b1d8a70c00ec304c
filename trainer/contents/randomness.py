"""The random states of a process: collected, put back, or seeded anew where they can't be carried over.

A state is plain JSON values of constant length, so that an item with it in keeps its size from save to save.
"""

from __future__ import annotations

import array
import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch


def collect_rng() -> dict[str, Any]:
    """The random states of this process: torch (CPU and current CUDA device), numpy and Python."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - what user code draws from
    state: dict[str, Any] = {
        "torch": _pack(torch.get_rng_state().numpy().tobytes()),
        "python": [version, _pack(array.array("Q", words).tobytes()), gauss],
        "numpy": [name, _pack(np.asarray(keys, dtype=np.uint32).tobytes()), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = _pack(torch.cuda.get_rng_state().numpy().tobytes())
    return state


def apply_rng(state: dict[str, Any]) -> None:
    """Put random states back that `collect_rng` returned."""
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array.array("Q", base64.b64decode(words))), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    words32 = np.frombuffer(base64.b64decode(keys), dtype=np.uint32)
    np.random.set_state((name, words32, position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def seed_rng(base_seed: int, step: int, rank: int) -> None:
    """Seed all random states of this process from (base seed, step, rank)."""
    seed = mix_seed(base_seed, step, rank)
    torch.manual_seed(seed)  # CUDA devices, too
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def mix_seed(base_seed: int, step: int, rank: int) -> int:
    """A 63-bit seed in which neighbouring steps and ranks share nothing."""
    digest = hashlib.blake2b(f"{base_seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _pack(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
