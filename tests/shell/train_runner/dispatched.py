"""Which operations torch dispatches while a piece of code runs, how large their results are, and what the code reads
of tensors or copies to a device."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS: Final = ("aten._local_scalar_dense", "aten.nonzero")
"""What makes the host wait for a device: a number that Python reads, and a selection whose size it has to know."""


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        """Those that are no views."""
        self.largest = 0
        """Elements of the largest tensor that was computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).rpartition(".")[0]] += 1
        if not func.is_view and "empty" not in str(func):
            self.launches[str(func).rpartition(".")[0]] += 1
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


WAITS: Final = {
    getattr(torch.Tensor, name): name
    for name in ("__bool__", "__float__", "__index__", "__int__", "cpu", "equal", "item", "nonzero", "tolist")
}


class HostTraffic(TorchFunctionMode):
    """Calls by which the host reads tensors, and those that copy them to a device: on CPU both do nothing."""

    def __init__(self, device: torch.device) -> None:
        """`device` has an index, as no tensor on CPU has: so calls that only keep tensors together do not count."""
        super().__init__()
        self._device = device
        self.reads: Counter[str] = Counter()
        self.copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            self.reads[WAITS[func]] += 1
        if func in (torch.Tensor.to, torch.tensor, torch.as_tensor):
            wanted = [*args[1:2], *(kwargs or {}).values()]
            self.reads["to"] += any(isinstance(each, str) for each in wanted)
            self.copies += any(isinstance(each, torch.device) and each == self._device for each in wanted)
        return func(*args, **(kwargs or {}))
