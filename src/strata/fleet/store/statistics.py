"""SQL of statistics: counts by status, waiting classes, held cards, and times of attempts and events for goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from strata.database.event_kinds import FREQUENT
from strata.database.transaction import Database, Rows, Transaction
from strata.fleet.core.goodput import LEDGER_EVENTS, AttemptTimes, LedgerEvent
from strata.fleet.core.job import TERMINAL, JobStatus
from strata.fleet.records import Counts, JobLedger, LedgerJob, WaitingClass
from strata.fleet.store.rows import HELD_JOBS, LEASED, decode_facts, decode_taken

_COUNTS: Final = (
    "SELECT status, sum(n) FROM job_count WHERE {only} GROUP BY status UNION ALL"
    f" SELECT status, count(*) FROM {HELD_JOBS} WHERE {{only}} AND status IN ('claimed', 'running') GROUP BY status"
)
"""Triggers keep `job_count`: jobs that lists show, by the status in which they ended, or `open`. Those that hosts hold
are few, and are counted by an index of their own; so a claim changes no count."""
_COMPACT: Final = (
    "WITH gone AS (DELETE FROM job_count RETURNING project, status, n) INSERT INTO job_count"
    " SELECT project, status, sum(n) FROM gone GROUP BY project, status HAVING sum(n) <> 0"
)
"""Sums up each row once, also if two do it at once."""
_HELD_CARDS: Final = f"SELECT a.taken FROM lease l CROSS JOIN attempt a WHERE {LEASED}"
_WAITING: Final = (
    "SELECT q.class_id, q.jobs, q.since, j.id FROM (SELECT r.class_id, count(*) AS jobs, min(r.since) AS since,"
    " min(r.seq) AS seq FROM {ready} GROUP BY r.class_id) q JOIN job j ON j.seq = q.seq ORDER BY q.class_id"
)
_READY_OF: Final = "ready r JOIN job p ON p.seq = r.seq WHERE p.project = :project"
_EACH_ATTEMPT: Final = {
    "sqlite": "CROSS JOIN attempt a ON a.job_id = w.job_id AND a.epoch = w.epoch",
    # The planner would read all attempts there ever were.
    "postgres": "CROSS JOIN LATERAL (SELECT * FROM attempt t"
    " WHERE t.job_id = w.job_id AND t.epoch = w.epoch OFFSET 0) AS a",
}
_ATTEMPTS: Final = (
    "SELECT a.job_id, a.number, a.epoch, a.host_id, a.claimed_at, a.started_at, a.ended_at, a.outcome, a.cause,"
    " a.facts, j.created_at, j.changed_at, j.status, EXISTS (SELECT 1 FROM server WHERE server.job_id = j.id)"
    " FROM (SELECT job_id, epoch FROM (SELECT job_id, epoch FROM lease LIMIT :limit) AS o UNION ALL"
    "  SELECT job_id, epoch FROM (SELECT job_id, epoch FROM attempt /* sqlite: INDEXED BY attempt_ended */"
    "   WHERE ended_at >= :since ORDER BY ended_at DESC LIMIT :limit) AS e) AS w"
    " {each_attempt} JOIN job j ON j.id = a.job_id WHERE {only} ORDER BY a.job_id, a.epoch"
)
"""An attempt that has not ended has a lease."""
_NEWEST: Final = {"sqlite": "seq DESC", "postgres": "tx DESC, seq DESC"}
_EVENTS: Final = (
    "SELECT at, kind, subject, body FROM event WHERE kind = :kind"
    f" AND kind NOT IN ({', '.join(map(repr, FREQUENT))}) AND at >= :since ORDER BY {{newest}} LIMIT :limit"
)


class _Ran(msgspec.Struct):
    ran_s: Any = None


_decode_ran: Final = msgspec.json.Decoder(_Ran).decode
"""Decodes the facts of an attempt, which a host may have written as it likes."""


class StatisticsTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def counts(self, project: str = "") -> Counts:
        only = "project = :project" if project else "true"
        counts: Counter[str] = Counter()
        for status, n in await self._database.rows(_COUNTS.format(only=only), {"project": project}):
            counts[status] += int(n)
        counts["pending"] = counts.pop("open", 0) - counts["claimed"] - counts["running"]
        ((ready, hosts),) = await self._database.rows(
            "SELECT (SELECT count(*) FROM ready), (SELECT count(*) FROM host)"
        )
        by_status: dict[str, int] = {status: counts[status] for status in JobStatus if counts[status]}
        return Counts(by_status=by_status, ready=ready, hosts=hosts)

    async def compact_counts(self) -> None:
        async def compact(tx: Transaction) -> None:
            # The one writer of SQLite adds to the row of a count.
            if tx.engine == "postgres":
                await tx.execute(_COMPACT)

        await self._database.run(compact)

    async def held_cards(self) -> float:
        """Most attempts take none."""
        rows = await self._database.rows(_HELD_CARDS)
        return sum(decode_taken(taken).gpus for (taken,) in rows if b'"cards"' in bytes(taken))

    async def waiting_classes(self, project: str = "") -> Sequence[WaitingClass]:
        select = _WAITING.format(ready=_READY_OF if project else "ready r")
        return [WaitingClass(*row) for row in await self._database.rows(select, {"project": project})]

    async def ledger(self, since_s: float, project: str, limit: int) -> JobLedger:
        values = {"since": since_s, "project": project, "limit": limit}
        only = "j.project = :project" if project else "true"

        async def read(tx: Transaction) -> tuple[Rows, Rows]:
            attempts = await tx.rows(_ATTEMPTS.format(each_attempt=_EACH_ATTEMPT[tx.engine], only=only), values)
            select = _EVENTS.format(newest=_NEWEST[tx.engine])
            events = [row for kind in LEDGER_EVENTS for row in await tx.rows(select, {**values, "kind": kind})]
            return attempts, events

        return _decode_ledger(*await self._database.read(read), limit)


def _decode_ledger(rows: Rows, events: Rows, limit: int) -> JobLedger:
    jobs: dict[str, LedgerJob] = {}
    attempts = []
    ended = going = 0
    for *columns, created, changed, status, server in rows:
        jobs[columns[0]] = LedgerJob(created, changed, status in TERMINAL, bool(server))
        attempts.append((columns[0], _decode_times(columns)))
        ended += columns[6] is not None
        going += columns[6] is None
    of_jobs = [
        (subject, LedgerEvent(at_s, kind, body.get("epoch", 0), body.get("seen_at_s")))
        for at_s, kind, subject, body in ((*columns, decode_facts(text)) for *columns, text in events)
        if subject in jobs
    ]
    return JobLedger(jobs=jobs, attempts=attempts, events=of_jobs, whole=max(ended, going) < limit)


def _decode_times(row: Sequence[Any]) -> AttemptTimes:
    _, number, epoch, host, claimed, started, ended, outcome, cause, facts = row
    decoded = _decode_ran(facts).ran_s
    ran_s = decoded if isinstance(decoded, int | float) else None
    return AttemptTimes(number, epoch, host, claimed, started, ended, outcome, cause, ran_s)
