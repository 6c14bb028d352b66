"""Coordinators and worker programs as real processes, and what the journal says happened."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from strata.base.clock import SystemClock
from strata.coord.core.facts import Fact, GenerationFormed, ShardAcked, ShardsGranted, WorkerJoined, WorkerLost
from strata.coord.core.machine import decode_fact
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.journal.open import open_journal
from tests.shell.coord.running import PING_TIMEOUT_S, CoordinatorProcess, connect
from tests.support.ports import port_of, reserve_port

PROGRAMS: Final = Path(__file__).with_name("programs.py")
Event = dict[str, Any]


class Program:
    """A worker process: `event` waits for something it says, `release` lets it go on where it is held."""

    def __init__(self, process: asyncio.subprocess.Process, worker_id: str) -> None:
        self.process = process
        self.worker_id = worker_id
        self.events: list[Event] = []
        self._read = 0

    async def event(self, name: str, within_s: float = 20.0) -> Event:
        """The next one of that name."""
        async with asyncio.timeout(within_s):
            while True:
                while self._read < len(self.events):
                    found = self.events[self._read]
                    self._read += 1
                    if found["event"] == name:
                        return found
                    assert found["event"] != "error", found
                assert await self._hear(), f"{self.worker_id} ended before {name!r}: {self.events[-3:]}"

    async def _hear(self) -> bool:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if line:
            self.events.append(json.loads(line))
        return bool(line)

    def release(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self, within_s: float = 60.0) -> int:
        """Its exit status, once it has ended by itself."""
        async with asyncio.timeout(within_s):
            while await self._hear():
                pass
            for error in self.all("error"):
                print(self.worker_id, error)
            return await self.process.wait()

    def all(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


class Site:
    """One coordinator with a SQLite journal, and workers."""

    def __init__(self, folder: Path, coordinator: CoordinatorProcess, database: str) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.database = database
        self.programs: list[Program] = []

    async def start(self, program: str, worker_id: str, *, join: dict[str, Any] | None = None, **given: Any) -> Program:
        told = {"program": program, "join": {"elastic": False, "patience_s": 20, **(join or {})}, **given}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(PROGRAMS),
            json.dumps(told),
            env={
                "PATH": os.defpath,
                "STRATA_WORKER_ADDRESS": self.coordinator.address,
                "STRATA_WORKER_ID": worker_id,
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 22,
        )
        self.programs.append(Program(process, worker_id))
        return self.programs[-1]

    def corpus(self, lines: int) -> list[str]:
        """Two files; every line has a word of its own."""
        files = []
        for name, span in (("a.txt", range(lines // 3)), ("b.txt", range(lines // 3, lines))):
            path = self.folder / name
            path.write_text("".join(f"the line{number}\n" for number in span), encoding="utf-8")
            files.append(str(path))
        return files

    async def lost(self, worker_id: str, within_s: float = 25.0) -> None:
        """Wait until the coordinator has given a worker up."""
        async with asyncio.timeout(within_s), connect(self.coordinator.address) as channel:
            stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
            async for news in stub.WatchJob(pb.WatchJobRequest(min_interval_ms=20)):
                if any((each.worker_id, each.liveness) == (worker_id, pb.LIVENESS_LOST) for each in news.job.workers):
                    return

    async def holds(self, worker_id: str, shards: int, within_s: float = 10.0) -> None:
        """Wait until that many shards are leased to a worker."""
        async with asyncio.timeout(within_s), connect(self.coordinator.address) as channel:
            stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
            while True:
                job = (await stub.GetJob(pb.GetJobRequest())).job
                if any((each.worker_id, each.leased_shards) == (worker_id, shards) for each in job.workers):
                    return
                await asyncio.sleep(0.02)

    async def facts(self) -> list[Fact]:
        """All that the journal holds. Ends the coordinator: a SQLite journal serves one process."""
        await self.coordinator.close()
        found: list[Fact] = []
        async with await open_journal(self.database, SystemClock()) as journal:
            position = 0
            while batches := await journal.read("coord/0", position):
                found += [decode_fact(fact) for batch in batches for fact in batch.facts]
                position = batches[-1].last
        return found

    async def close(self) -> None:
        for program in self.programs:
            if program.process.returncode is None:
                program.process.kill()
                await program.process.wait()
        for fact in await self.facts():
            # Shown if the test failed.
            if isinstance(fact, WorkerJoined | WorkerLost | GenerationFormed):
                print(fact)


@asynccontextmanager
async def site(
    folder: Path, *, ping_timeout_s: float = PING_TIMEOUT_S, lease_s: float = 0.5, **job: str
) -> AsyncIterator[Site]:
    """`job`: settings of the job, by name."""
    guard = reserve_port()
    database = f"sqlite:{folder / 'coord.db'}"
    settings = {f"STRATA_COORDINATOR_JOB_{name.upper()}": value for name, value in job.items()}
    settings["STRATA_COORDINATOR_LEASE_S"] = str(lease_s)
    settings["STRATA_COORDINATOR_PING_TIMEOUT_S"] = str(ping_timeout_s)
    found = Site(folder, CoordinatorProcess(database, port_of(guard), settings), database)
    try:
        await found.coordinator.start()
        yield found
    finally:
        await found.close()
        guard.close()


def acked(facts: Iterable[Fact]) -> tuple[Counter[tuple[int, int]], set[int]]:
    """Samples by epoch that were consumed, as the journal says, and the leases that were consumed to their end."""
    samples: Counter[tuple[int, int]] = Counter()
    leases: dict[int, tuple[int, int, int]] = {}
    complete = set()
    for fact in facts:
        if isinstance(fact, ShardsGranted):
            leases |= {grant.lease_id: (fact.epoch, grant.start, grant.end) for grant in fact.grants}
        if isinstance(fact, ShardAcked):
            epoch, start, end = leases[fact.lease_id]
            samples.update((epoch, sample) for sample in range(start, fact.until))
            leases[fact.lease_id] = (epoch, max(start, fact.until), end)
            if fact.until == end:
                complete.add(fact.lease_id)
    return samples, complete


def counted(programs: Iterable[Program], leases: set[int]) -> Counter[str]:
    """The words of the shards that count."""
    words: Counter[str] = Counter()
    for program in programs:
        for event in program.all("shard"):
            if event["lease_id"] in leases:
                words.update(event["words"])
    return words


def every_sample(epochs: int, samples: int) -> Counter[tuple[int, int]]:
    return Counter((epoch, sample) for epoch in range(epochs) for sample in range(samples))


def every_word(epochs: int, lines: int) -> Counter[str]:
    return Counter({"the": epochs * lines, **{f"line{number}": epochs for number in range(lines)}})
