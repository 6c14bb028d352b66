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


async def test_nothing_is_left_of_a_worker_that_went(tmp_path: Path) -> None:
    async with site(tmp_path) as found:
        worker = await found.start("come-and-go", "w")
        assert await worker.end() == 0, json.dumps(worker.events)
        (told,) = worker.all("left")
        assert told["left"] == [{"threads": ["MainThread"], "connections": 0}] * 4
        # Three of its own; gRPC closes what it used for waiting a little later.
        assert told["files"] <= 8
