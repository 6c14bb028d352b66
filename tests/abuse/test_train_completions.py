"""Attacks on the OpenAI-compatible endpoints: sizes, forms, templates, weights of other tenants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from strata.train.api.text import ModelText
from strata.train.runner.model.tiny import train_tokenizer
from tests.shell.train_api.test_completions import CHAT, Site, site_in
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
    for name in ("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "frequency_penalty"):
        for number in sizes:
            if (name, number) in (("top_k", "-1"), ("seed", "-1")):
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
    tokens = ModelText(tokenizer).render_chat([{"role": "user", "content": escape}], None, {}, room=1000)
    assert escape in tokenizer.decode(list(tokens))


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
