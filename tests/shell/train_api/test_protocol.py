"""The protocol over HTTP, through the real orchestrator process to ranks that pretend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_forward_backward_output

from strata.base.clock import SystemClock
from strata.http.root import RootApp
from strata.http.server import listen, url_of
from strata.http.zstd import zstd
from strata.train.api.server import APIServer, serve_app
from strata.train.core import ops
from strata.train.wire import native, tinker
from strata.train.wire.pb import tinker_pb2 as pb
from tests.shell.train_orchestrator.stacks import Stack, running

BASE = "pretended"


@dataclass
class Client:
    """One tenant."""

    http: httpx.AsyncClient
    key: str
    model: str = ""

    async def post(self, path: str, body: Any = None, status: int = 200, **more: Any) -> Any:
        reply = await self.send("POST", f"/api/v1/{path}", json=body or {}, **more)
        assert reply.status_code == status, reply.text
        return reply.json() if reply.content else None

    async def get(self, path: str, status: int = 200) -> Any:
        reply = await self.send("GET", f"/api/v1/{path}")
        assert reply.status_code == status, reply.text
        return reply.json()

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.http.request(method, path, headers={"X-API-Key": self.key} | more.pop("headers", {}), **more)

    async def result(self, future: Any, **headers: str) -> httpx.Response:
        while True:
            body = {"request_id": future["request_id"]}
            reply = await self.send("POST", "/api/v1/retrieve_future", json=body, headers=headers)
            if reply.status_code != 408:
                return reply

    async def done(self, future: Any) -> Any:
        reply = await self.result(future)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def open(self) -> str:
        session = (await self.post("create_session", {"tags": ["t"], "sdk_version": "1"}))["session_id"]
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
        future = await self.post("create_model", body)
        self.model = (await self.done(future))["model_id"]
        assert self.model == f"{session}:train:0"
        return str(session)

    def batch(self, seq: int, *tokens: list[int], **config: float) -> dict[str, Any]:
        data = [{"model_input": {"chunks": [{"tokens": each}]}} for each in tokens or ([1, 2, 3],)]
        given = {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": config}
        return {"forward_backward_input": given, "model_id": self.model, "seq_id": seq}

    def step(self, seq: int, rate: float = 1e-3) -> dict[str, Any]:
        return {"model_id": self.model, "seq_id": seq, "adam_params": {"learning_rate": rate}}


@dataclass
class Server:
    stack: Stack
    root: RootApp
    alice: Client
    bob: Client
    operator: Client


@asynccontextmanager
async def served(folder: Path, limits: str = "") -> AsyncIterator[Server]:
    async with (
        running(folder, server="poll_s = 0.3", limits=limits) as stack,
        APIServer(stack.settings, SystemClock()).application(stack.client) as root,
        httpx.AsyncClient(transport=httpx.ASGITransport(root), base_url="https://server", timeout=60) as http,
    ):
        operator = Client(http, (stack.settings.data / "operator.token").read_text().strip())
        alice, bob = [await new_client(operator, name) for name in ("alice", "bob")]
        yield Server(stack, root, alice, bob, operator)


@asynccontextmanager
async def listening(root: RootApp) -> AsyncIterator[str]:
    """The URL of the application on a real socket."""
    stop = asyncio.Event()
    with listen("127.0.0.1:0") as listener:
        serving = asyncio.create_task(serve_app(root, [listener], stop))
        try:
            yield url_of(listener)
        finally:
            stop.set()
            await serving


async def new_client(operator: Client, name: str) -> Client:
    made = await operator.send("POST", "/v1/keys", json={"name": name, "role": "researcher"})
    return Client(operator.http, made.json()["secret"])


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with served(tmp_path) as found:
        await found.alice.open()
        yield found


async def test_a_loop_in_json_trains(server: Server) -> None:
    alice = server.alice
    futures = [
        await alice.post("forward_backward", alice.batch(1, [1, 2, 3], [4, 5])),
        await alice.post("optim_step", alice.step(2)),
        await alice.post("forward", alice.batch(3) | {"forward_input": alice.batch(3)["forward_backward_input"]}),
    ]
    assert {each["model_id"] for each in futures} == {alice.model}
    first, step, after = [await alice.done(each) for each in futures]
    assert [len(each["logprobs"]["data"]) for each in first["loss_fn_outputs"]] == [3, 2]
    assert first["loss_fn_outputs"][0]["logprobs"]["shape"] == [3]
    assert step["metrics"]["step"] == 1
    assert after["metrics"]["loss:sum"] != first["metrics"]["loss:sum"]
    info = await alice.post("get_info", {"model_id": alice.model})
    assert (info["is_lora"], info["lora_rank"], info["model_data"]["arch"]) == (True, 4, "pretended")


async def test_a_result_comes_in_the_form_that_was_asked_for(server: Server) -> None:
    alice = server.alice
    future = await alice.post("forward_backward", alice.batch(1, [1, 2, 3], [4, 5]))
    plain = await alice.result(future)
    asked = await alice.result(future, accept=tinker.MEDIA_TYPE)
    own = await alice.result(future, accept=native.MEDIA_TYPE)
    assert [each.headers["content-type"] for each in (plain, asked, own)] == [
        "application/json",
        tinker.MEDIA_TYPE,
        native.MEDIA_TYPE,
    ]
    read = deserialize_forward_backward_output(asked.content)
    assert read.metrics == plain.json()["metrics"] == ops.decode_pass_result(own.content).metrics
    assert [each["logprobs"].data for each in read.loss_fn_outputs] == [
        each["logprobs"]["data"] for each in plain.json()["loss_fn_outputs"]
    ]
    step = await alice.post("optim_step", alice.step(2))
    assert (await alice.result(step, accept=tinker.MEDIA_TYPE)).headers["content-type"] == "application/json"


async def test_a_batch_in_protobuf_compressed_and_large_goes_through_a_file(server: Server) -> None:
    message = pb.ForwardBackwardRequest(model_id=server.alice.model, seq_id=1, loss_fn="cross_entropy")
    for _ in range(20):
        message.data.add().model_input.add().encoded_text.tokens = np.arange(3000, dtype="<i4").tobytes()
    body = zstd.compress(message.SerializeToString())
    headers = {"content-type": tinker.MEDIA_TYPE, "content-encoding": "zstd"}
    sent = await server.alice.send("POST", "/api/v1/forward_backward", content=body, headers=headers)
    outputs = (await server.alice.done(sent.json()))["loss_fn_outputs"]
    assert [len(each["logprobs"]["data"]) for each in outputs] == [3000] * 20
    assert len([each for each in server.stack.settings.payloads.rglob("*") if each.is_file()]) >= 1


async def test_whoever_waits_is_told_why(server: Server) -> None:
    alice = server.alice
    slow = await alice.post("forward_backward", alice.batch(1, pretend_s=1.0))
    held = await alice.post("optim_step", alice.step(3))
    waiting = await alice.post("retrieve_future", {"request_id": slow["request_id"]}, 408)
    assert waiting["type"] == "try_again"
    assert waiting["request_id"] == slow["request_id"]
    assert waiting["queue_state"] == "active"
    assert waiting["queue_state_reason"]
    missing = await alice.post("retrieve_future", {"request_id": held["request_id"], "wait_s": 0}, 408)
    assert "2" in missing["queue_state_reason"]
    await alice.post("optim_step", alice.step(2))
    assert (await alice.done(held))["metrics"]["step"] == 2


async def test_the_same_request_again_is_the_same_future_and_another_one_in_its_place_is_refused(
    server: Server,
) -> None:
    alice = server.alice
    first = await alice.post("forward_backward", alice.batch(1))
    assert await alice.post("forward_backward", alice.batch(1)) == first
    other = await alice.send("POST", "/api/v1/forward_backward", json=alice.batch(1, [7]))
    assert (other.status_code, other.headers["x-should-retry"]) == (422, "false")
    await alice.done(first)
    assert await alice.post("forward_backward", alice.batch(1)) == first
    assert len([each for _, each in server.stack.applied() if each == f"{alice.model}:1"]) == 1


async def test_what_cannot_be_read_fails_in_its_place_and_the_next_one_goes_on(server: Server) -> None:
    alice = server.alice
    unreadable = [
        ("forward_backward", alice.batch(1, [-5]), "data[0].model_input: token 0 is -5"),
        (
            "optim_step",
            alice.step(2) | {"adam_params": {"nesterov": True}},
            "adam_params.nesterov: this server does not know",
        ),
        ("save_weights", {"model_id": alice.model, "seq_id": 3, "path": "../../x"}, "path: '../../x' cannot be"),
        ("load_weights", {"model_id": alice.model, "seq_id": 4, "path": "/etc/passwd"}, "path: '/etc/passwd' is not"),
    ]
    futures = [await alice.post(path, body) for path, body, _ in unreadable]
    futures.append(await alice.post("optim_step", alice.step(5)))
    for (_, _, words), future in zip(unreadable, futures, strict=False):
        failed = await alice.done(future)
        assert failed["category"] == "user"
        assert failed["error"].startswith(words)
    assert (await alice.done(futures[-1]))["metrics"]["step"] == 1
    assert await alice.post(unreadable[0][0], unreadable[0][1]) == futures[0]


async def test_a_full_queue_is_told_so_and_takes_what_comes_again_later(tmp_path: Path) -> None:
    limits = "max_running_requests = 1\nmax_pending_requests = 4\nmax_pending_per_tenant = 2"
    async with served(tmp_path, limits=limits) as server:
        alice = server.alice
        await alice.open()
        slow = await alice.post("forward_backward", alice.batch(1, pretend_s=0.5))
        for seq in (2, 3):
            await alice.post("optim_step", alice.step(seq))
        full = await alice.send("POST", "/api/v1/optim_step", json=alice.step(4))
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        await alice.done(slow)
        assert (await alice.done(await _until_taken(alice, alice.step(4))))["metrics"]["step"] == 3


async def _until_taken(client: Client, step: dict[str, Any]) -> Any:
    while True:
        reply = await client.send("POST", "/api/v1/optim_step", json=step)
        if reply.status_code != 429:
            return reply.json()


async def test_a_new_key_of_the_same_name_is_the_same_tenant(server: Server) -> None:
    again = await new_client(server.operator, "alice")
    assert (await again.post("get_info", {"model_id": server.alice.model}))["model_id"] == server.alice.model


async def test_checkpoints_are_saved_listed_loaded_and_deleted(server: Server) -> None:
    alice = server.alice
    await alice.post("forward_backward", alice.batch(1))
    step = await alice.done(await alice.post("optim_step", alice.step(2)))
    body = {"model_id": alice.model, "seq_id": 3, "path": "one", "user_metadata": {"a": "b"}, "ttl_seconds": 3600}
    saved = await alice.done(await alice.post("save_weights", body))
    assert saved == {"type": "save_weights", "path": f"tinker://{alice.model}/weights/one"}
    listed = (await alice.post("list_checkpoints", {"model_id": alice.model}))["checkpoints"]
    assert [(each["checkpoint_id"], each["tinker_path"]) for each in listed] == [("weights/one", saved["path"])]
    assert listed[0]["user_metadata"] == {"a": "b"}
    assert listed[0]["expires_at"]
    assert (await alice.get(f"training_runs/{alice.model}/checkpoints"))["checkpoints"] == listed
    assert (await alice.get("checkpoints"))["checkpoints"] == listed
    run = await alice.get(f"training_runs/{alice.model}")
    assert run["last_checkpoint"] == listed[0]
    info = await alice.post("weights_info", {"tinker_path": saved["path"]})
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == (BASE, 4, True)
    assert info["lora_alpha"] == 32.0
    await alice.post("forward_backward", alice.batch(4))
    changed = await alice.done(await alice.post("optim_step", alice.step(5)))
    loading = {"model_id": alice.model, "seq_id": 6, "path": saved["path"], "optimizer": True}
    assert (await alice.done(await alice.post("load_weights", loading)))["path"] == saved["path"]
    again = await alice.done(await alice.post("optim_step", alice.step(7, 0.0)))
    assert changed["metrics"]["weight"] != step["metrics"]["weight"] == again["metrics"]["weight"]
    await alice.post("delete_checkpoint", {"model_id": alice.model, "checkpoint_id": "one"}, 204)
    await alice.post("weights_info", {"tinker_path": saved["path"]}, 404)
    gone = await alice.send("DELETE", f"/api/v1/training_runs/{alice.model}/checkpoints/weights/one")
    assert gone.status_code == 404


async def test_sessions_are_kept_alive_shown_finished_and_killed(server: Server) -> None:
    alice = server.alice
    session = alice.model.partition(":")[0]
    assert (await alice.post("session_heartbeat", {"session_id": session}))["type"] == "session_heartbeat"
    assert (await alice.get(f"sessions/{session}"))["training_run_ids"] == [alice.model]
    shown = (await alice.get(f"session_info?session_id={session}"))["sessions"]
    assert [(each["session_id"], each["models"], each["finished"]) for each in shown] == [
        (session, [alice.model], None)
    ]
    await alice.post("kill_session", {"session_id": session}, 204)
    assert (await alice.get("session_info"))["sessions"][0]["finished"] == "killed"
    refused = await alice.send("POST", "/api/v1/optim_step", json=alice.step(1))
    assert refused.status_code in (404, 410, 422)
    second = (await alice.post("create_session", {"tags": [], "sdk_version": ""}))["session_id"]
    await alice.post(f"sessions/{second}/finish", {"reason": {"type": "success"}, "detail": None}, 204)
    assert (await alice.get(f"session_info?session_id={second}"))["sessions"][0]["finished"] == "success"


async def test_who_looks_at_a_session_by_its_name_keeps_it_alive(tmp_path: Path) -> None:
    async with served(tmp_path, limits="silent_session_s = 3.0") as server:
        # Whatever else is silent was so before the last.
        for client in (server.bob, server.operator, server.alice):
            await client.post("create_session", {"tags": [], "sdk_version": "1"})
        by_bob, by_operator = [
            (await client.get("sessions"))["sessions"][0] for client in (server.bob, server.operator)
        ]
        while (await server.alice.get("session_info"))["sessions"][0]["finished"] is None:
            await server.bob.get(f"sessions/{by_bob}")
            await server.operator.get(f"session_info?session_id={by_operator}")
        for client in (server.bob, server.operator):
            assert (await client.get("session_info"))["sessions"][0]["finished"] is None


async def test_an_operation_that_was_not_begun_can_be_given_up(server: Server) -> None:
    alice = server.alice
    held = await alice.post("optim_step", alice.step(2))
    await alice.post("cancel_future", {"request_id": held["request_id"]}, 204)
    cancelled = await alice.done(held)
    assert cancelled["category"] == "user"
    assert cancelled["error"]


async def test_gradients_can_be_thrown_away(server: Server) -> None:
    alice = server.alice
    await alice.post("forward_backward", alice.batch(1))
    aborted = await alice.post("abort_gradient_epoch", {"model_id": alice.model, "seq_id": 2})
    assert "error" not in await alice.done(aborted)
    assert (await alice.done(await alice.post("optim_step", alice.step(3, 1.0))))["metrics"]["weight"] == 0.0


async def test_the_server_sleeps_and_wakes_and_says_how_it_is(server: Server) -> None:
    for path in ("/sleep", "/wake_up"):
        done = await server.operator.send("POST", path)
        assert (done.status_code, done.json()["type"]) == (200, path.strip("/").removesuffix("_up")), done.text
    health = await server.alice.send("GET", "/health")
    assert (health.status_code, health.json()["status"], health.json()["ranks"]) == (200, "healthy", [0, 1])
    models = (await server.alice.get("get_server_capabilities"))["supported_models"]
    assert [(each["model_name"], each["max_context_length"]) for each in models] == [(BASE, 4096)]


async def test_results_outlive_the_orchestrator_and_are_gone_after_their_time_but_never_unknown(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        alice, stack = server.alice, server.stack
        await alice.open()
        future = await alice.post("optim_step", alice.step(1))
        result = await alice.done(future)
        slow = await alice.post("forward_backward", alice.batch(2, pretend_s=0.2))
        await stack.orchestrator.kill()
        asking = asyncio.create_task(alice.done(future))
        waiting = asyncio.create_task(alice.done(slow))
        await stack.start_orchestrator()
        assert await asking == result
        assert "metrics" in await waiting
        await stack.orchestrator.stop()
        stack.file.write_text(stack.file.read_text() + "result_ttl_s = 0.001\n")
        await stack.start_orchestrator()
        gone = await alice.result(future)
        assert gone.status_code == 410, gone.text
