"""Attacks on the OpenAI-compatible endpoints: sizes, forms, templates, weights of other tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import pytest

from strata.train.api import rollout_files
from strata.train.api.template_process import (
    ChatRendering,
    GrammarCheck,
    RenderedChat,
    TemplateRenderer,
    render_once,
)
from strata.train.api.text import ModelText
from strata.train.runner.model.tiny import train_tokenizer
from tests.shell.train_api.test_completions import CHAT, Site, rendered, site_in
from tests.shell.train_api.test_protocol import BASE

Tries = Callable[[int], None]
AREA: Final = "training server: OpenAI-compatible endpoints"
TEXT: Final = "/v1/completions"
TALK: Final = "/v1/chat/completions"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_in(tmp_path) as found:
        yield found


async def refuse(site: Site, path: str, content: bytes, status: int = 400) -> str:
    headers = {"Content-Type": "application/json"}
    reply = await site.alice.send("POST", path, content=content, headers=headers)
    assert reply.status_code == status, (content[:100], reply.text[:300])
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    return str(reply.json()["error"]["message"])


@pytest.mark.attack(AREA, "numbers that are none, too large or of another kind, in every parameter")
async def test_hostile_numbers_are_refused(site: Site, tries: Tries) -> None:
    sizes = ("-1", "1e400", "NaN", "Infinity", "-Infinity", "18446744073709551616", "1" * 400, '"1"', "[]", "{}")
    names = ("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "frequency_penalty")
    for name in (*names, "presence_penalty", "repetition_penalty", "min_p"):
        for number in sizes:
            if (name, number) in (("top_k", "-1"), ("seed", "-1"), *((each, "-1") for each in PENALTIES)):
                continue
            tries(1)
            await refuse(site, TEXT, f'{{"model": "{BASE}", "prompt": "x", "{name}": {number}}}'.encode())
    for name, value in (("n", 129), ("n", 10**9), ("top_logprobs", 21), ("max_completion_tokens", 0)):
        tries(1)
        await refuse(site, TALK, json.dumps({"model": BASE, "messages": CHAT, "logprobs": True, name: value}).encode())


@pytest.mark.attack(AREA, "bodies that are too large, too deep, or have too many messages, tools, prompts or stops")
async def test_hostile_sizes_are_refused(site: Site, tries: Tries) -> None:
    def sent(**more: Any) -> bytes:
        return json.dumps({"model": BASE, **more}).encode()

    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    for path, content, status in (
        (TALK, sent(messages=CHAT * 3000), 400),
        (TALK, sent(messages=CHAT, tools=[{}] * 129), 400),
        (TALK, sent(messages=[{"role": "user", "content": deep}]), 400),
        (TALK, sent(messages=CHAT, tools=[{"function": {"parameters": deep}}]), 400),
        (TALK, b'{"model": "x", "messages": ' + b"[" * 1_000_000, 400),
        (TALK, sent(messages=[{"role": "user", "content": "x" * (5 << 20)}]), 413),
        (TALK, sent(messages=[{"role": "user", "content": "x" * (3 << 20)}]), 400),
        (TEXT, sent(prompt="x" * (3 << 20)), 400),
        (TEXT, sent(prompt=["x"] * 257), 400),
        (TEXT, sent(prompt=[1] * 40_000), 400),
        (TEXT, sent(prompt="x", stop=["a"] * 17), 400),
        (TEXT, sent(prompt="x", stop=""), 400),
        (TEXT, sent(prompt="x", stop="a" * 2000), 400),
        (TEXT, sent(prompt=[-1]), 400),
        (TEXT, sent(prompt=[2**40]), 400),
        (TEXT, sent(prompt=[[1]] * 256, n=128, max_tokens=1000), 400),
    ):
        tries(1)
        await refuse(site, path, content, status)


PENALTIES: Final = ("frequency_penalty", "presence_penalty")


@pytest.mark.attack(AREA, "biases without end, of what is no token, or no number; prompts that are no tokens")
async def test_hostile_biases_and_tokens_are_refused(site: Site, tries: Tries) -> None:
    values: tuple[Any, ...] = (101, -1e9, "1", None, [])
    biases: list[dict[str, Any]] = [{key: 1} for key in ("-1", "1e3", "9" * 5000, "", "NaN", "٣")]
    biases += [{"1": value} for value in values]
    for each in ({str(token): 1 for token in range(1025)}, *biases):
        tries(1)
        await refuse(site, TEXT, json.dumps({"model": BASE, "prompt": "x", "logit_bias": each}).encode())
    prompts: tuple[Any, ...] = ([-1], [2**31], ["1"], "1", [1] * 40_000, [[1]])
    for tokens in prompts:
        tries(1)
        body = {"model": BASE, "messages": CHAT, "prompt_token_ids": tokens}
        await refuse(site, TALK, json.dumps(body).encode())


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE_SCHEMAS: Final[dict[str, tuple[Any, bool]]] = {
    "repetition": ({"type": "string", "pattern": "^(a{1,5000}){1,5000}$"}, False),
    "groups": ({"type": "string", "pattern": "(" * 2000 + "a" + ")*" * 2000}, True),
    "states": ({"type": "string", "pattern": "(.*a){30}.{30}"}, False),
    "intersection": ({"allOf": [{"type": "string", "pattern": f".*{each}.{{20}}"} for each in "abcdefghij"]}, True),
    "product": (
        {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for b in range(8)]} for a in range(12)]},
        True,
    ),
    "deep": (nested(20), False),
    "itself": ({"$ref": "#"}, False),
    "a circle": ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, False),
    "a file": ({"$ref": "file:///etc/passwd"}, True),
    "an address": ({"$ref": "http://127.0.0.1:1/x"}, True),
    "another type": ({"type": "color"}, True),
    "another keyword": ({"type": "string", "format": "no such", "not": {"type": "string"}}, True),
    "long": ({"enum": ["x" * 1000] * 100}, True),
    "many items": ({"type": "array", "minItems": 10**9}, False),
}
"""Schemas, and whether they are refused. The others are accepted because their grammar is small; the limits of a step
hold where they are sampled."""


@pytest.mark.attack(AREA, "schemas that explode, never end, or name a file or an address")
async def test_hostile_schemas_are_refused_or_cheap_and_hold_up_no_chat(site: Site, tries: Tries) -> None:
    for name, (schema, refused) in HOSTILE_SCHEMAS.items():
        tries(2)
        formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
        # The arguments of a call are an object, whatever its schema says of texts.
        bodies = (({"response_format": formatted}, refused), ({"tools": [tool], "tool_choice": "required"}, None))
        for body, is_refused in bodies:
            sent = {"model": BASE, "messages": CHAT, "max_tokens": 1, **body}
            reply = await site.alice.send("POST", TALK, json=sent)
            assert reply.status_code in (200, 400), (name, reply.text)
            assert is_refused in (None, reply.status_code == 400), (name, reply.text)
            assert "root:" not in reply.text
    assert (await site.complete({"messages": CHAT, "max_tokens": 1}))["choices"]


ALTERNATIVES: Final = " | ".join(f'"{number:04}" start' for number in range(200_000))


@pytest.mark.attack(AREA, "a grammar that takes more than its time, and six of them")
async def test_a_grammar_ends_with_its_limit_in_a_process_of_its_own(tries: Tries) -> None:
    async with aclosing(TemplateRenderer("grammars")) as grammars:
        for _ in range(6):
            tries(1)
            assert (await grammars.render(GrammarCheck(f"start: {ALTERNATIVES}"))).error
        assert await grammars.render(GrammarCheck('start: "a"')) == RenderedChat()


@pytest.mark.attack(AREA, "ids of rollout sessions that lead elsewhere, and modes that are none")
async def test_hostile_sessions_are_not_there(site: Site, tries: Tries) -> None:
    sessions = "/v1/rollout_sessions"
    for name in ("%2e%2e", "rollout_..", "rollout_%2e%2e", "rollout_a%2fb", "rollout_" + "a" * 100, "rollout_A", "%00"):
        tries(3)
        body = {"model": BASE, "messages": CHAT}
        for method, path, sent in (("GET", "", None), ("DELETE", "", None), ("POST", "/chat/completions", body)):
            reply = await site.alice.send(method, f"{sessions}/{name}{path}", json=sent)
            assert reply.status_code in (400, 404, 405), (name, method, reply.text)
    for more in ({"prompts": "all"}, {"id": "rollout_x"}, {"prompts": 1}):
        tries(1)
        assert (await site.alice.send("POST", sessions, json=more)).status_code == 400
    assert not list((site.stack.settings.data / rollout_files.FOLDER).glob("*/*"))


@pytest.mark.attack(AREA, "templates, and names of the template engine, in a request")
async def test_a_request_brings_no_template(site: Site, tries: Tries) -> None:
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for more in (
        {"chat_template": bomb},
        {"chat_template_kwargs": {"chat_template": bomb}},
        {"chat_template_kwargs": {"messages": "x"}},
        {"chat_template_kwargs": {"__class__": "x"}},
        {"chat_template_kwargs": {"think": {"a": 1}}},
        {"chat_template_kwargs": {"think": "x" * 1000}},
        {"chat_template_kwargs": {f"v{index}": True for index in range(17)}},
    ):
        tries(1)
        await refuse(site, TALK, json.dumps({"model": BASE, "messages": CHAT, **more}).encode())
    # Data that looks like a template is text.
    tries(1)
    tokenizer = train_tokenizer(400)
    tokens = await rendered(ModelText(tokenizer), [{"role": "user", "content": escape}], None, {}, room=1000)
    assert escape in tokenizer.decode(list(tokens))


ENDLESS: Final = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE: Final = "{{ ('a' * 1500000000) | length }}"
DOUBLED: Final = (
    "{% set box = namespace(s='a' * 1000) %}{% for i in range(40) %}{% set box.s = box.s ~ box.s %}{% endfor %}"
)
LONG: Final = "{% for a in range(99999) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}"
RECURSIVE: Final = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


def chat_for(template: str) -> ChatRendering:
    return ChatRendering(template, CHAT, None, {}, most_characters=100_000, cpu_s=1)


@pytest.mark.attack(AREA, "a model whose chat template never ends, or fills the memory, and six chats with it")
async def test_a_template_ends_with_its_limit_and_holds_up_nothing_but_chats(tries: Tries) -> None:
    async with aclosing(TemplateRenderer()) as templates:
        for template in (ENDLESS, HUGE, DOUBLED, LONG, RECURSIVE, "{{ '%1999999999d' % 1 }}"):
            tries(1)
            reply = await templates.render(chat_for(template))
            assert (reply.text, reply.over_limit) == ("", True), template
        assert await templates.render(chat_for("{{ messages[0]['content'] }}")) == RenderedChat(text="hello")
        tries(6)
        attacks = [asyncio.create_task(templates.render(chat_for(ENDLESS))) for _ in range(6)]
        # The threads of the API server, which everything else needs, are free.
        assert await asyncio.gather(*(asyncio.to_thread(lambda: 1) for _ in range(64))) == [1] * 64
        assert not any(task.done() for task in attacks)
        for task in attacks:
            task.cancel()
        await asyncio.wait(attacks)


@pytest.mark.attack(AREA, "a chat template that fills the memory, by requests")
async def test_chats_of_a_model_with_such_a_template_are_refused(tmp_path: Path, tries: Tries) -> None:
    async with site_in(tmp_path) as site:
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text(HUGE)
        tries(1)
        body = json.dumps({"model": BASE, "messages": CHAT}).encode()
        reply = await site.alice.send("POST", TALK, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400
        assert "it takes more than 5 s or 512 MiB" in reply.text


@pytest.mark.attack(AREA, "a chat template that fills the memory, checked before it is served")
def test_a_template_is_tried_once_by_a_process_of_its_own(tries: Tries) -> None:
    tries(1)
    assert render_once(chat_for("{{ messages[0]['content'] }}")) == RenderedChat(text="hello")
    assert render_once(chat_for(HUGE)).over_limit
    assert render_once(chat_for("{{ raise_exception('no') }}")) == RenderedChat(error="no")


@pytest.mark.attack(AREA, "a checkpoint of another tenant, by its path")
async def test_weights_of_others_do_not_exist(site: Site, tries: Tries) -> None:
    bob = site.bob
    await bob.open()
    await bob.done(await bob.post("save_weights", {"model_id": bob.model, "seq_id": 1, "path": "secret"}))
    path = f"tinker://{bob.model}/weights/secret"
    assert (await bob.send("GET", f"/v1/models/{path}")).status_code == 200
    messages = []
    for name in (path, path.replace("secret", "never")):
        tries(3)
        assert (await site.alice.send("GET", f"/v1/models/{name}")).status_code == 404
        for target, body in ((TEXT, {"prompt": "x"}), (TALK, {"messages": CHAT})):
            refused = await refuse(site, target, json.dumps({"model": name, **body}).encode(), 404)
            messages.append(refused.replace("secret", "never"))
    assert len(set(messages)) == 1, "nothing tells what exists from what does not"
    assert path not in (await site.alice.send("GET", "/v1/models")).text
