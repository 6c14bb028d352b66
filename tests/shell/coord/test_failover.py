"""Real coordinator processes that are killed, frozen, drained and replaced, with work in flight."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from tests.shell.coord.running import CoordinatorProcess, connect, patiently, refused, register
from tests.support.busy import BUSY
from tests.support.ports import port_of, reserve_port

WORKERS = [f"w{number}" for number in range(8)]
SAMPLES, SHARD = 3_000, 10

AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # How gRPC itself ends a call that arrives in the instant in which its server stops.
    grpc.StatusCode.CANCELLED,
)

Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a coordinator on a port of its own; all end with the test."""
    async with AsyncExitStack() as stack:

        async def begin(database: str, **settings: str) -> CoordinatorProcess:
            guard = stack.enter_context(reserve_port())
            process = CoordinatorProcess(database, port_of(guard), settings)
            stack.push_async_callback(process.close)
            await process.start()
            return process

        yield begin


class Reader:
    """A worker that reads and acks one shard after the other at whoever leads, and knows what was confirmed."""

    def __init__(self, worker_id: str, addresses: list[str]) -> None:
        self.worker_id = worker_id
        self.confirmed: list[tuple[int, int]] = []
        self.rejected: list[int] = []
        self._channels = [connect(address) for address in addresses]
        self._stubs = [pb_grpc.CoordinatorStub(channel) for channel in self._channels]
        self._turn = 0

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def call(self, name: str, request: Any) -> Any:
        """Whoever leads answers; the same message again until then."""
        while True:
            stub = self._stubs[self._turn % len(self._stubs)]
            try:
                return await getattr(stub, name)(request, timeout=1.0)
            except grpc.aio.AioRpcError as error:
                if error.code() not in AGAIN:
                    raise
            self._turn += 1
            await asyncio.sleep(0.02)

    async def read(self, stop: asyncio.Event) -> None:
        """Until told to stop or the epoch is over."""
        last: pb.ShardAssignment | None = None
        while not stop.is_set():
            request = pb.ShardRequest(dataset_id="d", worker_id=self.worker_id, explicit_acks=True)
            if last is not None:
                request.acks.add(lease_id=last.lease_id)
                request.held_leases.append(last.lease_id)
            found = await self.call("GetNextShards", request)
            self.rejected += found.rejected_leases
            if last is not None and last.lease_id not in found.rejected_leases:
                self.confirmed.append((last.start_index, last.end_index))
            last = found if found.shard_id else None
            if found.end_of_epoch:
                return
            if last is None:
                await asyncio.sleep(0.02)


async def prepare(address: str) -> None:
    async with connect(address) as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        await register(stub, *WORKERS)
        info = pb.DatasetInfo(dataset_id="d", worker_id="w0", num_samples=SAMPLES, shard_size=SHARD)
        await patiently(stub.AckDataset, info)


async def barrier(reader: Reader, barrier_id: str) -> pb.BarrierResponse:
    found = await reader.call("Barrier", pb.BarrierRequest(barrier_id=barrier_id, worker_id=reader.worker_id))
    assert isinstance(found, pb.BarrierResponse)
    return found


async def survives(
    addresses: list[str], fail: Callable[[], Any], *, readers_until: Callable[[list[Reader]], bool]
) -> float:
    """Workers read and one half waits at a barrier while `fail` happens. Returns how long until an ack got through."""
    readers = [Reader(worker_id, addresses) for worker_id in WORKERS]
    stop = asyncio.Event()
    try:
        reading = [asyncio.create_task(each.read(stop)) for each in readers[:4]]
        waiting = [asyncio.create_task(barrier(each, "open")) for each in readers[4:]]
        while not readers_until(readers):
            await asyncio.sleep(0.01)
        began_s = time.monotonic()
        await fail()
        before = sum(len(each.confirmed) for each in readers)
        while sum(len(each.confirmed) for each in readers) == before:
            await asyncio.sleep(0.002)
        back_s = time.monotonic() - began_s
        await asyncio.gather(*reading)
        # Everybody at the barrier: it releases, those that waited before the failure included.
        arrived = [asyncio.create_task(barrier(each, "open")) for each in readers[:4]]
        verdicts = {each.verdict for each in await asyncio.gather(*waiting, *arrived)}
        assert verdicts == {pb.BARRIER_VERDICT_RELEASED}
        check_exactly_once(readers)
    finally:
        stop.set()
        for each in readers:
            await each.close()
    return back_s


def check_exactly_once(readers: list[Reader]) -> None:
    samples = sorted(sample for each in readers for span in each.confirmed for sample in range(*span))
    assert samples == list(range(SAMPLES)), "an ack was lost or counted twice"
    assert not [lease for each in readers for lease in each.rejected]


def some_read(readers: list[Reader]) -> bool:
    return sum(len(each.confirmed) for each in readers) >= 40


async def test_a_killed_coordinator_is_back_within_two_seconds_and_lost_no_ack(tmp_path: Path, start: Start) -> None:
    # Snapshots come often, so that one is what it starts from.
    coordinator = await start(f"sqlite:{tmp_path}/coord.db", STRATA_COORDINATOR_SNAPSHOT_EVERY="40")
    await coordinator.serving()
    await prepare(coordinator.address)

    async def kill_and_start() -> None:
        await coordinator.kill()
        await coordinator.start()

    back_s = await survives([coordinator.address], kill_and_start, readers_until=some_read)
    print(f"\nkilled and back in {back_s:.2f} s")
    assert back_s <= 2.0 * BUSY


async def test_a_standby_takes_over_from_a_killed_leader(postgres_url: str, start: Start) -> None:
    leader = await start(postgres_url)
    await leader.serving()
    standby = await start(postgres_url)
    await standby.standing_by()
    await prepare(leader.address)
    back_s = await survives([leader.address, standby.address], leader.kill, readers_until=some_read)
    print(f"\nstandby took over in {back_s:.2f} s")
    assert back_s <= 5.0 * BUSY


async def test_a_drained_leader_hands_over_at_once(postgres_url: str, start: Start) -> None:
    # A standby looks for a free lead four times in a lease.
    leader = await start(postgres_url, STRATA_COORDINATOR_LEASE_S="1")
    await leader.serving()
    standby = await start(postgres_url, STRATA_COORDINATOR_LEASE_S="1")
    await standby.standing_by()
    await prepare(leader.address)

    async def drain() -> None:
        leader.signal(signal.SIGTERM)
        print(f"\nstandby leads after {await standby.serving():.2f} s")

    back_s = await survives([leader.address, standby.address], drain, readers_until=some_read)
    print(f"\ndrained, standby serves after {back_s:.2f} s")
    assert back_s < 1.0 * BUSY
    assert await asyncio.wait_for(leader.process.wait(), 5) == 0


async def test_a_frozen_leader_that_wakes_up_changes_nothing(postgres_url: str, start: Start) -> None:
    zombie = await start(postgres_url)
    await zombie.serving()
    successor = await start(postgres_url)
    await successor.standing_by()
    await prepare(zombie.address)
    async with connect(zombie.address) as old, connect(successor.address) as new:
        frozen, alive = pb_grpc.CoordinatorStub(old), pb_grpc.CoordinatorStub(new)
        held = await frozen.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="w0", explicit_acks=True))
        zombie.signal(signal.SIGSTOP)
        # In flight while it sleeps: it will be the first thing the zombie reads.
        ack = pb.ShardRequest(
            dataset_id="d", worker_id="w0", explicit_acks=True, acks=[pb.ShardAck(lease_id=held.lease_id)]
        )
        late = asyncio.ensure_future(refused(frozen.GetNextShards(ack)))
        took_s = await successor.serving()
        print(f"\nsuccessor leads {took_s:.2f} s after the freeze")
        assert took_s <= 5.0 * BUSY
        zombie.signal(signal.SIGCONT)
        assert (await late).code() is grpc.StatusCode.UNAVAILABLE
        error = await refused(frozen.RegisterWorker(pb.WorkerInfo(worker_id="new")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        job = (await alive.GetJob(pb.GetJobRequest())).job
        assert job.datasets[0].open_epochs[0].done_shards == 0, "the zombie's ack counts nowhere"
        assert "new" not in {each.worker_id for each in job.workers}
        assert job.incidents[0].kind == pb.INCIDENT_KIND_FAILOVER
        # The lease outlives the failover: its holder acks it at the successor.
        done = await alive.GetNextShards(ack)
        assert not done.rejected_leases
