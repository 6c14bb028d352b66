"""The running batch: who comes, waits, stops, is cancelled or fails, and that nobody notices the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.base.errors import Code, StrataError
from strata.train.core.model_options import LoraConfig
from strata.train.core.sampling import Layout, SampleFailed, SampleOperation, SampleResult, Targets
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.lora.targets import targets_of
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.offload import SleepOffload
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.sampling.request_validator import RequestValidator
from tests.shell.train_sampler.stage import (
    BASE,
    Stage,
    ask,
    base_of,
    greedy,
    logprobs_in,
    only,
    prompt_of,
    tokens_in,
    top_in,
)

CLOSE = 2e-4


def crowd(count: int, tokens: int = 15) -> dict[str, SampleOperation]:
    return {
        f"crowd {number}": ask(prompt_of(100 + number, 3 + 5 * number), max_tokens=tokens + number, seq_id=number)
        for number in range(count)
    }


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(stage: Stage) -> None:
    mine = ask(prompt_of(1, 20), max_tokens=40, seed=7, temperature=0.9, end_tokens=False)
    alone = only(stage.all({"mine": mine}, steps=40)["mine"])
    for steps in (1, 6):
        before, after = crowd(4), {f"late {key}": one for key, one in crowd(3).items()}
        crowded = only(stage.all({**before, "mine": mine, **after}, steps=steps)["mine"])
        assert crowded.tokens == alone.tokens
        np.testing.assert_allclose(logprobs_in(crowded), logprobs_in(alone), atol=CLOSE)


def test_a_seed_belongs_to_no_request_and_no_seed_to_one_alone(stage: Stage) -> None:
    prompt = prompt_of(1, 8)
    samples = {
        "seed": ask(prompt, max_tokens=12, seed=7, seq_id=1),
        "same seed": ask(prompt, max_tokens=12, seed=7, seq_id=2),
        "other seed": ask(prompt, max_tokens=12, seed=8, seq_id=1),
        "none": ask(prompt, max_tokens=12, seq_id=1),
        "none, again": ask(prompt, max_tokens=12, seq_id=1),
        "none, other": ask(prompt, max_tokens=12, seq_id=2),
    }
    found = {key: tokens_in(only(one)) for key, one in stage.all(samples).items()}
    assert found["seed"] == found["same seed"]
    assert found["none"] == found["none, again"]
    different = [found[key] for key in ("seed", "other seed", "none", "none, other")]
    assert len({tuple(one) for one in different}) == 4


def test_many_short_requests_pass_while_a_long_one_goes_on(llama: BaseModel, ranks: RankGroup) -> None:
    stage = Stage(llama, ranks, sequences=4, cached_tokens=2048, prompt_tokens=40)
    stage.sampler.open_base(BASE)
    long = ask(prompt_of(5, 30), max_tokens=200, seed=1, end_tokens=False)
    alone = only(stage.all({"long": long}, steps=200)["long"])
    stage.slice(3, {"long": long})
    short = crowd(12, tokens=4)
    added = iter(short.items())
    while len(stage.outcomes) < len(short):
        done = stage.slice(3, dict([one] if (one := next(added, None)) else []))
        assert done.requests > 0
        assert done.running <= 4
        assert "long" not in stage.outcomes
    assert all(isinstance(stage.outcomes[key], SampleResult) for key in short)
    while stage.slice(50).requests:
        pass
    crowded = only(stage.outcomes["long"])
    assert crowded.tokens == alone.tokens
    np.testing.assert_allclose(logprobs_in(crowded), logprobs_in(alone), atol=CLOSE)


def test_a_slice_ends_after_its_steps_and_an_eager_one_with_the_first_that_ended(stage: Stage) -> None:
    samples = {str(tokens): greedy(prompt_of(tokens, 6), tokens=tokens, end_tokens=False) for tokens in (5, 9, 30)}
    assert stage.slice(3, samples).sampled_tokens == 3 * 4
    eager = stage.slice(100, eager=True)
    assert [one.request_id for one in eager.ended] == ["5"]
    assert eager.sampled_tokens == 3
    assert [one.request_id for one in stage.slice(100, eager=True).ended] == ["9"]
    last = stage.slice(100)
    assert [one.request_id for one in last.ended] == ["30"]
    assert (last.requests, last.running, last.free_tokens) == (0, 0, 4096)


def test_the_samples_of_a_request_share_its_prompt(stage: Stage) -> None:
    done = stage.slice(2, {"it": ask(prompt_of(1, 50), num=8, max_tokens=9)})
    assert done.prompt_tokens == 50
    assert done.running == 8


def test_nobody_waits_for_ever_if_there_are_fewer_places_than_tenants(llama: BaseModel, ranks: RankGroup) -> None:
    stage = Stage(llama, ranks, sequences=1, cached_tokens=2048)
    stage.sampler.open_base(BASE)
    shares = ("first", "second", "third")
    for share in shares:
        asked = {f"{share} {number}": ask(prompt_of(1, 5), max_tokens=9, end_tokens=False) for number in range(3)}
        stage.slice(1, asked, share=share)
    ended = [one.request_id.partition(" ")[0] for _ in range(9) for one in stage.slice(100, eager=True).ended]
    # The first was alone at the beginning; from then on they take turns.
    assert [sorted(ended[turn : turn + 3]) for turn in (1, 4)] == [sorted(shares)] * 2


def test_a_place_that_becomes_free_is_of_whoever_has_the_fewest(llama: BaseModel, ranks: RankGroup) -> None:
    """However many samples another asked for before."""
    stage = Stage(llama, ranks, sequences=4, cached_tokens=2048)
    stage.sampler.open_base(BASE)
    stage.slice(1, {"flood": ask(prompt_of(1, 10), num=60, max_tokens=8, end_tokens=False)}, share="flood")
    quiet = {f"quiet {number}": ask(prompt_of(2, 10), max_tokens=8, end_tokens=False) for number in range(3)}
    stage.slice(1, quiet, share="quiet")
    # The flood has all four places for eight tokens; then each side has two of them.
    stage.slice(2 * 8)
    assert [key in stage.outcomes for key in quiet] == [True, True, False]
    stage.slice(8)
    assert set(quiet) <= set(stage.outcomes)
    assert "flood" not in stage.outcomes
    while stage.slice(50).requests:
        pass
    found = stage.outcomes["flood"]
    assert isinstance(found, SampleResult)
    assert len(found.sequences) == 60


@pytest.mark.parametrize("limits", [{"sequences": 3}, {"cached_tokens": 3 * 64}])
def test_what_there_is_no_room_for_waits_and_comes_to_its_turn(
    limits: dict[str, int], llama: BaseModel, ranks: RankGroup
) -> None:
    stage = Stage(llama, ranks, **limits)
    stage.sampler.open_base(BASE)
    samples = {str(number): greedy(prompt_of(number, 4), tokens=5 + number, end_tokens=False) for number in range(9)}
    done = stage.slice(2, samples)
    assert (done.running, done.waiting, done.requests) == (3, 6, 9)
    order: list[str] = []
    while done.requests:
        done = stage.slice(1)
        order += [one.request_id for one in done.ended]
        assert done.running <= 3
    assert order == [str(number) for number in range(9)]


def test_places_of_all_lengths_stay_within_the_bound_and_are_given_back(llama: BaseModel, ranks: RankGroup) -> None:
    """Stage.slice compares what is allocated with the bound after every slice."""
    stage = Stage(llama, ranks, sequences=64, cached_tokens=1024)
    stage.sampler.open_base(BASE)
    done = stage.slice(1)
    waves = [(20, 4), (100, 20), (300, 100), (10, 8), (200, 5)]
    for number, (length, tokens) in enumerate(waves):
        added = {f"{number} {index}": greedy(prompt_of(index, length + index), tokens=tokens) for index in range(12)}
        done = stage.slice(5, added)
    while done.requests:
        done = stage.slice(20)
    assert len(stage.outcomes) == 60
    assert all(isinstance(outcome, SampleResult) for outcome in stage.outcomes.values())
    assert stage.sampler._cache.allocated == 0


def test_cancelling_frees_the_place_for_those_who_wait(llama: BaseModel, ranks: RankGroup) -> None:
    stage = Stage(llama, ranks, sequences=2)
    stage.sampler.open_base(BASE)
    samples = {name: greedy(prompt_of(3, 6), tokens=50, end_tokens=False) for name in ("a", "b", "c", "d")}
    assert stage.slice(4, samples).waiting == 2
    done = stage.slice(4, cancel=["a", "d", "nobody"])
    assert {one.request_id: one.outcome for one in done.ended} == {
        name: SampleFailed("cancelled", "it was cancelled") for name in ("a", "d")
    }
    assert (done.running, done.waiting, done.requests) == (2, 0, 2)
    while stage.slice(20).requests:
        pass
    assert only(stage.outcomes["b"]).tokens == only(stage.outcomes["c"]).tokens
    assert not stage.slice(1, cancel=["b"]).ended


def test_a_request_that_is_told_twice_runs_once(stage: Stage) -> None:
    sample = {"it": greedy(prompt_of(3, 6), tokens=9, end_tokens=False)}
    stage.slice(2, sample)
    assert stage.slice(2, sample).running == 1


def test_the_model_ends_a_text_by_itself_unless_it_is_told_not_to(stage: Stage) -> None:
    options: dict[str, Any] = {"num": 16, "max_tokens": 120, "seed": 5, "temperature": 1.3}
    ended = stage.one(ask(prompt_of(1, 4), **options))
    free = stage.one(ask(prompt_of(1, 4), end_tokens=False, **options))
    (end,) = stage.sampler._validator.end_tokens
    stopped = [one for one in ended.sequences if one.stop_reason == "stop"]
    assert 0 < len(stopped) < 16
    assert all(one.stop_reason == "length" and len(tokens_in(one)) == 120 for one in free.sequences)
    for one, unstopped in zip(ended.sequences, free.sequences, strict=True):
        tokens, longer = tokens_in(one), tokens_in(unstopped)
        assert longer[: len(tokens)] == tokens
        assert (one.stop_reason == "stop") == (tokens[-1] == end)
        assert end not in tokens[:-1]


def test_a_stop_token_ends_a_sequence_and_is_part_of_it(stage: Stage) -> None:
    plain = ask(prompt_of(2, 5), max_tokens=30, seed=1, end_tokens=False)
    tokens = tokens_in(stage.one(plain).sequences[0])
    found = stage.one(
        ask(prompt_of(2, 5), max_tokens=30, seed=1, end_tokens=False, stop_tokens=[tokens[11], 510])
    ).sequences[0]
    assert found.stop_reason == "stop"
    assert tokens_in(found) == tokens[: tokens.index(tokens[11]) + 1]
    assert len(logprobs_in(found)) == len(tokens_in(found))


def test_a_stop_string_ends_a_sequence_wherever_the_borders_of_tokens_are(stage: Stage, llama: BaseModel) -> None:
    decode = RequestValidator(llama, stage.sampler.limits).decoder()
    options: dict[str, Any] = {"max_tokens": 150, "seed": 2, "temperature": 1.2, "end_tokens": False}
    tokens = tokens_in(stage.one(ask(prompt_of(2, 5), **options)).sequences[0])
    text = decode(tokens)
    strings = [text[at : at + size] for size in (1, 2, 3, 4) for at in range(2, len(text) - 4, 9)]
    strings = [string for string in strings if string.isascii()]
    assert len(strings) > 20
    samples = {string: ask(prompt_of(2, 5), stop_strings=[string, "never said"], **options) for string in strings}
    found = stage.all(samples, steps=50)
    crossing = 0
    for string in strings:
        length = next(count for count in range(1, len(tokens) + 1) if string in decode(tokens[:count]))
        assert tokens_in(only(found[string])) == tokens[:length], string
        assert only(found[string]).stop_reason == "stop"
        crossing += string not in decode(tokens[length - 1 : length])
    assert crossing > 5, "most strings were to end in another token than they began in"


def test_a_stop_string_in_the_prompt_stops_nothing(stage: Stage, llama: BaseModel) -> None:
    decode = RequestValidator(llama, stage.sampler.limits).decoder()
    prompt = prompt_of(2, 5)
    plain = stage.one(greedy(prompt, end_tokens=False)).sequences[0]
    string = decode(tokens_in(prompt))[-3:]
    assert string not in decode(tokens_in(plain))
    assert stage.one(greedy(prompt, end_tokens=False, stop_strings=[string])).sequences[0] == plain


def test_the_context_is_the_limit_when_no_other_is_given(stage: Stage) -> None:
    found = stage.one(ask(prompt_of(1, 500), max_tokens=None, end_tokens=False)).sequences[0]
    assert (len(tokens_in(found)), found.stop_reason) == (12, "length")
    found = stage.one(ask(prompt_of(1, 500), max_tokens=900, end_tokens=False)).sequences[0]
    assert len(tokens_in(found)) == 12


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (greedy(prompt_of(1, 3), "nobody"), "no sampler 'nobody'"),
        (greedy(b""), "no tokens"),
        (greedy(b"123"), "no tokens"),
        (greedy(prompt_of(1, 512)), "no room"),
        (greedy(np.array([512], "<i4").tobytes()), "outside the vocabulary"),
        (greedy(np.array([-1], "<i4").tobytes()), "outside the vocabulary"),
        (greedy(prompt_of(1, 3), tokens=0), "max_tokens"),
        (greedy(prompt_of(1, 400), tokens=100), "it needs 499 cached tokens, and a rank has room for 256"),
        (ask(prompt_of(1, 3), num=0), "num_samples"),
        (ask(prompt_of(1, 3), num=100_000), "num_samples"),
        (ask(prompt_of(1, 3), temperature=-1.0), "temperature"),
        (ask(prompt_of(1, 3), temperature=float("nan")), "temperature"),
        (ask(prompt_of(1, 3), top_p=0.0), "top_p"),
        (ask(prompt_of(1, 3), top_k=-2), "top_k"),
        (ask(prompt_of(1, 3), topk_prompt_logprobs=-1), "top-k logprobs"),
        (ask(prompt_of(1, 3), stop_strings=["a", ""]), "empty"),
        (ask(prompt_of(1, 3), prompt_logprobs=True, prompt_logprobs_last_n=3), "prompt_logprobs_last_n"),
        (ask(prompt_of(1, 3), prompt_draws=-1), "prompt_alt_tokens_k"),
        (ask(prompt_of(1, 3), num=1024, topk_sample_logprobs=64), "num_samples 1024, up to 253 tokens each"),
        (ask(prompt_of(1, 3), num=1024, topk_sample_logprobs=1024, max_tokens=9), "could have 72 MiB"),
        (ask(prompt_of(1, 2), targets=Targets(np.array([512], "<i4").tobytes(), Layout((1, 1)))), "target_prompt"),
    ],
)
def test_a_request_that_cannot_work_fails_by_itself(
    sample: SampleOperation, said: str, llama: BaseModel, ranks: RankGroup
) -> None:
    stage = Stage(llama, ranks, cached_tokens=256)
    stage.sampler.open_base(BASE)
    found = stage.all({"good": greedy(prompt_of(1, 3)), "bad": sample})
    assert isinstance(found["good"], SampleResult)
    failed = found["bad"]
    assert isinstance(failed, SampleFailed)
    assert failed.category == "user"
    assert said in failed.message


def test_who_asks_for_few_of_the_likeliest_tokens_keeps_no_more_beside_one_who_asks_for_many(stage: Stage) -> None:
    few = greedy(prompt_of(1, 5), topk_sample_logprobs=2, end_tokens=False)
    many = greedy(prompt_of(2, 9), topk_sample_logprobs=300, end_tokens=False)
    alone = only(stage.all({"few": few})["few"])
    stage.slice(4, {"few": few, "many": many})
    (batch,) = stage.sampler._batches.values()
    kept = {
        sequence.group.request_id: len(sequence.top_tokens) + len(sequence.top_logprobs) for sequence in batch.running
    }
    so_far = len(batch.running[0].tokens)
    assert so_far > 1
    assert kept == {"few": so_far * 2 * 8, "many": so_far * 300 * 8}
    stage.slice(100)
    beside = only(stage.outcomes["few"])
    np.testing.assert_array_equal(top_in(beside.top)[0], top_in(alone.top)[0])
    np.testing.assert_allclose(top_in(beside.top)[1], top_in(alone.top)[1], atol=CLOSE)
    tokens, logprobs = top_in(only(stage.outcomes["many"]).top)
    assert tokens.shape == logprobs.shape == (12, 300)
    assert (np.diff(logprobs, axis=1) <= 0).all()


def test_more_requests_than_there_may_be_are_refused_for_now(llama: BaseModel, ranks: RankGroup) -> None:
    stage = Stage(llama, ranks, requests=3)
    stage.sampler.open_base(BASE)
    done = stage.slice(1, crowd(5))
    assert done.requests == 3
    assert [one.outcome for one in done.ended if isinstance(one.outcome, SampleFailed)] == [
        SampleFailed("server", "3 requests are being sampled already")
    ] * 2


def test_weights_that_are_not_numbers_fail_their_own_request_and_leave_nothing_behind(stage: Stage) -> None:
    """The places they had are used again while a longer sequence runs beside: what they computed would be looked at."""
    adapter = stage.adapter(0, LoraConfig(rank=2, alpha=4.0))
    adapter.flat.fill_(torch.nan)
    stage.sampler.open_adapter("broken", adapter)
    good = {f"good {number}": greedy(prompt_of(number, 5), end_tokens=False) for number in range(4)}
    long = {"long": greedy(prompt_of(9, 30), tokens=34, end_tokens=False)}
    alone = stage.all(good) | stage.all(long)
    stage.slice(2, long)
    bad = {f"bad {number}": greedy(prompt_of(number, 50), "broken", num=2) for number in range(3)}
    stage.slice(4, bad)
    for key in bad:
        failed = stage.outcomes[key]
        assert isinstance(failed, SampleFailed)
        assert "not finite" in failed.message
    found = stage.all(good) | stage.outcomes
    for key, outcome in alone.items():
        assert only(found[key]).tokens == only(outcome).tokens


def test_a_batch_that_slept_goes_on_as_if_it_had_not(stage: Stage, tmp_path: Path) -> None:
    stage.sampler.open_adapter("other", stage.adapter(1, LoraConfig(rank=2, alpha=4.0)))
    samples = {name: ask(prompt_of(1, 9), name, max_tokens=20, end_tokens=False) for name in (BASE, "other")}
    awake = stage.all(samples)
    stage.slice(5, samples)
    offload = SleepOffload(stage.sampler.tensors(), tmp_path / "asleep" / "rank.safetensors")
    assert offload.freed > 0
    offload.restore()
    stage.slice(100)
    assert stage.outcomes == awake


def test_a_sampler_that_is_closed_fails_its_requests_and_no_others(stage: Stage) -> None:
    stage.sampler.open_adapter("other", stage.adapter(1, LoraConfig(rank=2, alpha=4.0)))
    samples = {
        "mine": greedy(prompt_of(1, 5), end_tokens=False),
        "theirs": greedy(prompt_of(1, 5), "other", 40, num=3, end_tokens=False),
    }
    stage.slice(3, samples)
    stage.sampler.close("other")
    done = stage.slice(100)
    assert (done.requests, done.free_sequences) == (0, 16)
    assert isinstance(stage.outcomes["mine"], SampleResult)
    assert stage.outcomes["theirs"] == SampleFailed("user", "its sampler was closed")
    with pytest.raises(StrataError, match="no sampler") as caught:
        stage.sampler.close("other")
    assert caught.value.code is Code.NOT_FOUND


def test_samplers_have_a_bound_and_names_of_their_own(llama: BaseModel, ranks: RankGroup) -> None:
    stage = Stage(llama, ranks, samplers=2)
    stage.sampler.open_base(BASE)
    with pytest.raises(StrataError, match="already"):
        stage.sampler.open_base(BASE)
    stage.sampler.open_base("second")
    with pytest.raises(StrataError, match="close one first"):
        stage.sampler.open_base("third")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_sampler_that_is_made_after_training_is_tried_on_the_base_alone(
    name: str, models: Path, ranks: RankGroup
) -> None:
    """What the last pass trained must not be in the pass that the sampler is compared with."""
    base = base_of(models / name, ranks)
    config = LoraConfig(rank=4, alpha=8.0, train_unembed=False)
    adapter = Adapter(config, targets_of(base.lm, config), ranks.device)
    adapter.flat.copy_(torch.randn(adapter.size, generator=torch.Generator().manual_seed(1)) * 0.2)
    tokens = torch.arange(4, 24)
    row = PackedRow(
        tokens=tokens, documents=[20], spans=[Span(adapter, 20)], logit_indices=tokens[:19] - 4, targets=tokens[1:]
    )
    trained = base.logprobs(row)
    bare = base.logprobs(
        PackedRow(tokens=tokens, documents=[20], spans=(), logit_indices=row.logit_indices, targets=row.targets)
    )
    assert (trained - bare).abs().max() > 0.1, "the adapter says something else"
    base.logprobs(row)
    Stage(base, ranks).sampler.open_base(BASE)


def test_an_architecture_that_cannot_be_sampled_is_refused_and_not_tried(models: Path, ranks: RankGroup) -> None:
    """One whose layers do something that its configuration does not say, so that the sampler's modules differ."""
    base = base_of(models / "llama", ranks)
    base.arch = "strange"
    base.lm.config.rms_norm_eps = 0.5
    stage = Stage(base, ranks)
    with pytest.raises(StrataError, match="decoding gives other log probabilities than training"):
        stage.sampler.open_base(BASE)
