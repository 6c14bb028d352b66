"""Freeze processes past their lease, let a successor finish, and wake them up: nothing that they still send counts.

On SQLite the frozen ones are workers, beside others that are killed; on PostgreSQL it is the coordinator that leads.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Final, Literal

import msgspec

from soak.coord.processes import ROOT, Coordinator
from soak.coord.successor import Successor
from soak.coord.zombie_leader import run_leaders
from soak.coord.zombie_worker import Answer, HeldLease
from soak.trials import CampaignRequest, CampaignResult, OnProgress, spread_s
from strata.coord.pb import coordinator_pb2 as pb

WITHIN_S: Final = {signal.SIGKILL: 1.0, signal.SIGSTOP: 5.0}
"""From the signal to the moment when another worker has the shard."""
ANSWER_S: Final = 60.0
_SETTINGS: Final = {"STRATA_COORDINATOR_JOB_SETTLE_S": "0.1", "STRATA_COORDINATOR_PING_TIMEOUT_S": "2"}

Fate = Literal["killed", "evicted", "replaced", "returned"]
"""What became of a worker: the last three were frozen. A replaced one has a second life under its name; one that
returned registered again and only then writes what it knew before."""
FATES: Final[tuple[Fate, ...]] = ("killed", "evicted", "replaced", "returned")

_WRITES: Final = ("ack", "ack of any generation", "barrier", "checkpoint", "heartbeat")


def expected(fate: Fate, held: HeldLease, generation: int) -> dict[str, tuple[str, str | None]]:
    """By message, the documented code, and what comes with it; None: the contract leaves that open.

    A heartbeat of an old generation is told the new one.
    """
    rejected = f"rejected [{held.lease_id}]"
    match fate:
        case "killed":
            return {}
        case "evicted":
            return dict.fromkeys(_WRITES, ("NOT_FOUND", None)) | {"leave": ("OK", rejected)}
        case "replaced":
            return dict.fromkeys((*_WRITES, "leave"), ("FAILED_PRECONDITION", "stale-incarnation"))
        case "returned":
            return {
                "ack": ("FAILED_PRECONDITION", "stale-generation"),
                "ack of any generation": ("OK", rejected),
                "barrier": ("OK", "BARRIER_VERDICT_MEMBERSHIP_CHANGED"),
                "checkpoint": ("FAILED_PRECONDITION", "stale-generation"),
                "heartbeat": ("OK", f"generation {generation}"),
                "leave": ("OK", rejected),
            }


@dataclass
class Tally:
    problems: list[str] = field(default_factory=list)
    reissued_s: dict[signal.Signals, list[float]] = field(
        default_factory=lambda: {signal.SIGKILL: [], signal.SIGSTOP: []}
    )
    refused: int = 0
    times: int = 0

    def result(self) -> CampaignResult:
        times = []
        for number, taken in self.reissued_s.items():
            late = sum(each > WITHIN_S[number] for each in taken)
            spread = spread_s(taken)
            times.append(f"{number.name} to the shard's next owner {spread}, {late} over {WITHIN_S[number]:g} s")
        figures = f"{'; '.join(times)}; {self.refused} stale writes refused"
        return CampaignResult(times=self.times, problems=self.problems, figures=figures)


class Trial:
    """One doomed worker process and one successor that works on."""

    def __init__(self, number: int, fate: Fate, coordinator: Coordinator, tally: Tally) -> None:
        self.name = f"trial {number}, {fate}"
        self._fate: Fate = fate
        self._worker_id = f"doomed-{number}"
        self._dataset = f"d{number}"
        self._step = number + 1
        self._address = coordinator.address
        self._tally = tally

    async def run(self, successor: Successor) -> None:
        await successor.define(self._dataset, samples=8, shard_size=4)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "soak.coord.zombie_worker", self._address, self._worker_id),
            *(f"{self._worker_id}-1", self._dataset),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                held = msgspec.json.decode(await self._line(process), type=HeldLease)
                await self._doom(process, held, successor)
        except TimeoutError:
            self._tally.problems.append(f"{self.name}: not over within {ANSWER_S:g} s")
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _doom(self, process: asyncio.subprocess.Process, held: HeldLease, successor: Successor) -> None:
        """The successor takes its own shard, then the one of the doomed as soon as it is free, and finishes."""
        await successor.take(self._dataset)
        number = signal.SIGKILL if self._fate == "killed" else signal.SIGSTOP
        began_s = time.monotonic()
        process.send_signal(number)
        taken = await successor.take(self._dataset)
        self._tally.reissued_s[number].append(time.monotonic() - began_s)
        if (taken.start_index, taken.end_index) != (held.start, held.end):
            self._tally.problems.append(f"{self.name}: {taken.start_index} was handed out, not {held.start}")
        if self._fate == "replaced":
            await successor.register_other(self._worker_id, f"{self._worker_id}-2")
        await successor.finish(self._dataset, self._step)
        if self._fate != "killed":
            await self._wake(process, held, successor)
        await successor.dismiss(self._worker_id)

    async def _wake(self, process: asyncio.subprocess.Process, held: HeldLease, successor: Successor) -> None:
        assert process.stdin is not None
        before = await successor.job()
        orders = ["register"] if self._fate == "returned" else []
        # Written before it wakes up: the stale writes are the first thing it does.
        process.stdin.write("".join(f"{order}\n" for order in (*orders, "write")).encode())
        process.send_signal(signal.SIGCONT)
        answers = await self._answers(process)
        after = await successor.job()
        self._compare(before, after)
        if self._fate == "returned":
            await successor.catch_up()
        process.stdin.write(b"leave\n")
        answers |= await self._answers(process)
        wanted = expected(self._fate, held, after.generation)
        for call, (code, reason) in wanted.items():
            found = answers.get(call, ("nothing", ""))
            if found[0] != code or reason not in (None, found[1]):
                self._tally.problems.append(f"{self.name}: {call} was answered {found}, not {(code, reason)}")
        self._tally.refused += sum(call != "heartbeat" or code != "OK" for call, (code, _) in answers.items())

    async def _answers(self, process: asyncio.subprocess.Process) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        while True:
            answer = msgspec.json.decode(await self._line(process), type=Answer)
            if answer.call == "done":
                return found
            if answer.call != "register":
                found[answer.call] = (answer.code, answer.reason)

    async def _line(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        return await process.stdout.readline()

    def _compare(self, before: pb.JobState, after: pb.JobState) -> None:
        """A registration makes a new generation; nothing else may have changed."""
        if self._fate != "returned" and after.generation != before.generation:
            self._tally.problems.append(f"{self.name}: the zombie made generation {after.generation}")
        for what in ("datasets", "checkpoints", "barriers"):
            if list(getattr(before, what)) != list(getattr(after, what)):
                self._tally.problems.append(f"{self.name}: the zombie changed the job's {what}")


async def run(ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    """On PostgreSQL leaders, else workers: `times` of them."""
    if ask.database == "postgres":
        return await run_leaders(ask, tell)
    coordinator = Coordinator(ask.url, ask.folder, "coordinator", _SETTINGS)
    tally = Tally()
    await coordinator.start()
    try:
        await coordinator.leads()
        async with Successor(coordinator.address) as successor:
            fates = islice(cycle(FATES), ask.first % len(FATES), None)
            for number, fate in zip(range(ask.first, ask.first + ask.times), fates, strict=False):
                await Trial(number, fate, coordinator, tally).run(successor)
                tally.problems += successor.problems
                successor.problems = []
                tally.times += 1
                tell(tally.result())
    finally:
        await coordinator.close()
    tally.problems += coordinator.crashes
    return tally.result()
