"""The clients of `bench coordinator`, in a process of their own: `grpc.aio` on uvloop, the same code for both sides.

Requests are bytes made beforehand where they do not change, and the collector rests while something is measured: what
the clients cost is nobody's figure.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, Final, assert_never

import grpc
import msgspec
import psutil  # type: ignore[import-untyped]
import uvloop

from bench.coordinator.bare import TEACH
from bench.coordinator.orders import (
    Batches,
    Beats,
    Define,
    Heartbeats,
    Hosts,
    Join,
    Meet,
    Offered,
    Order,
    Shards,
    Teach,
    Watch,
)
from bench.load_process import Figures
from bench.percentiles import percentile
from strata.base.clock import SystemClock
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.process import SERVICE
from strata.coord.worker.relay import HeartbeatRelay, RelayLink
from strata.coord.worker.settings import WorkerSettings

DATASET: Final = "corpus"
SHARD_SIZE: Final = 1_000
ACK_WORKERS: Final = 64
"""In flight at once, each over a connection of its own."""
POLL_S: Final = 0.005
TIMEOUT_S: Final = 60.0
_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)

Call = Callable[[bytes], Awaitable[bytes]]
Send = Callable[[int, pb.HeartbeatRequest], Awaitable[pb.HeartbeatResponse]]


class Server:
    """One server under test, and connections to it that stay open over all turns."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channels: list[grpc.aio.Channel] = []

    def calls(self, method: str, count: int) -> list[Call]:
        """A way to make one call for each connection, of which there are `count`."""
        while len(self._channels) < count:
            self._channels.append(grpc.aio.insecure_channel(self._address, options=_OPTIONS))
        path = method if method.startswith("/") else f"/{SERVICE}/{method}"
        return [_with_timeout(channel.unary_unary(path)) for channel in self._channels[:count]]


def _with_timeout(call: Any) -> Call:
    async def make(request: bytes) -> bytes:
        reply: bytes = await call(request, timeout=TIMEOUT_S)
        return reply

    return make


class Load:
    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._met = 0

    async def carry_out(self, order: Order) -> list[float]:  # noqa: C901, PLR0911 - one arm per order
        match order:
            case Join():
                return await self._join(order)
            case Hosts():
                return await self._hosts(order)
            case Define():
                return await self._define(order)
            case Teach():
                return await self._teach(order)
            case Heartbeats():
                requests = [_beat(order.job, number).SerializeToString() for number in range(ACK_WORKERS)]
                return await self._again_and_again(order.address, "Heartbeat", requests, order.seconds)
            case Batches():
                return await self._batches(order)
            case Shards():
                return await self._shards(order)
            case Offered():
                return await self._offered(order)
            case Meet():
                return await self._meet(order)
            case Beats():
                return await self._beats(order)
            case Watch():
                return await self._watch(order)
            case _:
                assert_never(order)

    def _calls(self, address: str, method: str, count: int = ACK_WORKERS) -> list[Call]:
        return self._servers.setdefault(address, Server(address)).calls(method, count)

    async def _join(self, order: Join) -> list[float]:
        calls = self._calls(order.address, "RegisterWorker", order.channels)
        made = 0

        async def join(number: int) -> None:
            nonlocal made
            request = _worker(order.job, number).SerializeToString()
            while True:
                made += 1
                config = pb.WorkerConfig.FromString(await calls[number % len(calls)](request))
                # Not placed yet: a worker calls again when it is told to. Here nobody tells it, so it asks.
                if config.generation:
                    return

        began_s = perf_counter()
        await asyncio.gather(*(join(number) for number in range(order.workers)))
        return [perf_counter() - began_s, float(made)]

    async def _define(self, order: Define) -> list[float]:
        request = pb.DatasetInfo(
            dataset_id=DATASET,
            num_samples=order.shards * SHARD_SIZE,
            shard_size=SHARD_SIZE,
            files=[pb.DatasetFile(path="s3://bucket/corpus.parquet", num_samples=order.shards * SHARD_SIZE)],
            job_id=order.job,
            worker_id=worker_name(0),
        )
        await self._calls(order.address, "AckDataset", 1)[0](request.SerializeToString())
        return []

    async def _teach(self, order: Teach) -> list[float]:
        requests = {
            "RegisterWorker": _worker(order.job, 0),
            "Heartbeat": _beat(order.job, 0),
            "HeartbeatBatch": _batch(order.job, 0, order.batch),
            "GetNextShards": _next_shard(order.job, 0, 0),
        }
        replies = {
            method: await self._calls(order.ours, method, 1)[0](request.SerializeToString())
            for method, request in requests.items()
        }
        if order.bare:
            await self._calls(order.bare, TEACH, 1)[0](msgspec.msgpack.encode(replies))
        return [float(size) for method in requests for size in (requests[method].ByteSize(), len(replies[method]))]

    async def _batches(self, order: Batches) -> list[float]:
        hosts = ACK_WORKERS // 8
        requests = [_batch(order.job, host * order.batch, order.batch).SerializeToString() for host in range(hosts)]
        (rate,) = await self._again_and_again(order.address, "HeartbeatBatch", requests, order.seconds)
        return [rate * order.batch]

    async def _again_and_again(self, address: str, method: str, requests: list[bytes], seconds: float) -> list[float]:
        """Each request over its own connection, and again as soon as it is answered."""
        calls = self._calls(address, method, len(requests))
        until_s = perf_counter() + seconds

        async def repeat(call: Call, request: bytes) -> int:
            count = 0
            while perf_counter() < until_s:
                await call(request)
                count += 1
            return count

        began_s = perf_counter()
        counts = await asyncio.gather(*map(repeat, calls, requests))
        return [sum(counts) / (perf_counter() - began_s)]

    async def _shards(self, order: Shards) -> list[float]:
        readers = [Reader(order.job, n, call) for n, call in enumerate(self._calls(order.address, "GetNextShards"))]
        until_s = perf_counter() + order.seconds

        async def read(reader: Reader) -> int:
            count = 0
            while perf_counter() < until_s:
                await reader.next()
                count += 1
            return count

        began_s = perf_counter()
        counts = await asyncio.gather(*map(read, readers))
        return [sum(counts) / (perf_counter() - began_s)]

    async def _offered(self, order: Offered) -> list[float]:
        """Open loop: a call is due when it is due, and one that starts late because others were slow counts as late."""
        readers = [Reader(order.job, n, call) for n, call in enumerate(self._calls(order.address, "GetNextShards"))]
        took_ms: list[float] = []
        began_s = perf_counter()

        async def read(number: int, reader: Reader) -> None:
            for due in range(number, int(order.rate * order.seconds), len(readers)):
                due_s = began_s + due / order.rate
                if (ahead_s := due_s - perf_counter()) > 0:
                    await asyncio.sleep(ahead_s)
                await reader.next()
                took_ms.append((perf_counter() - due_s) * 1e3)

        await asyncio.gather(*(read(number, reader) for number, reader in enumerate(readers)))
        reached = len(took_ms) / (perf_counter() - began_s)
        return [percentile(took_ms, 50), percentile(took_ms, 99), reached]

    async def _hosts(self, order: Hosts) -> list[float]:
        """Measured from the third interval on, for four: then the workers of a host have the same rhythm."""
        counts: Counter[str] = Counter()
        async with AsyncExitStack() as stack:
            send = await (_relayed(order, counts, stack) if order.relayed else self._direct(order, counts))

            async def work(number: int) -> None:
                message = _beat(order.job, number)
                await asyncio.sleep(order.interval_s * number / order.workers)
                while True:
                    reply = await send(number, message)
                    counts["heartbeats"] += 1
                    await asyncio.sleep(reply.heartbeat_interval_ms / 1000)

            async with asyncio.TaskGroup() as group:
                working = [group.create_task(work(number)) for number in range(order.workers)]
                await asyncio.sleep(2 * order.interval_s)
                counts.clear()
                cpu_s, began_s = _cpu_s(order.pid), perf_counter()
                await asyncio.sleep(4 * order.interval_s)
                took_s = perf_counter() - began_s
                figures = [float(counts["heartbeats"]), float(counts["calls"]), (_cpu_s(order.pid) - cpu_s) * 1e3]
                for task in working:
                    task.cancel()
        return [figure / took_s for figure in figures]

    async def _direct(self, order: Hosts, counts: Counter[str]) -> Send:
        calls = self._calls(order.address, "Heartbeat", order.workers)

        async def send(number: int, message: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
            counts["calls"] += 1
            return pb.HeartbeatResponse.FromString(await calls[number](message.SerializeToString()))

        return send

    async def _beats(self, order: Beats) -> list[float]:
        """Open loop, over all workers in turn; each heartbeat has the telemetry of eight GPUs."""
        calls = self._calls(order.address, "Heartbeat", order.channels)
        requests = [_beat(order.job, number, gpus=8).SerializeToString() for number in range(order.workers)]
        took_ms: list[float] = []
        cpu_s, began_s = _cpu_s(order.pid), perf_counter()

        async def beat(channel: int) -> None:
            for due in range(channel, int(order.rate * order.seconds), len(calls)):
                due_s = began_s + due / order.rate
                if (ahead_s := due_s - perf_counter()) > 0:
                    await asyncio.sleep(ahead_s)
                sent_s = perf_counter()
                await calls[channel](requests[due % order.workers])
                took_ms.append((perf_counter() - sent_s) * 1e3)

        await asyncio.gather(*map(beat, range(len(calls))))
        passed_s = perf_counter() - began_s
        busy = (_cpu_s(order.pid) - cpu_s) / passed_s * 100
        return [percentile(took_ms, 50), percentile(took_ms, 99), busy, len(took_ms) / passed_s]

    async def _watch(self, order: Watch) -> list[float]:
        """What is received is not read: what a watcher makes of it costs the watcher."""
        request = pb.WatchJobRequest(job_id=order.job, min_interval_ms=200, deltas=order.deltas).SerializeToString()
        received = [0, 0]

        async def watch() -> None:
            options = (*_OPTIONS, ("grpc.max_receive_message_length", 64 << 20))
            async with grpc.aio.insecure_channel(order.address, options=options) as channel:
                stream: Any = channel.unary_stream(f"/{SERVICE}/WatchJob")
                async for message in stream(request):
                    received[0] += 1
                    received[1] += len(message)

        watching = [asyncio.create_task(watch()) for _ in range(order.watchers)]
        await asyncio.sleep(order.seconds)
        for each in watching:
            each.cancel()
        for ended in await asyncio.gather(*watching, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return [received[0] / order.seconds, received[1] / order.seconds / (1 << 20)]

    async def _meet(self, order: Meet) -> list[float]:
        self._met += 1
        calls = self._calls(order.address, "Barrier", order.channels)
        barrier_id = f"meeting-{self._met}"
        last_s = 0.0
        released_s: list[float] = []

        def request(number: int, *, wait: bool = True) -> bytes:
            return pb.BarrierRequest(
                barrier_id=barrier_id,
                expected_participants=order.workers,
                job_id=order.job,
                worker_id=worker_name(number),
                wait=wait,
            ).SerializeToString()

        async def enter(number: int) -> None:
            reply = await calls[number % len(calls)](request(number))
            released_s.append(perf_counter())
            if not pb.BarrierResponse.FromString(reply).released:
                raise RuntimeError(f"worker {number} was not released")

        waiting = [asyncio.create_task(enter(number)) for number in range(order.workers - 1)]
        while True:
            await asyncio.sleep(POLL_S)
            found = pb.BarrierResponse.FromString(await calls[0](request(0, wait=False)))
            if found.arrived == order.workers - 1:
                break
        last_s = perf_counter()
        await asyncio.gather(enter(order.workers - 1), *waiting)
        took_ms = [(at_s - last_s) * 1e3 for at_s in released_s]
        return [percentile(took_ms, 50), percentile(took_ms, 99), max(took_ms)]


class CountingRelay(HeartbeatRelay):
    def __init__(self, address: str, path: Path, counts: Counter[str], phase_s: float) -> None:
        super().__init__(WorkerSettings(address=address), path, SystemClock(), phase_s)
        self._counts = counts

    async def _forward(self, *batch: Any) -> None:
        self._counts["calls"] += 1
        await super()._forward(*batch)


async def _relayed(order: Hosts, counts: Counter[str], stack: AsyncExitStack) -> Send:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relays-")))
    clock, links = SystemClock(), []
    for host in range(order.hosts):
        phase_s = order.interval_s * host / order.hosts
        await stack.enter_async_context(CountingRelay(order.address, folder / str(host), counts, phase_s))
    for number in range(order.workers):
        links.append(RelayLink(folder / str(number % order.hosts), clock))
        stack.push_async_callback(links[-1].close)

    async def send(number: int, message: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        reply = await links[number].heartbeat(message, (), order.interval_s)
        if reply is None:
            raise RuntimeError("the relay failed")
        return reply

    return send


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class Reader:
    """A worker that holds one shard at a time and acks it when it asks for the next."""

    def __init__(self, job: str, number: int, call: Call) -> None:
        self._job = job
        self._number = number
        self._call = call
        self._lease_id = 0

    async def next(self) -> None:
        request = _next_shard(self._job, self._number, self._lease_id)
        reply = pb.ShardAssignment.FromString(await self._call(request.SerializeToString()))
        if not reply.lease_id:
            raise RuntimeError("there was no shard")
        self._lease_id = reply.lease_id


def worker_name(number: int) -> str:
    return f"worker-{number:05}"


def _worker(job: str, number: int) -> pb.WorkerInfo:
    name = worker_name(number)
    return pb.WorkerInfo(
        worker_id=name, job_id=job, incarnation=f"{name}-1", ip="10.0.0.1", port=29500, gpu_count=8, hostname="host"
    )


def _beat(job: str, number: int, gpus: int = 1) -> pb.HeartbeatRequest:
    name = worker_name(number)
    gpu = pb.GpuMetrics(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        utilization_percent=98.5,
        memory_used_bytes=70 << 30,
        memory_total_bytes=80 << 30,
        temperature_celsius=64.0,
        power_watts=650.0,
    )
    usage = pb.ResourceUsage(
        cpu_percent=412.5,
        memory_used_bytes=48 << 30,
        disk_read_bytes=1 << 40,
        disk_write_bytes=1 << 38,
        network_rx_bytes=1 << 41,
        network_tx_bytes=1 << 41,
        gpu_metrics=[gpu] * gpus,
    )
    return pb.HeartbeatRequest(
        worker_id=name,
        status=pb.WORKER_STATUS_TRAINING,
        resources=usage,
        job_id=job,
        incarnation=f"{name}-1",
        generation=1,
        step=123_456,
        step_time_ms=412.5,
        explicit_acks=True,
    )


def _batch(job: str, first: int, size: int) -> pb.HeartbeatBatchRequest:
    return pb.HeartbeatBatchRequest(heartbeats=[_beat(job, number) for number in range(first, first + size)])


def _next_shard(job: str, number: int, lease_id: int) -> pb.ShardRequest:
    name = worker_name(number)
    return pb.ShardRequest(
        dataset_id=DATASET,
        job_id=job,
        worker_id=name,
        incarnation=f"{name}-1",
        acks=[pb.ShardAck(lease_id=lease_id)] if lease_id else (),
        explicit_acks=True,
        held_leases=(),
    )


async def main() -> None:
    load = Load()
    loop = asyncio.get_running_loop()
    decode = msgspec.json.Decoder(Order).decode
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = decode(line)
        gc.collect()
        gc.disable()
        values = await load.carry_out(order)
        gc.enable()
        print(msgspec.json.encode(Figures(values)).decode(), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
