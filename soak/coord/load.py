"""Ten thousand workers at once, and a thousand on a machine without a free core: no call is cancelled, none evicted."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import grpc

from soak.coord.expected_state import ExpectedState
from soak.coord.processes import Coordinator
from soak.coord.workers import WorkerPlan, WorkerPool
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.worker.link import OPTIONS

CHANNELS: Final = 125
REGISTER_S: Final = 10.0
MEMORY_MB: Final = 600.0
PATIENCE_S: Final = 120.0
INTERVAL_S: Final = JobConfig().heartbeat_interval_s
LOADED_S: Final = 70.0
"""How long all cores are kept busy: more than four times what a worker may be silent."""

Call = Callable[["pb_grpc.CoordinatorAsyncStub", str], Awaitable[Any]]


class LoadGenerator:
    """Workers that all do the same at the same moment, and what they were answered.

    From their registration on, all workers of a channel beat together at the default interval, as those of a host do.
    """

    def __init__(self, stubs: list[pb_grpc.CoordinatorAsyncStub], workers: int) -> None:
        self._stubs = stubs
        self._names = [f"w{number}" for number in range(workers)]
        self._registered: list[list[str]] = [[] for _ in stubs]
        self.codes: Counter[str] = Counter()
        self.again = 0
        """Calls that were told to come again and did."""

    async def all(self, call: Call) -> tuple[list[Any], float]:
        """The answers, and how long the last one took."""
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(self._one(call, self._stubs[number % len(self._stubs)], name) for number, name in enumerate(self._names))
        )
        return answers, time.monotonic() - began_s

    async def register(self) -> float:
        """How long it took until the last one was answered."""

        async def one(stub: pb_grpc.CoordinatorAsyncStub, name: str) -> None:
            given = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-1")
            await stub.RegisterWorker(given, timeout=PATIENCE_S)
            self._registered[int(name[1:]) % len(self._stubs)].append(name)

        return (await self.all(one))[1]

    async def beat_on(self) -> None:
        """For ever."""
        await asyncio.gather(*(self._beat_together(number) for number in range(len(self._stubs))))

    async def _beat_together(self, number: int) -> None:
        await asyncio.sleep(number / len(self._stubs) * INTERVAL_S)
        while True:
            beats = [pb.HeartbeatRequest(worker_id=name, incarnation=f"{name}-1") for name in self._registered[number]]
            try:
                await self._stubs[number].HeartbeatBatch(pb.HeartbeatBatchRequest(heartbeats=beats), timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                self.codes[f"{error.code().name}: {error.details()}"] += 1
            await asyncio.sleep(INTERVAL_S)

    async def job(self) -> pb.JobState:
        return (await self._stubs[0].GetJob(pb.GetJobRequest(history_limit=1), timeout=PATIENCE_S)).job

    async def _one(self, call: Call, stub: pb_grpc.CoordinatorAsyncStub, name: str) -> Any:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await call(stub, name)
            except grpc.aio.AioRpcError as error:
                said = dict(error.trailing_metadata() or ())
                if "strata-retry-after-ms" not in said or time.monotonic() > until_s:
                    # Not an answer of ours, or none that can change.
                    self.codes[f"{error.code().name}: {error.details()}"] += 1
                    return None
                self.again += 1
                await asyncio.sleep(int(said["strata-retry-after-ms"]) / 1000)


def _stream(number: int) -> dict[str, str]:
    """Each trial has a job of its own in the same database."""
    return {"STRATA_COORDINATOR_STREAM": f"coord/{number}"}


def _beat(stub: pb_grpc.CoordinatorAsyncStub, name: str) -> Awaitable[Any]:
    beat = pb.HeartbeatRequest(worker_id=name, incarnation=f"{name}-1", status=pb.WORKER_STATUS_TRAINING)
    return stub.Heartbeat(beat, timeout=PATIENCE_S)


async def run(ask: CampaignRequest, tell: OnProgress, channels: int = CHANNELS) -> CampaignResult:
    """Register, beat, beat, one barrier; on a coordinator of its own each time."""
    problems: list[str] = []
    taken: dict[str, list[float]] = {"register": [], "one generation": [], "heartbeat": [], "barrier": []}
    memory_mb: list[float] = []
    result = CampaignResult(times=0, problems=problems, figures="")
    for number in range(ask.times):
        coordinator = Coordinator(ask.url, ask.folder, f"herd-{number}", _stream(number))
        await coordinator.start()
        await coordinator.leads()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(coordinator.close)
            stubs: list[pb_grpc.CoordinatorAsyncStub] = []
            for _ in range(channels):
                channel = await stack.enter_async_context(
                    grpc.aio.insecure_channel(coordinator.address, options=OPTIONS)
                )
                stubs.append(pb_grpc.CoordinatorStub(channel))
            load = LoadGenerator(stubs, ask.workers)
            beating = asyncio.create_task(load.beat_on())
            problems += await _stampede(load, ask.workers, taken, f"{ask.first + number}")
            beating.cancel()
            await asyncio.wait([beating])
            memory_mb.append(coordinator.memory_mb())
            problems += [f"{count} calls ended with {code}" for code, count in load.codes.items()]
        problems += coordinator.crashes
        if max(memory_mb) > MEMORY_MB:
            problems.append(f"the coordinator had {max(memory_mb):.0f} MB resident: {MEMORY_MB:g} allowed")
        if ask.workers >= 10_000 and taken["register"][-1] > REGISTER_S:
            problems.append(f"registration took {taken['register'][-1]:.1f} s: {REGISTER_S:g} allowed")
        times = ", ".join(f"{what} {spread_s(values)}" for what, values in taken.items())
        figures = f"{ask.workers} workers over {channels} channels: {times}; {max(memory_mb):.0f} MB"
        result = CampaignResult(times=number + 1, problems=problems, figures=figures)
        tell(result)
    return result


async def _stampede(load: LoadGenerator, workers: int, taken: dict[str, list[float]], trial: str) -> list[str]:
    began_s = time.monotonic()
    taken["register"].append(await load.register())
    generation = await _one_generation(load, workers, began_s)
    if not generation:
        return [f"trial {trial}: the {workers} workers did not come together"]
    taken["one generation"].append(time.monotonic() - began_s)
    _, first_s = await load.all(_beat)
    answers, second_s = await load.all(_beat)
    taken["heartbeat"] += [first_s, second_s]
    wrong = sum(answer is None or answer.generation != generation for answer in answers)
    problems = [f"trial {trial}: {wrong} heartbeats were answered with another generation"] if wrong else []

    def meet(stub: pb_grpc.CoordinatorAsyncStub, name: str) -> Awaitable[Any]:
        request = pb.BarrierRequest(
            barrier_id="all", worker_id=name, incarnation=f"{name}-1", generation=generation, timeout_ms=100_000
        )
        return stub.Barrier(request, timeout=PATIENCE_S)

    answers, barrier_s = await load.all(meet)
    taken["barrier"].append(barrier_s)
    through = sum(answer is not None and answer.released for answer in answers)
    return problems if through == workers else [*problems, f"trial {trial}: {through} of {workers} were released"]


async def _one_generation(load: LoadGenerator, workers: int, began_s: float) -> int:
    """The generation with all workers; a large job may form a smaller one first."""
    while time.monotonic() < began_s + PATIENCE_S:
        job = await load.job()
        if job.world_size == workers:
            return int(job.generation)
        await asyncio.sleep(0.05)
    return 0


async def run_loaded(ask: CampaignRequest, tell: OnProgress, loaded_s: float = LOADED_S) -> CampaignResult:
    """A pool of workers with presence streams at the default interval, while a busy loop runs on every core."""
    result = CampaignResult(times=0, problems=[], figures="")
    for number in range(ask.times):
        coordinator = Coordinator(ask.url, ask.folder, f"loaded-{number}", _stream(number))
        await coordinator.start()
        await coordinator.leads()
        plan = WorkerPlan(workers=ask.workers, shards=3 * ask.workers, channels=min(50, ask.workers), think_s=2.0)
        pool = WorkerPool(
            [coordinator.address], plan, ExpectedState(plan.shards * plan.shard_size), seeded_random(number)
        )
        try:
            await pool.join()
            cores = sorted(os.sched_getaffinity(0))
            burners = [await _burn(core) for core in cores]
            began_s = time.monotonic()
            try:
                # The expected state has no callback; a poll every tenth of a second is enough.
                while time.monotonic() < began_s + loaded_s and not pool.expected.problems:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                job = await pool.job()
            finally:
                for burner in burners:
                    burner.kill()
                    await burner.wait()
            lost = [each.message for each in job.incidents]
            problems = [*pool.expected.summary(), *lost, *coordinator.crashes]
            if (job.world_size, job.generation) != (ask.workers, pool.generation):
                problems.append(f"generation {job.generation} has {job.world_size} of {ask.workers} workers")
        finally:
            await pool.close()
            await coordinator.close()
        silent = max(each.silent_ms for each in job.workers) / 1000
        figures = (
            f"{ask.workers} workers, {len(cores)} cores busy for {loaded_s:g} s: {len(lost)} evictions; longest silence"
            f" at the end {silent:.1f} s; {pool.expected.confirmed} acks"
        )
        result = CampaignResult(times=number + 1, problems=[*result.problems, *problems], figures=figures)
        tell(result)
    return result


async def _burn(core: int) -> asyncio.subprocess.Process:
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program)
