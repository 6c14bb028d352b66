"""One history from a seed: clients at work on a real store, then a fleet that heals, then the judgement.

The judgement has three parts: for each job one order of all calls explains every answer (`model`); the tables agree
with each other; and every job has ended, because after the healing a healthy host was given all there was.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from strata.base.errors import StrataError
from strata.database.transaction import SqliteDatabase
from strata.fleet.core.job import HELD, TERMINAL, JobStatus
from strata.fleet.ports import Store
from strata.fleet.records import AttemptKey
from strata.fleet.store.store import FleetStore
from tests.conformance.fleet.fleet import add, add_host, all_classes, job
from tests.shell.fleet_proof import clients
from tests.shell.fleet_proof.clients import Op, Site
from tests.shell.fleet_proof.model import BUDGET, LEASE_S, FleetModel, Take
from tests.support.history import Operation, Returned, Unknown
from tests.support.linearizable import Linearizable, check

HOSTS: Final = ("host_a", "host_b", "host_c")
HEALER: Final = "host_z"
ROUNDS: Final = 60
_STATUSES: Final = "SELECT id, status FROM job"


@dataclass(frozen=True)
class Tables:
    jobs: list[Any]
    attempts: list[Any]
    leases: list[Any]
    ready: set[int]
    ripening: set[int]
    events: Counter[tuple[str, str]]


async def run_history(
    store: Store, seed: int, *, hurt: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> str | None:
    """What is wrong, in words, or None. `hurt` does something to the database while the clients work."""
    site = await _found(store, seed)
    steps = site.rng.randrange(4, 9)
    try:
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for host in HOSTS:
                group.create_task(clients.be_a_host(site, host, steps))
            group.create_task(clients.be_an_operator(site, steps))
            group.create_task(clients.be_a_hub(site, HOSTS, steps + 4))
            if hurt is not None:
                group.create_task(hurt())
        site.faults = False
        problems = disagreements(await read_tables(store))
        problems += await _heal(site)
    except (ExceptionGroup, StrataError, sqlite3.Error) as failed:
        errors = failed.exceptions if isinstance(failed, ExceptionGroup) else [failed]
        return f"seed {seed}: the store failed: {errors!r}"
    tables = await read_tables(store)
    problems += disagreements(tables) + _too_many(site, tables)
    verdict = check(site.operations + _takes(site, tables), FleetModel(strict=_has_one_writer(store)))
    if not isinstance(verdict, Linearizable):
        problems.append(verdict.explain())
    return f"seed {seed}: " + "\n".join(problems) if problems else None


async def _found(store: Store, seed: int) -> Site:
    rng = random.Random(seed)
    for host in (*HOSTS, HEALER):
        await add_host(store, host)
    budget = {"max_attempts": BUDGET.max_attempts, "max_lost": BUDGET.max_lost, "max_infra": BUDGET.max_infra}
    specs = [job(f"m{n % 2}", seed=n, priority=rng.randrange(2), **budget) for n in range(rng.randrange(2, 5))]
    jobs = await add(store, *specs)
    return Site(store, rng, jobs, await all_classes(store), 1000.0)


async def _heal(site: Site) -> list[str]:
    """All faults are over, time passes, and one host takes and completes what it is given."""
    open_jobs: list[str] = []
    for number in range(ROUNDS):
        site.now_s += LEASE_S
        await clients.expire_leases(site)
        # As long as the longest back-off of so few failures.
        site.now_s += 2 * LEASE_S
        await clients.release_backoffs(site)
        for lease in await clients.claim(site, HEALER, count=len(site.jobs)):
            await clients.complete(site, AttemptKey(HEALER, lease.job_id, lease.epoch), f"healed{number}")
        for job_id in site.jobs:
            await clients.read(site, "reader", job_id)
        open_jobs = [
            f"lost: {id_} is {status}" for id_, status in await rows(site.store, _STATUSES) if status not in TERMINAL
        ]
        if not open_jobs:
            break
    return open_jobs


async def read_tables(store: Store) -> Tables:
    """A call whose reply was lost may still be committed between two reads, so they are made until two agree."""
    before, tables = None, await _read_once(store)
    while before != tables:
        before, tables = tables, await _read_once(store)
    return tables


async def _read_once(store: Store) -> Tables:
    return Tables(
        jobs=await rows(store, "SELECT id, seq, status, epoch, artifact, waits_for FROM job"),
        attempts=await rows(store, "SELECT job_id, epoch, host_id, claim_id, outcome, artifact FROM attempt"),
        leases=await rows(store, "SELECT job_id, epoch, host_id, expired FROM lease"),
        ready={seq for (seq,) in await rows(store, "SELECT seq FROM ready")},
        ripening={seq for (seq,) in await rows(store, "SELECT seq FROM ripening")},
        events=Counter((subject, kind) for subject, kind in await rows(store, "SELECT subject, kind FROM event")),
    )


async def rows(store: Store, select: str) -> list[Any]:
    """What lies in the tables themselves, behind the port."""
    assert isinstance(store, FleetStore)
    try:
        return await store.database.rows(select)
    except StrataError:
        # The connections that stood idle were ended by the server; now they are gone.
        return await store.database.rows(select)


def _has_one_writer(store: Store) -> bool:
    assert isinstance(store, FleetStore)
    return isinstance(store.database, SqliteDatabase)


def disagreements(tables: Tables) -> list[str]:
    """Where the tables contradict each other. Each transaction leaves them in agreement, so this holds at any time."""
    found: list[str] = []
    leases = {job_id: (epoch, bool(expired)) for job_id, epoch, _, expired in tables.leases}
    for id_, seq, status, epoch, artifact, waits_for in tables.jobs:
        tried = sorted(number for job_id, number, *_ in tables.attempts if job_id == id_)
        lease = leases.get(id_)
        places = (seq in tables.ready) + (seq in tables.ripening)
        kept = {each[5] for each in tables.attempts if each[0] == id_ and each[4] == "completed"}
        wrong = {
            f"attempts {tried} of epoch {epoch}": tried != list(range(1, epoch + 1)),
            f"{status} with lease {lease}": (status in HELD) != (lease is not None and not lease[1]),
            f"lease {lease} of epoch {epoch}": lease is not None and lease[0] != epoch,
            f"{status} and in {places} queues": places != (status == JobStatus.PENDING and not waits_for),
            f"completed with {artifact!r} of {kept}": status == JobStatus.COMPLETED and artifact not in kept,
            "claims without events": tables.events[id_, "job.claimed"] != epoch,
            "completions without events": tables.events[id_, "job.completed"]
            != len([1 for each in tables.attempts if each[0] == id_ and each[4] == "completed"]),
        }
        found += [f"{id_[:12]}: {what}" for what, holds in wrong.items() if holds]
    return found


def _too_many(site: Site, tables: Tables) -> list[str]:
    """A name that was used for several tries was still given no more jobs than it asked for."""
    given = Counter((host, claim) for _, _, host, claim, *_ in tables.attempts)
    asked = {(each.host, each.claim): each.count for each in site.claims}
    return [
        f"{host} was given {count} jobs for claim {claim}, which asked for {asked[host, claim]}"
        for (host, claim), count in given.items()
        if count > asked[host, claim]
    ]


def _takes(site: Site, tables: Tables) -> list[Op]:
    """Claims as operations on the jobs they were given. The attempts say which job a lost try may have been given."""
    owners = {(job_id, epoch): (host, claim) for job_id, epoch, host, claim, *_ in tables.attempts}
    found: list[Op] = []
    for each in site.claims:
        if each.returned_at is None:
            for (job_id, _), owner in owners.items():
                if owner == (each.host, each.claim):
                    take = Take(job_id, each.host, each.claim, each.now_s)
                    found.append(Operation(each.host, take, each.invoked_at, None, Unknown()))
        for lease in each.given:
            take = Take(lease.job_id, each.host, each.claim, each.now_s)
            found.append(Operation(each.host, take, each.invoked_at, each.returned_at, Returned(lease.epoch)))
    return found
