"""Which operations torch dispatches while a piece of code runs, and how large their results are."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS: Final = ("aten._local_scalar_dense", "aten.nonzero")
"""What makes the host wait for a device: a number that Python reads, and a selection whose size it has to know."""


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.largest = 0
        """Elements of the largest tensor that was computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).rpartition(".")[0]] += 1
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return result

    @property
    def reads(self) -> int:
        return sum(self.calls[name] for name in READS)

    def count(self, part: str) -> int:
        """Operations with this in their names."""
        return sum(count for name, count in self.calls.items() if part in name)
