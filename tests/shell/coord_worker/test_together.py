"""Barriers, checkpoints and recovery with real workers."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from strata.coord.core.facts import CheckpointCommitted, Recovered
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from tests.shell.coord.running import connect
from tests.shell.coord_worker.running import every_sample, site
from tests.support.busy import BUSY


async def test_the_death_of_a_member_is_raised_at_the_barrier_within_a_second(tmp_path: Path) -> None:
    async with site(tmp_path, min_workers="3") as found:
        waiting = [await found.start("meet", f"w{number}") for number in range(2)]
        victim = await found.start("meet", "victim", hold=True)
        await victim.event("held")
        for each in waiting:
            await each.event("arriving")
        killed_s = monotonic()
        victim.signal(signal.SIGKILL)
        assert await asyncio.gather(*(each.end() for each in waiting)) == [1, 1]
        for each in waiting:
            (error,) = each.all("error")
            assert (error["code"], error["reason"]) == ("stale", "stale-generation")
            print(f"raised {error['at_s'] - killed_s:.3f} s after the death")
            assert error["at_s"] - killed_s < 1.0 * BUSY


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_after_a_death_everybody_goes_back_and_every_sample_is_in_the_model_once(
    tmp_path: Path, prefetch: int
) -> None:
    async with site(tmp_path, min_workers="2", heartbeat_interval_s="0.5") as found:
        given: dict[str, Any] = {"world_size": 3, "epochs": 3, "samples": 200, "shard_size": 8, "out": str(tmp_path)}
        given["prefetch"] = prefetch
        survivors = [await found.start("train", f"w{number}", **given) for number in range(2)]
        victim = await found.start("train", "victim", **given, hold_in=1)
        await victim.event("held")
        victim.signal(signal.SIGKILL)
        assert await asyncio.gather(*(each.end() for each in survivors)) == [0, 0]
        model = Counter((epoch, sample) for each in survivors for epoch, sample in each.all("trained")[0]["part"])
        assert model == every_sample(3, 200)
        recovered = [event["step"] for each in survivors for event in each.all("recovered")]
        assert len(recovered) == 2
        assert len(set(recovered)) == 1
        facts = await found.facts()
        assert len([fact for fact in facts if isinstance(fact, Recovered)]) == 1
        assert next(fact.step for fact in facts if isinstance(fact, CheckpointCommitted)) == 0


async def test_the_slow_one_of_workers_that_step_together_is_named_within_ten_steps(tmp_path: Path) -> None:
    async with site(tmp_path, min_workers="3") as found:
        given: dict[str, Any] = {"world_size": 3, "steps": 60}
        times_s = {"w0": 0.08, "slow": 0.4, "w1": 0.08}
        programs = [
            await found.start("step-together", name, compute_s=time_s, **given) for name, time_s in times_s.items()
        ]
        await programs[0].event("step", within_s=60)
        named_s = 0.0
        async with asyncio.timeout(60), connect(found.coordinator.address) as channel:
            stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
            async for news in stub.WatchJob(pb.WatchJobRequest(min_interval_ms=20)):
                if news.job.incidents:
                    named_s = monotonic()
                    break
        (incident,) = news.job.incidents
        assert (incident.kind, incident.worker_id) == (pb.INCIDENT_KIND_STRAGGLER, "slow")
        assert incident.message.endswith("; it gets less data")
        workers = {each.worker_id: each for each in news.job.workers}
        # What a step takes is the same for all; what each of them computes is not.
        assert workers["w0"].compute_time_ms < 250.0 < workers["slow"].compute_time_ms
        assert workers["w0"].step_time_ms > 250.0
        async with asyncio.timeout(60):
            # Its last line before this moment is the step at which it was named.
            while (found_at := programs[0].all("step")[-1])["at_s"] < named_s:
                await programs[0].event("step")
        print(f"named at step {found_at['number']}")
        assert found_at["number"] <= 10 * BUSY


async def test_nothing_is_left_of_a_worker_that_went(tmp_path: Path) -> None:
    async with site(tmp_path) as found:
        worker = await found.start("come-and-go", "w")
        assert await worker.end() == 0, json.dumps(worker.events)
        (told,) = worker.all("left")
        assert told["left"] == [{"threads": ["MainThread"], "connections": 0}] * 4
        # Three of its own; gRPC closes what it used for waiting a little later.
        assert told["files"] <= 8
