"""The same scenes on any number of ranks: `torchrun … -m tests.shell.train_sampler.rank_process MODELS OUT`.

What was sampled goes into one file, to be compared with what another number of ranks samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from strata.train.core.model_options import LoraConfig
from strata.train.core.sampling import SampleOperation, SampleResult
from strata.train.runner.collectives import RankGroup
from tests.shell.train_sampler.stage import BASE, Stage, ask, base_of, greedy, logprobs_in, prompt_of, tokens_in
from tests.support.ranks import join_ranks

Found = dict[str, Any]


def adapted(stage: Stage) -> None:
    stage.sampler.open_base(BASE)
    stage.sampler.open_adapter("one", stage.adapter(1, LoraConfig(rank=4, alpha=8.0)))
    stage.sampler.open_adapter("two", stage.adapter(2, LoraConfig(rank=2, alpha=8.0, train_unembed=False)))


def whole(stage: Stage) -> None:
    stage.sampler.open_full(BASE)
    stage.sampler.open_full("one")
    stage.sampler.open_full("two")


def play(stage: Stage) -> Found:
    """Requests of several samplers come slice by slice, with training in between; one is cancelled."""
    samples: dict[str, SampleOperation] = {}
    for number in range(9):
        sampler_id = (BASE, "one", "two")[number % 3]
        prompt = prompt_of(number, 3 + 7 * number)
        if number % 2:
            samples[f"greedy {number}"] = greedy(prompt, sampler_id, 10 + number, prompt_logprobs=True)
        else:
            samples[f"many {number}"] = ask(prompt, sampler_id, seq_id=number, num=1 + number, max_tokens=14)
    for request_id, sample in samples.items():
        stage.slice(3, {request_id: sample})
        stage.train()
    done = stage.slice(2, {"long": greedy(prompt_of(99, 5), tokens=300, end_tokens=False, num=4)})
    while done.requests > 1:
        done = stage.slice(5)
    assert not stage.slice(1, cancel=["long"]).requests
    assert stage.outcomes.pop("long").category == "cancelled"  # type: ignore[union-attr]
    return {request_id: _shown(stage.outcomes[request_id]) for request_id in samples}


def _shown(outcome: object) -> object:
    assert isinstance(outcome, SampleResult), outcome
    prompt = logprobs_in(outcome.prompt_logprobs)[1:].tolist() if outcome.prompt_logprobs is not None else []
    return {
        "tokens": [tokens_in(one) for one in outcome.sequences],
        "logprobs": [logprobs_in(one).tolist() for one in outcome.sequences],
        "prompt": prompt,
    }


def scenes(models: Path, ranks: RankGroup) -> Found:
    found: Found = {}
    kinds: Sequence[tuple[str, dict[str, Any], Callable[[Stage], None]]] = (
        ("qwen3", {}, adapted),
        ("tied", {"training": "full"}, whole),
    )
    for model, options, prepare in kinds:
        stage = Stage(base_of(models / model, ranks, **options), ranks, sequences=6, prompt_tokens=40)
        prepare(stage)
        if ranks.is_rank0:
            found[prepare.__name__] = play(stage)
            stage.end()
        else:
            stage.follow()
    return found


def main(models: Path, out: Path) -> None:
    ranks = join_ranks(60)
    found = scenes(models, ranks)
    if ranks.is_rank0:
        out.write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
