"""Router replay (R3): records the experts that the routers of a mixture choose, and has them choose recorded ones.

The choice alone is replayed. A router computes its scores as ever, and gives the chosen experts the weights that its
scores say, so their gradients reach it. In the code of nearly every family a router chooses by `torch.topk` over the
scores of all experts; in a replay that call returns the recorded experts with their scores (`_ReplayedChoice`). Whether
a model is of that kind is tried before the first replay (`model/replay_check.py`).

The numbers of layers are those of the modules with experts, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import SampledRouting

NOT_REPLAYED: Final = -1
"""Stands for the experts of a token that the router chooses itself."""
_NARROW: Final = 256
"""So many experts can be told apart by a byte."""
_TOP_K: Final = frozenset({torch.topk, torch.Tensor.topk})


class RouterReplay:
    """What the routers of a model have chosen, and what they are to choose."""

    def __init__(self) -> None:
        self.layers = 0
        self.experts = 0
        self.per_token = 0
        """Experts of a token, as the last layer that computed had them; 0 before the first pass."""
        self.row: torch.Tensor | None = None
        """What the row that is computed replays: (tokens, layers, experts of a token); None if it replays nothing. It
        is set again when the backward pass of the row begins, as layers may be recomputed in it."""
        self._chosen: list[torch.Tensor] | None = None

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's routing."""
        return self.layers * self.per_token * _dtype(self.experts).itemsize

    def add_layer(self, block: Any, experts: int) -> int:
        """Add the next layer, whose router and experts are in this module; returns its number."""
        number = self.layers
        self.layers += 1
        self.experts = max(self.experts, experts)
        forward: Callable[..., Any] = block.forward

        def replay(*args: Any, **options: Any) -> Any:
            if self.row is None:
                return forward(*args, **options)
            with _ReplayedChoice(self.row[:, number].to(torch.int64), experts) as choice:
                output = forward(*args, **options)
            if not choice.calls:
                raise StrataError(Code.UNSUPPORTED, "a router does not choose by a topk over all experts")
            return output

        block.forward = replay
        return number

    def record(self, chosen: torch.Tensor) -> None:
        """The next layer has chosen these experts, (tokens, experts of a token)."""
        self.per_token = chosen.shape[1]
        if self._chosen is not None:
            self._chosen.append(chosen)

    def start_recording(self) -> None:
        self._chosen = []

    def take_recorded(self) -> torch.Tensor:
        """Returns what all layers have chosen since, as (tokens, layers, experts of a token)."""
        chosen, self._chosen = self._chosen, None
        if not chosen or len(chosen) != self.layers or len({each.shape for each in chosen}) != 1:
            raise StrataError(Code.UNSUPPORTED, "its layers do not all choose as many experts, once for each token")
        return torch.stack(chosen, dim=1)

    def restore_row(self, row: torch.Tensor | None, gradient: torch.Tensor) -> None:
        """A hook of what a row computes, for its backward pass."""
        del gradient
        self.row = row

    def encode(self, chosen: torch.Tensor) -> NDArray[Any]:
        """Returns what was recorded as it is stored."""
        return chosen.to("cpu", torch.int32).numpy().astype(_dtype(self.experts))

    def sampled(self, experts: bytes) -> SampledRouting:
        return SampledRouting(self.layers, self.per_token, experts, wide=_dtype(self.experts).itemsize > 1)

    def read(self, routing: SampledRouting, tokens: int) -> NDArray[Any]:
        """The routing of the first tokens of a datum of so many; INVALID if it is not one of this model."""
        size = routing.token_bytes
        known = routing.layers == self.layers and routing.wide == (_dtype(self.experts).itemsize > 1)
        if not known or routing.per_token != self.per_token or len(routing.experts) % size:
            raise StrataError(Code.INVALID, "the recorded routing is not of this model")
        experts = np.frombuffer(routing.experts, _dtype(self.experts)).reshape(-1, self.layers, self.per_token)
        if len(experts) > tokens or (experts >= self.experts).any():
            raise StrataError(Code.INVALID, "the recorded routing is not of these tokens")
        return experts


def join_routing(parts: Sequence[NDArray[Any] | None], lengths: Sequence[int]) -> NDArray[np.int32] | None:
    """The routing of a row from that of its documents, of these lengths; None if none has any."""
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    row = np.full((sum(lengths), *some.shape[1:]), NOT_REPLAYED, np.int32)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None:
            row[start : start + len(part)] = part
        start += length
    return row


class _ReplayedChoice(TorchFunctionMode):
    """Has `topk` over the scores of all experts choose these, (tokens, experts of a token)."""

    def __init__(self, chosen: torch.Tensor, experts: int) -> None:
        super().__init__()
        self.calls = 0
        self._chosen = chosen
        self._experts = experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        # A choice of groups, or within groups, is not this one. Where all experts are one group, it changes nothing.
        if scores.shape[-1] != self._experts or result.indices.shape[-2:] != self._chosen.shape:
            return result
        self.calls += 1
        chosen = self._chosen.view(result.indices.shape)
        chosen = torch.where(chosen == NOT_REPLAYED, result.indices, chosen)
        return type(result)((scores.gather(-1, chosen), chosen))


def _dtype(experts: int) -> np.dtype[Any]:
    return np.dtype("u1") if experts <= _NARROW else np.dtype("<u2")


def block_of(model: nn.Module, experts: str) -> nn.Module:
    """The module that has the experts of this name, and their router."""
    return model.get_submodule(experts.rpartition(".")[0])
