"""Rollout sessions, through the real orchestrator process to ranks that pretend: what is recorded, continued, kept over
restarts, bounded, and hidden from others.

The oracle of tokens is the tokenizer's own encoding of the template's text, and `token_ids` of the replies.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.train.api import rollout_files
from strata.train.api.rollout_files import RolloutFiles, SessionHead, StoredSession
from strata.train.api.routes import application
from strata.train.api.sampler_cache import SamplerCache
from strata.train.core.rollout_session import Turn
from tests.core.train.test_rollout_sessions import turn
from tests.shell.train_api.test_completions import CHAT, Site, events, site_in
from tests.shell.train_api.test_protocol import BASE, Client
from tests.support.fake_ranks import VOCABULARY

SESSIONS = "/v1/rollout_sessions"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_in(tmp_path) as found:
        yield found


async def open_session(client: Client, **body: Any) -> str:
    reply = await client.send("POST", SESSIONS, json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["base_path"])


async def ask(site: Site, path: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    body = {"model": BASE, "messages": messages, "max_tokens": 3, "return_token_ids": True, **more}
    reply = await site.alice.send("POST", f"{path}/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def read(site: Site, path: str) -> Any:
    reply = await site.alice.send("GET", path)
    assert reply.status_code == 200, reply.text
    return reply.json()


def reply_of(completion: Any, choice: int = 0) -> dict[str, Any]:
    """As the openai client sends it back: with its null fields."""
    return {**completion["choices"][choice]["message"], "refusal": None, "audio": None}


async def test_the_next_prompt_goes_on_from_the_tokens_that_were_sampled(site: Site) -> None:
    """The sampled tokens have a text that the tokenizer encodes as other tokens."""
    path = await open_session(site.alice)
    chat: list[dict[str, Any]] = [*CHAT]
    prompt = site.tokenizer.encode("user:hello|reply:")
    # One of the tokens has no text.
    first = await ask(site, path, chat, seed=-sum(prompt) % VOCABULARY + VOCABULARY - 2)
    sampled = first["choices"][0]["token_ids"]
    assert (first["prompt_token_ids"], sampled) == (prompt, [VOCABULARY - 2, VOCABULARY - 1, 0])
    assert site.tokenizer.encode(first["choices"][0]["message"]["content"]) != sampled
    chat += [reply_of(first), {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    second = await ask(site, path, chat)
    assert second["prompt_token_ids"] == [
        *first["prompt_token_ids"], *sampled, *site.tokenizer.encode("|user:more|reply:")
    ]  # fmt: skip
    found = await read(site, path)
    assert [(each["parent"], each["origin"]) for each in found["turns"]] == [(None, "start"), (0, "continued")]
    assert [each["reply"] for each in found["turns"]] == [first["id"], second["id"]]
    (branch,) = found["branches"]
    assert branch["tokens"] == second["prompt_token_ids"] + second["choices"][0]["token_ids"]
    places = [place for place, weight in enumerate(branch["weights"]) if weight]
    own = len(first["prompt_token_ids"])
    assert places == [*range(own, own + 3), *range(len(branch["tokens"]) - 3, len(branch["tokens"]))]
    assert [branch["logprobs"][place] for place in places] == [-1.0] * 6
    assert sum(branch["logprobs"]) == -6.0
    # A plain request renders the same chat from its texts, and gets other tokens.
    plain = await site.complete({"messages": chat, "max_tokens": 3, "return_token_ids": True})
    assert plain["prompt_token_ids"] != second["prompt_token_ids"]


async def test_a_changed_conversation_is_a_new_branch_that_says_why(site: Site) -> None:
    path = await open_session(site.alice)
    first = await ask(site, path, CHAT)
    later = {"role": "user", "content": "more"}
    edited = {"role": "assistant", "content": "other"}
    spaced = {**reply_of(first), "content": f"  {first['choices'][0]['message']['content']}\n"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for origin, more in (
        ("messages_changed", {"messages": [*CHAT, edited, later]}),
        ("messages_changed", {"messages": [*CHAT, reply_of(first), later], "tools": tools}),
        ("messages_changed", {"messages": [*CHAT, reply_of(first), later], "chat_template_kwargs": {"think": True}}),
        ("start", {"messages": [later]}),
        ("continued", {"messages": [*CHAT, spaced, later]}),
    ):
        await ask(site, path, **more)
        assert (await read(site, path))["turns"][-1]["origin"] == origin, more
    # This template refuses the message of a tool after such a reply: there is nothing to go on with, or to start from.
    body = {"model": BASE, "messages": [*CHAT, reply_of(first), {"role": "tool", "content": "7"}]}
    assert (await site.alice.send("POST", f"{path}/chat/completions", json=body)).status_code == 400


async def test_calls_of_tools_are_compared_by_what_they_call(site: Site) -> None:
    """By name and arguments: ids are new in each reply, and clients write the arguments as they like."""
    from strata.train.api.rollout_turns import canonical_message
    from strata.train.wire.openai import template_message

    def read_back(arguments: str, **more: Any) -> bytes:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}, **more}
        return canonical_message(template_message("m", {"role": "assistant", "content": None, "tool_calls": [call]}))

    assert read_back('{"a": 1, "b": [2]}', id="x") == read_back('{"b":[2],"a":1}', id="y", index=0)
    assert read_back('{"a": 1}') != read_back('{"a": 2}')
    assert read_back("{}") != canonical_message({"role": "assistant", "content": ""})


async def test_prompts_by_the_template_continue_only_what_their_tokens_begin_with(site: Site) -> None:
    path = await open_session(site.alice, prompts="template")
    first = await ask(site, path, CHAT)
    second = await ask(site, path, [*CHAT, reply_of(first), {"role": "user", "content": "more"}])
    content = first["choices"][0]["message"]["content"]
    assert second["prompt_token_ids"] == site.tokenizer.encode(f"user:hello|assistant:{content}|user:more|reply:")
    assert [(each["parent"], each["origin"]) for each in (await read(site, path))["turns"]] == [
        (None, "start"), (None, "tokens_changed"),
    ]  # fmt: skip


async def test_several_samples_streams_and_tokens_are_recorded(site: Site) -> None:
    path = await open_session(site.alice)
    first = await ask(site, path, CHAT, n=2)
    second = await ask(site, path, [*CHAT, reply_of(first, 1), {"role": "user", "content": "more"}])
    body = {"model": BASE, "messages": CHAT, "max_tokens": 3, "stream": True, "return_token_ids": True, "seed": 5}
    told = events(await site.alice.send("POST", f"{path}/chat/completions", json=body))
    streamed = [token for each in told for choice in each["choices"] for token in choice.get("token_ids", ())]
    (prompt,) = [each["prompt_token_ids"] for each in told if "prompt_token_ids" in each]
    # The harness may keep the tokens itself, in both protocols.
    chat = {"prompt_token_ids": [*prompt, *streamed, 9], "return_token_ids": True}
    third = await ask(site, path, [{"role": "user", "content": "not read"}], **chat)
    assert third["prompt_token_ids"] == [*prompt, *streamed, 9]
    text = {"model": BASE, "prompt": [[*prompt, *streamed, 8], [5, 6]], "max_tokens": 2, "return_token_ids": True}
    fourth = (await site.alice.send("POST", f"{path}/completions", json=text)).json()
    assert [each["prompt_token_ids"] for each in fourth["choices"]] == text["prompt"]
    found = await read(site, path)
    assert [each["parent"] for each in found["turns"]] == [None, None, 1, None, 3, 3, None]
    assert [each["choice"] for each in found["turns"]] == [0, 1, 0, 0, 0, 0, 0]
    assert [each["tokens"] for each in found["branches"]] == [
        first["prompt_token_ids"] + first["choices"][0]["token_ids"],
        second["prompt_token_ids"] + second["choices"][0]["token_ids"],
        third["prompt_token_ids"] + third["choices"][0]["token_ids"],
        *[each["prompt_token_ids"] + each["token_ids"] for each in fourth["choices"]],
    ]
    models = (await site.alice.send("GET", f"{path}/models")).json()["data"]
    assert BASE in [each["id"] for each in models]


async def test_another_api_server_finds_what_this_one_recorded(site: Site) -> None:
    path = await open_session(site.alice)
    first = await ask(site, path, CHAT)
    context = replace(site.context, ids=Ids(SystemClock()), samplers=SamplerCache())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application(context)), base_url="https://s") as http:
        other = Client(http, site.alice.key)
        found = (await other.send("GET", path)).json()
    assert [each["reply"] for each in found["turns"]] == [first["id"]]


async def test_a_session_of_another_tenant_an_expired_and_a_deleted_one_are_not_there(site: Site) -> None:
    path = await open_session(site.alice)
    await ask(site, path, CHAT)
    body = {"model": BASE, "messages": CHAT, "max_tokens": 1}
    heard = [(await client.send("GET", path)).json() for client in (site.bob, site.operator)]
    assert {each["error"]["code"] for each in heard} == {"not_found"}
    reply = await site.bob.send("POST", f"{path}/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert (await site.bob.send("DELETE", path)).status_code == 404
    assert (await site.bob.send("GET", SESSIONS)).json()["data"] == []
    (card,) = (await site.alice.send("GET", SESSIONS)).json()["data"]
    assert card["base_path"] == path
    (file,) = (site.stack.settings.data / rollout_files.FOLDER).glob("*/rollout_*")
    status = file.stat()
    os.utime(file, (status.st_atime, status.st_mtime - rollout_files.TTL_S - 1))
    assert (await site.alice.send("GET", path)).status_code == 404
    assert (await site.alice.send("POST", f"{path}/chat/completions", json=body)).status_code == 404
    assert (await site.alice.send("GET", SESSIONS)).json()["data"] == []
    assert not file.exists()
    path = await open_session(site.alice)
    assert (await site.alice.send("DELETE", path)).status_code == 204
    assert [(await site.alice.send(method, path)).status_code for method in ("GET", "DELETE")] == [404, 404]


async def test_turns_at_once_are_all_recorded(site: Site) -> None:
    path = await open_session(site.alice)
    chats = [[{"role": "user", "content": f"hello {number}"}] for number in range(20)]
    replies = await asyncio.gather(*(ask(site, path, chat) for chat in chats))
    found = await read(site, path)
    assert {each["reply"] for each in found["turns"]} == {each["id"] for each in replies}
    assert len(found["branches"]) == 20


async def test_a_session_that_is_full_refuses_a_turn_before_it_is_sampled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await open_session(site.alice)
    await ask(site, path, CHAT, n=2)
    monkeypatch.setattr(rollout_files, "MAX_TURNS", 3)
    body = {"model": BASE, "messages": CHAT, "max_tokens": 1, "n": 2}
    reply = await site.alice.send("POST", f"{path}/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        400, "the rollout session has 2 turns, and 3 is the most (open another one)",
    )  # fmt: skip
    monkeypatch.setattr(rollout_files, "MAX_SESSION_BYTES", 8000)
    reply = await site.alice.send("POST", f"{path}/chat/completions", json=body | {"n": 1, "max_tokens": 1000})
    assert (reply.status_code, "would have more than" in reply.text) == (400, True)
    monkeypatch.setattr(rollout_files, "MAX_SESSIONS", 1)
    reply = await site.alice.send("POST", SESSIONS, json={})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "precondition")
    assert (await site.bob.send("POST", SESSIONS, json={})).status_code == 200
    monkeypatch.setattr(rollout_files, "MAX_TENANT_BYTES", 100)
    reply = await site.alice.send("POST", f"{path}/chat/completions", json=body | {"n": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "precondition")
    assert len((await read(site, path))["turns"]) == 2


def written(folder: Path) -> tuple[RolloutFiles, Path]:
    files = RolloutFiles(folder / "sessions")
    files.open("key:alice", SessionHead(format=1, session_id="rollout_1", prompts="tokens", created_s=now_s()))
    for number in range(3):
        files.append("key:alice", "rollout_1", [turn(None, [number], [number + 1])], now_s())
    (file,) = (folder / "sessions").glob("*/rollout_1")
    return files, file


def now_s() -> float:
    return SystemClock().wall_s()


def added(stored: StoredSession) -> list[Turn]:
    return list(stored.turns)


def test_a_turn_that_was_cut_off_by_a_crash_is_none_and_the_next_one_replaces_it(tmp_path: Path) -> None:
    files, file = written(tmp_path)
    whole = file.read_bytes()
    turns = added(files.read("key:alice", "rollout_1", now_s()))
    last = len(whole)
    file.write_bytes(whole)
    for size in range(last - 20, last):
        file.write_bytes(whole[:size])
        assert added(files.read("key:alice", "rollout_1", now_s())) == turns[:2], size
        files.append("key:alice", "rollout_1", [turns[2]], now_s())
        assert file.read_bytes() == whole
    # A file system may have made the file longer, and not written what is in it.
    file.write_bytes(whole[: last - 20] + bytes(20))
    assert added(files.read("key:alice", "rollout_1", now_s())) == turns[:2]


def test_a_damaged_turn_is_an_error_and_no_shorter_session(tmp_path: Path) -> None:
    files, file = written(tmp_path)
    whole = file.read_bytes()
    head = 8 + int.from_bytes(whole[:4])
    for place in (20, head + 12, head + 30):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(StrataError, match="is damaged at byte") as error:
            files.read("key:alice", "rollout_1", now_s())
        assert error.value.code is Code.CORRUPT
