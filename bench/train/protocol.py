"""Commands to the processes of the training benchmark, and the batches that both sides train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

MODEL: Final = "bench"
"""The name that clients use."""
RATE: Final = 1e-4
BETAS: Final = (0.9, 0.95)
EPS: Final = 1e-12
LORA_RANK: Final = 32
LORA_ALPHA: Final = 32
BATCHES: Final = 4
"""Different batches, in turn."""

Tokens = npt.NDArray[np.int32]


class Server(msgspec.Struct, frozen=True):
    """The server under test, as clients reach it."""

    url: str
    key: str
    pid: int
    """Its first process, whose children are all others."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The workload: in each step one row of documents of one length for each rank."""

    training: Literal["lora", "full"] = "lora"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic."""
    layers: int
    hidden: int
    vocabulary: int
    documents: int
    """Documents of each row."""
    length: int
    """Tokens of a document."""
    ranks: int = 2
    experts: int = 0
    """Of a mixture of experts, two of which compute a token; 0: a dense model."""

    @property
    def row_tokens(self) -> int:
        return self.documents * self.length

    @property
    def step_tokens(self) -> int:
        return self.ranks * self.row_tokens


class BenchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`empty`: a round trip to all ranks. `pass`: forward and backward over one token. `train`: so many steps."""

    kind: Literal["empty", "pass", "train", "end"]
    first: int = 0
    """The batch of the first step."""
    steps: int = 1


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 0.0
    """The time of the steps alone."""
    loss: float = 0.0
    """The loss of the first step: the sum over all tokens of all ranks."""


def draw(work: Work) -> Tokens:
    """(batch, rank, document, token), with one token more than a document has: targets are shifted by one."""
    rng = np.random.default_rng(0)
    shape = (BATCHES, work.ranks, work.documents, work.length + 1)
    return rng.integers(0, work.vocabulary, shape, dtype=np.int32)


def save(path: Path, batches: Tokens) -> None:
    np.save(path, batches, allow_pickle=False)


def load(path: Path) -> Tokens:
    batches: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    return batches.astype(np.int32, copy=False)
