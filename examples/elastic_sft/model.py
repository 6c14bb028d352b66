"""A small causal language model over bytes: RMSNorm, rotary positions, SwiGLU, no biases. About a million weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY: Final = 257
PADDING: Final = 256
"""Not a byte: fills up the rows of a batch, and is never to be predicted."""


@dataclass(frozen=True)
class Shape:
    width: int = 128
    heads: int = 4
    layers: int = 4
    context: int = 128


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


def rotate(x: Tensor) -> Tensor:
    """Rotary positions over the last two dimensions."""
    length, size = x.shape[-2:]
    speeds = 10_000 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.outer(torch.arange(length, device=x.device), speeds)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = 8 * shape.width // 3
        self.before_attention = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.before_mlp = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        gate, up = self.gate(self.before_mlp(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(functional.silu(gate) * up)
        return out


class LanguageModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
