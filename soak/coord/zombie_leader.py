"""Freeze the coordinator that leads past its lease under a load of workers. The standby takes over; then wake it up."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, field
from typing import Final

import grpc

from soak.coord.expected_state import ExpectedState
from soak.coord.processes import Coordinator
from soak.coord.workers import WorkerPlan, WorkerPool
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.base.clock import SystemClock
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.settings import CoordinatorSettings
from strata.journal.open import open_journal

LEADS_S: Final = 5.0
"""From the freeze until the standby leads."""
SETTLED_S: Final = 60.0
FINISH_S: Final = 120.0


@dataclass
class Tally:
    leads_s: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)
    refused: int = 0
    times: int = 0
    confirmed: int = 0
    epochs: int = 0

    def result(self, problems: list[str]) -> CampaignResult:
        late = sum(each > LEADS_S for each in self.leads_s)
        figures = (
            f"SIGSTOP of the leader to a standby that leads {spread_s(self.leads_s)}, {late} over {LEADS_S:g} s; to the"
            f" first answer that a worker got {spread_s(self.answered_s)}; {self.refused} calls to the zombie refused;"
            f" {self.confirmed} acks, {self.epochs} epochs"
        )
        return CampaignResult(
            times=self.times, problems=problems, figures=figures, worst_s=max(self.leads_s, default=0.0)
        )


async def run_leaders(ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    both = [Coordinator(ask.url, ask.folder, name, {}) for name in ("coordinator-a", "coordinator-b")]
    plan = WorkerPlan(workers=ask.workers, channels=min(50, ask.workers), shards=4 * ask.workers, think_s=0.5)
    expected = ExpectedState(plan.shards * plan.shard_size)
    pool = WorkerPool([each.address for each in both], plan, expected, seeded_random(ask.first))
    tally = Tally()
    try:
        await both[0].start()
        await both[0].leads()
        await both[1].start()
        await both[1].stands_by()
        await pool.join()
        for number in range(ask.first, ask.first + ask.times):
            await _freeze(both, pool, tally, number)
            tally.times += 1
            tally.confirmed, tally.epochs = expected.confirmed, pool.workers[0].epoch
            tell(tally.result(expected.summary()))
            if expected.problems:
                break
        tally.epochs = await pool.finish(FINISH_S)
        tally.confirmed = expected.confirmed
        expected.problems += await check_journal(ask.url)
    finally:
        await pool.close()
        for each in both:
            if each.runs:
                each.signal(signal.SIGCONT)
            await each.close()
    expected.problems += [crash for each in both for crash in each.crashes]
    return tally.result(expected.summary())


async def _freeze(both: list[Coordinator], pool: WorkerPool, tally: Tally, number: int) -> None:
    leader, standby = both if await both[0].is_leading() else reversed(both)
    await asyncio.sleep(seeded_random(number).uniform(0.2, 2.0))
    began_s = time.monotonic()
    leader.signal(signal.SIGSTOP)
    pool.down(began_s)
    async with grpc.aio.insecure_channel(leader.address) as channel:
        stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
        # In flight while it sleeps, besides the requests of the workers: the first things that the zombie reads.
        ghost = pb.WorkerInfo(worker_id=f"ghost-{number}", incarnation="1")
        late = asyncio.ensure_future(_code(stub, ghost))
        await standby.leads()
        tally.leads_s.append(time.monotonic() - began_s)
        tally.answered_s.append(await asyncio.wait_for(pool.answered(), SETTLED_S) - began_s)
        await asyncio.wait_for(pool.answered_everywhere(), SETTLED_S)
        leader.signal(signal.SIGCONT)
        code = await late
    if code != "UNAVAILABLE":
        pool.expected.problem(f"freeze {number}: the zombie answered a registration with {code}")
    tally.refused += code == "UNAVAILABLE"
    until_s = time.monotonic() + CoordinatorSettings().lease_s
    while leading := await leader.is_leading():
        # It learns at its next renewal that another one does.
        if time.monotonic() > until_s:
            break
    if leading:
        pool.expected.problem(f"freeze {number}: the zombie still says that it leads, a lease after it woke up")
    job = await pool.job()
    if f"ghost-{number}" in {each.worker_id for each in job.workers}:
        pool.expected.problem(f"freeze {number}: the registration at the zombie counts")
    if (job.generation, job.world_size) != (pool.generation, len(pool.workers)):
        pool.expected.problem(f"freeze {number}: generation {job.generation} has {job.world_size} workers")
    await leader.stands_by()


async def _code(stub: pb_grpc.CoordinatorAsyncStub, ghost: pb.WorkerInfo) -> str:
    try:
        await stub.RegisterWorker(ghost, timeout=SETTLED_S, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def check_journal(url: str) -> list[str]:
    """Under every epoch facts were added to the end only: none of an older epoch after one of a newer."""
    stream = CoordinatorSettings().stream
    async with await open_journal(url, SystemClock(), create=False) as journal:
        status = next(each for each in await journal.streams() if each.stream == stream)
        after, newest = status.floor, 0
        while batches := await journal.read(stream, after):
            for batch in batches:
                if batch.epoch < newest:
                    return [f"the journal has facts of epoch {batch.epoch} at {batch.first}, after epoch {newest}"]
                newest, after = batch.epoch, batch.last
    return []
