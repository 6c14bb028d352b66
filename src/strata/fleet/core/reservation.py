"""Plans reservations and preemption: after which wait (60 s) a large job or a gang gets hosts reserved, how long a host
has to claim them (60 s), how long an incomplete gang may hold hosts (300 s), and whose jobs are preempted.

Without them a job that needs a whole host waits for ever where smaller jobs fit into what comes free. The first job of
the queue (by priority, share of its owner, age) that has waited long enough and that a host could take if it were empty
therefore gets a reservation: claims of that host give nothing of what is reserved to any other job, so that the host
drains. A gang is granted through reservations alone, of all its members at once, each on a host of its own.

- One job or gang at a time lets hosts drain. It keeps its reservations while it waits, unless one with a higher
  priority comes. So no two wait for each other. A gang that fits beside them at once needs no draining.
- A reservation counts while its job waits in the queue: it needs no end of its own when the job is claimed, cancelled
  or changed. A host that does not claim what it could (`GRANT_S`) loses its reservation and is passed over for a while.
- A gang of which too few members were claimed in time, or of which too few are left for too long, goes back to the
  queue as a whole: no part of it is held for ever.
- Where the hub allows it, attempts of lower priority that can resume from a checkpoint are preempted for the job that
  lets hosts drain: as few as possible, the youngest first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal, NamedTuple

import msgspec

from strata.fleet.core.amounts import Amounts, Capacity, Room, Taken
from strata.fleet.core.fair_share import OwnerShares
from strata.fleet.core.job import HELD, UNFINISHED, JobStatus
from strata.fleet.core.jobspec import JobSpec

PreemptPolicy = Literal["never", "lower-priority"]
RESERVE_AFTER_S: Final = 60.0
GRANT_S: Final = 60.0
"""How long a host has to claim what is reserved and free."""
PASS_OVER_S: Final = 120.0
"""How long a host that did not claim is passed over for that job."""
INCOMPLETE_S: Final = 300.0
"""How long too few members of a gang may hold their hosts while the others wait."""

ReservationKind = Literal["drain", "grant", "missed"]
"""`drain`: nothing else is granted; `grant`: the job may be claimed as soon as it fits; `missed`: it was not claimed in
time, and the host is passed over for it."""
_RoomOf = Callable[[str], Room]
"""Returns the room of a host."""


class WaitingJob(NamedTuple):
    seq: int
    job_id: str
    class_id: int
    priority: int
    owner: str
    since_s: float
    gang: str = ""


class Reservation(NamedTuple):
    host_id: str
    job: WaitingJob
    amounts: Amounts
    kind: ReservationKind
    expires_at_s: float

    def is_over(self, now_s: float) -> bool:
        """Says whether it reserves nothing any more."""
        return self.kind == "missed" or self.expires_at_s <= now_s


class HeldPlace(NamedTuple):
    """What an attempt has of its host."""

    host_id: str
    job_id: str
    epoch: int
    taken: Taken
    priority: int
    claimed_at_s: float
    gang: str = ""
    endless: bool = False
    """A server: the host does not drain of it."""
    resumes: bool = False
    """It has a checkpoint to resume from."""
    yielding: bool = False
    """It was told to yield its place."""


class GangMember(NamedTuple):
    gang: str
    job_id: str
    status: JobStatus
    size: int
    min_size: int
    waiting: WaitingJob | None = None
    """None: it does not wait in the queue. A pending job that does not is after others, or backs off."""


class QueueView(NamedTuple):
    """What the database holds at one moment."""

    heads: Sequence[WaitingJob]
    """The first job of each owner in each class."""
    reservations: Sequence[Reservation] = ()
    """Reservations of jobs that wait in the queue."""
    held: Sequence[HeldPlace] = ()
    """The attempts whose leases have not expired."""
    members: Sequence[GangMember] = ()
    """All members of gangs that have not ended."""
    refused: Collection[tuple[str, int]] = ()
    """Hosts, and jobs that they could not set up."""


class HostOffer(NamedTuple):
    """A host that takes jobs: what it has, and what a job of each class takes of it."""

    capacity: Capacity
    classes: Mapping[int, Amounts]
    held_back: Mapping[int, float] = {}
    """Classes that would rather run elsewhere: of these only jobs that have waited since this time, or longer."""


class Preemption(NamedTuple):
    job_id: str
    epoch: int
    reason: str


class ReservationPlan(NamedTuple):
    reservations: tuple[Reservation, ...] = ()
    """All that there are from now on."""
    preempted: tuple[Preemption, ...] = ()
    returned: Mapping[str, str] = {}
    """Jobs whose leases end and that go back to the queue, with the reason."""
    cancelled: Mapping[str, str] = {}
    """Members of gangs that cannot go on."""
    stuck: frozenset[int] = frozenset()
    """What the next plan needs to know."""


def added_reservations(planned: Iterable[Reservation], before: Iterable[Reservation]) -> list[Reservation]:
    """Those for which the plan has chosen a host now."""
    known = {(each.host_id, each.job.seq) for each in before}
    return [each for each in planned if (each.host_id, each.job.seq) not in known]


def ended_reservations(planned: Iterable[Reservation], before: Iterable[Reservation]) -> list[Reservation]:
    """Those of jobs that still wait, for which the plan keeps no room on the host any more."""
    return added_reservations(before, planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationPlanner:
    """What is known besides the database; a store calls `plan` on what it reads in its transaction."""

    hosts: Mapping[str, HostOffer]
    classes: Collection[int]
    owners: Sequence[str]
    shares: OwnerShares | None = None
    reserve_after_s: float = RESERVE_AFTER_S
    preempt: bool = False
    seen: Collection[int] | None = None
    """The jobs that were `stuck` at the last plan; others are left to claims for now. None: it is not known."""

    def is_needed(self, heads: Iterable[WaitingJob], now_s: float) -> bool:
        """Says whether a plan may reserve anything for one of these."""
        return any(head.gang or self.has_waited(head, now_s) for head in heads)

    def stuck(self, heads: Iterable[WaitingJob], now_s: float) -> frozenset[int]:
        """The jobs that head the queue and have waited for long. In a long queue that moves these are always others."""
        return frozenset(head.seq for head in heads if now_s - head.since_s >= self.reserve_after_s)

    def plan(self, queue: QueueView, now_s: float) -> ReservationPlan:
        gangs: dict[str, list[GangMember]] = {}
        for member in queue.members:
            gangs.setdefault(member.gang, []).append(member)
        broken = _broken_gangs(gangs)
        returned = _incomplete_gangs(gangs, queue.reservations, now_s)
        units = _units(queue.heads, [gangs[key] for key in gangs if key not in broken and key not in returned])
        units.sort(key=self._order)
        draft = _Draft(self, queue, now_s)
        gone = broken.keys() | returned.keys()
        draft.keep([each for each in queue.reservations if each.job.gang not in gone or each.is_over(now_s)], units)
        for unit in units:
            if unit.jobs[0].gang:
                draft.grant_at_once(unit)
        for unit in units:
            if self.has_waited(unit.jobs[0], now_s):
                draft.drain_for(unit)
        return ReservationPlan(
            tuple(draft.reservations),
            tuple(draft.preempted),
            {member.job_id: reason for key, reason in returned.items() for member in _held(gangs[key])},
            {member.job_id: reason for key, reason in broken.items() for member in _unfinished(gangs[key])},
            self.stuck(queue.heads, now_s),
        )

    def has_waited(self, job: WaitingJob, now_s: float) -> bool:
        known = bool(job.gang) or self.seen is None or job.seq in self.seen
        return known and now_s - job.since_s >= self.reserve_after_s

    def _order(self, unit: _Unit) -> tuple[int, float, int]:
        first = unit.jobs[0]
        return -first.priority, self.shares.share(first.owner) if self.shares else 0.0, first.seq


class _Unit(NamedTuple):
    jobs: tuple[WaitingJob, ...]
    at_least: int
    """How many of them have to be placed at once."""


def _units(heads: Iterable[WaitingJob], gangs: Iterable[Sequence[GangMember]]) -> list[_Unit]:
    """Returns what waits, and is placed together."""
    units = [_Unit((head,), 1) for head in heads if not head.gang]
    for members in gangs:
        waiting = sorted(each.waiting for each in members if each.waiting is not None)
        if _held(members):
            # It trains already: each lost member is replaced as soon as there is a host.
            units += [_Unit((each,), 1) for each in waiting]
        elif waiting and len(waiting) == len(_unfinished(members)):
            units.append(_Unit(tuple(waiting), max(1, members[0].min_size - _completed(members))))
    return units


@dataclass(slots=True)
class _Draft:
    """The plan as it grows. What it reserves counts for all that comes after."""

    planner: ReservationPlanner
    queue: QueueView
    now_s: float
    reservations: list[Reservation] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    served: bool = False
    """One has its turn to let hosts drain."""
    _held: dict[str, list[HeldPlace]] = field(default_factory=dict)
    _rooms: dict[str, Room] = field(default_factory=dict)
    _passed_over: set[tuple[str, int]] = field(default_factory=set)
    _too_large: set[tuple[int, ...]] = field(default_factory=set)
    """Gangs that do not fit now, by the classes of their jobs: others like them need not be tried."""

    def __post_init__(self) -> None:
        for place in self.queue.held:
            self._held.setdefault(place.host_id, []).append(place)
        self._passed_over.update(self.queue.refused)

    def keep(self, before: Sequence[Reservation], units: Sequence[_Unit]) -> None:
        """The reservations that go on, and the hosts that are passed over."""
        for each in before:
            if each.kind == "missed" and each.expires_at_s > self.now_s:
                self._pass_over(each)
            elif each.kind == "grant" and each.expires_at_s <= self.now_s and self._fit_now([each]):
                self._pass_over(each._replace(kind="missed", expires_at_s=self.now_s + PASS_OVER_S))
        live = [each for each in before if not each.is_over(self.now_s)]
        reserved = {each.job.seq for each in live}
        rivals = [unit for unit in units if reserved.isdisjoint(job.seq for job in unit.jobs)]
        live.sort(key=_unit_key)
        for _, rows in groupby(live, key=_unit_key):
            self._keep_unit(list(rows), rivals)

    def _keep_unit(self, rows: list[Reservation], rivals: Sequence[_Unit]) -> None:
        if not all(self._stands(each) for each in rows):
            return
        granted = rows[0].kind == "grant"
        if granted and rows[0].job.gang:
            # It may be claimed until it expires: then the gang is judged as a whole.
            self._reserve_all(rows)
            return
        fits = self._fit_now(rows)
        if not fits and (self.served or self._outranked(rows[0].job, rivals)):
            return
        self.served = True
        if not fits:
            self._preempt_for(rows)
        elif not granted:
            rows = [row._replace(kind="grant", expires_at_s=self.now_s + GRANT_S) for row in rows]
        # Written again at half time only: a commit for each second of waiting would be too many.
        if not fits and min(row.expires_at_s for row in rows) - self.now_s < GRANT_S / 2:
            rows = [row._replace(expires_at_s=self.now_s + GRANT_S) for row in rows]
        self._reserve_all(rows)

    def grant_at_once(self, unit: _Unit) -> None:
        """Reserve for a gang that fits into what is free."""
        shape = (unit.at_least, *(job.class_id for job in unit.jobs))
        if shape in self._too_large or self._is_reserved(unit):
            return
        order = sorted(self.planner.hosts, key=lambda host: (-len(self._held.get(host, ())), host))
        rows = self._placed(unit, order, self._room)
        if not rows:
            self._too_large.add(shape)
        self._reserve_all(rows)

    def drain_for(self, unit: _Unit) -> None:
        """Let hosts drain for the first that some could take when they are empty."""
        if self.served or self._is_reserved(unit):
            return
        rows = self._placed(unit, self._drain_order(unit), self._emptied)
        if not rows:
            return
        self.served = True
        if not self._fit_now(rows):
            self._preempt_for(rows)
        kind: ReservationKind = "drain" if unit.jobs[0].gang else "grant"
        self._reserve_all([row._replace(kind=kind) for row in rows])

    def _is_reserved(self, unit: _Unit) -> bool:
        seqs = {job.seq for job in unit.jobs}
        return any(each.job.seq in seqs and not each.is_over(self.now_s) for each in self.reservations)

    def _outranked(self, job: WaitingJob, rivals: Sequence[_Unit]) -> bool:
        """Says whether a job with a higher priority is to have hosts drained in its place."""
        return any(
            unit.jobs[0].priority > job.priority
            and self.planner.has_waited(unit.jobs[0], self.now_s)
            and self._placed(unit, self.planner.hosts, self._emptied)
            for unit in rivals
        )

    def _stands(self, each: Reservation) -> bool:
        """Says whether the host still takes jobs of this class, and this one. What was granted to a gang stands."""
        granted = bool(each.job.gang) and each.kind == "grant"
        return granted or self._may_take(each.host_id, each.job) == each.amounts

    def _may_take(self, host_id: str, job: WaitingJob) -> Amounts | None:
        offer = self.planner.hosts.get(host_id)
        if offer is None or (host_id, job.seq) in self._passed_over or (job.gang and self._has_member(host_id, job)):
            return None
        if job.since_s > offer.held_back.get(job.class_id, job.since_s):
            return None
        return offer.classes.get(job.class_id)

    def _has_member(self, host_id: str, job: WaitingJob) -> bool:
        """Says whether another member of the gang has the host, or is to get it: each member has a host of its own."""
        return any(place.gang == job.gang for place in self._held.get(host_id, ())) or any(
            each.host_id == host_id and each.job.gang == job.gang and each.job.seq != job.seq
            for each in self.reservations
            if not each.is_over(self.now_s)
        )

    def _room(self, host_id: str) -> Room:
        """Returns what is left beside attempts and reservations."""
        room = self._rooms.get(host_id)
        if room is None:
            held = (place.taken for place in self._held.get(host_id, ()))
            room = self._rooms[host_id] = Room(self.planner.hosts[host_id].capacity, held)
        return room

    def _emptied(self, host_id: str) -> Room:
        """The same when the attempts that end by themselves have ended."""
        held = (place.taken for place in self._held.get(host_id, ()) if place.endless)
        room = Room(self.planner.hosts[host_id].capacity, held)
        for each in self.reservations:
            if each.host_id == host_id and not each.is_over(self.now_s):
                room.reserve(each.amounts)
        return room

    def _fit_now(self, rows: Iterable[Reservation]) -> bool:
        """Each is on a host of its own."""
        return all(row.host_id in self.planner.hosts and self._room(row.host_id).fits(row.amounts) for row in rows)

    def _placed(self, unit: _Unit, order: Iterable[str], room_of: _RoomOf) -> list[Reservation]:
        """A host for each job of the unit, as far as there are; none if those are too few."""
        left, placed = list(unit.jobs), list[Reservation]()
        for host_id in order:
            if not left:
                break
            for job in left:
                amounts = self._may_take(host_id, job)
                if amounts is not None and room_of(host_id).fits(amounts):
                    placed.append(Reservation(host_id, job, amounts, "grant", self.now_s + GRANT_S))
                    left.remove(job)
                    break
        return placed if len(placed) >= unit.at_least else []

    def _drain_order(self, unit: _Unit) -> list[str]:
        """First the hosts that could take a job now, then those where the fewest attempts have to end or to yield."""
        job = unit.jobs[0]

        def cost(host_id: str) -> tuple[int, float, str]:
            amounts = self._may_take(host_id, job)
            held = self._held.get(host_id, ())
            if amounts is None or self._room(host_id).fits(amounts):
                return 0, -len(held), host_id
            victims = self._victims(host_id, amounts, job.priority)
            if victims is None:
                return 2, len(held), host_id
            return 1, len(victims), host_id

        return sorted(self.planner.hosts, key=cost)

    def _preempt_for(self, rows: Iterable[Reservation]) -> None:
        """Preempt where that is enough for all of them."""
        rows = list(rows)
        found = [self._victims(row.host_id, row.amounts, row.job.priority) for row in rows]
        for row, victims in zip(rows, found, strict=True):
            if victims is None or None in found:
                return
            reason = f"yields to {row.job.job_id}, which has priority {row.job.priority}"
            self.preempted += [Preemption(victim.job_id, victim.epoch, reason) for victim in victims]

    def _victims(self, host_id: str, amounts: Amounts, priority: int) -> list[HeldPlace] | None:
        """The attempts that have to yield so that a job fits, without those that do already; None if that is not enough
        or not allowed."""
        held = self._held.get(host_id, ())
        staying = [place for place in held if not place.yielding]
        weaker = [place for place in staying if place.priority < priority and place.resumes and not place.gang]
        if not self.planner.preempt:
            weaker = []

        def fits(places: Iterable[HeldPlace]) -> bool:
            return Room(self.planner.hosts[host_id].capacity, (place.taken for place in places)).fits(amounts)

        victims: list[HeldPlace] = []
        for place in sorted(weaker, key=lambda each: (each.priority, -each.claimed_at_s)):
            if fits(staying):
                break
            staying.remove(place)
            victims.append(place)
        if not fits(staying):
            return None
        for place in reversed(list(victims)):
            if fits([*staying, place]):
                staying.append(place)
                victims.remove(place)
        return victims

    def _reserve_all(self, rows: Iterable[Reservation]) -> None:
        for row in rows:
            self.reservations.append(row)
            if row.host_id in self.planner.hosts:
                self._room(row.host_id).reserve(row.amounts)

    def _pass_over(self, row: Reservation) -> None:
        self.reservations.append(row)
        self._passed_over.add((row.host_id, row.job.seq))


def _unit_key(each: Reservation) -> tuple[str, bool]:
    """Equal for reservations that begin and end together."""
    return each.job.gang or each.job.job_id, each.kind == "drain"


def _held(members: Iterable[GangMember]) -> list[GangMember]:
    return [each for each in members if each.status in HELD]


def _unfinished(members: Iterable[GangMember]) -> list[GangMember]:
    return [each for each in members if each.status in UNFINISHED]


def _completed(members: Iterable[GangMember]) -> int:
    return sum(each.status is JobStatus.COMPLETED for each in members)


def _broken_gangs(gangs: Mapping[str, Sequence[GangMember]]) -> dict[str, str]:
    """Gangs of which so many members failed or were cancelled that they cannot go on, with the reason."""
    broken = {}
    for key, members in gangs.items():
        ended = [each for each in members if each.status in (JobStatus.FAILED, JobStatus.CANCELLED)]
        if ended and members[0].size - len(ended) < members[0].min_size:
            broken[key] = f"its gang ends: {ended[0].job_id} is {ended[0].status}"
    return broken


def _incomplete_gangs(
    gangs: Mapping[str, Sequence[GangMember]], reservations: Sequence[Reservation], now_s: float
) -> dict[str, str]:
    """Gangs of which too few members hold a host: others were not claimed in time, or have waited for too long."""
    granted = [each for each in reservations if each.kind == "grant"]
    late = {each.job.gang for each in granted if each.is_over(now_s)}
    starting = {each.job.gang for each in granted} - late
    incomplete = {}
    for key, members in gangs.items():
        waiting = [each.waiting for each in members if each.waiting is not None]
        held = len(_held(members))
        if not waiting or key in starting or not 0 < held < members[0].min_size - _completed(members):
            continue
        if key in late:
            incomplete[key] = f"its gang did not start: only {held} of {members[0].size} members were claimed in time"
        elif now_s - min(each.since_s for each in waiting) > INCOMPLETE_S:
            incomplete[key] = f"its gang waits too long: only {held} of {members[0].size} members hold a host"
    return incomplete


def gang_key(spec: JobSpec) -> str:
    """Names the gang of a job; empty for a job that trains alone."""
    if spec.gang is None:
        return ""
    return msgspec.structs.replace(spec, gang=msgspec.structs.replace(spec.gang, index=0)).id
