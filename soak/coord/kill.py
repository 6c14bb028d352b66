"""Kill the coordinator again and again under a load of workers, and see that nothing it said was taken back.

On SQLite the same coordinator starts again on its journal; on PostgreSQL a warm standby takes over. Every second kill
comes at a random moment from outside, the others at a failpoint, where the process ends itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from soak.coord.expected_state import ExpectedState
from soak.coord.processes import Arm, Coordinator, failpoints
from soak.coord.workers import WorkerPlan, WorkerPool
from soak.trials import CampaignRequest, CampaignResult, Database, OnProgress, seeded_random, spread_s
from strata.coord.core.job_config import JobConfig

Value = TypeVar("Value")

LIMIT_S: Final[dict[Database, float]] = {"sqlite": 2.0, "postgres": 5.0}
"""From the kill to the first answer that a worker gets."""
SILENT_S: Final = JobConfig().heartbeat_interval_s * JobConfig().missed_beats
"""How long a worker may be silent."""
SNAPSHOT_EVERY: Final = 4_000
FIRES_S: Final = 20.0
"""A failpoint that was not reached by then is replaced by a kill from outside."""
BACK_S: Final = 60.0
FINISH_S: Final = 120.0
BLACKOUT_EVERY: Final = 20
_SETTINGS: Final = {"STRATA_COORDINATOR_SNAPSHOT_EVERY": str(SNAPSHOT_EVERY)}
OUTSIDE: Final = "from outside"
_HITS: Final[dict[Database, int]] = {"sqlite": 1_500, "postgres": 200}
"""A commit on PostgreSQL takes longer, so there are fewer of them in a second."""
_RARE: Final = ("snapshot", "floor", "sweep", "truncate")
_FIRST: Final = ("lead",)


@dataclass(frozen=True)
class Kill:
    number: int
    backoff_s: float
    """Of a kill from outside: how long after the last one."""
    arm: Arm | None
    down_s: float = 0.0
    """How long the coordinator stays down before its restart."""


@dataclass
class Outcome:
    kills: int = 0
    problems: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    """First answer after each kill from which the coordinator came back as it should."""
    everywhere_s: list[float] = field(default_factory=list)
    slow_s: list[float] = field(default_factory=list)
    """The same after kills while no coordinator led, or with a wait before the restart: no limit holds for these."""
    in_barrier: list[int] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)
    confirmed: int = 0
    epochs: int = 0
    memory_mb: float = 0.0

    def result(self, limit_s: float) -> CampaignResult:
        late = [each for each in self.back_s if each > limit_s]
        failpoints_hit = sum(count for moment, count in self.moments.items() if moment != OUTSIDE)
        figures = (
            f"first answer {spread_s(self.back_s)}, {len(late)} over {limit_s:g} s; on every channel"
            f" {spread_s(self.everywhere_s)}; after blackouts and double kills {spread_s(self.slow_s)};"
            f" {failpoints_hit} kills at {len(self.moments.keys() - {OUTSIDE})} failpoints; at least"
            f" {min(self.in_barrier, default=0)} workers in an open barrier at each kill; {self.confirmed} acks,"
            f" {self.epochs} epochs; {self.memory_mb:.0f} MB"
        )
        return CampaignResult(
            times=self.kills, problems=self.problems, figures=figures, worst_s=max(self.back_s, default=0.0)
        )


def schedule(database: Database, first: int, kills: int) -> list[Kill]:
    """The same numbers give the same kills, so that a campaign can go on where another one ended."""
    names = failpoints(database)
    made = []
    for number in range(first, first + kills):
        dice = seeded_random(number)
        arm = None
        if number % 2:
            name = names[number // 2 % len(names)]
            most = 0 if name.endswith(_FIRST) else 1 if any(word in name for word in _RARE) else _HITS[database]
            arm = Arm(name, dice.randint(min(most, 50), most))
        blackout = database == "sqlite" and number % BLACKOUT_EVERY == BLACKOUT_EVERY - 2
        made.append(Kill(number, dice.uniform(0.2, 2.0), arm, SILENT_S + 1.0 if blackout else 0.0))
    return made


class Campaign:
    """Kills in order. The process that will suffer one is armed when it starts, if a failpoint is to end it."""

    def __init__(self, coordinators: list[Coordinator], pool: WorkerPool, kills: list[Kill]) -> None:
        self._coordinators = coordinators
        self._pool = pool
        self._kills = kills
        self._dead_twice = False
        """Killed again before any worker got a reply."""
        self.outcome = Outcome()

    async def run(self, tell: Callable[[Outcome], None]) -> Outcome:
        outcome, pool = self.outcome, self._pool
        try:
            for ahead, coordinator in enumerate(self._coordinators):
                await coordinator.start(self._arm(ahead))
                await (coordinator.stands_by() if ahead else coordinator.leads())
            await pool.join()
            for turn in range(len(self._kills)):
                await self._kill(turn)
                outcome.problems = [
                    *pool.expected.summary(),
                    *(crash for each in self._coordinators for crash in each.crashes),
                ]
                outcome.confirmed = pool.expected.confirmed
                outcome.epochs = pool.workers[0].epoch
                tell(outcome)
                if outcome.problems:
                    return outcome
            outcome.epochs = await self._unless_killed(pool.finish(FINISH_S), "finished the epoch", FINISH_S) or 0
            await self._check_job(0, -1)
            outcome.confirmed = pool.expected.confirmed
            outcome.memory_mb = max((each.memory_mb() for each in self._coordinators if each.runs), default=0.0)
        finally:
            outcome.problems = pool.expected.summary()
            await pool.close()
            for coordinator in self._coordinators:
                await coordinator.close()
            outcome.problems += [crash for coordinator in self._coordinators for crash in coordinator.crashes]
        return outcome

    def _arm(self, turn: int) -> Arm | None:
        return self._kills[turn].arm if turn < len(self._kills) else None

    async def _kill(self, turn: int) -> None:
        kill, pool, outcome = self._kills[turn], self._pool, self.outcome
        victim, died_s, moment = await self._strike(kill)
        pool.down(died_s)
        epoch = pool.workers[0].epoch
        confirmed = pool.expected.confirmed_in(epoch)
        outcome.in_barrier.append(pool.waiting)
        outcome.kills += 1
        outcome.moments[moment] = outcome.moments.get(moment, 0) + 1
        if kill.down_s:
            await asyncio.sleep(kill.down_s)
        again = self._arm(turn + len(self._coordinators))
        if len(self._coordinators) == 1:
            await victim.start(again)
        back = await self._back(kill, died_s)
        if not victim.runs and len(self._coordinators) > 1:
            # Only now, else it might win the lead, and what is measured is the one that stood by.
            await victim.start(again)
            await victim.stands_by()
        if back:
            await self._check_job(confirmed, epoch)

    async def _strike(self, kill: Kill) -> tuple[Coordinator, float, str]:
        """Who died and when, and at which failpoint, if it was one."""
        if kill.arm is not None:
            dying = {asyncio.ensure_future(each.died()): each for each in self._coordinators}
            done, waiting = await asyncio.wait(dying, timeout=FIRES_S, return_when=asyncio.FIRST_COMPLETED)
            for each in waiting:
                each.cancel()
            for each in done:
                died_s = each.result()
                assert died_s is not None
                return dying[each], died_s, kill.arm.failpoint
        else:
            await asyncio.sleep(kill.backoff_s)
            until_s = time.monotonic() + FIRES_S
            # Between two epochs no worker waits in a barrier or none reads: a kill shows more a moment later.
            while not (self._pool.waiting and self._pool.reading) and time.monotonic() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        victim = await self._leader()
        return victim, await victim.kill(), OUTSIDE

    async def _leader(self) -> Coordinator:
        until_s = time.monotonic() + BACK_S
        while time.monotonic() < until_s:
            for each in self._coordinators:
                if each.runs and await each.is_leading():
                    return each
            await asyncio.sleep(0.05)
        raise TimeoutError(f"no coordinator leads: {self._coordinators[0].log}")

    async def _back(self, kill: Kill, died_s: float) -> bool:
        """Wait for an answer; False if the one that should give it was killed before it could."""
        pool, outcome = self._pool, self.outcome
        first_s = await self._unless_killed(pool.answered(), f"answered a worker after kill {kill.number}")
        if first_s is None:
            self._dead_twice = True
            return False
        slow, self._dead_twice = self._dead_twice or kill.down_s > 0, False
        if slow:
            outcome.slow_s.append(first_s - died_s - kill.down_s)
            return True
        outcome.back_s.append(first_s - died_s)
        all_s = await self._unless_killed(pool.answered_everywhere(), f"answered all channels after kill {kill.number}")
        if all_s is not None:
            outcome.everywhere_s.append(all_s - died_s)
        return all_s is not None

    async def _unless_killed(
        self, coming: Coroutine[Any, Any, Value], what: str, within_s: float = BACK_S
    ) -> Value | None:
        """None if it did not come: because the next kill was faster, else that is a problem."""
        alive = sum(each.runs for each in self._coordinators)
        if not alive:
            coming.close()
            return None
        task = asyncio.ensure_future(coming)
        gone = [asyncio.ensure_future(each.died()) for each in self._coordinators if each.runs]
        await asyncio.wait([task, *gone], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for each in gone:
            each.cancel()
        if task.done():
            return task.result()
        task.cancel()
        if sum(each.runs for each in self._coordinators) == alive:
            self._pool.expected.problem(f"no worker {what} within {within_s:g} s")
        return None

    async def _check_job(self, confirmed: int, epoch: int) -> None:
        """Nobody is gone, and every ack that was confirmed before the kill is in the ledger after it."""
        pool = self._pool
        job = await self._unless_killed(pool.job(), "said how the job stands")
        if job is None:
            return
        # First of all: the rest follows from it.
        pool.expected.problems[:0] = pool.missing_members(job)
        for progress in (each for dataset in job.datasets for each in dataset.open_epochs):
            if progress.epoch == epoch and progress.done_shards < confirmed:
                pool.expected.problem(f"{confirmed} acks of epoch {epoch} confirmed, {progress.done_shards} are known")


async def run(ask: CampaignRequest, tell: OnProgress, plan: WorkerPlan | None = None) -> CampaignResult:
    plan = plan or WorkerPlan(workers=ask.workers, shards=3 * ask.workers)
    names = ["coordinator"] if ask.database == "sqlite" else ["coordinator-a", "coordinator-b"]
    coordinators = [Coordinator(ask.url, ask.folder, name, _SETTINGS) for name in names]
    expected = ExpectedState(plan.shards * plan.shard_size)
    pool = WorkerPool([each.address for each in coordinators], plan, expected, seeded_random(ask.first))
    campaign = Campaign(coordinators, pool, schedule(ask.database, ask.first, ask.times))
    limit_s = LIMIT_S[ask.database]
    return (await campaign.run(lambda outcome: tell(outcome.result(limit_s)))).result(limit_s)
