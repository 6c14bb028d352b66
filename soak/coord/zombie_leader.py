"""Freeze the coordinator that leads past its lease under a load of workers. The standby takes over; then wake it up."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, field
from typing import Final

import grpc

from soak.coord import pair
from soak.coord.pair import SETTLED_S, CoordinatorPair
from soak.coord.workers import WorkerPlan
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc

LEADS_S: Final = 5.0
"""From the freeze until the standby leads."""


@dataclass
class Tally(pair.Tally):
    leads_s: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)
    refused: int = 0

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
    plan = WorkerPlan(workers=ask.workers, channels=min(50, ask.workers), shards=4 * ask.workers, think_s=0.5)
    tally = Tally()

    async def freeze(both: CoordinatorPair, number: int) -> None:
        await _freeze(both, tally, number)

    return await pair.run_trials(ask, tell, ask.url, plan, tally, freeze)


async def _freeze(both: CoordinatorPair, tally: Tally, number: int) -> None:
    pool = both.pool
    leader = await both.leader()
    (standby,) = (each for each in both.coordinators if each is not leader)
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
    await both.step_down(leader, f"freeze {number}: the zombie")
    job = await pool.job()
    if f"ghost-{number}" in {each.worker_id for each in job.workers}:
        pool.expected.problem(f"freeze {number}: the registration at the zombie counts")
    for problem in pool.missing_members(job):
        pool.expected.problem(f"freeze {number}: {problem}")


async def _code(stub: pb_grpc.CoordinatorAsyncStub, ghost: pb.WorkerInfo) -> str:
    try:
        await stub.RegisterWorker(ghost, timeout=SETTLED_S, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"
