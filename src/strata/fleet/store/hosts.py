"""SQL of hosts: registration, heartbeats, states, what they hold, and which jobs they refuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.database import event_kinds
from strata.database.transaction import Database, Transaction
from strata.fleet.core.amounts import Taken
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import JobStatus
from strata.fleet.records import HostJob, HostRow
from strata.fleet.store.queue import record
from strata.fleet.store.rows import LEASED, decode_taken, encode

_COLUMNS: Final = (
    "id, name, capability, registered_at, state, state_reason, coalesce(seen, 0), agent_version, pool, labels,"
    " ephemeral"
)
_SEEN: Final = 6
"""The place in `_COLUMNS` of what changes with every heartbeat."""
_SELECT: Final = f"SELECT {_COLUMNS} FROM host LEFT JOIN host_beat ON host_id = id"
_REGISTER: Final = (
    "INSERT INTO host"
    " (id, name, capability, registered_at, state, state_reason, agent_version, pool, labels, ephemeral)"
    " VALUES (:id, :name, :capability, :registered_at, 'active', '', :agent_version, :pool, :labels, :ephemeral)"
    " ON CONFLICT (id) DO UPDATE SET name = excluded.name, capability = excluded.capability,"
    " agent_version = excluded.agent_version, pool = excluded.pool, labels = excluded.labels,"
    " state = CASE host.state WHEN 'left' THEN 'active' ELSE host.state END"
)
_FORGET_REFUSALS: Final = (
    "DELETE FROM job_refusal WHERE host_id = :host AND seq IN"
    " (SELECT seq FROM job_refusal WHERE host_id = :host FOR UPDATE SKIP LOCKED)"
)
"""What is locked is being deleted already, by the end of its job, a requeue or a plan."""
_HEARTBEATS: Final = (
    "WITH w (id, at) AS (VALUES (:id::text, :at::float8))"
    " INSERT INTO host_beat (host_id, seen) SELECT w.id, w.at FROM w JOIN host ON host.id = w.id WHERE true"
    " ORDER BY w.id ON CONFLICT (host_id) DO UPDATE SET seen = greatest(host_beat.seen, excluded.seen)"
)
_LOSE: Final = (
    "INSERT INTO host_lost (host_id, since)"
    " SELECT b.host_id, b.seen FROM host_beat b JOIN host h ON h.id = b.host_id WHERE b.seen < :since"
    " AND h.state <> 'left' AND NOT h.ephemeral AND NOT EXISTS (SELECT 1 FROM host_lost l WHERE l.host_id = b.host_id)"
    " ON CONFLICT DO NOTHING RETURNING host_id, since"
)
_HELD: Final = f"SELECT a.host_id, a.taken FROM lease l CROSS JOIN attempt a WHERE {LEASED}"
_ON_HOST: Final = {"sqlite": "a.host_id", "postgres": "a.host_id || ''"}
"""The expression that the index of each database has."""
_JOBS_ON: Final = (
    "SELECT a.host_id, j.id, j.label, j.owner, j.status, a.epoch, a.claimed_at, a.taken,"
    " EXISTS (SELECT 1 FROM server s WHERE s.job_id = j.id AND s.epoch = a.epoch)"
    " FROM attempt a JOIN lease l ON l.job_id = a.job_id AND l.epoch = a.epoch AND NOT l.expired"
    " JOIN job j ON j.id = a.job_id WHERE {host} = ANY(:hosts) AND a.ended_at IS NULL"
    " ORDER BY a.host_id, a.claimed_at, j.id"
)
_INFRA_JOBS: Final = (
    "SELECT DISTINCT job_id FROM attempt WHERE host_id = :host AND cause = 'infra' AND ended_at >"
    " coalesce((SELECT max(ended_at) FROM attempt WHERE host_id = :host AND outcome = 'completed'), 0)"
)
_decode_capability: Final = lru_cache(16_384)(msgspec.json.Decoder(Capability).decode)
"""Hosts are read again and again, and what they are rarely changes."""
_decode_labels: Final = msgspec.json.Decoder(dict[str, str]).decode


class HostTable:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[Sequence[Any], HostRow]] = {}

    async def register(self, host: HostRow, actor: str) -> HostRow:
        async def register(tx: Transaction) -> HostRow:
            before = await tx.rows("SELECT capability, state FROM host WHERE id = :id FOR UPDATE", {"id": host.id})
            values = {
                "id": host.id,
                "name": host.name,
                "capability": encode(host.capability),
                "registered_at": host.registered_at_s,
                "agent_version": host.agent_version,
                "pool": host.pool,
                "labels": encode(dict(host.labels)),
                "ephemeral": host.ephemeral,
            }
            await tx.execute(_REGISTER, values)
            await tx.execute(_FORGET_REFUSALS, {"host": host.id})
            await _record_heartbeats(tx, {host.id: host.registered_at_s})
            if not before or before[0][0] != values["capability"] or before[0][1] == "left":
                await record(tx, host.registered_at_s, actor, event_kinds.HOST_REGISTERED, host.id, name=host.name)
            return await _read_host(tx, host.id)

        return await self._database.run(register)

    async def all(self) -> Sequence[HostRow]:
        """All hosts are read every few seconds and rarely change: a row that is as it was is not decoded again."""
        # Sorted here: the database would sort the rows with all they have on disk.
        self._known = {row[0]: (row, self._decode(row)) for row in await self._database.rows(_SELECT)}
        return sorted((host for _, host in self._known.values()), key=lambda host: (host.name, host.id))

    def _decode(self, row: Sequence[Any]) -> HostRow:
        before, host = self._known.get(row[0], ((), None))
        if host is not None and before == row:
            return host
        if host is None or before[:_SEEN] != row[:_SEEN] or before[_SEEN + 1 :] != row[_SEEN + 1 :]:
            return _decode_host(row)
        return msgspec.structs.replace(host, seen_at_s=row[_SEEN])

    async def find(self, text: str) -> Sequence[HostRow]:
        select = f"{_SELECT} WHERE id = :text OR name = :text ORDER BY name, id"
        return [_decode_host(row) for row in await self._database.rows(select, {"text": text})]

    async def set_state(self, host_id: str, state: str, reason: str, actor: str, now_s: float) -> HostRow:
        async def change(tx: Transaction) -> HostRow:
            update = "UPDATE host SET state = :state, state_reason = :reason WHERE id = :host AND state <> :state"
            if await tx.changed(update, {"state": state, "reason": reason, "host": host_id}):
                await record(tx, now_s, actor, event_kinds.HOST_STATE_SET[state], host_id, reason=reason)
            return await _read_host(tx, host_id)

        return await self._database.run(change)

    async def record_heartbeats(self, seen: Mapping[str, float]) -> None:
        await self._database.run(lambda tx: _record_heartbeats(tx, seen))

    async def record_lost(self, silent_since_s: float, now_s: float) -> int:
        async def lose(tx: Transaction) -> int:
            lost = await tx.rows(_LOSE, {"since": silent_since_s})
            for host_id, seen_at_s in lost:
                await record(tx, now_s, "hub", event_kinds.HOST_LOST, host_id, seen_at_s=seen_at_s)
            return len(lost)

        return await self._database.run(lose)

    async def held(self) -> Mapping[str, Sequence[Taken]]:
        decode = lru_cache(256)(decode_taken)
        held: dict[str, list[Taken]] = {}
        for host_id, taken in await self._database.rows(_HELD):
            held.setdefault(host_id, []).append(decode(taken))
        return held

    async def jobs_on(self, host_ids: Sequence[str]) -> Mapping[str, Sequence[HostJob]]:
        rows = await self._database.read(
            lambda tx: tx.rows(_JOBS_ON.format(host=_ON_HOST[tx.engine]), {"hosts": list(host_ids)})
        )
        held: dict[str, list[HostJob]] = {}
        for host_id, job_id, label, owner, status, epoch, claimed_at_s, taken, serving in rows:
            job = HostJob(
                job_id, label, owner, JobStatus(status), epoch, claimed_at_s, decode_taken(taken), bool(serving)
            )
            held.setdefault(host_id, []).append(job)
        return held

    async def refusing(self) -> Collection[str]:
        return {host_id for (host_id,) in await self._database.rows("SELECT DISTINCT host_id FROM job_refusal")}

    async def infra_jobs(self, host_id: str) -> Sequence[str]:
        return [job_id for (job_id,) in await self._database.rows(_INFRA_JOBS, {"host": host_id})]


async def _read_host(tx: Transaction, host_id: str) -> HostRow:
    rows = await tx.rows(f"{_SELECT} WHERE id = :host", {"host": host_id})
    if not rows:
        raise StrataError(Code.NOT_FOUND, f"there is no host {host_id!r}")
    return _decode_host(rows[0])


async def _record_heartbeats(tx: Transaction, seen: Mapping[str, float]) -> None:
    await tx.many(_HEARTBEATS, [{"id": host_id, "at": at_s} for host_id, at_s in sorted(seen.items())])
    # The table is empty as a rule.
    returned = await tx.rows(
        "DELETE FROM host_lost WHERE host_id = ANY(:hosts) RETURNING host_id, since", {"hosts": list(seen)}
    )
    for host_id, since_s in returned:
        at_s = seen[host_id]
        await record(tx, at_s, "hub", event_kinds.HOST_RETURNED, host_id, silent_s=at_s - since_s)


def _decode_host(row: Sequence[Any]) -> HostRow:
    id_, name, capability, registered, state, reason, seen, version, pool, labels, ephemeral = row
    decoded = _decode_capability(bytes(capability))
    return HostRow(
        id_, name, decoded, registered, state, reason, seen, version, pool, _decode_labels(labels), bool(ephemeral)
    )
