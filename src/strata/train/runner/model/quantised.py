"""Quantises layers of a frozen base with bitsandbytes (NF4, int8), and computes with them dequantised.

Every row of a weight is quantised by itself: NF4 has a scale for each block of 64 numbers of a row, int8 one for each
row. So a rank quantises the rows that it holds, with the same result as if it had all of them, and FSDP shards numbers
and scales like any other weight. A layer computes with its weight dequantised to the dtype of the arithmetic, for as
long as it computes, in the forward pass and again in the backward pass. Activations are never quantised: a token's
numbers would depend on its neighbours in the row.

Embeddings, norms, routers, the head, and fused experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from strata.base.errors import Code, StrataError
from strata.train.peft.layers import kind_of
from strata.train.plan.quantisation import NF4_BLOCK, QuantisedKind, can_be_quantised, row_bytes

CODES: Final[dict[QuantisedKind, torch.dtype]] = {"nf4": torch.uint8, "int8": torch.int8}
PARAMETERS: Final = ("codes", "scales")
"""Parameters of a quantised layer, in place of its weight."""


class QuantisedWeights(NamedTuple):
    kind: QuantisedKind
    dtype: torch.dtype
    """The type from which they were quantised, and to which they are dequantised."""


class QuantisedLinear(nn.Module):
    """A linear layer with a frozen, quantised weight. The weight has no memory and no content yet."""

    def __init__(self, replaced: nn.Linear, kind: QuantisedKind) -> None:
        super().__init__()
        self.out_features, self.in_features = replaced.out_features, replaced.in_features
        self.kind = kind
        self.dtype = replaced.weight.dtype
        numbers, scales = row_bytes(kind, self.in_features)
        with torch.device("meta"):
            codes = torch.empty(self.out_features, numbers, dtype=CODES[kind])
            # The bits of float32 numbers: FSDP would cast floats to the dtype of the arithmetic.
            bits = torch.empty(self.out_features, scales // 4, dtype=torch.int32)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(bits, requires_grad=False)
        self.register_parameter("bias", replaced.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Multiply.apply(inputs, self.codes, self.scales, self.bias, self.kind)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


class _Multiply(torch.autograd.Function):
    """The weight is dequantised again in the backward pass: kept until then, all layers would be there at once."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        kind: QuantisedKind,
    ) -> torch.Tensor:
        ctx.kind = kind
        ctx.save_for_backward(codes, scales)
        return linear(inputs, dequantise(codes, scales, kind, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        codes, scales = ctx.saved_tensors
        return grads[0] @ dequantise(codes, scales, ctx.kind, grads[0].dtype), None, None, None, None


def quantise_rows(weight: torch.Tensor, kind: QuantisedKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales of some rows of a weight, as the layers of bitsandbytes have them."""
    rows = len(weight)
    numbers, scales = row_bytes(kind, weight.shape[1])
    if not rows:
        empty = torch.empty(0, numbers, dtype=CODES[kind], device=weight.device)
        return empty, torch.empty(0, scales // 4, dtype=torch.int32, device=weight.device)
    if kind == "nf4":
        codes, absmax = _operators().quantize_4bit(weight.contiguous(), NF4_BLOCK, "nf4", torch.uint8)
    else:
        # bitsandbytes rounds to float16 first.
        codes, absmax, _ = _operators().int8_vectorwise_quant(weight.to(torch.float16))
    return codes.view(rows, -1), absmax.to(torch.float32).view(rows, -1).view(torch.int32)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, kind: QuantisedKind, dtype: torch.dtype) -> torch.Tensor:
    absmax = scales.view(torch.float32)
    if kind == "int8":
        return codes.to(dtype).mul_(absmax * (1 / 127))
    shape = (len(codes), 2 * codes.shape[1])
    weight: torch.Tensor = _operators().dequantize_4bit(codes, absmax.view(-1), NF4_BLOCK, "nf4", shape, dtype)
    return weight


def _operators() -> Any:
    import bitsandbytes  # noqa: F401

    return torch.ops.bitsandbytes


def quantised_layers(lm: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    return ((name, module) for name, module in lm.named_modules() if isinstance(module, QuantisedLinear))


def quantisable_layers(lm: nn.Module, kind: QuantisedKind) -> list[tuple[str, nn.Linear]]:
    return [
        (name, module)
        for name, module in lm.named_modules()
        if type(module) is nn.Linear and can_be_quantised(kind, kind_of(name), module.in_features)
    ]


def round_trip(weight: torch.Tensor, quantised: QuantisedWeights) -> torch.Tensor:
    """A weight as a model computes with it that quantises it."""
    codes, scales = quantise_rows(weight.to(quantised.dtype), quantised.kind)
    return dequantise(codes, scales, quantised.kind, quantised.dtype)


def replace_layers(lm: nn.Module, kind: QuantisedKind) -> None:
    """Replace the layers of a model that can be quantised. Weights with content are quantised, one after the other;
    without memory they stay so. UNSUPPORTED if there is nothing to quantise."""
    layers = quantisable_layers(lm, kind)
    if not layers:
        raise StrataError(Code.UNSUPPORTED, f"it has no linear layer that can be quantised to {kind}")
    for name, module in layers:
        layer = QuantisedLinear(module, kind)
        if not module.weight.is_meta:
            codes, scales = quantise_rows(module.weight.detach(), kind)
            layer.codes, layer.scales = (nn.Parameter(value, requires_grad=False) for value in (codes, scales))
        lm.set_submodule(name, layer)
        # The list would keep the weight until the last one is quantised.
        del module.weight
