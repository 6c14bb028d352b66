"""SQL of sweeps: declared sweeps with their changes, and the claimed number and point of each trial.

What was tried is in the jobs, not here. A number is claimed before its job is queued, so two hubs that propose other
points for it queue one and the same job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from strata.base.digest import sha256_hex
from strata.database.events import EventRecord, record
from strata.database.migrations import Component
from strata.database.transaction import Database, Transaction
from strata.fleet.core.search import SearchSweep
from strata.fleet.core.sweep_points import Point
from strata.fleet.records import StoredSweep

POSTGRES: Final = Component(
    "sweep",
    2,
    (
        """
        CREATE TABLE sweep (
          project text NOT NULL, name text NOT NULL, body bytea NOT NULL, PRIMARY KEY (project, name)
        );
        CREATE TABLE sweep_trial (
          project text NOT NULL, digest text NOT NULL, number bigint NOT NULL, point bytea NOT NULL,
          PRIMARY KEY (project, digest, number)
        );
        """,
    ),
)
SQLITE: Final = POSTGRES.in_sqlite()
_SELECT: Final = "SELECT project, name, body FROM sweep"
_ORDER: Final = "ORDER BY project, name"
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(StoredSweep).decode
_decode_point: Final = msgspec.json.Decoder(Point).decode


@dataclass(frozen=True)
class SweepChanges:
    """Sweeps as they are from now on, and the events of that."""

    puts: Sequence[StoredSweep] = ()
    events: Sequence[EventRecord] = ()


Decide = Callable[[Mapping[str, StoredSweep]], SweepChanges]
"""Decides from the sweeps of a project, by name, what changes in them."""


def _digest(sweep: SearchSweep) -> str:
    """A sweep that is declared anew begins anew."""
    return sha256_hex(_encode(sweep))


def _row(row: Sequence[Any]) -> StoredSweep:
    project, name, body = row
    return msgspec.structs.replace(_decode(body), project=project, name=name)


def _outdated(there: Mapping[str, StoredSweep], puts: Sequence[StoredSweep]) -> list[str]:
    """The digests of the searches that are declared anew."""
    before = [(there[put.name].sweep, put.sweep) for put in puts if put.name in there]
    return [_digest(old) for old, new in before if old is not None and old != new]


class SweepStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def sweeps(self) -> Sequence[StoredSweep]:
        return list(map(_row, await self._database.rows(f"{_SELECT} {_ORDER}")))

    async def change(self, project: str, decide: Decide) -> None:
        """Change what `decide` says in one transaction; every other sweep stays as it is."""

        async def change(tx: Transaction) -> None:
            # Who decides about a name that is not there yet locks no row.
            await tx.lock(f"sweep.project {project}")
            rows = await tx.rows(f"{_SELECT} WHERE project = :project", {"project": project})
            there = {row.name: row for row in map(_row, rows)}
            changes = decide(there)
            await tx.many(
                "INSERT INTO sweep VALUES (:project::text, :name::text, :body::bytea)"
                " ON CONFLICT (project, name) DO UPDATE SET body = excluded.body",
                [{"project": project, "name": each.name, "body": _encode(each)} for each in changes.puts],
            )
            delete = "DELETE FROM sweep_trial WHERE project = :project AND digest = ANY(:digests)"
            await tx.execute(delete, {"project": project, "digests": _outdated(there, changes.puts)})
            await record(tx, changes.events)

        await self._database.run(change)

    async def claim_trial(self, sweep: SearchSweep, number: int, point: Point) -> Point:
        """The point of the trial with this number: this one, or the one with which it was claimed before."""
        values = {"project": sweep.base.project, "digest": _digest(sweep), "number": number, "point": _encode(point)}

        async def claim(tx: Transaction) -> bytes:
            insert = "INSERT INTO sweep_trial VALUES (:project, :digest, :number, :point) ON CONFLICT DO NOTHING"
            await tx.execute(insert, values)
            # A statement of its own sees what another transaction committed while the first one waited for it.
            select = "SELECT point FROM sweep_trial WHERE (project, digest, number) = (:project, :digest, :number)"
            ((claimed,),) = await tx.rows(select, values)
            return bytes(claimed)

        return _decode_point(await self._database.run(claim))

    async def record(self, event: EventRecord) -> None:
        await self._database.run(lambda tx: record(tx, [event]))
