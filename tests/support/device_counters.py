"""Counts what a part of the program makes a device do: launches, bytes, reads that the host waits for, and copies, by
place.

With fake tensors of a CUDA device (`FakeTensorMode`) it counts what is dispatched there. A read has no content then;
it gets an answer, so that the rest is counted too. What the host computes has content. On CPU nothing is copied; it
counts the calls that would copy on another device. Ranks under count then have the device `CPU_DEVICE`, which is not
equal to the host's `cpu`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CPU_DEVICE: Final = torch.device("cpu", 0)
HOST: Final = torch.device("cpu")
DEVICE_OF: Final = torch.Tensor.device.__get__
PACKAGES: Final = ("strata", "transformers")
"""A place is in the innermost function of these."""
ALLOCATIONS: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"})
WITHOUT_LAUNCH: Final = frozenset(
    {"_unsafe_view", "_has_compatible_shallow_copy_type", "device", "is_pinned", "lift_fresh"}
)
"""Views that are not declared as such, and questions that the host answers."""
COPIES: Final = ("copy_", "_to_copy")
READS: Final = frozenset(
    {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero", "unique_consecutive"}
)
"""The host waits for their content, or for the size of their result."""
Answer = Callable[[str, torch.Tensor], Any]
"""What a read of a tensor without content gives, by its place."""


@dataclass
class DeviceCounts:
    """What was counted. Places are `package/module.py:function`."""

    operations: Counter[str] = field(default_factory=Counter)
    """Launches by name: operations that are neither views nor allocations. One may be several kernels."""
    bytes: int = 0
    """That launches read and write, each tensor once for each launch."""
    reads: Counter[str] = field(default_factory=Counter)
    """For which the host waits."""
    to_device: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    """Copies for which the host does not wait."""

    @property
    def launches(self) -> int:
        return self.operations.total()

    def figures(self) -> dict[str, int]:
        return {
            "launches": self.launches,
            "reads": self.reads.total(),
            "copies to the device": self.to_device.total(),
            "copies to the host": self.to_host.total(),
        }


class DeviceCounters:
    """Counts within `with`, in `counts`. Enter it inside of a `FakeTensorMode`, not around it."""

    def __init__(self, device: torch.device, answer: Answer | None = None) -> None:
        self.counts = DeviceCounts()
        self._counter = counter = _Counter(self.counts, device, answer or _answer_by_dtype)
        self._modes: Sequence[TorchDispatchMode | TorchFunctionMode] = (_Dispatched(counter), _Called(counter))
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        if self._counter.is_simulated:
            self._entered.enter_context(self._counter.put_arrays_on_host())
        for mode in self._modes:
            self._entered.enter_context(mode)
        return self

    def __exit__(self, *unused: object) -> None:
        self._entered.close()


class _Counter:
    """Knows which tensors are in the memory of the host. On CPU, those that are made of values or were copied there,
    and what is computed of them alone; what was there before is on the device."""

    def __init__(self, counts: DeviceCounts, device: torch.device, answer: Answer) -> None:
        self.counts, self.device, self.answer = counts, device, answer
        self._host: dict[int, torch.UntypedStorage] = {}

    @property
    def is_simulated(self) -> bool:
        return self.device.type == "cpu"

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        if not self.is_simulated:
            return tensor.device.type == "cpu"
        return type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata in self._host

    def put_on_host(self, tensor: torch.Tensor) -> None:
        if type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            self._host[storage._cdata] = storage

    @contextmanager
    def put_arrays_on_host(self) -> Iterator[None]:
        """Tensors of arrays and buffers too, whose functions no mode sees."""
        made = {name: getattr(torch, name) for name in ("from_numpy", "frombuffer")}

        def put(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            self.put_on_host(tensor)
            return tensor

        for name, make in made.items():
            setattr(torch, name, partial(put, make))
        try:
            yield
        finally:
            for name, make in made.items():
                setattr(torch, name, make)

    def copied(self, *, to_host: bool, waits: bool) -> None:
        if not to_host:
            self.counts.to_device[_place()] += 1
        else:
            (self.counts.reads if waits else self.counts.to_host)[_place()] += 1

    def read(self) -> None:
        self.counts.reads[_place()] += 1


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations below autograd."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, counter = kwargs or {}, self._counter
        name = func.overloadpacket.__name__
        inputs = list(_tensors((args, kwargs)))
        is_of_host = bool(inputs) and all(map(counter.is_on_host, inputs))
        if not is_of_host and (name in READS or _has_mask(name, args)):
            counter.read()
            if name == "_local_scalar_dense" and not counter.is_simulated:
                return counter.answer(_place(), args[0])
        if not counter.is_simulated and _is_real(inputs, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if func.is_view or name in ALLOCATIONS | WITHOUT_LAUNCH | READS:
            return output
        if not counter.is_simulated and name in COPIES and (moved := _moved(name, args, output)):
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
            counter.copied(to_host=moved == "cpu", waits=waits)
            if moved == "cpu":
                # The host may read any of it.
                with unset_fake_temporarily():
                    return args[0].fill_(1) if name == "copy_" else torch.ones(output.shape, dtype=output.dtype)
        elif is_of_host and counter.is_simulated:
            for tensor in _tensors(output):
                counter.put_on_host(tensor)
        elif any(tensor.device.type == counter.device.type for tensor in (*inputs, *_tensors(output))):
            counter.counts.operations[name] += 1
            counter.counts.bytes += sum(tensor.nbytes for tensor in (*inputs, *_tensors(output)))
        return output


class _Called(TorchFunctionMode):
    """Counts calls of Python that dispatch does not see: `tolist`, and on CPU copies, which it makes."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, counter = dict(kwargs or {}), self._counter
        if func is torch.Tensor.tolist and not counter.is_on_host(args[0]):
            counter.read()
            if not counter.is_simulated:
                return counter.answer(_place(), args[0])
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        output = func(*args, **kwargs)
        if func == DEVICE_OF and counter.is_simulated and not counter.is_on_host(args[0]):
            # torch itself compares devices, also where this mode is off.
            return counter.device if _package_of(sys._getframe(1)) else output
        return self._copied(func, args, kwargs, output) if counter.is_simulated else output

    def _backward(self, total: torch.Tensor, gradient: torch.Tensor | None = None, **options: Any) -> None:
        """A mode is off while it handles a call, but hooks and recomputed layers of the backward pass count too. Both
        functions of torch for it would come back here."""
        assert not any(options.values()), options
        first = torch.ones_like(total) if gradient is None else gradient
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                (total,), (first,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _copied(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Any:
        counter = self._counter
        if func in (torch.tensor, torch.as_tensor):
            if _device_of(kwargs.get("device")) == counter.device:
                counter.copied(to_host=False, waits=True)
            else:
                counter.put_on_host(output)
            return output
        if func is torch.Tensor.cpu:
            wanted: torch.device | None = HOST
        elif func is torch.Tensor.to:
            wanted = _device_of(kwargs.get("device", args[1] if len(args) > 1 else None))
        else:
            return output
        on_host = counter.is_on_host(args[0])
        if (wanted == HOST and not on_host) or (wanted == counter.device and on_host):
            counter.copied(to_host=not on_host, waits=not kwargs.get("non_blocking"))
            with torch._C._DisableTorchDispatch():
                output = output.clone()
            if not on_host:
                counter.put_on_host(output)
        return output


def _device_of(value: object) -> torch.device | None:
    return torch.device(value) if isinstance(value, str) else value if isinstance(value, torch.device) else None


def _answer_by_dtype(place: str, tensor: torch.Tensor) -> Any:
    del place
    one = True if tensor.dtype == torch.bool else tensor.dtype.is_floating_point + 0
    return _filled(tensor.shape, one)


def _filled(shape: Sequence[int], value: Any) -> Any:
    return value if not shape else [_filled(shape[1:], value) for _ in range(shape[0])]


def _is_real(inputs: Sequence[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Says whether the host computes it, with content."""
    if any(isinstance(each, FakeTensor) for each in inputs):
        return False
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _moved(name: str, args: Sequence[Any], output: torch.Tensor) -> str:
    """The device that it is copied to; nothing if it is there already."""
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], output)
    return "" if source.device.type == target.device.type else target.device.type


def _has_mask(name: str, args: Sequence[Any]) -> bool:
    """Says whether it is indexed by a mask, whose true places the host has to count."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from _tensors(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)


def _package_of(frame: FrameType) -> str:
    """The place of a function of `PACKAGES`; nothing if it is of others."""
    parts = Path(frame.f_code.co_filename).parts
    for package in PACKAGES:
        if package in parts and "tests" not in parts:
            number = len(parts) - 1 - parts[::-1].index(package)
            return f"{'/'.join(parts[number:])}:{frame.f_code.co_name}"
    return ""


def _place() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if place := _package_of(frame):
            return place
        frame = frame.f_back
    return "elsewhere"
