"""Whatever number of ranks samples, and whatever is trained in between, the samples are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from strata.train.core.sampling import (
    AddedSample,
    SampledSequence,
    SampleFailed,
    SampleParams,
    SampleResult,
    SamplingSlice,
)
from strata.train.runner.collectives import RankGroup
from strata.train.runner.sampling.scatter import RankSliceResult, SampleScatter, SliceOutcomes
from tests.shell.train_sampler.rank_process import scenes
from tests.shell.train_sampler.stage import ask, prompt_of
from tests.support.torchrun import run_on_ranks

LONGEST_S: Final = 200


@pytest.mark.timeout(LONGEST_S + 60)
def test_two_ranks_sample_what_one_does(models: Path, ranks: RankGroup, tmp_path: Path) -> None:
    out = tmp_path / "two.json"
    run_on_ranks("tests.shell.train_sampler.rank_process", 2, str(models), str(out), within_s=LONGEST_S)
    two: dict[str, Any] = msgspec.json.decode(out.read_bytes())
    one = scenes(models, ranks)
    assert one.keys() == two.keys() == {"adapted", "whole"}
    for scene, requests in one.items():
        assert requests.keys() == two[scene].keys()
        for request_id, sampled in requests.items():
            other = two[scene][request_id]
            assert other["tokens"] == sampled["tokens"], (scene, request_id)
            for ours, theirs in zip(sampled["logprobs"], other["logprobs"], strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-4)
            np.testing.assert_allclose(sampled["prompt"], other["prompt"], atol=2e-4)


NOTHING: Final = RankSliceResult(SliceOutcomes(), 0, 0, 0, 0)


def report_of(**outcomes: Any) -> RankSliceResult:
    return msgspec.structs.replace(NOTHING, outcomes=SliceOutcomes(**outcomes))


def sequence(index: int) -> SampledSequence:
    return SampledSequence(index.to_bytes(4, "little"), b"", "stop")


def test_samples_go_where_the_least_is_reserved_and_come_back_in_order() -> None:
    scatter = SampleScatter(2, lambda added: added.sample.length, 10)
    added = [AddedSample("large", ask(prompt_of(1, 30))), AddedSample("many", ask(prompt_of(1, 10), num=5))]
    first, second = scatter.partition(SamplingSlice(1, added))
    assert [(one.request_id, one.indices, one.prompt) for one in first.add] == [
        ("large", [0], True),
        ("many", [3], False),
    ]
    assert [(one.request_id, one.indices, one.prompt) for one in second.add] == [("many", [0, 1, 2, 4], True)]
    ended = report_of(sequences=[("many", 3, sequence(3))])
    others = report_of(sequences=[("many", index, sequence(index)) for index in (4, 1, 0, 2)])
    assert not scatter.merge([ended, NOTHING]).ended
    scatter.partition(SamplingSlice(1))
    (done,) = scatter.merge([NOTHING, others]).ended
    assert done.outcome == SampleResult([sequence(index) for index in range(5)])
    _, again = scatter.partition(SamplingSlice(1, [AddedSample("next", ask(prompt_of(1, 10)))]))
    assert [one.request_id for one in again.add] == ["next"]


def test_a_request_that_fails_on_one_rank_is_taken_back_from_the_others() -> None:
    scatter = SampleScatter(2, lambda added: added.sample.length, 10)
    scatter.partition(SamplingSlice(1, [AddedSample("it", ask(prompt_of(1, 10), num=4))]))
    done = scatter.merge([report_of(failed=[("it", "broken")]), NOTHING])
    assert done.ended[0].outcome == SampleFailed("user", "broken")
    assert done.requests == 0
    parts = scatter.partition(SamplingSlice(1))
    assert [list(part.cancel) for part in parts] == [["it"], ["it"]]
    late = report_of(sequences=[("it", 1, sequence(1))])
    assert not scatter.merge([NOTHING, late]).ended


def test_every_rank_is_told_of_all_samplers_in_use_so_that_they_meet() -> None:
    scatter = SampleScatter(3, lambda added: added.sample.length, 10)
    added = [AddedSample(name, ask(prompt_of(1, 5), name)) for name in ("b", "a")]
    parts = scatter.partition(SamplingSlice(1, added))
    assert [part.weights for part in parts] == [["a", "b"]] * 3
    assert SampleParams() == added[0].sample.params
