"""Logical workers on the real wire: they register, attach, send heartbeats, read and ack shards, and meet at barriers.

Each has the coroutines and the messages that a process of its own would have; some share a connection, as the workers
of one host might. The calls are those of the SDK's link, and so are retries and failover.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from soak.coord.expected_state import ExpectedState
from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.link import CoordinatorLink, Deadline, to_strata_error
from strata.coord.worker.settings import WorkerSettings

DATASET: Final = "corpus"
WAIT_MS: Final = 500
SHORT: Final = Deadline(timeout_s=5.0, patience_s=120.0)
FOR_EVER: Final = Deadline(timeout_s=None, patience_s=120.0)
"""A barrier may take as long as the others take."""
REATTACH_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """How many workers there are and how busy they are."""

    workers: int = 1_000
    channels: int = 50
    shards: int = 3_000
    """In an epoch; small enough that many epochs end during a campaign."""
    shard_size: int = 4
    think_s: float = 1.0
    """Mean time that a worker spends on one answer of GetNextShards."""
    wait_share: float = 0.5
    """How many go straight to the barrier of an epoch and sit in it while the others read."""


@dataclass
class Outage:
    """Since when no coordinator replies, and which channels got a reply since."""

    since_s: float
    first_s: float | None = None
    channels: set[int] = field(default_factory=set)
    all_s: float | None = None


@dataclass
class LogicalWorker:
    worker_id: str
    incarnation: str
    channel: int
    generation: int = 0
    epoch: int = 0
    waits: bool = False
    """It sits in a barrier."""


class WorkerPool:
    """All workers of one job. Records every grant and ack in the expected state; ends when `finish` says so."""

    def __init__(
        self, addresses: list[str], plan: WorkerPlan, expected: ExpectedState, rng: random.Random, job: str = ""
    ) -> None:
        self.plan = plan
        self.expected = expected
        self._rng = rng
        self._clock = SystemClock()
        settings = WorkerSettings(address=",".join(addresses), job=job)
        self._links = [CoordinatorLink(settings, "", self._clock) for _ in range(plan.channels)]
        self.workers = [
            LogicalWorker(f"w{number}", f"w{number}-1", number % plan.channels) for number in range(plan.workers)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._training: list[asyncio.Task[None]] = []
        self._last_epoch: int | None = None
        self.generation = 0
        self.interval_s = 0.0
        self.outage = Outage(0.0)
        self._answered = asyncio.Event()
        self._everywhere = asyncio.Event()

    # What the campaign asks

    @property
    def waiting(self) -> int:
        return sum(worker.waits for worker in self.workers)

    @property
    def reading(self) -> int:
        return sum(not worker.waits for worker in self.workers)

    def down(self, since_s: float) -> None:
        """From now on the first answer counts as the end of an outage."""
        self.outage = Outage(since_s)
        self._answered.clear()
        self._everywhere.clear()

    async def answered(self) -> float:
        """When the first call since `down` was answered."""
        await self._answered.wait()
        assert self.outage.first_s is not None
        return self.outage.first_s

    async def answered_everywhere(self) -> float:
        """When a call on the last of the channels was."""
        await self._everywhere.wait()
        assert self.outage.all_s is not None
        return self.outage.all_s

    async def job(self) -> pb.JobState:
        found: pb.GetJobResponse = await self._call(0, "GetJob", pb.GetJobRequest(history_limit=1_000), SHORT)
        return found.job

    def missing_members(self, job: pb.JobState) -> list[str]:
        """A sentence for each sign that somebody is gone: incidents, but for a change of the leader, come first."""
        lost = [each.message for each in job.incidents if each.kind != pb.INCIDENT_KIND_FAILOVER]
        found = [f"{len(lost)} incidents, such as: {'; '.join(lost[-3:])}"] if lost else []
        if (job.generation, job.world_size) != (self.generation, len(self.workers)):
            found.append(f"generation {job.generation} has {job.world_size} workers, not {len(self.workers)}")
        return found

    async def join(self) -> None:
        """All workers join one generation and register a dataset; then they work."""
        await asyncio.gather(*(self._register(worker) for worker in self.workers))
        while True:
            config = await self._register(self.workers[0])
            if config.generation and config.world_size == len(self.workers):
                break
            await asyncio.sleep(0.1)
        self.generation, self.interval_s = config.generation, config.heartbeat_interval_ms / 1000
        first = self.workers[0]
        dataset = pb.DatasetInfo(
            dataset_id=DATASET,
            worker_id=first.worker_id,
            num_samples=self.plan.shards * self.plan.shard_size,
            shard_size=self.plan.shard_size,
        )
        await self._call(first.channel, "AckDataset", dataset, SHORT)
        for worker in self.workers:
            worker.generation = self.generation
            self._tasks += [self._start(worker, self._attach), self._start(worker, self._heartbeat_loop)]
        self._training = [self._start(worker, self._train) for worker in self.workers]

    async def finish(self, within_s: float) -> int:
        """Let all workers end the epoch and meet a last time; how many epochs there were."""
        self._last_epoch = max(worker.epoch for worker in self.workers)
        _, stuck = await asyncio.wait(self._training, timeout=within_s)
        if stuck:
            where = ", ".join(f"{worker.worker_id} in epoch {worker.epoch}" for worker in self.workers[:3])
            self.expected.problem(f"{len(stuck)} workers did not finish within {within_s:g} s ({where}, …)")
            return self._last_epoch
        for epoch in sorted(self.expected.epochs):
            self.expected.close(epoch, len(self.workers))
        return self._last_epoch + 1

    async def close(self) -> None:
        for task in (*self._tasks, *self._training):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._training, return_exceptions=True)
        for link in self._links:
            await link.close()

    # What a worker does

    def _start(self, worker: LogicalWorker, work: Callable[[LogicalWorker], Awaitable[None]]) -> asyncio.Task[None]:
        async def live() -> None:
            try:
                await work(worker)
            except StrataError as error:
                self.expected.problem(f"{worker.worker_id} in {work.__name__}: {error.code.value}: {error.message}")

        return asyncio.create_task(live())

    async def _register(self, worker: LogicalWorker) -> pb.WorkerConfig:
        given = pb.WorkerInfo(worker_id=worker.worker_id, incarnation=worker.incarnation, elastic=True)
        found: pb.WorkerConfig = await self._call(worker.channel, "RegisterWorker", given, SHORT)
        return found

    async def _attach(self, worker: LogicalWorker) -> None:
        link = self._links[worker.channel]
        attempt = 0
        while True:
            index = link.index
            request = pb.AttachRequest(worker_id=worker.worker_id, incarnation=worker.incarnation)
            try:
                async for news in link.stub().Attach(request, metadata=link.metadata):
                    attempt = 0
                    self._same_generation(worker, news.generation)
            except grpc.aio.AioRpcError as error:
                failure = to_strata_error(error)
                if failure.code is not Code.UNAVAILABLE:
                    raise failure from None
                link.fail_over(index)
            await asyncio.sleep(min(REATTACH_S, link.backoff_s(attempt)))
            attempt += 1

    async def _heartbeat_loop(self, worker: LogicalWorker) -> None:
        await asyncio.sleep(self._rng.uniform(0, self.interval_s))
        while True:
            beat = pb.HeartbeatRequest(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                generation=worker.generation,
                status=pb.WORKER_STATUS_TRAINING,
                resources=pb.ResourceUsage(cpu_percent=50.0, memory_used_bytes=1 << 30),
                explicit_acks=True,
            )
            found: pb.HeartbeatResponse = await self._call(worker.channel, "Heartbeat", beat, SHORT)
            self._same_generation(worker, found.generation)
            await asyncio.sleep(found.heartbeat_interval_ms / 1000)

    async def _train(self, worker: LogicalWorker) -> None:
        while self._last_epoch is None or worker.epoch <= self._last_epoch:
            if worker is self.workers[0] or self._rng.random() >= self.plan.wait_share:
                await self._read(worker)
            request = pb.BarrierRequest(
                barrier_id=f"epoch_{worker.epoch}",
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                generation=worker.generation,
            )
            worker.waits = True
            found: pb.BarrierResponse = await self._call(worker.channel, "Barrier", request, FOR_EVER)
            worker.waits = False
            if found.verdict != pb.BARRIER_VERDICT_RELEASED:
                name = pb.BarrierVerdict.Name(found.verdict)
                self.expected.problem(f"the barrier of epoch {worker.epoch} ended with {name} for {worker.worker_id}")
            self.expected.released[worker.epoch] += 1
            if self.expected.released[worker.epoch] == len(self.workers):
                self.expected.close(worker.epoch, len(self.workers))
            worker.epoch += 1

    async def _read(self, worker: LogicalWorker) -> None:
        held: list[pb.Shard] = []
        while True:
            request = pb.ShardRequest(
                dataset_id=DATASET,
                epoch=worker.epoch,
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                generation=worker.generation,
                explicit_acks=True,
                max_shards=self._rng.randint(1, 3),
                wait_ms=WAIT_MS,
                acks=[pb.ShardAck(lease_id=each.lease_id) for each in held],
                held_leases=[each.lease_id for each in held],
            )
            found: pb.ShardAssignment = await self._call(worker.channel, "GetNextShards", request, SHORT)
            for each in held:
                if each.lease_id in found.rejected_leases:
                    self.expected.ack_refused(worker.epoch, worker.worker_id, each.lease_id)
                else:
                    self.expected.ack_confirmed(worker.epoch, worker.worker_id, each.start_index, each.end_index)
            held = list(found.shards)
            for each in held:
                self.expected.granted(worker.epoch, worker.worker_id, each.start_index, each.end_index)
            if found.end_of_epoch:
                return
            if held:
                await asyncio.sleep(self._rng.uniform(0, 2 * self.plan.think_s))

    def _same_generation(self, worker: LogicalWorker, generation: int) -> None:
        if generation != self.generation:
            self.expected.problem(f"{worker.worker_id} was told of generation {generation}: a worker was evicted")

    async def _call(self, channel: int, name: str, request: Any, within: Deadline) -> Any:
        sent_s = 0.0

        def method(stub: Any) -> Any:
            # Asked for once for every attempt: an answer to one from before the outage says nothing about its end.
            nonlocal sent_s
            sent_s = time.monotonic()
            return getattr(stub, name)

        found = await self._links[channel].call(method, request, within)
        self._note(channel, sent_s)
        return found

    def _note(self, channel: int, sent_s: float) -> None:
        outage = self.outage
        if outage.all_s is not None or sent_s < outage.since_s:
            return
        now_s = time.monotonic()
        if outage.first_s is None:
            outage.first_s = now_s
            self._answered.set()
        outage.channels.add(channel)
        if len(outage.channels) == len(self._links):
            outage.all_s = now_s
            self._everywhere.set()
