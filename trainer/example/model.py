"""A small byte-level GPT: enough of one to have every part that a checkpoint must carry, and fast on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of the model. `width` is a multiple of `heads`; `length` in bytes."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    length: int = 64
    dropout: float = 0.0


class Block(nn.Module):
    """One transformer block: attention and a feed-forward layer, each normalised before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations of shape (batch, length, width), and the same out."""
        x = x + self.dropout(self.out(self._attend(self.norm_1(x))))
        out: torch.Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm_2(x)))))
        return out

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return mixed.transpose(1, 2).reshape(batch, length, width)


class Gpt(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of (batch, length) bytes against their successors."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
