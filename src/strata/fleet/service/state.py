"""What all parts of one hub's fleet share: settings (lease term, wait before a reservation, preemption), clock, roster
and the notice of changes.
"""

from __future__ import annotations

import msgspec

from strata.base.clock import Clock
from strata.base.notify import Broadcast
from strata.fleet.core.lease import LEASE_S
from strata.fleet.core.reservation import RESERVE_AFTER_S, PreemptPolicy
from strata.fleet.ports import Store
from strata.fleet.service.roster import Roster


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stale_after_s: float = LEASE_S
    """A lease that was not renewed for so long runs out, and another host may claim the job."""
    reserve_after_s: float = RESERVE_AFTER_S
    """A job that has waited for so long lets a host drain for it."""
    preempt: PreemptPolicy = "lower-priority"


class FleetState:
    """Time here is the wall clock at the start plus the monotonic time since: setting the wall clock while the hub runs
    expires no lease.
    """

    def __init__(self, store: Store, clock: Clock, settings: FleetSettings) -> None:
        self.store = store
        self.settings = settings
        self.lease_s = settings.stale_after_s
        self.roster = Roster(store.plans, store.hosts, self.lease_s)
        self.changes = Broadcast()
        """Claims that wait are tried again when jobs, hosts or leases change."""
        self._clock = clock
        self._wall_ahead_s = clock.wall_s() - clock.monotonic_s()

    def now_s(self) -> float:
        return self._wall_ahead_s + self._clock.monotonic_s()

    async def refresh_roster(self) -> Roster:
        await self.roster.refresh(self.now_s())
        return self.roster
