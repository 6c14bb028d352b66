"""Decides which hosts have ranks together, and as which generation: when one starts, when it is over (a host silent for
`hosts.lost_after_s`, a rank that died), on which mesh the hosts that are left go on, and when it grows again.

Pure: reports of hosts and times go in, orders come out. An order says what is to run now, so a message that is lost is
repaired by the next one. Numbers of generations only grow: a host that was cut off or frozen learns from the number
that its ranks are of the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff, no_jitter
from strata.train.parallel import ParallelSettings

SUSPECT_S: Final = 3.0
"""Once a generation is over, a host that is silent for so long has no place in the next one."""
MAX_FAILED_STARTS: Final = 2
"""Generations in a row that may end before ranks were ever ready, while no host was lost."""
BACKOFF: Final = Backoff(first_s=0.1, most_s=10.0)
BARRED_S: Final = 600.0
"""How long a host gets no ranks after generations with it failed to start and one without it had not."""
STEADY_S: Final = 30.0
"""A generation that ran so long is followed by the next one without backoff."""


Name = Annotated[str, msgspec.Meta(max_length=200)]


class RankGeneration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ranks of one host in a generation."""

    run: str
    """The start of the first host's server, whose numbers these are."""
    number: int
    first_rank: int
    ranks: int
    """The ranks of all hosts."""
    address: str
    """Where the ranks meet, on the first host."""
    port: int
    data: str
    """The data folder of the first host, below which the orchestrator names files."""
    parallel: ParallelSettings


class HostReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="report"):
    """What a host says of itself, again and again."""

    name: Annotated[str, msgspec.Meta(max_length=5000)]
    """The same after a restart of its process: an address and a path."""
    incarnation: Name
    """Another one after it."""
    version: Name
    run: Name = ""
    """The run that the following is about."""
    prepared: bool = False
    """Whether it has the model, and a process that can fork ranks."""
    running: int = 0
    """The generation whose ranks run there; 0: none."""
    ended: int = 0
    """The last generation whose ranks ended there by themselves."""
    status: int = 0
    """Their exit status."""
    port: int = 0
    """Where ranks can meet on it; the first host's counts."""


class HostEvent(msgspec.Struct, frozen=True):
    """What changed, for the log."""

    kind: Literal["lost", "joined", "started", "over", "barred", "unplaced"]
    host: str = ""
    generation: int = 0
    reason: str = ""
    hosts: Sequence[str] = ()


class _Seen(msgspec.Struct):
    report: HostReport
    at_s: float


class _Current(msgspec.Struct):
    number: int
    members: dict[str, str]
    """Names with incarnations, in the order of their ranks."""
    parallel: ParallelSettings
    port: int
    started_s: float
    attached: bool = False


class HostRules(msgspec.Struct, frozen=True, kw_only=True):
    own: str
    """The name of the first host."""
    run: str
    address: str
    data: str
    nproc: int
    """Ranks of each host."""
    parallel: ParallelSettings
    """The mesh on all hosts."""
    count: int
    wait_s: float
    prepare_s: float
    """How long the first generation waits for hosts that are there and still prepare."""
    lost_after_s: float
    grow_after_s: float


class HostPlan:
    def __init__(self, rules: HostRules) -> None:
        self._rules = rules
        self._hosts: dict[str, _Seen] = {}
        self._replaced: set[str] = set()
        """Incarnations of hosts that have started again since."""
        self._current: _Current | None = None
        self._number = 0
        self._waiting_since_s: float | None = None
        """When the first host began to wait for the others, before the first generation."""
        self._grow_since_s: float | None = None
        self._over_s = 0.0
        """When the last generation ended."""
        self._not_before_s = 0.0
        self._failures = 0
        self._proven: frozenset[str] = frozenset()
        """The hosts of the last generation that was ready."""
        self._failed_starts = 0
        """Generations since then that ended before they were."""
        self._barred_until_s: dict[str, float] = {}
        self._unplaced = ""
        self._events: list[HostEvent] = []

    @property
    def generation(self) -> int:
        """Returns the generation that runs, or is to; 0 if there is none."""
        return self._current.number if self._current is not None else 0

    @property
    def hosts(self) -> Sequence[str]:
        """Returns the hosts of that generation, in the order of their ranks."""
        return tuple(self._current.members) if self._current is not None else ()

    def report(self, report: HostReport, now_s: float) -> str:
        """Take a report; returns why it is refused, if it is."""
        if report.incarnation in self._replaced:
            # Both live: each would end the generation of the other for ever.
            return "another host has its address and data folder; give one --data of its own"
        if report.run != self._rules.run:
            # Of an earlier server: nothing of that counts, and its ranks end by the order.
            report = HostReport(name=report.name, incarnation=report.incarnation, version=report.version)
        if report.name not in self._hosts:
            self._events.append(HostEvent("joined", report.name))
        elif report.incarnation != self._hosts[report.name].report.incarnation:
            self._replaced.add(self._hosts[report.name].report.incarnation)
            # Whoever started it again has perhaps repaired it.
            self._barred_until_s.pop(report.name, None)
        self._hosts[report.name] = _Seen(report, now_s)
        return ""

    def gone(self, name: str) -> None:
        """A host has closed its connection: it need not be waited for."""
        if self._hosts.pop(name, None) is not None:
            self._events.append(HostEvent("lost", name, reason="its connection has ended"))

    def ranks_attached(self) -> None:
        if self._current is not None:
            self._current.attached = True
            self._proven, self._failed_starts = frozenset(self._current.members), 0

    def snapshot_committed(self, now_s: float) -> None:
        """A replay would be short now: the time to grow, if a host waits for it."""
        if self._grow_since_s is not None:
            self._end("a host joined", now_s)

    def stuck(self, now_s: float) -> None:
        self._end("its ranks were stuck", now_s)

    def decide(self, now_s: float) -> Sequence[HostEvent]:
        """Bring the plan up to this time; returns what changed. UNAVAILABLE if ranks cannot start at all."""
        for name in [name for name, seen in self._hosts.items() if now_s - seen.at_s > self._rules.lost_after_s]:
            del self._hosts[name]
            self._events.append(HostEvent("lost", name, reason=f"silent for {self._rules.lost_after_s:g} s"))
        if self._current is not None:
            self._check_current(self._current, now_s)
        if self._current is None:
            self._start(now_s)
        events, self._events = self._events, []
        return events

    def order(self, name: str) -> RankGeneration | None:
        """Says what is to run on a host now."""
        current, seen = self._current, self._hosts.get(name)
        if current is None or seen is None or current.members.get(name) != seen.report.incarnation:
            return None
        return RankGeneration(
            run=self._rules.run,
            number=current.number,
            first_rank=[*current.members].index(name) * self._rules.nproc,
            ranks=len(current.members) * self._rules.nproc,
            address=self._rules.address,
            port=current.port,
            data=self._rules.data,
            parallel=current.parallel,
        )

    def _check_current(self, current: _Current, now_s: float) -> None:
        for name, incarnation in current.members.items():
            seen = self._hosts.get(name)
            if seen is None:
                self._end(f"{name} is lost", now_s)
                return
            if seen.report.incarnation != incarnation or not seen.report.prepared:
                self._end(f"{name} started again", now_s)
                return
            if seen.report.ended == current.number:
                self._count_failure(current, name, seen.report.status, now_s)
                self._end(f"ranks on {name} ended with status {seen.report.status}", now_s)
                return
        if not current.attached or len(self._place(self._eligible(now_s))) <= len(current.members):
            self._grow_since_s = None
        elif self._grow_since_s is None:
            self._grow_since_s = now_s
        elif now_s - self._grow_since_s >= self._rules.grow_after_s:
            self._end("a host joined", now_s)

    def _count_failure(self, current: _Current, name: str, status: int, now_s: float) -> None:
        self._failures = 1 if now_s - current.started_s >= STEADY_S else self._failures + 1
        self._not_before_s = now_s + BACKOFF.delay_s(self._failures, no_jitter())
        self._failed_starts += not current.attached
        if self._failed_starts < MAX_FAILED_STARTS:
            return
        for new in current.members.keys() - self._proven if self._proven else ():
            self._barred_until_s[new] = now_s + BARRED_S
            self._events.append(HostEvent("barred", new, reason=f"ranks do not start with it, status {status}"))
        if not self._proven:
            raise StrataError(
                Code.UNAVAILABLE,
                f"ranks died {MAX_FAILED_STARTS} times before they were ready, the last on {name} with status {status}",
                hint="the log of that host says why",
            )

    def _end(self, reason: str, now_s: float) -> None:
        if self._current is not None:
            self._events.append(HostEvent("over", generation=self._current.number, reason=reason))
            self._current, self._grow_since_s, self._over_s = None, None, now_s

    def _start(self, now_s: float) -> None:
        own = self._hosts.get(self._rules.own)
        if own is None or not own.report.prepared or now_s < self._not_before_s or self._must_wait(now_s):
            return
        members = self._place(self._eligible(now_s))
        if not members:
            return
        parallel = mesh_on(self._rules.parallel, len(members) * self._rules.nproc)
        assert parallel is not None, "placed above"
        self._number += 1
        incarnations = {name: self._hosts[name].report.incarnation for name in members}
        self._current = _Current(self._number, incarnations, parallel, own.report.port, now_s)
        self._events.append(HostEvent("started", generation=self._number, hosts=members))

    def _must_wait(self, now_s: float) -> bool:
        """Says whether a host may still come, or ranks of the last generation may still end."""
        eligible = self._eligible(now_s)
        if self._number == 0:
            if self._waiting_since_s is None:
                self._waiting_since_s = now_s
            preparing = any(not seen.report.prepared for seen in self._hosts.values())
            patience_s = max(self._rules.wait_s, self._rules.prepare_s if preparing else 0.0)
            return len(eligible) < self._rules.count and now_s - self._waiting_since_s < patience_s
        ending = (seen for seen in self._hosts.values() if seen.report.running)
        # A host that is gone says nothing more; one whose ranks do not end is left out as well.
        return now_s - self._over_s < self._rules.lost_after_s and any(
            now_s - seen.at_s <= SUSPECT_S for seen in ending
        )

    def _eligible(self, now_s: float) -> list[str]:
        """Hosts that could have ranks, the first host before the others, members of this generation before new ones."""
        members = self._current.members if self._current is not None else {}
        found = [
            name
            for name, seen in self._hosts.items()
            if seen.report.prepared
            and seen.report.running in (0, self.generation)
            and (name in members or now_s - seen.at_s <= SUSPECT_S)
            and now_s >= self._barred_until_s.get(name, 0.0)
        ]
        return sorted(found, key=lambda name: (name != self._rules.own, name not in members, name))

    def _place(self, eligible: Sequence[str]) -> Sequence[str]:
        """Returns as many of the hosts as form a mesh; none if no number of them does."""
        if self._rules.own not in eligible:
            return ()
        for count in range(len(eligible), 0, -1):
            if mesh_on(self._rules.parallel, count * self._rules.nproc) is not None:
                return eligible[:count]
        reason = self._rules.parallel.problem(len(eligible) * self._rules.nproc)
        if reason != self._unplaced:
            self._unplaced = reason
            self._events.append(HostEvent("unplaced", reason=reason, hosts=eligible))
        return ()


def mesh_on(parallel: ParallelSettings, ranks: int) -> ParallelSettings | None:
    """Returns the mesh on so many ranks: the one of the settings if they fit, else one with fewer copies or other
    shards. What splits the model otherwise (`tensor`, `context`, `expert`, `pipeline`) stays; None if that is not
    possible."""
    for replicate in range(parallel.replicate, 0, -1):
        for shard in dict.fromkeys((parallel.shard, None)):
            mesh = msgspec.structs.replace(parallel, replicate=replicate, shard=shard)
            if not mesh.problem(ranks):
                return mesh
    return None
