"""Training servers that are jobs: where they serve, when they were last used, and which idle or outdated ones are
chosen to end.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.fleet.core.lease import ASLEEP
from strata.fleet.records import AttemptKey, ServerRow, YieldRequest
from strata.fleet.service.hosts import HostService
from strata.fleet.service.state import FleetState


class ServerService:
    def __init__(self, state: FleetState, hosts: HostService) -> None:
        self._state = state
        self._store = state.store.jobs
        self._hosts = hosts
        self._yields: dict[tuple[str, int], YieldRequest] = {}
        """Attempts that are to end in order, by job and epoch: a later attempt of the same job is not to end."""
        self._used_at_s: dict[tuple[str, int], float] = {}
        """When requests used the servers, by job and epoch: later than the store has it while that is written."""

    async def publish(self, attempt: AttemptKey, address: str, models: Sequence[str]) -> None:
        self._hosts.touch(attempt.host_id)
        await self._store.publish_server(attempt, address, models, self._state.now_s())
        self._state.changes.notify()

    async def touch(self, server: ServerRow) -> None:
        """Write down that a request uses the server. One that was chosen to sleep stays awake, unless its host has
        learned it already."""
        attempt = server.job.id, server.epoch
        if (wanted := self._yields.get(attempt)) is not None and wanted.cause == "cancelled":
            del self._yields[attempt]
        now_s = self._used_at_s[attempt] = self._state.now_s()
        await self._store.touch_server(server.job.id, now_s)

    async def choose_to_end(self) -> None:
        """Servers that sleep because no request has used them for their `idle_s`, and those whose host is drained.

        Their hosts learn it with the next heartbeat, save the state of the server, and report its end.
        `JobService.wake_server` queues one again that sleeps; another host takes one that was drained.
        """
        servers = [server for server in await self._store.servers() if server.serving]
        if not servers:
            self._used_at_s, self._yields = {}, {}
            return
        roster = await self._state.refresh_roster()
        now_s = self._state.now_s()
        attempts = {(server.job.id, server.epoch) for server in servers}
        self._used_at_s = {each: used_at_s for each, used_at_s in self._used_at_s.items() if each in attempts}
        drained = {host.id: host.name for host in roster.hosts() if host.state == "draining"}
        yields: dict[tuple[str, int], YieldRequest] = {}
        for server in servers:
            idle_s, host_id = server.job.spec.idle_s, server.job.host_id
            attempt = server.job.id, server.epoch
            if host_id in drained:
                yields[attempt] = YieldRequest("preempted", f"the host {drained[host_id]} is drained")
            elif idle_s and now_s - max(server.used_at_s, self._used_at_s.get(attempt, 0.0)) > idle_s:
                reason = f"{ASLEEP}no request for {idle_s:g} s; the next one wakes it"
                yields[attempt] = YieldRequest("cancelled", reason)
        self._yields = yields

    def yield_request(self, job_id: str, epoch: int) -> YieldRequest | None:
        """Returns whether this attempt is to end, for the reply to a heartbeat."""
        return self._yields.get((job_id, epoch))
