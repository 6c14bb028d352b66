"""Tokens and log-probabilities are those of Hugging Face's own model, one request at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.train.core.model_options import LoraConfig
from strata.train.core.sampling import MISSING_LOGPROB, Layout, SampleOperation, SampleParams, SampleResult, Targets
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.trained import local
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
    surprising,
    tokens_in,
    top_in,
)

CLOSE = 2e-4
LENGTHS = (1, 5, 17, 40, 90, 3, 28, 64)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "window", "tied", "untied"])
def test_the_likeliest_tokens_are_those_of_generate(name: str, models: Path, ranks: RankGroup) -> None:
    stage = Stage(base_of(models / name, ranks), ranks, sequences=5, prompt_tokens=50)
    stage.sampler.open_base(BASE)
    theirs = Reference.load(models / name)
    prompts = {f"{length} tokens": prompt_of(length, length) for length in LENGTHS}
    found = stage.all({key: greedy(prompt, tokens=30) for key, prompt in prompts.items()}, steps=7)
    for key, prompt in prompts.items():
        assert tokens_in(only(found[key])) == theirs.greedy(prompt, 30), key


def test_half_precision_is_close_to_full_precision(models: Path, ranks: RankGroup) -> None:
    stage = Stage(base_of(models / "qwen3", ranks, dtype="bfloat16"), ranks)
    stage.sampler.open_base(BASE)
    prompt = prompt_of(3, 20)
    found = only(stage.all({"it": greedy(prompt)})["it"])
    own = Reference.load(models / "qwen3").distributions(prompt, tokens_in(found), SampleParams(temperature=0.0))
    wanted = own.gather(1, torch.tensor(tokens_in(found))[:, None])[:, 0].numpy()
    np.testing.assert_allclose(logprobs_in(found), wanted, atol=0.2)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1.4, "top_k": 20},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 50},
    ],
)
def test_logprobs_are_those_of_the_distribution_drawn_from(params: dict[str, Any], stage: Stage, models: Path) -> None:
    theirs = Reference.load(models / "llama")
    prompt = prompt_of(7, 12)
    sample = ask(prompt, num=3, max_tokens=20, seed=4, topk_sample_logprobs=6, end_tokens=False, **params)
    found = stage.one(sample)
    assert len({sequence.tokens for sequence in found.sequences}) == (3 if params["temperature"] else 1)
    for sequence in found.sequences:
        tokens = tokens_in(sequence)
        own = theirs.distributions(prompt, tokens, sample.params)
        wanted = own.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(logprobs_in(sequence), wanted, atol=CLOSE)
        values, ids = own.topk(6)
        top_tokens, top_logprobs = top_in(sequence.top)
        there = values.numpy() > -np.inf
        np.testing.assert_allclose(top_logprobs[there], values.numpy()[there], atol=CLOSE)
        assert (top_tokens == np.where(there, ids.numpy(), 0)).mean() > 0.99, "rounding may swap two equal ones"
        assert (top_logprobs[~there] == MISSING_LOGPROB).all()


@pytest.mark.parametrize("logits_bytes", [256 << 20, 4 * 512 * 7])
def test_logprobs_of_the_prompt_are_those_of_a_pass_over_it(models: Path, ranks: RankGroup, logits_bytes: int) -> None:
    stage = Stage(base_of(models / "llama", ranks, logits_bytes=logits_bytes), ranks)
    stage.sampler.open_base(BASE)
    theirs = Reference.load(models / "llama")
    prompt = prompt_of(8, 33)
    found = stage.one(ask(prompt, num=2, max_tokens=1, temperature=0.6, prompt_logprobs=True, topk_prompt_logprobs=4))
    own = theirs.distributions(prompt, [])
    wanted = own.gather(1, torch.tensor(tokens_in(prompt))[1:, None])[:, 0].numpy()
    assert found.prompt_logprobs is not None
    ours = logprobs_in(found.prompt_logprobs)
    assert np.isnan(ours[0])
    np.testing.assert_allclose(ours[1:], wanted, atol=CLOSE)
    tokens, logprobs = top_in(found.top_prompt)
    assert (tokens[0] == 0).all()
    assert (logprobs[0] == MISSING_LOGPROB).all()
    values, ids = own.topk(4)
    np.testing.assert_allclose(logprobs[1:], values.numpy(), atol=CLOSE)
    assert (tokens[1:] == ids.numpy()).all()


@pytest.mark.parametrize("logits_bytes", [256 << 20, 4 * 512 * 7])
@pytest.mark.parametrize(("last", "drawn"), [(1, 0), (7, 2), (12, 0), (32, 1)])
def test_only_the_end_of_a_prompt_is_spoken_of_where_only_that_was_asked_for(
    models: Path, ranks: RankGroup, logits_bytes: int, last: int, drawn: int
) -> None:
    """Also where something else is asked of the whole prompt."""
    stage = Stage(base_of(models / "llama", ranks, logits_bytes=logits_bytes), ranks)
    stage.sampler.open_base(BASE)
    asked: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": True, "topk_prompt_logprobs": 3}
    whole = stage.one(ask(prompt_of(8, 33), **asked))
    part = stage.one(ask(prompt_of(8, 33), prompt_logprobs_last_n=last, prompt_draws=drawn, **asked))
    assert part.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    ours, all_of_them = logprobs_in(part.prompt_logprobs), logprobs_in(whole.prompt_logprobs)
    assert np.isnan(ours[:-last]).all()
    np.testing.assert_allclose(ours[-last:], all_of_them[-last:], atol=1e-6)
    (tokens, values), (all_tokens, all_values) = top_in(part.top_prompt), top_in(whole.top_prompt)
    assert (values[:-last] == MISSING_LOGPROB).all()
    assert (tokens[-last:] == all_tokens[-last:]).all()
    np.testing.assert_allclose(values[-last:], all_values[-last:], atol=1e-6)


@pytest.mark.parametrize("logits_bytes", [256 << 20, 4 * 512 * 7])
@pytest.mark.parametrize("sparse", [False, True])
def test_tokens_that_a_client_names_are_as_likely_as_in_a_pass(
    models: Path, ranks: RankGroup, logits_bytes: int, *, sparse: bool
) -> None:
    stage = Stage(base_of(models / "llama", ranks, logits_bytes=logits_bytes), ranks)
    stage.sampler.open_base(BASE)
    prompt = prompt_of(8, 33)
    own = Reference.load(models / "llama").distributions(prompt, []).numpy()
    chance = np.random.default_rng(5)
    named = chance.integers(-1, 512, (32, 4))
    named[3] = -1
    layout = Layout((32, 4))
    if sparse:
        given = chance.random((32, 4)) < 0.4
        given[10] = False
        crow = np.concatenate([[0], given.sum(1).cumsum()]).astype("<i8")
        layout = Layout((32, 4), crow.tobytes(), np.nonzero(given)[1].astype("<i8").tobytes())
    else:
        given = np.full((32, 4), fill_value=True)
    rows = np.nonzero(given)[0]
    tokens = named[given]
    found = stage.one(ask(prompt, max_tokens=1, targets=Targets(tokens.astype("<i4").tobytes(), layout)))
    assert found.targets is not None
    assert found.targets.layout == layout
    assert found.prompt_logprobs is None
    wanted = np.where(tokens < 0, 0.0, own[rows, tokens.clip(0)])
    np.testing.assert_allclose(logprobs_in(found.targets.logprobs), wanted, atol=CLOSE)


def test_tokens_drawn_in_the_places_of_a_prompt_follow_the_distribution_there(stage: Stage, models: Path) -> None:
    count = 1000
    prompt = prompt_of(11, 6)
    sampled = ask(prompt, max_tokens=6, temperature=1.5, seed=1)
    found = stage.one(ask(prompt, max_tokens=6, temperature=1.5, seed=1, prompt_draws=count))
    assert found.sequences == stage.one(sampled).sequences, "what is drawn beside changes nothing"
    assert found.draws is not None
    assert (found.draws.length, found.draws.k) == (5, count)
    tokens = np.frombuffer(found.draws.tokens, "<i4").reshape(5, count)
    own = Reference.load(models / "llama").distributions(prompt, [])
    np.testing.assert_allclose(
        logprobs_in(found.draws.logprobs).reshape(5, count), own.numpy()[np.arange(5)[:, None], tokens], atol=CLOSE
    )
    for place in range(5):
        hot = torch.softmax(own[place] / 1.5, -1).double().numpy()
        common = hot > 5 / count
        observed = np.bincount(tokens[place], minlength=512)
        wanted = np.append(hot[common], hot[~common].sum()) * count
        assert surprising(np.append(observed[common], observed[~common].sum()), wanted) < 3.5
    cold = stage.one(ask(prompt, max_tokens=1, temperature=0.0, prompt_draws=2)).draws
    assert cold is not None
    assert (np.frombuffer(cold.tokens, "<i4").reshape(5, 2) == own.argmax(-1).numpy()[:, None]).all()


def test_nothing_is_said_of_a_prompt_that_nobody_asked_about(stage: Stage) -> None:
    found = stage.one(greedy(prompt_of(1, 5), tokens=3))
    assert found.prompt_logprobs is None
    assert found.top_prompt is None
    assert found.sequences[0].top is None


def test_samples_of_a_model_follow_its_distribution(stage: Stage, models: Path) -> None:
    count = 1000
    prompt = prompt_of(11, 6)
    sample = ask(prompt, num=count, max_tokens=1, temperature=1.5, top_k=6, seed=1)
    found = stage.one(sample)
    drawn = np.bincount([tokens_in(one)[0] for one in found.sequences], minlength=512)
    own = Reference.load(models / "llama").distributions(prompt, [0], sample.params)[0]
    assert surprising(drawn, own.double().exp().numpy() * count) < 3.5


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_many_adapters_in_one_batch_are_each_as_if_merged_into_the_weights(
    name: str, models: Path, ranks: RankGroup
) -> None:
    stage = Stage(base_of(models / name, ranks), ranks, prompt_tokens=30)
    stage.sampler.open_base(BASE)
    configs = {
        "small": LoraConfig(rank=2, alpha=4.0),
        "large": LoraConfig(rank=8, alpha=8.0),
        "attention": LoraConfig(rank=4, alpha=8.0, train_mlp=False, train_unembed=False),
        "head": LoraConfig(rank=4, alpha=4.0, train_attn=False, train_mlp=False),
    }
    theirs = {BASE: Reference.load(models / name)}
    for seed, (key, config) in enumerate(configs.items()):
        adapter = stage.adapter(seed, config)
        stage.sampler.open_adapter(key, adapter)
        theirs[key] = Reference.load(models / name, adapter)
        adapter.flat.zero_()
    samples: dict[str, SampleOperation] = {}
    for number in range(3):
        for key in theirs:
            samples[f"{key} {number}"] = greedy(prompt_of(number, 4 + 9 * number), key, 16, end_tokens=False)
    found = stage.all(samples, steps=5)
    different = set()
    for request_id, sample in samples.items():
        sequence = only(found[request_id])
        reference = theirs[sample.sampler_id]
        assert tokens_in(sequence) == reference.greedy(sample.prompt, 16, eos_token_id=None), request_id
        own = reference.distributions(sample.prompt, tokens_in(sequence), sample.params)
        wanted = own.gather(1, torch.tensor(tokens_in(sequence))[:, None])[:, 0].numpy()
        np.testing.assert_allclose(logprobs_in(sequence), wanted, atol=5e-4)
        different.add((sample.prompt, sequence.tokens))
    assert len(different) == len(samples), "every adapter says something else"


def test_a_copy_of_a_whole_model_is_sampled_from_whatever_is_trained_meanwhile(models: Path, ranks: RankGroup) -> None:
    base = base_of(models / "llama", ranks, training="full")
    stage = Stage(base, ranks)
    original, changed = Reference.load(models / "llama"), Reference.load(models / "llama")
    samples = {f"{number}": greedy(prompt_of(number, 10), "first", 24, end_tokens=False) for number in range(3)}
    stage.sampler.open_full("first")
    assert stage.slice(9, samples).requests == 3
    for parameter, own in zip(base.lm.parameters(), changed.model.parameters(), strict=True):
        noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(own.numel())) * 0.05
        own.data += noise
        local(parameter).add_(noise)
    stage.sampler.open_full("second")
    later = {f"later {key}": greedy(one.prompt, "second", 24, end_tokens=False) for key, one in samples.items()}
    found = stage.all(later) | stage.outcomes
    for key, one in samples.items():
        assert tokens_in(only(found[key])) == original.greedy(one.prompt, 24, eos_token_id=None)
        assert tokens_in(only(found[f"later {key}"])) == changed.greedy(one.prompt, 24, eos_token_id=None)
        assert only(found[key]).tokens != only(found[f"later {key}"]).tokens


def test_a_result_has_its_samples_in_order(stage: Stage) -> None:
    prompt = prompt_of(2, 9)
    together = stage.one(ask(prompt, num=20, max_tokens=6, seed=3))
    again: SampleResult = stage.one(ask(prompt, num=3, max_tokens=6, seed=3))
    assert [one.tokens for one in together.sequences[:3]] == [one.tokens for one in again.sequences]
    assert len({one.tokens for one in together.sequences}) == 20
