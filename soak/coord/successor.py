"""The worker that goes on: it takes what the doomed held, finishes it, and proves that the job works without them."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Final, Self

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.link import CoordinatorLink, Deadline
from strata.coord.worker.settings import WorkerSettings

NAME: Final = "successor"
WITHIN: Final = Deadline(timeout_s=20.0, patience_s=60.0)


class Successor:
    """Calls by the current generation, whatever it is. `problems` has what went wrong for it."""

    def __init__(self, address: str) -> None:
        self._link = CoordinatorLink(WorkerSettings(address=address), "", SystemClock())
        self._who: dict[str, Any] = {"worker_id": NAME, "incarnation": f"{NAME}-1"}
        self._held: dict[str, list[int]] = {}
        self._beating: asyncio.Task[None] | None = None
        self._generation = 0
        self._rank = 0
        self.problems: list[str] = []

    async def __aenter__(self) -> Self:
        await self.catch_up()
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beating is not None:
            self._beating.cancel()
        await self._link.close()

    async def define(self, dataset: str, *, samples: int, shard_size: int) -> None:
        given = pb.DatasetInfo(dataset_id=dataset, num_samples=samples, shard_size=shard_size, **self._who)
        await self._call("AckDataset", given)

    async def take(self, dataset: str) -> pb.Shard:
        """The next shard, as soon as there is one; what was taken before stays in hand."""
        held = self._held.setdefault(dataset, [])
        request = pb.ShardRequest(dataset_id=dataset, explicit_acks=True, held_leases=held, wait_ms=10_000, **self._who)
        while True:
            found: pb.ShardAssignment = await self._call("GetNextShards", request)
            for shard in found.shards:
                held.append(shard.lease_id)
                return shard

    async def finish(self, dataset: str, step: int) -> None:
        """Ack everything, meet at a barrier with the other members, and commit a checkpoint of it."""
        await self.catch_up()
        held = self._held.pop(dataset, [])
        request = pb.ShardRequest(
            dataset_id=dataset,
            explicit_acks=True,
            held_leases=held,
            acks=[pb.ShardAck(lease_id=lease_id) for lease_id in held],
            **self._who,
        )
        found: pb.ShardAssignment = await self._call("GetNextShards", request)
        if found.rejected_leases or not found.end_of_epoch:
            self.problems.append(f"the successor could not finish {dataset}: {found}")
        barrier = pb.BarrierRequest(barrier_id=f"after-{dataset}", expected_participants=1, **self._who)
        met: pb.BarrierResponse = await self._call("Barrier", barrier)
        if not met.released:
            self.problems.append(f"the barrier after {dataset} did not release: {met}")
        part = pb.CheckpointInfo(
            checkpoint_id=f"c-{dataset}", path=f"mem:{dataset}", step=step, rank=self._rank, size_bytes=1, **self._who
        )
        await self._call("ReportCheckpoint", part)

    async def register_other(self, worker_id: str, incarnation: str) -> None:
        """A second incarnation of the doomed worker, in the same generation as all others."""
        while True:
            other = pb.WorkerInfo(worker_id=worker_id, incarnation=incarnation)
            config: pb.WorkerConfig = await self._call("RegisterWorker", other)
            await self.catch_up()
            if config.generation == self._generation:
                return

    async def dismiss(self, worker_id: str) -> None:
        """If it is still a member, it leaves; then all workers are in one generation again."""
        try:
            await self._call("LeaveWorker", pb.LeaveWorkerRequest(worker_id=worker_id))
        except StrataError as error:
            if error.code not in (Code.NOT_FOUND, Code.PRECONDITION):
                raise
        await self.catch_up()

    async def job(self) -> pb.JobState:
        found: pb.GetJobResponse = await self._call("GetJob", pb.GetJobRequest(history_limit=1))
        return found.job

    async def catch_up(self) -> None:
        """Into the current generation."""
        self._generation = 0
        while not self._generation:
            config: pb.WorkerConfig = await self._call("RegisterWorker", pb.WorkerInfo(**self._who))
            self._generation, self._rank = config.generation, config.rank

    async def _beat(self) -> None:
        while True:
            beat = pb.HeartbeatRequest(status=pb.WORKER_STATUS_TRAINING, **self._who)
            found: pb.HeartbeatResponse = await self._call("Heartbeat", beat)
            await asyncio.sleep(found.heartbeat_interval_ms / 1000)

    async def _call(self, name: str, request: Any) -> Any:
        return await self._link.call(lambda stub: getattr(stub, name), request, WITHIN)
