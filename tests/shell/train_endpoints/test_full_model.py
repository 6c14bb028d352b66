"""Whole models on an engine: one at a time, and never an older one in the place of a newer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from strata.train.core import client_commands, ops
from tests.shell.train_endpoints.test_publishing import Site, sample, sequences, synced
from tests.shell.train_orchestrator.stacks import running
from tests.support.fake_vllm import FakeVllm


async def test_a_sample_of_older_weights_does_not_bring_them_back(tmp_path: Path) -> None:
    async with FakeVllm() as engine, FakeVllm() as other:
        more = f'\n[inference]\nallow = ["{engine.url}", "{other.url}"]\nsample = true\n'
        full = 'initial_checkpoint = false\ntraining = "full"'
        async with running(tmp_path, limits=more, model=full) as stack:
            site = Site(stack, engine, "")
            await stack.look(client_commands.Done, client_commands.AddEndpoint("engine", engine.url, "vllm"))
            model = await site.model()
            first = await synced(stack, model, 1)
            started, old = engine.full_weights, await site.sampler(model, first.path)
            before = sequences(stack, await stack.result(await stack.submit(sample(old, 1))))
            engine.restart()
            again = sequences(stack, await stack.result(await stack.submit(sample(old, 2))))
            assert (again, engine.full_weights) == (before, started), "an engine that has none is told of it again"
            assert isinstance(await stack.result(await stack.submit(stack.batch(model, 2, [[1, 2]]))), ops.PassDone)
            assert isinstance(await stack.result(await stack.submit(stack.step(model, 3))), ops.StepDone)
            await stack.look(client_commands.Done, client_commands.AddEndpoint("slow", other.url, "vllm"))
            other.block()
            engine.replaced.clear()
            pushing = await stack.submit(ops.SyncWeights(model, 4, "second"))
            async with asyncio.timeout(30):
                await other.load_requested.wait()
                await engine.replaced.wait()
            newer = engine.full_weights
            assert newer != started
            # One endpoint has the new weights, and the push to the other goes on.
            late = sequences(stack, await stack.result(await stack.submit(sample(old, 3))))
            assert late != before
            assert engine.full_weights == newer
            other.release()
            assert isinstance(await stack.result(pushing), ops.WeightsSynced)
