"""All workers of a job are killed and started again at random moments; the program is in docs/coordinator-workers.md.

A trial is one job: workers count the words of a corpus whose lines are all different. At the end every line is in the
surviving model once, or a worker has ended with a status other than 0 and a reason. Then the program is run once more:
a finished job must not succeed with nothing done.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from soak.coord.processes import ROOT, Coordinator
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from tests.e2e.blocks import blocks

SAMPLES: Final = 20_000
END_S: Final = 120.0
"""A trial that takes longer hangs."""
LIFE_S: Final = (0.3, 6.0)
"""How long the workers live before they are killed: from before they have joined to after the end of a short run."""
KILLS: Final = (1, 3)
FINISHED: Final = "is finished"


def program() -> str:
    """The worker of the document, as it stands there."""
    text = (ROOT / "docs" / "coordinator-workers.md").read_text("utf-8")
    return next(each.body for each in blocks(text) if each.title == "worker.py")


@dataclass
class Tally:
    problems: list[str] = field(default_factory=list)
    times: int = 0
    complete: int = 0
    kills: int = 0
    recovered: int = 0
    """Trials in which a process that was started again loaded a checkpoint."""
    refused: int = 0
    """Runs of a finished job, all of which must be refused."""
    ends: Counter[str] = field(default_factory=Counter)
    """How workers ended that did not succeed, by reason."""
    taken_s: list[float] = field(default_factory=list)

    def result(self) -> CampaignResult:
        ends = ", ".join(f"{count} x {reason}" for reason, count in self.ends.most_common(3)) or "none"
        figures = (
            f"{self.complete} of {self.times} jobs complete with each of {SAMPLES:,} samples once,"
            f" {self.kills} kills of all workers, {self.recovered} jobs went back to a checkpoint;"
            f" workers that ended with an error: {ends}; {self.refused} runs of a finished job refused;"
            f" a job took {spread_s(self.taken_s)}"
        )
        return CampaignResult(times=self.times, problems=self.problems, figures=figures)


@dataclass
class Ended:
    status: int
    reason: str
    """The last line that it wrote to stderr."""


class WorkerProcesses:
    """The worker processes of one job."""

    def __init__(self, folder: Path, address: str, job: str, size: int) -> None:
        self._folder = folder
        self._address = address
        self._job = job
        self._names = [f"worker-{number}" for number in range(size)]
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, names: list[str] | None = None) -> None:
        for name in self._names if names is None else names:
            with (self._folder / f"{name}.err").open("ab") as errors:
                self._processes[name] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "worker.py"),
                    cwd=self._folder,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=errors,
                    env={
                        "PATH": os.defpath,
                        "STRATA_WORKER_ADDRESS": self._address,
                        "STRATA_WORKER_JOB": self._job,
                        "STRATA_WORKER_ID": name,
                        "STRATA_WORKER_PATIENCE_S": "60",
                    },
                )

    async def kill(self) -> list[str]:
        """All that run; who they were."""
        running = [name for name, process in self._processes.items() if process.returncode is None]
        for name in running:
            self._processes[name].send_signal(signal.SIGKILL)
        for name in running:
            await self._processes[name].wait()
        return running

    async def ended(self) -> list[Ended]:
        for process in self._processes.values():
            await process.wait()
        return [Ended(process.returncode or 0, self._last_words(name)) for name, process in self._processes.items()]

    def _last_words(self, name: str) -> str:
        lines = (self._folder / f"{name}.err").read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


class Trial:
    """One job from its first worker to its last."""

    def __init__(self, number: int, ask: CampaignRequest, coordinator: Coordinator, tally: Tally) -> None:
        self._job = f"restarted-{number}"
        self._chance = seeded_random(number)
        self._folder = ask.folder / self._job
        self._address = coordinator.address
        self._pool = WorkerProcesses(self._folder, coordinator.address, self._job, ask.workers)
        self._tally = tally

    async def run(self) -> None:
        self._folder.mkdir()
        (self._folder / "worker.py").write_text(program(), "utf-8")
        lines = "".join(f"{number}\n" for number in range(SAMPLES))
        (self._folder / "corpus.txt").write_text(lines, "utf-8")
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(END_S):
                await self._pool.start()
                await self._kill_and_restart(self._chance)
                ended = await self._pool.ended()
                self._tally.taken_s.append(time.monotonic() - began_s)
                await self._judge(ended)
        except TimeoutError:
            self._tally.problems.append(f"{self._job}: not over within {END_S:g} s")
        finally:
            await self._pool.kill()
        self._tally.times += 1

    async def _kill_and_restart(self, rng: random.Random) -> None:
        for _ in range(rng.randint(*KILLS)):
            await asyncio.sleep(rng.uniform(*LIFE_S))
            killed = await self._pool.kill()
            if not killed:
                return
            self._tally.kills += 1
            await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, 1.0)]))
            await self._pool.start(killed)

    async def _judge(self, ended: list[Ended]) -> None:
        job = await self._look()
        problem = _problem_of(job)
        failed = [each for each in ended if each.status != 0]
        for each in failed:
            self._tally.ends[each.reason.split(": ", 1)[-1].replace(self._job, "JOB")[:60]] += 1
            if not each.reason:
                self._tally.problems.append(f"{self._job}: a worker ended with status {each.status} and no reason")
        self._tally.recovered += any("went back to checkpoint" in each.message for each in job.incidents)
        if problem is None:
            self._tally.complete += 1
            await self._run_again(job)
            shutil.rmtree(self._folder)
        elif not failed:
            self._tally.problems.append(f"{self._job}: all workers succeeded, and {problem}")

    async def _look(self) -> pb.JobState:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
            return (await stub.GetJob(pb.GetJobRequest(job_id=self._job, history_limit=200))).job

    async def _run_again(self, job: pb.JobState) -> None:
        """By mistake, as it is. A job whose last worker was killed before it had left is not finished: then it ends."""
        if job.status != pb.JOB_STATUS_FINISHED:
            return
        await self._pool.start(["worker-0"])
        again = (await self._pool.ended())[0]
        if again.status == 0 or FINISHED not in again.reason:
            self._tally.problems.append(f"{self._job}: run again, it ended with status {again.status}: {again.reason}")
        else:
            self._tally.refused += 1


def _problem_of(job: pb.JobState) -> str | None:
    """What is wrong with the surviving model: the parts of the last committed checkpoint, read without the SDK."""
    committed = [each.manifest for each in job.checkpoints if each.committed]
    if not committed:
        return "there is no checkpoint"
    words: Counter[str] = Counter()
    for part in committed[0].parts:
        words.update(json.loads(Path(part.uri).read_text("utf-8")))
    missing = SAMPLES - len(words)
    doubled = sum(count > 1 for count in words.values())
    return f"the model lacks {missing} samples and has {doubled} more than once" if missing or doubled else None


async def run(ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    tally = Tally()
    coordinator = Coordinator(ask.url, ask.folder, "coordinator", {})
    try:
        await coordinator.start()
        await coordinator.leads()
        for number in range(ask.first, ask.first + ask.times):
            await Trial(number, ask, coordinator, tally).run()
            tell(tally.result())
    finally:
        await coordinator.close()
    tally.problems += coordinator.crashes
    return tally.result()
