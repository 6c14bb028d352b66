"""The fleet of one hub: claims that wait, leases that only a hub which can see lets expire, hosts that are judged."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.database import events
from strata.database.migrations import SqliteComponents
from strata.database.sqlite import SqliteThread
from strata.fleet.core.amounts import Capacity
from strata.fleet.core.capability import Capability, Gpu
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import GangPlace, HostSpec, JobSpec, gang_members
from strata.fleet.core.manifest import JobManifest, parse_manifest
from strata.fleet.core.ownership import OPERATOR, Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.requirement import Needs
from strata.fleet.ports import Store
from strata.fleet.records import AttemptKey, Claim, HostRow, JobCompletion, JobFailure, JobLease, Renewal, ServerRow
from strata.fleet.service.claims import BATCH, ClaimQueue
from strata.fleet.service.fleet import Fleet
from strata.fleet.service.roster import BEST_FIT_S, Roster
from strata.fleet.service.state import FleetSettings
from strata.fleet.store.hosts import HostTable
from strata.fleet.store.jobs import JobTable
from strata.fleet.store.lists import SearchIndexes
from strata.fleet.store.owners import OwnerTable
from strata.fleet.store.sqlite import tables
from strata.fleet.store.sqlite.store import build_sqlite_store
from tests.support.manual_clock import ManualClock

GIB = 1024**3
LEASE_S = 45.0
PLACE = GangPlace(name="g", size=2, index=0, min_size=1)


class CountedHosts(HostTable):
    """Counts how often the hosts are read, and can be held up meanwhile."""

    reads = 0
    gate: asyncio.Event | None = None

    async def all(self) -> Sequence[HostRow]:
        self.reads += 1
        found = await super().all()
        if self.gate is not None:
            await self.gate.wait()
        return found


class CountedOwners(OwnerTable):
    reads = 0

    async def active(self) -> Collection[str]:
        self.reads += 1
        return await super().active()


@dataclass(frozen=True, kw_only=True)
class CountedStore(Store):
    hosts: CountedHosts
    owners: CountedOwners


class SteppingClock(ManualClock):
    """A manual clock whose wall time can be set, as an administrator would."""

    def set_wall(self, wall_s: float) -> None:
        self._wall_s = wall_s


@dataclass
class Site:
    fleet: Fleet
    clock: SteppingClock

    async def host(
        self, name: str, *, cuda: bool = False, ram_gib: int = 8, job_ram_gib: int = 0, version: str = "0.2.0"
    ) -> str:
        gpus = (Gpu(name="card", vram_bytes=24 * GIB),) if cuda else ()
        capability = Capability(
            hostname=name,
            cuda="12.4" if cuda else "",
            gpus=gpus,
            ram_bytes=ram_gib * GIB,
            job_ram_bytes=job_ram_gib * GIB,
            slots=8,
        )
        row = HostRow(
            id=f"host_{name}",
            name=name,
            capability=capability,
            registered_at_s=self.fleet.now_s(),
            agent_version=version,
        )
        await self.fleet.hosts.register(row, f"host:{name}")
        return row.id

    async def add(self, *specs: JobSpec, submitter: Submitter = OPERATOR) -> None:
        wanted = ApplyPlan(new={spec.id: spec for spec in specs})
        await self.fleet.jobs.apply(wanted, "operator", source="test", declared=submitter.operator, submitter=submitter)

    async def pass_time(self, seconds: float) -> None:
        """Time passes and the hub ticks, once a second."""
        for _ in range(round(seconds)):
            await self.clock.advance(1.0)
            await self.fleet.leases.tick()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[CountedStore]:
    components = SqliteComponents([events.SQLITE, tables.COMPONENT])
    plain = build_sqlite_store(await SqliteThread.open(tmp_path / "hub.db", components))
    counted = {"hosts": CountedHosts(plain.database), "owners": CountedOwners(plain.database)}
    store = CountedStore(**{each.name: getattr(plain, each.name) for each in fields(Store)} | counted)
    yield store
    await store.close()


@pytest.fixture
async def site(store: CountedStore) -> Site:
    clock = SteppingClock(wall_s=1_800_000_000.0)
    return Site(Fleet(store, clock, chance=lambda: 0.0), clock)


def hold(lease: JobLease) -> AttemptKey:
    return AttemptKey(lease.host_id, lease.job_id, lease.epoch)


async def test_a_claim_that_waits_is_answered_when_a_job_comes(site: Site) -> None:
    host = await site.host("anna")
    waiting = asyncio.create_task(site.fleet.claims.claim(host, "c1", wait_s=30))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    await site.add(JobSpec(model="a"))
    (lease,) = await asyncio.wait_for(waiting, 5)
    assert lease.spec.model == "a"


async def test_hosts_that_ask_at_once_share_one_look_at_who_is_there(site: Site, store: CountedStore) -> None:
    hosts = [await site.host(f"h{n}") for n in range(8)]
    before = store.hosts.reads
    await asyncio.gather(*(site.fleet.claims.claim(host, "c1") for host in hosts))
    assert store.hosts.reads == before + 1


async def test_only_jobs_of_an_owner_who_had_none_make_a_claim_read_the_owners_again(
    site: Site, store: CountedStore
) -> None:
    host = await site.host("anna")
    reads = []
    for number, owner in enumerate(("bert", "bert", "carl", "carl")):
        await site.add(JobSpec(model="a", seed=number), submitter=Submitter(owner=owner))
        assert await site.fleet.claims.claim(host, f"c{number}")
        reads.append(store.owners.reads)
    assert reads == [1, 1, 2, 2]


async def test_a_host_that_registers_while_others_are_looked_up_is_not_overlooked(
    site: Site, store: CountedStore
) -> None:
    await site.add(JobSpec(model="a"), JobSpec(model="b"))
    anna = await site.host("anna")
    store.hosts.gate = asyncio.Event()
    early = asyncio.create_task(site.fleet.claims.claim(anna, "c1"))
    await asyncio.wait([early], timeout=0.05)
    bert = await site.host("bert")
    store.hosts.gate.set()
    assert len(await early) == 1
    assert len(await site.fleet.claims.claim(bert, "c1")) == 1


async def test_a_claim_that_does_not_wait_is_answered_with_nothing(site: Site) -> None:
    assert await site.fleet.claims.claim(await site.host("anna"), "c1") == []


async def test_a_host_gets_only_what_it_is_capable_of(site: Site) -> None:
    cpu, gpu = await site.host("cpu"), await site.host("gpu", cuda=True)
    await site.add(JobSpec(model="needs-cuda", needs=Needs(require_cuda=True), priority=9), JobSpec(model="any"))
    (lease,) = await site.fleet.claims.claim(cpu, "c1")
    assert lease.spec.model == "any"
    (lease,) = await site.fleet.claims.claim(gpu, "c2")
    assert lease.spec.model == "needs-cuda"


async def test_a_job_that_prefers_another_host_waits_for_it_a_bounded_time(site: Site) -> None:
    cpu = await site.host("cpu")
    await site.host("gpu", cuda=True)
    await site.add(JobSpec(model="a", needs=Needs(prefer_cuda=True, prefer_wait_s=20)))
    assert await site.fleet.claims.claim(cpu, "c1") == []
    await site.pass_time(21)
    assert len(await site.fleet.claims.claim(cpu, "c2")) == 1


async def test_a_job_does_not_wait_for_a_better_host_that_is_not_there(site: Site) -> None:
    cpu = await site.host("cpu")
    await site.add(JobSpec(model="a", needs=Needs(prefer_cuda=True, prefer_wait_s=20)))
    assert len(await site.fleet.claims.claim(cpu, "c1")) == 1


async def test_a_lease_that_is_not_renewed_runs_out(site: Site) -> None:
    anna, bob = await site.host("anna"), await site.host("bob")
    await site.add(JobSpec(model="a"))
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    await site.pass_time(44)
    assert await site.fleet.claims.claim(bob, "c2") == []
    await site.pass_time(2)
    (taken,) = await site.fleet.claims.claim(bob, "c3")
    assert (taken.job_id, taken.epoch) == (lease.job_id, 2)


async def test_a_waiting_host_gets_a_job_when_its_lease_runs_out(site: Site) -> None:
    anna, bob = await site.host("anna"), await site.host("bob")
    await site.add(JobSpec(model="a"))
    await site.fleet.claims.claim(anna, "c1")
    await site.pass_time(40)
    waiting = asyncio.create_task(site.fleet.claims.claim(bob, "c2", wait_s=60))
    await site.pass_time(6)
    (taken,) = await asyncio.wait_for(waiting, 5)
    assert taken.epoch == 2


async def test_a_hub_that_was_blind_takes_nothing_away(site: Site) -> None:
    anna = await site.host("anna")
    await site.add(JobSpec(model="a"))
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    await site.pass_time(60 - 25)
    await site.clock.advance(600)
    await site.fleet.leases.tick()
    await site.pass_time(44)
    assert (await site.fleet.store.jobs.get(lease.job_id)).status is JobStatus.CLAIMED
    await site.fleet.leases.renew(anna, [Renewal(job_id=lease.job_id, epoch=1)])
    await site.pass_time(40)
    assert (await site.fleet.store.jobs.get(lease.job_id)).status is JobStatus.CLAIMED


class DraggingHosts(HostTable):
    """A database that answers late, and everybody waits for it: the hub in its tick, hosts with their renewals."""

    clock: SteppingClock
    late_s = 0.0

    async def record_heartbeats(self, seen: Mapping[str, float]) -> None:
        await self.clock.advance(self.late_s)
        await super().record_heartbeats(seen)


async def test_a_hub_that_waited_for_its_database_within_a_tick_was_blind_as_well(tmp_path: Path) -> None:
    components = SqliteComponents([events.SQLITE, tables.COMPONENT])
    store = build_sqlite_store(await SqliteThread.open(tmp_path / "hub.db", components))
    hosts = DraggingHosts(store.database)
    hosts.clock = SteppingClock(wall_s=1_800_000_000.0)
    site = Site(Fleet(replace(store, hosts=hosts), hosts.clock), hosts.clock)
    anna = await site.host("anna")
    await site.add(JobSpec(model="a"))
    await site.pass_time(LEASE_S + 1)
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    hosts.late_s = LEASE_S - 1
    await site.fleet.leases.tick()
    hosts.late_s = 0.0
    await site.pass_time(2)
    assert (await store.jobs.get(lease.job_id)).status is JobStatus.CLAIMED
    await store.close()


async def test_a_hub_whose_ticks_are_a_little_late_is_not_blind_even_with_a_short_lease(site: Site) -> None:
    site.fleet = Fleet(site.fleet.store, site.clock, FleetSettings(stale_after_s=3.0))
    anna, bob = await site.host("anna"), await site.host("bob")
    await site.add(JobSpec(model="a"))
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    for _ in range(4):
        await site.clock.advance(1.2)
        await site.fleet.leases.tick()
    (taken,) = await site.fleet.claims.claim(bob, "c2")
    assert (taken.job_id, taken.epoch) == (lease.job_id, 2)


async def test_a_restarted_hub_gives_every_lease_a_full_term(site: Site) -> None:
    anna = await site.host("anna")
    await site.add(JobSpec(model="a"))
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    await site.clock.advance(3600)
    site.fleet = Fleet(site.fleet.store, site.clock)
    await site.pass_time(44)
    assert (await site.fleet.store.jobs.get(lease.job_id)).status is JobStatus.CLAIMED
    await site.pass_time(2)
    assert (await site.fleet.store.jobs.get(lease.job_id)).status is JobStatus.PENDING


async def test_a_wall_clock_that_is_set_forward_ends_no_lease(site: Site) -> None:
    anna = await site.host("anna")
    await site.add(JobSpec(model="a"))
    await site.pass_time(50)
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    site.clock.set_wall(site.clock.wall_s() + 86_400)
    await site.pass_time(30)
    assert (await site.fleet.store.jobs.get(lease.job_id)).status is JobStatus.CLAIMED


async def test_a_database_that_is_away_loses_no_sign_of_life(site: Site) -> None:
    anna = await site.host("anna")
    await site.fleet.store.close()
    site.fleet.hosts.touch(anna)
    with pytest.raises(StrataError):
        await site.fleet.leases.tick()
    assert site.fleet.hosts._heartbeats.keys() == {anna}


async def test_a_back_off_ends_with_the_tick(site: Site) -> None:
    anna = await site.host("anna")
    await site.add(JobSpec(model="a"))
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    row = await site.fleet.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR, error="no"))
    wait_s = row.not_before_s - site.fleet.now_s()
    assert wait_s > 0
    assert await site.fleet.claims.claim(anna, "c2") == []
    await site.pass_time(wait_s + 1)
    assert len(await site.fleet.claims.claim(anna, "c3")) == 1


async def break_three_jobs(site: Site, host: str) -> None:
    await site.add(*(JobSpec(model="a", seed=n) for n in range(3)))
    for n, lease in enumerate(await site.fleet.claims.claim(host, "c1", count=3)):
        await site.fleet.leases.fail(hold(lease), JobFailure(cause=Cause.INFRA, error=f"disk {n}"))


async def test_a_host_that_fails_different_jobs_is_quarantined(site: Site) -> None:
    anna = await site.host("anna")
    await site.host("bob")
    await break_three_jobs(site, anna)
    states = {host.name: (host.state, host.state_reason) for host in await site.fleet.hosts.all()}
    assert states["anna"] == ("quarantined", "infra failures of 3 different jobs in a row")
    assert states["bob"][0] == "active"


async def test_the_last_host_that_could_do_it_is_not_quarantined(site: Site) -> None:
    anna = await site.host("anna")
    await break_three_jobs(site, anna)
    assert [host.state for host in await site.fleet.hosts.all()] == ["active"]


async def test_a_host_that_once_had_a_class_of_its_own_can_be_quarantined(site: Site) -> None:
    anna = await site.host("anna")
    await site.host("bob")
    own = JobSpec(model="own", needs=Needs(allowed_hosts=("anna",)))
    await site.add(own)
    (lease,) = await site.fleet.claims.claim(anna, "c0")
    await site.fleet.leases.complete(hold(lease), JobCompletion())
    await site.pass_time(1.0)
    await break_three_jobs(site, anna)
    assert {host.name: host.state for host in await site.fleet.hosts.all()}["anna"] == "quarantined"


async def test_setup_errors_do_not_quarantine_a_host_and_the_last_one_fails_the_job(site: Site) -> None:
    hosts = [await site.host("anna"), await site.host("bob")]
    specs = [JobSpec(model="a", seed=n) for n in range(4)]
    await site.add(*specs)
    for host in hosts:
        for lease in await site.fleet.claims.claim(host, "c1", count=4):
            failure = JobFailure(cause=Cause.SETUP_ERROR, error="cannot start 'nosuchprog'\nsecond line")
            await site.fleet.leases.fail(hold(lease), failure)
        if host == hosts[0]:
            told = await site.fleet.jobs.why(specs[0].id)
            assert told.schedulable
            (refusal,) = [each for each in told.obstacles if each.what == "setup_error"]
            assert refusal.detail == "1 eligible host could not set it up: anna: cannot start 'nosuchprog'"
    assert [host.state for host in await site.fleet.hosts.all()] == ["active", "active"]
    for spec in specs:
        row = await site.fleet.store.jobs.get(spec.id)
        assert (row.status, row.reason) == (JobStatus.FAILED, "setup_error: no eligible host could set it up")


async def test_a_job_that_waits_for_a_host_that_is_away_says_what_the_others_lacked(site: Site) -> None:
    anna = await site.host("anna")
    bob = await site.host("bob")
    spec = JobSpec(model="a")
    await site.add(spec)
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    await site.fleet.leases.fail(hold(lease), JobFailure(cause=Cause.SETUP_ERROR, error="no folder"))
    told = await site.fleet.jobs.why(spec.id)
    assert told.schedulable
    (refusal,) = [each for each in told.obstacles if each.what == "setup_error"]
    assert refusal.detail == "1 eligible host could not set it up: anna: no folder"
    await site.fleet.hosts.set_state(bob, "paused", "", "operator")
    assert (await site.fleet.store.jobs.get(spec.id)).status is JobStatus.PENDING
    await site.fleet.hosts.set_state(bob, "left", "it left", "operator")
    row = await site.fleet.store.jobs.get(spec.id)
    assert (row.status, row.reason) == (JobStatus.FAILED, "setup_error: no eligible host could set it up")


async def test_a_policy_that_denies_the_last_host_that_did_not_refuse_a_job_fails_it(site: Site) -> None:
    anna = await site.host("anna")
    await site.host("bob")
    spec = JobSpec(model="a")
    await site.add(spec)
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    await site.fleet.leases.fail(hold(lease), JobFailure(cause=Cause.SETUP_ERROR, error="no folder"))
    await site.fleet.jobs.apply(
        ApplyPlan(hosts={"bob": HostSpec(name="bob", deny_jobs=("a",))}), "operator", source="m"
    )
    assert (await site.fleet.store.jobs.get(spec.id)).status is JobStatus.FAILED


async def test_a_host_drains_for_a_large_job_and_why_tells_both_sides(site: Site) -> None:
    host = await site.host("anna")
    await site.add(*(JobSpec(model="small", seed=seed) for seed in range(2)))
    leases = await site.fleet.claims.claim(host, "c1", count=2)
    large, late = JobSpec(model="large", needs=Needs(slots=8)), JobSpec(model="late")
    await site.add(large)
    for _ in range(2):
        await site.pass_time(30)
        await site.fleet.leases.renew(host, [Renewal(job_id=each.job_id, epoch=each.epoch) for each in leases])
    await site.add(late)
    await site.fleet.leases.tick()
    for _ in range(2):
        await site.fleet.claims.plan_reservations()
    assert (await site.fleet.jobs.why(large.id)).headline == "anna is reserved for it; the jobs there end first"
    told = await site.fleet.jobs.why(late.id)
    assert told.headline == "none of the 1 eligible hosts can take it now"
    assert [each.detail for each in told.obstacles] == ["1 eligible host is reserved: anna (for large-default)"]
    waiting = asyncio.create_task(site.fleet.claims.claim(host, "c2", wait_s=30))
    await asyncio.wait([waiting], timeout=0.05)
    for lease in leases:
        await site.fleet.leases.complete(hold(lease), JobCompletion())
    (lease,) = await asyncio.wait_for(waiting, 5)
    assert lease.spec == large


async def test_why_names_what_is_in_the_way(site: Site) -> None:
    await site.host("cpu")
    spec = JobSpec(model="a", needs=Needs(require_cuda=True))
    await site.add(spec)
    told = await site.fleet.jobs.why(spec.id)
    assert not told.schedulable
    assert [(each.what, each.hosts, each.of) for each in told.obstacles][:1] == [("require_cuda", 1, 1)]
    with pytest.raises(StrataError) as missing:
        await site.fleet.jobs.why("job1_x")
    assert missing.value.code is Code.NOT_FOUND


async def test_many_waiting_hosts_share_transactions_and_get_different_jobs(site: Site) -> None:
    hosts = [await site.host(f"h{n}") for n in range(40)]
    await site.add(*(JobSpec(model="a", seed=n) for n in range(30)))
    given = await asyncio.gather(*(site.fleet.claims.claim(host, f"c-{host}") for host in hosts))
    jobs = [lease.job_id for leases in given for lease in leases]
    assert len(jobs) == len(set(jobs)) == 30


async def test_a_manifest_is_planned_and_applied_once(site: Site) -> None:
    declared = parse_manifest(
        """
    [trainers.default]
    command = ["python", "train.py"]
    directory = "."
    [[jobs]]
    model = "gbt"
    mode = "oracle"
    """,
        "m.toml",
    ).resolve()
    wanted = await site.fleet.jobs.plan_manifest(declared)
    assert wanted.summary().startswith("+1 new")
    await site.fleet.jobs.apply(wanted, "operator", source="m.toml")
    assert (await site.fleet.jobs.plan_manifest(declared)).empty
    anna = await site.host("anna")
    (lease,) = await site.fleet.claims.claim(anna, "c1")
    await site.fleet.leases.complete(hold(lease), JobCompletion(artifact="art"))
    assert (await site.fleet.jobs.plan_manifest(declared)).empty


async def test_a_plan_is_refused_when_its_trainer_was_changed_since_it_was_made(site: Site) -> None:
    def manifest(script: str, *models: str) -> JobManifest:
        jobs = "".join(f'[[jobs]]\nmodel = "{model}"\n' for model in models)
        text = f'[trainers.default]\ncommand = ["python", "{script}"]\ndirectory = "/t"\n{jobs}'
        return parse_manifest(text, "m").resolve()

    await site.fleet.jobs.apply(await site.fleet.jobs.plan_manifest(manifest("v2.py")), "operator", source="m")
    slow = await site.fleet.jobs.plan_manifest(manifest("v2.py", "a"))
    await site.fleet.jobs.apply(await site.fleet.jobs.plan_manifest(manifest("v3.py")), "operator", source="m")
    with pytest.raises(StrataError) as outdated:
        await site.fleet.jobs.apply(slow, "operator", source="m")
    assert (outdated.value.code, await site.fleet.store.plans.existing_jobs()) == (Code.CONFLICT, {})
    again = await site.fleet.jobs.plan_manifest(manifest("v2.py", "a"))
    await site.fleet.jobs.apply(again, "operator", source="m")
    ((job_id, _),) = (await site.fleet.store.plans.existing_jobs()).items()
    digest = (await site.fleet.store.jobs.get(job_id)).trainer_digest
    assert (await site.fleet.store.plans.trainer(digest)).command == ("python", "v2.py")


class Broken:
    """A store with a defect."""

    async def claim(self, *asked: object) -> object:
        raise ZeroDivisionError


async def test_a_defect_of_the_store_leaves_nobody_waiting() -> None:
    failed: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    queue = ClaimQueue(Broken(), LEASE_S, lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(StrataError) as refused:
        async with asyncio.timeout(5):
            await queue.submit(Claim(host_id="h", claim_id="c", classes={}, capacity=Capacity()))
    assert refused.value.code is Code.INTERNAL


async def test_a_defect_of_the_store_leaves_nobody_of_a_later_batch_waiting_either() -> None:
    failed: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    queue = ClaimQueue(Broken(), LEASE_S, lambda: 0.0)  # type: ignore[arg-type]
    claims = [Claim(host_id=f"h{n}", claim_id="c", classes={}, capacity=Capacity()) for n in range(2 * BATCH + 1)]
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*(queue.submit(claim) for claim in claims), return_exceptions=True)
    assert {answer.code for answer in answers if isinstance(answer, StrataError)} == {Code.INTERNAL}
    assert len(answers) == len(claims)


async def test_a_job_that_ran_out_of_memory_moves_to_a_larger_host_and_fails_without_one(site: Site) -> None:
    small, large = await site.host("small"), await site.host("large", ram_gib=16)
    spec = JobSpec(model="m")
    await site.add(spec)
    killed = JobFailure(cause=Cause.OOM, error="killed", facts={"out_of_memory": "host"})
    (lease,) = await site.fleet.claims.claim(small, "c1")
    row = await site.fleet.leases.fail(hold(lease), killed)
    assert row.status is JobStatus.PENDING
    assert row.reason.endswith("it needs more than 8 GiB of memory")
    await site.pass_time(600)
    assert await site.fleet.claims.claim(small, "c2") == []
    (lease,) = await site.fleet.claims.claim(large, "c3")
    row = await site.fleet.leases.fail(hold(lease), killed)
    assert (row.status, row.reason) == (
        JobStatus.FAILED,
        "oom: it ran out of 16 GiB of memory, and no eligible host has more",
    )
    await site.fleet.jobs.requeue(spec.id, "operator")
    assert len(await site.fleet.claims.claim(small, "c4")) == 1, "requeued, it is open to all hosts again"


async def test_the_hub_grants_no_memory_that_the_host_would_not_give(site: Site) -> None:
    """The limits of hosts for one job count, also when the hub says what a job ran out of."""
    small, other = await site.host("small", ram_gib=16, job_ram_gib=2), await site.host("other", ram_gib=8)
    spec = JobSpec(model="m", needs=Needs(min_ram_gib=6), name="six")
    await site.add(spec)
    assert await site.fleet.claims.claim(small, "c1") == []
    assert (await site.fleet.jobs.why(spec.id)).eligible_hosts == ("other",)
    (lease,) = await site.fleet.claims.claim(other, "c2")
    killed = JobFailure(cause=Cause.OOM, facts={"out_of_memory": "host", "memory_limit_gib": 6.0})
    row = await site.fleet.leases.fail(hold(lease), killed)
    assert row.reason.endswith("it needs more than 6 GiB of memory")
    await site.pass_time(600)
    (lease,) = await site.fleet.claims.claim(other, "c3")
    assert lease.taken.ram_gib == 8, "it gets all that the largest host gives"
    killed = JobFailure(cause=Cause.OOM, facts={"out_of_memory": "host", "memory_limit_gib": 8.0})
    row = await site.fleet.leases.fail(hold(lease), killed)
    assert (row.status, row.reason) == (
        JobStatus.FAILED,
        "oom: it ran out of 8 GiB of memory, and no eligible host has more",
    )


async def test_a_host_whose_limit_a_job_ran_into_does_not_get_it_again(site: Site) -> None:
    small, equal = await site.host("small", ram_gib=16, job_ram_gib=2), await site.host("equal", ram_gib=16)
    await site.add(JobSpec(model="m"))
    (lease,) = await site.fleet.claims.claim(small, "c1")
    killed = JobFailure(cause=Cause.OOM, facts={"out_of_memory": "host", "memory_limit_gib": 2.0})
    row = await site.fleet.leases.fail(hold(lease), killed)
    assert row.reason.endswith("it needs more than 2 GiB of memory")
    await site.pass_time(600)
    assert await site.fleet.claims.claim(small, "c2") == []
    assert len(await site.fleet.claims.claim(equal, "c3")) == 1, "it is as large, and gives a job more"


async def test_why_names_the_memory_that_a_job_ran_out_of(site: Site) -> None:
    small, large = await site.host("small"), await site.host("large", ram_gib=16)
    spec = JobSpec(model="m")
    await site.add(spec)
    (lease,) = await site.fleet.claims.claim(small, "c1")
    await site.fleet.leases.fail(hold(lease), JobFailure(cause=Cause.OOM, facts={"out_of_memory": "host"}))
    await site.fleet.hosts.set_state(large, "left", "gone", "operator")
    told = await site.fleet.jobs.why(spec.id)
    (above,) = [each for each in told.obstacles if each.what == "above_ram_gib"]
    assert above.detail == "needs more than 8 GiB, with which it ran out of memory, small has 8 GiB"


async def test_memory_that_only_the_trainer_says_it_lacked_is_tried_again_anywhere(site: Site) -> None:
    small = await site.host("small")
    await site.add(JobSpec(model="m"))
    (lease,) = await site.fleet.claims.claim(small, "c1")
    row = await site.fleet.leases.fail(hold(lease), JobFailure(cause=Cause.OOM, error="MemoryError"))
    assert row.status is JobStatus.PENDING
    await site.pass_time(600)
    assert len(await site.fleet.claims.claim(small, "c2")) == 1


async def test_an_agent_of_an_earlier_version_gets_no_jobs(site: Site) -> None:
    spec = JobSpec(model="m")
    await site.add(spec)
    old = await site.host("otto", version="0.1.0")
    assert not await site.fleet.claims.claim(old, "c1", count=4)
    why = await site.fleet.jobs.why(spec.id)
    assert not why.schedulable
    (obstacle,) = why.obstacles
    assert (obstacle.what, obstacle.fix) == ("outdated", "update its agent")
    assert obstacle.detail == "1 eligible host is outdated: otto"
    new = await site.host("nina", version="0.2.0.dev0")
    assert [lease.job_id for lease in await site.fleet.claims.claim(new, "c1")] == [spec.id]


async def test_one_kind_of_job_may_need_a_newer_agent(site: Site) -> None:
    """The next kind of job that earlier agents do not know: here gangs, planted as of 0.3."""
    await site.add(JobSpec(model="a"), *gang_members(JobSpec(model="m", gang=PLACE)))
    await site.host("otto", version="0.2.9")
    await site.host("nina", version="0.3.0")
    roster = Roster(
        site.fleet.store.plans,
        site.fleet.store.hosts,
        LEASE_S,
        lambda requirement: (0, 3) if requirement.gang else (0, 2),
    )
    await roster.refresh(0.0)
    kinds = {
        host.name: {roster.requirement(class_id).gang for class_id in roster.serves(host)} for host in roster.hosts()
    }
    assert kinds == {"otto": {False}, "nina": {False, True}}
    (gang,) = (class_id for class_id in roster.class_ids() if roster.requirement(class_id).gang)
    assert {host.name: roster.state(host, 0.0, (), gang).outdated for host in roster.hosts()} == {
        "otto": True,
        "nina": False,
    }


class ServersInUse(JobTable):
    """A request uses each server in the moment after the servers were read."""

    use: Callable[[ServerRow], Awaitable[None]] | None = None

    async def servers(self) -> Sequence[ServerRow]:
        servers = await super().servers()
        if self.use is not None:
            for server in servers:
                await self.use(server)
        return servers


async def test_a_server_that_is_used_while_servers_are_chosen_to_sleep_gets_no_order(tmp_path: Path) -> None:
    components = SqliteComponents([events.SQLITE, tables.COMPONENT])
    store = build_sqlite_store(await SqliteThread.open(tmp_path / "hub.db", components))
    jobs = ServersInUse(store.database, SearchIndexes(searched_text=tables.SEARCHED_TEXT, may_serve=tables.MAY_SERVE))
    clock = SteppingClock(wall_s=1_800_000_000.0)
    site = Site(Fleet(replace(store, jobs=jobs), clock), clock)
    await site.add(JobSpec(model="s", kind="server", idle_s=10.0))
    (lease,) = await site.fleet.claims.claim(await site.host("anna"), "c1")
    await site.fleet.servers.publish(hold(lease), "unix:/s", ("tiny",))
    await clock.advance(11.0)
    await site.fleet.servers.choose_to_end()
    assert site.fleet.servers.yield_request(lease.job_id, lease.epoch) is not None, "it is idle"
    jobs.use = site.fleet.servers.touch
    await site.fleet.servers.choose_to_end()
    assert site.fleet.servers.yield_request(lease.job_id, lease.epoch) is None
    jobs.use = None
    await clock.advance(11.0)
    await site.fleet.servers.choose_to_end()
    assert site.fleet.servers.yield_request(lease.job_id, lease.epoch) is not None, "nobody uses it any more"
    await store.close()


async def gpu_host(site: Site, name: str, *vram_gib: int, ram_gib: int = 64) -> str:
    gpus = tuple(Gpu(name="card", vram_bytes=size * GIB, uuid=f"{name}-{n}") for n, size in enumerate(vram_gib))
    detected = Capability(hostname=name, cuda="12.4", gpus=gpus, ram_bytes=ram_gib * GIB, cores=16)
    row = HostRow(
        id=f"host_{name}",
        name=name,
        capability=detected,
        registered_at_s=site.fleet.now_s(),
        agent_version="0.2.0",
    )
    await site.fleet.hosts.register(row, f"host:{name}")
    return row.id


async def waiting(site: Site, *hosts: str) -> dict[str, asyncio.Task[Sequence[JobLease]]]:
    """A claim of each host, which waits at the hub, in this order."""
    claims = {}
    for host in hosts:
        claims[host] = asyncio.create_task(site.fleet.claims.claim(host, secrets.token_hex(4), count=16, wait_s=60))
        await asyncio.wait([claims[host]], timeout=0.02)
    return claims


async def test_a_small_job_leaves_the_large_card_to_a_host_that_is_free_and_fits_it(site: Site) -> None:
    large, small = await gpu_host(site, "large", 80), await gpu_host(site, "small", 24, 24)
    claims = await waiting(site, large, small)
    await site.add(JobSpec(model="small", needs=Needs(min_vram_gib=20)))
    (lease,) = await asyncio.wait_for(claims[small], 5)
    assert lease.spec.model == "small"
    await site.add(JobSpec(model="large", needs=Needs(min_vram_gib=60)))
    (lease,) = await asyncio.wait_for(claims[large], 5)
    assert lease.spec.model == "large"


async def test_a_job_without_a_card_is_left_to_a_host_that_has_none(site: Site) -> None:
    large, small = await gpu_host(site, "large", 80), await gpu_host(site, "small", ram_gib=8)
    claims = await waiting(site, large, small)
    await site.add(JobSpec(model="cpu", needs=Needs(min_cores=1)))
    assert len(await asyncio.wait_for(claims[small], 5)) == 1
    claims[large].cancel()


async def test_a_large_card_is_given_at_once_where_the_smaller_ones_are_taken_or_not_offered(site: Site) -> None:
    large, small = await gpu_host(site, "large", 80), await gpu_host(site, "small", 24)
    await site.add(JobSpec(model="first", needs=Needs(min_vram_gib=20)))
    claims = await waiting(site, small)
    assert len(await claims[small]) == 1
    # It still waits for what fits beside that job, and has no card left.
    claims = await waiting(site, small, large)
    await site.add(JobSpec(model="second", needs=Needs(min_vram_gib=20)))
    (lease,) = await asyncio.wait_for(claims[large], 5)
    assert lease.spec.model == "second"
    claims[small].cancel()


async def test_the_one_free_card_among_many_hosts_whose_card_is_taken_is_found(site: Site) -> None:
    large = await gpu_host(site, "large", 80)
    small = [await gpu_host(site, f"small{number}", 24) for number in range(12)]
    claims = await waiting(site, *small)
    for number in range(11):
        await site.add(JobSpec(model=f"m{number}", needs=Needs(min_vram_gib=20)))
    async with asyncio.timeout(10):
        while sum(claim.done() for claim in claims.values()) < 11:
            await asyncio.wait(
                [claim for claim in claims.values() if not claim.done()], return_when=asyncio.FIRST_COMPLETED
            )
    (free,) = [host for host, claim in claims.items() if not claim.done()]
    claims[free].cancel()
    await asyncio.wait([claims[free]])
    # All wait again, those without a card first.
    claims = await waiting(site, large, *(host for host in small if host != free), free)
    await site.add(JobSpec(model="one", needs=Needs(min_vram_gib=20)))
    (lease,) = await asyncio.wait_for(claims[free], 5)
    assert lease.spec.model == "one"
    for claim in claims.values():
        claim.cancel()


async def test_a_job_is_left_to_a_better_host_for_a_moment_and_no_longer(site: Site) -> None:
    """The better one waits, but does not get it: so nobody starves."""
    large, small = await gpu_host(site, "large", 80), await gpu_host(site, "small", 24)
    spec = JobSpec(model="a", needs=Needs(min_vram_gib=20))
    await site.add(spec)
    (lease,) = await site.fleet.claims.claim(small, "c1")
    await site.fleet.leases.fail(hold(lease), JobFailure(cause=Cause.SETUP_ERROR, error="no such program"))
    claims = await waiting(site, small)
    assert await site.fleet.claims.claim(large, "c2") == []
    await site.pass_time(BEST_FIT_S + 1)
    assert len(await site.fleet.claims.claim(large, "c3")) == 1
    claims[small].cancel()


async def test_wishes_of_a_job_count_more_than_what_it_leaves_to_others(site: Site) -> None:
    large, small = await gpu_host(site, "large", 80), await gpu_host(site, "small", 24)
    claims = await waiting(site, small)
    wish = Needs(min_vram_gib=20, prefer_hosts=("large",), prefer_wait_s=20)
    early = asyncio.create_task(site.fleet.claims.claim(large, "c1", wait_s=60))
    await site.add(JobSpec(model="a", needs=wish))
    assert len(await asyncio.wait_for(early, 5)) == 1
    claims[small].cancel()


async def test_a_host_that_has_joined_another_pool_runs_the_jobs_of_that_one(site: Site) -> None:
    desk = HostRow(id="host_desk", name="desk", capability=Capability(hostname="desk"), registered_at_s=0.0, pool="lab")
    await site.fleet.hosts.register(desk, "host:desk")
    await site.add(JobSpec(model="any"), JobSpec(model="lab", needs=Needs(pool="lab")))
    (lease,) = await site.fleet.claims.claim(desk.id, "c1")
    assert lease.spec.model == "lab"
    await site.fleet.leases.complete(hold(lease), JobCompletion(artifact="art1"))
    assert await site.fleet.claims.claim(desk.id, "c2") == []
    await site.fleet.hosts.register(msgspec.structs.replace(desk, pool=""), "host:desk")
    (lease,) = await site.fleet.claims.claim(desk.id, "c3")
    assert lease.spec.model == "any"
