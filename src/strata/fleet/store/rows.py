"""Decodes rows of jobs, attempts and hosts: the same columns, in the same order, in both databases."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from strata.base.errors import Code, StrataError
from strata.database.event_kinds import FREQUENT
from strata.fleet.core.amounts import UNKNOWN, Amounts, Capacity, Room, Taken
from strata.fleet.core.capability import Capability
from strata.fleet.core.goodput import AttemptTimes, LedgerEvent
from strata.fleet.core.job import HELD as HELD_STATUSES
from strata.fleet.core.job import TERMINAL, Cause, JobStatus
from strata.fleet.core.jobspec import HostSpec, JobSpec, TrainerSpec
from strata.fleet.core.lease import AttemptCounts
from strata.fleet.core.lease_status import LeaseStatus, lease_status
from strata.fleet.core.plan import ExistingJob, HostPolicy, RegisteredTrainer
from strata.fleet.core.quota import HOUR_S, OwnerUsage, Quota
from strata.fleet.core.reservation import (
    GangMember,
    HeldPlace,
    Reservation,
    ReservationKind,
    ReservationPlan,
    WaitingJob,
)
from strata.fleet.core.samples import SamplePoint
from strata.fleet.ports import (
    AttemptKey,
    AttemptRow,
    Claim,
    HostRow,
    JobFilter,
    JobLease,
    JobLedger,
    JobOnHost,
    JobRow,
    LedgerJob,
    OwnerUsages,
    RefusedJob,
    ServerRow,
    SweepRow,
    TrialRow,
)

JOB: Final = (
    "id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason, artifact, declared,"
    " orphaned, waits_for, attempts, trainer_digest, submitted_by, owner, archived, superseded, seq"
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
ENDED: Final = "status IN ('completed', 'failed', 'cancelled')"
KEPT_COUNTS: Final = """
SELECT status, sum(n) FROM job_count WHERE {only} GROUP BY status
UNION ALL SELECT status, count(*) FROM {held} WHERE {only} AND status IN ('claimed', 'running') GROUP BY status
"""
"""Triggers keep `job_count`: jobs that lists show, by the status in which they ended, or `open`. Those that hosts hold
are few, and are counted by an index of their own; so a claim changes no count."""
HOST: Final = "id, name, capability, registered_at, state, state_reason, coalesce(seen, 0), agent_version, pool, labels"
LOST_HOSTS: Final = (
    "SELECT b.host_id, b.seen FROM host_beat b JOIN host h ON h.id = b.host_id WHERE b.seen < {since}"
    " AND h.state <> 'left' AND NOT EXISTS (SELECT 1 FROM host_lost l WHERE l.host_id = b.host_id)"
)

WAITING_CLASSES: Final = (
    "SELECT q.class_id, q.jobs, q.since, j.id FROM (SELECT r.class_id, count(*) AS jobs, min(r.since) AS since,"
    " min(r.seq) AS seq FROM {ready} GROUP BY r.class_id) q JOIN job j ON j.seq = q.seq ORDER BY q.class_id"
)
"""`ready` is `READY`, or `READY_OF` a project, with the parameter as each database spells it."""
READY: Final = "ready r"
READY_OF: Final = "ready r JOIN job p ON p.seq = r.seq WHERE p.project = {project}"
_TIMES: Final = (
    "a.job_id, a.number, a.epoch, a.host_id, a.claimed_at, a.started_at, a.ended_at, a.outcome, a.cause, a.facts"
)
LEDGER_ATTEMPTS: Final = (
    f"SELECT {_TIMES}, j.created_at, j.changed_at, j.status,"
    " EXISTS (SELECT 1 FROM server WHERE server.job_id = j.id)"
    " FROM (SELECT job_id, epoch FROM (SELECT job_id, epoch FROM lease LIMIT {limit}) AS o UNION ALL"
    "  SELECT job_id, epoch FROM (SELECT job_id, epoch FROM {ended}"
    "   WHERE ended_at >= {since} ORDER BY ended_at DESC LIMIT {limit}) AS e) AS w"
    " {attempt} JOIN job j ON j.id = a.job_id WHERE {only} ORDER BY a.job_id, a.epoch"
)
"""`ended` is the table of attempts, with an index in SQLite. An attempt that has not ended has a lease. `attempt` joins
the attempts `a` of `w`, one by one."""
LEDGER_EVENTS_SINCE: Final = (
    "SELECT at, kind, subject, body FROM event WHERE kind = {kind} AND "
    f"kind NOT IN ({', '.join(map(repr, FREQUENT))})"
    " AND at >= {since} ORDER BY {order} LIMIT {limit}"
)

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
OWNER_JOBS: Final = f"SELECT owner, count(*) FROM {{job}} WHERE {_UNFINISHED} GROUP BY owner"
"""`job` is the table, and its index in SQLite."""
OWNER_GPU_S: Final = (
    "SELECT j.owner, count(*), sum({cards} * {largest}(0.0, coalesce(a.ended_at, l.expires_at, {now})"
    " - {largest}(a.claimed_at, {since}))) FROM attempt a JOIN job j ON j.id = a.job_id"
    " LEFT JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch AND l.expired"
    " WHERE (a.ended_at IS NULL OR a.ended_at > {since}) AND {has_cards} GROUP BY j.owner"
)
"""Seconds of cards of all owners: `used_gpu_hours` is the same for one owner. `cards` is how many an attempt takes."""
OWNERS: Final = (
    f"WITH RECURSIVE o (owner) AS (SELECT min(owner) FROM {{job}} WHERE {_UNFINISHED} UNION ALL"
    f" SELECT (SELECT min(owner) FROM {{job}} WHERE {_UNFINISHED} AND owner > o.owner) FROM o"
    " WHERE o.owner IS NOT NULL) SELECT owner FROM o WHERE owner IS NOT NULL"
)
"""Owners are few and jobs many: from one owner to the next in the index. `job` is the table, and its index in SQLite,
which would choose another one."""
LEASES_FIRST: Final = "CROSS JOIN"
"""`join` in SQLite, which would else read all attempts that there ever were, and look for the lease of each."""
HELD_AMOUNTS: Final = (
    "SELECT a.taken FROM lease l {join} attempt a ON a.job_id = l.job_id AND a.epoch = l.epoch AND a.ended_at IS NULL"
    " WHERE NOT l.expired"
)
HELD_BY_OWNER: Final = (
    "SELECT j.owner, a.taken, count(*) FROM lease l {join} attempt a ON a.job_id = l.job_id AND a.epoch = l.epoch"
    " AND a.ended_at IS NULL JOIN job j ON j.id = l.job_id WHERE NOT l.expired GROUP BY j.owner, a.taken"
)

REFUSED: Final = (
    "SELECT j.id, j.class_id, r.host_id FROM job_refusal r JOIN job j ON j.seq = r.seq WHERE j.status = 'pending'"
    " AND NOT EXISTS (SELECT 1 FROM lease WHERE job_id = j.id) ORDER BY j.id"
)

HELD: Final = (
    "SELECT a.host_id, a.taken FROM lease l {join} attempt a ON a.job_id = l.job_id AND a.epoch = l.epoch"
    " AND a.ended_at IS NULL WHERE NOT l.expired"
)

_ON_HOST: Final = (
    "a.host_id, j.id, j.label, j.owner, j.status, a.epoch, a.claimed_at, a.taken,"
    " EXISTS (SELECT 1 FROM server s WHERE s.job_id = j.id AND s.epoch = a.epoch)"
)
JOBS_ON: Final = (
    f"SELECT {_ON_HOST} FROM attempt a JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch AND NOT l.expired"
    " JOIN job j ON j.id = a.job_id WHERE {listed} AND a.ended_at IS NULL ORDER BY a.host_id, a.claimed_at, j.id"
)
"""`listed` tests the host of the attempt as the index of each database has it."""
SWEEPS: Final = (
    f"SELECT project, sweep, status, count(*), max(changed_at) FROM job WHERE sweep <> '' AND NOT {HIDDEN}"
    " GROUP BY project, sweep, status ORDER BY project, sweep, status"
)
TRIALS: Final = (
    "SELECT j.id, j.status, j.reason, j.owner, j.changed_at, a.facts FROM job j LEFT JOIN attempt a"
    " ON a.job_id = j.id AND a.outcome = 'completed' AND j.status = 'completed'"
    f" WHERE j.project = {{project}} AND j.sweep = {{sweep}} AND j.sweep <> '' AND NOT {HIDDEN}"
    " ORDER BY j.seq, a.epoch"
)
"""With the names of its parameters as each database spells them."""

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
    " FROM lease l {join} attempt a ON a.job_id = l.job_id AND a.epoch = l.epoch AND a.ended_at IS NULL"
    " JOIN job j ON j.id = l.job_id"
    " LEFT JOIN server s ON s.job_id = l.job_id WHERE NOT l.expired"
)


class _CompletedFacts(msgspec.Struct):
    """Of the facts of a completed attempt."""

    metrics: dict[str, float] = {}


_ID_PREFIX: Final = re.compile(r"[0-9a-z_]{1,80}")

encode: Final = msgspec.json.Encoder().encode
decode_spec: Final = msgspec.json.Decoder(JobSpec).decode
decode_trainer: Final = msgspec.json.Decoder(TrainerSpec).decode
_policy: Final = msgspec.json.Decoder(HostSpec).decode
_quota: Final = msgspec.json.Decoder(Quota).decode
_capability: Final = lru_cache(16_384)(msgspec.json.Decoder(Capability).decode)
"""Hosts are read again and again, and what they are rarely changes."""
_labels: Final = msgspec.json.Decoder(dict[str, str]).decode
_models: Final = msgspec.json.Decoder(tuple[str, ...]).decode
_facts: Final = msgspec.json.Decoder(dict[str, Any]).decode
_metrics: Final = msgspec.json.Decoder(_CompletedFacts).decode
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
     waits_for, attempts, trainer_digest, submitted_by, owner, archived, superseded, seq, *newer) = row  # fmt: skip
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
        seq=seq,
    )


@dataclass(frozen=True)
class JobsDialect:
    """How a database writes a query for jobs."""

    mark: str
    """A parameter, with its name."""
    one_of: str
    """A column that is one of the values of a parameter."""
    listed: Callable[[Sequence[str]], Any]
    """The value of such a parameter."""
    contains: str
    """Whether a text in lower case contains a parameter, without regard to case."""
    searched: str
    """The table of jobs with the index of their texts."""
    searched_text: str
    """All texts of a job that people search by, in lower case."""
    ended: str
    """With the index of those that have ended, and with that of those that failed."""
    failed: str
    held: str
    """With the index of those that hosts hold."""
    newest: str
    """In the order in which they were queued."""
    servers: str
    """With the index of those that may be servers."""
    may_serve: str
    """What that index has."""
    by_match: str = ""
    """The jobs that match a text and `where`, the newest first, as a table `job`."""


class MatchingJobs(NamedTuple):
    """How jobs that a search matches are found, the newest first."""

    hosts: Sequence[str] | None
    """Those whose names match; None: many."""
    most: int | None
    """So many jobs of each kind of match; None: all of them."""

    def union(self, matches: Sequence[str]) -> str:
        """One statement for the numbers of the jobs. With `most` it leaves out those below the last one of a kind that
        was cut off: of that kind there may be others between them."""
        if self.most is None:
            return " UNION ALL ".join(matches)
        lowest = f"CASE WHEN count(*) OVER () = {self.most} THEN min(seq) OVER () ELSE 0 END AS lowest"
        newest = " UNION ALL ".join(
            f"SELECT seq, {lowest} FROM ({each} ORDER BY seq DESC LIMIT {self.most}) AS newest" for each in matches
        )
        bounded = f"SELECT seq, max(lowest) OVER () AS lowest FROM ({newest}) AS matching"
        return f"SELECT seq FROM ({bounded}) AS bounded WHERE seq >= lowest"


def select_jobs(
    wanted: JobFilter, dialect: JobsDialect, matching: MatchingJobs | None = None
) -> tuple[str, dict[str, Any]]:
    """The statement and its values. `matching`: how to find the jobs that a search matches, the newest first."""
    values: dict[str, Any] = {}

    def mark(name: str, value: Any) -> str:
        values[name] = value
        return dialect.mark.format(name)

    where = []
    if wanted.status:
        where.append(dialect.one_of.format("status", mark("status", dialect.listed(wanted.status))))
    if not wanted.hidden:
        where.append(f"NOT {HIDDEN}")
    columns = ("model", "host_id", "sweep", "project", "owner", "label")
    where += [f"{column} = {mark(column, value)}" for column in columns if (value := getattr(wanted, column))]
    if wanted.sweep:
        # For the index of sweeps, which no other job is in.
        where.append("sweep <> ''")
    if wanted.ids:
        where.append(dialect.one_of.format("id", mark("ids", dialect.listed(wanted.ids))))
    if wanted.servers:
        where.append(dialect.may_serve)
    if wanted.search and matching is None:
        where.append(f"seq IN ({' UNION ALL '.join(_matches(wanted.search, mark, dialect))})")
    table, contents = _indexed_jobs(wanted, dialect)
    where += contents
    order = {"id": "id", "newest": "seq DESC", "ended": "changed_at DESC, seq DESC"}[wanted.order]
    after = _after(wanted, mark)
    where += after
    condition = f"WHERE {' AND '.join(where)}" if where else ""
    limit = mark("limit", wanted.limit)
    if matching is not None:
        # The newest matches of this page, not those of the first one.
        statements = [" AND ".join([each, *after]) for each in _matches(wanted.search, mark, dialect, matching)]
        matches = matching.union(statements)
        table, condition = dialect.by_match.format(matches=matches, where=" AND ".join(["true", *where])), ""
    return f"SELECT {JOB}, {NEWER} FROM {table} {condition} ORDER BY {order} LIMIT {limit}", values


def _indexed_jobs(wanted: JobFilter, dialect: JobsDialect) -> tuple[str, list[str]]:
    """The table of jobs with the index that suits the filter, and what this index has: a planner that does not know the
    values of parameters would not take it otherwise."""
    if wanted.order == "ended":
        if tuple(wanted.status) == (JobStatus.FAILED,):
            return dialect.failed, ["status = 'failed'"]
        return dialect.ended, [ENDED]
    if wanted.servers:
        return dialect.servers, []
    # By these columns jobs are found sooner.
    if wanted.order != "newest" or wanted.host_id or wanted.sweep or wanted.label or wanted.ids:
        return "job", []
    if wanted.status and HELD_STATUSES.issuperset(wanted.status):
        return dialect.held, ["status IN ('claimed', 'running')"]
    # Most jobs are completed: all of them by their status would have to be sorted.
    return dialect.newest if JobStatus.COMPLETED in wanted.status and not wanted.search else "job", []


def _after(wanted: JobFilter, mark: Callable[[str, Any], str]) -> list[str]:
    if not wanted.after:
        return []
    if wanted.order == "id":
        return [f"id > {mark('after', wanted.after)}"]
    try:
        at_s, _, seq = wanted.after.rpartition(":")
        if wanted.order == "newest":
            return [f"seq < {mark('after', int(seq))}"]
        return [f"(changed_at, seq) < ({mark('at', float(at_s))}, {mark('after', int(seq))})"]
    except ValueError:
        raise StrataError(Code.INVALID, f"{wanted.after[:64]!r} is not a cursor of this list") from None


def _matches(
    text: str, mark: Callable[[str, Any], str], dialect: JobsDialect, matching: MatchingJobs | None = None
) -> list[str]:
    """Statements for the numbers of the jobs."""
    needle = mark("needle", text)
    on_host = f"host_id IN (SELECT id FROM host WHERE {dialect.contains.format('lower(name)', needle)})"
    if matching is not None and matching.hosts is not None:
        on_host = dialect.one_of.format("host_id", mark("hosts", dialect.listed(matching.hosts)))
    elif matching is not None:
        # As a test of each job from the newest on, which the planner cannot turn round.
        on_host = f"({on_host}) IS TRUE"
    found = [
        f"SELECT seq FROM {dialect.searched} WHERE {dialect.contains.format(dialect.searched_text, needle)}",
        f"SELECT seq FROM job WHERE host_id <> '' AND {on_host}",
    ]
    if _ID_PREFIX.fullmatch(text.lower()):
        low = text.lower() if text.lower().startswith("job") else f"job1_{text.lower()}"
        # '~' sorts after every character of an id.
        found.append(f"SELECT seq FROM job WHERE id >= {mark('low', low)} AND id < {mark('high', f'{low}~')}")
    return found


def kept_counts(rows: Iterable[Sequence[Any]]) -> dict[str, int]:
    """From `KEPT_COUNTS`."""
    counts: Counter[str] = Counter()
    for status, n in rows:
        counts[status] += int(n)
    counts["pending"] = counts.pop("open", 0) - counts["claimed"] - counts["running"]
    return {status: counts[status] for status in JobStatus if counts[status]}


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


def decode_ledger(rows: Sequence[Sequence[Any]], events: Iterable[Sequence[Any]], limit: int) -> JobLedger:
    """From `LEDGER_ATTEMPTS` and `LEDGER_EVENTS_SINCE`."""
    jobs: dict[str, LedgerJob] = {}
    attempts = []
    ended = going = 0
    for *columns, created, changed, status, server in rows:
        jobs[columns[0]] = LedgerJob(created, changed, status in TERMINAL, bool(server))
        attempts.append((columns[0], decode_times(columns)))
        ended += columns[6] is not None
        going += columns[6] is None
    told = [
        (subject, ledger_event(at_s, kind, _facts(body))) for at_s, kind, subject, body in events if subject in jobs
    ]
    return JobLedger(jobs=jobs, attempts=attempts, events=told, whole=max(ended, going) < limit)


def decode_times(row: Sequence[Any]) -> AttemptTimes:
    _, number, epoch, host_id, claimed, started, ended, outcome, cause, facts = row
    ran_s = _ran(facts).ran_s
    return AttemptTimes(
        number=number,
        epoch=epoch,
        host_id=host_id,
        claimed_at_s=claimed,
        started_at_s=started,
        ended_at_s=ended,
        outcome=outcome,
        cause=cause,
        ran_s=ran_s if isinstance(ran_s, int | float) else None,
    )


def ledger_event(at_s: float, kind: str, body: Mapping[str, Any]) -> LedgerEvent:
    return LedgerEvent(at_s, kind, body.get("epoch", 0), body.get("seen_at_s"))


class _Ran(msgspec.Struct):
    ran_s: Any = None


_ran: Final = msgspec.json.Decoder(_Ran).decode
"""Of the facts of an attempt, which a host may have written as it likes."""


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


def ended_reservations(plan: ReservationPlan, before: Iterable[Reservation]) -> list[Reservation]:
    """Those of jobs that still wait, for which the plan keeps no room on the host any more."""
    kept = {(each.host_id, each.job.seq) for each in plan.reservations}
    return [each for each in before if (each.host_id, each.job.seq) not in kept]


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
        HeldPlace(host_id, job_id, epoch, taken(text), priority, at_s, gang, bool(endless), bool(resumes), bool(yields))
        for host_id, job_id, epoch, text, priority, at_s, gang, endless, resumes, yields in rows
    ]


def decode_points(rows: Iterable[Sequence[Any]]) -> list[SamplePoint]:
    """From host, time and body."""
    return [SamplePoint(host_id, at_s, _values(body)) for host_id, at_s, body in rows]


def decode_held(rows: Iterable[Sequence[Any]]) -> dict[str, list[Taken]]:
    """From `HELD`."""
    taken = lru_cache(256)(decode_taken)
    held: dict[str, list[Taken]] = {}
    for host_id, text in rows:
        held.setdefault(host_id, []).append(taken(text))
    return held


def decode_jobs_on_hosts(rows: Iterable[Sequence[Any]]) -> dict[str, list[JobOnHost]]:
    """From `JOBS_ON`."""
    held: dict[str, list[JobOnHost]] = {}
    for host_id, job_id, label, owner, status, epoch, claimed_at_s, taken, serving in rows:
        job = JobOnHost(
            job_id=job_id,
            label=label,
            owner=owner,
            status=JobStatus(status),
            epoch=epoch,
            claimed_at_s=claimed_at_s,
            taken=decode_taken(taken),
            serving=bool(serving),
        )
        held.setdefault(host_id, []).append(job)
    return held


def decode_sweeps(rows: Iterable[Sequence[Any]]) -> list[SweepRow]:
    """From `SWEEPS`."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    changed: dict[tuple[str, str], float] = {}
    for project, sweep, status, count, changed_at_s in rows:
        place = project, sweep
        counts.setdefault(place, {})[status] = count
        changed[place] = max(changed.get(place, 0.0), changed_at_s)
    return [
        SweepRow(project=place[0], name=place[1], by_status=by_status, changed_at_s=changed[place])
        for place, by_status in counts.items()
    ]


def decode_trials(rows: Iterable[Sequence[Any]]) -> list[TrialRow]:
    """From `TRIALS`. Of a job that was completed more than once the last result counts."""
    trials = {}
    for job_id, status, reason, owner, changed_at_s, facts in rows:
        trials[job_id] = TrialRow(
            job_id=job_id,
            status=JobStatus(status),
            reason=reason,
            owner=owner,
            changed_at_s=changed_at_s,
            metrics={} if facts is None else _metrics(facts).metrics,
        )
    return list(trials.values())


def held_cards(rows: Iterable[Sequence[Any]]) -> float:
    """How many cards attempts have, from what they take: most take none."""
    return sum(decode_taken(taken).gpus for (taken,) in rows if b'"cards"' in bytes(taken))


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


def owner_usages(jobs: Iterable[Sequence[Any]], card_s: Iterable[Sequence[Any]]) -> OwnerUsages:
    """From `OWNER_JOBS` and `OWNER_GPU_S`."""
    counts = {row[0]: row[1] for row in jobs}
    used = {owner: (attempts, seconds) for owner, attempts, seconds in card_s}
    by_owner = {
        owner: OwnerUsage(jobs=counts.get(owner, 0), gpu_hours=used.get(owner, (0, 0.0))[1] / HOUR_S)
        for owner in counts.keys() | used.keys()
    }
    return OwnerUsages(by_owner, sum(attempts for attempts, _ in used.values()))


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
        capability=_capability(bytes(capability)),
        registered_at_s=registered,
        state=state,
        state_reason=state_reason,
        seen_at_s=seen,
        agent_version=agent_version,
        pool=pool,
        labels=_labels(labels),
    )


class HostDecoder:
    """All hosts are read every few seconds and rarely change: a row that is as it was is not decoded again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Sequence[Any], HostRow]] = {}

    def decode(self, rows: Iterable[Sequence[Any]]) -> list[HostRow]:
        """All hosts, by name."""
        self._known = {row[0]: (row, self._decode(row)) for row in rows}
        return sorted((host for _, host in self._known.values()), key=lambda host: (host.name, host.id))

    def _decode(self, row: Sequence[Any]) -> HostRow:
        before, host = self._known.get(row[0], ((), None))
        if host is not None and before == row:
            return host
        if host is None or before[:_SEEN] != row[:_SEEN] or before[_SEEN + 1 :] != row[_SEEN + 1 :]:
            return decode_host(row)
        return replace(host, seen_at_s=row[_SEEN])


_SEEN: Final = 6
"""The place in `HOST` of what changes with every heartbeat."""


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
