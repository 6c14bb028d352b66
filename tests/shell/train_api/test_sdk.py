"""`strata.sdk.train`, blocking and with `await`, through the API server and the orchestrator to ranks that pretend."""

from __future__ import annotations

import array
import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from strata.base.errors import Code, StrataError
from strata.http.server import listen, url_of
from strata.sdk import future as flows
from strata.sdk.train import AsyncTrainingServer, Datum, TrainingServer
from strata.train.api.server import answer
from tests.shell.train_api.test_protocol import BASE, Server, served

T = TypeVar("T")
BATCH = [Datum([1, 2, 3], [2, 3, 4]), Datum([5, 6], [6, 7], weights=[0.5, -1.0])]


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    stop = asyncio.Event()
    with listen("127.0.0.1:0") as listener:
        serving = asyncio.create_task(answer(server.root, listener, stop))
        yield url_of(listener)
        stop.set()
        await serving


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with served(tmp_path) as found:
        yield found


def train(url: str, key: str) -> tuple[float, float, list[int], str]:
    with TrainingServer(url, key) as service:
        model = service.create_model(BASE, rank=4, seed=1)
        first = model.forward_backward(BATCH)
        step = model.optim_step(1e-3, weight_decay=0.1)
        saved = model.save("one")
        after = model.forward(BATCH)
        assert step.result()["step"] == 1
        again = service.load_model(saved.result())
        assert again.forward(BATCH).result().loss == after.result().loss
        lengths = [len(each) for each in first.result().logprobs]
        return first.result().loss, after.result().loss, lengths, model.model_id


async def test_a_blocking_client_trains(server: Server) -> None:
    async with listening(server) as url:
        first, after, lengths, model_id = await asyncio.to_thread(train, url, server.alice.key)
    assert lengths == [3, 2]
    assert first != after
    sessions = await server.alice.get("session_info")
    assert [each["finished"] for each in sessions["sessions"]] == ["success"]
    assert model_id.endswith(":train:0")


async def test_a_client_with_await_trains_to_the_same_numbers(server: Server) -> None:
    transport = httpx.ASGITransport(server.root)
    async with AsyncTrainingServer("http://server", server.bob.key, transport=transport) as service:
        model = await service.create_model(BASE, rank=4, seed=1)
        first = await model.forward_backward(BATCH)
        await model.optim_step(1e-3, weight_decay=0.1)
        saved = await model.save("one")
        after = await model.forward(BATCH)
        again = await service.load_model(await saved.result())
        twin = await (await again.forward(BATCH)).result()
        losses = [(await each.result()).loss for each in (first, after)]
        assert twin.loss == losses[1]
    async with listening(server) as url:
        assert list((await asyncio.to_thread(train, url, server.alice.key))[:2]) == losses


async def test_whoever_waits_is_told_where_it_stands_and_may_stop_waiting(server: Server) -> None:
    transport = httpx.ASGITransport(server.root)
    told: list[str] = []
    async with AsyncTrainingServer("http://server", server.alice.key, transport=transport) as service:
        model = await service.create_model(BASE, rank=4)
        slow = await model.forward_backward(BATCH, pretend_s=1.5)
        with pytest.raises(StrataError) as late:
            await slow.result(timeout_s=0.2)
        assert late.value.code is Code.DEADLINE
        await slow.result(progress=told.append)
    assert "running" in told


async def test_a_failed_operation_is_raised_in_words_and_the_next_one_goes_on(server: Server) -> None:
    transport = httpx.ASGITransport(server.root)
    async with AsyncTrainingServer("http://server", server.alice.key, transport=transport) as service:
        model = await service.create_model(BASE, rank=4)
        bad = await model.forward_backward([Datum([1, 2], [3])])
        with pytest.raises(StrataError, match=r"data\[0\].loss_fn_inputs.target_tokens: has the shape") as failed:
            await bad.result()
        assert failed.value.code is Code.INVALID
        with pytest.raises(StrataError, match="do not fit"):
            await model.forward_backward([Datum([2**40], [3])])
        assert (await (await model.optim_step(1e-3)).result())["step"] == 1
    with pytest.raises(StrataError) as refused:
        async with AsyncTrainingServer("http://server", "tml-wrong", transport=transport):
            pass
    assert refused.value.code is Code.UNAUTHENTICATED


def played(flow: flows.Flow[T], replies: list[Any]) -> tuple[T, list[flows.Step]]:
    """Drive a flow with what the network did, and note what it did."""
    steps: list[flows.Step] = []
    heard: flows.Heard = None
    left = iter(replies)
    while True:
        try:
            step = flow.send(heard)
        except StopIteration as end:
            return end.value, steps
        steps.append(step)
        heard = next(left) if isinstance(step, flows.Send) else None


def reply(status: int, **more: Any) -> httpx.Response:
    return httpx.Response(status, **more)


def test_a_server_that_is_away_or_busy_is_asked_again_with_growing_pauses() -> None:
    gone = httpx.ConnectError("refused")
    busy = reply(429, headers={"retry-after": "3"})
    answers = [gone, gone, busy, reply(503), reply(200, json={"a": 1})]
    found, steps = played(flows.call(flows.post("/x", {})), answers)
    assert found == {"a": 1}
    assert [each.seconds for each in steps if isinstance(each, flows.Pause)] == [0.1, 0.2, 3.0, 5.0]
    sent = {each.content for each in steps if isinstance(each, flows.Send)}
    assert len(sent) == 1


def test_patience_ends() -> None:
    with pytest.raises(StrataError) as given_up:
        played(flows.call(flows.post("/x", {})), [httpx.ReadError("broken")] * 1000)
    assert given_up.value.code is Code.UNAVAILABLE


def test_a_result_is_asked_for_until_it_is_there() -> None:
    waiting = reply(408, json={"type": "try_again", "queue_state_reason": "2nd in queue"})
    found, steps = played(
        flows.wait("f", "application/json", timeout_s=None, poll_s=None), [waiting, waiting, reply(200, json={})]
    )
    assert found.status_code == 200
    assert [each.reason for each in steps if isinstance(each, flows.Waiting)] == ["2nd in queue"] * 2
    assert not [each for each in steps if isinstance(each, flows.Pause)]


def test_the_sdk_imports_nothing_of_the_servers() -> None:
    code = "import sys, strata.sdk.train; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    for name in ("torch", "numpy", "google", "zmq", "fastapi", "transformers", "tinker"):
        assert f"'{name}'" not in found


def test_numbers_of_other_kinds_are_taken() -> None:
    wide: Callable[[], Any] = lambda: array.array("q", [1, 2, 3])  # noqa: E731
    assert Datum(wide(), wide()).wire() == Datum([1, 2, 3], [1, 2, 3]).wire()
