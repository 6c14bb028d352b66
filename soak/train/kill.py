"""Kill the processes of a training server under clients that train, and see that nothing was lost or done twice.

A round trains a few models while processes are killed: at random moments, and exactly where they come by a failpoint.
When all is done, every future has its result, and what the ranks and the journal say they did is what was asked for,
each once. Where models do not share passes, every result and every file of the last checkpoints is bit by bit that of a
second server, on which the same was trained in peace and which never took a snapshot. Where they do, results depend on
who came when: then the last checkpoints are those of new ranks that did the journal's dispatches again, in peace.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, get_args

import httpx

from soak.train import fault_injection, sdk
from soak.train.client import Trainer
from soak.train.compare import compare_counts, compare_files, compare_results, final_folder
from soak.train.outcome import Outcome
from soak.train.result_times import ResultTimes
from soak.train.server import (
    NO_SNAPSHOTS,
    START_S,
    RankGroup,
    ServeOptions,
    ServeProcess,
    Victim,
    gone,
    make_model,
    serving,
    until,
)
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, while_running

ROUND: Final = 20
KINDS: Final = 3
"""The last of so many rounds lets models share passes."""
ENDLESS: Final = 1 << 30
OFTEN: Final = "every_dispatches = 7\npayload_grace_s = 1"
FEW_KEPT: Final = "[checkpoints]\nkeep = 2\nsweep_s = 1.0\n"
REACHED_S: Final = 60.0
VICTIMS: Final[Sequence[Victim]] = ("api", "rank 0", "orchestrator", "launcher", "rank 1")
MESHES: Final = ("shard = 2\nreplicate = 2", "shard = 2\ntensor = 2")
VICTIMS_OF_MESHES: Final[Sequence[Victim]] = (
    "rank 2",
    "rank 0",
    "orchestrator",
    "launcher",
    "rank 1",
    "rank 3",
    "api",
)
HEADS_OF_TWO: Final = 128
"""Dimensions of a model whose heads two ranks can divide."""
FIRST: Final = {
    "train.snapshot.before_restore": "rank 1",
    "train.snapshot.before_put": "rank 0",
    "journal.replica.after_lead": "orchestrator",
    "train.checkpoint.before_sweep": "train.checkpoint.before_manifest",
}
"""What must die for anybody to come by these."""


@dataclass(frozen=True)
class Round:
    model: Path
    ranks: RankGroup
    clients: int
    packed: bool = False
    seed: int = 0
    mesh: str = ""

    @property
    def snapshots(self) -> str:
        return NO_SNAPSHOTS if self.packed else OFTEN


async def run(ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    return await _run(ask, tell, [""], VICTIMS)


async def run_on_meshes(ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    """The base is on meshes of four ranks, half of each round on one of them."""
    return await _run(ask, tell, MESHES, VICTIMS_OF_MESHES)


async def _run(
    ask: CampaignRequest, tell: OnProgress, meshes: Sequence[str], victims: Sequence[Victim]
) -> CampaignResult:
    # The SDK reports to the server it trains on what it does, which would be one thing more to be retried.
    os.environ["TINKER_TELEMETRY"] = "0"  # noqa: TID251 - of the SDK in this process
    model = ask.folder / "tiny"
    await asyncio.to_thread(make_model, model, HEADS_OF_TWO)
    outcome = Outcome()
    every = fault_injection.failpoints()
    first, end, size = ask.first, ask.first + ask.times, ROUND // len(meshes)
    while first < end and not outcome.problems:
        numbers = range(first, min(first - first % size + size, end))
        kind = Round(model, "real", ask.workers, _is_packed(first), first, meshes[first // size % len(meshes)])
        moments = [moment(number, victims) for number in numbers]
        await disturbed_round(ask.folder / f"round-{first}", kind, moments, outcome)
        tell(outcome.result(every))
        first = numbers.stop
    return outcome.result(every)


def moment(number: int, victims: Sequence[Victim]) -> str:
    """Whom this trial kills, or at which failpoint somebody dies. With packing there are no snapshots, so that the
    journal has everything: then it is always a process, at random."""
    turn, place = divmod(number, ROUND)
    if _is_packed(number):
        return victims[number % len(victims)]
    if place % 2 == 0:
        return victims[place // 2 % len(victims)]
    # Those of the rounds before that were not packed.
    before = (turn - turn // KINDS) * (ROUND // 2)
    every = fault_injection.failpoints()
    return every[(before + place // 2) % len(every)]


def _is_packed(number: int) -> bool:
    return number // ROUND % KINDS == KINDS - 1


async def disturbed_round(folder: Path, kind: Round, moments: Sequence[str], outcome: Outcome) -> None:
    """Run one server under fault injection, and compare its results with an undisturbed run."""
    options = ServeOptions(packed=kind.packed, more=FEW_KEPT, armed=True, mesh=kind.mesh)
    async with serving(
        folder / "disturbed", kind.model, kind.ranks, snapshots=kind.snapshots, options=options
    ) as server:
        result_times = ResultTimes()
        async with _training(server, kind, result_times) as trainers:
            numbered = dict(enumerate(moments, kind.seed))
            steps = await _inject_faults(server, trainers, result_times, numbered, outcome)
        outcome.operations += sum(each.operations for each in trainers)
        outcome.steps += sum(steps)
        outcome.restored += server.restored()
        await server.idle()
        applied = await server.applied()
        if await server.stop() != 0:
            outcome.problems.append("the launcher did not end in order")
    wanted = sum(each.operations for each in trainers)
    compare_counts(server, applied, await server.journaled(), wanted, outcome)
    if kind.packed:
        if not outcome.shared:
            outcome.problems.append("no two models shared a pass")
        outcome.replayed += await _replay(folder / "again", kind, server, trainers, outcome)
    else:
        outcome.equal += await _repeat(folder / "calm", kind, server, trainers, steps, outcome)


AnyTrainer = Trainer | sdk.SdkTrainer


async def _inject_faults(
    server: ServeProcess,
    trainers: Sequence[AnyTrainer],
    result_times: ResultTimes,
    moments: Mapping[int, str],
    outcome: Outcome,
) -> list[int]:
    enough = asyncio.Event()
    training = [asyncio.create_task(each.train(enough, ENDLESS)) for each in trainers]
    try:
        for number, what in moments.items():
            await asyncio.sleep(seeded_random(number).uniform(0.0, 1.0))
            await while_running(training, _inject_fault(server, what, result_times, outcome))
            outcome.times += 1
        enough.set()
        steps = await asyncio.gather(*training)
        await asyncio.gather(*(each.finish() for each in trainers))
        return steps
    finally:
        for task in training:
            task.cancel()


async def _inject_fault(server: ServeProcess, what: str, result_times: ResultTimes, outcome: Outcome) -> None:
    clock = asyncio.get_running_loop().time
    for victim in get_args(Victim):
        if what == victim:
            await server.there(victim)
            started_s = clock()
            left = await _kill(server, victim)
            await result_times.wait_sent_after(started_s)
            outcome.recovered(what, clock() - started_s)
            if still := await gone(left):
                outcome.problems.append(f"processes {still} outlived their launcher")
            return
    fault_injection.arm_on_file(server.orders, what)
    if (first := FIRST.get(what)) is not None:
        await _first(server, first, what, outcome)
    victim = await _death(server)
    if victim is None:
        outcome.missed.append(what)
        await _inject_fault(server, "orchestrator", result_times, outcome)
        return
    started_s = clock()
    await result_times.wait_sent_after(started_s)
    outcome.recovered(victim, clock() - started_s)
    outcome.reached[what] += 1


async def _kill(server: ServeProcess, victim: Victim) -> Sequence[int]:
    """Processes that have nobody left to end them."""
    if victim == "launcher":
        return await server.restart()
    server.kill(victim)
    return ()


async def _first(server: ServeProcess, first: str, then: str, outcome: Outcome) -> None:
    """A death that another one needs."""
    for victim in get_args(Victim):
        if first == victim:
            await server.there(victim)
            server.kill(victim)
            outcome.victims[victim] += 1
            return
    fault_injection.arm_on_file(server.orders, first)
    if (who := await _death(server)) is not None:
        outcome.victims[who] += 1
        outcome.reached[first] += 1
        fault_injection.arm_on_file(server.orders, then)


async def _death(server: ServeProcess) -> str | None:
    """Who came by the failpoint; None if nobody did for long."""
    for _ in range(int(REACHED_S / fault_injection.POLL_S)):
        if (victim := fault_injection.died(server.orders)) is not None:
            return victim
        await asyncio.sleep(fault_injection.POLL_S)
    return None if fault_injection.disarm(server.orders) else "somebody"


async def _repeat(
    folder: Path,
    kind: Round,
    server: ServeProcess,
    trainers: Sequence[AnyTrainer],
    steps: Sequence[int],
    outcome: Outcome,
) -> int:
    """The same in peace. How many models have the same files."""
    equal = 0
    async with serving(folder, kind.model, kind.ranks, options=ServeOptions(more=FEW_KEPT, mesh=kind.mesh)) as calm:
        async with _training(calm, kind, ResultTimes()) as again:
            work = [each.train(asyncio.Event(), count) for each, count in zip(again, steps, strict=True)]
            await asyncio.gather(*work)
            await asyncio.gather(*(each.finish() for each in again))
        for place, (one, other) in enumerate(zip(trainers, again, strict=True)):
            compare_results(place, one.results, other.results, outcome)
            if isinstance(one, sdk.SdkTrainer) and isinstance(other, sdk.SdkTrainer):
                found = final_folder(server.settings.checkpoint_folder, one.model_id, sdk.FINAL)
                expected = final_folder(calm.settings.checkpoint_folder, other.model_id, sdk.FINAL)
                problem = compare_files(found, expected, one.steps)
                equal += problem is None
                outcome.problems += [f"model {place}: {problem}"] if problem else []
    return equal


async def _replay(
    folder: Path, kind: Round, server: ServeProcess, trainers: Sequence[AnyTrainer], outcome: Outcome
) -> int:
    """New ranks that do the journal's dispatches again. How many models have the same files."""
    equal = 0
    options = ServeOptions(packed=True, more=FEW_KEPT, journal=server.settings.data, mesh=kind.mesh)
    async with serving(folder, kind.model, kind.ranks, options=options) as fresh:
        for place, each in enumerate(trainers):
            assert isinstance(each, sdk.SdkTrainer)
            final = partial(final_folder, model_id=each.model_id, name=sdk.FINAL)
            async with asyncio.timeout(START_S):
                await until(partial(final, fresh.settings.checkpoint_folder))
            problem = compare_files(
                final(server.settings.checkpoint_folder), final(fresh.settings.checkpoint_folder), each.steps
            )
            equal += problem is None
            outcome.problems += [f"model {place} done again: {problem}"] if problem else []
    return equal


@asynccontextmanager
async def _training(
    server: ServeProcess, kind: Round, result_times: ResultTimes
) -> AsyncIterator[Sequence[AnyTrainer]]:
    if kind.ranks == "real":
        async with sdk.trainers(server.url, server.key, range(kind.clients), result_times) as made:
            yield made
        return
    key = {"X-API-Key": server.key}
    async with httpx.AsyncClient(base_url=server.url, headers=key, timeout=30.0) as http:
        plain = [Trainer(http, place, result_times) for place in range(kind.clients)]
        await asyncio.gather(*(each.begin() for each in plain))
        yield plain
