"""Endpoints and the orchestrator: what is told survives a death, and what does not answer holds nobody up."""

from __future__ import annotations

import array
import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from strata.base.errors import Code
from strata.train.core import client_commands, ops
from strata.train.core.sampling import SampleOperation, SampleParams, SampleResult, decode_result
from strata.train.payload import Payloads
from strata.train.status import queries, reports, views
from tests.shell.train_orchestrator.stacks import Stack, running
from tests.support.fake_vllm import FakeVllm
from tests.support.ports import port_of, reserve_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = array.array("i", [1, 2, 3]).tobytes()


@dataclass
class Site:
    """One server for all tests, with an engine that every test finds as if it had just been started."""

    stack: Stack
    engine: FakeVllm
    dead_url: str
    _models: itertools.count[int] = field(default_factory=itertools.count)

    async def model(self) -> str:
        return await self.stack.model(next(self._models))

    def versions(self, model: str) -> list[str]:
        """Of this model, that the engine has."""
        return [each for each in self.engine.adapters if each.startswith(f"{model.replace(':', '-')}-v")]

    async def restart(self) -> None:
        await self.stack.orchestrator.kill()
        await self.stack.start_orchestrator()

    async def sampler(self, model: str, path: str) -> str:
        session = model.partition(":")[0]
        sampler = f"{session}:sample:{model.rpartition(':')[2]}"
        weights = ops.SavedWeights(model, "sampler_weights", path.rpartition("/")[2])
        opened = await self.stack.submit(ops.OpenSampler(sampler, "pretended", weights), session_id=session)
        assert isinstance(await self.stack.result(opened), ops.SamplerOpened)
        return sampler


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    with reserve_port() as nobody:
        dead = f"http://127.0.0.1:{port_of(nobody)}"
        async with FakeVllm() as engine:
            # What follows the section of limits is a section of its own.
            more = f'\n[inference]\nallow = ["{engine.url}", "{dead}"]\nsample = true\npush = true\n'
            async with running(tmp_path_factory.mktemp("e"), limits=more) as stack:
                await stack.look(client_commands.Done, client_commands.AddEndpoint("engine", engine.url, "vllm"))
                yield Site(stack, engine, dead)


@pytest.fixture
def site(served: Site) -> Site:
    served.engine.release()
    served.engine.restart()
    served.engine.requests.clear()
    return served


async def listed(stack: Stack) -> dict[str, views.EndpointView]:
    found = await stack.look(views.EndpointList, queries.ListEndpoints())
    return {each.name: each for each in found.endpoints}


async def synced(stack: Stack, model: str, seq: int, *names: str) -> ops.WeightsSynced:
    result = await stack.result(await stack.submit(ops.SyncWeights(model, seq, f"sync-{seq}", names)))
    assert isinstance(result, ops.WeightsSynced), result
    return result


def sample(sampler: str, seq: int, **params: float) -> SampleOperation:
    return SampleOperation(sampler, seq, PROMPT, SampleParams(max_tokens=4, seed=7, **params), num_samples=2)  # type: ignore[arg-type]


def sequences(stack: Stack, result: ops.Result) -> SampleResult:
    assert isinstance(result, ops.SampleDone), result
    return decode_result(Payloads(stack.settings.payloads).read(result.payload))


async def test_endpoints_are_added_once_listed_and_removed_and_survive_a_restart(site: Site) -> None:
    stack, url = site.stack, site.engine.url
    await stack.look(client_commands.Done, client_commands.AddEndpoint("engine", url, "vllm"))
    other = await stack.look(views.ErrorResponse, client_commands.AddEndpoint("engine", url, "transformers"))
    assert other.code is Code.CONFLICT
    for strange in ("http://169.254.169.254:80", "http://127.0.0.1:1", "file:///etc/passwd", "http://a@b", url + "/v1"):
        refused = await stack.look(views.ErrorResponse, client_commands.AddEndpoint("evil", strange, "vllm"))
        assert refused.code in (Code.FORBIDDEN, Code.INVALID)
    await stack.look(client_commands.Done, client_commands.AddEndpoint("second", url, "vllm"))
    await site.restart()
    endpoints = await listed(stack)
    assert {(view.name, view.url, view.address, view.reachable) for view in endpoints.values()} == {
        (name, url, "127.0.0.1", True) for name in ("engine", "second")
    }
    await stack.look(client_commands.Done, client_commands.RemoveEndpoint("second"))
    assert list(await listed(stack)) == ["engine"]
    gone = await stack.look(views.ErrorResponse, client_commands.RemoveEndpoint("second"))
    assert gone.code is Code.NOT_FOUND


async def test_a_dead_endpoint_fails_alone_and_the_others_have_the_weights(site: Site) -> None:
    stack, model = site.stack, await site.model()
    await stack.look(client_commands.Done, client_commands.AddEndpoint("dead", site.dead_url, "vllm"))
    found = await synced(stack, model, 1)
    assert [(each.endpoint, each.ok) for each in found.endpoints] == [("engine", True), ("dead", False)]
    assert "cannot be reached" in found.endpoints[1].message
    assert site.versions(model) == [found.version] == [f"{model.replace(':', '-')}-v1"]
    named = await synced(stack, model, 2, "engine")
    assert [each.endpoint for each in named.endpoints] == ["engine"]
    wrong = await stack.result(await stack.submit(ops.SyncWeights(model, 3, "x", ("nobody",))))
    assert wrong == ops.Failed("user", "there is no inference endpoint 'nobody'")
    assert {name: view.reachable for name, view in (await listed(stack)).items()} == {"engine": True, "dead": False}
    await stack.look(client_commands.Done, client_commands.RemoveEndpoint("dead"))


async def test_an_endpoint_that_hangs_does_not_hold_up_training(site: Site) -> None:
    stack, model = site.stack, await site.model()
    site.engine.block()
    waiting = await stack.submit(ops.SyncWeights(model, 1, "one"))
    for seq in (2, 3, 4):
        assert isinstance(await stack.result(await stack.submit(stack.step(model, seq))), ops.StepDone)
    told = await stack.watch(waiting)
    assert isinstance(told, views.QueuePosition)
    assert "being pushed to the inference endpoints" in told.reason
    site.engine.release()
    result = await stack.result(waiting)
    assert isinstance(result, ops.WeightsSynced)
    assert result.endpoints[0].ok


async def test_a_push_that_an_orchestrator_died_in_is_done_by_the_next_and_is_one(site: Site) -> None:
    stack, engine, model = site.stack, site.engine, await site.model()
    engine.block()
    future = await stack.submit(ops.SyncWeights(model, 1, "one"))
    async with asyncio.timeout(30):
        await engine.load_requested.wait()
    await stack.orchestrator.kill()
    engine.release()
    await stack.start_orchestrator()
    result = await stack.result(future)
    assert isinstance(result, ops.WeightsSynced)
    assert result.endpoints[0].ok
    assert site.versions(model) == [result.version]
    assert await stack.submit(ops.SyncWeights(model, 1, "one")) == future
    assert await stack.result(future) == result
    saved = await stack.look(views.CheckpointList, queries.ListCheckpoints(model))
    assert [each.path for each in saved.checkpoints] == [result.path]


async def test_the_newest_versions_stay_and_an_engine_that_lost_them_gets_them_again(site: Site) -> None:
    stack, model, other = site.stack, await site.model(), await site.model()
    theirs = (await synced(stack, other, 1)).version
    found = [await synced(stack, model, seq) for seq in range(1, 5)]
    versions = [each.version for each in found]
    assert [list(each.endpoints[0].retired) for each in found] == [[], [], versions[:1], versions[1:2]]
    assert (site.versions(other), site.versions(model)) == ([theirs], versions[2:])
    site.engine.restart()
    last = await synced(stack, model, 5)
    assert theirs in last.endpoints[0].message
    assert (site.versions(other), site.versions(model)) == ([theirs], [last.version])


async def test_weights_that_are_saved_for_sampling_are_pushed_if_the_settings_say_so(site: Site) -> None:
    stack, model = site.stack, await site.model()
    save = ops.SaveWeights(model, 1, "sampler_weights", "published")
    assert isinstance(await stack.result(await stack.submit(save)), ops.WeightsSaved)
    state = ops.SaveWeights(model, 2, "weights", "state")
    assert isinstance(await stack.result(await stack.submit(state)), ops.WeightsSaved)
    assert (await synced(stack, model, 3)).endpoints[0].ok
    assert site.versions(model) == [f"{model.replace(':', '-')}-v{seq}" for seq in (1, 3)]


async def test_samples_come_from_the_engine_that_has_the_weights_and_else_from_the_ranks(site: Site) -> None:
    stack, engine, model = site.stack, site.engine, await site.model()
    found = await synced(stack, model, 1)
    sampler = await site.sampler(model, found.path)

    async def ask(seq: int, **params: float) -> SampleResult:
        return sequences(stack, await stack.result(await stack.submit(sample(sampler, seq, **params))))

    def completions() -> int:
        return sum(each.startswith("/v1/completions") for each in engine.requests)

    first = await ask(1)
    assert completions() == 1
    assert await ask(2) == first
    assert len(first.sequences) == 2
    greedy = await ask(3, temperature=0)
    assert greedy.sequences[0] == greedy.sequences[1]
    warm = await ask(4, temperature=0.5, top_k=3)
    assert completions() == 6, "with two that tried which log probabilities it reports"
    assert await ask(8, temperature=0.5, top_k=3) == warm
    assert completions() == 7
    by_ranks = await ask(9, temperature=0.001)
    assert completions() == 7
    assert by_ranks != first
    status = await stack.look(reports.StatusView, queries.DescribeStatus(everything=True))
    assert status.status.unroutable == {"parameters": 1}
    engine.restart()
    assert await ask(5) == first
    assert engine.requests[-3:] == [
        f"{path} {found.version}" for path in ("/v1/completions", "/v1/load_lora_adapter", "/v1/completions")
    ]
    await site.restart()
    assert await ask(6) == first
    for seq in (2, 3):
        await synced(stack, model, seq)
    before = completions()
    assert (await ask(7)).sequences != first.sequences
    assert completions() == before, "weights that are not kept there any more are the ranks' to sample"


async def test_the_tokens_of_a_streamed_sample_come_while_the_engine_draws_it(site: Site) -> None:
    stack, engine, model = site.stack, site.engine, await site.model()
    sampler = await site.sampler(model, (await synced(stack, model, 1)).path)
    params = SampleParams(max_tokens=40, seed=7)
    plain = sequences(stack, await stack.result(await stack.submit(SampleOperation(sampler, 1, PROMPT, params))))
    engine.delay_s = 2.0
    try:
        future = await stack.submit(SampleOperation(sampler, 2, PROMPT, params, stream=True))
        tokens, parts = b"", 0
        while True:
            output = await stack.watch_tokens(future, [len(tokens) // 4])
            if isinstance(output, views.FutureResult):
                break
            if isinstance(output, views.TokensSampled):
                parts += 1
                tokens += b"".join(part.tokens for part in output.parts)
    finally:
        engine.delay_s = 0.0
    assert parts > 5
    result = sequences(stack, await stack.result(future))
    assert result.sequences == plain.sequences
    assert result.sequences[0].tokens.startswith(tokens)


async def test_what_an_endpoint_does_not_give_comes_from_the_ranks(site: Site) -> None:
    stack, engine, model = site.stack, site.engine, await site.model()
    sampler = await site.sampler(model, (await synced(stack, model, 1)).path)
    first = sequences(stack, await stack.result(await stack.submit(sample(sampler, 1))))
    engine.broken = True
    result = sequences(stack, await stack.result(await stack.submit(sample(sampler, 2))))
    assert len(result.sequences) == 2
    assert result != first
    engine.broken = False


async def test_what_the_settings_allowed_once_and_not_any_more_is_not_spoken_to(site: Site) -> None:
    """The last one: its settings stay."""
    stack, model = site.stack, await site.model()
    stack.file.write_text(stack.file.read_text().replace(site.engine.url, "http://127.0.0.1:1"), encoding="utf-8")
    await site.restart()
    (outcome,) = (await synced(stack, model, 1)).endpoints
    assert not outcome.ok
    assert "not in the settings" in outcome.message
    assert not (await listed(stack))["engine"].reachable
    assert site.engine.requests == []
