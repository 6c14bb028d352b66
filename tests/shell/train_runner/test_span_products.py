"""What adapters add to the spans of a row, in both ways to multiply them: their numbers and gradients beside plain
torch in float64, what a value that is not finite reaches, and how many operations they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from strata.train.core.model_options import LoraConfig
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Adapters, Span
from strata.train.runner.lora.span_products import (
    AdaptedSpans,
    BatchedProducts,
    GroupedProducts,
    LoopedProducts,
    SpanProducts,
    choose_products,
)
from strata.train.runner.lora.targets import LoraTarget
from tests.support.device_counters import CPU_DEVICE, DeviceCounters

INPUTS, OUTPUTS = 32, 48
TARGET = LoraTarget("layer", OUTPUTS, INPUTS)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Beside the largest number."""

both_ways = pytest.mark.parametrize(
    "products", [LoopedProducts(), GroupedProducts(), BatchedProducts()], ids=["looped", "grouped", "batched"]
)


def drawn(rank: int, seed: int, alpha: float = 8.0, target: LoraTarget = TARGET) -> Adapter:
    adapter = Adapter(LoraConfig(rank=rank, alpha=alpha), [target], torch.device("cpu"))
    adapter.install(
        [torch.randn(block.size, generator=torch.Generator().manual_seed(seed)) for block in adapter.blocks]
    )
    adapter.begin()
    return adapter


@dataclass(frozen=True)
class Computed:
    output: torch.Tensor
    grad_inputs: torch.Tensor
    grads: Sequence[torch.Tensor]
    """Of A and B of each adapter in turn."""


def row_of(spans: Sequence[Span], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, the output of the layer, and its gradient."""
    chance = torch.Generator().manual_seed(7)
    tokens = sum(span.length for span in spans)
    return tuple(torch.randn(1, tokens, width, generator=chance).to(dtype) for width in (INPUTS, OUTPUTS, OUTPUTS))  # type: ignore[return-value]


def compute(
    products: SpanProducts | None, spans: Sequence[Span], row: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> Computed:
    adapters = Adapters()
    adapters.products = products
    inputs = row[0].clone().requires_grad_()
    output = adapters.add("layer", inputs, row[1].clone(), spans)
    torch.autograd.backward(output, row[2])
    assert inputs.grad is not None
    grads = [leaf.grad for leaf in leaves(spans) if leaf.grad is not None]
    return Computed(output.detach(), inputs.grad, grads)


def leaves(spans: Sequence[Span]) -> list[torch.Tensor]:
    pairs = [span.adapter.pairs.get("layer", ()) for span in spans if span.adapter is not None]
    return [leaf for pair in pairs for leaf in pair]


def compute_plainly(spans: Sequence[Span], row: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Computed:
    inputs, output, grad = (each.double() for each in row)
    inputs.requires_grad_()
    matrices: list[torch.Tensor] = []
    parts = []
    start = 0
    for span in spans:
        own = inputs[:, start : start + span.length]
        part = output[:, start : start + span.length]
        pair = () if span.adapter is None else span.adapter.pairs.get("layer", ())
        if pair and span.adapter is not None:
            a, b = (matrix.detach().double().requires_grad_() for matrix in pair)
            part = part + own @ a.T @ b.T * span.adapter.scale
            matrices += [a, b]
        parts.append(part)
        start += span.length
    whole = torch.cat(parts, dim=1)
    grad_inputs, *grads = torch.autograd.grad(whole, [inputs, *matrices], grad)
    return Computed(whole.detach(), grad_inputs, grads)


def assert_close(ours: Computed, plain: Computed, dtype: torch.dtype) -> None:
    pairs = zip(
        (ours.output, ours.grad_inputs, *ours.grads), (plain.output, plain.grad_inputs, *plain.grads), strict=True
    )
    for own, expected in pairs:
        difference = float((own.double() - expected).abs().max())
        assert difference <= ROUNDING[dtype] * float(expected.abs().max())


def spans_of(kind: str) -> list[Span]:
    if kind == "one":
        return [Span(drawn(8, 0), 11)]
    if kind == "same":
        return [Span(drawn(8, seed), length) for seed, length in enumerate((5, 1, 9, 16))]
    other = drawn(4, 9, target=LoraTarget("another layer", OUTPUTS, INPUTS))
    return [
        Span(drawn(3, 0, alpha=2.0), 5),
        Span(None, 4),
        Span(drawn(8, 1), 1),
        Span(other, 3),
        Span(drawn(5, 2, alpha=16.0), 9),
    ]


@both_ways
@pytest.mark.parametrize("kind", ["one", "same", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_get_the_numbers_and_gradients_of_plain_torch(
    products: SpanProducts, kind: str, dtype: torch.dtype
) -> None:
    spans, plain_spans = spans_of(kind), spans_of(kind)
    row = row_of(spans, dtype)
    assert_close(compute(products, spans, row), compute_plainly(plain_spans, row), dtype)


@both_ways
def test_gradients_of_rows_add_up_in_the_staging_block(products: SpanProducts) -> None:
    spans, once = spans_of("mixed"), spans_of("mixed")
    row = row_of(spans, torch.float32)
    compute(products, spans, row)
    twice = compute(products, spans, row)
    for total, single in zip(twice.grads, compute(products, once, row).grads, strict=True):
        torch.testing.assert_close(total, 2 * single)
    for span in spans:
        if span.adapter is not None and "layer" in span.adapter.pairs:
            (staged,) = span.adapter.take()
            assert float(staged.abs().max()) > 0


@both_ways
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["adapter", "tokens", "gradient"])
def test_what_is_not_finite_of_one_adapter_reaches_no_other(products: SpanProducts, broken: float, where: str) -> None:
    spans, whole = spans_of("mixed"), spans_of("mixed")
    row = row_of(spans, torch.float32)
    expected = compute(products, whole, row)
    if where == "adapter":
        assert spans[0].adapter is not None
        spans[0].adapter.install([torch.full((block.size,), broken) for block in spans[0].adapter.blocks])
    else:
        row[{"tokens": 0, "gradient": 2}[where]][:, :5] = broken
    ours = compute(products, spans, row)
    others = slice(5, None)
    assert torch.equal(ours.output[:, others], expected.output[:, others])
    assert torch.equal(ours.grad_inputs[:, others], expected.grad_inputs[:, others])
    for own, other in zip(ours.grads[2:], expected.grads[2:], strict=True):
        assert torch.equal(own, other)
    assert not all(bool(each.isfinite().all()) for each in (ours.output, ours.grad_inputs, *ours.grads[:2]))


@both_ways
def test_the_same_row_again_gives_the_same_bits(products: SpanProducts) -> None:
    row = row_of(spans_of("mixed"), torch.float32)
    first, again = (compute(products, spans_of("mixed"), row) for _ in range(2))
    for one, other in zip(
        (first.output, first.grad_inputs, *first.grads), (again.output, again.grad_inputs, *again.grads), strict=True
    ):
        assert torch.equal(one, other)


def launches(products: SpanProducts | None, adapters: int) -> int:
    spans = [Span(drawn(8, seed), 6) for seed in range(adapters)]
    row = row_of(spans, torch.float32)
    with DeviceCounters(CPU_DEVICE) as counters:
        compute(products, spans, row)
    return counters.counts.launches


def test_grouped_products_start_as_many_operations_for_any_number_of_adapters() -> None:
    assert launches(GroupedProducts(), 2) == launches(GroupedProducts(), 9)
    assert launches(LoopedProducts(), 9) - launches(LoopedProducts(), 2) == 6 * 7


def test_groups_travel_to_the_device_in_one_copy() -> None:
    spans = spans_of("mixed")
    row = row_of(spans, torch.bfloat16)
    with DeviceCounters(CPU_DEVICE) as counters:
        compute(GroupedProducts(), spans, row)
    assert counters.counts.to_device.total() == 1


def chosen(length: int, dtype: torch.dtype = torch.float32, *, rank: int = 8, uneven: bool = False) -> type:
    pair = torch.zeros(rank, INPUTS), torch.zeros(OUTPUTS, rank)
    spans = AdaptedSpans([length, length - uneven], [1.0, 1.0], [pair, pair])
    tokens = sum(spans.lengths)
    rows = torch.zeros(tokens, INPUTS, dtype=dtype), torch.zeros(tokens, OUTPUTS, dtype=dtype)
    return type(choose_products(*rows, spans, GroupedProducts(), BatchedProducts()))


def test_spans_on_a_processor_are_a_batch_while_it_moves_less_than_a_loop_costs() -> None:
    assert chosen(4096) is BatchedProducts
    assert chosen(32, uneven=True) is BatchedProducts
    assert chosen(4096, uneven=True) is LoopedProducts
    assert chosen(1, uneven=True) is LoopedProducts
    assert chosen(32, rank=512) is LoopedProducts
    assert chosen(32, torch.bfloat16) is LoopedProducts
