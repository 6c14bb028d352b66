"""Prompts that begin alike: the cache saves their computation and changes no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from strata.train.core.model_options import LoraConfig
from strata.train.core.sampling import SampleOperation
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model import attention_kernels
from strata.train.runner.model.attention_kernels import (
    AttentionTerms,
    Documents,
    Reach,
    attend_continuation,
    attend_documents,
)
from strata.train.runner.sampling.kv_cache import BLOCK, KVPool, PrefixCache
from tests.shell.train_sampler.stage import (
    BASE,
    Reference,
    Stage,
    ask,
    base_of,
    greedy,
    logprobs_in,
    only,
    prompt_of,
    tokens_in,
)

SHARED = prompt_of(1, 5 * BLOCK)
CLOSE = 2e-5
"""Rounding: a part of a prompt is another matrix than all of it."""


def ending(seed: int, length: int = 9) -> bytes:
    return SHARED + prompt_of(seed, length)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "window", "tied"])
def test_tokens_are_those_of_generate_with_and_without_the_cache(name: str, models: Path, ranks: RankGroup) -> None:
    base = base_of(models / name, ranks)
    theirs = Reference.load(models / name)
    with_cache, without = Stage(base, ranks), Stage(base, ranks, prefix_tokens=0)
    for stage in (with_cache, without):
        stage.sampler.open_base(BASE)
    prompts = [SHARED, ending(2), ending(3, 40), SHARED[: 4 * 70], prompt_of(9, 50), ending(2)]
    reused = []
    for prompt in prompts:
        sample = greedy(prompt, tokens=20)
        done = with_cache.slice(1, {"it": sample})
        reused.append(done.reused_tokens)
        assert done.prompt_tokens + done.reused_tokens == len(prompt) // 4
        while done.requests:
            done = with_cache.slice(8)
        cached, plain = only(with_cache.outcomes.pop("it")), only(without.all({"it": sample})["it"])
        assert tokens_in(cached) == tokens_in(plain) == theirs.greedy(prompt, 20)
        np.testing.assert_allclose(logprobs_in(cached), logprobs_in(plain), atol=CLOSE)
    assert reused == [0, 5 * BLOCK, 5 * BLOCK, 2 * BLOCK, 0, 5 * BLOCK]


def test_a_prefill_mixes_prompts_that_are_cached_and_that_are_not(models: Path, ranks: RankGroup) -> None:
    stage = Stage(base_of(models / "window", ranks), ranks)
    stage.sampler.open_base(BASE)
    theirs = Reference.load(models / "window")
    stage.one(greedy(SHARED))
    prompts = {"cached": ending(4), "new": prompt_of(5, 60), "again": ending(6, 3), "short": prompt_of(7, 2)}
    found = stage.all({name: greedy(prompt, num=2) for name, prompt in prompts.items()})
    for name, prompt in prompts.items():
        outcome = found[name]
        expected = theirs.greedy(prompt, 12)
        assert [tokens_in(each) for each in outcome.sequences] == [expected] * 2, name  # type: ignore[union-attr]


def test_drawn_tokens_and_prompt_statistics_are_the_same(models: Path, ranks: RankGroup) -> None:
    base = base_of(models / "llama", ranks)
    theirs, samples = Reference.load(models / "llama"), dict[str, SampleOperation]()
    stage, plain = Stage(base, ranks), Stage(base, ranks, prefix_tokens=0)
    for each in (stage, plain):
        each.sampler.open_base(BASE)
        each.one(greedy(SHARED))
    prompt = ending(8)
    samples["drawn"] = ask(prompt, num=3, temperature=0.8, seed=3, max_tokens=10)
    samples["scored"] = greedy(prompt, prompt_logprobs=True)
    found, expected = stage.all(samples), plain.all(samples)
    drawn = [tokens_in(each) for each in found["drawn"].sequences]  # type: ignore[union-attr]
    assert drawn == [tokens_in(each) for each in expected["drawn"].sequences]  # type: ignore[union-attr]
    scores = logprobs_in(found["scored"].prompt_logprobs or b"")  # type: ignore[union-attr]
    own = theirs.distributions(prompt, [])
    wanted = own.gather(1, torch.tensor(tokens_in(prompt)[1:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(scores[1:], wanted, atol=2e-4)


def test_no_sampler_reuses_what_another_has_computed(models: Path, ranks: RankGroup) -> None:
    stage = Stage(base_of(models / "llama", ranks), ranks)
    stage.sampler.open_base(BASE)
    adapters = {f"version {seed}": stage.adapter(seed, LoraConfig(rank=4)) for seed in (1, 2)}
    for name, adapter in adapters.items():
        stage.sampler.open_adapter(name, adapter)
    stage.one(greedy(SHARED))
    for name, adapter in adapters.items():
        done = stage.slice(1, {name: greedy(SHARED, name, tokens=16)})
        assert done.reused_tokens == 0, "of other weights, or of another tenant"
        while done.requests:
            done = stage.slice(8)
        expected = Reference.load(models / "llama", adapter).greedy(SHARED, 16)
        assert tokens_in(only(stage.outcomes.pop(name))) == expected
    held = stage.sampler._cache.prefixes.tokens
    stage.sampler.close("version 1")
    assert stage.sampler._cache.prefixes.tokens == held * 2 // 3
    stage.sampler.open_adapter("version 1", adapters["version 2"])
    assert stage.slice(1, {"again": greedy(SHARED, "version 1", tokens=1)}).reused_tokens == 0


def test_the_cache_stays_in_its_bounds_and_gives_way_to_sequences(models: Path, ranks: RankGroup) -> None:
    base = base_of(models / "llama", ranks)
    stage = Stage(base, ranks, prefix_tokens=4 * BLOCK, cached_tokens=512)
    stage.sampler.open_base(BASE)
    prefixes = stage.sampler._cache.prefixes
    stage.one(greedy(SHARED))
    assert prefixes.tokens == 4 * BLOCK
    assert stage.slice(1, {"a": greedy(ending(2), tokens=1)}).reused_tokens == 4 * BLOCK
    for seed in range(5):
        stage.one(greedy(prompt_of(20 + seed, 70), tokens=4))
        assert prefixes.tokens <= 4 * BLOCK
    assert stage.slice(1, {"b": greedy(ending(3), tokens=1)}).reused_tokens == 0, "evicted by later prompts"
    # All of the KV cache is needed for slots: `Stage` checks the sum with every slice.
    stage.all({str(seed): ask(prompt_of(seed, 60), max_tokens=60, temperature=1.0) for seed in range(8)})


@pytest.mark.parametrize(
    "terms",
    [
        AttentionTerms(),
        AttentionTerms(reach=Reach(window=7), scaling=0.3),
        AttentionTerms(reach=Reach(chunk=16)),
        AttentionTerms(softcap=5.0),
        AttentionTerms(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        AttentionTerms(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), reach=Reach(window=7), softcap=5.0),
    ],
    ids=["causal", "window", "chunk", "softcap", "sinks", "all"],
)
@pytest.mark.parametrize("scores", [attention_kernels.SCORES, 40 * 4 * 3], ids=["whole", "blocks"])
def test_the_rest_of_a_document_attends_as_in_the_whole_document(
    terms: AttentionTerms, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "SCORES", scores)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn((1, 4, 40, 8), generator=generator)
    key, value = torch.randn((2, 1, 2, 40, 8), generator=generator)
    whole = attend_documents((query, key, value), Documents([40]), terms)
    for before in (1, 16, 33, 39):
        rest = attend_continuation((query[:, :, before:], key, value), terms)
        torch.testing.assert_close(rest, whole[:, before:], atol=1e-5, rtol=1e-5)


def block_of(number: int) -> bytes:
    return np.full(BLOCK, number, "<i4").tobytes()


def test_the_end_of_an_old_prompt_is_evicted_before_its_beginning() -> None:
    pool = KVPool(8 * BLOCK, slots=1, used=1)
    pool.of_layer(0, torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    cache = PrefixCache(4 * BLOCK)
    long, other = b"".join(map(block_of, (1, 2, 3))), block_of(9)
    cache.add("s", long, pool, 0, 8 * BLOCK)
    cache.add("s", other + other, pool, 0, 8 * BLOCK)
    assert cache.tokens == 4 * BLOCK
    end = ints(0)
    assert [len(cache.match("s", prompt + end)) for prompt in (long, other, other + other)] == [2, 1, 2]
    assert len(cache.match("s", long[: 4 * BLOCK])) == 0, "its last token is computed"
    assert len(cache.match("t", long + end)) == 0, "another sampler"
    cache.shrink(BLOCK)
    assert cache.tokens == BLOCK
    cache.add("s", long, pool, 0, BLOCK - 1)
    assert cache.tokens == 0, "no room beside the pools"


def ints(*numbers: int) -> bytes:
    return np.asarray(numbers, "<i4").tobytes()
