"""The safeguards of the stores, each taken out in turn. The histories must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from strata.database.transaction import Transaction
from strata.fleet.core import lease, lease_status
from strata.fleet.core.job import HELD as HELD_STATUSES
from strata.fleet.core.job import TERMINAL, JobStatus
from strata.fleet.core.lease import AttemptCounts, Budget, RetryDecision
from strata.fleet.core.lease_status import LeaseStatus
from strata.fleet.store import leases, plan, queue
from strata.fleet.store.leases import HeldJob
from strata.fleet.store.postgres import claims as postgres_claims
from strata.fleet.store.sqlite import claims as sqlite_claims

Ablation = tuple[Any, str, Any]
_lease_status: Final = lease_status.lease_status
_after_expiry: Final = lease.after_expiry


def _any_epoch(status: JobStatus, *, current: tuple[int, str], claimed: tuple[int, str], leased: bool) -> LeaseStatus:
    return _lease_status(status, current=current, claimed=(current[0], claimed[1]), leased=leased)


def _any_host(status: JobStatus, *, current: tuple[int, str], claimed: tuple[int, str], leased: bool) -> LeaseStatus:
    return _lease_status(status, current=current, claimed=(claimed[0], current[1]), leased=leased)


def _always_leased(
    status: JobStatus, *, current: tuple[int, str], claimed: tuple[int, str], leased: bool
) -> LeaseStatus:
    return _lease_status(status, current=current, claimed=claimed, leased=True)


def _never_ended(status: JobStatus, *, current: tuple[int, str], claimed: tuple[int, str], leased: bool) -> LeaseStatus:
    if current == claimed and status in TERMINAL | HELD_STATUSES:
        return LeaseStatus.HELD
    return _lease_status(status, current=current, claimed=claimed, leased=leased)


def _lost_for_ever(before: AttemptCounts, budget: Budget, *, now_s: float) -> RetryDecision:
    return _after_expiry(before, Budget(max_attempts=budget.max_attempts, max_lost=1_000_000), now_s=now_s)


async def _at_once(tx: Transaction, seqs: Sequence[int], now_s: float) -> None:
    await tx.execute(
        "INSERT INTO ready (seq, class_id, priority, since, owner)"
        " SELECT seq, class_id, priority, :now, owner FROM job WHERE seq = ANY(:seqs)"
        " ON CONFLICT (seq) DO UPDATE SET priority = excluded.priority",
        {"now": now_s, "seqs": list(seqs)},
    )


async def _expired_for_everybody(tx: Transaction, job_id: str, job: HeldJob, now_s: float) -> JobStatus:
    """A job that is revived stays in the queue."""
    if job.status is not JobStatus.PENDING:
        return job.status
    await tx.execute("UPDATE job SET status = 'running' WHERE seq = :seq", {"seq": job.seq})
    return JobStatus.RUNNING


async def _not_told(tx: Transaction, held: Any, columns: str) -> None:
    return None


def _with(text: str, part: str, instead: str) -> str:
    assert part in text
    return text.replace(part, instead)


def _without(text: str, *parts: str) -> str:
    for part in parts:
        text = _with(text, part, "")
    return text


_ASKED_BEFORE: Final = "EXISTS (SELECT 1 FROM attempt WHERE host_id = h.id AND claim_id = w.claim)"
_NEW: Final = """
SELECT w.host, w.claim, '' AS job_id, 0::bigint AS epoch, ''::bytea AS taken, false AS expired, 0::bigint AS reserved,
  '' AS kind, 0::float8 AS expires_at
FROM unnest(%(hosts)s::text[], %(claims)s::text[]) AS w (host, claim)
"""
_NEVER_GIVEN: Final = "WHERE NOT EXISTS (SELECT FROM attempt a WHERE a.claim_id = w.claim AND a.host_id = w.host)"
_HELD: Final = """
SELECT a.host_id, NULL, a.job_id, a.epoch, a.taken, l.expired, 0::bigint, '', 0::float8
FROM (SELECT DISTINCT host FROM unnest(%(hosts)s::text[]) AS w (host)) AS w
JOIN attempt a ON a.host_id = w.host AND a.ended_at IS NULL JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch
"""


def _opened_by(query: str) -> list[Ablation]:
    """Claims are opened by another query, in the statement of its own and in the one that takes a job too."""
    return [
        (postgres_claims, "OPEN", query),
        (postgres_claims, "OPENED", _with(postgres_claims.OPENED, postgres_claims.OPEN, query)),
    ]


_UNLOCKED: Final = tuple(
    (postgres_claims, name, _without(getattr(postgres_claims, name), "FOR UPDATE OF r, j SKIP LOCKED"))
    for name in ("ONE", "FIRST", "BEST")
)

BOTH: Final[dict[str, list[Ablation]]] = {
    "an earlier epoch may speak": [(leases, "lease_status", _any_epoch)],
    "any host may speak": [(leases, "lease_status", _any_host)],
    "a job is revived without its lease": [(leases, "lease_status", _always_leased)],
    "a terminal job may end again": [(leases, "lease_status", _never_ended)],
    "hosts may be lost for ever": [
        (leases, "after_expiry", _lost_for_ever),
    ],
    "a back-off is not waited for": [
        (leases, "enqueue", _at_once),
        (plan, "enqueue", _at_once),
        (queue, "enqueue", _at_once),
    ],
    "a claim that is repeated takes more": [
        (sqlite_claims, "CLAIMANTS", _with(sqlite_claims.CLAIMANTS, _ASKED_BEFORE, "0")),
        *_opened_by(_NEW),
    ],
}
SQLITE: Final[dict[str, list[Ablation]]] = {
    **BOTH,
    "a revived job stays in the queue": [(leases, "_revive_if_expired", _expired_for_everybody)],
    "a repeated report is forgotten": [(leases, "_previous_report", _not_told)],
}
POSTGRES: Final[dict[str, list[Ablation]]] = {
    **BOTH,
    "claims of one name do not wait for each other": _opened_by(f"{_NEW} {_NEVER_GIVEN} UNION ALL {_HELD}"),
    "claims do not lock what they choose": list(_UNLOCKED),
    "jobs are judged without a lock": [(leases, "LOCK_JOB", _without(leases.LOCK_JOB, " FOR UPDATE"))],
    "an expired lease is extended as if it were held": [
        (leases, "EXTEND", _without(leases.EXTEND, "AND NOT l.expired", "AND NOT lease.expired"))
    ],
}


@contextmanager
def removed(ablations: list[Ablation]) -> Iterator[None]:
    kept: list[tuple[Any, str, Callable[..., Any]]] = [
        (owner, name, getattr(owner, name)) for owner, name, _ in ablations
    ]
    postgres_claims._statement.cache_clear()
    try:
        for owner, name, instead in ablations:
            setattr(owner, name, instead)
        yield
    finally:
        for owner, name, before in kept:
            setattr(owner, name, before)
        postgres_claims._statement.cache_clear()
