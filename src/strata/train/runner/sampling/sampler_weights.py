"""The weights that clients sample from. A sampler's never change, whatever is trained meanwhile.

They are the base itself, a copy of an adapter (as large as the adapter), or in full fine-tuning a copy of the whole
model, of which each rank keeps its part. The live weights of a model in full training are never sampled from: a
sequence that is begun before a step would be continued by another model after it.
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
from strata.train.runner.sampling.inference_model import copied, frozen

LIVE: Final = ""
"""The name of the weights of the live base, which no sampler can have."""


@dataclass(frozen=True)
class _Weights:
    """An adapter or none on the live base, or all parameters of a model, sharded as the live ones are."""

    adapter: Adapter | None = None
    whole: Mapping[str, torch.Tensor] | None = None


class SamplerWeights:
    """All ranks are told the same, at the same place among their commands."""

    def __init__(self, base: BaseModel, most: int) -> None:
        self._base = base
        self._most = most
        self._samplers: dict[str, _Weights] = {}

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._samplers

    def open_base(self, sampler_id: str) -> None:
        if self._base.settings.full:
            raise StrataError(Code.UNSUPPORTED, "the whole model is trained here: its base is not kept beside it")
        self._check_place(sampler_id)
        self._samplers[sampler_id] = _Weights()

    def open_adapter(self, sampler_id: str, adapter: Adapter) -> None:
        """Of the adapter as it is now."""
        self._check_place(sampler_id)
        self._samplers[sampler_id] = _Weights(adapter=frozen(adapter, self._base.lm))

    def open_whole(self, sampler_id: str, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        """Of these parameters, else of the live ones, as they are now."""
        self._check_place(sampler_id)
        source = dict(self._base.lm.named_parameters()) if parameters is None else parameters
        self._samplers[sampler_id] = _Weights(whole=copied(source, DTYPES[self._base.settings.dtype]))

    def close(self, sampler_id: str) -> None:
        if self._samplers.pop(sampler_id, None) is None:
            raise StrataError(Code.NOT_FOUND, f"there is no sampler {sampler_id!r}")

    def key(self, sampler_id: str) -> str:
        """Which base weights it has. Sequences with the same ones are computed together."""
        return LIVE if self._samplers[sampler_id].whole is None else sampler_id

    def adapter(self, sampler_id: str) -> Adapter | None:
        return self._samplers[sampler_id].adapter

    def parameters(self, key: str) -> Mapping[str, torch.Tensor]:
        whole = None if key == LIVE else self._samplers[key].whole
        return dict(self._base.lm.named_parameters()) if whole is None else whole

    def kept(self) -> Iterator[tuple[str, Adapter | None, Mapping[str, torch.Tensor] | None]]:
        """All of them, in the order they came."""
        yield from ((name, weights.adapter, weights.whole) for name, weights in self._samplers.items())

    def tensors(self) -> Iterator[torch.Tensor]:
        for weights in self._samplers.values():
            if weights.adapter is not None:
                yield weights.adapter.flat
            yield from (local(part) for part in (weights.whole or {}).values())

    def _check_place(self, sampler_id: str) -> None:
        if not sampler_id or sampler_id in self._samplers:
            raise StrataError(Code.CONFLICT, f"there is a sampler {sampler_id!r} already")
        if len(self._samplers) >= self._most:
            raise StrataError(Code.EXHAUSTED, f"all {self._most} places for samplers are taken; close one first")
