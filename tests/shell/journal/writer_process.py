"""A process that leads a stream and counts as fast as it can, printing each number once it is durable.

    python writer_process.py DATABASE HOLDER LEASE_S [FAILPOINT SKIP]

With a failpoint it kills itself there. The crash tests start it, read what it printed, and then read the journal.
"""

from __future__ import annotations

import asyncio
import sys

from strata.base.clock import SystemClock
from strata.base.failpoint import arm, kill
from strata.journal.open import open_journal
from strata.journal.replica import Replica
from tests.shell.journal.tally import Tally

WIDTH = 8
SNAPSHOT_EVERY = 40
ENOUGH = 100_000


async def count(replica: Replica[int, None, int]) -> None:
    while replica.state < ENOUGH:
        number = await replica.submit(None)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


async def main(database: str, holder: str, lease_s: float) -> None:
    clock = SystemClock()
    async with await open_journal(database, clock) as journal:
        replica: Replica[int, None, int] = Replica(journal, "tally", Tally(), clock)
        await replica.stand_by(holder, lease_s)
        await asyncio.gather(
            *(count(replica) for _ in range(WIDTH)), replica.lead_until_replaced(lease_s, snapshot_every=SNAPSHOT_EVERY)
        )


if __name__ == "__main__":
    if len(sys.argv) > 4:
        arm(sys.argv[4], kill, skip=int(sys.argv[5]))
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
