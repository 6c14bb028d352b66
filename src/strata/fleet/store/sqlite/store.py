"""Builds the fleet's store on the hub's SQLite file: one writer, so a transaction is a function that nothing can
interleave with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from strata.database.sqlite import SqliteThread
from strata.database.transaction import SqliteDatabase
from strata.fleet.core.fair_share import OwnerShares
from strata.fleet.records import Claim, JobLease
from strata.fleet.store.lists import SearchIndexes
from strata.fleet.store.sqlite import tables
from strata.fleet.store.sqlite.claims import claim_jobs
from strata.fleet.store.store import FleetStore, build_store


def build_sqlite_store(thread: SqliteThread) -> FleetStore:
    """Keeps the fleet on a thread that has the components `event` and `fleet`."""
    indexes = SearchIndexes(searched_text=tables.SEARCHED_TEXT, may_serve=tables.MAY_SERVE)
    return build_store(SqliteDatabase(thread), partial(_claim_jobs, thread), indexes, thread.close)


async def _claim_jobs(
    thread: SqliteThread, claims: Sequence[Claim], lease_s: float, now_s: float, shares: OwnerShares | None
) -> Sequence[Sequence[JobLease]]:
    return await thread.write(lambda db: claim_jobs(db, claims, lease_s, now_s, shares))
