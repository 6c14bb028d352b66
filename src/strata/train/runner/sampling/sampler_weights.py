"""The weights that clients sample from. A sampler's weights never change, whatever is trained meanwhile.

They are the base itself, a copy of an adapter (as large as the adapter), or in full fine-tuning a copy of the full
model, of which each rank holds its shards. The live weights of a full fine-tune are never sampled from: a sequence that
began before an optimizer step would be continued by another model after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from strata.base.errors import Code, StrataError
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.model.base import DTYPES, BaseModel
from strata.train.runner.model.trained import local
from strata.train.runner.sampling.inference_model import copy_adapter, copy_weights

LIVE: Final = ""
"""The key of the live base's weights. No sampler has this name."""


@dataclass(frozen=True)
class _Weights:
    """An adapter or none on the live base, or all parameters of a full model, sharded as the live ones are."""

    adapter: Adapter | None = None
    full: Mapping[str, torch.Tensor] | None = None


class SamplerWeights:
    """The open samplers. All ranks open and close the same ones, at the same place among their commands."""

    def __init__(self, base: BaseModel, capacity: int) -> None:
        self._base = base
        self._capacity = capacity
        self._samplers: dict[str, _Weights] = {}

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._samplers

    def open_base(self, sampler_id: str) -> None:
        if self._base.settings.full:
            raise StrataError(Code.UNSUPPORTED, "this server trains the full model and keeps no copy of its base")
        self._check_capacity(sampler_id)
        self._samplers[sampler_id] = _Weights()

    def open_adapter(self, sampler_id: str, adapter: Adapter) -> None:
        """A copy of the adapter as it is now."""
        self._check_capacity(sampler_id)
        self._samplers[sampler_id] = _Weights(adapter=copy_adapter(adapter, self._base.lm))

    def open_full(self, sampler_id: str, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        """A copy of these parameters, or of the live ones as they are now."""
        self._check_capacity(sampler_id)
        source = dict(self._base.lm.named_parameters()) if parameters is None else parameters
        self._samplers[sampler_id] = _Weights(full=copy_weights(source, DTYPES[self._base.settings.dtype]))

    def close(self, sampler_id: str) -> None:
        if self._samplers.pop(sampler_id, None) is None:
            raise StrataError(Code.NOT_FOUND, f"there is no sampler {sampler_id!r}")

    def key(self, sampler_id: str) -> str:
        """Which base weights the sampler has. Sequences with the same key run in one batch."""
        return LIVE if self._samplers[sampler_id].full is None else sampler_id

    def adapter(self, sampler_id: str) -> Adapter | None:
        return self._samplers[sampler_id].adapter

    def parameters(self, key: str) -> Mapping[str, torch.Tensor]:
        full = None if key == LIVE else self._samplers[key].full
        return dict(self._base.lm.named_parameters()) if full is None else full

    def entries(self) -> Iterator[tuple[str, Adapter | None, Mapping[str, torch.Tensor] | None]]:
        """Every sampler with its adapter or its full model, in the order in which they were opened."""
        yield from ((name, weights.adapter, weights.full) for name, weights in self._samplers.items())

    def tensors(self) -> Iterator[torch.Tensor]:
        for weights in self._samplers.values():
            if weights.adapter is not None:
                yield weights.adapter.flat
            yield from (local(shard) for shard in (weights.full or {}).values())

    def _check_capacity(self, sampler_id: str) -> None:
        if not sampler_id or sampler_id in self._samplers:
            raise StrataError(Code.CONFLICT, f"there is a sampler {sampler_id!r} already")
        if len(self._samplers) >= self._capacity:
            raise StrataError(
                Code.EXHAUSTED, f"{self._capacity} samplers are open, which is the limit; close one first"
            )
