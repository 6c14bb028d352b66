"""Deterministic kernels: the switches of torch, cuBLAS and NCCL (`use_deterministic_kernels`), and where they are off.

The same rank, device and mesh then computes the same bits from the same input, so a replay has the numbers of the first
run. An operation that has no deterministic kernel raises an error instead of computing something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch.utils import deterministic

from strata.base.settings import put_variables

VARIABLES: Final[Mapping[str, str]] = {
    # Matrix products of several streams share a workspace unless it has a fixed size.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Sums in a ring have one order; NVLink SHARP adds in the switch, in any order.
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
}
"""What cuBLAS and NCCL read when a process first uses them."""


def use_deterministic_kernels() -> None:
    """Called before the process first uses a device or joins a group."""
    put_variables(VARIABLES)
    # Not `warn_only`: the backward pass of torch's flash attention then stays with sums in any order.
    torch.use_deterministic_algorithms(mode=True)
    # New memory that is read before it is written would be a defect of ours; filling it costs every allocation.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def any_kernels() -> Iterator[None]:
    """Allow kernels that add in any order, for work that changes no model: sampling sums probabilities by `cumsum`,
    which has no deterministic kernel on CUDA."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(mode=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=True)
