"""SQL of owners: their projects and quotas, and what their jobs use (jobs, GPU hours, cards)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from strata.database import event_kinds
from strata.database.transaction import Database, Transaction
from strata.fleet.core.amounts import Taken
from strata.fleet.core.quota import HOUR_S, OwnerUsage, Quota
from strata.fleet.records import OwnerUsages
from strata.fleet.store.queue import record
from strata.fleet.store.rows import LEASED, UNFINISHED_JOB, decode_taken, encode

USAGE_S: Final = 120.0
"""The usage of a month may have very many attempts."""
_BY_OWNER: Final = f"FROM job /* sqlite: INDEXED BY job_owner */ WHERE {UNFINISHED_JOB}"
_JOBS: Final = f"SELECT owner, count(*) {_BY_OWNER} GROUP BY owner"
_OWNERS: Final = (
    f"WITH RECURSIVE o (owner) AS (SELECT min(owner) {_BY_OWNER} UNION ALL"
    f" SELECT (SELECT min(owner) {_BY_OWNER} AND owner > o.owner) FROM o"
    " WHERE o.owner IS NOT NULL) SELECT owner FROM o WHERE owner IS NOT NULL"
)
"""Owners are few and jobs many: from one owner to the next in the index."""
_CARDS: Final = (
    "(SELECT jsonb_array_length(t -> 'cards') * coalesce((t ->> 'gpu_share')::float8, 1.0)"
    " FROM (SELECT convert_from(a.taken, 'UTF8')::jsonb AS t) AS x)"
)
_GPU_S: Final = (
    f"SELECT j.owner, count(*), sum({_CARDS} * greatest(0.0, coalesce(a.ended_at, l.expires_at, :now::float8)"
    " - greatest(a.claimed_at, :since::float8))) FROM attempt a JOIN job j ON j.id = a.job_id"
    " LEFT JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch AND l.expired"
    " WHERE (a.ended_at IS NULL OR a.ended_at > :since)"
    " AND strpos(convert_from(a.taken, 'UTF8'), '\"cards\"') > 0 GROUP BY j.owner"
)
"""Seconds of cards of all owners: `read_usage` computes the same for one owner."""
_HELD: Final = (
    "SELECT j.owner, a.taken, count(*) FROM lease l CROSS JOIN attempt a JOIN job j ON j.id = l.job_id"
    f" WHERE {LEASED} GROUP BY j.owner, a.taken"
)
_decode_quota: Final = msgspec.json.Decoder(Quota).decode


class OwnerTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def projects(self) -> Mapping[str, str]:
        return dict(await self._database.rows("SELECT name, owner FROM project"))

    async def quotas(self) -> Mapping[str, Quota]:
        return await self._database.read(read_quotas)

    async def set_quota(self, owner: str, quota: Quota | None, actor: str, now_s: float) -> None:
        async def change(tx: Transaction) -> None:
            if quota is None:
                await tx.execute("DELETE FROM quota WHERE owner = :owner", {"owner": owner})
            else:
                # With the fields at their defaults: another default in a later version does not change them.
                spec = encode(msgspec.structs.asdict(quota))
                upsert = (
                    "INSERT INTO quota (owner, spec) VALUES (:owner, :spec)"
                    " ON CONFLICT (owner) DO UPDATE SET spec = excluded.spec"
                )
                await tx.execute(upsert, {"owner": owner, "spec": spec})
            body = None if quota is None else msgspec.to_builtins(quota)
            await record(tx, now_s, actor, event_kinds.QUOTA_CHANGED, owner, quota=body)

        await self._database.run(change)

    async def usage(self, owner: str, window_s: float, now_s: float) -> OwnerUsage:
        return await self._database.read(lambda tx: read_usage(tx, owner, window_s, now_s))

    async def usages(self, window_s: float, now_s: float) -> OwnerUsages:
        async def read(tx: Transaction) -> Sequence[tuple[Any, ...]]:
            if tx.engine == "postgres":
                # Most attempts are read, which an index makes dearer.
                await tx.execute("SET LOCAL enable_seqscan = on")
            return await tx.rows(_GPU_S, {"now": now_s, "since": now_s - window_s})

        jobs: dict[str, int] = dict(await self._database.rows(_JOBS))
        rows = await self._database.run(read, call_s=USAGE_S)
        used = {owner: seconds / HOUR_S for owner, _, seconds in rows}
        by_owner = {
            owner: OwnerUsage(jobs=jobs.get(owner, 0), gpu_hours=used.get(owner, 0.0))
            for owner in jobs.keys() | used.keys()
        }
        return OwnerUsages(by_owner, sum(attempts for _, attempts, _ in rows))

    async def active(self) -> Collection[str]:
        return [owner for (owner,) in await self._database.rows(_OWNERS)]

    async def held(self) -> Sequence[tuple[str, Taken, int]]:
        return [(owner, decode_taken(taken), leases) for owner, taken, leases in await self._database.rows(_HELD)]


async def read_quotas(tx: Transaction) -> dict[str, Quota]:
    return {owner: _decode_quota(spec) for owner, spec in await tx.rows("SELECT owner, spec FROM quota")}


async def read_usage(tx: Transaction, owner: str, window_s: float | None, now_s: float) -> OwnerUsage:
    """Returns what the owner has in use; GPU hours only with a window, because all jobs of the owner are read for them.

    A lease that has expired counts as the end of its attempt.
    """
    count = f"SELECT count(*) FROM job WHERE owner = :owner AND {UNFINISHED_JOB}"
    ((jobs,),) = await tx.rows(count, {"owner": owner})
    if window_s is None:
        return OwnerUsage(jobs=jobs)
    since_s = now_s - window_s
    attempts = await tx.rows(
        "SELECT a.taken, a.claimed_at, coalesce(a.ended_at, l.expires_at) FROM job j JOIN attempt a ON a.job_id = j.id"
        " LEFT JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch AND l.expired"
        " WHERE j.owner = :owner AND (a.ended_at IS NULL OR a.ended_at > :since) AND length(a.taken) > 0",
        {"owner": owner, "since": since_s},
    )
    used_s = 0.0
    for taken, claimed_at_s, ended_at_s in attempts:
        until_s = now_s if ended_at_s is None else ended_at_s
        used_s += decode_taken(taken).gpus * max(0.0, until_s - max(claimed_at_s, since_s))
    return OwnerUsage(jobs=jobs, gpu_hours=used_s / HOUR_S)
