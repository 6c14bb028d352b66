"""The ports (protocols) of the fleet to its database, one for each kind of caller; each method is one transaction.

Each method is one transaction and writes the events of what it changed in it. Nothing here matches jobs with hosts: a
claim names the requirement classes that its host is eligible for, and the service computes those. Time is an argument,
so that a test can pass it and a history can be replayed; the hub's clock is the only one that counts, never a host's.

A method that a host calls takes the epoch of its attempt and raises STALE if a later attempt has begun: the epoch is
the fencing token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from strata.database.events import EventFilter, EventPage, StoredEvent
from strata.fleet.core.amounts import Taken
from strata.fleet.core.fair_share import OwnerShares
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.core.ownership import OPERATOR, Submitter
from strata.fleet.core.plan import ApplyPlan, ExistingJob, HostPolicy, RegisteredTrainer
from strata.fleet.core.quota import OwnerUsage, Quota
from strata.fleet.core.reservation import Reservation, ReservationPlan, ReservationPlanner
from strata.fleet.core.samples import SamplePoint
from strata.fleet.records import (
    AttemptKey,
    AttemptRow,
    Claim,
    ClassRow,
    Counts,
    HostJob,
    HostRow,
    JobCompletion,
    JobFailure,
    JobFilter,
    JobLease,
    JobLedger,
    JobRow,
    OwnerUsages,
    RefusedJob,
    Renewal,
    RenewalResult,
    ServerRow,
    SweepRow,
    TrialRow,
    WaitingClass,
)


class PlanStore(Protocol):
    """What plans are made from and applied to. Unknown ids raise NOT_FOUND, here and in the ports below."""

    async def apply(
        self,
        plan: ApplyPlan,
        actor: str,
        now_s: float,
        *,
        source: str,
        declared: bool = True,
        submitter: Submitter = OPERATOR,
    ) -> None:
        """All of the plan or nothing of it. A new job is pending; a changed one keeps its status and its attempts, and
        moves to its new class and priority if it waits. An empty plan changes nothing and writes no event.

        Each job gets the digest that its trainer's name has in the plan's project from now on: a new one (unless the
        digest is `pinned`), one that is changed in that and not completed, and one that is requeued. CONFLICT when a
        policy belongs to another project and the plan does not take it over, and when a trainer was changed since the
        plan was made (`ApplyPlan.seen`).

        `declared` is False for jobs that were submitted one by one: no manifest misses those.

        New jobs belong to the submitter, and so does a project that had no owner. A job that was submitted one by one
        belongs to the submitter of the manifest that has it now. FORBIDDEN when the project is another owner's.
        EXHAUSTED, or FORBIDDEN for a priority, when the quota of the submitter does not allow all jobs of the plan.
        """

    async def existing_jobs(self) -> Mapping[str, ExistingJob]:
        """All jobs, for a plan."""

    async def classes(self, after_id: int = 0) -> Sequence[ClassRow]: ...

    async def unfinished_classes(self) -> Collection[int]:
        """The requirement classes of jobs that have not ended."""

    async def policies(self) -> Mapping[str, HostPolicy]:
        """Returns policies by the name of the host."""

    async def trainers(self) -> Mapping[tuple[str, str], RegisteredTrainer]:
        """Returns trainers by project and name. Trainers that are no longer declared are kept for the jobs that carry
        their digest."""

    async def trainer(self, digest: str) -> TrainerSpec: ...


class OwnerStore(Protocol):
    """Owners: their projects, their quotas, and what their jobs use."""

    async def projects(self) -> Mapping[str, str]:
        """The owner of each project that has one."""

    async def quotas(self) -> Mapping[str, Quota]:
        """The quotas that were set, by owner; `core.quota.EVERYBODY` is the one of those who have none."""

    async def set_quota(self, owner: str, quota: Quota | None, actor: str, now_s: float) -> None:
        """None: the owner has the quota of everybody again."""

    async def usage(self, owner: str, window_s: float, now_s: float) -> OwnerUsage: ...

    async def usages(self, window_s: float, now_s: float) -> OwnerUsages:
        """Returns the usage of every owner with jobs that have not ended, or that had cards in the window."""

    async def active(self) -> Collection[str]:
        """The owners of jobs that have not ended."""

    async def held(self) -> Sequence[tuple[str, Taken, int]]:
        """Owners, amounts, and how many leases with these that have not expired the owner has."""


class HostStore(Protocol):
    """Hosts: their registration, heartbeats and states, and what they hold or refuse."""

    async def register(self, host: HostRow, actor: str) -> HostRow:
        """New or again; the state stays what the operator made it, a host that had left is active again.

        It may take jobs again that it could not set up: what they lacked may have been installed since.
        """

    async def all(self) -> Sequence[HostRow]: ...

    async def find(self, text: str) -> Sequence[HostRow]:
        """Those with this id or name; of a name more than one, if a host that had it was revoked."""

    async def set_state(self, host_id: str, state: str, reason: str, actor: str, now_s: float) -> HostRow: ...

    async def record_heartbeats(self, seen: Mapping[str, float]) -> None:
        """Write the times of the last heartbeats; unknown hosts are ignored. Hosts that were lost have returned."""

    async def record_lost(self, silent_since_s: float, now_s: float) -> int:
        """The hosts without a heartbeat since then are lost, until the next one, but no ephemeral ones; how many are so
        from now on."""

    async def held(self) -> Mapping[str, Sequence[Taken]]:
        """Returns what the leases that have not expired take, by host."""

    async def jobs_on(self, host_ids: Sequence[str]) -> Mapping[str, Sequence[HostJob]]:
        """The jobs of the leases that have not expired on these hosts, by host."""

    async def refusing(self) -> Collection[str]:
        """The hosts that are excluded for any job."""

    async def infra_jobs(self, host_id: str) -> Sequence[str]:
        """The jobs that ended with `infra` on this host since its last completed one."""


class LeaseStore(Protocol):
    """Claims and what hosts report of their leases, and what the hub does about those that end."""

    async def claim(
        self, claims: Sequence[Claim], lease_s: float, now_s: float, shares: OwnerShares | None = None
    ) -> Sequence[Sequence[JobLease]]:
        """Returns for each claim the leases it gets, best priority first, then oldest: all claims in one transaction.
        With `shares`, jobs of the owner with the smallest share come first within a priority.

        A host gets what fits beside the leases that it holds; which cards, is decided here. Its leases that have
        expired give way: those that no longer fit beside the new ones end.
        A claim_id that was answered before gets the same leases, as far as they are still held, and no others.
        A host that is not active gets none.
        """

    async def reserve(self, planner: ReservationPlanner, now_s: float) -> ReservationPlan:
        """Let the planner decide about the queue as it is, and apply its plan; one hub at a time.

        Claims keep what is reserved on their hosts from other jobs, and get a job that is reserved there and fits
        before any other.
        """

    async def reservations(self) -> Sequence[Reservation]:
        """Returns the reservations of jobs that wait in the queue."""

    async def renew(
        self, host_id: str, renewals: Sequence[Renewal], lease_s: float, now_s: float
    ) -> Sequence[RenewalResult]:
        """Extend the leases that are held; revive expired ones that no other host has claimed."""

    async def complete(self, attempt: AttemptKey, completion: JobCompletion, now_s: float) -> JobRow:
        """Idempotent: the same epoch and content gets the same reply. After another end: kept as an orphan,
        CONFLICT."""

    async def fail(
        self, attempt: AttemptKey, failure: JobFailure, now_s: float, *, chance: float, eligible: Collection[str] = ()
    ) -> JobRow:
        """`core.lease.after_failure` decides about a retry. Idempotent: the same epoch gets the same reply.

        After a setup error the host is excluded: its claims pass over the job until that has ended or is requeued, or
        the host registers again.
        `eligible` are the hosts that may take the job by what they are; when all have refused it, it fails.

        With `failure.memory` the job moves to the class with those needs, until it is requeued or changed. `eligible`
        is of that class, and without such a host it fails.
        """

    async def record_checkpoint(self, attempt: AttemptKey, artifact: str, now_s: float) -> None: ...

    async def expire(self, now_s: float, limit: int = 1000) -> Sequence[JobRow]:
        """Expire leases that ran out (`core.lease.after_expiry`). Whether it may run is for the service to know."""

    async def release_backoffs(self, now_s: float, limit: int = 1000) -> int:
        """Move jobs whose backoff is over into the queue; how many. Until then they are in a table of their own, so
        that a claim never scans them."""

    async def refused_jobs(self) -> Sequence[RefusedJob]:
        """Returns by id the pending jobs that no host holds, nor held when its lease ran out, and that hosts have
        refused."""

    async def fail_refused(self, eligible: Mapping[str, Collection[str]], now_s: float) -> Sequence[JobRow]:
        """Fail those of `refused_jobs` for which `eligible` has no host that has not refused them; which ones."""


class JobStore(Protocol):
    """Jobs as people see and change them, with their attempts, sweeps and servers."""

    async def get(self, job_id: str) -> JobRow: ...

    async def find(self, prefix: str, limit: int = 6) -> Sequence[str]:
        """Ids that begin so, with or without their `job1_`."""

    async def select(self, wanted: JobFilter) -> Sequence[JobRow]: ...

    async def attempts(self, job_id: str) -> Sequence[AttemptRow]: ...

    async def refusals(self, job_id: str) -> Sequence[str]:
        """The hosts that could not set this job up."""

    async def sweeps(self) -> Sequence[SweepRow]:
        """All sweeps that have jobs, without those that lists hide, by project and name."""

    async def trials(self, project: str, sweep: str) -> Sequence[TrialRow]:
        """The jobs of one sweep in the order in which they were queued, without those that lists hide."""

    async def cancel(self, job_id: str, reason: str, actor: str, now_s: float) -> JobRow:
        """A job, or all unfinished members of its gang. A cancelled job stays as it is, except a server that is asleep:
        it gets the reason of the person, and no request wakes it.
        """

    async def requeue(self, job_id: str, actor: str, now_s: float, *, submitter: Submitter = OPERATOR) -> JobRow:
        """An ended job, or a pending one for which hosts are excluded, with a new budget and open to all hosts.
        EXHAUSTED when the quota of the submitter is full. Of a gang all members that have ended, in one transaction
        (`core.plan.requeued_members`).

        Unfinished jobs after it wait for it again; a host that holds one keeps it.
        """

    async def archive(self, job_id: str, actor: str, now_s: float) -> JobRow:
        """Lists and counts leave an ended job out from now on, with all members of its gang; requeueing it brings it
        back."""

    async def publish_server(self, attempt: AttemptKey, address: str, models: Sequence[str], now_s: float) -> None:
        """Publishes where the server of this attempt serves, and which base model under which names; STALE unless it
        holds the lease."""

    async def touch_server(self, job_id: str, now_s: float) -> None:
        """Record that a request has used this server."""

    async def servers(self) -> Sequence[ServerRow]:
        """All jobs that have ever published an address, by id."""


class StatisticsStore(Protocol):
    """What overviews and goodput are computed from."""

    async def counts(self, project: str = "") -> Counts:
        """Reads counts that every change keeps in its transaction. Of one project, or of all; hosts always of all."""

    async def compact_counts(self) -> None:
        """Sum up what changes have added to the counts since the last time."""

    async def held_cards(self) -> float:
        """Returns how many cards the leases that have not expired take; a part of a card counts as that part."""

    async def waiting_classes(self, project: str = "") -> Sequence[WaitingClass]:
        """Returns the classes of jobs in the queue; of one project, or of all."""

    async def ledger(self, since_s: float, project: str, limit: int) -> JobLedger:
        """`limit` of the attempts that have not ended, and of those that ended since then, the last ones; of one
        project, or of all."""


class SampleStore(Protocol):
    """Samples of hosts and of the fleet."""

    async def record(self, points: Sequence[SamplePoint]) -> None:
        """Samples of known hosts, and of the fleet (`core.samples.FLEET`); those of others are ignored."""

    async def roll_up(self, now_s: float) -> None:
        """Write the means of the steps that are over, and drop what `core.samples.RESOLUTIONS` does not keep."""

    async def read(self, host_id: str, step_s: int, since_s: float) -> Sequence[SamplePoint]:
        """Oldest first."""


class EventStore(Protocol):
    """The feed of events."""

    async def read(self, after: str, limit: int, *, subject: str = "") -> Sequence[StoredEvent]: ...

    async def read_before(self, before: str, limit: int, wanted: EventFilter) -> EventPage:
        """Newest first; `database.events.NEWEST` for the first page. A page may have fewer events than there are, also
        none: it looks at a bounded number of them."""

    async def drop(self, before_s: float, limit: int = 10_000) -> int:
        """Remove the oldest events, as far as they are from before this time; how many."""


@dataclass(frozen=True, kw_only=True)
class Store:
    """The tables of the fleet, as a port for each kind of caller."""

    plans: PlanStore
    owners: OwnerStore
    hosts: HostStore
    leases: LeaseStore
    jobs: JobStore
    statistics: StatisticsStore
    samples: SampleStore
    events: EventStore
    close: Callable[[], Awaitable[None]]
