"""The status of a host in one word, its policy in words, what drain, pause, resume and revoke would do to its jobs, and
how two agents with one identity (clones) are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from strata.fleet.core.jobspec import HostSpec, QuietHours

Presence = Literal["online", "suspect", "offline"]
StoredState = Literal["active", "draining", "paused", "quarantined", "left"]
HostStatus = Literal["online", "quiet", "suspect", "offline", "draining", "paused", "quarantined", "left"]
HostAction = Literal["drain", "pause", "resume", "revoke"]


def host_status(state: StoredState, presence: Presence, *, quiet: bool) -> HostStatus:
    """The one word that says why the host takes no jobs; `suspect` and `online` ones take some."""
    if presence == "offline" and state not in ("left", "quarantined"):
        return "offline"
    if state != "active":
        return state
    return "suspect" if presence == "suspect" else "quiet" if quiet else "online"


def has_vanished(presence: Presence, state: StoredState, *, ephemeral: bool) -> bool:
    """Says whether it is in no list, and missed by nobody: an ephemeral host that is silent, or has left."""
    return ephemeral and (presence == "offline" or state == "left")


@dataclass(frozen=True, slots=True)
class AgentSightings:
    """Remembers which agents sent the heartbeats of one host, to tell a restarted agent from two that run at once.

    The incarnation of an agent is made when it starts, and two agents of one state folder never run at once. So one
    that comes back after another one is a copy, on a machine whose disk was copied, or its heartbeat was long on its
    way.
    """

    latest: str
    earlier: tuple[str, ...] = ()
    """The newest last."""
    returns: int = 0
    """How often one came back after another."""

    def see(self, incarnation: str) -> AgentSightings:
        if incarnation == self.latest:
            return self
        others = [each for each in (*self.earlier, self.latest) if each != incarnation]
        # An agent that is new ends the count: late heartbeats of years would add up to a copy.
        returns = self.returns + 1 if incarnation in self.earlier else 0
        return AgentSightings(incarnation, tuple(others[-_REMEMBERED:]), returns)

    @property
    def clone_reason(self) -> str:
        """Empty, unless two agents run at once."""
        if self.returns < CLONE_RETURNS:
            return ""
        agents = " and ".join(sorted((self.earlier[-1], self.latest)))
        return f"two agents work as this host at once: {agents}; invite one of the machines as a host of its own"


CLONE_RETURNS: Final = 3
"""A late heartbeat of an agent that has ended makes two: its own, and the next of its successor."""
_REMEMBERED: Final = 8


def policy_rules(policy: HostSpec) -> tuple[str, ...]:
    """Returns what the policy says, a sentence each; a policy that says nothing lets every job run there."""
    return tuple(_rules(policy)) or ("Every job may run here, as far as it fits.",)


def _rules(policy: HostSpec) -> Iterator[str]:
    if policy.allow_jobs is not None and not policy.allow_jobs:
        yield "No job may run here."
    elif policy.allow_jobs is not None:
        yield f"Only these jobs may run here: {', '.join(policy.allow_jobs)}."
    if policy.deny_jobs:
        yield f"These jobs may not run here: {', '.join(policy.deny_jobs)}."
    if policy.slots is not None:
        yield f"At most {policy.slots} {'job runs' if policy.slots == 1 else 'jobs of one slot run'} at once."
    if policy.cuda is False:
        yield "Jobs may not use its cards."
    limits = [
        *([f"{policy.cores} cores"] if policy.cores is not None else []),
        *([f"{policy.ram_gib:g} GiB of memory"] if policy.ram_gib is not None else []),
        *([f"{policy.vram_gib:g} GiB of each card"] if policy.vram_gib is not None else []),
    ]
    if limits:
        yield f"Jobs have at most {', '.join(limits)}."
    if policy.labels:
        yield f"It has the labels {', '.join(f'{name}={value}' for name, value in sorted(policy.labels.items()))}."


def quiet_in_words(hours: QuietHours) -> str:
    """`every day 22:00-07:00`, `Monday to Friday 09:00-17:30`, `Saturday, Sunday 00:00-24:00`."""
    times = str(hours).rpartition(" ")[2]
    days = sorted(hours.days)
    if len(days) == len(_DAYS):
        return f"every day {times}"
    if len(days) > 2 and days[-1] - days[0] == len(days) - 1:
        return f"{_DAYS[days[0]]} to {_DAYS[days[-1]]} {times}"
    return f"{', '.join(_DAYS[day] for day in days)} {times}"


_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What decides what an action does."""

    name: str
    state: StoredState
    presence: Presence
    jobs: int
    """Jobs that it has, without servers."""
    servers: int
    stranded: int
    """Jobs that wait and that no other host could take."""
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPlan:
    possible: bool
    effects: tuple[str, ...]
    ends_jobs: bool = False
    ends_servers: bool = False


def plan_action(action: HostAction, host: HostFacts) -> ActionPlan:
    """Returns what the action would do to a host that is as it is now."""
    if refusal := _refusal(action, host):
        return ActionPlan(possible=False, effects=(refusal,))
    ends_servers = action in ("drain", "revoke")
    return ActionPlan(
        possible=True,
        effects=tuple(_effects(action, host)),
        ends_jobs=action == "revoke",
        ends_servers=ends_servers,
    )


def _refusal(action: HostAction, host: HostFacts) -> str:
    if host.state == "left":
        return f"{host.name} has left; it comes back with strata join."
    same: dict[HostAction, StoredState] = {"drain": "draining", "pause": "paused", "resume": "active"}
    return f"{host.name} is {host.state} already." if same.get(action) == host.state else ""


def _effects(action: HostAction, host: HostFacts) -> Iterator[str]:
    if action == "resume":
        yield "It takes new jobs again at once."
        if host.state == "quarantined":
            yield "It was quarantined: if the cause is still there, it will be again."
        return
    if action == "revoke":
        yield "Its credentials end now: every request of it is refused, and it cannot be undone."
        if host.jobs + host.servers:
            yield (
                f"Its {_jobs(host.jobs + host.servers)} {_go(host.jobs + host.servers)} to other hosts when the leases"
                f" run out, in {host.lease_s:g} s at most; what no checkpoint has is lost."
            )
        yield f"To bring it back it has to join again: strata invite --name {host.name}"
    else:
        yield "It gets no new jobs until it is resumed."
        if host.jobs:
            yield f"{_jobs(host.jobs).capitalize()} that it has {'runs' if host.jobs == 1 else 'run'} to the end."
        if host.servers and action == "drain":
            saves = "saves its state and moves" if host.servers == 1 else "save their state and move"
            yield f"{_count(host.servers, 'training server')} {saves} to another host."
        elif host.servers:
            yield f"{_count(host.servers, 'training server')} {'serves' if host.servers == 1 else 'serve'} on."
    if host.stranded:
        yield (
            f"{_jobs(host.stranded).capitalize()} in the queue {'waits' if host.stranded == 1 else 'wait'}"
            " until it is back: no other host can take them."
        )


def _jobs(count: int) -> str:
    return _count(count, "job")


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _go(count: int) -> str:
    return "goes" if count == 1 else "go"
