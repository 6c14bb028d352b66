"""Bodies that are too large, too deep, too slow or no bodies at all; and an orchestrator that is away."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.base.clock import SystemClock
from strata.http.body import BodyPace
from strata.http.server import listen, url_of
from strata.http.zstd import zstd
from strata.identity.roles import Role
from strata.train.api.routes import ROUTES
from strata.train.api.server import APIServer
from strata.train.core import ops
from strata.train.settings import check_exposure
from strata.train.wire import native, tinker
from tests.shell.train_api.conftest import Reached, keys_in, settings_in

LIMIT = 1 << 20


@pytest.mark.parametrize("path", ["/api/v1/forward_backward", "/api/v1/optim_step"])
async def test_a_body_beyond_the_limit_is_refused(alone: Reached, path: str) -> None:
    declared = await alone.ask("POST", path, content=b"x" * (LIMIT + 1))

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(LIMIT // 1000 + 2):
            yield b"x" * 1000

    undeclared = await alone.ask("POST", path, content=parts())
    assert [declared.status_code, undeclared.status_code] == [413, 413]


async def test_a_bomb_is_not_unpacked(alone: Reached) -> None:
    bomb = zstd.compress(b"\0" * (64 << 20))
    assert len(bomb) < 10_000
    headers = {"Content-Encoding": "zstd", "Content-Type": tinker.MEDIA_TYPE}
    reply = await alone.ask("POST", "/api/v1/forward_backward", content=bomb, headers=headers)
    assert reply.status_code == 400
    assert "unpacked" in reply.json()["error"]["message"]
    other = await alone.ask("POST", "/api/v1/optim_step", content=b"x", headers={"Content-Encoding": "br"})
    assert other.status_code == 415


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 1000,
        b"\xff\xfe",
        b'{"session_id": "a\\u0000b"}',
        b'{"session_id": 1e400}',
        b"NaN",
        b"{" + b'"a":1,' * 3000 + b'"b":2}',
        b'{"session_id": "' + b"x" * 300 + b'"}',
        b"3",
    ],
)
async def test_broken_json_is_refused_in_words(alone: Reached, content: bytes) -> None:
    for route in ROUTES:
        if route.method == "POST" and not route.access.public:
            path = route.path.replace("{session_id}", "s").replace("{id}", "k")
            reply = await alone.ask("POST", path, Role.ADMIN, content=content)
            assert reply.status_code < 500 or reply.json()["error"]["code"] in ("unavailable", "unsupported"), path


async def test_an_unknown_parameter_is_refused_with_its_place(alone: Reached) -> None:
    model = {"session_id": "s", "model_seq_id": 0, "base_model": "m", "lora_config": {"rank": 4, "dropout": 0.1}}
    reply = await alone.ask("POST", "/api/v1/create_model", json=model)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("lora_config.dropout: this server does not know the field")


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
async def test_a_number_that_cannot_be_written_down_is_refused_with_its_place(alone: Reached, number: int) -> None:
    model: dict[str, Any] = {"session_id": "s", "model_seq_id": 0, "base_model": "m"}
    for path, body, place in (
        ("create_model", model | {"lora_config": {"rank": 4, "seed": number}}, "lora_config.seed"),
        ("create_model", model | {"schedule": {"total_steps": number}}, "schedule.total_steps"),
        ("create_session", {"user_metadata": {"a": [1, {"b": number}]}}, "user_metadata.a[1].b"),
    ):
        reply = await alone.ask("POST", f"/api/v1/{path}", content=json.dumps(body).encode())
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(f"{place}: ")


async def test_metadata_that_would_fill_the_memory_is_refused(alone: Reached) -> None:
    reply = await alone.ask("POST", "/api/v1/create_session", json={"user_metadata": {"a": "b" * 5000}})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "user_metadata: it has 5008 bytes as JSON, at most 4096 are kept"


async def test_a_media_type_that_no_batch_has_is_refused(alone: Reached) -> None:
    reply = await alone.ask("POST", "/api/v1/forward_backward", content=b"x", headers={"Content-Type": "text/csv"})
    assert reply.status_code == 415


async def test_without_the_orchestrator_an_operation_is_to_be_repeated_and_a_result_to_be_waited_for(
    alone: Reached,
) -> None:
    step = await alone.ask("POST", "/api/v1/optim_step", json={"model_id": "m", "seq_id": 1})
    assert (step.status_code, step.json()["error"]["code"]) == (503, "unavailable")
    assert "retry-after" in step.headers
    waited = await alone.ask("POST", "/api/v1/retrieve_future", json={"request_id": "f"})
    assert waited.status_code == 408
    assert waited.json() == {
        "type": "try_again",
        "request_id": "f",
        "queue_state": "paused_capacity",
        "queue_state_reason": waited.json()["queue_state_reason"],
    }
    assert "orchestrator" in waited.json()["queue_state_reason"]


async def test_the_document_describes_every_endpoint(alone: Reached) -> None:
    document = (await alone.ask("GET", "/openapi.json", Role.VIEWER)).json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(each.method, each.path.replace(":path", "")) for each in ROUTES}
    text = json.dumps(document)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= document["components"]["schemas"].keys()


async def test_keys_are_made_listed_and_ended(alone: Reached) -> None:
    made = (await alone.ask("POST", "/v1/keys", Role.ADMIN, json={"name": "alice", "role": "viewer"})).json()
    headers = {"X-API-Key": made["secret"]}
    assert made["secret"].startswith("tml-")
    assert (await alone.http.get("/openapi.json", headers=headers)).status_code == 200
    listed = (await alone.ask("GET", "/v1/keys", Role.ADMIN)).text
    assert made["key"]["id"] in listed
    assert made["secret"].rpartition("-")[2] not in listed
    assert (await alone.ask("POST", f"/v1/key/{made['key']['id']}/revoke", Role.ADMIN)).status_code == 204
    assert (await alone.http.get("/openapi.json", headers=headers)).status_code == 401


async def test_the_first_key_is_for_the_owner_of_the_folder_alone(folder: Path) -> None:
    settings = settings_in(folder)
    server = APIServer(settings, SystemClock())
    async with server.application(None):  # type: ignore[arg-type]
        pass
    for name in ("api.key", "operator.token"):
        assert (settings.data / name).stat().st_mode & 0o777 == 0o600
    first = (settings.data / "api.key").read_text()
    async with server.application(None):  # type: ignore[arg-type]
        pass
    assert (settings.data / "api.key").read_text() == first


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"])
def test_loopback_is_taken(host: str) -> None:
    check_exposure(host)


async def test_slow_heads_and_slow_bodies_are_cut_off(folder: Path) -> None:
    settings = settings_in(folder)
    key = (await keys_in(settings))[Role.RESEARCHER]
    stop = asyncio.Event()
    with listen("127.0.0.1:0") as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        server = APIServer(settings, SystemClock(), header_s=0.2, pace=BodyPace(grace_s=0.2))
        serving = asyncio.create_task(server.serve([listener], stop, lambda: None))
        head = f"POST /api/v1/optim_step HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nContent-Length: 50\r\n"
        head += "Content-Type: application/json\r\n\r\n{"
        slow_body = await asyncio.to_thread(_exchange, port, head.encode())
        assert slow_body.startswith(b"HTTP/1.1 408 ")
        assert await asyncio.to_thread(_exchange, port, b"POST /api/v1/optim_step HT") == b""
        stop.set()
        await serving


def _exchange(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        return connection.recv(4096)


async def test_a_batch_in_our_own_form_is_checked_like_every_other(alone: Reached) -> None:
    tokens = np.array([-1], "<i4").tobytes()
    content = native.encode(
        native.PassBody(model_id="m", seq_id=1, loss="cross_entropy", datums=[ops.Datum(tokens, {})])
    )
    found = native.read_pass(content)
    assert isinstance(found, ops.MalformedOperation)
    assert found.message.startswith("data[0].model_input: token 0 is -1")
    headers = {"Content-Type": native.MEDIA_TYPE}
    reply = await alone.ask("POST", "/api/v1/forward_backward", content=content, headers=headers)
    assert reply.status_code == 503
