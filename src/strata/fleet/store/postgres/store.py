"""The fleet in PostgreSQL: for many hubs. Short transactions on locked rows; nothing is decided on what may change."""

from __future__ import annotations

from functools import partial
from typing import Final

from strata.database.postgres import Connections
from strata.database.transaction import PostgresDatabase
from strata.fleet.store.lists import NEWEST_MATCHES, JobIndexes
from strata.fleet.store.postgres import tables
from strata.fleet.store.postgres.claims import claim_jobs
from strata.fleet.store.store import FleetStore

# In one text: to lower its case costs more than to put it together.
_SEARCHED_TEXT: Final = r"lower(label || E'\n' || owner || E'\n' || project || E'\n' || model || E'\n' || sweep)"


class PostgresStore(FleetStore):
    """On connections to a database that has the components `event` and `fleet`."""

    def __init__(self, connections: Connections, *, newest_matches: int = NEWEST_MATCHES) -> None:
        super().__init__(
            PostgresDatabase(connections),
            partial(claim_jobs, connections),
            JobIndexes(searched_text=_SEARCHED_TEXT, may_serve=tables.MAY_SERVE, newest_matches=newest_matches),
        )
        self._connections = connections

    async def close(self) -> None:
        await self._connections.close()
