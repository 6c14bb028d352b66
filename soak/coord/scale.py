"""As many simulated workers as the machine carries, in 200 jobs over 8 partitions in 4 processes.

First nothing happens for a while, and processor time and memory of the coordinators are measured. Then one process is
killed per minute, and started again: nobody is evicted, and no shard is lost or handed out twice.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import msgspec
import psutil  # type: ignore[import-untyped]

from soak.coord.partitions import PARTITIONS, all_led
from soak.coord.processes import ROOT, Coordinator
from soak.coord.scale_load import LoadFigures, LoadPlan
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random
from strata.coord.pb import coordinator_pb2 as pb

PROCESSES: Final = 4
JOBS: Final = 200
LOADS: Final = 2
"""Processes of simulated workers."""
STEADY_S: Final = 40.0
KILL_EVERY_S: Final = 60.0
JOIN_S: Final = 1_800.0


@dataclass(frozen=True)
class Usage:
    """Of all coordinators together."""

    cpu_s: float
    memory_mb: float


class SimulatedLoad:
    """One process of simulated workers."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "soak.coord.scale_load",
            msgspec.json.encode(self._plan).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            cwd=ROOT,
        )

    async def joined(self) -> None:
        await self._line()

    async def figures(self) -> LoadFigures:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return msgspec.json.decode(await self._line(), type=LoadFigures)

    def cpu_s(self) -> float:
        assert self._process is not None
        return _cpu_s(self._process.pid)

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the simulated workers ended; see above")
        return line

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class ScaleCampaign:
    def __init__(self, coordinators: Sequence[Coordinator], loads: Sequence[SimulatedLoad], workers: int) -> None:
        self._coordinators = coordinators
        self._loads = loads
        self._workers = workers
        self._problems: list[str] = []
        self._jobs: dict[str, tuple[int, int]] = {}
        self._figures = ""
        self._kills = 0

    @property
    def result(self) -> CampaignResult:
        crashes = [crash for each in self._coordinators for crash in each.crashes]
        problems = [*dict.fromkeys([*self._problems, *crashes])]
        return CampaignResult(times=self._kills, problems=problems, figures=self._figures)

    async def run(self, kills: int, tell: OnProgress) -> CampaignResult:
        for coordinator in self._coordinators:
            await coordinator.start()
        for coordinator in self._coordinators:
            await coordinator.leads()
        await all_led([each.address for each in self._coordinators])
        bare_mb = self._usage().memory_mb
        began_s = time.monotonic()
        for load in self._loads:
            await load.start()
        async with asyncio.timeout(JOIN_S):
            await asyncio.gather(*(load.joined() for load in self._loads))
        joined_s = time.monotonic() - began_s
        jobs = await self._list()
        self._jobs = {job.job_id: (job.workers, job.generation) for job in jobs}
        await self._measure(joined_s, bare_mb, jobs)
        tell(self.result)
        rng = seeded_random(kills)
        for _ in range(kills):
            await self._kill(rng.choice(self._coordinators))
            tell(self.result)
        return self.result

    async def _list(self) -> list[pb.JobSummary]:
        return await all_led([each.address for each in self._coordinators if each.runs])

    def _usage(self) -> Usage:
        found = [psutil.Process(each.pid) for each in self._coordinators]
        memory_mb = sum(each.memory_info().rss for each in found) / 1e6
        return Usage(sum(_cpu_s(each.pid) for each in found), memory_mb)

    async def _measure(self, joined_s: float, bare_mb: float, jobs: Sequence[pb.JobSummary]) -> None:
        await self._load_figures()
        before, began_s, load_s = self._usage(), time.monotonic(), sum(each.cpu_s() for each in self._loads)
        await asyncio.sleep(STEADY_S)
        took_s = time.monotonic() - began_s
        after, found = self._usage(), await self._load_figures()
        cores = (after.cpu_s - before.cpu_s) / took_s
        load_cores = (sum(each.cpu_s() for each in self._loads) - load_s) / took_s
        workers = sum(each.joined for each in found)
        led = {
            leader: len({job.partition for job in jobs if job.leader == leader}) for leader in {j.leader for j in jobs}
        }
        self._figures = (
            f"{workers} workers in {len(jobs)} jobs, {PARTITIONS} partitions over {PROCESSES} processes"
            f" ({', '.join(str(count) for count in sorted(led.values()))}), joined in {joined_s:.0f} s;"
            f" interval {max(each.interval_s for each in found):g} s,"
            f" {sum(each.heartbeats for each in found) / took_s:.0f} heartbeats/s in batches,"
            f" {sum(each.shard_calls for each in found) / took_s:.0f} calls for shards/s; batch p50"
            f" {max(each.p50_ms for each in found):.0f} ms, p99 {max(each.p99_ms for each in found):.0f} ms;"
            f" {cores / PARTITIONS:.3f} cores and {after.memory_mb / PARTITIONS:.0f} MB per partition;"
            f" {1e6 * cores / max(1, workers):.1f} µs/s and"
            f" {1e3 * (after.memory_mb - bare_mb) / max(1, workers):.1f} KB per worker; clients {load_cores:.2f} cores"
        )

    async def _load_figures(self) -> list[LoadFigures]:
        found = await asyncio.gather(*(load.figures() for load in self._loads))
        self._problems += [problem for each in found for problem in each.problems if problem not in self._problems]
        return found

    async def _kill(self, victim: Coordinator) -> None:
        began_s = time.monotonic()
        await victim.kill()
        self._kills += 1
        await all_led([next(each.address for each in self._coordinators if each.runs)])
        back_s = time.monotonic() - began_s
        await asyncio.sleep(KILL_EVERY_S / 2)
        await victim.start()
        await victim.leads()
        await asyncio.sleep(max(0.0, began_s + KILL_EVERY_S - time.monotonic()))
        for job in await self._list():
            before = self._jobs[job.job_id]
            if (job.workers, job.generation) != before:
                self._problems.append(
                    f"{job.job_id} has {job.workers} workers in generation {job.generation}: {before}"
                )
        found = await self._load_figures()
        self._figures += (
            f"; kill {self._kills}: all partitions led after {back_s:.1f} s, p99 {max(e.p99_ms for e in found):.0f} ms,"
            f" {sum(each.late for each in found)} late batches, {sum(each.acks for each in found)} acks"
        )


async def run(ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    if ask.database != "postgres":
        return CampaignResult(times=0, problems=["partitions need PostgreSQL: --on postgres"], figures="nothing ran")
    settings = {"STRATA_COORDINATOR_PARTITIONS": str(PARTITIONS)}
    coordinators = [Coordinator(ask.url, ask.folder, f"coordinator-{number}", settings) for number in range(PROCESSES)]
    addresses = [each.address for each in coordinators]
    jobs = [f"job-{number}" for number in range(JOBS)]
    size = max(1, ask.workers // JOBS)
    loads = [
        SimulatedLoad(LoadPlan(addresses=addresses, jobs=jobs[number::LOADS], workers=size)) for number in range(LOADS)
    ]
    async with AsyncExitStack() as stack:
        for coordinator in coordinators:
            stack.push_async_callback(coordinator.close)
        for load in loads:
            stack.push_async_callback(load.close)
        return await ScaleCampaign(coordinators, loads, ask.workers).run(ask.times, tell)
