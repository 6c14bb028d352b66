"""Several coordinators share the partitions of one PostgreSQL, and one after the other is killed under many jobs.

The workers of each job know all coordinators and call any: most calls take the hop to the leader. What they were
answered is compared with an expected state of their own for each job.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import grpc

from soak.coord.expected_state import ExpectedState
from soak.coord.processes import Coordinator
from soak.coord.workers import WorkerPlan, WorkerPool
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc

PARTITIONS: Final = 8
PROCESSES: Final = 3
JOBS: Final = 16
READY_S: Final = 60.0
LIMIT_S: Final = 5.0
"""From a kill to the first answer in each job that the process led."""
BACK_S: Final = 60.0
FINISH_S: Final = 120.0


def settings(lease_s: float = 2.0) -> dict[str, str]:
    return {
        "STRATA_COORDINATOR_PARTITIONS": str(PARTITIONS),
        "STRATA_COORDINATOR_LEASE_S": str(lease_s),
        "STRATA_COORDINATOR_SNAPSHOT_EVERY": "2000",
    }


async def list_jobs(address: str) -> list[pb.JobSummary] | None:
    """None: a partition has no leader at the moment, or the process does not answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
        try:
            return list((await stub.ListJobs(pb.ListJobsRequest(), timeout=5.0)).jobs)
        except grpc.aio.AioRpcError:
            return None


async def all_led(addresses: list[str], within_s: float = READY_S) -> list[pb.JobSummary]:
    """Wait until each process can tell of all partitions; the jobs."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        found = [await list_jobs(address) for address in addresses]
        if all(each is not None for each in found):
            return found[0] or []
        await asyncio.sleep(0.1)
    raise TimeoutError("some partition has no leader")


@dataclass
class Outcome:
    kills: int = 0
    problems: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    """From a kill to the first answer in each job that the killed process led."""
    moved: list[int] = field(default_factory=list)
    """Partitions with jobs that each killed process led."""
    confirmed: int = 0
    epochs: int = 0
    memory_mb: float = 0.0

    def result(self) -> CampaignResult:
        figures = (
            f"{PARTITIONS} partitions over {PROCESSES} processes, {JOBS} jobs; first answer after a leader's end"
            f" {spread_s(self.back_s)}; {sum(self.moved)} partitions were taken over; {self.confirmed} acks,"
            f" {self.epochs} epochs; {self.memory_mb:.0f} MB"
        )
        worst_s = max(self.back_s, default=0.0)
        return CampaignResult(times=self.kills, problems=self.problems, figures=figures, worst_s=worst_s)


class Campaign:
    def __init__(self, coordinators: list[Coordinator], pools: dict[str, WorkerPool], rng: random.Random) -> None:
        self._coordinators = coordinators
        self._pools = pools
        self._rng = rng
        self.outcome = Outcome()

    @property
    def _addresses(self) -> list[str]:
        return [each.address for each in self._coordinators if each.runs]

    async def run(self, kills: int, tell: OnProgress) -> Outcome:
        outcome = self.outcome
        for coordinator in self._coordinators:
            await coordinator.start()
        for coordinator in self._coordinators:
            await coordinator.leads()
        await all_led(self._addresses)
        await asyncio.gather(*(pool.join() for pool in self._pools.values()))
        for _ in range(kills):
            await self._kill()
            self._count()
            tell(outcome.result())
            if outcome.problems:
                return outcome
        epochs = await asyncio.gather(*(pool.finish(FINISH_S) for pool in self._pools.values()))
        outcome.epochs = sum(epochs)
        await self._check_jobs()
        self._count()
        outcome.memory_mb = max(each.memory_mb() for each in self._coordinators if each.runs)
        return outcome

    async def _kill(self) -> None:
        outcome = self.outcome
        await asyncio.sleep(self._rng.uniform(1.0, 4.0))
        led: dict[str, list[pb.JobSummary]] = {}
        for job in await all_led(self._addresses):
            led.setdefault(job.leader, []).append(job)
        # One that leads nothing proves little.
        victim = self._rng.choice([each for each in self._coordinators if each.address in led])
        orphans = led[victim.address]
        outcome.moved.append(len({job.partition for job in orphans}))
        confirmed = {name: pool.expected.confirmed for name, pool in self._pools.items()}
        died_s = await victim.kill()
        outcome.kills += 1
        for pool in self._pools.values():
            pool.down(died_s)
        try:
            async with asyncio.timeout(BACK_S):
                for job in orphans:
                    outcome.back_s.append(await self._pools[job.job_id].answered() - died_s)
                await asyncio.gather(*(pool.answered_everywhere() for pool in self._pools.values()))
        except TimeoutError:
            outcome.problems.append(f"some worker had no answer {BACK_S:g} s after kill {outcome.kills}")
        await all_led(self._addresses)
        await victim.start()
        await victim.leads()
        await self._check_jobs()
        for name, pool in self._pools.items():
            if pool.expected.confirmed < confirmed[name]:
                pool.expected.problem(f"{name} has fewer acks than before")

    async def _check_jobs(self) -> None:
        """No worker of any job is gone."""
        for name, pool in self._pools.items():
            for problem in pool.missing_members(await pool.job()):
                pool.expected.problem(f"{name}: {problem}")

    def _count(self) -> None:
        outcome = self.outcome
        found = [f"{name}: {problem}" for name, pool in self._pools.items() for problem in pool.expected.summary()]
        crashes = [crash for each in self._coordinators for crash in each.crashes]
        outcome.problems = [*dict.fromkeys([*outcome.problems, *found, *crashes])]
        outcome.confirmed = sum(pool.expected.confirmed for pool in self._pools.values())


async def run(ask: CampaignRequest, tell: OnProgress, lease_s: float = 2.0) -> CampaignResult:
    if ask.database != "postgres":
        return CampaignResult(times=0, problems=["partitions need PostgreSQL: --on postgres"], figures="nothing ran")
    rng = seeded_random(ask.first)
    coordinators = [
        Coordinator(ask.url, ask.folder, f"coordinator-{number}", settings(lease_s)) for number in range(PROCESSES)
    ]
    workers = max(2, ask.workers // JOBS)
    plan = WorkerPlan(workers=workers, channels=min(workers, PROCESSES), shards=6 * workers, think_s=0.5)
    pools: dict[str, WorkerPool] = {}
    for number in range(JOBS):
        # Workers begin at different coordinators.
        turn = number % PROCESSES
        addresses = [each.address for each in (*coordinators[turn:], *coordinators[:turn])]
        expected = ExpectedState(plan.shards * plan.shard_size)
        name = f"job-{number}"
        pools[name] = WorkerPool(addresses, plan, expected, seeded_random(rng.randrange(1 << 30)), name)
    campaign = Campaign(coordinators, pools, rng)
    async with AsyncExitStack() as stack:
        for coordinator in coordinators:
            stack.push_async_callback(coordinator.close)
        for pool in pools.values():
            stack.push_async_callback(pool.close)
        return (await campaign.run(ask.times, tell)).result()
