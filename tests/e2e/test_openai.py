"""The `openai` client library as it is published, against a whole server: two ranks of a tiny real model.

The oracle is the `tinker` SDK's sampling client at temperature 0, with prompts that transformers itself tokenized.
"""

from __future__ import annotations

import gc
import importlib
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_api.processes import Processes, serving
from tests.support.tinker_sessions import end_session

pytestmark = [
    # Both SDKs leave sockets to the garbage collector, whose complaint would be taken for ours.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
openai: Any = importlib.import_module("openai")
CHAT: Final[Any] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What was written down "}, {"type": "text", "text": "can be?"}],
    },
]
PLAIN: Final[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What was written down can be?"},
]
TEXT: Final = "The first step is the hardest one; the second"
TOKENS: Final = 12
WAIT_S: Final = 90.0
TOOL: Final = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make(folder, TinyModel(seed=3))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Processes]:
    with serving(tmp_path_factory.mktemp("s"), model) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Processes) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(model))


class Trained:
    """What the tinker SDK trained, saved and samples."""

    def __init__(self, service: tinker.ServiceClient) -> None:
        self.service = service
        training = service.create_lora_training_client(base_model="tiny", rank=8, seed=5)
        tokens = training.get_tokenizer().encode("What was written down can be read again.")
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        batch = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
        for _ in range(3):
            training.forward_backward(batch, "cross_entropy").result(WAIT_S)
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result(WAIT_S)
        self.path = training.save_weights_for_sampler("told").result(WAIT_S).path

    def greedy(self, prompt: list[int], path: str | None, tokens: int = TOKENS) -> types.SampledSequence:
        origin: dict[str, Any] = {"base_model": "tiny"} if path is None else {"model_path": path}
        params = types.SamplingParams(max_tokens=tokens, temperature=0.0)
        sampler = self.service.create_sampling_client(**origin)
        (one,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(WAIT_S).sequences
        return one


@pytest.fixture(scope="module")
def trained(server: Processes) -> Iterator[Trained]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        yield Trained(service)
        end_session(service)
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def shown(tokenizer: Any, sequence: types.SampledSequence) -> str:
    """What a client is to read: without the token that ended it."""
    return str(tokenizer.decode(sequence.tokens, skip_special_tokens=True))


def chat_tokens(tokenizer: Any, **more: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(PLAIN, add_generation_prompt=True, return_dict=False, **more))


@pytest.mark.parametrize("of_checkpoint", [False, True], ids=["base", "checkpoint"])
def test_a_chat_gets_the_greedy_reply_of_the_tinker_client(
    client: Any, trained: Trained, tokenizer: Any, of_checkpoint: bool
) -> None:
    path = trained.path if of_checkpoint else None
    expected = trained.greedy(chat_tokens(tokenizer), path)
    reply = client.chat.completions.create(
        model=path or "tiny", messages=CHAT, temperature=0, max_tokens=TOKENS, logprobs=True, top_logprobs=2
    )
    (choice,) = reply.choices
    assert choice.message.content == shown(tokenizer, expected)
    assert choice.finish_reason == expected.stop_reason
    assert choice.logprobs is not None
    told = choice.logprobs.content or []
    assert [each.logprob for each in told] == expected.logprobs
    # Greedy: the token that was taken is the likeliest.
    assert all(each.top_logprobs[0].logprob == each.logprob and len(each.top_logprobs) == 2 for each in told)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(chat_tokens(tokenizer))
    assert reply.usage.completion_tokens == len(expected.tokens)


def test_trained_weights_reply_other_than_the_base(client: Any, trained: Trained) -> None:
    replies = [
        client.chat.completions.create(model=name, messages=CHAT, temperature=0, max_tokens=TOKENS)
        for name in ("tiny", trained.path)
    ]
    assert replies[0].choices[0].message.content != replies[1].choices[0].message.content


def test_texts_and_tokens_are_continued_as_by_the_tinker_client(client: Any, trained: Trained, tokenizer: Any) -> None:
    tokens = tokenizer.encode(TEXT)
    expected = trained.greedy(tokens, trained.path)
    for prompt in (TEXT, tokens, [TEXT], [tokens]):
        reply = client.completions.create(model=trained.path, prompt=prompt, temperature=0, max_tokens=TOKENS)
        assert reply.choices[0].text == shown(tokenizer, expected)
    both = client.completions.create(
        model=trained.path, prompt=[TEXT, "One, two"], n=2, temperature=0, max_tokens=TOKENS
    )
    assert [each.index for each in both.choices] == [0, 1, 2, 3]
    second = shown(tokenizer, trained.greedy(tokenizer.encode("One, two"), trained.path))
    assert [each.text for each in both.choices] == [shown(tokenizer, expected)] * 2 + [second] * 2


def test_an_echo_has_the_log_probabilities_of_the_prompt(client: Any, trained: Trained, tokenizer: Any) -> None:
    tokens = tokenizer.encode(TEXT)
    sampler = trained.service.create_sampling_client(model_path=trained.path)
    expected = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result(WAIT_S)
    for most in (0, 1):
        reply = client.completions.create(
            model=trained.path, prompt=tokens, echo=True, logprobs=1, max_tokens=most, temperature=0
        )
        (choice,) = reply.choices
        assert choice.logprobs is not None
        assert choice.text.startswith(TEXT)
        assert len(choice.logprobs.token_logprobs or []) == len(tokens) + most
        assert (choice.logprobs.token_logprobs or [])[: len(tokens)] == expected
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(tokens), most)


def test_a_stream_adds_up_to_the_reply(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "seed": 7, "max_tokens": TOKENS, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, reasons, usage = ["", ""], ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [each.message.content for each in whole.choices]
    assert reasons == [each.finish_reason for each in whole.choices]
    assert usage == whole.usage
    continued: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "seed": 7, "max_tokens": TOKENS}
    streamed = "".join(each.choices[0].text for each in client.completions.create(**continued, stream=True))
    assert streamed == client.completions.create(**continued).choices[0].text


def timed(stream: Any) -> list[tuple[float, Any]]:
    return [(time.monotonic(), chunk) for chunk in stream]


def content_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_the_first_tokens_of_a_stream_come_well_before_the_last(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 300, "logprobs": True}
    whole = client.chat.completions.create(**asked).choices[0]
    began_s = time.monotonic()
    told = timed(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    chunks = [chunk for _, chunk in told]
    first_s, last_s = told[0][0] - began_s, told[-1][0] - began_s
    print(f"\n{len(chunks)} chunks, the first after {first_s * 1e3:.0f} ms, the last after {last_s * 1e3:.0f} ms")
    assert first_s < last_s / 3
    assert len(chunks) > 30
    assert content_of(chunks) == whole.message.content
    logprobs = [
        each for chunk in chunks for choice in chunk.choices if choice.logprobs for each in choice.logprobs.content
    ]
    assert [each.token for each in logprobs] == [each.token for each in whole.logprobs.content]
    assert [each.logprob for each in logprobs] == pytest.approx([each.logprob for each in whole.logprobs.content])
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == len(whole.logprobs.content)
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        whole.finish_reason
    ]


def test_a_client_that_leaves_its_stream_frees_the_sampler(client: Any, server: Processes) -> None:
    before = samples_running(server)
    stream = client.completions.create(model="tiny", prompt=TEXT, max_tokens=1900, temperature=0, stream=True)
    assert next(iter(stream)).choices[0].text
    assert samples_running(server) == before + 1
    stream.close()
    deadline_s = time.monotonic() + WAIT_S
    while samples_running(server) > before:
        assert time.monotonic() < deadline_s, "the sample goes on"
        time.sleep(0.05)


def samples_running(server: Processes) -> int:
    reply = httpx.get(f"{server.url}/api/v1/status", headers={"x-api-key": server.key}, timeout=30)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["samples_running"])


def test_characters_of_several_tokens_and_stop_strings_are_not_cut_in_a_stream(
    client: Any, trained: Trained, tokenizer: Any
) -> None:
    """A model is trained to write them. Each of these characters is several tokens."""
    text = "Grüße aus 東京 😀👍🏽! Ende gut. Ende hier."
    path = taught(trained, tokenizer, chat_tokens(tokenizer), text)
    asked: dict[str, Any] = {"model": path, "messages": CHAT, "temperature": 0, "max_tokens": 128, "stream": True}
    for stop, expected in (
        (None, text),
        (["Ende hier"], text.removesuffix("Ende hier.")),
        (["京 😀", "Ende"], "Grüße aus 東"),
        (["! End and more", "."], "Grüße aus 東京 😀👍🏽! Ende gut"),
    ):
        chunks = list(client.chat.completions.create(**asked, stop=stop))
        assert content_of(chunks) == expected
        assert len(chunks) > 5
        for chunk in chunks:
            assert "\N{REPLACEMENT CHARACTER}" not in content_of([chunk])


def taught(trained: Trained, tokenizer: Any, prompt: list[int], text: str) -> str:
    """The path of a sampler whose greedy reply to the prompt is this text."""
    training = trained.service.create_lora_training_client(base_model="tiny", rank=16, seed=1)
    reply = [*tokenizer.encode(text), tokenizer.eos_token_id]
    row = prompt + reply
    inputs: Any = {"target_tokens": row[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply)}
    batch = [types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)]
    futures = []
    for _ in range(60):
        futures.append(training.forward_backward(batch, "cross_entropy"))
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    assert futures[-1].result(WAIT_S).metrics["loss:sum"] < 1
    return str(training.save_weights_for_sampler("taught").result(WAIT_S).path)


def test_a_seed_repeats_a_sample_and_a_stop_string_ends_it_unshown(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "max_tokens": 48, "temperature": 1.0, "seed": 11}
    text = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked).choices[0].text == text
    assert client.completions.create(**{**asked, "seed": 12}).choices[0].text != text
    stop = text[10:13]
    (choice,) = client.completions.create(**asked, stop=[stop, "never seen"], logprobs=0).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []).startswith(choice.text)


def test_models_are_the_base_and_the_checkpoints(client: Any, trained: Trained) -> None:
    names = [each.id for each in client.models.list()]
    assert {"tiny", trained.path} <= set(names)
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve(trained.path).id == trained.path
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("another")
    assert refused.value.code == "model_not_found"


def test_errors_are_those_of_the_client_library(client: Any, server: Processes) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'"):
        client.chat.completions.create(model="gpt-9", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty: Expected `float` <= 2") as bad:
        client.chat.completions.create(model="tiny", messages=CHAT, frequency_penalty=2.5)
    assert bad.value.param == "frequency_penalty"
    with pytest.raises(openai.BadRequestError, match="logit_bias has tokens outside the vocabulary"):
        client.chat.completions.create(model="tiny", messages=CHAT, logit_bias={"100000": 1})
    with pytest.raises(openai.BadRequestError, match="unknown field `best`"):
        client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"best": 0.1})
    with pytest.raises(openai.BadRequestError, match="has room for"):
        client.completions.create(model="tiny", prompt=[1] * 5000)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as unknown:
            stranger.models.list()
        assert unknown.value.code == "invalid_api_key"


def test_tools_reach_the_template_and_calls_are_read_from_the_reply(
    client: Any, trained: Trained, tokenizer: Any
) -> None:
    """A model is trained to write a call, so that there is one to read."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    prompt = chat_tokens(tokenizer, tools=[TOOL])
    path = taught(trained, tokenizer, prompt, call)
    asked: dict[str, Any] = {"model": path, "messages": CHAT, "tools": [TOOL], "temperature": 0, "max_tokens": 64}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (called,) = choice.message.tool_calls or []
    assert called.type == "function"
    assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 1})
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert content_of(chunks) == ""
    (streamed,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("add", {"a": 1})
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    (plain,) = client.chat.completions.create(**asked | {"tool_choice": "none"}).choices
    assert not plain.message.tool_calls
    history = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [called.model_dump()]},
        {"role": "tool", "tool_call_id": called.id, "content": "2"},
    ]
    assert client.chat.completions.create(**asked | {"messages": history}).choices
