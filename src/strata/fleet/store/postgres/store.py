"""Builds the fleet's store on PostgreSQL, for many hubs: short transactions on locked rows."""

from __future__ import annotations

from functools import partial
from typing import Final

from strata.database.postgres import Connections
from strata.database.transaction import PostgresDatabase
from strata.fleet.store.lists import NEWEST_MATCHES, SearchIndexes
from strata.fleet.store.postgres import tables
from strata.fleet.store.postgres.claims import claim_jobs
from strata.fleet.store.store import FleetStore, build_store

# In one text: to lower its case costs more than to put it together.
_SEARCHED_TEXT: Final = r"lower(label || E'\n' || owner || E'\n' || project || E'\n' || model || E'\n' || sweep)"


def build_postgres_store(connections: Connections, *, newest_matches: int = NEWEST_MATCHES) -> FleetStore:
    """Keeps the fleet in a database that has the components `event` and `fleet`."""
    indexes = SearchIndexes(searched_text=_SEARCHED_TEXT, may_serve=tables.MAY_SERVE, newest_matches=newest_matches)
    return build_store(PostgresDatabase(connections), partial(claim_jobs, connections), indexes, connections.close)
