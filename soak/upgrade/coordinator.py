"""Orders in which coordinators and workers are upgraded, and go back, under workers that read shards and meet."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from soak.coord.expected_state import ExpectedState
from soak.coord.pair import FINISH_S, SETTLED_S, check_journal
from soak.coord.processes import Coordinator
from soak.coord.workers import WorkerPlan, WorkerPool
from soak.trees import Tree
from soak.trials import CampaignRequest, seeded_random

PLAN: Final = WorkerPlan(workers=20, channels=5, shards=100, think_s=0.2)
MORE_ACKS: Final = 20
"""Under each leader."""
GANG_S: Final = 180.0
SAMPLES: Final = 4_000
_WORKER: Final = """
import sys, time
import strata.coord.worker

print(strata.coord.worker.__file__, flush=True)
with strata.coord.worker.join(elastic=True, wait_for=2) as worker:
    worker.dataset("corpus", samples=int(sys.argv[1]), shard_size=10)
    for epoch in worker.epochs(1):
        for shard in worker.shards("corpus", epoch):
            time.sleep(0.02)
            print(shard.start, shard.end, flush=True)
"""


async def run_in_place(request: CampaignRequest, versions: Sequence[Tree]) -> ExpectedState:
    """One coordinator is killed and started again by each version in turn."""
    async with _coordinators(request, 1) as [coordinator]:
        await _start(coordinator, versions[0])
        await coordinator.leads()
        async with _working([coordinator]) as pool:
            for tree in versions[1:]:
                await _acks(pool)
                await coordinator.kill()
                await _start(coordinator, tree)
                await coordinator.leads()
        # SQLite serves one process.
        await coordinator.kill()
        pool.expected.problems += [*coordinator.crashes, *await check_journal(request.url)]
    return pool.expected


async def run_take_over(request: CampaignRequest, versions: Sequence[Tree]) -> ExpectedState:
    """Each version stands by until the leader before it is killed."""
    async with _coordinators(request, 2) as coordinators:
        leader, standby = coordinators
        await _start(leader, versions[0])
        await leader.leads()
        async with _working(coordinators) as pool:
            for tree in versions[1:]:
                await _start(standby, tree)
                await standby.stands_by()
                await _acks(pool)
                await leader.kill()
                await standby.leads()
                leader, standby = standby, leader
        crashes = [crash for each in coordinators for crash in each.crashes]
        pool.expected.problems += [*crashes, *await check_journal(request.url)]
    return pool.expected


async def run_gang(request: CampaignRequest, versions: Sequence[Tree], workers: Sequence[Tree]) -> list[str]:
    """Workers of these versions share an epoch while the coordinator is replaced. What is wrong with their shards."""
    async with _coordinators(request, 1) as [coordinator]:
        await _start(coordinator, versions[0])
        await coordinator.leads()
        outputs = [request.folder / f"worker-{number}.log" for number in range(len(workers))]
        running = [
            await _start_worker(tree, coordinator, output) for tree, output in zip(workers, outputs, strict=True)
        ]
        try:
            async with asyncio.timeout(GANG_S):
                for tree in versions[1:]:
                    await _longer_by(outputs, MORE_ACKS)
                    await coordinator.kill()
                    await _start(coordinator, tree)
                    await coordinator.leads()
                statuses = [await each.wait() for each in running]
        finally:
            for process in running:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        problems = [f"worker {number} ended with {status}" for number, status in enumerate(statuses) if status]
        return problems + coordinator.crashes + _find_gang_problems(outputs, workers)


def _find_gang_problems(outputs: Sequence[Path], workers: Sequence[Tree]) -> list[str]:
    problems, read = [], Counter[int]()
    for output, tree in zip(outputs, workers, strict=True):
        module, *shards = output.read_text("utf-8").splitlines()
        if not Path(module).is_relative_to(tree.root / "src") or not shards:
            problems.append(f"{output.name}: {len(shards)} shards, read by {module}")
        for shard in shards:
            start, end = map(int, shard.split())
            read.update(range(start, end))
    if missing := SAMPLES - len(read):
        problems.append(f"{missing} samples were never read")
    if doubled := sum(count > 1 for count in read.values()):
        problems.append(f"{doubled} samples were read more than once")
    return problems


@asynccontextmanager
async def _coordinators(request: CampaignRequest, count: int) -> AsyncIterator[list[Coordinator]]:
    started = [Coordinator(request.url, request.folder, f"coordinator-{number}", {}) for number in range(count)]
    try:
        yield started
    finally:
        for each in started:
            await each.close()


async def _start(coordinator: Coordinator, tree: Tree) -> None:
    coordinator.tree = tree
    await coordinator.start()


@asynccontextmanager
async def _working(coordinators: Sequence[Coordinator]) -> AsyncIterator[WorkerPool]:
    """Workers of this version, all of which finish at the end."""
    expected = ExpectedState(PLAN.shards * PLAN.shard_size)
    pool = WorkerPool([each.address for each in coordinators], PLAN, expected, seeded_random(0))
    try:
        await pool.join()
        yield pool
        await _acks(pool)
        expected.problems += pool.missing_members(await pool.job())
        await pool.finish(FINISH_S)
    finally:
        await pool.close()


async def _acks(pool: WorkerPool) -> None:
    """So many more have been confirmed."""
    wanted = pool.expected.confirmed + MORE_ACKS
    async with asyncio.timeout(SETTLED_S):
        # The expected state has no callback.
        while pool.expected.confirmed < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _start_worker(tree: Tree, coordinator: Coordinator, output: Path) -> asyncio.subprocess.Process:
    with output.open("wb") as out, output.with_suffix(".err").open("wb") as errors:
        return await asyncio.create_subprocess_exec(
            *(tree.python, "-c", _WORKER, str(SAMPLES)),
            cwd=output.parent,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env={
                "PATH": os.defpath,
                "PYTHONPATH": tree.python_path,
                "STRATA_WORKER_ADDRESS": coordinator.address,
                "STRATA_WORKER_ID": output.stem,
            },
        )


async def _longer_by(outputs: Sequence[Path], lines: int) -> None:
    """Every worker has read so many more shards."""
    least = {output: _count_lines(output) + lines for output in outputs}
    # A file has no callback.
    while any(_count_lines(output) < count for output, count in least.items()):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _count_lines(output: Path) -> int:
    return output.read_bytes().count(b"\n")
