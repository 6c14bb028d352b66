"""`strata`, but without one of its safeguards: `python -m soak.fleet_hub.ablation SAFEGUARD ARGUMENT…`.

A campaign that does not detect the missing safeguard would detect nothing.
"""

from __future__ import annotations

import itertools
import sqlite3
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from strata.cli.main import main
from strata.database import sqlite
from strata.fleet.core import lease_status
from strata.fleet.records import Claim, JobLease
from strata.fleet.service import claims
from strata.fleet.service import leases as lease_service
from strata.fleet.store import leases

PROGRAM: Final = (sys.executable, "-m", "soak.fleet_hub.ablation")
LATE_S: Final = 0.5
_submit: Final = claims.ClaimQueue.submit
_names: Final = itertools.count()


def _commits_late(self: Any, db: sqlite3.Connection, jobs: list[Any]) -> list[Any]:
    """A write is acknowledged before it is committed, together with the next ones."""
    if not db.in_transaction:
        db.execute("BEGIN IMMEDIATE")
        self.began_s = time.monotonic()
    done = [sqlite._run(db, job, alone=False) for job in jobs]
    if time.monotonic() - self.began_s > LATE_S:
        db.execute("COMMIT")
    return done


async def _claims_anew(self: Any, claim: Claim) -> Sequence[JobLease]:
    return await _submit(self, replace(claim, claim_id=f"{claim.claim_id}.{next(_names)}"))


def _any_epoch(status: Any, *, current: Any, claimed: Any, leased: bool) -> Any:
    del claimed
    return lease_status.lease_status(status, current=current, claimed=current, leased=leased)


async def _no_report(*_: Any) -> None:
    return None


SAFEGUARDS: Final[dict[str, tuple[Any, str, Any]]] = {
    "a hub that was blind takes nothing away": (lease_service, "may_expire_leases", lambda **_: True),
    "a claim that is repeated takes no more": (claims.ClaimQueue, "submit", _claims_anew),
    "a repeated report gets the same answer": (leases, "_previous_report", _no_report),
    "a write is committed before it is confirmed": (sqlite.SqliteThread, "_run_group", _commits_late),
    "a host that was replaced is refused": (leases, "lease_status", _any_epoch),
}


if __name__ == "__main__":
    setattr(*SAFEGUARDS[sys.argv[1]])
    sys.argv[:] = ["strata", *sys.argv[2:]]
    main()
