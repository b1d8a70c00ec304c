"""What bench-checkpoint trains: a GPT sharded by FSDP2 with AdamW, as large as is asked for; needs torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

_BYTES_A_WEIGHT = 12  # the weight and Adam's two moments, 4 bytes each
CONTEXT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of one model; `heads` divides `width`."""

    width: int
    layers: int
    words: int
    heads: int = 8

    @property
    def weights(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.words + CONTEXT + 2) * self.width


# By the size of the state in GB: of GPT-2's proportions, so that the number of tensors is that of a real model.
SHAPES = {
    0.25: Shape(width=384, layers=8, words=17_600),
    1.0: Shape(width=768, layers=10, words=16_000),
    4.0: Shape(width=1024, layers=24, words=29_300),
}


def state_bytes(shape: Shape) -> int:
    """Weights and both moments, without the few bytes of the step counters."""
    return shape.weights * _BYTES_A_WEIGHT


class Block(nn.Module):
    """Attention and a feed-forward part, normalised before each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + added


class Gpt(nn.Module):
    """Predicts each next word; the embedding is also the last layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        said: torch.Tensor = functional.linear(self.norm(x), self.words.weight)
        return said


class Training:
    """A sharded model with its optimizer, after one step of it, so that all of the state is there."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        with torch.device("meta"):  # each rank draws its own part only
            self.model = Gpt(shape)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.model.to_empty(device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self._words = shape.words
        self._device = device
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in self.model.parameters():
                _local(weight).uniform_(-0.02, 0.02)
                weight.grad = weight * 0.01
        self._update()

    def step(self, rows: int) -> float:
        """One forward, backward and optimizer step on so many sequences of 128 words; returns the loss."""
        words = torch.randint(self._words, (rows, CONTEXT + 1), device=self._device)
        said = self.model(words[:, :-1])
        loss = functional.cross_entropy(said.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self._update()
        return loss.item()

    def _update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def local_tensors(self) -> list[torch.Tensor]:
        """This rank's parts of the weights and moments: the bytes that a save copies."""
        weights = [_local(p) for p in self.model.parameters()]
        moments = [_local(v) for state in self.optimizer.state.values() for v in state.values() if v.dim()]
        return weights + moments


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor.detach(), "to_local", None)
    return to_local() if to_local else tensor.detach()
