"""Rollout sessions with the published `openai` library, against a whole server: two ranks of a tiny real model.

The oracle is the unmodified model of transformers: given the tokens of a datum, its log probabilities are those that
were recorded, which they are only if these tokens were sampled after exactly those.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata.sdk.train import RolloutBranch, TrainingServer
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_api.processes import Processes, serving

pytestmark = [
    # The library leaves sockets to the garbage collector, whose complaint would be taken for ours.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]
openai: Any = importlib.import_module("openai")
SESSIONS: Final = 40
TURNS: Final = 25
CLOSE: Final = 2e-4
ARGUMENTS: Final[Any] = {
    "type": "object",
    "properties": {"at": {"enum": ["a", "b"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": ARGUMENTS}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make(folder, TinyModel(seed=3))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Processes]:
    with serving(tmp_path_factory.mktemp("s"), model) as found:
        yield found


def play(server: Processes, base_url: str, number: int) -> list[tuple[list[int], list[int]]]:
    """A harness: it knows messages and nothing of tokens. Returns, of each turn, the tokens that the server said."""
    told = []
    with openai.OpenAI(base_url=base_url, api_key=server.key, max_retries=0, timeout=300) as client:
        messages: list[Any] = [{"role": "system", "content": f"Game {number}."}, {"role": "user", "content": "Begin."}]
        for turn in range(TURNS):
            streamed = turn % 5 == 4
            asked = {"model": "tiny", "messages": messages, "max_tokens": 1 + (number + turn) % 9, "tools": [TOOL]}
            reply = client.chat.completions.create(
                **asked, stream=streamed, seed=1000 * number + turn, extra_body={"return_token_ids": True}
            )
            if streamed:
                chunks = list(reply)
                prompt = chunks[0].prompt_token_ids
                parts = [choice for chunk in chunks for choice in chunk.choices]
                sampled = [token for part in parts for token in getattr(part, "token_ids", None) or []]
                messages.append({"role": "assistant", "content": "".join(part.delta.content or "" for part in parts)})
            else:
                prompt, sampled = reply.prompt_token_ids, reply.choices[0].token_ids
                messages.append(reply.choices[0].message)
            told.append((prompt, sampled))
            messages.append({"role": "user", "content": f"Go on: {turn} äöü 😀"})
    return told


@pytest.mark.proves(
    "The tokens of trained datums are those that were sampled, over 1,000 turns of an unmodified client"
)
def test_the_datums_of_a_thousand_turns_have_the_tokens_that_were_sampled(server: Processes, model: Path) -> None:
    theirs: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    with TrainingServer(server.url, server.key) as sdk, ThreadPoolExecutor(8) as pool:
        rollouts = [sdk.open_rollout() for _ in range(SESSIONS)]
        played = list(pool.map(lambda each: play(server, each[1].base_url, each[0]), enumerate(rollouts)))
        turns, drifted = 0, 0
        for rollout, told in zip(rollouts, played, strict=True):
            (branch,) = rollout.branches()
            assert list(branch.tokens) == told[-1][0] + told[-1][1]
            places = [place for place, weight in enumerate(branch.weights) if weight]
            assert [branch.tokens[place] for place in places] == [token for _, sampled in told for token in sampled]
            check_logprobs(theirs, branch, places)
            turns += len(branch.turns)
            drifted += tokenizer.encode(tokenizer.decode(branch.tokens)) != list(branch.tokens)
            rollout.delete()
    assert turns == SESSIONS * TURNS == 1000
    # What a harness that keeps texts would have trained on.
    assert drifted > SESSIONS / 2
    print(f"\n{turns} turns; tokenized again, {drifted} of {SESSIONS} conversations would be other tokens")


def check_logprobs(theirs: Any, branch: RolloutBranch, places: list[int]) -> None:
    with torch.no_grad():
        own = torch.log_softmax(theirs(torch.tensor([branch.tokens])).logits[0].float(), -1)
    wanted = [float(own[place - 1, branch.tokens[place]]) for place in places]
    np.testing.assert_allclose([branch.logprobs[place] for place in places], wanted, atol=CLOSE)


def test_a_datum_of_a_session_is_trained(server: Processes) -> None:
    """A pass with a loss that learns from samples finds the log probabilities that it computes itself."""
    with TrainingServer(server.url, server.key) as sdk:
        rollout = sdk.open_rollout()
        play(server, rollout.base_url, 7)
        (branch,) = rollout.branches()
        trained = sdk.create_model("tiny", rank=4, seed=1)
        done = trained.forward_backward([branch.datum(0.5)], "importance_sampling").result(120)
        assert done.metrics["sampled_tokens:sum"] == sum(branch.weights)
        assert done.metrics["sampler_gap:max"] < CLOSE
        trained.optim_step(learning_rate=1e-3).result(120)
        assert [each["origin"] for each in rollout.turns()] == ["start"] + ["continued"] * (TURNS - 1)


def test_forced_calls_and_json_conform_and_are_recorded(server: Processes) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    formatted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    with TrainingServer(server.url, server.key) as sdk:
        rollout = sdk.open_rollout()
        with openai.OpenAI(base_url=rollout.base_url, api_key=server.key, max_retries=0, timeout=300) as client:
            messages: list[Any] = [{"role": "user", "content": "Look."}]
            asked = {"model": "tiny", "max_tokens": 200, "tools": [TOOL], "seed": 3}
            for choice in ("required", {"type": "function", "function": {"name": "look"}}):
                (called,) = client.chat.completions.create(
                    **asked, messages=messages, tool_choice=choice, parallel_tool_calls=False
                ).choices
                assert called.finish_reason == "tool_calls"
                (call,) = called.message.tool_calls
                arguments = json.loads(call.function.arguments)
                jsonschema_rs.Draft202012Validator(ARGUMENTS).validate(arguments)
                messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": "nothing"}]
            alone = [{"role": "user", "content": "A number."}]
            reply = client.chat.completions.create(
                model="tiny", messages=alone, response_format=formatted, max_tokens=99
            )
            jsonschema_rs.Draft202012Validator(schema).validate(json.loads(reply.choices[0].message.content))
        assert [each["origin"] for each in rollout.turns()] == ["start", "continued", "start"]


def test_a_session_that_is_gone_is_an_error_of_the_client_library(server: Processes) -> None:
    with TrainingServer(server.url, server.key) as sdk:
        rollout = sdk.open_rollout()
        rollout.delete()
        with (
            openai.OpenAI(base_url=rollout.base_url, api_key=server.key, max_retries=0) as client,
            pytest.raises(openai.NotFoundError, match="there is no rollout session"),
        ):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
