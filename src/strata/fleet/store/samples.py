"""SQL of samples of hosts: writing, rolling up to means over a step, and reading a span."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from strata.database.transaction import Database
from strata.fleet.core.samples import LATE_S, RESOLUTIONS, SamplePoint, average
from strata.fleet.store.rows import encode

_WRITE: Final = (
    "WITH w (step, host, at, body) AS (VALUES (:step::integer, :host::text, :at::float8, :body::bytea))"
    " INSERT INTO host_sample (step, host_id, at, body) SELECT step, host, at, body FROM w"
    " WHERE host = 'fleet' OR EXISTS (SELECT 1 FROM host WHERE id = w.host)"
    " ON CONFLICT (host_id, step, at) DO UPDATE SET body = excluded.body"
)
_NOT_ROLLED_UP: Final = (
    "SELECT host_id, at, body FROM host_sample WHERE step = :source AND at < :until"
    " AND at >= (SELECT coalesce(max(at) + :step, 0) FROM host_sample WHERE step = :step)"
)
_decode_values: Final = msgspec.json.Decoder(dict[str, float]).decode


class SampleTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, points: Sequence[SamplePoint]) -> None:
        await self._write(0, points)

    async def roll_up(self, now_s: float) -> None:
        for step_s, _, source_s in RESOLUTIONS[1:]:
            until_s = (now_s - LATE_S) // step_s * step_s
            rows = await self._database.rows(_NOT_ROLLED_UP, {"source": source_s, "step": step_s, "until": until_s})
            await self._write(step_s, average(_decode_points(rows), step_s))
        for step_s, keep_s, _ in RESOLUTIONS:
            delete = "DELETE FROM host_sample WHERE step = :step AND at < :before"
            await self._database.changed(delete, {"step": step_s, "before": now_s - keep_s})

    async def read(self, host_id: str, step_s: int, since_s: float) -> Sequence[SamplePoint]:
        select = (
            "SELECT host_id, at, body FROM host_sample WHERE host_id = :host AND step = :step AND at >= :since"
            " ORDER BY at"
        )
        return _decode_points(await self._database.rows(select, {"host": host_id, "step": step_s, "since": since_s}))

    async def _write(self, step_s: int, points: Sequence[SamplePoint]) -> None:
        rows = [
            {"step": step_s, "host": point.host_id, "at": point.at_s, "body": encode(point.values)} for point in points
        ]
        if rows:
            await self._database.run(lambda tx: tx.many(_WRITE, rows))


def _decode_points(rows: Iterable[Sequence[Any]]) -> list[SamplePoint]:
    return [SamplePoint(host_id, at_s, _decode_values(body)) for host_id, at_s, body in rows]
