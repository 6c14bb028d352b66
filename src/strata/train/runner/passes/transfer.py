"""Moves arrays of a row to the device in one copy, and results back to the host without waiting for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from strata.train.runner.model.process_memory import pinned_bytes

_ALIGNMENT: Final = 16
"""Arrays of any dtype may begin at its multiples."""
_TORCH: Final = {
    "bool": torch.bool,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


class HostBuffer:
    """Arrays on the host that travel to the device together: one buffer, pinned for a CUDA device, and one copy."""

    def __init__(self) -> None:
        self._fields: list[tuple[Sequence[NDArray[Any]], np.dtype[Any], tuple[int, ...]]] = []

    def add(self, parts: Sequence[NDArray[Any]], dtype: DTypeLike, shape: tuple[int, ...] = (-1,)) -> int:
        """Append arrays, joined one after the other, as one of this dtype and shape. Returns its place in `move`."""
        self._fields.append((parts, np.dtype(dtype), shape))
        return len(self._fields) - 1

    def move(self, device: torch.device) -> list[torch.Tensor]:
        """All of them, in order, on the device: views of one tensor."""
        sizes = [sum(part.size for part in parts) * dtype.itemsize for parts, dtype, _ in self._fields]
        starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        pinned = pinned_bytes(starts[-1]) if _pins(device) else None
        # Tensors that a memory plan traces have no content, and so no array that could be written to.
        host = np.empty(starts[-1], np.uint8) if pinned is None else pinned.numpy()
        for (parts, dtype, _), start, size in zip(self._fields, starts, sizes, strict=False):
            if size:
                np.concatenate([part.reshape(-1) for part in parts], out=host[start : start + size].view(dtype))
        moved = (torch.from_numpy(host) if pinned is None else pinned).to(device, non_blocking=True)
        return [
            moved[start : start + size].view(_TORCH[dtype.name]).view(shape)
            for (_, dtype, shape), start, size in zip(self._fields, starts, sizes, strict=False)
        ]


def start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that has its content once `wait_for_copies` returns. On CPU, the tensor itself."""
    plain = tensor.detach()
    if plain.device.type == "cpu":
        return plain
    if _pins(plain.device):
        host = pinned_bytes(plain.nbytes).view(plain.dtype).view(plain.shape)
    else:
        host = torch.empty(plain.shape, dtype=plain.dtype)
    return host.copy_(plain, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Wait for all that was started on this device so far."""
    if _pins(device):
        torch.cuda.current_stream(device).synchronize()


def _pins(device: torch.device) -> bool:
    """Says whether memory can be pinned: without a driver it cannot, and tensors of a CUDA device are fake."""
    return device.type == "cuda" and torch.cuda.is_available()
