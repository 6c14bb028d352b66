"""One question after all samples of a sampler: `retrieve_futures`, asked by hand and by the `tinker` SDK as it is."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tinker
from starlette.types import Receive, Scope, Send
from tinker import types

from strata.http.server import listen, url_of
from strata.train.api.server import serve_app
from strata.train.status import queries, views
from tests.shell.train_api.test_protocol import BASE, Client, Server, served
from tests.shell.train_api.test_sampling import sampler_of, wanted
from tests.support.tinker_sessions import end_session

pytestmark = [
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]
MANY = 64
PATIENCE_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with served(tmp_path_factory.mktemp("t")) as found:
        yield found
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


async def sleep(server: Server) -> None:
    """From now on nothing is sampled, and so nothing ends before it is wanted."""
    assert (await server.operator.send("POST", "/sleep")).status_code == 200


async def wake(server: Server) -> None:
    assert (await server.operator.send("POST", "/wake_up")).status_code == 200


async def poll(client: Client, sampler: str, cursor: int = 0, status: int = 200, **more: Any) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": more.pop("copy", 0)}
    return await client.post("retrieve_futures", {"target": target, "prev_cursor": cursor, **more}, status=status)


def told(reply: Any) -> dict[str, str]:
    return {each["request_id"]: each["state"] for each in reply["completions"]}


async def test_one_question_is_answered_when_any_sample_ends_and_never_twice_for_the_same(server: Server) -> None:
    alice = server.alice
    sampler = await sampler_of(alice, await alice.open())
    await sleep(server)
    futures = [await alice.post("asample", wanted(sampler, seq)) for seq in range(3)]
    other = await alice.post("asample", wanted(sampler, 5_000_000_000))
    await alice.post("cancel_future", {"request_id": futures[1]["request_id"]}, status=204)
    first = await poll(alice, sampler)
    assert told(first) == {futures[1]["request_id"]: "failed"}
    assert "response_payload_uncompressed_size" not in first["completions"][0]
    nothing = await poll(alice, sampler, first["cursor"])
    assert nothing == {"completions": [], "cursor": first["cursor"]}
    # Longer than this asker has patience: it is answered because something ends, or never.
    question = queries.WatchSamples(sampler, 0, first["cursor"], 120.0)
    waiting = asyncio.create_task(server.stack.look(views.SamplesEnded, question, "key:alice"))
    await wake(server)
    rest = dict.fromkeys((futures[0]["request_id"], futures[2]["request_id"]), "finished")
    assert {each.future_id for each in (await waiting).ended} <= rest.keys()
    found = told(reply := await poll(alice, sampler, first["cursor"]))
    while found.keys() != rest.keys():
        found |= told(reply := await poll(alice, sampler, reply["cursor"]))
    assert found == rest
    assert all(each["response_payload_uncompressed_size"] > 0 for each in reply["completions"])
    assert told(await poll(alice, sampler)).keys() == {each["request_id"] for each in futures}
    mine = await poll(alice, sampler, copy=5)
    while not mine["completions"]:
        mine = await poll(alice, sampler, copy=5)
    assert told(mine) == {other["request_id"]: "finished"}


async def test_a_client_that_only_reports_is_answered_at_once_and_may_report_anything(server: Server) -> None:
    alice = server.alice
    sampler = await sampler_of(alice, await alice.open())
    future = await alice.post("asample", wanted(sampler))
    await alice.done(future)
    cursor = (await poll(alice, sampler))["cursor"]
    reported = [future["request_id"], "never:sample:0:1", "x"]
    assert not (await poll(alice, sampler, cursor, retrieved_request_ids=reported))["completions"]
    assert (await alice.done(future))["sequences"], "a result is kept for as long as was promised"
    # Longer than this asker has patience.
    question = queries.WatchSamples(sampler, 0, cursor, 120.0, linger=False)
    assert not (await server.stack.look(views.SamplesEnded, question, "key:alice")).ended


async def test_samplers_of_others_and_those_that_never_were_do_not_exist(server: Server) -> None:
    alice, bob = server.alice, server.bob
    sampler = await sampler_of(alice, await alice.open())
    await alice.done(await alice.post("asample", wanted(sampler)))
    await bob.open()
    await poll(bob, sampler, status=404)
    await poll(bob, sampler, status=404, retrieved_request_ids=["x"])
    await poll(alice, sampler.replace(":sample:0", ":sample:9"), status=404)
    await poll(alice, "nothing", status=404)
    await poll(alice, sampler, -1, status=400)
    await alice.post("retrieve_futures", {"target": {"type": "models"}}, status=400)


async def test_a_result_that_is_gone_before_its_client_heard_of_it_is_told_as_failed(tmp_path: Path) -> None:
    async with served(tmp_path, limits="result_ttl_s = 0.3") as server:
        alice = server.alice
        sampler = await sampler_of(alice, await alice.open())
        await sleep(server)
        future = await alice.post("asample", wanted(sampler))
        cursor = (await poll(alice, sampler))["cursor"]
        await wake(server)
        status = 0
        async with asyncio.timeout(PATIENCE_S):
            while status != 410:
                status = (await alice.result(future)).status_code
        assert told(await poll(alice, sampler, cursor)) == {future["request_id"]: "failed"}
        assert (await alice.result(future)).status_code == 410


class Counted:
    """The server, and how often each path was asked for."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.paths: Counter[str] = Counter()
        self.changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.paths[scope["path"].rpartition("/")[2]] += 1
            self.changed.set()
        await self.root(scope, receive, send)

    async def until(self, enough: Callable[[Counter[str]], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not enough(self.paths):
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def sampling(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Counted, Any]]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    counted = Counted(server.root)
    stop = asyncio.Event()
    with listen("127.0.0.1:0") as listener:
        serving = asyncio.create_task(serve_app(counted, [listener], stop))  # type: ignore[arg-type]

        def connect() -> tuple[tinker.ServiceClient, tinker.SamplingClient]:
            service: Any = tinker.ServiceClient(base_url=url_of(listener), api_key=server.alice.key)
            return service, service.create_sampling_client(base_model=BASE).result()

        service, sampler = await asyncio.to_thread(connect)
        try:
            yield counted, sampler
        finally:
            await asyncio.to_thread(end_session, service)
            stop.set()
            await serving


def asked(sampler: tinker.SamplingClient, count: int) -> list[tinker.APIFuture[types.SampleResponse]]:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    return [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=seed)) for seed in range(count)]


def results(futures: list[tinker.APIFuture[types.SampleResponse]]) -> list[list[int] | str]:
    found: list[list[int] | str] = []
    for future in futures:
        try:
            found.append(list(future.result(PATIENCE_S).sequences[0].tokens))
        except tinker.RequestFailedError as error:
            found.append(str(error))
    return found


async def test_the_sdk_asks_once_for_many_samples_and_fetches_each_result_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sampling(server, monkeypatch) as (counted, sampler):
        await sleep(server)
        futures = asked(sampler, MANY)
        await counted.until(lambda paths: paths["asample"] == MANY and paths["retrieve_futures"] > 1)
        given_up = f"{sampler._sampling_session_id}:{MANY // 2}"
        await server.alice.post("cancel_future", {"request_id": given_up}, status=204)
        await wake(server)
        found = await asyncio.to_thread(results, futures)
        paths = counted.paths
    (failed,) = [each for each in found if isinstance(each, str)]
    assert "cancelled by the client" in failed
    drawn = [each for each in found if not isinstance(each, str)]
    assert len(drawn) == MANY - 1
    assert len({tuple(each) for each in drawn}) == MANY - 1
    assert paths["retrieve_future"] == MANY
    assert paths["retrieve_futures"] < MANY / 2


async def test_the_sdk_comes_back_when_the_queue_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        served(tmp_path, limits="[sampling]\nmax_pending_requests = 4") as server,
        sampling(server, monkeypatch) as (counted, sampler),
    ):
        await sleep(server)
        futures = asked(sampler, 8)
        await counted.until(lambda paths: paths["asample"] == 8)
        full = await server.alice.send("POST", "/api/v1/asample", json=wanted(sampler._sampling_session_id, 99))
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        await wake(server)
        found = await asyncio.to_thread(results, futures)
    assert len({tuple(each) for each in found}) == 8
    assert counted.paths["asample"] > 8


async def test_copies_of_a_sampling_client_never_use_the_same_numbers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sampling(server, monkeypatch) as (counted, sampler):

        def by_copies() -> tuple[list[int], list[list[int] | str]]:
            handle = sampler.get_sampler_handle()
            copies = [tinker.SamplingClient.from_sampler_handle(handle, api_key=server.alice.key) for _ in range(3)]
            futures = [future for each in (sampler, *copies) for future in asked(each, 2)]
            found = results(futures)
            return [each._cloned_sampler_id or 0 for each in (sampler, *copies)], found

        numbers, found = await asyncio.to_thread(by_copies)
        await server.stack.orchestrator.kill()
        await server.stack.start_orchestrator()
        again = await server.alice.post("join_sampling_session", {"sampling_session_id": sampler._sampling_session_id})
    assert counted.paths["join_sampling_session"] == 3
    assert numbers[0] == 0
    assert len({*numbers, again["client_counter"]}) == 5
    assert found == found[:2] * 4
    await server.bob.post("join_sampling_session", {"sampling_session_id": sampler._sampling_session_id}, status=404)


async def test_the_sdk_gets_every_sample_although_the_orchestrator_was_killed_meanwhile(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sampling(server, monkeypatch) as (counted, sampler):
        early = await asyncio.to_thread(results, asked(sampler, 3))
        await sleep(server)
        futures = asked(sampler, MANY)
        await counted.until(lambda paths: paths["asample"] == MANY + 3)
        await server.stack.orchestrator.kill()
        await server.stack.start_orchestrator()
        await wake(server)
        late = asked(sampler, 3)
        found = await asyncio.to_thread(results, futures + late)
    assert found[:3] == found[MANY:] == early
    assert len({tuple(each) for each in found}) == MANY
