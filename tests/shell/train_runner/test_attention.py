"""Attention in the documents of a row beside the dense masked softmax of its definition, with gradients, in float64.

Hugging Face's unmodified models are the second oracle: `test_families.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from transformers import LlamaConfig, masking_utils

from strata.train.runner.model import attention_kernels
from strata.train.runner.model.attention import ATTENTION, document_attention, whole_row
from strata.train.runner.model.attention_kernels import AttentionTerms, Documents, Reach, States, attend_documents
from tests.shell.train_runner.dispatched import Dispatched

LENGTHS: Final = (9, 1, 22, 6)
HEADS: Final = 4
KEY_HEADS: Final = 2
REACHES: Final = (Reach(), Reach(window=4), Reach(chunk=4), Reach(window=2, chunk=8))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def drawn_states(dtype: torch.dtype, *, width: int = 8, value_width: int = 8, device: str = "cpu") -> States:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, width), (KEY_HEADS, width), (KEY_HEADS, value_width))
    query, key, value = (
        torch.randn(1, heads, sum(LENGTHS), dimensions, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for heads, dimensions in shapes
    )
    return query, key, value


def drawn_terms(reach: Reach, dtype: torch.dtype, *, softcap: bool, sinks: bool, device: str = "cpu") -> AttentionTerms:
    drawn = torch.randn(HEADS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return AttentionTerms(
        scaling=0.4,
        reach=reach,
        softcap=2.0 if softcap else None,
        sinks=drawn.to(device, dtype).requires_grad_() if sinks else None,
    )


def dense_attention(states: States, lengths: Sequence[int], terms: AttentionTerms) -> torch.Tensor:
    """The definition: every score of the row, those of other documents and out of reach without weight."""
    query, key, value = states
    assert terms.scaling is not None
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    document = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    index = torch.tensor([index for length in lengths for index in range(length)])
    distance = index[:, None] - index[None]
    allowed = (document[:, None] == document[None]) & (distance >= 0)
    if terms.reach.window is not None:
        allowed &= distance < terms.reach.window
    if terms.reach.chunk is not None:
        chunk = index.div(terms.reach.chunk, rounding_mode="floor")
        allowed &= chunk[:, None] == chunk[None]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * terms.scaling
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    weights = torch.where(allowed.to(query.device), scores.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    if terms.sinks is not None:
        total = total + terms.sinks.exp()[None, :, None, None]
    return torch.einsum("bhqk,bhkd->bqhd", weights / total, value)


def with_gradients(attended: torch.Tensor, states: States, terms: AttentionTerms) -> list[torch.Tensor]:
    leaves = [*states, *([terms.sinks] if terms.sinks is not None else [])]
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(attended.shape, generator=generator, dtype=torch.float64)
    loss = (attended * weights.to(attended.device, attended.dtype)).sum()
    return [attended.detach(), *torch.autograd.grad(loss, leaves)]


def compare(states: States, terms: AttentionTerms, tolerance: float) -> None:
    ours = with_gradients(attend_documents(states, Documents(LENGTHS), terms), states, terms)
    precise = [part.detach().cpu().double().requires_grad_() for part in states]
    exact: States = (precise[0], precise[1], precise[2])
    sinks = None if terms.sinks is None else terms.sinks.detach().cpu().double().requires_grad_()
    oracle = replace(terms, sinks=sinks)
    expected = with_gradients(dense_attention(exact, LENGTHS, oracle), exact, oracle)
    assert len(ours) == (5 if terms.sinks is not None else 4)
    for computed, wanted in zip(ours, expected, strict=True):
        assert float((computed.cpu().double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize("small", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [False, True], ids=["", "softcap"])
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_output_and_gradients_are_those_of_the_dense_softmax(
    reach: Reach, softcap: bool, sinks: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        monkeypatch.setattr(attention_kernels, "BLOCK", 3)
        monkeypatch.setattr(attention_kernels, "SCORES", 3 * HEADS * 9)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        compare(drawn_states(dtype), drawn_terms(reach, dtype, softcap=softcap, sinks=sinks), tolerance)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("width", [(8, 4), (4, 8)])
def test_values_may_be_narrower_or_wider_than_keys(width: tuple[int, int], sinks: bool) -> None:
    states = drawn_states(torch.float64, width=width[0], value_width=width[1])
    compare(states, drawn_terms(Reach(window=4), torch.float64, softcap=False, sinks=sinks), 1e-12)


@pytest.mark.parametrize("softcap", [False, True], ids=["", "softcap"])
def test_a_nan_stays_in_its_document(softcap: bool) -> None:
    states = drawn_states(torch.float32)
    terms = drawn_terms(Reach(window=4), torch.float32, softcap=softcap, sinks=True)
    broken = [part.detach().clone() for part in states]
    start, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1] + LENGTHS[2]
    for part in broken:
        part[:, :, start:end] = torch.nan
    leaves: States = (broken[0].requires_grad_(), broken[1].requires_grad_(), broken[2].requires_grad_())
    sound = with_gradients(attend_documents(states, Documents(LENGTHS), terms), states, terms)[:4]
    beside = with_gradients(attend_documents(leaves, Documents(LENGTHS), terms), leaves, terms)[:4]
    for number, (alone, together) in enumerate(zip(sound, beside, strict=True)):
        token = 1 if number == 0 else 2
        for unbroken in (slice(0, start), slice(end, None)):
            index = (slice(None),) * token + (unbroken,)
            assert torch.equal(alone[index], together[index])


def test_a_window_needs_no_mask_as_large_as_the_document_squared() -> None:
    tokens = 4096
    states = tuple(torch.zeros(1, 1, tokens, 8, dtype=torch.float32) for _ in range(3))
    terms = AttentionTerms(reach=Reach(window=64))
    with Dispatched() as dispatched:
        attend_documents((states[0], states[1], states[2]), Documents([tokens]), terms)
    assert dispatched.largest < tokens * tokens / 16


def test_transformers_options_reach_the_arithmetic() -> None:
    states = drawn_states(torch.float64)
    terms = drawn_terms(Reach(window=4), torch.float64, softcap=True, sinks=True)
    options: dict[str, Any] = {"scaling": 0.4, "softcap": 2.0, "s_aux": terms.sinks}
    called, _ = document_attention(torch.nn.Module(), *states, terms.reach, documents=Documents(LENGTHS), **options)
    torch.testing.assert_close(called, dense_attention(states, LENGTHS, terms))


def test_windows_and_chunks_reach_as_far_as_they_say() -> None:
    place = torch.arange(6)
    assert Reach(window=2).allows(place[:, None], place).sum(1).tolist() == [1, 2, 2, 2, 2, 2]
    assert Reach(chunk=4).allows(place[:, None], place).sum(1).tolist() == [1, 2, 3, 4, 1, 2]


@pytest.mark.parametrize(
    ("kind", "reach"),
    [("causal", None), ("sliding_window_causal", Reach(window=4)), ("chunked_causal", Reach(chunk=4))],
)
def test_the_mask_of_packed_documents_is_described_as_that_of_each(kind: str, reach: Reach | None) -> None:
    limits: Any = {"sliding_window": 4, "attention_chunk_size": 4}
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, **limits)
    config._attn_implementation = ATTENTION
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
    with Dispatched() as dispatched:
        described = getattr(masking_utils, f"create_{kind}_mask")(
            config=config,
            inputs_embeds=torch.zeros(1, 9, 8),
            attention_mask=whole_row(positions[0]),
            past_key_values=None,
            position_ids=positions,
        )
    assert dispatched.reads == 0, "transformers waits for the device"
    assert described == reach


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("reach", [Reach(), Reach(window=4)], ids=str)
def test_the_kernel_for_rows_takes_and_returns_the_right_shapes(reach: Reach, sinks: bool) -> None:
    """Without a CUDA device: shapes and arguments alone. Its numbers are in the next test."""
    states = drawn_states(torch.bfloat16, device="meta")
    terms = drawn_terms(reach, torch.bfloat16, softcap=False, sinks=sinks, device="meta")
    attended = attention_kernels._attend_varlen(states, Documents(LENGTHS), terms)
    assert attended.shape == (1, sum(LENGTHS), HEADS, 8)
    leaves = [*states, *([terms.sinks] if terms.sinks is not None else [])]
    gradients = torch.autograd.grad(attended.sum(), leaves)
    assert [each.shape for each in gradients] == [each.shape for each in leaves]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [False, True], ids=["", "softcap"])
@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_computes_the_dense_softmax(reach: Reach, softcap: bool, sinks: bool, dtype: torch.dtype) -> None:
    states = drawn_states(dtype, width=64, value_width=64, device="cuda")
    terms = drawn_terms(reach, dtype, softcap=softcap, sinks=sinks, device="cuda")
    compare(states, terms, 2e-2 if dtype is torch.bfloat16 else 1e-4)
