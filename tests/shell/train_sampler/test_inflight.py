"""In-flight samplers on the ranks: every token is checked against unmodified transformers, which computes what the
spans of versions say: with `past_key_values` and weights that change at the recorded boundaries, or all over again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.train.core.model_options import LoraConfig
from strata.train.core.sampling import DrawnSequence, SampledSequence, SampleOperation, SampleResult
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.sampling.kv_cache import BLOCK
from tests.shell.train_sampler.stage import Reference, Stage, ask, base_of, logprobs_in, prompt_of, tokens_in

CLOSE = 3e-5
"""Nats between a token's log probability and that of unmodified transformers."""
WEIGHTS = "s:train:0:inflight"
Drawn = dict[str, dict[int, DrawnSequence]]


class InFlight(Stage):
    """A stage with in-flight weights, of which every version can be loaded by transformers."""

    def __init__(self, base: BaseModel, ranks: RankGroup, path: Path, *, recompute: bool = False) -> None:
        super().__init__(base, ranks, sequences=16, cached_tokens=8192, prompt_tokens=64)
        self.references: dict[int, Any] = {}
        self.drawn: Drawn = {}
        self._path = path
        self._recompute = recompute

    def publish(self, version: int) -> None:
        adapter = self.adapter(version, LoraConfig(rank=4), size=0.08)
        self.sampler.publish(WEIGHTS, adapter, version, recompute=self._recompute)
        self.references[version] = Reference.load(self._path, adapter).model

    def draw(self, steps: int, add: Mapping[str, SampleOperation] | None = None, drawn: Drawn | None = None) -> int:
        """A slice; what it adds is kept as the journal keeps it. Returns how many requests run on."""
        done = self.slice(steps, add, weights=WEIGHTS, drawn=drawn)
        for request_id, parts in done.drawn.items():
            for each in parts:
                sequences = self.drawn.setdefault(request_id, {})
                known = sequences.get(each.index, DrawnSequence())
                assert each.start == known.length
                sequences[each.index] = known.plus(each.added)
        return done.requests

    def result(self, request_id: str) -> Sequence[SampledSequence]:
        outcome = self.outcomes[request_id]
        assert isinstance(outcome, SampleResult), outcome
        return outcome.sequences


@torch.no_grad()
def recomputed(references: Mapping[int, Any], prompt: bytes, sequence: SampledSequence) -> np.ndarray[Any, Any]:
    """The log probability of each token, by unmodified models that follow the spans."""
    tokens, found, place, cache = tokens_in(sequence), list[float](), 0, None
    waiting = tokens_in(prompt)
    for span in sequence.versions:
        if span.recomputed:
            cache, waiting = None, [*tokens_in(prompt), *tokens[:place]]
        for token in tokens[place : place + span.tokens]:
            out = references[span.version](torch.tensor([waiting]), past_key_values=cache, use_cache=True)
            cache, waiting = out.past_key_values, [token]
            found.append(float(torch.log_softmax(out.logits[0, -1].float(), -1)[token]))
        place += span.tokens
    assert place == len(tokens)
    return np.asarray(found)


def check(stage: InFlight, sample: SampleOperation, sequence: SampledSequence) -> float:
    distance = float(np.abs(logprobs_in(sequence) - recomputed(stage.references, sample.prompt, sequence)).max())
    assert distance <= CLOSE
    return distance


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "window"])
def test_every_token_is_that_of_the_versions_that_its_spans_name(
    name: str, recompute: bool, models: Path, ranks: RankGroup
) -> None:
    stage = InFlight(base_of(models / name, ranks), ranks, models / name, recompute=recompute)
    stage.publish(1)
    samples = {
        f"{length}": ask(prompt_of(length, length), f"s:sample:{length}", num=2, max_tokens=length + 13, seed=length,
                         end_tokens=False)
        for length in (1, 17, 40, 90)
    }  # fmt: skip
    stage.draw(4, samples)
    for version in range(2, 40):
        stage.publish(version)
        if not stage.draw(4):
            break
    distances = [check(stage, sample, sequence) for key, sample in samples.items() for sequence in stage.result(key)]
    print(f"largest distance {max(distances):.2e} nats")
    longest = stage.result("90")[0].versions
    assert [span.version for span in longest] == [*range(1, len(longest) + 1)]
    assert [span.recomputed for span in longest] == [False] + [recompute] * (len(longest) - 1)
    # Without the change of weights, or at other places, it would be far off.
    wrong = dict.fromkeys(stage.references, stage.references[1])
    far = np.abs(logprobs_in(stage.result("90")[0]) - recomputed(wrong, samples["90"].prompt, stage.result("90")[0]))
    assert far.max() > 100 * CLOSE


def test_new_ranks_go_on_at_the_next_token_with_the_newest_version(
    llama: BaseModel, ranks: RankGroup, models: Path
) -> None:
    samples = {
        "some": ask(prompt_of(3, 20), "s:sample:1", num=3, max_tokens=40, seed=4, topk_sample_logprobs=3,
                    prompt_logprobs=True, end_tokens=False),
        "other": ask(prompt_of(4, 50), "s:sample:1", num=1, max_tokens=30, seed=5, end_tokens=False),
    }  # fmt: skip
    stage = InFlight(llama, ranks, models / "llama")
    stage.publish(1)
    stage.draw(7, samples)
    stage.publish(2)
    stage.draw(7)
    durable = {key: dict(sequences) for key, sequences in stage.drawn.items()}
    stage.draw(5)
    again = InFlight(llama, ranks, models / "llama")
    for version in (1, 2, 5):
        again.publish(version)
    again.drawn = {key: dict(sequences) for key, sequences in durable.items()}
    left = again.draw(6, samples, durable)
    while left:
        left = again.draw(6)
    for key, sample in samples.items():
        for index, sequence in enumerate(again.result(key)):
            check(again, sample, sequence)
            before = durable[key][index]
            assert sequence.tokens.startswith(before.tokens)
            assert [span.version for span in sequence.versions] == [1, 2, 5]
            assert sequence.versions[:2] == before.versions
            assert sequence.versions[2].recomputed
    outcome = again.outcomes["some"]
    assert isinstance(outcome, SampleResult)
    own = Reference(again.references[5]).distributions(samples["some"].prompt, [])
    wanted = own.gather(1, torch.tensor(tokens_in(samples["some"].prompt)[1:])[:, None])[:, 0].numpy()
    assert outcome.prompt_logprobs is not None
    np.testing.assert_allclose(logprobs_in(outcome.prompt_logprobs)[1:], wanted, atol=CLOSE)
    for sequence in outcome.sequences:
        assert sequence.top is not None
        assert sequence.top.length == 40


def test_the_same_weights_draw_the_same_tokens_before_and_after_a_loss(
    llama: BaseModel, ranks: RankGroup, models: Path
) -> None:
    sample = ask(prompt_of(9, 30), "s:sample:1", num=2, max_tokens=50, seed=8, end_tokens=False)
    calm = InFlight(llama, ranks, models / "llama")
    calm.publish(1)
    lost = InFlight(llama, ranks, models / "llama")
    lost.publish(1)
    while calm.draw(8, {"it": sample} if not calm.drawn else None):
        pass
    lost.draw(8, {"it": sample})
    again = InFlight(llama, ranks, models / "llama")
    again.publish(1)
    again.drawn = {"it": dict(lost.drawn["it"])}
    left = again.draw(8, {"it": sample}, lost.drawn)
    while left:
        left = again.draw(8)
    assert [each.tokens for each in calm.result("it")] == [each.tokens for each in again.result("it")]


def test_sequences_that_had_ended_before_a_loss_stay_as_they_are(
    llama: BaseModel, ranks: RankGroup, models: Path
) -> None:
    stage = InFlight(llama, ranks, models / "llama")
    stage.publish(1)
    probe = ask(prompt_of(5, 12), "s:sample:1", num=6, max_tokens=30, seed=2, end_tokens=False)
    while stage.draw(8, {"probe": probe} if not stage.drawn else None):
        pass
    # A token that ends some of them early and others late.
    place = {index: tokens_in(each) for index, each in enumerate(stage.result("probe"))}
    stop = place[0][3]
    sample = ask(prompt_of(5, 12), "s:sample:1", num=6, max_tokens=30, seed=2, end_tokens=False, stop_tokens=(stop,))
    before = InFlight(llama, ranks, models / "llama")
    before.publish(1)
    assert before.draw(6, {"it": sample}) == 1
    ended = {index for index, each in before.drawn["it"].items() if each.stop_reason}
    assert 0 in ended
    again = InFlight(llama, ranks, models / "llama")
    again.publish(1)
    again.publish(2)
    again.drawn = {"it": dict(before.drawn["it"])}
    left = again.draw(6, {"it": sample}, before.drawn)
    while left:
        left = again.draw(6)
    for index, sequence in enumerate(again.result("it")):
        check(again, sample, sequence)
        assert (len(sequence.versions) == 1) == (index in ended)
    assert tokens_in(again.result("it")[0]) == place[0][:4]
    assert again.result("it")[0].stop_reason == "stop"


def test_a_prefix_is_reused_only_within_one_sampler_and_version(
    llama: BaseModel, ranks: RankGroup, models: Path
) -> None:
    stage = InFlight(llama, ranks, models / "llama")
    stage.publish(1)
    prompt = prompt_of(6, 3 * BLOCK)
    reused = []
    for number, (sampler, version) in enumerate([("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 2)]):
        if version not in stage.references:
            stage.publish(version)
        sample = ask(prompt, sampler, seq_id=number, max_tokens=3, end_tokens=False)
        reused.append(stage.slice(8, {f"{number}": sample}, weights=WEIGHTS).reused_tokens)
        check(stage, sample, stage.result(f"{number}")[0])
    assert reused == [0, 2 * BLOCK, 0, 0, 2 * BLOCK]


def test_a_stop_string_that_begins_before_a_swap_is_found_after_it(
    llama: BaseModel, ranks: RankGroup, models: Path
) -> None:
    stage = InFlight(llama, ranks, models / "llama")
    stage.publish(1)
    base = ask(prompt_of(8, 10), "s:sample:1", max_tokens=24, temperature=0.0, end_tokens=False)
    stage.draw(6, {"plain": base})
    stage.publish(2)
    while stage.draw(6):
        pass
    decode = stage.sampler._validator.decoder()
    tokens = tokens_in(stage.result("plain")[0])
    text = decode(tokens[:7])[len(decode(tokens[:5])) :]
    again = InFlight(llama, ranks, models / "llama")
    again.publish(1)
    sample = ask(prompt_of(8, 10), "s:sample:1", max_tokens=24, temperature=0.0, end_tokens=False, stop_strings=(text,))
    again.draw(6, {"it": sample})
    again.publish(2)
    while again.draw(6):
        pass
    (found,) = again.result("it")
    assert found.stop_reason == "stop"
    assert tokens_in(found) == tokens[:7]
    check(again, sample, found)


def test_weights_that_no_sampler_has_fail_what_still_runs(llama: BaseModel, ranks: RankGroup, models: Path) -> None:
    stage = InFlight(llama, ranks, models / "llama")
    stage.publish(1)
    stage.draw(4, {"it": ask(prompt_of(2, 5), "a", max_tokens=40, end_tokens=False)})
    stage.sampler.close(WEIGHTS)
    assert stage.draw(4) == 0
    assert not isinstance(stage.outcomes["it"], SampleResult)
