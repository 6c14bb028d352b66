"""Reinforcement learning with the `tinker` SDK as it is published, on two ranks: sample, reward, train, sample again.

The reward of a sequence is the share of its tokens that belong to a class of one in eight. A model that was not
trained, or was trained on rewards dealt out at random, stays near that share; one that learns from its
own reward does not.
"""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from soak.train.server import ServeProcess, Victim, make_model, serving
from tests.support.tinker_sessions import end_session

pytestmark = [
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
PROMPT: Final = [72, 101, 108, 108, 111]
TOKENS: Final = 8
SAMPLES: Final = 32
STEPS: Final = 25
LEARNED: Final = 0.6
NOT_LEARNED: Final = 0.3
LONG: Final = 400
PATIENCE_S: Final = 90.0


def rewarded(token: int) -> bool:
    return token % 8 == 3


def reward(tokens: Sequence[int]) -> float:
    return sum(map(rewarded, tokens)) / len(tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[ServeProcess]:
    async with serving(tmp_path_factory.mktemp("rl") / "s", model, "real") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[tinker.ServiceClient]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        yield service
        end_session(service)
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def datum(tokens: Sequence[int], logprobs: Sequence[float], advantage: float) -> types.Datum:
    before = len(PROMPT) - 1
    inputs: dict[str, Any] = {
        "target_tokens": np.asarray([*PROMPT[1:], *tokens], np.int64),
        "logprobs": np.asarray([0.0] * before + list(logprobs), np.float32),
        "advantages": np.asarray([0.0] * before + [advantage] * len(tokens), np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints([*PROMPT, *tokens[:-1]]),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


def drawn(sampler: tinker.SamplingClient, seed: int, num: int = SAMPLES) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=TOKENS, seed=seed, stop=[])
    return list(sampler.sample(types.ModelInput.from_ints(PROMPT), num, params).result(PATIENCE_S).sequences)


def learn(
    training: tinker.TrainingClient, judge: Callable[[list[float]], list[float]]
) -> tuple[float, float, tinker.SamplingClient]:
    """What the samples are worth before and after, in the mean; and a sampler of the result."""
    sampler = training.save_weights_and_get_sampling_client()
    first = float(np.mean([reward(each.tokens) for each in drawn(sampler, 0)]))
    for step in range(STEPS):
        sequences = drawn(sampler, step)
        given = judge([reward(each.tokens) for each in sequences])
        advantages = (np.asarray(given) - np.mean(given)) / (np.std(given) + 1e-6)
        data = [
            datum(each.tokens, each.logprobs or [], float(advantage) / SAMPLES)
            for each, advantage in zip(sequences, advantages, strict=True)
        ]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        passed.result(PATIENCE_S)
        stepped.result(PATIENCE_S)
        sampler = training.save_weights_and_get_sampling_client()
    last = float(np.mean([reward(each.tokens) for each in drawn(sampler, 1_000_000, 4 * SAMPLES)]))
    return first, last, sampler


async def test_the_reward_rises_and_only_because_of_the_reward(client: tinker.ServiceClient) -> None:
    chance = random.Random(7)

    def shuffled(rewards: list[float]) -> list[float]:
        return chance.sample(rewards, len(rewards))

    def both() -> tuple[float, float, float]:
        learner = client.create_lora_training_client(base_model="tiny", rank=8, seed=3)
        untrained, learned, _ = learn(learner, lambda rewards: rewards)
        other = client.create_lora_training_client(base_model="tiny", rank=8, seed=3)
        return untrained, learned, learn(other, shuffled)[1]

    untrained, learned, by_chance = await asyncio.to_thread(both)
    print(f"reward untrained {untrained:.3f}, shuffled {by_chance:.3f}, learned {learned:.3f}")
    assert untrained < NOT_LEARNED
    assert by_chance < NOT_LEARNED
    assert learned > LEARNED


def greedy(sampler: tinker.SamplingClient, tokens: int = 24, **more: Any) -> list[int]:
    params = types.SamplingParams(max_tokens=tokens, temperature=0.0, stop=[])
    (one,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params, **more).result(PATIENCE_S).sequences
    return list(one.tokens)


def train_a_little(client: tinker.ServiceClient) -> tinker.TrainingClient:
    training = client.create_lora_training_client(base_model="tiny", rank=8, seed=5)
    training.forward_backward([datum([9, 8, 7, 6], [-1.0] * 4, 1.0)], "importance_sampling").result(PATIENCE_S)
    training.optim_step(types.AdamParams(learning_rate=5e-2)).result(PATIENCE_S)
    return training


async def test_the_likeliest_tokens_are_those_of_the_saved_adapter_in_hugging_face(
    client: tinker.ServiceClient, server: ServeProcess, model: Path
) -> None:
    def sampled() -> tuple[list[int], list[int], list[int]]:
        training = train_a_little(client)
        live = training.save_weights_and_get_sampling_client()
        path = training.save_weights_for_sampler("for-hf").result(PATIENCE_S).path
        base = client.create_sampling_client(base_model="tiny")
        return greedy(live), greedy(client.create_sampling_client(model_path=path)), greedy(base)

    live, saved, untrained = await asyncio.to_thread(sampled)
    (folder,) = server.settings.checkpoint_folder.glob("*/sampler_weights/for-hf@*")
    base: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, str(folder))
    found = adapted.generate(
        input_ids=torch.tensor([PROMPT]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert live == saved == found[0, len(PROMPT) :].tolist()
    assert live != untrained


def asked(server: ServeProcess, sampler: tinker.SamplingClient) -> str:
    """By hand, because the SDK does not say when the server has heard it. The SDK's own numbers are far from this."""
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 77,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": LONG, "seed": 11, "stop": []},
    }
    reply = httpx.post(f"{server.url}/api/v1/asample", json=body, headers={"X-API-Key": server.key}, timeout=PATIENCE_S)
    return str(reply.raise_for_status().json()["request_id"])


def told(server: ServeProcess, request_id: str) -> list[int]:
    reply = httpx.Response(408)
    while reply.status_code == 408:
        reply = httpx.post(
            f"{server.url}/api/v1/retrieve_future",
            json={"request_id": request_id},
            headers={"X-API-Key": server.key},
            timeout=PATIENCE_S,
        )
    (one,) = reply.raise_for_status().json()["sequences"]
    return [int(token) for token in one["tokens"]]


@pytest.mark.parametrize("victim", ["orchestrator", "rank"])
async def test_a_sample_that_was_asked_for_before_a_kill_still_comes_and_is_the_same(
    client: tinker.ServiceClient, server: ServeProcess, victim: Victim
) -> None:
    """The sampler lives in memory alone: ranks that start anew are told to make it again."""

    def disturbed() -> tuple[list[int], list[int], list[int]]:
        training: Any = train_a_little(client)
        sampler = training.save_weights_and_get_sampling_client().result(PATIENCE_S)
        params = types.SamplingParams(max_tokens=LONG, seed=11, stop=[])
        prompt = types.ModelInput.from_ints(PROMPT)
        (undisturbed,) = sampler.sample(prompt, 1, params).result(PATIENCE_S).sequences
        request_id = asked(server, sampler)
        assert server.kill(victim)
        (after,) = sampler.sample(prompt, 1, params).result(PATIENCE_S).sequences
        return list(undisturbed.tokens), told(server, request_id), list(after.tokens)

    undisturbed, resumed, after = await asyncio.to_thread(disturbed)
    assert len(undisturbed) == LONG
    assert resumed == undisturbed
    assert after == undisturbed
