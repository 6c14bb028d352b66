"""Decodes rows of jobs, attempts and hosts: the same columns, in the same order, in both databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.amounts import UNKNOWN, Amounts, Capacity, Room, Taken
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import TERMINAL, Cause, JobStatus
from strata.fleet.core.jobspec import HostSpec, JobSpec, TrainerSpec
from strata.fleet.core.lease import AttemptCounts
from strata.fleet.core.lease_status import LeaseStatus, lease_status
from strata.fleet.core.plan import ExistingJob, HostPolicy, RegisteredTrainer
from strata.fleet.core.quota import HOUR_S, Quota
from strata.fleet.core.reservation import (
    GangMember,
    HeldPlace,
    Reservation,
    ReservationKind,
    ReservationPlan,
    WaitingJob,
)
from strata.fleet.core.samples import SamplePoint
from strata.fleet.ports import AttemptKey, AttemptRow, Claim, HostRow, JobLease, JobRow, RefusedJob, ServerRow

JOB: Final = (
    "id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason, artifact, declared,"
    " orphaned, waits_for, attempts, trainer_digest, submitted_by, owner, archived, superseded"
)
ATTEMPT: Final = (
    "job_id, number, epoch, host_id, claimed_at, started_at, ended_at, outcome, cause, error, artifact, checkpoint,"
    " facts, trainer_digest, taken"
)
NEWER: Final = (
    "(SELECT count(*) FROM (SELECT 1 FROM job n WHERE n.label = job.label AND n.project = job.project"
    " AND n.seq > job.seq LIMIT 99) AS newer)"
)
"""How many later jobs of its project have the name of the job: at most so many are counted."""
HIDDEN: Final = "((archived OR superseded) AND status IN ('completed', 'failed', 'cancelled'))"
"""Jobs that a list leaves out unless it is asked for all."""
HOST: Final = "id, name, capability, registered_at, state, state_reason, coalesce(seen, 0), agent_version, pool, labels"

EXISTING_JOB: Final = "spec, status, declared, trainer_digest, owner"
POLICIES: Final = "SELECT host, spec, project FROM policy"
TRAINERS: Final = "SELECT n.project, n.name, n.digest, t.spec FROM trainer_name n JOIN trainer t ON t.digest = n.digest"

QUOTAS: Final = "SELECT owner, spec FROM quota"
SERVERS: Final = (
    f"SELECT s.epoch, s.address, s.models, s.used_at, j.* FROM server s JOIN (SELECT {JOB} FROM job) j"
    " ON j.id = s.job_id ORDER BY s.job_id"
)
PUBLISH: Final = (
    "INSERT INTO server (job_id, epoch, address, models, used_at)"
    " SELECT id, epoch, {address}, {models}, {now} FROM job"
    " WHERE id = {job} AND epoch = {epoch} AND host_id = {host} AND status IN ('claimed', 'running')"
    " ON CONFLICT (job_id) DO UPDATE SET epoch = excluded.epoch, address = excluded.address,"
    " models = excluded.models, used_at = excluded.used_at WHERE server.epoch <= excluded.epoch"
)
"""With the names of its parameters as each database spells them. A zombie changes nothing."""
_UNFINISHED: Final = "status IN ('pending', 'claimed', 'running')"
OWNERS: Final = (
    f"WITH RECURSIVE o (owner) AS (SELECT min(owner) FROM {{job}} WHERE {_UNFINISHED} UNION ALL"
    f" SELECT (SELECT min(owner) FROM {{job}} WHERE {_UNFINISHED} AND owner > o.owner) FROM o"
    " WHERE o.owner IS NOT NULL) SELECT owner FROM o WHERE owner IS NOT NULL"
)
"""Owners are few and jobs many: from one owner to the next in the index. `job` is the table, and its index in SQLite,
which would choose another one."""
HELD_BY_OWNER: Final = (
    "SELECT j.owner, a.taken FROM lease l JOIN attempt a ON a.job_id = l.job_id AND a.epoch = l.epoch"
    " JOIN job j ON j.id = l.job_id WHERE NOT l.expired"
)

REFUSED: Final = (
    "SELECT j.id, j.class_id, r.host_id FROM job_refusal r JOIN job j ON j.seq = r.seq WHERE j.status = 'pending'"
    " AND NOT EXISTS (SELECT 1 FROM lease WHERE job_id = j.id) ORDER BY j.id"
)

HELD: Final = (
    "SELECT a.host_id, a.taken FROM lease l JOIN attempt a ON a.job_id = l.job_id AND a.epoch = l.epoch"
    " WHERE NOT l.expired"
)

_WAITING: Final = "r.seq, j.id, r.class_id, r.priority, r.owner, r.since, j.gang"
QUEUE_HEADS: Final = f"SELECT {_WAITING} FROM {{heads}} JOIN job j ON j.seq = r.seq"
"""`heads` is what each database has for the first job `r` of each owner in each class."""
RESERVATIONS: Final = (
    f"SELECT v.host_id, v.amounts, v.kind, v.expires_at, {_WAITING} FROM reservation v JOIN ready r ON r.seq = v.seq"
    " JOIN job j ON j.seq = v.seq ORDER BY v.host_id, v.seq"
)
"""A reservation counts while its job waits in the queue."""
GANG_MEMBERS: Final = (
    f"SELECT j.gang, j.id, j.status, j.spec, {_WAITING} FROM job j LEFT JOIN ready r ON r.seq = j.seq"
    f" WHERE j.gang <> '' AND j.gang IN (SELECT gang FROM {{job}} WHERE gang <> '' AND {_UNFINISHED})"
    " ORDER BY j.gang, j.seq"
)
"""`job` is the table, and its index in SQLite, which would read all jobs that wait."""
HELD_PLACES: Final = (
    "SELECT a.host_id, a.job_id, a.epoch, a.taken, j.priority, a.claimed_at, j.gang, s.job_id IS NOT NULL,"
    " j.checkpoint <> '', l.preempt <> ''"
    " FROM lease l JOIN attempt a ON a.job_id = l.job_id AND a.epoch = l.epoch JOIN job j ON j.id = l.job_id"
    " LEFT JOIN server s ON s.job_id = l.job_id WHERE NOT l.expired"
)

encode: Final = msgspec.json.Encoder().encode
decode_spec: Final = msgspec.json.Decoder(JobSpec).decode
decode_trainer: Final = msgspec.json.Decoder(TrainerSpec).decode
_policy: Final = msgspec.json.Decoder(HostSpec).decode
_quota: Final = msgspec.json.Decoder(Quota).decode
_capability: Final = msgspec.json.Decoder(Capability).decode
_labels: Final = msgspec.json.Decoder(dict[str, str]).decode
_models: Final = msgspec.json.Decoder(tuple[str, ...]).decode
_facts: Final = msgspec.json.Decoder(dict[str, Any]).decode
_values: Final = msgspec.json.Decoder(dict[str, float]).decode
_taken: Final = msgspec.json.Decoder(Taken).decode
_amounts: Final = msgspec.json.Decoder(dict[str, Any]).decode


def class_keys(specs: Iterable[JobSpec]) -> dict[bytes, str]:
    """The keys of the classes of these jobs, by the encoded class: jobs are many and their classes few."""
    written = {encode(requirement): requirement for requirement in (spec.requirement for spec in specs)}
    return {text: requirement.key for text, requirement in written.items()}


def decode_refused_jobs(rows: Iterable[Sequence[Any]]) -> list[RefusedJob]:
    """From `REFUSED`."""
    classes: dict[str, int] = {}
    hosts: dict[str, set[str]] = {}
    for job_id, class_id, host_id in rows:
        classes[job_id] = class_id
        hosts.setdefault(job_id, set()).add(host_id)
    return [RefusedJob(job_id=id_, class_id=classes[id_], hosts=frozenset(hosts[id_])) for id_ in hosts]


def decode_job(row: Sequence[Any]) -> JobRow:
    (id_, spec, class_id, status, epoch, created, changed, not_before, host, reason, artifact, declared, orphaned,
     waits_for, attempts, trainer_digest, submitted_by, owner, archived, superseded, *newer) = row  # fmt: skip
    return JobRow(
        id=id_,
        spec=decode_spec(spec),
        class_id=class_id,
        status=JobStatus(status),
        epoch=epoch,
        attempts=attempts,
        created_at_s=created,
        changed_at_s=changed,
        not_before_s=not_before,
        host_id=host,
        reason=reason,
        artifact=artifact,
        declared=bool(declared),
        orphaned=bool(orphaned),
        waits_for=waits_for,
        trainer_digest=trainer_digest,
        submitted_by=submitted_by,
        owner=owner,
        archived=bool(archived),
        superseded=bool(superseded),
        newer=newer[0] if newer else 0,
    )


def decode_server(row: Sequence[Any]) -> ServerRow:
    """From `SERVERS`."""
    epoch, address, models, used_at_s, *job = row
    return ServerRow(job=decode_job(job), epoch=epoch, address=address, models=_models(models), used_at_s=used_at_s)


def unfinished_members(members: Mapping[str, JobRow]) -> list[str]:
    """The members of a gang that have not ended, by id."""
    return [member for member, row in members.items() if row.status not in TERMINAL]


def decode_attempt(row: Sequence[Any]) -> AttemptRow:
    (job_id, number, epoch, host, claimed, started, ended, outcome, cause, error, artifact, checkpoint, facts,
     trainer_digest, taken) = row  # fmt: skip
    return AttemptRow(
        job_id=job_id,
        number=number,
        epoch=epoch,
        host_id=host,
        claimed_at_s=claimed,
        started_at_s=started,
        ended_at_s=ended,
        outcome=outcome,
        cause=Cause(cause) if cause else None,
        error=error,
        artifact=artifact,
        checkpoint=checkpoint,
        facts=_facts(facts),
        trainer_digest=trainer_digest,
        taken=decode_taken(taken),
    )


def decode_taken(text: bytes) -> Taken:
    """Empty for an attempt that began before amounts were counted."""
    return _taken(text) if text else UNKNOWN


def encode_amounts(amounts: Amounts) -> bytes:
    """As the fields of a `Taken`: a hub of the version before counts what is reserved as taken."""
    return encode(amounts._asdict())


def decode_amounts(text: bytes) -> Amounts:
    return Amounts(**_amounts(text))


def decode_reservations(rows: Iterable[Sequence[Any]]) -> list[Reservation]:
    """From `RESERVATIONS`."""
    return [
        Reservation(host_id, WaitingJob(*job), decode_amounts(amounts), kind, expires_at_s)
        for host_id, amounts, kind, expires_at_s, *job in rows
    ]


def new_reservations(plan: ReservationPlan, before: Iterable[Reservation]) -> list[Reservation]:
    """Those for which the plan has chosen a host now."""
    known = {(each.host_id, each.job.seq) for each in before}
    return [each for each in plan.reservations if (each.host_id, each.job.seq) not in known]


def decode_gang_members(rows: Iterable[Sequence[Any]]) -> list[GangMember]:
    """From `GANG_MEMBERS`."""
    members = []
    for gang, job_id, status, spec, *job in rows:
        size, min_size = _gang_size(bytes(spec))
        waiting = None if job[0] is None else WaitingJob(*job)
        members.append(GangMember(gang, job_id, JobStatus(status), size, min_size, waiting))
    return members


@lru_cache(1024)
def _gang_size(spec: bytes) -> tuple[int, int]:
    """Read again and again while a gang waits."""
    gang = decode_spec(spec).gang
    return (1, 1) if gang is None else (gang.size, gang.min_size)


def decode_held_places(rows: Iterable[Sequence[Any]]) -> list[HeldPlace]:
    """From `HELD_PLACES`."""
    # Attempts are many, and what they take is much the same.
    taken = lru_cache(256)(decode_taken)
    return [
        HeldPlace(host_id, job_id, epoch, taken(bytes(text)), priority, claimed_at_s, gang, *map(bool, flags))
        for host_id, job_id, epoch, text, priority, claimed_at_s, gang, *flags in rows
    ]


def decode_points(rows: Iterable[Sequence[Any]]) -> list[SamplePoint]:
    """From host, time and body."""
    return [SamplePoint(host_id, at_s, _values(body)) for host_id, at_s, body in rows]


def decode_held(rows: Iterable[Sequence[Any]]) -> dict[str, list[Taken]]:
    """From `HELD`."""
    held: dict[str, list[Taken]] = {}
    for host_id, taken in rows:
        held.setdefault(host_id, []).append(decode_taken(taken))
    return held


def decode_existing_job(row: Sequence[Any]) -> ExistingJob:
    """From `EXISTING_JOB`."""
    spec, status, declared, digest, owner = row
    status = JobStatus(status)
    return ExistingJob(spec=decode_spec(spec), status=status, declared=bool(declared), trainer=digest, owner=owner)


def decode_policies(rows: Iterable[Sequence[Any]]) -> dict[str, HostPolicy]:
    """From `POLICIES`."""
    return {host: HostPolicy(spec=_policy(spec), project=project) for host, spec, project in rows}


def decode_quotas(rows: Iterable[Sequence[Any]]) -> dict[str, Quota]:
    """From `QUOTAS`."""
    return {owner: _quota(spec) for owner, spec in rows}


def encode_quota(quota: Quota) -> bytes:
    """With the fields at their defaults: another default in a later version does not change what an operator set."""
    return encode(msgspec.structs.asdict(quota))


def used_gpu_hours(rows: Iterable[Sequence[Any]], since_s: float, now_s: float) -> float:
    """Card hours of attempts, given as what they took, when they were claimed, and when they ended.

    A lease that has expired counts as the end of its attempt.
    """
    used_s = 0.0
    for taken, claimed_at_s, ended_at_s in rows:
        until_s = now_s if ended_at_s is None else ended_at_s
        used_s += decode_taken(taken).gpus * max(0.0, until_s - max(claimed_at_s, since_s))
    return used_s / HOUR_S


def decode_trainers(rows: Iterable[Sequence[Any]]) -> dict[tuple[str, str], RegisteredTrainer]:
    """From `TRAINERS`."""
    return {
        (project, name): RegisteredTrainer(digest=digest, spec=decode_trainer(spec))
        for project, name, digest, spec in rows
    }


def decode_known_trainer(rows: Sequence[Sequence[Any]], digest: str) -> TrainerSpec:
    if not rows:
        raise StrataError(Code.NOT_FOUND, f"there is no trainer {digest[:100]!r}")
    return decode_trainer(rows[0][0])


def decode_host(row: Sequence[Any]) -> HostRow:
    id_, name, capability, registered, state, state_reason, seen, agent_version, pool, labels = row
    return HostRow(
        id=id_,
        name=name,
        capability=_capability(capability),
        registered_at_s=registered,
        state=state,
        state_reason=state_reason,
        seen_at_s=seen,
        agent_version=agent_version,
        pool=pool,
        labels=_labels(labels),
    )


def decode_lease(job_id: str, epoch: int, row: Sequence[Any]) -> JobLease:
    """From `LEASE`."""
    host_id, expires_at_s, spec, checkpoint, digest, trainer, taken = row
    return JobLease(
        job_id=job_id,
        epoch=epoch,
        host_id=host_id,
        expires_at_s=expires_at_s,
        spec=decode_spec(spec),
        trainer=None if trainer is None else decode_trainer(trainer),
        checkpoint=checkpoint,
        trainer_digest=digest,
        taken=taken if isinstance(taken, Taken) else decode_taken(taken),
    )


def take_turns(claims: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Host and name of each claim: every host once in a turn, so that its second claim sees what its first one took."""
    claims = list(claims)
    if len({host_id for host_id, _ in claims}) == len(claims):
        return [claims] if claims else []
    turns: list[list[tuple[str, str]]] = []
    before: Counter[str] = Counter()
    for host_id, claim_id in claims:
        if before[host_id] == len(turns):
            turns.append([])
        turns[before[host_id]].append((host_id, claim_id))
        before[host_id] += 1
    return turns


class OpenAttempt(NamedTuple):
    """An attempt that has not ended."""

    host_id: str
    job_id: str
    epoch: int
    taken: bytes
    """A `Taken`, as it is stored."""
    expired: bool
    """Its lease."""


def open_rooms(
    hosts: Mapping[str, Capacity], attempts: Iterable[OpenAttempt]
) -> tuple[dict[str, Room], list[OpenAttempt]]:
    """What each host has left beside its leases, and its attempts whose leases have expired."""
    rooms = {host_id: Room(capacity) for host_id, capacity in hosts.items()}
    expired: list[OpenAttempt] = []
    for attempt in attempts:
        if attempt.host_id not in rooms:
            continue
        if attempt.expired:
            expired.append(attempt)
        else:
            rooms[attempt.host_id].hold(decode_taken(attempt.taken))
    return rooms, expired


class OpenReservation(NamedTuple):
    """What a host keeps free for a job that waits."""

    host_id: str
    amounts: bytes
    """As `encode_amounts` has it."""
    seq: int
    kind: ReservationKind
    expires_at_s: float


def grant_reserved(
    rooms: Mapping[str, Room], reserved: Iterable[OpenReservation], claims: Mapping[str, Claim], now_s: float
) -> list[tuple[Claim, int, Taken]]:
    """The reserved jobs that fit and that the claims of their hosts get, each with what it takes. What else is reserved
    is kept from the other jobs of these claims."""
    granted: list[tuple[Claim, int, Taken]] = []
    left = {host_id: claim.count for host_id, claim in claims.items()}
    for each in reserved:
        if each.host_id not in rooms or each.kind == "missed" or each.expires_at_s <= now_s:
            continue
        room, amounts = rooms[each.host_id], decode_amounts(each.amounts)
        if each.kind == "grant" and left[each.host_id] and room.fits(amounts):
            (taken,) = room.plan(amounts)
            room.hold(taken)
            left[each.host_id] -= 1
            granted.append((claims[each.host_id], each.seq, taken))
        else:
            room.reserve(amounts)
    return granted


def displaced_attempts(
    rooms: Mapping[str, Room], expired: Iterable[OpenAttempt], granted: Sequence[JobLease]
) -> list[tuple[str, int]]:
    """Job and epoch of the attempts that have expired and do not fit any more beside what was granted now.

    A late heartbeat would otherwise revive them on cards that another job has by then.
    """
    hosts, jobs = {lease.host_id for lease in granted}, {lease.job_id for lease in granted}
    displaced: list[tuple[str, int]] = []
    for attempt in expired:
        if attempt.host_id not in hosts or attempt.job_id in jobs:
            continue
        taken = decode_taken(attempt.taken)
        if rooms[attempt.host_id].admits(taken):
            rooms[attempt.host_id].hold(taken)
        else:
            displaced.append((attempt.job_id, attempt.epoch))
    return displaced


class HeldJob(NamedTuple):
    """The columns of a job that a decision about its lease needs, from `HELD_JOB`, and whether the lease row exists."""

    seq: int
    status: JobStatus
    epoch: int
    host_id: str
    leased: bool
    spec: JobSpec
    tally: AttemptCounts

    def lease_status(self, attempt: AttemptKey) -> LeaseStatus:
        claimed = (attempt.epoch, attempt.host_id)
        return lease_status(self.status, current=(self.epoch, self.host_id), claimed=claimed, leased=self.leased)


HELD_JOB: Final = "seq, status, epoch, host_id, spec, charged, lost, infra, excused"


def decode_held_job(row: Sequence[Any], *, leased: bool) -> HeldJob:
    seq, status, epoch, host_id, spec, charged, lost, infra, excused = row
    tally = AttemptCounts(charged=charged, lost=lost, infra=infra, excused=excused)
    return HeldJob(seq, JobStatus(status), epoch, host_id, leased, decode_spec(spec), tally)
