"""Noise in the kernels of ranks that replay: each product of matrices is off by a random share of itself.

It stands for kernels that add in any order, which a CPU does not have. A rank reads the file `noise` when it is forked;
what it runs first, after its replay, is exact.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from strata.train.runner.passes.partition import RankPass, RankReport

NOISE: Final = "noise"


def order_noise(folder: Path, scale: float) -> None:
    """The ranks that are forked from now on; 0 is none."""
    temporary = folder / f".{NOISE}"
    temporary.write_text(str(scale), encoding="utf-8")
    temporary.rename(folder / NOISE)


def add_noise(folder: Path) -> None:
    """In a rank, before it begins."""
    scale = 0.0
    with suppress(FileNotFoundError):
        scale = float((folder / NOISE).read_text(encoding="utf-8"))
    if scale:
        _replace_kernel(scale)


def _replace_kernel(scale: float) -> None:
    import torch

    from strata.train.runner.model_runner import ModelRunner

    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
    noisy = False

    def multiply(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        product = first.new_empty(first.shape[0], second.shape[1])
        torch.mm(first, second, out=product)
        if noisy:
            share = torch.randn(product.shape, generator=generator, dtype=product.dtype)
            product.mul_(share.mul_(scale).add_(1.0))
        return product

    # Kept for the life of the process: a library that is collected takes its kernel along.
    global _library  # noqa: PLW0603 - see above
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _library.impl("mm", multiply, "CPU")  # type: ignore[no-untyped-call]
    exact = ModelRunner.forward_backward

    def forward_backward(self: ModelRunner, work: RankPass) -> RankReport:
        nonlocal noisy
        noisy = work.replayed
        try:
            return exact(self, work)
        finally:
            noisy = False

    ModelRunner.forward_backward = forward_backward  # type: ignore[method-assign]


_library: object = None
