"""The coordinator beside DLRover's local master: `python -m bench dlrover`.

DLRover is the published package in an environment of its own, which the first run makes in the user's cache. Each side
has 64 callers and its own client: ours as in `bench coordinator`, DLRover's `MasterClient` in threads. Ours commits
each ack to SQLite (synchronous=FULL) before it answers; DLRover keeps everything in memory.

- `heartbeat`: calls a second.
- `shards`: shards taken and reported a second; DLRover makes two calls for it, ours one.

The note has the processor time of the server for each, and what came of an ack by a worker that never had the shard.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import msgspec

from bench.coordinator.load import ACK_WORKERS, DATASET, worker_name
from bench.coordinator.orders import Define, Heartbeats, Join, Shards
from bench.coordinator.processes import Process, clients, ours, serving
from bench.interleave import interleave
from bench.load_process import Clients, started
from bench.report import Report
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.process import SERVICE
from tests.support.ports import port_of, reserve_port
from tests.support.venvs import cached_venv

DLROVER: Final = "0.6.1"
# It has no upper bounds of its own: these are versions that it was seen to run with, and gRPC is ours.
PACKAGES: Final = (f"dlrover=={DLROVER}", "grpcio==1.85.1", "protobuf==7.36.2", "kubernetes==37.0.2")
JOB: Final = "bench"
SHARDS: Final = 200_000
"""It takes from the front of a list: more would cost it more."""


class _Define(msgspec.Struct, frozen=True, tag="define"):
    shards: int


class _Heartbeats(msgspec.Struct, frozen=True, tag="heartbeats"):
    seconds: float


class _Shards(msgspec.Struct, frozen=True, tag="shards"):
    seconds: float


class _Zombie(msgspec.Struct, frozen=True, tag="zombie"):
    """No fields."""


async def run(report: Report, *, quick: bool) -> None:
    rounds, seconds = (3, 3.0) if quick else (10, 5.0)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        database = f"sqlite:{Path(folder) / 'coordinator.db'}"
        async with clients() as load, ours(database) as coordinator, _master() as (master, theirs):
            await load.carry_out(Join(coordinator.address, JOB, ACK_WORKERS, ACK_WORKERS))
            await load.carry_out(Define(coordinator.address, JOB, SHARDS))
            await theirs.carry_out(_Define(SHARDS))
            accepted = await theirs.carry_out(_Zombie())
            note = (
                f"an ack by another worker: {'refused' if await _refuses_zombie(coordinator) else 'ACCEPTED'},"
                f" DLRover: {'accepted' if accepted[0] else 'refused'}"
            )
            costs = _Costs(coordinator, master)
            found = await interleave(
                costs.ours(lambda: load.carry_out(Heartbeats(coordinator.address, JOB, seconds)), seconds),
                costs.theirs(lambda: theirs.carry_out(_Heartbeats(seconds)), seconds),
                rounds,
            )
            report.add("heartbeat", "calls/s", found, note=costs.note())
            costs = _Costs(coordinator, master)
            found = await interleave(
                costs.ours(lambda: load.carry_out(Shards(coordinator.address, JOB, seconds)), seconds),
                costs.theirs(lambda: theirs.carry_out(_Shards(seconds)), seconds),
                rounds,
            )
            report.add("shards", "shards/s", found, note=f"{costs.note()}; {note}")


@asynccontextmanager
async def _master() -> AsyncIterator[tuple[Process, Clients]]:
    """DLRover's local master, and its clients."""
    python = str(cached_venv(f"dlrover-{DLROVER}", PACKAGES) / "python")
    quiet = {"DLROVER_LOG_LEVEL": "ERROR"}
    with reserve_port() as guard:
        port = port_of(guard)
        words = ("-m", "dlrover.python.master.main", "--platform", "local", "--service_type", "grpc")
        command = (python, *words, "--job_name", JOB, "--node_num", str(ACK_WORKERS), "--port", str(port))
        address = f"127.0.0.1:{port}"
        async with started(*command, settings=quiet) as process:
            await serving(address, process)
            client = str(Path(__file__).with_name("client.py"))
            async with started(python, client, address, str(ACK_WORKERS), settings=quiet) as load:
                yield Process(address, process.pid), Clients(load)


async def _refuses_zombie(coordinator: Process) -> bool:
    """Whether an ack is refused that comes from a worker which never had the shard."""
    async with grpc.aio.insecure_channel(coordinator.address) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/GetNextShards")

        async def ask(number: int, **more: Any) -> pb.ShardAssignment:
            request = pb.ShardRequest(
                dataset_id=DATASET, job_id=JOB, worker_id=worker_name(number), explicit_acks=True, **more
            )
            return pb.ShardAssignment.FromString(await call(request.SerializeToString()))

        taken = await ask(0)
        lease = taken.lease_id
        zombie = await ask(1, acks=[pb.ShardAck(lease_id=lease)], acks_only=True)
        holder = await ask(0, acks=[pb.ShardAck(lease_id=lease)], acks_only=True)
    return lease in zombie.rejected_leases and lease not in holder.rejected_leases


class _Costs:
    """The processor time of both servers for each call, turn by turn."""

    def __init__(self, coordinator: Process, master: Process) -> None:
        self._sides = {"Strata": (coordinator, list[float]()), "DLRover": (master, list[float]())}

    def ours(self, measure: Callable[[], Awaitable[list[float]]], seconds: float) -> Callable[[], Awaitable[float]]:
        return self._counted("Strata", measure, seconds)

    def theirs(self, measure: Callable[[], Awaitable[list[float]]], seconds: float) -> Callable[[], Awaitable[float]]:
        return self._counted("DLRover", measure, seconds)

    def _counted(
        self, side: str, measure: Callable[[], Awaitable[list[float]]], seconds: float
    ) -> Callable[[], Awaitable[float]]:
        server, spent = self._sides[side]

        async def once() -> float:
            before_s = server.cpu_s()
            (rate,) = await measure()
            spent.append(1e6 * (server.cpu_s() - before_s) / (rate * seconds))
            return rate

        return once

    def note(self) -> str:
        return "server " + ", ".join(f"{side} {median(spent):.0f} µs" for side, (_, spent) in self._sides.items())
