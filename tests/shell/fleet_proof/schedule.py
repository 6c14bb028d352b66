"""Random histories of the scheduler: hosts, owners, gangs, priorities and losses on a real store.

In every history no card is given twice, no gang holds a part of its hosts for longer than it may, each claim serves the
owner who has least, a job resumes from its newest checkpoint, and in the end all jobs end beside a stream of small
ones.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from strata.base.errors import StrataError
from strata.fleet.core.amounts import Amounts, Capacity, Card, Room, job_amounts
from strata.fleet.core.capability import Capability
from strata.fleet.core.fair_share import OwnerShares, add_up
from strata.fleet.core.job import HELD, TERMINAL, UNFINISHED, Cause, JobStatus
from strata.fleet.core.jobspec import GangPlace, JobSpec
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.requirement import Needs
from strata.fleet.core.reservation import GRANT_S, INCOMPLETE_S, HostOffer, ReservationPlanner
from strata.fleet.ports import Store
from strata.fleet.records import (
    AttemptKey,
    Claim,
    ClassRow,
    HostRow,
    JobCompletion,
    JobFailure,
    JobFilter,
    JobLease,
    JobRow,
    Renewal,
)
from tests.shell.fleet_proof.stores import open_memory
from tests.support.accounts import assert_within

LEASE_S: Final = 45.0
STEP_S: Final = 5.0
STEPS: Final = 30
LAST_STEPS: Final = 500
OWNERS: Final = ("anna", "bert")
LOW: Final = -2
"""The priority of most jobs; owners without a quota of their own may use none above 0."""
CARDS: Final = (Card("a", 24.0), Card("b", 24.0))
CAPACITIES: Final = (
    Capacity(cards=CARDS, cores=4, ram_gib=32.0),
    Capacity(cores=2, ram_gib=8.0),
    Capacity(cards=CARDS[:1], cores=4, ram_gib=64.0, slots=3),
)
NEEDS: Final = (
    Needs(),
    Needs(min_cores=1),
    Needs(min_cores=2),
    Needs(min_cores=1),
    Needs(min_gpus=1),
    Needs(min_gpus=2),
    Needs(gpu_share=0.5),
)
GONE: Final = 0.3
"""How often hosts do not come back in the end."""
PARTIAL_S: Final = INCOMPLETE_S + GRANT_S + 4 * STEP_S
"""How long too few members of a gang may hold hosts."""


@dataclass
class ScheduleHistory:
    store: Store
    rng: random.Random
    now_s: float = 0.0
    names: int = 0
    hosts: dict[str, Capacity] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    """Hosts that neither claim nor renew."""
    idle: set[str] = field(default_factory=set)
    """Hosts that renew and do not claim."""
    leases: dict[str, dict[str, JobLease]] = field(default_factory=dict)
    """What each host believes to hold."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    takes: dict[tuple[str, int], Amounts | None] = field(default_factory=dict)
    """What a job of a class takes of a host; None: it does not fit there."""
    gangs: dict[str, list[str]] = field(default_factory=dict)
    """The members of each gang, until all of them have ended."""
    partial_since_s: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        for number in range(self.rng.randint(2, 4)):
            host = f"host_{number}"
            self.hosts[host] = self.rng.choice(CAPACITIES)
            self.leases[host] = {}
            row = HostRow(id=host, name=host, capability=Capability(hostname="h"), registered_at_s=0.0)
            await self.store.hosts.register(row, "operator")
        acts: list[Callable[[], Awaitable[None]]] = [self.submit, self.submit_gang, self.end, self.checkpoint]
        acts += [self.end, self.leave, self.come_back, self.cancel, self.lose]
        for _ in range(4):
            await self.submit()
        for _ in range(STEPS):
            await self.rng.choice(acts)()
            await self.step(self.rng.choice((1.0, STEP_S, 20.0)))
        await self.finish()

    async def step(self, seconds: float) -> None:
        """Time passes, the hub plans, and the hosts that are there renew and claim."""
        self.now_s += seconds
        await self.store.leases.release_backoffs(self.now_s)
        await self.store.leases.expire(self.now_s)
        await self.renew()
        classes = await self.store.plans.classes()
        plan = await self.store.leases.reserve(await self.planner(classes), self.now_s)
        reserved = {each.job.job_id for each in plan.reservations}
        for host in self.rng.sample(sorted(self.hosts), len(self.hosts)):
            if host not in self.away | self.idle:
                await self.claim(host, classes, reserved)
        await self.check()

    async def check(self) -> None:
        held = await self.store.hosts.held()
        for host, capacity in self.hosts.items():
            assert_within(capacity, held.get(host, ()))
        rows = await self.members()
        for name, ids in list(self.gangs.items()):
            members = [rows[job_id] for job_id in ids]
            self.check_gang(name, members)
            if all(row.status in TERMINAL for row in members):
                del self.gangs[name]

    def check_gang(self, name: str, members: list[JobRow]) -> None:
        holding = [row for row in members if row.status in HELD]
        assert len({row.host_id for row in holding}) == len(holding), f"{name} has two members on a host"
        assert members[0].spec.gang is not None
        done = sum(row.status is JobStatus.COMPLETED for row in members)
        if 0 < len(holding) < members[0].spec.gang.min_size - done:
            since_s = self.partial_since_s.setdefault(name, self.now_s)
            assert self.now_s - since_s <= PARTIAL_S, f"{name} holds a part for {self.now_s - since_s:g} s"
        else:
            self.partial_since_s.pop(name, None)

    async def rows(self, *status: JobStatus, ids: Collection[str] = ()) -> Mapping[str, JobRow]:
        wanted = JobFilter(status=status, ids=list(ids), limit=10_000)
        return {row.id: row for row in await self.store.jobs.select(wanted)}

    async def members(self) -> Mapping[str, JobRow]:
        """Of all gangs that have not ended."""
        ids = [job_id for members in self.gangs.values() for job_id in members]
        return await self.rows(ids=ids) if ids else {}

    def served(self, host: str, classes: Collection[ClassRow]) -> dict[int, Amounts]:
        """What a job of each class takes of the host. Equal amounts are one object: claims rely on it."""
        for row in classes:
            if (host, row.id) not in self.takes:
                amounts = job_amounts(row.requirement.needs, self.hosts[host])
                equal = next((each for each in self.takes.values() if each == amounts), amounts)
                self.takes[host, row.id] = equal if Room(self.hosts[host]).fits(amounts) else None
        return {row.id: takes for row in classes if (takes := self.takes[host, row.id]) is not None}

    async def shares(self) -> OwnerShares:
        return OwnerShares(
            add_up(self.hosts.values()), await self.store.owners.active(), await self.store.owners.held()
        )

    async def dominant_shares(self) -> dict[str, float]:
        """Of each owner the largest of its shares of hosts, slots, cores, memory and cards."""
        held = {owner: [0.0] * 5 for owner in OWNERS}
        for owner, taken, leases in await self.store.owners.held():
            cards = len(taken.cards) * taken.gpu_share
            amounts = (float(taken.whole), taken.slots, taken.cores, taken.ram_gib, cards)
            held[owner] = [before + leases * amount for before, amount in zip(held[owner], amounts, strict=True)]
        all_of = [(1.0, each.slots or 0, each.cores, each.ram_gib, len(each.cards)) for each in self.hosts.values()]
        totals = [sum(column) for column in zip(*all_of, strict=True)]
        return {
            owner: max(part / total for part, total in zip(parts, totals, strict=True) if total)
            for owner, parts in held.items()
        }

    async def planner(self, classes: Collection[ClassRow]) -> ReservationPlanner:
        offers = {
            host: HostOffer(capacity, self.served(host, classes))
            for host, capacity in self.hosts.items()
            if host not in self.away
        }
        return ReservationPlanner(
            hosts=offers,
            classes=[row.id for row in classes],
            owners=tuple(await self.store.owners.active()),
            shares=await self.shares(),
            reserve_after_s=30.0,
            preempt=True,
        )

    async def claim(self, host: str, classes: Collection[ClassRow], reserved: Collection[str]) -> None:
        single = [row for row in classes if not row.requirement.gang]
        served, shares = self.served(host, single), await self.shares()
        self.names += 1
        wanted = Claim(host_id=host, claim_id=f"c{self.names}", classes=served, capacity=self.hosts[host])
        now = await self.dominant_shares()
        (granted,) = await self.store.leases.claim([wanted], LEASE_S, self.now_s, shares)
        for lease in granted:
            self.leases[host][lease.job_id] = lease
            assert lease.checkpoint == self.checkpoints.get(lease.job_id, ""), "it does not resume"
            if lease.job_id not in reserved:
                rows = await self.rows(JobStatus.PENDING, JobStatus.CLAIMED)
                self.check_fairness(rows, rows[lease.job_id], now)

    def check_fairness(self, rows: Mapping[str, JobRow], got: JobRow, shares: Mapping[str, float]) -> None:
        """Nobody else with a job of the same class and at least this priority had less."""
        for row in rows.values():
            waits = row.status is JobStatus.PENDING and row.not_before_s <= self.now_s and not row.waits_for
            if waits and row.class_id == got.class_id and row.spec.priority >= got.spec.priority:
                assert row.spec.priority == got.spec.priority, "a lower priority went first"
                assert shares[got.owner] <= shares[row.owner] + 1e-9, f"{got.owner} went before {row.owner}"

    async def renew(self) -> None:
        for host in self.hosts:
            if host in self.away:
                continue
            mine = self.leases[host]
            renewals = [Renewal(job_id=each.job_id, epoch=each.epoch, running=True) for each in mine.values()]
            for each in await self.store.leases.renew(host, renewals, LEASE_S, self.now_s):
                if each.verdict != "held":
                    del mine[each.job_id]
                elif each.preempt:
                    await self.fail(mine.pop(each.job_id), Cause.PREEMPTED)

    async def fail(self, lease: JobLease, cause: Cause) -> None:
        with suppress(StrataError):
            row = await self.store.leases.fail(self.key(lease), JobFailure(cause=cause), self.now_s, chance=0.0)
            assert cause is not Cause.PREEMPTED or row.status is JobStatus.PENDING, f"preempted, and {row.status}"

    @staticmethod
    def key(lease: JobLease) -> AttemptKey:
        return AttemptKey(lease.host_id, lease.job_id, lease.epoch)

    def present_leases(self) -> list[JobLease]:
        return [lease for host, mine in self.leases.items() if host not in self.away for lease in mine.values()]

    def some_lease(self) -> JobLease | None:
        present = self.present_leases()
        return self.rng.choice(present) if present else None

    def hosts_of_gangs(self) -> list[str]:
        """Of those that need more than one."""
        gangs = [(lease.host_id, lease.spec.gang) for lease in self.present_leases()]
        return [host for host, gang in gangs if gang is not None and gang.min_size > 1]

    async def add(self, *specs: JobSpec) -> None:
        plan = ApplyPlan(new={spec.id: spec for spec in specs})
        submitter = Submitter(owner=self.rng.choice(OWNERS))
        await self.store.plans.apply(plan, "key:x", self.now_s, source="run", declared=False, submitter=submitter)

    async def submit(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self.names += 1
            needs, priority = self.rng.choice(NEEDS), self.rng.choice((LOW, LOW, LOW, -1, 0))
            await self.add(JobSpec(model="m", seed=self.names, needs=needs, priority=priority))

    async def submit_gang(self) -> None:
        self.names += 1
        size = self.rng.randint(2, 3)
        least, name = self.rng.choice((size, size, 1)), f"g{self.names}"
        places = [GangPlace(name=name, size=size, index=index, min_size=least) for index in range(size)]
        priority, cores = self.rng.choice((LOW, LOW, -1)), self.rng.choice((1, 2))
        specs = [JobSpec(model=name, needs=Needs(min_cores=cores), priority=priority, gang=each) for each in places]
        self.gangs[name] = [spec.id for spec in specs]
        await self.add(*specs)

    async def end(self) -> None:
        lease = self.some_lease()
        if lease is not None:
            await self.complete(lease)

    async def complete(self, lease: JobLease) -> None:
        del self.leases[lease.host_id][lease.job_id]
        with suppress(StrataError):
            await self.store.leases.complete(self.key(lease), JobCompletion(), self.now_s)

    async def checkpoint(self) -> None:
        lease = self.some_lease()
        if lease is not None:
            self.names += 1
            with suppress(StrataError):
                await self.store.leases.record_checkpoint(self.key(lease), f"artifact1_{self.names}", self.now_s)
                self.checkpoints[lease.job_id] = f"artifact1_{self.names}"

    async def lose(self) -> None:
        lease = self.some_lease()
        if lease is not None:
            del self.leases[lease.host_id][lease.job_id]
            await self.fail(lease, self.rng.choice((Cause.PREEMPTED, Cause.INFRA, Cause.USER_ERROR)))

    async def leave(self) -> None:
        self.rng.choice((self.away, self.idle)).add(self.rng.choice(sorted(self.hosts)))

    async def come_back(self) -> None:
        self.away.clear()
        self.idle.clear()

    async def cancel(self) -> None:
        rows = await self.rows(*UNFINISHED)
        open_jobs = [row.id for row in rows.values() if row.spec.gang is None]
        if open_jobs and self.rng.random() < 0.5:
            await self.store.jobs.cancel(self.rng.choice(sorted(open_jobs)), "", "operator", self.now_s)

    async def finish(self) -> None:
        """All hosts are back, until some go for good, and small jobs keep coming: everything that a host could take
        ends all the same, and no gang that cannot go on keeps its hosts."""
        await self.come_back()
        loses_hosts = self.rng.random() < GONE
        unfinished = await self.unfinished()
        for _ in range(LAST_STEPS):
            rows = await self.rows(ids=unfinished) if unfinished else {}
            unfinished = [job_id for job_id in unfinished if rows[job_id].status not in TERMINAL]
            if not unfinished and not self.partial_since_s:
                return
            if loses_hosts and (hosts := self.hosts_of_gangs()):
                loses_hosts = False
                others = sorted(self.hosts.keys() - {self.rng.choice(hosts)})
                self.away.update(self.rng.sample(others, self.rng.randint(1, len(others))))
                unfinished = await self.unfinished()
            members = await self.members()
            self.names += 1
            await self.add(JobSpec(model="stream", seed=self.names, needs=Needs(min_cores=1), priority=LOW))
            for lease in self.present_leases():
                if self.rng.random() < 0.7 and self.trains(lease, members):
                    await self.complete(lease)
            await self.step(STEP_S)
        rows = await self.rows(ids=unfinished)
        stuck = [f"{row.id[:12]} {row.status} {row.spec.gang} {row.spec.needs}" for row in rows.values()]
        raise AssertionError(f"never ended: {stuck}")

    async def unfinished(self) -> list[str]:
        """The jobs that the hosts that are there can take."""
        classes = await self.store.plans.classes()
        servable = {id_ for host in self.hosts if host not in self.away for id_ in self.served(host, classes)}
        return [row.id for row in (await self.rows(*UNFINISHED)).values() if self.can_run(row, servable)]

    def can_run(self, row: JobRow, servable: Collection[int]) -> bool:
        gang = row.spec.gang
        present = [capacity for host, capacity in self.hosts.items() if host not in self.away]
        capable = sum(Room(each).fits(job_amounts(row.spec.needs, each)) for each in present)
        return row.class_id in servable and (gang is None or capable >= gang.min_size)

    def trains(self, lease: JobLease, members: Mapping[str, JobRow]) -> bool:
        """A member ends only in a gang that is large enough; the others wait for it."""
        gang = lease.spec.gang
        if gang is None or gang.name not in self.gangs:
            return True
        status = [members[job_id].status for job_id in self.gangs[gang.name]]
        return sum(each in HELD or each is JobStatus.COMPLETED for each in status) >= gang.min_size


async def schedule_history(seed: int) -> str | None:
    """What is wrong with the history of this seed, or None."""
    store = open_memory()
    try:
        await ScheduleHistory(store, random.Random(seed)).run()
    except AssertionError as error:
        return str(error)
    finally:
        await store.close()
    return None
