"""The OpenAI-compatible endpoints, through the real orchestrator process to ranks that pretend.

Their samples are known tokens, and the tokenizer is a real one, of a model that has no weights.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from strata.base.clock import SystemClock
from strata.base.errors import StrataError
from strata.http.root import RootApp
from strata.train.api import completion_replies
from strata.train.api.context import ApiContext
from strata.train.api.routes import application
from strata.train.api.server import APIServer
from strata.train.api.template_process import TemplateRenderer
from strata.train.api.text import ModelText, TextLoader, TextStream
from strata.train.core import ops
from strata.train.core.sampling import SampledSequence, SampleParams
from strata.train.runner.model.tiny import train_tokenizer
from strata.train.status import views
from strata.train.wire.openai import ChatBody, CompletionBody
from tests.shell.train_api.test_protocol import BASE, Client, listening, new_client
from tests.shell.train_orchestrator.stacks import Stack, running
from tests.support.fake_ranks import VOCABULARY

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools in this chat') }}{% endif %}"
    "{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}{{ 'thinking' if think else 'reply' }}:{% endif %}"
)
CHAT = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
JSON = {"type": "json_object"}


@dataclass
class Site:
    stack: Stack
    context: ApiContext
    root: RootApp
    operator: Client
    alice: Client
    bob: Client
    tokenizer: Any

    async def complete(self, body: Any, client: Client | None = None, status: int = 200) -> Any:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply = await (client or self.alice).send("POST", path, json={"model": BASE, **body})
        assert reply.status_code == status, reply.text
        return reply.json()


@asynccontextmanager
async def site_in(folder: Path, limits: str = "") -> AsyncIterator[Site]:
    tokenizer = train_tokenizer(400)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    async with running(folder, server="poll_s = 0.3", limits=limits) as stack:
        server = APIServer(stack.settings, SystemClock())
        async with server.open_context(stack.client) as opened:
            context = replace(opened, text=TextLoader(str(folder / "tokenizer")))
            root = application(context)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(root), base_url="https://s", timeout=60) as http:
                operator = Client(http, (stack.settings.data / "operator.token").read_text().strip())
                alice, bob = [await new_client(operator, name) for name in ("alice", "bob")]
                yield Site(stack, context, root, operator, alice, bob, tokenizer)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_in(tmp_path) as found:
        yield found


def events(reply: httpx.Response) -> Sequence[Any]:
    """The messages of a stream; the last line says that it is complete."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def rendered(text: ModelText, chat: Any, tools: Any, variables: Any, room: int = 100) -> Sequence[int]:
    async with aclosing(TemplateRenderer()) as templates:
        return text.encode_chat(await templates.render(text.prepare_chat(chat, tools, variables, room)))


async def test_a_chat_is_rendered_by_the_template_with_tools_and_variables() -> None:
    tokenizer = train_tokenizer(400)
    tokenizer.chat_template = TEMPLATE
    text = ModelText(tokenizer)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    function = {"name": "add", "arguments": '{"a": 7}'}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    parts = [{"type": "text", "text": text} for text in "ab"]
    for body, expected in (
        ({}, "user:hello|reply:"),
        ({"messages": [{"role": "user", "content": parts}]}, "user:ab|reply:"),
        ({"chat_template_kwargs": {"think": True}}, "user:hello|thinking:"),
        ({"tools": tools}, "[add]user:hello|reply:"),
        ({"tools": tools, "tool_choice": "none"}, "user:hello|reply:"),
        ({"messages": [*CHAT, called]}, "user:hello|assistant:7|reply:"),
    ):
        read = msgspec.convert({"model": BASE, "messages": CHAT, **body}, ChatBody)
        variables = read.chat_template_kwargs or {}
        tokens = await rendered(text, read.template_messages(), read.offered_tools, variables)
        assert list(tokens) == tokenizer.encode(expected), expected


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (TEMPLATE, "system"),
        ({"default": TEMPLATE, "other": "developer"}, "system"),
        (TEMPLATE + "{# a developer is known here #}", "developer"),
    ],
)
async def test_a_developer_is_the_system_to_a_template_that_does_not_know_the_role(template: Any, role: str) -> None:
    tokenizer = train_tokenizer(400)
    tokenizer.chat_template = template
    chat = [{"role": "developer", "content": "be brief"}, *CHAT]
    tokens = await rendered(ModelText(tokenizer), chat, None, {})
    assert tokenizer.decode(list(tokens)) == f"{role}:be brief|user:hello|reply:"


class CountedTokenizer:
    """A real tokenizer that counts how often it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._tokenizer(*arguments, **named)

    def decode(self, *arguments: Any, **named: Any) -> Any:
        self.decoded += 1
        return self._tokenizer.decode(*arguments, **named)


def test_a_sample_is_decoded_as_often_with_many_stops_and_tokens_as_with_few() -> None:
    tokenizer = CountedTokenizer(train_tokenizer(400))
    text = ModelText(tokenizer)
    counts: set[int] = set()
    for length, stops in ((2, 1), (200, 16)):
        tokens = np.arange(5, 5 + length, dtype="<i4").tobytes()
        sequence = SampledSequence(tokens, np.zeros(length, "<f4").tobytes(), "stop")
        tokenizer.decoded = 0
        sampled = text.sampled(sequence, ["never sampled"] * stops, [1, 2], logprobs=False)
        counts.add(tokenizer.decoded)
        assert (len(sampled.token_ids), sampled.tokens) == (length, ())
    assert len(counts) == 1


async def test_samples_have_the_texts_of_their_tokens(site: Site) -> None:
    told = await site.complete({"prompt": [1, 2], "max_tokens": 4, "n": 2, "logprobs": 0, "seed": 8})
    expected = [site.tokenizer.decode(tokens) for tokens in ([11, 12, 13, 14], [12, 13, 14, 15])]
    assert [each["text"] for each in told["choices"]] == expected
    assert [each["index"] for each in told["choices"]] == [0, 1]
    assert told["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    assert told["choices"][0]["logprobs"]["token_logprobs"] == [-1.0] * 4
    assert "".join(told["choices"][0]["logprobs"]["tokens"]) == expected[0]


async def test_a_stream_has_an_event_for_each_sample_and_the_usage_at_its_end(site: Site) -> None:
    body = {"model": BASE, "messages": CHAT, "n": 2, "max_tokens": 3, "stream": True}
    reply = await site.alice.send(
        "POST", "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
    )
    told = events(reply)
    first = sum(site.tokenizer.encode("user:hello|reply:")) % VOCABULARY
    assert [each["choices"][0]["delta"].get("content") for each in told[:-1:2]] == [
        site.tokenizer.decode(range(first + index, first + index + 3)) for index in (0, 1)
    ]
    assert [each["choices"][0]["finish_reason"] for each in told[1:-1:2]] == ["length", "length"]
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == 6
    texts = {"model": BASE, "prompt": [[1], [2, 3]], "max_tokens": 2, "stream": True}
    told = events(await site.alice.send("POST", "/v1/completions", json=texts))
    assert sorted(each["choices"][0]["index"] for each in told) == [0, 1]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_texts_are_decoded_beside_the_event_loop(
    site: Site, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    threads: set[threading.Thread] = set()
    decode = PreTrainedTokenizerFast.decode

    def record(tokenizer: Any, *arguments: Any, **named: Any) -> Any:
        threads.add(threading.current_thread())
        return decode(tokenizer, *arguments, **named)

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", record)
    for body in ({"prompt": [[1], [2]], "echo": True, "logprobs": 1}, {"messages": CHAT, "logprobs": True}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        sent = {"model": BASE, "max_tokens": 3, "stream": stream, **body}
        assert (await site.alice.send("POST", path, json=sent)).status_code == 200
    assert threads
    assert threading.current_thread() not in threads


async def test_an_echo_without_samples_counts_no_sampled_tokens(site: Site) -> None:
    body = {"prompt": [[31, 32], [33]], "max_tokens": 0, "echo": True, "logprobs": 0, "n": 2}
    told = await site.complete(body)
    assert [each["text"] for each in told["choices"]] == [
        site.tokenizer.decode(tokens) for tokens in ([31, 32], [31, 32], [33], [33])
    ]
    assert [len(each["logprobs"]["tokens"]) for each in told["choices"]] == [2, 2, 1, 1]
    assert {each["finish_reason"] for each in told["choices"]} == {"length"}
    expected = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert told["usage"] == expected
    streamed = {"model": BASE, **body, "stream": True, "stream_options": {"include_usage": True}}
    assert events(await site.alice.send("POST", "/v1/completions", json=streamed))[-1]["usage"] == expected


async def test_a_sampler_that_could_not_be_opened_is_replaced_by_the_next_request(site: Site) -> None:
    body = {"model": BASE, "prompt": [1], "max_tokens": 1}
    assert (await site.operator.send("POST", "/sleep")).status_code == 200
    waiting = asyncio.create_task(site.alice.send("POST", "/v1/completions", json=body))
    async with asyncio.timeout(30.0):
        while not await opening_failed(site):
            await asyncio.sleep(0.05)
    assert (await site.operator.send("POST", "/wake_up")).status_code == 200
    # 200 if the request opened its second sampler after the ranks woke.
    assert (await waiting).status_code in (200, 503), waiting.result().text
    for _ in range(2):
        assert len((await site.complete(body))["choices"]) == 1


async def opening_failed(site: Site) -> bool:
    """Whether the first sampler of alice was refused, because the ranks sleep."""
    for session in (await site.alice.get("sessions"))["sessions"]:
        output = await site.stack.watch(f"{session}:sample:0:open", tenant="key:alice")
        if isinstance(output, views.FutureResult):
            assert isinstance(output.result, ops.Failed)
            return True
    return False


async def test_one_session_and_one_sampler_serve_all_requests_for_a_model(site: Site) -> None:
    for _ in range(3):
        await site.complete({"prompt": [1], "max_tokens": 1})
    await asyncio.gather(*(site.complete({"prompt": [1], "max_tokens": 1}) for _ in range(5)))
    (session,) = (await site.alice.get("sessions"))["sessions"]
    assert (await site.alice.get(f"sessions/{session}"))["sampler_ids"] == [f"{session}:sample:0"]
    assert (await site.bob.get("sessions"))["sessions"] == []


async def test_a_sampler_of_a_client_is_a_model_of_its_tenant(site: Site) -> None:
    session = (await site.alice.post("create_session", {"tags": [], "sdk_version": "test"}))["session_id"]
    opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await site.alice.post("create_sampling_session", opened))["sampling_session_id"]
    own = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "sampling_params": {"max_tokens": 3}}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    first = await site.alice.post("asample", own | {"prompt": prompt})
    for _ in range(2):
        reply = await site.complete({"model": sampler, "prompt": [1, 2], "max_tokens": 3})
        assert reply["usage"]["completion_tokens"] == 3
    assert await site.alice.post("asample", own | {"prompt": prompt}) == first, "numbers of the client's own are free"
    for unknown in (sampler, f"{session}:sample:7"):
        refused = await site.complete({"model": unknown, "prompt": [1], "max_tokens": 3}, site.bob, 404)
        assert "error" in refused


async def test_a_session_that_was_ended_is_replaced(site: Site) -> None:
    await site.complete({"prompt": [1], "max_tokens": 1})
    (session,) = (await site.alice.get("sessions"))["sessions"]
    await site.alice.post("kill_session", {"session_id": session}, status=204)
    await site.complete({"prompt": [1], "max_tokens": 1})
    assert len((await site.alice.get("sessions"))["sessions"]) == 2


async def test_a_checkpoint_that_was_saved_again_is_sampled_anew(site: Site) -> None:
    alice = site.alice
    await alice.open()
    path = f"tinker://{alice.model}/sampler_weights/kept"
    body = {"model": path, "prompt": [1], "max_tokens": 1, "logprobs": 0}
    logprobs = []
    for seq in (1, 4):
        await alice.post("forward_backward", alice.batch(seq))
        await alice.post("optim_step", alice.step(seq + 1, 1.0))
        save = {"model_id": alice.model, "seq_id": seq + 2, "path": "kept", "overwrite": True}
        await alice.done(await alice.post("save_weights_for_sampler", save))
        logprobs.append((await site.complete(body))["choices"][0]["logprobs"]["token_logprobs"][0])
    assert logprobs[0] != logprobs[1]
    cards = (await alice.send("GET", "/v1/models")).json()["data"]
    assert [each["id"] for each in cards] == [BASE, path]
    assert (await alice.send("GET", f"/v1/models/{path}")).json()["owned_by"] == "alice"
    assert [each["id"] for each in (await site.bob.send("GET", "/v1/models")).json()["data"]] == [BASE]
    refused = await site.complete(body, site.bob, status=404)
    never = await site.complete(body | {"model": f"tinker://{alice.model}/sampler_weights/never"}, site.bob, status=404)
    assert refused["error"]["code"] == never["error"]["code"] == "model_not_found"


LONG = {"model": BASE, "prompt": [1], "max_tokens": 3000}
SLOW = "[sampling]\nslice_steps = 1\n"
"""One token of a sample for each slice, so that a long one does not end while a test looks."""


async def read_events(client: httpx.AsyncClient, key: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    sent = {"model": BASE, "stream": True, **body}
    async with client.stream("POST", path, json=sent, headers={"x-api-key": key}) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


async def test_the_tokens_of_a_stream_come_while_it_is_sampled(tmp_path: Path) -> None:
    """Of several prompts and samples at once, with their log probabilities; what comes adds up to the plain reply."""
    body = {"prompt": [[1], [40, 2]], "n": 2, "max_tokens": 40, "seed": 5, "logprobs": 0}
    async with site_in(tmp_path, SLOW) as site, listening(site.root) as url:
        whole = await site.complete(body)
        texts, logprobs, offsets, early = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)], 0  # type: ignore[var-annotated]
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            async for event in read_events(http, site.alice.key, body):
                (choice,) = event["choices"]
                index = choice["index"]
                early += bool(choice["text"]) and choice["finish_reason"] is None
                texts[index] += choice["text"]
                logprobs[index] += choice["logprobs"]["token_logprobs"]
                offsets[index] += choice["logprobs"]["text_offset"]
        assert early > 20
        assert texts == [each["text"] for each in whole["choices"]]
        assert logprobs == [each["logprobs"]["token_logprobs"] for each in whole["choices"]]
        assert offsets == [each["logprobs"]["text_offset"] for each in whole["choices"]]


async def test_a_stream_echoes_its_prompt_once_before_its_tokens(tmp_path: Path) -> None:
    async with (
        site_in(tmp_path, SLOW) as site,
        listening(site.root) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for body in ({"logprobs": 0}, {}):
            asked = {"prompt": "hello", "echo": True, "max_tokens": 30, **body}
            whole = (await site.complete(asked))["choices"][0]["text"]
            told = [each async for each in read_events(http, site.alice.key, asked)]
            assert "".join(each["choices"][0]["text"] for each in told) == whole
            assert (len(told) > 5) is not bool(body), "log probabilities of a prompt come with the result"


@pytest.mark.parametrize("victim", ["orchestrator", "ranks"])
async def test_a_stream_survives_the_death_of_the_orchestrator_and_of_the_ranks(tmp_path: Path, victim: str) -> None:
    body = {"messages": CHAT, "max_tokens": 400}
    async with site_in(tmp_path, SLOW) as site, listening(site.root) as url:
        text, seen = "", 0
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            async for event in read_events(http, site.alice.key, body):
                text += event["choices"][0]["delta"].get("content") or ""
                seen += 1
                if seen == 3 and victim == "orchestrator":
                    await site.stack.orchestrator.kill()
                    await site.stack.start_orchestrator()
                if seen == 3 and victim == "ranks":
                    await site.stack.ranks.kill()
                    await site.stack.start_ranks()
        # What was sampled while no orchestrator ran comes with the result, in one event.
        assert seen > 3
        assert text == (await site.complete(body))["choices"][0]["message"]["content"]


def test_a_sample_that_was_drawn_again_in_another_way_ends_its_stream(site_text: ModelText) -> None:
    sent = completion_replies._SentChoice(TextStream(site_text, (), (), tools=False))
    sent.tokens += np.asarray([7, 8], "<i4").tobytes()
    same, other = [SampledSequence(np.asarray(each, "<i4").tobytes(), b"", "stop") for each in ([7, 8, 9], [7, 9])]
    sent.check_same(same)
    with pytest.raises(StrataError, match="drawn again"):
        sent.check_same(other)


@pytest.fixture
def site_text() -> ModelText:
    return ModelText(train_tokenizer(400))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_client_that_goes_away_cancels_its_sample(tmp_path: Path, *, stream: bool) -> None:
    async with site_in(tmp_path, SLOW) as site, listening(site.root) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            client = Client(http, site.alice.key)
            asking = asyncio.create_task(client.send("POST", "/v1/completions", json=LONG | {"stream": stream}))
            await sampling(site)
            assert not asking.done()
            # httpx closes the socket of a request that is cancelled.
            asking.cancel()
            await asyncio.wait([asking])
        await check_cancelled(site)


async def test_a_client_that_goes_away_before_its_stream_begins_cancels_its_sample(tmp_path: Path) -> None:
    async with site_in(tmp_path, SLOW) as site:
        content = json.dumps(LONG | {"stream": True}).encode()
        headers = {"x-api-key": site.alice.key, "content-type": "application/json", "content-length": str(len(content))}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("s", 443),
        }
        received = [{"type": "http.request", "body": content, "more_body": False}]
        sending = asyncio.Event()

        async def receive() -> Any:
            if received:
                return received.pop()
            await sending.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """The head of the reply does not leave: the client reads nothing."""
            assert message["type"] == "http.response.start"
            sending.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(30.0):
            await site.root(scope, receive, send)
        await check_cancelled(site)


async def sampling(site: Site) -> None:
    """Return when a sample runs."""
    async with asyncio.timeout(30.0):
        while not (await site.alice.get("status"))["samples_running"]:
            await asyncio.sleep(0.05)


async def check_cancelled(site: Site) -> None:
    """The only sample of alice ends, and because it was cancelled."""
    (session,) = (await site.alice.get("sessions"))["sessions"]
    result = await site.stack.result(f"{session}:sample:0:0", "key:alice")
    assert isinstance(result, ops.Failed)
    assert result.category == "cancelled"


async def test_a_completion_that_waits_holds_its_packed_prompt_and_not_its_body(tmp_path: Path) -> None:
    prompt = [17] * 500
    async with site_in(tmp_path, SLOW) as site:
        waiting = asyncio.create_task(site.complete(LONG | {"prompt": prompt}))
        await sampling(site)
        async with asyncio.timeout(30.0):
            while site.context.bodies.held != 4 * len(prompt):
                await asyncio.sleep(0.05)
        # Those of requests that have ended may be left in cycles.
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is CompletionBody]
        waiting.cancel()
        await asyncio.wait([waiting])
        assert site.context.bodies.held == 0


async def test_a_full_queue_is_a_rate_limit(tmp_path: Path) -> None:
    limits = "[sampling]\nmax_pending_requests = 2\nmax_running_requests = 1\nslice_steps = 1\n"
    async with site_in(tmp_path, limits) as site:
        refused = await site.complete({"prompt": [[1]] * 9, "max_tokens": 3}, status=429)
        assert refused["error"]["type"] == "rate_limit_error"
        # Nothing of it is left in the queue.
        assert len((await site.complete({"prompt": [1], "max_tokens": 3}))["choices"]) == 1


async def test_what_cannot_be_done_is_refused_with_the_reason(site: Site) -> None:
    for body, status, words in (
        ({"model": "gpt-9", "prompt": "x"}, 404, "there is no model 'gpt-9'"),
        ({"model": "tinker://x/weights/y", "prompt": "x"}, 404, "there is no"),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix: text is continued at its end only"),
        ({"prompt": "x", "best_of": 2}, 400, "best_of"),
        ({"prompt": "x", "logit_bias": {"word": 5}}, 400, "logit_bias: has keys that are no tokens"),
        ({"prompt": "x", "frequency_penalty": 3}, 400, "frequency_penalty: Expected `float` <= 2"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "grammar": "root"}, 400, "unknown field `grammar`"),
        ({"prompt": ""}, 400, "has no tokens"),
        ({"prompt": []}, 400, "prompt: is to be a text"),
        ({"prompt": ["a", [1]]}, 400, "prompt: is to be a text"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "is for streams only"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "hacker", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "no tools in this chat"),
        ({"messages": CHAT, "response_format": {"type": "json_schema"}}, 400, "json_schema: is missing"),
        ({"messages": CHAT, "response_format": JSON, "tools": [TOOL]}, 400, "on a reply that may call a tool"),
        ({"messages": CHAT, "tool_choice": "required"}, 400, "tool_choice: names no tool of the request"),
        ({"messages": CHAT, "tool_choice": NAMED | {"function": {"name": "y"}}, "tools": [TOOL]}, 400, "names no tool"),
        ({"messages": CHAT, "tool_choice": "required", "tools": [{}]}, 400, "tools[0]: needs a function"),
        ({"messages": CHAT, "parallel_tool_calls": False, "tools": [TOOL]}, 400, "parallel_tool_calls"),
        ({"messages": CHAT, "prompt_token_ids": []}, 400, "prompt_token_ids"),
        ({"messages": CHAT, "top_logprobs": 3}, 400, "needs logprobs"),
        ({"messages": CHAT, "n": 129}, 400, "n: Expected `int` <= 128"),
        ({"messages": CHAT, "n": 128, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20}, 400, "could have"),
    ):
        refused = await site.complete({**body}, status=status)
        assert words in refused["error"]["message"], refused
        assert refused["error"].keys() == {"message", "type", "param", "code"}


async def test_what_shapes_a_sample_is_journaled_with_it_and_a_plain_sample_is_as_before(site: Site) -> None:
    """What 0.2.0 can read stays readable to it where nothing of this is used."""
    plain = msgspec.convert({"model": BASE, "messages": CHAT}, ChatBody).params(5)
    names = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "grammar")
    assert not msgspec.to_builtins(plain).keys() & set(names)
    shaped = {"presence_penalty": 1, "logit_bias": {"7": -5}, "min_p": 0.1}
    for body in (shaped, {"response_format": JSON}, {"tools": [TOOL], "tool_choice": NAMED}):
        await site.complete({"messages": CHAT, "max_tokens": 1, **body})
    read = msgspec.convert({"model": BASE, "messages": CHAT, **shaped}, ChatBody).params(5)
    encoded = msgspec.msgpack.encode(read)
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(encoded, type=SampleParams)) == encoded
    assert (read.presence_penalty, read.logit_bias, read.min_p, read.shapes_logits) == (1.0, ((7, -5.0),), 0.1, True)


async def test_harmless_parameters_are_ignored(site: Site) -> None:
    body = {
        "messages": CHAT,
        "max_completion_tokens": 2,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "verbosity": "medium",
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "tools": None,
        "stop": None,
    }
    assert (await site.complete(body))["choices"][0]["finish_reason"] == "length"
