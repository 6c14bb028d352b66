"""Hosts, an operator and a hub that use one store at the same time, lose replies, repeat themselves and note it all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, TypeVar

from strata.base.errors import Code, StrataError
from strata.fleet.core.amounts import Amounts
from strata.fleet.core.job import Cause
from strata.fleet.ports import Store
from strata.fleet.records import AttemptKey, Claim, JobCompletion, JobFailure, JobLease, Renewal
from tests.conformance.fleet.fleet import ROOMY, add_host
from tests.shell.fleet_proof import model
from tests.shell.fleet_proof.model import CHANCE, LEASE_S, Answer, Call
from tests.support.history import Operation, Outcome, Returned, Unknown

T = TypeVar("T")
Op = Operation[Call, Answer]
REFUSALS: Final = {Code.STALE: "stale", Code.CONFLICT: "conflict", Code.PRECONDITION: "precondition"}
CAUSES: Final = (Cause.USER_ERROR, Cause.OOM, Cause.INFRA, Cause.PREEMPTED)
PATIENCE_S: Final = 0.006
"""A reply is lost by no longer waiting for it, at a random moment of the first few milliseconds."""


@dataclass(frozen=True, slots=True)
class ClaimTry:
    """A claim is a call on jobs that only its answer names, so it becomes operations when the history is over."""

    host: str
    claim: str
    count: int
    now_s: float
    invoked_at: float
    returned_at: float | None
    given: Sequence[JobLease]


@dataclass
class Site:
    store: Store
    rng: random.Random
    jobs: Sequence[str]
    classes: Mapping[int, Amounts]
    now_s: float
    operations: list[Op] = field(default_factory=list)
    claims: list[ClaimTry] = field(default_factory=list)
    held: list[tuple[str, int]] = field(default_factory=list)
    """What anybody was ever given: a host may try to speak for another one."""
    faults: bool = True
    names: int = 0

    def later(self) -> float:
        self.now_s += self.rng.random()
        return self.now_s

    def name(self, what: str) -> str:
        self.names += 1
        return f"{what}{self.names}"

    async def lossy(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """None when the reply is lost; the call may have had its effect, may have it later, or never."""
        task = asyncio.ensure_future(call())
        if self.faults and self.rng.random() < 0.2:
            await asyncio.wait([task], timeout=self.rng.random() * PATIENCE_S)
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return None
        except StrataError as error:
            if error.code is not Code.UNAVAILABLE:
                raise
            return None

    async def ask(self, client: str, inputs: Sequence[Call], call: Callable[[], Awaitable[Sequence[Answer]]]) -> bool:
        """Make a call that concerns these jobs and note it; whether it was answered."""
        invoked_at = perf_counter()
        answers: Sequence[Answer] | None
        try:
            answers = await self.lossy(call)
        except StrataError as error:
            if error.code not in REFUSALS:
                raise
            answers = [REFUSALS[error.code]] * len(inputs)
        returned_at = None if answers is None else perf_counter()
        for number, given in enumerate(inputs):
            outcome: Outcome[Answer] = Unknown() if answers is None else Returned(answers[number])
            self.operations.append(Operation(client, given, invoked_at, returned_at, outcome))
        return answers is not None


async def claim(site: Site, host: str, count: int = 1) -> Sequence[JobLease]:
    """Under one name until it is answered; sometimes two tries are under way at once."""
    wanted = Claim(host_id=host, claim_id=site.name("c"), classes=site.classes, capacity=ROOMY, count=count)
    for _ in range(4):
        tries = 2 if site.faults and site.rng.random() < 0.3 else 1
        answers = await asyncio.gather(*(_claim_once(site, wanted) for _ in range(tries)))
        for given in answers:
            if given is not None:
                return given
    return []


async def _claim_once(site: Site, wanted: Claim) -> Sequence[JobLease] | None:
    now_s, invoked_at = site.later(), perf_counter()
    given = await site.lossy(lambda: site.store.leases.claim([wanted], LEASE_S, now_s))
    returned_at = None if given is None else perf_counter()
    leases = [] if given is None else given[0]
    once = ClaimTry(wanted.host_id, wanted.claim_id, wanted.count, now_s, invoked_at, returned_at, leases)
    site.claims.append(once)
    site.held += [(lease.job_id, lease.epoch) for lease in leases]
    return None if given is None else leases


async def renew(site: Site, hold: AttemptKey, *, running: bool) -> None:
    now_s = site.later()
    asked = Renewal(job_id=hold.job_id, epoch=hold.epoch, running=running)

    async def call() -> Sequence[Answer]:
        renewed = await site.store.leases.renew(hold.host_id, [asked], LEASE_S, now_s)
        return [(each.verdict, each.status) for each in renewed]

    given = model.Renew(hold.job_id, hold.host_id, hold.epoch, running, now_s)
    await site.ask(hold.host_id, [given], call)


async def complete(site: Site, hold: AttemptKey, artifact: str) -> bool:
    now_s = site.later()

    async def call() -> Sequence[Answer]:
        await site.store.leases.complete(hold, JobCompletion(artifact=artifact), now_s)
        return ["ok"]

    return await site.ask(hold.host_id, [model.Complete(hold.job_id, hold.host_id, hold.epoch, artifact)], call)


async def fail(site: Site, hold: AttemptKey, cause: Cause, error: str) -> bool:
    now_s = site.later()

    async def call() -> Sequence[Answer]:
        await site.store.leases.fail(hold, JobFailure(cause=cause, error=error), now_s, chance=CHANCE)
        return ["ok"]

    given = model.Fail(hold.job_id, hold.host_id, hold.epoch, cause, error, now_s)
    return await site.ask(hold.host_id, [given], call)


async def expire_leases(site: Site, client: str = "hub") -> None:
    now_s = site.later()

    async def call() -> Sequence[Answer]:
        expired = {row.id for row in await site.store.leases.expire(now_s)}
        return [job_id in expired for job_id in site.jobs]

    await site.ask(client, [model.Expire(job_id, now_s) for job_id in site.jobs], call)


async def release_backoffs(site: Site, client: str = "hub") -> None:
    now_s = site.later()

    async def call() -> Sequence[Answer]:
        await site.store.leases.release_backoffs(now_s)
        return [None] * len(site.jobs)

    await site.ask(client, [model.Ripen(job_id, now_s) for job_id in site.jobs], call)


async def read(site: Site, client: str, job_id: str) -> None:
    async def call() -> Sequence[Answer]:
        row = await site.store.jobs.get(job_id)
        return [(row.status, row.epoch, row.host_id, row.artifact)]

    await site.ask(client, [model.Read(job_id)], call)


async def cancel(site: Site, job_id: str) -> None:
    now_s = site.later()

    async def call() -> Sequence[Answer]:
        await site.store.jobs.cancel(job_id, "not needed", "operator", now_s)
        return ["ok"]

    await site.ask("operator", [model.Cancel(job_id, now_s)], call)


async def requeue(site: Site, job_id: str) -> None:
    now_s = site.later()

    async def call() -> Sequence[Answer]:
        await site.store.jobs.requeue(job_id, "operator", now_s)
        return ["ok"]

    await site.ask("operator", [model.Requeue(job_id, now_s)], call)


async def be_a_host(site: Site, host: str, steps: int) -> None:
    """Claims, renews and ends attempts; also those it was told are over, and those it has forgotten to renew."""
    mine: list[AttemptKey] = []
    former: list[AttemptKey] = []
    for _ in range(steps):
        if not mine or site.rng.random() < 0.15:
            given = await claim(site, host, site.rng.choice((1, 1, 2)))
            mine += [AttemptKey(host, lease.job_id, lease.epoch) for lease in given]
            continue
        hold = site.rng.choice(former) if former and site.rng.random() < 0.25 else site.rng.choice(mine)
        if site.rng.random() < 0.1:
            hold = AttemptKey(host, *site.rng.choice(site.held))
        if await _speak(site, hold):
            former.append(hold)
            mine = [each for each in mine if each != hold]


async def _speak(site: Site, hold: AttemptKey) -> bool:
    """One report, or two that cross each other; whether the host is done with this attempt."""
    choice = site.rng.random()
    if choice < 0.4:
        await renew(site, hold, running=site.rng.random() < 0.5)
        return False
    if choice < 0.55:
        return True
    artifact, cause, error = site.name("art"), site.rng.choice(CAUSES), site.name("error ")
    ending = site.rng.random() < 0.5

    async def end() -> bool:
        return await (complete(site, hold, artifact) if ending else fail(site, hold, cause, error))

    if choice < 0.75:
        await asyncio.gather(end(), renew(site, hold, running=True))
    elif not await end():
        await end()
    if site.rng.random() < 0.2:
        await end()
    return True


async def be_an_operator(site: Site, steps: int) -> None:
    for _ in range(steps):
        job_id, choice = site.rng.choice(site.jobs), site.rng.random()
        if choice < 0.15:
            await cancel(site, job_id)
        elif choice < 0.4:
            await requeue(site, job_id)
        else:
            await read(site, "operator", job_id)


async def be_a_hub(site: Site, hosts: Sequence[str], steps: int) -> None:
    for _ in range(steps):
        choice = site.rng.random()
        if choice < 0.45:
            site.now_s += site.rng.random() * LEASE_S / 2
            await expire_leases(site)
        elif choice < 0.85:
            await release_backoffs(site)
        else:
            host = site.rng.choice(hosts)
            await site.lossy(lambda host=host: add_host(site.store, host, site.later()))  # type: ignore[misc]
