"""`strata gang list | create | update | reset | delete`, and what a worker meets in a job of each status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import strata.coord.worker as strata
from strata.base.errors import Code, StrataError
from strata.cli.exit_codes import ExitCode
from tests.shell.coord.running import Running, in_process
from tests.shell.coord.test_gang import gang
from tests.shell.coord_worker.test_calls import worker

pytestmark = pytest.mark.proves("Never again: a finished job, run again, reported success with nothing done")


@asynccontextmanager
async def together(running: Running, *names: str, **given: Any) -> AsyncIterator[list[strata.AsyncWorker]]:
    """Workers that join at once, because each waits for the others."""
    workers = [strata.join_async(address=running.address, id=name, patience_s=10, **given) for name in names]
    await asyncio.gather(*(each.__aenter__() for each in workers))
    try:
        yield workers
    finally:
        for each in workers:
            await each.__aexit__(None, None, None)


async def test_a_job_that_was_created_waits_for_its_workers_and_gives_them_its_parameters() -> None:
    async with in_process() as running:
        at = ("--address", running.address)
        created = await gang("create", "my-run", "--min", "2", "--max", "2", "--param", "lr=1e-4", *at)
        assert (created.status, "CREATED" in created.out) == (0, True)
        async with together(running, "a", "b", job="my-run") as joined:
            assert [each.world_size for each in joined] == [2, 2]
            assert joined[0].parameters["lr"] == "1e-4"
            listed = json.loads((await gang("list", "-o", "json", *at)).out)
            assert [(each["job_id"], each["status"], each["workers"]) for each in listed] == [("my-run", "RUNNING", 2)]
            refused = await gang("reset", "my-run", *at)
            assert (refused.status, refused.out) == (ExitCode.FAILED, "")
            assert "strata gang stop my-run --all" in refused.err
        again = await gang("create", "my-run", "--min", "3", *at)
        assert again.status != 0
        assert "another configuration" in again.err


async def test_a_finished_job_refuses_workers_until_it_is_reset() -> None:
    async with in_process() as running:
        at = ("--address", running.address)
        async with worker(running, job="my-run") as found:
            await found.dataset("corpus", samples=20, shard_size=10)
            assert [len(shard) async for shard in found.shards("corpus", 0)] == [10, 10]
        with pytest.raises(StrataError, match="is finished") as caught:
            async with worker(running, job="my-run"):
                pass
        assert (caught.value.code, caught.value.detail["reason"]) == (Code.PRECONDITION, "job-finished")
        assert "strata gang reset my-run" in str(caught.value)
        reset = json.loads((await gang("reset", "my-run", "-o", "json", *at)).out)
        assert [(each["status"], each["run"]) for each in reset] == [("CREATED", 2)]
        async with worker(running, job="my-run") as found:
            assert (found.run_id, found.start) == (2, None)
            await found.dataset("corpus", samples=20, shard_size=10)
            assert [len(shard) async for shard in found.shards("corpus", 0)] == [10, 10]


async def test_a_job_whose_worker_was_told_to_stop_is_not_finished() -> None:
    async with in_process() as running:
        at = ("--address", running.address)
        async with worker(running, job="my-run") as found:
            await found.dataset("corpus", samples=10, shard_size=10)
            assert [len(shard) async for shard in found.shards("corpus", 0)] == [10]
            assert (await gang("stop", "my-run", "--all", *at)).status == 0
        assert "STOPPED" in (await gang("list", *at)).out
        deleted = await gang("delete", "my-run", *at)
        assert (deleted.status, deleted.out) == (0, "")
        assert (await gang("my-run", *at)).status == ExitCode.NOT_FOUND
        assert (await gang("delete", "my-run", *at)).status == ExitCode.NOT_FOUND


async def test_a_worker_waits_for_as_many_as_it_wants() -> None:
    async with in_process() as running, together(running, "a", "b", wait_for=2) as joined:
        assert [each.world_size for each in joined] == [2, 2]


async def test_a_worker_that_waits_in_vain_says_for_how_many() -> None:
    async with in_process() as running:
        with pytest.raises(StrataError, match="1 of 2 members") as caught:
            async with worker(running, "a", wait_for=2, patience_s=0.5):
                pass
        assert caught.value.code is Code.DEADLINE


async def test_settings_of_a_job_change_while_it_runs() -> None:
    async with in_process() as running:
        at = ("--address", running.address)
        liveness = ("--heartbeat", "0.5", "--missed", "40", "--reconnect-grace", "7.5")
        assert (await gang("create", "my-run", "--max", "1", "--param", "lr=1", *liveness, *at)).status == 0
        config = running.service.state.jobs["my-run"].config
        assert (config.heartbeat_interval_s, config.missed_beats, config.reconnect_grace_s) == (0.5, 40, 7.5)
        async with worker(running, "a", job="my-run") as first:
            with pytest.raises(StrataError, match="takes no more"):
                async with worker(running, "b", job="my-run", patience_s=0.2):
                    pass
            updated = await gang("update", "my-run", "--max", "2", "--param", "seed=7", "-o", "json", *at)
            assert [each["max_workers"] for each in json.loads(updated.out)] == [2]
            async with worker(running, "b", job="my-run", elastic=True) as second:
                assert second.parameters == {"lr": "1", "seed": "7"}
                await first.follow()
                assert first.world_size == 2
        changed = running.service.state.jobs["my-run"].config
        assert changed == msgspec.structs.replace(config, max_workers=2, parameters={"lr": "1", "seed": "7"})
        assert (await gang("update", "nothing", "--max", "2", *at)).status == ExitCode.NOT_FOUND
        assert (await gang("update", "my-run", "--min", "3", *at)).status == ExitCode.USAGE


async def test_reload_reaches_the_program_with_its_arguments() -> None:
    async with in_process() as running, worker(running, "a", job="my-run") as found:
        at = ("--address", running.address)
        reload = asyncio.create_task(gang("reload", "my-run", "--argument", "file=new.json", "--wait", "30", *at))
        async with asyncio.timeout(30):
            while not (commands := found.commands()):
                await asyncio.sleep(0.01)
        assert [(each.kind, each.arguments) for each in commands] == [(strata.CommandKind.RELOAD, {"file": "new.json"})]
        assert (await reload).status == 0
