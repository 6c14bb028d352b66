"""Short ways to say what a conformance test needs: jobs, hosts, plans, claims."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import pytest

from strata.base.errors import StrataError
from strata.fleet.core.amounts import Amounts, Capacity, Card, job_amounts
from strata.fleet.core.capability import Capability
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.requirement import Needs
from strata.fleet.ports import Store
from strata.fleet.records import AttemptKey, Claim, HostRow, JobLease
from tests.support.feed import told_before

LEASE_S = 45.0
ROOMY = Capacity(cards=(Card("0", 24.0),), cores=64, ram_gib=64.0, slots=64)
_markers = itertools.count()


def job(model: str, **fields: Any) -> JobSpec:
    return JobSpec(model=model, **fields)


def plan(*specs: JobSpec, **fields: Any) -> ApplyPlan:
    return ApplyPlan(new={spec.id: spec for spec in specs}, **fields)


async def add(store: Store, *specs: JobSpec, now_s: float = 0.0) -> list[str]:
    await store.plans.apply(plan(*specs), "operator", now_s, source="manifest")
    return [spec.id for spec in specs]


async def add_host(store: Store, host_id: str = "host_a", now_s: float = 0.0) -> str:
    row = HostRow(
        id=host_id, name=host_id.replace("_", "-"), capability=Capability(hostname="h"), registered_at_s=now_s
    )
    await store.hosts.register(row, f"host:{host_id}")
    return host_id


async def all_classes(store: Store, capacity: Capacity = ROOMY) -> Mapping[int, Amounts]:
    known: dict[Amounts, Amounts] = {}
    amounts = {row.id: job_amounts(row.requirement.needs, capacity) for row in await store.plans.classes()}
    return {class_id: known.setdefault(each, each) for class_id, each in amounts.items()}


async def claim(
    store: Store,
    host_id: str = "host_a",
    *,
    now_s: float = 0.0,
    claim_id: str = "c1",
    count: int = 1,
    capacity: Capacity = ROOMY,
    classes: Mapping[int, Amounts] | None = None,
) -> Sequence[JobLease]:
    if classes is None:
        classes = await all_classes(store, capacity)
    wanted = Claim(host_id=host_id, claim_id=claim_id, classes=classes, capacity=capacity, count=count)
    (leases,) = await store.leases.claim([wanted], LEASE_S, now_s)
    return leases


def hold(lease: JobLease) -> AttemptKey:
    return AttemptKey(lease.host_id, lease.job_id, lease.epoch)


def needs(**fields: Any) -> Needs:
    return Needs(**fields)


async def refusal(call: Awaitable[object]) -> StrataError:
    with pytest.raises(StrataError) as refused:
        await call
    return refused.value


async def marker(store: Store) -> str:
    """The subject of an event that is written now: what the feed tells before it is all that was written before."""
    return await add_host(store, f"host_marker{next(_markers)}")


async def kinds(store: Store, subject: str) -> list[str]:
    """What happened to `subject` until now: all of it, and so nothing else."""
    await told_before(await marker(store), store.events.read)
    return [each.event.kind for each in await store.events.read("", 1000, subject=subject)]
