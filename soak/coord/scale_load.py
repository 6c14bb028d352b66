"""Simulated workers of many jobs, in a process of their own: `python -m soak.coord.scale_load PLAN`.

All workers of a host send their heartbeats in one call, as the relay of a host does, at the interval that they are
told; each acknowledges a shard and gets the next one once in a while. A line on stdin asks for the figures so far.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from soak.coord.expected_state import ExpectedState
from soak.trials import percentile
from strata.base.clock import SystemClock
from strata.base.errors import StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.link import CoordinatorLink, Deadline
from strata.coord.worker.settings import WorkerSettings

HOST: Final = 8
"""Workers."""
DATASET: Final = "corpus"
SHORT: Final = Deadline(timeout_s=15.0, patience_s=120.0)
JOINING: Final = 2
"""Jobs that join at once."""
SHARDS_PER_WORKER: Final = 30
LATENCIES_KEPT: Final = 20_000


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    addresses: list[str]
    jobs: list[str]
    workers: int
    """Of each job."""
    channels: int = 20
    ack_s: float = 60.0
    """Between two shards of a worker."""


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    joined: int
    heartbeats: int
    shard_calls: int
    acks: int
    late: int
    """Calls that took longer than a second, with their retries."""
    p50_ms: float
    p99_ms: float
    """Of batches of heartbeats, with their retries."""
    interval_s: float
    problems: list[str]


@dataclass
class SimulatedHost:
    job: SimulatedJob
    workers: list[str]
    link: CoordinatorLink
    held: dict[str, list[pb.Shard]] = field(default_factory=dict)


@dataclass
class SimulatedJob:
    name: str
    expected: ExpectedState
    generation: int = 0
    epoch: int = 0


class SimulatedWorkers:
    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._rng = random.Random(1)  # noqa: S311 - nothing here is a secret
        clock = SystemClock()
        self._links = []
        for number in range(plan.channels):
            turn = number % len(plan.addresses)
            addresses = [*plan.addresses[turn:], *plan.addresses[:turn]]
            self._links.append(CoordinatorLink(WorkerSettings(address=",".join(addresses)), "", clock))
        self._hosts: list[SimulatedHost] = []
        self._jobs = [SimulatedJob(name, ExpectedState(plan.workers * SHARDS_PER_WORKER)) for name in plan.jobs]
        self._counts: Counter[str] = Counter()
        self._latencies_ms: list[float] = []
        self._interval_s = 5.0
        self._problems: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        turn = asyncio.Semaphore(JOINING)

        async def one(number: int, job: SimulatedJob) -> None:
            async with turn:
                await self._join_job(number, job)

        await asyncio.gather(*(one(number, job) for number, job in enumerate(self._jobs)))

    async def _join_job(self, number: int, job: SimulatedJob) -> None:
        plan = self._plan
        names = [f"w{worker}" for worker in range(plan.workers)]
        hosts = [
            SimulatedHost(job, names[start : start + HOST], self._links[(number + start // HOST) % len(self._links)])
            for start in range(0, len(names), HOST)
        ]
        # One generation: it forms when all are there.
        await self._call(hosts[0], "CreateJob", pb.CreateJobRequest(job_id=job.name, min_workers=plan.workers))
        await asyncio.gather(*(self._register(host, name) for host in hosts for name in host.workers))
        while not job.generation:
            config = await self._register(hosts[0], names[0])
            job.generation = config.generation
        samples = plan.workers * SHARDS_PER_WORKER
        dataset = pb.DatasetInfo(
            job_id=job.name, dataset_id=DATASET, worker_id=names[0], num_samples=samples, shard_size=1
        )
        await self._call(hosts[0], "AckDataset", dataset)
        self._hosts += hosts
        for host in hosts:
            self._tasks += [asyncio.create_task(self._send_heartbeats(host)), asyncio.create_task(self._read(host))]

    async def _register(self, host: SimulatedHost, name: str) -> pb.WorkerConfig:
        request = pb.WorkerInfo(job_id=host.job.name, worker_id=name, incarnation=f"{name}-1", elastic=True)
        found: pb.WorkerConfig = await self._call(host, "RegisterWorker", request)
        return found

    async def _send_heartbeats(self, host: SimulatedHost) -> None:
        job = host.job
        beats = [
            pb.HeartbeatRequest(
                job_id=job.name,
                worker_id=name,
                incarnation=f"{name}-1",
                generation=job.generation,
                status=pb.WORKER_STATUS_TRAINING,
                resources=pb.ResourceUsage(cpu_percent=50.0, memory_used_bytes=1 << 30),
                explicit_acks=True,
            )
            for name in host.workers
        ]
        request = pb.HeartbeatBatchRequest(heartbeats=beats)
        await asyncio.sleep(self._rng.uniform(0, self._interval_s))
        while True:
            began_s = time.monotonic()
            try:
                found: pb.HeartbeatBatchResponse = await self._call(host, "HeartbeatBatch", request)
            except StrataError as error:
                self._problem(f"heartbeats of {job.name}: {error.message}")
                return
            took_s = time.monotonic() - began_s
            self._counts["heartbeats"] += len(beats)
            self._counts["late"] += took_s > 1
            if len(self._latencies_ms) < LATENCIES_KEPT:
                self._latencies_ms.append(took_s * 1000)
            for outcome in found.outcomes:
                if outcome.status_code not in (0, 14):
                    self._problem(f"{outcome.worker_id} of {job.name}: {outcome.status_message}")
                elif not outcome.status_code and outcome.response.generation != job.generation:
                    self._problem(f"{job.name} is in generation {outcome.response.generation}: a worker was evicted")
            self._interval_s = max(1.0, found.outcomes[0].response.heartbeat_interval_ms / 1000)
            await asyncio.sleep(max(0.0, self._interval_s - took_s))

    async def _read(self, host: SimulatedHost) -> None:
        pause_s = self._plan.ack_s / len(host.workers)
        await asyncio.sleep(self._rng.uniform(0, pause_s))
        while True:
            for name in host.workers:
                try:
                    await self._next_shard(host, name)
                except StrataError as error:
                    self._problem(f"shards of {host.job.name}: {error.message}")
                    return
                await asyncio.sleep(pause_s)

    async def _next_shard(self, host: SimulatedHost, name: str) -> None:
        job, held = host.job, host.held.pop(name, [])
        request = pb.ShardRequest(
            job_id=job.name,
            dataset_id=DATASET,
            epoch=job.epoch,
            worker_id=name,
            incarnation=f"{name}-1",
            generation=job.generation,
            explicit_acks=True,
            max_shards=1,
            acks=[pb.ShardAck(lease_id=each.lease_id) for each in held],
            held_leases=[each.lease_id for each in held],
        )
        found: pb.ShardAssignment = await self._call(host, "GetNextShards", request)
        self._counts["shard_calls"] += 1
        for each in held:
            if each.lease_id in found.rejected_leases:
                job.expected.ack_refused(job.epoch, name, each.lease_id)
            else:
                job.expected.ack_confirmed(job.epoch, name, each.start_index, each.end_index)
                self._counts["acks"] += 1
        host.held[name] = list(found.shards)
        for each in found.shards:
            job.expected.granted(job.epoch, name, each.start_index, each.end_index)

    async def _call(self, host: SimulatedHost, name: str, request: Any) -> Any:
        return await host.link.call(lambda stub: getattr(stub, name), request, SHORT)

    def _problem(self, text: str) -> None:
        if len(self._problems) < 20:
            self._problems.append(text)

    def figures(self) -> LoadFigures:
        """Since the last time."""
        taken_ms, self._latencies_ms = self._latencies_ms or [0.0], []
        counts, self._counts = self._counts, Counter()
        broken = [problem for job in self._jobs for problem in job.expected.problems[:3]]
        return LoadFigures(
            joined=sum(len(host.workers) for host in self._hosts),
            heartbeats=counts["heartbeats"],
            shard_calls=counts["shard_calls"],
            acks=counts["acks"],
            late=counts["late"],
            p50_ms=percentile(taken_ms, 0.5),
            p99_ms=percentile(taken_ms, 0.99),
            interval_s=self._interval_s,
            problems=[*self._problems, *broken],
        )


async def main() -> None:
    workers = SimulatedWorkers(msgspec.json.decode(sys.argv[1], type=LoadPlan))
    await workers.join()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    sys.stdout.write("joined\n")
    sys.stdout.flush()
    while await reader.readline():
        sys.stdout.write(msgspec.json.encode(workers.figures()).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
