"""Workers of any language on one job of one coordinator."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import grpc
import pytest

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from tests.conformance.coordinator.drivers import Answer, Driver

WATCH_S: Final = 20.0
MARKS: Final = [
    # All share the loop of the coordinator they talk to.
    pytest.mark.asyncio(loop_scope="session"),
    # The first test waits for the compiler; every single answer has a limit of its own.
    pytest.mark.timeout(900),
]


class Fleet:
    """The drivers of one test; `stub` is how an operator looks at their job."""

    def __init__(
        self,
        address: str,
        job: str,
        folder: Path,
        stub: pb_grpc.CoordinatorAsyncStub,
        commands: Mapping[str, Sequence[str]],
    ) -> None:
        self.address = address
        self.job = job
        self.folder = folder
        self.stub = stub
        self._commands = commands
        self._drivers: list[Driver] = []

    async def start(self, sdk: str, environ: Mapping[str, str] | None = None) -> Driver:
        """A driver that has not joined."""
        told = {"STRATA_WORKER_ADDRESS": self.address, "STRATA_WORKER_PATIENCE_S": "20", **(environ or {})}
        driver = await Driver.start(sdk, self._commands[sdk], told, self.folder)
        self._drivers.append(driver)
        return driver

    async def join(self, sdk: str, worker_id: str, *, elastic: bool = False) -> Driver:
        driver = await self.start(sdk)
        await driver.ask("join", job=self.job, worker_id=worker_id, elastic=elastic)
        return driver

    async def join_all(self, *sdks: str, elastic: bool = False) -> list[Driver]:
        """Workers w0, w1, … in one generation."""
        joining = (self.join(sdk, f"w{number}", elastic=elastic) for number, sdk in enumerate(sdks))
        drivers = await asyncio.gather(*joining)
        await self.until(lambda job: job.world_size == len(sdks))
        await asyncio.gather(*(driver.ask("follow") for driver in drivers))
        return drivers

    async def until(self, wanted: Callable[[pb.JobState], bool], within_s: float = WATCH_S) -> pb.JobState:
        """The job as soon as it is as wanted."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    async for news in self.stub.WatchJob(pb.WatchJobRequest(job_id=self.job, min_interval_ms=20)):
                        if wanted(news.job):
                            return news.job
                except grpc.aio.AioRpcError as error:
                    # Nobody leads for a moment, after a restart or on a machine that is too busy to renew a lease.
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    await asyncio.sleep(0.05)

    async def lost(self, worker_id: str) -> None:
        await self.until(
            lambda job: any((each.worker_id, each.liveness) == (worker_id, pb.LIVENESS_LOST) for each in job.workers)
        )

    async def tell(self, kind: pb.CommandKind.ValueType, *worker_ids: str) -> None:
        await self.stub.IssueCommand(pb.IssueCommandRequest(job_id=self.job, kind=kind, worker_ids=worker_ids))

    def corpus(self, lines: int) -> list[str]:
        """Two files; every line is its number."""
        files = {"a.txt": range(lines // 3), "b.txt": range(lines // 3, lines)}
        for name, span in files.items():
            (self.folder / name).write_text("".join(f"{number}\n" for number in span), encoding="utf-8")
        return [str(self.folder / name) for name in files]

    async def close(self) -> None:
        for driver in self._drivers:
            if driver.process.returncode is None:
                driver.signal(signal.SIGCONT)
            await driver.close()


async def next_shard(driver: Driver, epoch: int = 0, dataset_id: str = "corpus") -> Answer:
    """There must be one."""
    shard: Answer | None = (await driver.ask("next_shard", dataset_id=dataset_id, epoch=epoch))["shard"]
    assert shard is not None, "the epoch is over"
    return shard


async def finish(driver: Driver, shard: Answer) -> None:
    await driver.ask("done", lease_id=shard["lease_id"])


async def consume(driver: Driver, epoch: int = 0, dataset_id: str = "corpus") -> list[Answer]:
    """All shards that this worker gets until the epoch is over."""
    found: list[Answer] = []
    while (shard := (await driver.ask("next_shard", dataset_id=dataset_id, epoch=epoch))["shard"]) is not None:
        found.append(shard)
        await finish(driver, shard)
    return found


def samples(shards: Sequence[Answer]) -> list[int]:
    return sorted(sample for shard in shards for sample in range(shard["start"], shard["end"]))
