"""What the bench of the training server tells its processes, and the batches that both sides train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

MODEL: Final = "bench"
"""What clients call it."""
RATE: Final = 1e-4
BETAS: Final = (0.9, 0.95)
EPS: Final = 1e-12
LORA_RANK: Final = 32
LORA_ALPHA: Final = 32
BATCHES: Final = 4
"""Different ones, in turn."""

Tokens = npt.NDArray[np.int32]


class Server(msgspec.Struct, frozen=True):
    """Ours, as clients reach it."""

    url: str
    key: str


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, and in which pieces: one row of documents of one length for each rank, in each step."""

    training: Literal["lora", "full"] = "lora"
    layers: int
    hidden: int
    vocabulary: int
    documents: int
    """In each row."""
    length: int
    """Tokens of a document."""
    ranks: int = 2

    @property
    def row_tokens(self) -> int:
        return self.documents * self.length

    @property
    def step_tokens(self) -> int:
        return self.ranks * self.row_tokens


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`empty`: to all ranks and back. `pass`: forward and backward over one token. `train`: so many steps."""

    kind: Literal["empty", "pass", "train", "end"]
    first: int = 0
    """The batch of the first step."""
    steps: int = 1


class Found(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 0.0
    """Of the steps alone."""
    loss: float = 0.0
    """Of the first step: the sum over all tokens of all ranks."""


def draw(work: Work) -> Tokens:
    """(batch, rank, document, token), one token more than a document has: targets are the tokens one further on."""
    chance = np.random.default_rng(0)
    shape = (BATCHES, work.ranks, work.documents, work.length + 1)
    return chance.integers(0, work.vocabulary, shape, dtype=np.int32)


def save(path: Path, batches: Tokens) -> None:
    np.save(path, batches, allow_pickle=False)


def load(path: Path) -> Tokens:
    found: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    return found.astype(np.int32, copy=False)
