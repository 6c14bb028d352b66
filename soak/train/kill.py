"""Kill the processes of a training server under clients that train, and see that nothing was lost or done twice.

A round trains a few models while processes are killed at random moments. When all is done, every future has its result,
what the ranks and the journal say they did is what was asked for, each once, and every result is bit by bit that of a
second server on which the same was trained in peace.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from soak.coord.chance import chance
from soak.coord.figures import spread_s
from soak.coord.result import Ask, Result, Tell
from soak.train.client import Trainer
from soak.train.server import Ranks, ServeProcess, Victim, make_model, serving
from strata.train.core import facts, ops
from strata.train.core.state import INITIAL

ROUND: Final = 20
ENDLESS: Final = 1 << 30
RANK_EVERY: Final = 10
"""So often a rank is killed instead: all of them start anew and do everything again."""
VICTIMS: Final[Sequence[Victim]] = ("orchestrator", "api", "orchestrator", "orchestrator", "api")


@dataclass
class Outcome:
    times: int = 0
    problems: list[str] = field(default_factory=list)
    operations: int = 0
    recovered_s: list[float] = field(default_factory=list)
    """From a kill to the next result that a client heard."""
    victims: Counter[str] = field(default_factory=Counter)

    def result(self) -> Result:
        killed = ", ".join(f"{count} {name}" for name, count in sorted(self.victims.items()))
        figures = f"{self.operations} operations; killed {killed}; kill to next result {spread_s(self.recovered_s)}"
        worst_s = max(self.recovered_s, default=0.0)
        return Result(times=self.times, problems=self.problems, figures=figures, worst_s=worst_s)


async def run(ask: Ask, tell: Tell) -> Result:
    model = ask.folder / "tiny"
    await asyncio.to_thread(make_model, model)
    outcome = Outcome()
    while outcome.times < ask.times and not outcome.problems:
        first = ask.first + outcome.times
        numbers = range(first, first + min(ROUND, ask.times - outcome.times))
        await hurt_round(ask.folder / f"round-{first}", model, "real", numbers, ask.workers, outcome)
        tell(outcome.result())
    return outcome.result()


async def hurt_round(
    folder: Path, model: Path, ranks: Ranks, numbers: Sequence[int], clients: int, outcome: Outcome
) -> None:
    """One server that is hurt, and one on which the same is done in peace."""
    async with serving(folder / "hurt", model, ranks) as server, _http(server) as http:
        trainers = [Trainer(http, place) for place in range(clients)]
        await asyncio.gather(*(each.begin() for each in trainers))
        enough = asyncio.Event()
        training = [asyncio.create_task(each.train(enough, ENDLESS)) for each in trainers]
        try:
            for number in numbers:
                await _hurt(server, trainers, training, number, outcome)
            enough.set()
            steps = await asyncio.gather(*training)
        finally:
            for task in training:
                task.cancel()
        outcome.operations += 2 * sum(steps)
        applied = await server.applied()
        if await server.stop() != 0:
            outcome.problems.append("the launcher did not end in order")
        _compare_counts(server, applied, await server.journaled(), steps, outcome)
    async with serving(folder / "calm", model, ranks) as server, _http(server) as http:
        calm = [Trainer(http, place) for place in range(clients)]
        await asyncio.gather(*(each.begin() for each in calm))
        await asyncio.gather(*(each.train(asyncio.Event(), count) for each, count in zip(calm, steps, strict=True)))
    _compare_results(trainers, calm, outcome)


async def _hurt(
    server: ServeProcess,
    trainers: Sequence[Trainer],
    training: Sequence[asyncio.Task[int]],
    number: int,
    outcome: Outcome,
) -> None:
    dice = chance(number)
    real = bool(server.pids("rank"))
    victim: Victim = "rank" if real and number % RANK_EVERY == RANK_EVERY - 1 else VICTIMS[number % len(VICTIMS)]
    await asyncio.sleep(dice.uniform(0.0, 1.0))
    if not server.kill(victim):
        return
    for each in trainers:
        each.progressed.clear()
    started_s = asyncio.get_running_loop().time()
    heard = [asyncio.create_task(each.progressed.wait()) for each in trainers]
    await asyncio.wait([*heard, *training], return_when=asyncio.FIRST_COMPLETED)
    for waiting in heard:
        waiting.cancel()
    for task in training:
        if task.done():
            task.result()
    outcome.recovered_s.append(asyncio.get_running_loop().time() - started_s)
    outcome.victims[victim] += 1
    outcome.times += 1


def _compare_counts(
    server: ServeProcess, applied: int, journal: Sequence[facts.Fact], steps: Sequence[int], outcome: Outcome
) -> None:
    dispatched = [fact for fact in journal if isinstance(fact, facts.Dispatched)]
    # Of each model its creation, its first checkpoint, and two operations a step.
    wanted = sum(2 + 2 * each for each in steps)
    told = Counter(future_id for fact in dispatched for future_id in fact.future_ids)
    ended = Counter(fact.future_id for fact in journal if isinstance(fact, facts.Finished))
    twice = [future_id for count in (told, ended) for future_id, times in count.items() if times > 1]
    if twice:
        outcome.problems.append(f"told or ended twice: {twice[:3]}")
    if len(told) != wanted or len(ended) != wanted:
        outcome.problems.append(f"{wanted} operations were asked for, {len(told)} told, {len(ended)} ended")
    if applied != len(dispatched):
        outcome.problems.append(f"rank 0 applied {applied} dispatches, and the journal has {len(dispatched)}")
    failed = [fact for fact in journal if isinstance(fact, facts.Finished) and isinstance(fact.result, ops.Failed)]
    if failed or any(isinstance(fact, facts.GivenUp) for fact in journal):
        outcome.problems.append(f"operations failed: {failed[:1]}")
    _compare_notes(server, told, outcome)


def _compare_notes(server: ServeProcess, told: Counter[str], outcome: Outcome) -> None:
    """Ranks that pretend write down what they do: the last group has done everything, once."""
    if not server.applied_file.exists():
        return
    lines = [line.split(" ", 1) for line in server.applied_file.read_text(encoding="utf-8").splitlines()]
    done = Counter(name for group, name in lines if group == lines[-1][0])
    numbered = [name for name in told if name.rpartition(":")[2].isdecimal() and not name.endswith(f":{INITIAL}")]
    wrong = [name for name in numbered if done[name] != 1]
    if wrong or not numbered:
        outcome.problems.append(f"the ranks did not do once: {wrong[:3]}")


def _compare_results(hurt: Sequence[Trainer], calm: Sequence[Trainer], outcome: Outcome) -> None:
    for place, (one, other) in enumerate(zip(hurt, calm, strict=True)):
        differing = [number for number, result in one.results.items() if result != other.results.get(number)]
        if differing or len(one.results) != len(other.results):
            problem = f"model {place}: operation {min(differing, default=0)} differs from the one done in peace"
            outcome.problems.append(problem)
        _refuse_failures(one.results, place, outcome)


def _refuse_failures(results: dict[int, Any], place: int, outcome: Outcome) -> None:
    failed = [number for number, result in results.items() if "error" in result]
    if failed:
        outcome.problems.append(f"model {place}: operation {failed[0]} failed: {results[failed[0]]}")


def _http(server: ServeProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, headers={"X-API-Key": server.key}, timeout=30.0)
