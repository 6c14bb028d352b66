"""The fleet service of one hub, called by the HTTP routes and the hub's loop. It knows time and waiting, and no HTTP.

Time here is the wall clock at the start plus the monotonic time since: setting the wall clock while the hub runs
expires no lease. Leases may expire only after the hub could receive renewals for one full lease term
(`core.lease.may_expire_leases`); an outage of the database or a frozen hub restarts that grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.notify import Broadcast
from strata.fleet.claims import ClaimQueue
from strata.fleet.core.amounts import Amounts, Capacity, MemoryLimits, Taken, more_memory
from strata.fleet.core.fair_share import FleetTotals, OwnerShares
from strata.fleet.core.host_status import AgentSightings, HostStatus, Presence, host_status
from strata.fleet.core.job import HELD, Cause, JobStatus
from strata.fleet.core.jobspec import JobSpec, gang_ids
from strata.fleet.core.lease import ASLEEP, LEASE_S, SUSPECT_S, may_expire_leases, quarantine
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.match import eligible
from strata.fleet.core.ownership import OPERATOR, Submitter, check_project, check_servers
from strata.fleet.core.plan import ApplyOptions, ApplyPlan, HostPolicy, plan
from strata.fleet.core.reservation import RESERVE_AFTER_S, PreemptPolicy, Reservation, ReservationPlanner
from strata.fleet.core.samples import FLEET, HostSample, SamplePoint, finest
from strata.fleet.core.why import UnmetDependency, Why, WhyQuery, why
from strata.fleet.ports import Store
from strata.fleet.records import (
    AttemptKey,
    Claim,
    FleetCounts,
    HostRow,
    JobCompletion,
    JobFailure,
    JobLease,
    JobRow,
    Renewal,
    RenewalResult,
    ServerRow,
    YieldRequest,
)
from strata.fleet.roster import Roster, Shape

TICK_S: Final = 1.0
SHARES_S: Final = 1.0
MAX_SHARES_S: Final = 10.0
"""How long the shares of owners are used before they are read again: the longer, the longer it takes to read them."""
SHARES_SHARE: Final = 0.05
"""The share of the time that reading them may take."""
POLL_S: Final = 2.0
"""How often a waiting claim polls the database: another hub may have queued a job for it."""
MAX_WAIT_S: Final = 60.0
ROLL_UP_S: Final = 60.0
LOST_S: Final = 5.0
"""How often hosts are looked for that are silent."""
RESERVE_S: Final = 2.0
"""How often reservations are planned."""
FAIL_BATCH: Final = 500
"""How many unservable jobs are failed in one transaction."""
_log = log.get(__name__)


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stale_after_s: float = LEASE_S
    """A lease that was not renewed for so long runs out, and another host may claim the job."""
    reserve_after_s: float = RESERVE_AFTER_S
    """A job that has waited for so long lets a host drain for it."""
    preempt: PreemptPolicy = "lower-priority"


class HostView(NamedTuple):
    row: HostRow
    seen_ago_s: float
    quiet: str
    """The quiet hours it is in; empty when it is not."""
    presence: Presence
    status: HostStatus


class Fleet:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        settings: FleetSettings | None = None,
        *,
        chance: Callable[[], float] = random.random,
        on_expired: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_expired` is called with the number of leases that expired."""
        self.store = store
        self._on_expired = on_expired
        self.settings = settings or FleetSettings()
        self._clock = clock
        self._chance = chance
        self._wall_ahead_s = clock.wall_s() - clock.monotonic_s()
        self._roster = Roster(store.plans, store.hosts, self.settings.stale_after_s)
        self._changes = Broadcast()
        self._claims = ClaimQueue(store.leases, self.settings.stale_after_s, self.now_s, self._owner_shares)
        self._shares: OwnerShares | None = None
        self._owners: Collection[str] = ()
        """Those with jobs that have not ended, when the shares were read."""
        self._shares_at_s = float("-inf")
        self._shares_fresh_s = SHARES_S
        self._waiting: dict[Shape, dict[str, None]] = {}
        """The hosts whose claims wait at this hub, by their shapes."""
        self._held: dict[str, Sequence[Taken]] = {}
        """What hosts held when a claim read it last, and what this hub gave them since."""
        self._held_at_s = float("-inf")
        self._held_fresh_s = SHARES_S
        self._agents: dict[str, AgentSightings] = {}
        """The agents that sent heartbeats to this hub, by host."""
        self._heartbeats: dict[str, float] = {}
        self._samples: list[SamplePoint] = []
        self._newest_samples: dict[str, Mapping[str, float]] = {}
        self._rolled_up_at_s = float("-inf")
        self._lost_at_s = float("-inf")
        self._reservations: Sequence[Reservation] = ()
        """Reservations as this hub planned them last: claims that wait are tried again when they change."""
        self._stuck: frozenset[int] = frozenset()
        self._holding: set[str] = set()
        """Hosts that held leases when they spoke last: a guess, for `Claim.idle`."""
        self._yields: dict[tuple[str, int], YieldRequest] = {}
        """Attempts that are to end in order, by job and epoch: a later attempt of the same job is not to end."""
        self._used_at_s: dict[tuple[str, int], float] = {}
        """When requests used the servers, by job and epoch: later than the store has it while that is written."""
        self._observing_since_s = self.now_s()
        self._ticked_at_s = self.now_s()

    def now_s(self) -> float:
        return self._wall_ahead_s + self._clock.monotonic_s()

    # Requests of hosts

    async def register(self, host: HostRow, actor: str) -> HostRow:
        registered = await self.store.hosts.register(host, actor)
        failpoint("fleet.register.committed")
        self._roster.invalidate()
        self._changes.notify()
        return registered

    async def claim(self, host_id: str, claim_id: str, *, count: int = 1, wait_s: float = 0.0) -> Sequence[JobLease]:
        """Leases on jobs that this host may take and that fit on it.

        At once, or when there are some, at most `wait_s` later.
        """
        self.touch_host(host_id)
        await self._roster.refresh(self.now_s())
        # A host has one claim at a time; of two, the end of the first one makes it a moment less visible.
        waiting = self._waiting.setdefault(self._roster.shape(host_id), {})
        waiting[host_id] = None
        try:
            return await self._claim(host_id, claim_id, count, self.now_s() + min(wait_s, MAX_WAIT_S))
        finally:
            waiting.pop(host_id, None)

    async def _claim(self, host_id: str, claim_id: str, count: int, until_s: float) -> Sequence[JobLease]:
        while True:
            changed = self._changes.next()
            await self._roster.refresh(self.now_s())
            better_fits = await self._free_better_fits(host_id)
            options = self._roster.claim_options(host_id, self.now_s(), better_fits)
            wanted = Claim(
                host_id=host_id,
                claim_id=claim_id,
                classes=options.classes,
                capacity=options.capacity,
                count=count,
                held_back=options.held_back,
                refusing=options.refusing,
                idle=host_id not in self._holding,
            )
            leases = await self._claims.submit(wanted)
            if leases:
                self._holding.add(host_id)
                self._held[host_id] = (*self._held.get(host_id, ()), *(lease.taken for lease in leases))
            left_s = until_s - self.now_s()
            if leases or left_s <= 0:
                return leases
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, POLL_S)):
                    await changed.wait()

    async def _free_better_fits(self, host_id: str) -> Mapping[int, Collection[str]]:
        """The classes that this host leaves to others for a moment: each has a host that waits, is free, and fits it
        better. What hosts hold is read at most once a second; a wrong guess costs a job `BEST_FIT_S`."""
        found = self._roster.better_fits(host_id, self._waiting, self._holding) if len(self._waiting) > 1 else {}
        if not found:
            return found
        now_s = self.now_s()
        if not 0 <= now_s - self._held_at_s < self._held_fresh_s:
            self._held_at_s, self._held_fresh_s = now_s, SHARES_S
            self._held = dict(await self.store.hosts.held())
            took_s = self.now_s() - now_s
            self._held_fresh_s = min(max(SHARES_S, took_s / SHARES_SHARE), MAX_SHARES_S)
        free = {
            class_id: [each for each in others if self._roster.fits(each, class_id, self._held.get(each, ()))]
            for class_id, others in found.items()
        }
        return {class_id: others for class_id, others in free.items() if others}

    async def _owner_shares(self) -> OwnerShares | None:
        """Returns what owners hold of the fleet; None while one owner alone has jobs. Read once a second or less,
        because all leases are counted, and when this hub queued jobs of an owner who had none."""
        now_s = self.now_s()
        if not 0 <= now_s - self._shares_at_s < self._shares_fresh_s:
            # Before they are read: others need not read them too. If that fails, the next one does.
            self._shares_at_s, self._shares_fresh_s = now_s, SHARES_S
            self._owners = owners = await self.store.owners.active()
            held = await self.store.owners.held() if len(owners) > 1 else ()
            self._shares = OwnerShares(self._roster.totals, owners, held) if len(owners) > 1 else None
            took_s = self.now_s() - now_s
            self._shares_fresh_s = min(max(SHARES_S, took_s / SHARES_SHARE), MAX_SHARES_S)
        return self._shares

    def _on_queued(self, owner: str) -> None:
        if owner not in self._owners:
            self._shares_at_s = float("-inf")

    async def renew(self, host_id: str, renewals: Sequence[Renewal]) -> Sequence[RenewalResult]:
        self.touch_host(host_id)
        if not renewals:
            self._holding.discard(host_id)
            return []
        self._holding.add(host_id)
        renewed = await self.store.leases.renew(host_id, renewals, self.settings.stale_after_s, self.now_s())
        failpoint("fleet.renew.committed")
        return renewed

    async def observe_agent(self, host_id: str, incarnation: str) -> None:
        """Quarantine a host for which two agents send heartbeats at once, as after a copy of its disk."""
        known = self._agents.get(host_id)
        seen = self._agents[host_id] = known.see(incarnation) if known else AgentSightings(incarnation)
        if not seen.clone_reason:
            return
        del self._agents[host_id]
        await self._roster.refresh(self.now_s())
        if any(host.id == host_id and host.state == "active" for host in self._roster.hosts()):
            _log.warning("host_cloned", host=host_id, reason=seen.clone_reason)
            await self.set_host_state(host_id, "quarantined", seen.clone_reason, "hub")

    def add_sample(self, host_id: str, sample: HostSample) -> None:
        """Written at the next tick; one that is lost with the hub is no loss."""
        point = SamplePoint(host_id, self.now_s(), sample.values())
        self._samples.append(point)
        self._newest_samples[host_id] = point.values

    def add_fleet_sample(self, values: Mapping[str, float]) -> None:
        """Figures of the whole fleet, written with the samples of its hosts."""
        self._samples.append(SamplePoint(FLEET, self.now_s(), values))

    def newest_sample(self, host_id: str) -> Mapping[str, float]:
        return self._newest_samples.get(host_id, {})

    async def samples(self, host_id: str, span_s: float, points: int) -> tuple[int, Sequence[SamplePoint]]:
        """The step in which the last `span_s` are shown in so many points, and these."""
        step_s = finest(span_s, points)
        return step_s, (await self.store.samples.read(host_id, step_s, self.now_s() - span_s))[-points:]

    async def complete(self, attempt: AttemptKey, completion: JobCompletion) -> JobRow:
        self.touch_host(attempt.host_id)
        row = await self.store.leases.complete(attempt, completion, self.now_s())
        failpoint("fleet.complete.committed")
        # Jobs that depend on it may be ready now.
        self._changes.notify()
        return row

    async def fail(self, attempt: AttemptKey, failure: JobFailure) -> JobRow:
        self.touch_host(attempt.host_id)
        takers: Sequence[str] = ()
        if failure.cause is Cause.SETUP_ERROR:
            takers = await self._eligible_for_job(attempt.job_id)
        elif failure.cause is Cause.OOM:
            failure, takers = await self._with_more_memory(attempt, failure)
        row = await self.store.leases.fail(attempt, failure, self.now_s(), chance=self._chance(), eligible=takers)
        failpoint("fleet.fail.committed")
        if failure.cause is Cause.INFRA:
            await self._quarantine_if_faulty(attempt.host_id)
        elif failure.cause is Cause.SETUP_ERROR:
            self._roster.invalidate()
        self._changes.notify()
        return row

    async def record_checkpoint(self, attempt: AttemptKey, artifact: str) -> None:
        self.touch_host(attempt.host_id)
        await self.store.leases.record_checkpoint(attempt, artifact, self.now_s())
        failpoint("fleet.checkpoint.committed")

    async def publish_server(self, attempt: AttemptKey, address: str, models: Sequence[str]) -> None:
        self.touch_host(attempt.host_id)
        await self.store.jobs.publish_server(attempt, address, models, self.now_s())
        self._changes.notify()

    def touch_host(self, host_id: str) -> None:
        """Record a heartbeat: kept in memory, and written with all others once a second."""
        self._heartbeats[host_id] = self.now_s()

    # Requests of people

    async def plan_manifest(
        self, manifest: JobManifest, options: ApplyOptions | None = None, submitter: Submitter = OPERATOR
    ) -> ApplyPlan:
        """Returns what applying this manifest would change; FORBIDDEN if the submitter may not change it."""
        check_project(submitter, manifest.project, (await self.store.owners.projects()).get(manifest.project, ""))
        registered = await self.store.plans.trainers()
        planned = plan(
            manifest,
            await self.store.plans.existing_jobs(),
            trainers={name: each for (project, name), each in registered.items() if project == manifest.project},
            hosts=await self.store.plans.policies(),
            options=options,
            submitter=submitter,
        )
        check_servers(submitter, _queued(planned))
        return planned

    async def find_job(self, job_id: str) -> JobRow | None:
        """None if there is no such job."""
        try:
            return await self.store.jobs.get(job_id)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return None

    async def apply(
        self, wanted: ApplyPlan, actor: str, *, source: str, declared: bool = True, submitter: Submitter = OPERATOR
    ) -> None:
        check_servers(submitter, _queued(wanted))
        await self.store.plans.apply(wanted, actor, self.now_s(), source=source, declared=declared, submitter=submitter)
        failpoint("fleet.apply.committed")
        self._on_queued(submitter.owner)
        self._roster.invalidate()
        if wanted.hosts:
            await self._fail_unservable_jobs()
        self._changes.notify()

    async def cancel(self, job_id: str, reason: str, actor: str) -> JobRow:
        row = await self.store.jobs.cancel(job_id, reason, actor, self.now_s())
        failpoint("fleet.cancel.committed")
        return row

    async def requeue(self, job_id: str, actor: str, submitter: Submitter = OPERATOR) -> JobRow:
        check_servers(submitter, [(await self.store.jobs.get(job_id)).spec])
        return await self._requeue(job_id, actor, submitter)

    async def _requeue(self, job_id: str, actor: str, submitter: Submitter) -> JobRow:
        row = await self.store.jobs.requeue(job_id, actor, self.now_s(), submitter=submitter)
        self._on_queued(row.owner)
        self._changes.notify()
        return row

    async def archive(self, job_id: str, actor: str) -> JobRow:
        return await self.store.jobs.archive(job_id, actor, self.now_s())

    async def set_host_state(self, host_id: str, state: str, reason: str, actor: str) -> HostRow:
        row = await self.store.hosts.set_state(host_id, state, reason, actor, self.now_s())
        self._roster.invalidate()
        if state == "left":
            await self._fail_unservable_jobs()
        self._changes.notify()
        return row

    async def hosts(self) -> Sequence[HostRow]:
        await self.flush_heartbeats()
        return await self.store.hosts.all()

    async def unserved_classes(self, classes: Sequence[int]) -> Collection[int]:
        """Those that no host which has not left is eligible for."""
        left = set(classes)
        await self._roster.refresh(self.now_s())
        for host in self._roster.hosts():
            if left and host.state != "left":
                left -= self._roster.serves(host).keys()
        return left

    @property
    def totals(self) -> FleetTotals:
        """Returns what the hosts that take jobs have together."""
        return self._roster.totals

    def presence(self, silent_s: float) -> Presence:
        """Returns the presence of a host whose last heartbeat is so long ago."""
        if silent_s <= SUSPECT_S:
            return "online"
        return "offline" if silent_s > self.settings.stale_after_s else "suspect"

    async def counts(self) -> FleetCounts:
        """Counts for the metrics jobs and hosts by state, and what the GPUs of hosts that are online do."""
        counts, now_s = await self.store.statistics.counts(), self.now_s()
        await self._roster.refresh(now_s)
        hosts, uses = Counter[str](), list[float]()
        for host in self._roster.hosts():
            online = self._roster.online(host, now_s)
            hosts[("online" if online else "offline") if host.state == "active" else host.state] += 1
            if online:
                uses += [use for name, use in self.newest_sample(host.id).items() if name.endswith("/use")]
        return FleetCounts(
            jobs=counts.by_status,
            ready=counts.ready,
            hosts=hosts,
            reservations=len(self._reservations),
            gpus=len(uses),
            gpu_use=sum(uses) / len(uses) if uses else 0.0,
        )

    async def capacity(self, host_id: str) -> Capacity:
        """Returns what the host has for jobs, by its capability and its policy. NOT_FOUND if it never registered."""
        await self._roster.refresh(self.now_s())
        for host in self._roster.hosts():
            if host.id == host_id:
                return self._roster.profile(host).capacity
        raise StrataError(Code.NOT_FOUND, f"there is no host {host_id!r}")

    async def find_hosts(self, text: str) -> Sequence[HostRow]:
        """The hosts with this id or name."""
        await self.flush_heartbeats()
        return await self.store.hosts.find(text)

    async def host_names(self, ids: Collection[str]) -> Mapping[str, str]:
        """The names of these hosts, as this hub knows them without reading each row."""
        await self._roster.refresh(self.now_s())
        return self._roster.names(ids)

    async def cached_hosts(self) -> Sequence[HostView]:
        """All hosts as this hub knows them without reading each row again, at most `roster.FRESH_S` old, by name."""
        await self._roster.refresh(self.now_s())
        now_s = self.now_s()
        heartbeats, quiet_of, presence_of = self._heartbeats, self._roster.quiet, self.presence
        views = []
        for host in self._roster.hosts():
            silent_s = now_s - host.seen_at_s
            if host.id in heartbeats:
                silent_s = min(silent_s, now_s - heartbeats[host.id])
            quiet, presence = quiet_of(host, now_s), presence_of(silent_s)
            status = host_status(host.state, presence, quiet=quiet != "")
            views.append(HostView(host, max(0.0, silent_s), quiet, presence, status))
        return views

    async def policy(self, host: HostRow) -> tuple[HostPolicy | None, str]:
        """The policy of a host, if it has one, and the quiet hours it is in."""
        await self._roster.refresh(self.now_s())
        return (await self.store.plans.policies()).get(host.name), self._roster.quiet(host, self.now_s())

    async def stranded_by(self, host_id: str) -> int:
        """Returns how many jobs of the queue no other host that takes jobs is eligible for."""
        await self._roster.refresh(self.now_s())
        own: Collection[int] = ()
        others: set[int] = set()
        for host in self._roster.hosts():
            if host.id == host_id:
                own = self._roster.serves(host)
            elif host.state == "active" and self._roster.online(host, self.now_s()):
                others.update(self._roster.serves(host))
        waiting = await self.store.statistics.waiting_classes()
        return sum(each.jobs for each in waiting if each.class_id in own and each.class_id not in others)

    async def why(self, job_id: str) -> Why:
        row = await self.store.jobs.get(job_id)
        if row.class_id not in self._roster.class_ids():
            self._roster.invalidate()
        await self._roster.refresh(self.now_s())
        waiting = [await self.store.jobs.get(needed) for needed in row.spec.after]
        question = WhyQuery(
            status=row.status,
            requirement=self._roster.requirement(row.class_id),
            not_before_s=row.not_before_s,
            starts_at_s=row.spec.starts_at_s(row.created_at_s),
            last_failure=row.reason,
            after=tuple(
                UnmetDependency(job_id=each.id, label=each.spec.label, status=each.status)
                for each in waiting
                if each.status is not JobStatus.COMPLETED
            ),
            gang_hosts=await self._gang_hosts(row),
        )
        held = await self.store.hosts.held()
        refused = await self._exclusion_reasons(job_id)
        reserved, draining = await self._reservations_around(job_id)
        now_s = self.now_s()
        states = {
            host.id: self._roster.state(host, now_s, held.get(host.id, ()), row.class_id)
            for host in self._roster.hosts()
            if host.state != "left"
        }
        for host_id in states.keys() & {*refused, *reserved, *draining}:
            states[host_id] = msgspec.structs.replace(
                states[host_id],
                refused=refused.get(host_id, ""),
                reserved=reserved.get(host_id, {}),
                drains=host_id in draining,
            )
        return why(question, tuple(states.values()), now_s=now_s)

    async def _gang_hosts(self, row: JobRow) -> int:
        """Returns how many hosts the gang of this job needs at once. One that trains already replaces lost members
        singly."""
        if row.spec.gang is None:
            return 0
        members = [await self.store.jobs.get(member) for member in gang_ids(row.id, row.spec)]
        return 0 if any(each.status in HELD for each in members) else row.spec.gang.min_size

    async def _reservations_around(self, job_id: str) -> tuple[Mapping[str, Mapping[str, Amounts]], Collection[str]]:
        """Returns by host what is reserved for other jobs, by their labels; and the hosts that are reserved for this
        one."""
        reserved: dict[str, dict[str, Amounts]] = {}
        draining = set()
        for each in await self.store.leases.reservations():
            if each.is_over(self.now_s()):
                continue
            if each.job.job_id == job_id:
                draining.add(each.host_id)
            else:
                label = (await self.store.jobs.get(each.job.job_id)).spec.label
                reserved.setdefault(each.host_id, {})[label] = each.amounts
        return reserved, draining

    async def _exclusion_reasons(self, job_id: str) -> Mapping[str, str]:
        """The hosts that are excluded for this job, each with the error of its last attempt."""
        hosts = await self.store.jobs.refusals(job_id)
        errors = {each.host_id: each.error for each in await self.store.jobs.attempts(job_id)} if hosts else {}
        return {host: (errors.get(host) or "").strip().partition("\n")[0] or "unknown" for host in hosts}

    async def wake_server(self, job_id: str, actor: str, owner: Submitter) -> None:
        """Queue a server again that is asleep, within the quota of its owner. Another request may have done so at the
        same moment."""
        try:
            await self._requeue(job_id, actor, owner)
        except StrataError as error:
            if error.code is not Code.PRECONDITION:
                raise

    # The hub's loop

    async def choose_servers_to_end(self) -> None:
        """Servers that sleep because no request has used them for their `idle_s`, and those whose host is drained.

        Their hosts learn it with the next heartbeat, save the state of the server, and report its end. `wake_server`
        queues one again that sleeps; another host takes one that was drained.
        """
        servers = [server for server in await self.store.jobs.servers() if server.serving]
        if not servers:
            self._used_at_s, self._yields = {}, {}
            return
        await self._roster.refresh(self.now_s())
        now_s = self.now_s()
        attempts = {(server.job.id, server.epoch) for server in servers}
        self._used_at_s = {each: used_at_s for each, used_at_s in self._used_at_s.items() if each in attempts}
        drained = {host.id: host.name for host in self._roster.hosts() if host.state == "draining"}
        yields: dict[tuple[str, int], YieldRequest] = {}
        for server in servers:
            idle_s, host_id = server.job.spec.idle_s, server.job.host_id
            attempt = server.job.id, server.epoch
            if host_id in drained:
                yields[attempt] = YieldRequest("preempted", f"the host {drained[host_id]} is drained")
            elif idle_s and now_s - max(server.used_at_s, self._used_at_s.get(attempt, 0.0)) > idle_s:
                reason = f"{ASLEEP}no request for {idle_s:g} s; the next one wakes it"
                yields[attempt] = YieldRequest("cancelled", reason)
        self._yields = yields

    def yield_request(self, job_id: str, epoch: int) -> YieldRequest | None:
        """Returns whether this attempt is to end, for the reply to a heartbeat."""
        return self._yields.get((job_id, epoch))

    async def touch_server(self, server: ServerRow) -> None:
        """Write down that a request uses the server. One that was chosen to sleep stays awake, unless its host has
        learned it already."""
        attempt = server.job.id, server.epoch
        if (wanted := self._yields.get(attempt)) is not None and wanted.cause == "cancelled":
            del self._yields[attempt]
        now_s = self._used_at_s[attempt] = self.now_s()
        await self.store.jobs.touch_server(server.job.id, now_s)

    async def tick(self) -> None:
        """Once a second: write heartbeats, release backoffs, and expire leases if the grace period is over."""
        now_s = self.now_s()
        # How late the tick is, without its interval: a lease may be not much longer than that.
        if now_s - self._ticked_at_s - TICK_S > self.settings.stale_after_s / 3:
            # The hub was frozen or had no database: no host could renew its leases meanwhile.
            _log.warning(
                "lease_expiry_suspended",
                blind_s=round(now_s - self._ticked_at_s, 1),
                grace_s=self.settings.stale_after_s,
            )
            self._observing_since_s = now_s
        await self.flush_heartbeats()
        await self._write_samples(now_s)
        released = await self.store.leases.release_backoffs(now_s)
        if released:
            failpoint("fleet.ripen.committed")
        expired: Sequence[JobRow] = ()
        if may_expire_leases(
            now_s=now_s, observing_since_s=self._observing_since_s, lease_s=self.settings.stale_after_s
        ):
            expired = await self.store.leases.expire(now_s)
            if expired:
                failpoint("fleet.sweep.committed")
                self._on_expired(len(expired))
            if now_s - self._lost_at_s >= LOST_S:
                self._lost_at_s = now_s
                await self.store.hosts.record_lost(now_s - max(SUSPECT_S, self.settings.stale_after_s), now_s)
        # The time at which this tick began: while it waited for the database, so did every renewal.
        self._ticked_at_s = now_s
        if released or expired:
            self._changes.notify()

    async def plan_reservations(self) -> None:
        """Reserve hosts for jobs that are too large for what comes free, and for gangs."""
        shares = await self._owner_shares()
        await self._roster.refresh(self.now_s())
        now_s = self.now_s()
        planner = ReservationPlanner(
            hosts=self._roster.offers(now_s),
            classes=self._roster.class_ids(),
            owners=tuple(self._owners),
            shares=shares,
            reserve_after_s=self.settings.reserve_after_s,
            preempt=self.settings.preempt == "lower-priority",
            seen=self._stuck,
        )
        plan = await self.store.leases.reserve(planner, now_s)
        if plan.reservations != self._reservations or plan.returned:
            failpoint("fleet.reserve.committed")
            self._changes.notify()
        self._reservations, self._stuck = plan.reservations, plan.stuck

    async def _write_samples(self, now_s: float) -> None:
        """Writes what hosts have sampled since the last tick; once a minute also means, and what is too old goes."""
        points, self._samples = self._samples, []
        if points:
            await self.store.samples.record(points)
        if now_s - self._rolled_up_at_s >= ROLL_UP_S:
            self._rolled_up_at_s = now_s
            await self.store.samples.roll_up(now_s)
            await self.store.statistics.compact_counts()

    async def flush_heartbeats(self) -> None:
        seen, self._heartbeats = self._heartbeats, {}
        if not seen:
            return
        try:
            await self.store.hosts.record_heartbeats(seen)
        except StrataError:
            self._heartbeats = seen | self._heartbeats
            raise

    async def _eligible_for_job(self, job_id: str) -> Sequence[str]:
        """The hosts that are eligible for this job by capability and policy, also those that are offline now."""
        row = await self.store.jobs.get(job_id)
        return (await self._eligible_hosts([row.class_id]))[row.class_id]

    async def _with_more_memory(self, attempt: AttemptKey, failure: JobFailure) -> tuple[JobFailure, Sequence[str]]:
        """Returns what the next attempt needs if this one really ran out of memory, and the hosts that have it."""
        kind = failure.facts.get("out_of_memory")
        row = await self.store.jobs.get(attempt.job_id)
        tried = [each for each in await self.store.jobs.attempts(attempt.job_id) if each.epoch == attempt.epoch]
        self._roster.invalidate()
        await self._roster.refresh(self.now_s())
        hosts = {host.id: host for host in self._roster.hosts() if host.state != "left"}
        if kind not in ("host", "gpu") or not tried or attempt.host_id not in hosts:
            return failure, ()
        requirement, taken = self._roster.requirement(row.class_id), tried[0].taken
        profiles = {host.id: self._roster.profile(host) for host in hosts.values()}
        own = profiles[attempt.host_id]
        fitting = [each.job_ram_gib for each in profiles.values() if eligible(requirement, each).eligible]
        given_gib = own.job_ram_gib if taken.whole or not taken.ram_gib else taken.ram_gib
        reported = failure.facts.get("memory_limit_gib")
        applied_gib = reported if isinstance(reported, float) and 0 < reported < given_gib else given_gib
        limits = MemoryLimits(applied_gib, own.job_ram_gib, max(fitting, default=0.0))
        memory = more_memory(kind, requirement.needs, taken, own.capacity, limits)
        if memory is None:
            return failure, ()
        raised = msgspec.structs.replace(requirement, needs=memory.needs)
        larger = [host_id for host_id, each in profiles.items() if eligible(raised, each).eligible]
        return replace(failure, memory=memory), larger

    async def _eligible_hosts(self, classes: Iterable[int]) -> Mapping[int, Sequence[str]]:
        self._roster.invalidate()
        await self._roster.refresh(self.now_s())
        hosts = [host for host in self._roster.hosts() if host.state != "left"]
        return {id_: [host.id for host in hosts if id_ in self._roster.serves(host)] for id_ in set(classes)}

    async def _fail_unservable_jobs(self) -> None:
        """Fail pending jobs for which every eligible host is excluded, because none could set them up."""
        refused = await self.store.leases.refused_jobs()
        serving = await self._eligible_hosts(each.class_id for each in refused) if refused else {}
        failing = [each for each in refused if each.is_unservable(serving[each.class_id])]
        for start in range(0, len(failing), FAIL_BATCH):
            eligible = {each.job_id: serving[each.class_id] for each in failing[start : start + FAIL_BATCH]}
            await self.store.leases.fail_refused(eligible, self.now_s())

    async def _quarantine_if_faulty(self, host_id: str) -> None:
        """Quarantine a host whose infra failures are its own and not those of one job."""
        await self._roster.refresh(self.now_s())
        hosts = {host.id: host for host in self._roster.hosts()}
        if host_id not in hosts:
            return
        others = [
            self._roster.serves(host)
            for host in hosts.values()
            if host.id != host_id and host.state == "active" and self._roster.online(host, self.now_s())
        ]
        troubled = await self.store.hosts.infra_jobs(host_id)
        unfinished = await self.store.plans.unfinished_classes()
        serves = [class_id for class_id in self._roster.serves(hosts[host_id]) if class_id in unfinished]
        verdict = quarantine(troubled, serves=serves, others_serve=others)
        if verdict.quarantined:
            await self.set_host_state(host_id, "quarantined", verdict.reason, "hub")


def _queued(wanted: ApplyPlan) -> list[JobSpec]:
    """The jobs that a plan queues, or lets run as something else."""
    return [*wanted.new.values(), *wanted.requeued.values(), *(change.spec for change in wanted.changed)]
