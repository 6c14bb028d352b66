"""Computes a client's loss graph: the table of operations, and its limits of numbers and bytes (512 MiB).

The work is bounded before it is done. The graph runs once on tensors without content, which have only shapes: that
finds operands that do not fit, how many numbers all nodes read or compute together, and how many bytes these take.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from strata.base.errors import Code, StrataError
from strata.train.core.loss_graph import (
    ATTRIBUTES,
    FUNCTIONAL,
    LOGPROBS,
    METHODS,
    OPERATORS,
    TORCH,
    CustomLoss,
    LossNode,
    canonical_target,
    read_output,
)
from strata.train.runner.model.process_memory import is_out_of_memory

COST_FACTOR: Final = 512
"""All nodes of a graph together cost at most so many numbers for each number that the graph gets. A node costs as many
numbers as its result or its largest operand has: no operation combines more than three tensors, unless its result holds
them all."""
MAX_BYTES: Final = 512 << 20
"""The results of all nodes of a graph together, for one group. The backward pass needs them all at once."""
_SMALLEST: Final = 1024
"""The groups of an operation that gets fewer numbers may cost as much as if it got so many."""
_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}
_FAILURES: Final = (RuntimeError, TypeError, ValueError, IndexError, OverflowError, ZeroDivisionError, AttributeError)
"""What torch and Python raise for operands that do not fit."""
Value = Any
"""A tensor, a number, or a shape."""


@dataclass(frozen=True)
class GroupMember:
    """One datum of a group."""

    logprobs: torch.Tensor
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class GroupLoss:
    loss: float
    metrics: Mapping[str, float]
    gradients: Sequence[torch.Tensor]
    """Gradients of the loss by the log probabilities of each member; empty if they were not requested."""


def compute_group(loss: CustomLoss, members: Sequence[GroupMember], *, backward: bool) -> GroupLoss:
    """The loss of one group and its gradients; INVALID if it is not finite or does not depend on `logprobs`."""
    leaves = [member.logprobs.detach().clone().requires_grad_(backward) for member in members]
    with torch.set_grad_enabled(backward):
        joined = [torch.cat(leaves) if len(leaves) > 1 else leaves[0]]
        joined += [_join(each.rank, [member.inputs[each.name] for member in members]) for each in loss.inputs[1:]]
        value, metrics = _run(loss, joined)
    if not bool(torch.isfinite(value)):
        raise StrataError(Code.INVALID, f"its loss is {float(value.detach())}")
    gradients: Sequence[torch.Tensor] = ()
    if backward:
        if not value.requires_grad:
            raise StrataError(Code.INVALID, f"the loss {loss.name!r} does not depend on {LOGPROBS}")
        gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            raise StrataError(Code.INVALID, "a gradient of its loss is not finite")
    numbers = {name: float(metric.detach()) for name, metric in metrics.items()}
    return GroupLoss(float(value.detach()), numbers, gradients)


@dataclass
class _CostLimit:
    """How much the nodes of a graph may still cost."""

    numbers: int
    size: int

    def charge(self, node: LossNode, operands: Sequence[torch.Tensor], value: Value) -> None:
        """INVALID at the node that costs too much."""
        results = [value] if isinstance(value, torch.Tensor) else []
        self.numbers -= max((math.prod(each.shape) for each in (*operands, *results)), default=0)
        self.size -= sum(math.prod(each.shape) * each.element_size() for each in results)
        if self.numbers < 0:
            raise _failed(node, f"the graph computes more than {COST_FACTOR} numbers for each number of its inputs")
        if self.size < 0:
            raise _failed(node, f"the graph needs more than {MAX_BYTES >> 20} MiB for one group")


def check_group(loss: CustomLoss, members: Sequence[GroupMember], groups: int = 1) -> None:
    """INVALID if the graph does not fit these shapes, or would compute too much. Computes nothing itself.

    `groups` is how many its operation has.
    """
    shapes = [
        _join(
            each.rank,
            [_empty(member.logprobs if each.name == LOGPROBS else member.inputs[each.name]) for member in members],
        )
        for each in loss.inputs
    ]
    got = sum(shape.numel() for shape in shapes)
    value, metrics = _run(loss, shapes, _CostLimit(COST_FACTOR * max(got, _SMALLEST // groups), MAX_BYTES))
    if value.ndim or not value.is_floating_point():
        raise StrataError(
            Code.INVALID, f"the loss {loss.name!r} has the shape {tuple(value.shape)}: it must be one number"
        )
    for name, metric in metrics.items():
        if metric.ndim:
            raise StrataError(
                Code.INVALID, f"metric {name!r} has the shape {tuple(metric.shape)}: it must be one number"
            )


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _join(rank: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One input of a group: of one datum as it is; of several one after the other, token by token."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(list(parts)) if rank == 0 else torch.cat(list(parts))


def _run(
    loss: CustomLoss, inputs: Sequence[torch.Tensor], limit: _CostLimit | None = None
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    values: dict[str, Value] = {}
    arriving = iter(inputs)
    for node in loss.graph.nodes[:-1]:
        if node.op == "placeholder":
            values[node.name] = next(arriving)
            continue
        arguments = [_read(argument, values) for argument in node.args]
        named = {name: _read(argument, values) for name, argument in node.kwargs.items()}
        try:
            value = _call(node, arguments, named)
        except _FAILURES as error:
            if is_out_of_memory(error):
                # Not the client's error: journaled as one, a replay on ranks with more memory would diverge.
                raise
            raise _failed(node, str(error).partition("\n")[0][:200]) from None
        if limit is not None:
            limit.charge(node, list(_tensors([*arguments, *named.values()])), value)
        values[node.name] = _checked(node, value)
    name, metrics = read_output(loss.graph)
    return _tensor(loss, name, values), {each: _tensor(loss, node, values) for each, node in metrics.items()}


def _tensors(arguments: Sequence[Value]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def _call(node: LossNode, arguments: Sequence[Value], named: Mapping[str, Value]) -> Value:
    target = canonical_target(node)
    if node.op == "call_method":
        if not arguments or not isinstance(arguments[0], torch.Tensor):
            raise TypeError("it is a method of tensors")
        return _METHODS[target](*arguments, **named)
    return _FUNCTIONS[target](*arguments, **named)


def _read(argument: Any, values: Mapping[str, Value]) -> Value:  # noqa: PLR0911 - one arm per form
    """An argument as a value. Its form was checked before the graph was journaled."""
    match argument:
        case {"ref": name}:
            return values[name]
        case {"tuple": parts}:
            return tuple(_read(part, values) for part in parts)
        case {"slice": parts}:
            return slice(*(_read(part, values) for part in parts))
        case {"ellipsis": _}:
            return ...
        case {"float": text}:
            return float(text)
        case {"dtype": name}:
            return _DTYPES[name]
        case list():
            return [_read(part, values) for part in argument]
        case _:
            return argument


def _checked(node: LossNode, value: Value) -> Value:
    if isinstance(value, torch.Tensor | float | torch.Size):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    raise _failed(node, "it gives neither a tensor nor a number")


def _tensor(loss: CustomLoss, name: str, values: Mapping[str, Value]) -> torch.Tensor:
    value = values[name]
    if not isinstance(value, torch.Tensor):
        raise StrataError(Code.INVALID, f"the loss {loss.name!r} returns {name!r}, which is no tensor")
    return value


def _failed(node: LossNode, why: str) -> StrataError:
    return StrataError(Code.INVALID, f"graph: node {node.name!r} ({node.op} {node.target}): {why}")


def _of_numbers(compute: Callable[..., Value]) -> Callable[..., Value]:
    """An operator on tensors and numbers only: on a shape it would repeat or join it, any number of times."""

    def checked(*operands: Value) -> Value:
        if not all(isinstance(each, torch.Tensor | int | float) for each in operands):
            raise TypeError("its operands must be tensors or numbers")
        return compute(*operands)

    return checked


def _power(base: Value, exponent: Value) -> Value:
    # Integers of Python have no size limit: 9 ** 9 ** 9 would fill the memory.
    if isinstance(base, torch.Tensor) or isinstance(exponent, torch.Tensor):
        return operator.pow(base, exponent)
    return float(base) ** float(exponent)


def _item(value: Value, index: Value) -> Value:
    """Indexes by numbers, slices and new axes only: an index that is a tensor could be out of range on a device."""
    for part in index if isinstance(index, tuple) else (index,):
        if part is not None and part is not ... and not isinstance(part, int | slice):
            raise TypeError("an index must be a number, a slice, None or an ellipsis")
    return operator.getitem(value, index)


def _attribute(value: Value, name: str) -> Value:
    if not isinstance(value, torch.Tensor):
        raise TypeError("it is an attribute of tensors")
    assert name in ATTRIBUTES, "checked before the graph was journaled"
    return getattr(value, name)


def _convert(value: torch.Tensor, dtype: Value) -> torch.Tensor:
    if not isinstance(dtype, torch.dtype):
        raise TypeError("it converts to a type, and moves nothing")
    return value.to(dtype)


def _softmax(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def without_stacklevel(*arguments: Value, _stacklevel: int = 3, **named: Value) -> torch.Tensor:
        del _stacklevel
        return compute(*arguments, **named)

    return without_stacklevel


def _relu(value: torch.Tensor, **options: Value) -> torch.Tensor:
    del options
    return torch.relu(value)


_FUNCTIONS: Final[Mapping[str, Callable[..., Value]]] = {
    **{f"torch.{name}": getattr(torch, name) for name in TORCH},
    **{f"torch.nn.functional.{name}": getattr(functional, name) for name in FUNCTIONAL},
    **{f"operator.{name}": _of_numbers(getattr(operator, name)) for name in OPERATORS},
    **{f"torch.{name}": _softmax(getattr(torch, name)) for name in ("softmax", "log_softmax")},
    **{f"torch.nn.functional.{name}": _softmax(getattr(torch, name)) for name in ("softmax", "log_softmax")},
    "torch.nn.functional.relu": _relu,
    "operator.pow": _power,
    "operator.getitem": _item,
    "getattr": _attribute,
}
_METHODS: Final[Mapping[str, Callable[..., Value]]] = {
    **{name: getattr(torch.Tensor, name) for name in METHODS},
    **{name: _softmax(getattr(torch.Tensor, name)) for name in ("softmax", "log_softmax")},
    "to": _convert,
}
