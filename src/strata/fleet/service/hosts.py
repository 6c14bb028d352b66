"""Hosts at the hub: registration, heartbeats and presence (online, suspect, offline), quarantine, jobs that no host can
serve, and free capacity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.core.amounts import Capacity
from strata.fleet.core.fair_share import FleetTotals
from strata.fleet.core.host_status import AgentSightings, HostStatus, Presence, has_vanished, host_status
from strata.fleet.core.lease import FORGET_S, SUSPECT_S, quarantine
from strata.fleet.core.plan import HostPolicy
from strata.fleet.records import HostRow
from strata.fleet.service.state import FleetState

FAIL_BATCH: Final = 500
"""How many unservable jobs are failed in one transaction."""
_log = log.get(__name__)


class HostView(NamedTuple):
    row: HostRow
    seen_ago_s: float
    quiet: str
    """The quiet hours it is in; empty when it is not."""
    presence: Presence
    status: HostStatus


class HostService:
    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._store = state.store
        self._agents: dict[str, AgentSightings] = {}
        """The agents that sent heartbeats to this hub, by host."""
        self._heartbeats: dict[str, float] = {}

    async def register(self, host: HostRow, actor: str) -> HostRow:
        registered = await self._store.hosts.register(host, actor)
        failpoint("fleet.register.committed")
        self._state.roster.invalidate()
        self._state.changes.notify()
        return registered

    # Heartbeats

    def touch(self, host_id: str) -> None:
        """Record a heartbeat: kept in memory, and written with all others once a second."""
        self._heartbeats[host_id] = self._state.now_s()

    async def flush_heartbeats(self) -> None:
        seen, self._heartbeats = self._heartbeats, {}
        if not seen:
            return
        try:
            await self._store.hosts.record_heartbeats(seen)
        except StrataError:
            self._heartbeats = seen | self._heartbeats
            raise

    async def observe_agent(self, host_id: str, incarnation: str) -> None:
        """Quarantine a host for which two agents send heartbeats at once, as after a copy of its disk."""
        known = self._agents.get(host_id)
        seen = self._agents[host_id] = known.see(incarnation) if known else AgentSightings(incarnation)
        if not seen.clone_reason:
            return
        del self._agents[host_id]
        roster = await self._state.refresh_roster()
        if any(host.id == host_id and host.state == "active" for host in roster.hosts()):
            _log.warning("host_cloned", host=host_id, reason=seen.clone_reason)
            await self.set_state(host_id, "quarantined", seen.clone_reason, "hub")

    # States, and the jobs that no host is left for

    async def set_state(self, host_id: str, state: str, reason: str, actor: str) -> HostRow:
        row = await self._store.hosts.set_state(host_id, state, reason, actor, self._state.now_s())
        self._state.roster.invalidate()
        if state == "left":
            await self.fail_unservable_jobs()
        self._state.changes.notify()
        return row

    async def quarantine_if_faulty(self, host_id: str) -> None:
        """Quarantine a host whose infra failures are its own and not those of one job."""
        roster = await self._state.refresh_roster()
        hosts = {host.id: host for host in roster.hosts()}
        if host_id not in hosts:
            return
        others = [roster.serves(host) for host in self._taking_jobs() if host.id != host_id]
        troubled = await self._store.hosts.infra_jobs(host_id)
        unfinished = await self._store.plans.unfinished_classes()
        serves = [class_id for class_id in roster.serves(hosts[host_id]) if class_id in unfinished]
        verdict = quarantine(troubled, serves=serves, others_serve=others)
        if verdict.quarantined:
            await self.set_state(host_id, "quarantined", verdict.reason, "hub")

    async def fail_unservable_jobs(self) -> None:
        """Fail pending jobs for which every eligible host is excluded, because none could set them up."""
        refused = await self._store.leases.refused_jobs()
        serving = await self.eligible(each.class_id for each in refused) if refused else {}
        failing = [each for each in refused if each.is_unservable(serving[each.class_id])]
        for start in range(0, len(failing), FAIL_BATCH):
            eligible = {each.job_id: serving[each.class_id] for each in failing[start : start + FAIL_BATCH]}
            await self._store.leases.fail_refused(eligible, self._state.now_s())

    async def eligible(self, classes: Iterable[int]) -> Mapping[int, Sequence[str]]:
        """The hosts that are eligible for these classes by capability and policy, also those that are offline now."""
        self._state.roster.invalidate()
        roster = await self._state.refresh_roster()
        hosts = [host for host in roster.hosts() if host.state != "left"]
        return {id_: [host.id for host in hosts if id_ in roster.serves(host)] for id_ in set(classes)}

    async def unserved_classes(self, classes: Sequence[int]) -> Collection[int]:
        """Those that no host which has not left is eligible for."""
        left = set(classes)
        roster = await self._state.refresh_roster()
        for host in roster.hosts():
            if left and host.state != "left":
                left -= roster.serves(host).keys()
        return left

    async def stranded_by(self, host_id: str) -> int:
        """Returns how many jobs of the queue no other host that takes jobs is eligible for."""
        roster = await self._state.refresh_roster()
        own = [roster.serves(host) for host in roster.hosts() if host.id == host_id]
        others = [roster.serves(host) for host in self._taking_jobs() if host.id != host_id]
        stranded = set[int]().union(*own).difference(*others)
        return sum(each.jobs for each in await self._store.statistics.waiting_classes() if each.class_id in stranded)

    def _taking_jobs(self) -> list[HostRow]:
        roster, now_s = self._state.roster, self._state.now_s()
        return [host for host in roster.hosts() if host.state == "active" and roster.online(host, now_s)]

    # Hosts as people see them

    async def all(self) -> Sequence[HostRow]:
        """All hosts that ever registered, but for ephemeral ones that have vanished."""
        await self.flush_heartbeats()
        now_s = self._state.now_s()
        return [host for host in await self._store.hosts.all() if not self._vanished(host, now_s - host.seen_at_s)]

    async def silent(self) -> Sequence[HostRow]:
        """The ephemeral hosts that have been silent for so long that they are to leave."""
        await self.flush_heartbeats()
        silent_since_s = self._state.now_s() - FORGET_S
        return [
            host
            for host in await self._store.hosts.all()
            if host.ephemeral and host.state != "left" and host.seen_at_s < silent_since_s
        ]

    def _vanished(self, host: HostRow, silent_s: float) -> bool:
        return has_vanished(self.presence(silent_s), host.state, ephemeral=host.ephemeral)

    async def find(self, text: str) -> Sequence[HostRow]:
        """The hosts with this id or name."""
        await self.flush_heartbeats()
        return await self._store.hosts.find(text)

    async def names(self, ids: Collection[str]) -> Mapping[str, str]:
        """The names of these hosts, as this hub knows them without reading each row."""
        return (await self._state.refresh_roster()).names(ids)

    async def views(self) -> Sequence[HostView]:
        """The hosts of `all` as this hub knows them without reading each row again, at most `roster.FRESH_S` old, by
        name."""
        roster = await self._state.refresh_roster()
        now_s, heartbeats = self._state.now_s(), self._heartbeats
        views = []
        for host in roster.hosts():
            silent_s = now_s - host.seen_at_s
            if host.id in heartbeats:
                silent_s = min(silent_s, now_s - heartbeats[host.id])
            if self._vanished(host, silent_s):
                continue
            quiet, presence = roster.quiet(host, now_s), self.presence(silent_s)
            status = host_status(host.state, presence, quiet=quiet != "")
            views.append(HostView(host, max(0.0, silent_s), quiet, presence, status))
        return views

    def presence(self, silent_s: float) -> Presence:
        """Returns the presence of a host whose last heartbeat is so long ago."""
        if silent_s <= SUSPECT_S:
            return "online"
        return "offline" if silent_s > self._state.lease_s else "suspect"

    @property
    def totals(self) -> FleetTotals:
        """Returns what the hosts that take jobs have together."""
        return self._state.roster.totals

    async def capacity(self, host_id: str) -> Capacity:
        """Returns what the host has for jobs, by its capability and its policy. NOT_FOUND if it never registered."""
        roster = await self._state.refresh_roster()
        for host in roster.hosts():
            if host.id == host_id:
                return roster.profile(host).capacity
        raise StrataError(Code.NOT_FOUND, f"there is no host {host_id!r}")

    async def policy(self, host: HostRow) -> tuple[HostPolicy | None, str]:
        """The policy of a host, if it has one, and the quiet hours it is in."""
        roster = await self._state.refresh_roster()
        return (await self._store.plans.policies()).get(host.name), roster.quiet(host, self._state.now_s())
