"""Caches which requirement classes each host is eligible for (2 s fresh), what a host may claim, and for how long it
leaves a job to a host that fits better (3 s).

Classes are only ever added, so the hub fetches the new ones. Policies and hosts are read again when this hub changed
them, and every few seconds besides, because another hub on the same database may have changed them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from strata.fleet.core.amounts import Amounts, Capacity, Room, Taken, job_amounts
from strata.fleet.core.capability import Profile, in_quiet_hours, minimum_agent, parse_agent_version, profile
from strata.fleet.core.fair_share import FleetTotals, add_up
from strata.fleet.core.jobspec import HostSpec
from strata.fleet.core.lease import SUSPECT_S
from strata.fleet.core.match import eligible_classes, holds_back, is_better_fit, score, shape
from strata.fleet.core.requirement import RequirementClass
from strata.fleet.core.reservation import HostOffer
from strata.fleet.core.why import HostState
from strata.fleet.ports import HostStore, PlanStore
from strata.fleet.records import HostRow

Shape = tuple[tuple[float, ...], float]
FRESH_S: Final = 2.0
BEST_FIT_S: Final = 3.0
"""How long a job is left to a host that it fits better. That host waits, so it takes the job at once or never."""
BEST_FIT_HOSTS: Final = 8
"""Hosts of one shape that a claim is compared with."""
BEST_FIT_LOOKED_AT: Final = 256
"""Hosts of one shape among which those are chosen."""
CLASSES_AGAIN: Final = 256
"""How many ids below the newest class are looked for again: a class may be committed after one with a higher id."""


@dataclass(frozen=True, slots=True)
class ClaimOptions:
    """The classes from which a host may claim jobs now."""

    classes: Mapping[int, Amounts]
    """Ids of classes and what a job of each takes."""
    capacity: Capacity
    held_back: Mapping[int, float]
    refusing: bool = False
    """The host is excluded for some jobs of these classes."""


class _KnownProfile(NamedTuple):
    host: HostRow
    policy: HostSpec | None
    profile: Profile
    capacity: Capacity

    def follows_from(self, host: HostRow, policy: HostSpec | None) -> bool:
        # Rows with the same content share one capability, so the first comparison is that of two references.
        same = self.host.capability is host.capability or self.host.capability == host.capability
        ours, theirs = self.host, host
        return same and (ours.name, ours.pool, ours.labels, self.policy) == (
            theirs.name,
            theirs.pool,
            theirs.labels,
            policy,
        )


class Roster:
    def __init__(
        self,
        plans: PlanStore,
        hosts: HostStore,
        lease_s: float,
        minimum_agent: Callable[[RequirementClass], tuple[int, int]] = minimum_agent,
    ) -> None:
        self._plans = plans
        self._host_store = hosts
        self._minimum_agent = minimum_agent
        self._online_s = max(SUSPECT_S, lease_s)
        self._classes: dict[int, RequirementClass] = {}
        self._with_preferences: dict[int, RequirementClass] = {}
        self._hosts: dict[str, HostRow] = {}
        self._policies: Mapping[str, HostSpec] = {}
        self._refusing: Collection[str] = ()
        self._served: dict[str, tuple[Profile, int, str, Capacity, Mapping[int, Amounts], Mapping[int, Amounts]]] = {}
        self._better: dict[tuple[Shape, Shape], tuple[int, frozenset[int]]] = {}
        """How many classes were known, and which of them fit the first of two shapes better."""
        self._profiles: dict[str, _KnownProfile] = {}
        self.totals = FleetTotals()
        """What the hosts that take jobs have together."""
        self._read_at_s = float("-inf")
        self._invalidations = 0
        self._reading = asyncio.Lock()

    def invalidate(self) -> None:
        """Read hosts, policies and classes again at the next refresh; a read in progress does not count."""
        self._invalidations += 1
        self._read_at_s = float("-inf")

    async def refresh(self, now_s: float) -> None:
        if 0 <= now_s - self._read_at_s < FRESH_S:
            return
        # One reader at a time: the claims of all hosts find the cache expired at the same moment.
        async with self._reading:
            if not 0 <= now_s - self._read_at_s < FRESH_S:
                await self._read(now_s)

    async def _read(self, now_s: float) -> None:
        invalidations = self._invalidations
        for row in await self._plans.classes(self._classes_read_until()):
            self._classes[row.id] = row.requirement
            if row.requirement.needs.prefer_wait_s:
                self._with_preferences[row.id] = row.requirement
        self._policies = {host: policy.spec for host, policy in (await self._plans.policies()).items()}
        self._refusing = await self._host_store.refusing()
        hosts = await self._host_store.all()
        self._hosts = {host.id: host for host in hosts}
        self._profiles = {host_id: known for host_id, known in self._profiles.items() if host_id in self._hosts}
        self._served = {host_id: served for host_id, served in self._served.items() if host_id in self._hosts}
        self.totals = add_up(
            self._known_profile(host).capacity for host in self._hosts.values() if host.state == "active"
        )
        if invalidations == self._invalidations:
            self._read_at_s = now_s

    def _classes_read_until(self) -> int:
        """The id up to which every class is known, or is too old to appear any more."""
        newest = max(self._classes, default=0)
        recent = range(max(1, newest - CLASSES_AGAIN), newest)
        return next((id_ - 1 for id_ in recent if id_ not in self._classes), newest)

    def hosts(self) -> Sequence[HostRow]:
        return list(self._hosts.values())

    def names(self, ids: Collection[str]) -> Mapping[str, str]:
        return {id_: self._hosts[id_].name for id_ in ids if id_ in self._hosts}

    def profile(self, host: HostRow) -> Profile:
        return self._known_profile(host).profile

    def _known_profile(self, host: HostRow) -> _KnownProfile:
        """Computed anew only when what it follows from has changed: hosts are read again every few seconds."""
        policy = self._policies.get(host.name)
        known = self._profiles.get(host.id)
        if known is None or not known.follows_from(host, policy):
            own = profile(host.capability, policy or HostSpec(name=host.name), host.labels, host.pool)
            known = self._profiles[host.id] = _KnownProfile(host, policy, own, own.capacity)
        return known

    def requirement(self, class_id: int) -> RequirementClass:
        return self._classes[class_id]

    def serves(self, host: HostRow) -> Mapping[int, Amounts]:
        """The classes that this host is eligible for by capability, policy and version, with what a job takes."""
        return self._serving(host)[1]

    def _serving(self, host: HostRow) -> tuple[Capacity, Mapping[int, Amounts], Mapping[int, Amounts]]:
        """Its capacity, the classes, and those of them that a claim may name: jobs of gangs are reserved."""
        own, known = self.profile(host), len(self._classes)
        cached = self._served.get(host.id)
        # The profile itself is compared: its key is a digest, which costs more than all the rest of a claim.
        if cached is None or cached[:3] != (own, known, host.agent_version):
            capacity, equal = self._known_profile(host).capacity, dict[Amounts, Amounts]()
            amounts = {
                id_: job_amounts(self._classes[id_].needs, capacity)
                for id_ in eligible_classes(own, self._classes)
                if not self.withholds(host, id_)
            }
            # Equal amounts are one object: `Room.fitting` relies on it.
            classes = {id_: equal.setdefault(each, each) for id_, each in amounts.items()}
            single = {id_: each for id_, each in classes.items() if not self._classes[id_].gang}
            cached = self._served[host.id] = (own, known, host.agent_version, capacity, classes, single)
        return cached[3:]

    def withholds(self, host: HostRow, class_id: int) -> bool:
        """Says whether the host's agent is too old for jobs of this class."""
        version = parse_agent_version(host.agent_version)
        return version is not None and version < self._minimum_agent(self._classes[class_id])

    def claim_options(
        self, host_id: str, now_s: float, better_fits: Mapping[int, Collection[str]] | None = None
    ) -> ClaimOptions:
        """`better_fits` are the classes that hosts which are free fit better, from `better_fits`."""
        host = self._hosts.get(host_id)
        if host is None or self.quiet(host, now_s):
            return ClaimOptions({}, Capacity(), {})
        capacity, _, classes = self._serving(host)
        held_back = dict(self._held_back(host, classes, now_s))
        # Whole seconds: claims with the same options share a statement.
        until_s = math.floor(now_s) - BEST_FIT_S
        for class_id in better_fits or ():
            held_back[class_id] = min(until_s, held_back.get(class_id, until_s))
        return ClaimOptions(classes, capacity, held_back, refusing=host_id in self._refusing)

    def better_fits(
        self, host_id: str, waiting: Mapping[Shape, Collection[str]], holding: Collection[str]
    ) -> Mapping[int, Collection[str]]:
        """The classes of jobs that fit some of the hosts which wait for jobs better than this one, with those hosts.

        `waiting` has the hosts by their shapes. Of each shape a few are compared, first those that hold no job.
        """
        host, found = self._hosts.get(host_id), dict[int, list[str]]()
        if host is None:
            return found
        own, (_, _, classes) = self.profile(host), self._serving(host)
        own_shape = shape(own)
        for other_shape, ids in waiting.items():
            first = next((self._hosts[id_] for id_ in ids if id_ in self._hosts), None)
            if first is None or other_shape == own_shape:
                continue
            smaller = self._fitting_better(self.profile(first), own) & classes.keys()
            if not smaller:
                continue
            likely_free = sorted(islice(ids, BEST_FIT_LOOKED_AT), key=holding.__contains__)
            for other in (self._hosts[id_] for id_ in likely_free[:BEST_FIT_HOSTS] if id_ in self._hosts):
                for class_id in smaller & self._serving(other)[2].keys():
                    wishes = self._classes[class_id]
                    if score(wishes, self.profile(other)) >= score(wishes, own):
                        found.setdefault(class_id, []).append(other.id)
        return found

    def _fitting_better(self, host: Profile, than: Profile) -> frozenset[int]:
        """The classes that fit hosts of this shape better than hosts of the other one."""
        key, known = (shape(host), shape(than)), len(self._classes)
        cached = self._better.get(key)
        if cached is None or cached[0] != known:
            ids = frozenset(id_ for id_, each in self._classes.items() if is_better_fit(each, host, than))
            cached = self._better[key] = (known, ids)
        return cached[1]

    def shape(self, host_id: str) -> Shape:
        host = self._hosts.get(host_id)
        return ((), 0.0) if host is None else shape(self.profile(host))

    def fits(self, host_id: str, class_id: int, held: Sequence[Taken]) -> bool:
        """Says whether a job of this class fits on a host beside what is held there."""
        capacity, _, classes = self._serving(self._hosts[host_id])
        return class_id in classes and Room(capacity, held).fits(classes[class_id])

    def _held_back(self, host: HostRow, classes: Collection[int], now_s: float) -> Mapping[int, float]:
        own = self.profile(host)
        return {
            id_: now_s - requirement.needs.prefer_wait_s
            for id_, requirement in self._with_preferences.items()
            if id_ in classes
            # As for a job that was queued just now; `held_back` lets those through that have waited long enough.
            and holds_back(requirement, own, waited_s=0.0, best_online=self._best_online(id_, requirement, now_s))
        }

    def offers(self, now_s: float) -> Mapping[str, HostOffer]:
        """The hosts that take jobs now, and what they would take."""
        offers = {}
        for host in self._hosts.values():
            if host.state == "active" and self.online(host, now_s) and not self.quiet(host, now_s):
                capacity, classes, _ = self._serving(host)
                offers[host.id] = HostOffer(capacity, classes, self._held_back(host, classes, now_s))
        return offers

    def class_ids(self) -> Collection[int]:
        return self._classes.keys()

    def quiet(self, host: HostRow, now_s: float) -> str:
        """The quiet hours this host is in; empty when it is not."""
        policy = self._policies.get(host.name)
        hours = None if policy is None else in_quiet_hours(policy.quiet_hours, host.capability, now_s)
        return "" if hours is None else str(hours)

    def online(self, host: HostRow, now_s: float) -> bool:
        return now_s - host.seen_at_s < self._online_s

    def state(self, host: HostRow, now_s: float, held: Sequence[Taken], class_id: int) -> HostState:
        """Returns the state of a host as it is now, for a job of this class."""
        own, outdated = self.profile(host), self.withholds(host, class_id)
        return HostState(
            profile=own,
            # Known of all classes but those that are withheld from it.
            eligible=None if outdated else class_id in self.serves(host),
            outdated=outdated,
            online=self.online(host, now_s) and host.state != "left",
            paused=host.state in ("paused", "draining"),
            quarantined=(host.state_reason or "quarantined") if host.state == "quarantined" else "",
            quiet=self.quiet(host, now_s),
            held=tuple(held),
        )

    def _best_online(self, class_id: int, requirement: RequirementClass, now_s: float) -> float:
        rivals = (
            score(requirement, self.profile(host))
            for host in self._hosts.values()
            if host.state == "active" and self.online(host, now_s) and class_id in self.serves(host)
        )
        return max(rivals, default=0.0)
