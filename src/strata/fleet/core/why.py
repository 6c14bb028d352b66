"""Explains why a job is not running: headline, obstacles (dependencies, back-off, busy, reserved, excluded hosts), how
many hosts each stops, and the nearest fix, with the wording of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from strata.fleet.core.amounts import Amounts, Room, Taken, job_amounts
from strata.fleet.core.capability import Profile
from strata.fleet.core.job import HELD, TERMINAL, JobStatus
from strata.fleet.core.match import MatchResult, MismatchReason, eligible
from strata.fleet.core.requirement import RequirementClass
from strata.fleet.core.schedule import format_moment

_REFUSED: Final = "excluded"
_BUSY: Final = "busy"
_SHOWN: Final = 5
"""Hosts that a sentence names."""
_OUTDATED: Final = "outdated"
_RESERVED: Final = "reserved"


class HostState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host as it is now: whether it may take anything at all."""

    profile: Profile
    online: bool = True
    paused: bool = False
    """Paused or draining."""
    quarantined: str = ""
    """The reason, if it is."""
    quiet: str = ""
    """The quiet hours it is in, if it is."""
    held: tuple[Taken, ...] = ()
    """What its jobs take of it."""
    refused: str = ""
    """Why it could not set this job up, if it could not: it is excluded for it."""
    outdated: bool = False
    """Its agent is too old for a job of this kind."""
    reserved: Mapping[str, Amounts] = {}
    """The other jobs for which it is reserved, by their names, and what they take."""
    drains: bool = False
    """It is reserved for this job."""
    eligible: bool | None = None
    """Whether it may take the job at all, if the caller knows."""


class UnmetDependency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job this one comes after, and that is not completed."""

    job_id: str
    label: str
    status: JobStatus


class WhyQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has to be known of the job that is asked about."""

    status: JobStatus
    requirement: RequirementClass
    not_before_s: float = 0.0
    starts_at_s: float = 0.0
    """The start time that its owner chose; 0 for none."""
    last_failure: str = ""
    """The reason of the ruling behind `not_before_s`."""
    after: tuple[UnmetDependency, ...] = ()
    gang_hosts: int = 0
    """How many hosts have to take members of its gang at once."""
    ahead: int | None = None
    """How many jobs that its hosts may take as well are before it in the queue, if somebody counted."""


class Obstacle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing in the way."""

    what: str
    """A constraint by its name in the manifest, or `after`, `start time`, `back-off`, `busy`, `paused`, `offline`, …"""
    detail: str
    hosts: int = 0
    """How many hosts it stops, of `of`; 0 of 0 for what is not about hosts."""
    of: int = 0
    fix: str = ""


class Why(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    headline: str
    obstacles: tuple[Obstacle, ...] = ()
    eligible_hosts: tuple[str, ...] = ()
    nearest_host: str = ""
    """If no host is eligible: the one with the least in the way."""
    nearest_fix: tuple[str, ...] = ()
    """All that would have to change for `nearest_host` to be eligible."""
    schedulable: bool = True
    """Whether it will run without anybody changing anything."""


def why(job: WhyQuery, hosts: Sequence[HostState], *, now_s: float) -> Why:
    if job.status in TERMINAL:
        return Why(headline=f"it is {job.status}", schedulable=False)
    if job.status in HELD:
        return Why(headline="a host has it")
    fitting = [host for host in hosts if _is_eligible(job.requirement, host)]
    own = list(_own_reasons(job, now_s))
    if not fitting:
        return _unschedulable([eligible(job.requirement, host.profile) for host in hosts], own)
    busy = list(_availability(job.requirement, fitting))
    refusing = all(host.refused for host in fitting)
    blocked = all(host.refused or host.outdated for host in fitting) or any(
        each.status in TERMINAL for each in job.after
    )
    names = tuple(sorted(host.profile.host for host in fitting))
    free = len(fitting) - sum(each.hosts for each in busy)
    if job.gang_hosts > free:
        detail = f"its gang starts on {job.gang_hosts} hosts at once, and {free} of {len(fitting)} could take it now"
        fix = "add hosts, or raise workers_per_host" if job.gang_hosts > len(fitting) else ""
        own.append(Obstacle(what="gang", detail=detail, fix=fix))
    headline = own[0].detail if own else _availability_headline(job, fitting, free)
    draining = [host.profile.host for host in fitting if host.drains]
    if draining and not refusing:
        verb = "is" if len(draining) == 1 else "are"
        headline = f"{_some(draining)} {verb} reserved for it; the jobs there end first"
    return Why(headline=headline, obstacles=tuple(own + busy), eligible_hosts=names, schedulable=not blocked)


def _is_eligible(requirement: RequirementClass, host: HostState) -> bool:
    return eligible(requirement, host.profile).eligible if host.eligible is None else host.eligible


def _availability_headline(job: WhyQuery, fitting: Sequence[HostState], free: int) -> str:
    if free:
        ahead = f"; {job.ahead} jobs are before it" if job.ahead else ""
        return f"{free} of {len(fitting)} eligible hosts could take it now{ahead}"
    if all(host.refused for host in fitting):
        return f"no eligible host could set it up: {fitting[0].refused}"
    return f"none of the {len(fitting)} eligible hosts can take it now"


def _own_reasons(job: WhyQuery, now_s: float) -> Iterable[Obstacle]:
    for other in job.after:
        if other.status in TERMINAL:
            detail = f"comes after {other.label}, which is {other.status}"
            yield Obstacle(what="after", detail=detail, fix=f"requeue {other.job_id}, or remove it from `after`")
        else:
            yield Obstacle(what="after", detail=f"waits for {other.label}, which is {other.status}")
    if now_s < job.not_before_s <= job.starts_at_s:
        detail = f"starts at {format_moment(job.starts_at_s)}, in {job.starts_at_s - now_s:.0f} s"
        yield Obstacle(what="start time", detail=detail)
    elif job.not_before_s > now_s:
        because = f" ({job.last_failure})" if job.last_failure else ""
        yield Obstacle(what="back-off", detail=f"waits {job.not_before_s - now_s:.0f} s more{because}")


def _availability(requirement: RequirementClass, fitting: Sequence[HostState]) -> Iterable[Obstacle]:
    stopped: dict[str, list[HostState]] = {}
    # Most hosts of a large fleet are like others, and hold as much.
    known: dict[Hashable, str] = {}
    for host in fitting:
        reason = _stopped(host)
        if not reason and host.reserved:
            reason = _lack_of_room(requirement, host)
        elif not reason:
            own = host.profile
            alike = own.cards, own.vram_gib, own.cores, own.ram_gib, own.slots, host.held
            if alike not in known:
                known[alike] = _lack_of_room(requirement, host)
            reason = known[alike]
        if reason:
            stopped.setdefault(reason, []).append(host)
    fixes = {
        _OUTDATED: "update its agent",
        "paused": "resume it",
        "quarantined": "mend it, then resume it",
        "offline": "start its agent",
    }
    refused = stopped.pop(_REFUSED, [])
    if refused:
        what = "eligible host" if len(refused) == 1 else "eligible hosts"
        errors = sorted({host.refused for host in fitting if host.refused})
        detail = f"{len(refused)} {what} could not set it up: {_some(_names(refused))}: {errors[0]}"
        fix = "mend the trainer and requeue the job, or mend the host and restart its agent"
        yield Obstacle(what="setup_error", detail=detail, hosts=len(refused), of=len(fitting), fix=fix)
    for reason, states in sorted(stopped.items()):
        what = "eligible host is" if len(states) == 1 else "eligible hosts are"
        names = _names(states)
        if reason == _BUSY:
            first = sorted(states, key=lambda host: host.profile.host)[:_SHOWN]
            names = [f"{host.profile.host} ({_wait_reason(requirement, host)})" for host in first]
        elif reason == _RESERVED:
            names = [f"{host.profile.host} (for {_some(list(host.reserved))})" for host in states]
        detail = f"{len(states)} {what} {reason}: {_some(names, len(states))}"
        yield Obstacle(what=reason, detail=detail, hosts=len(states), of=len(fitting), fix=fixes.get(reason, ""))


def _names(hosts: Sequence[HostState]) -> list[str]:
    return [host.profile.host for host in hosts]


def _wait_reason(requirement: RequirementClass, host: HostState) -> str:
    return "reserved for it" if host.drains else _shortage(requirement, host)


def _shortage(requirement: RequirementClass, host: HostState) -> str:
    capacity = host.profile.capacity
    return Room(capacity, host.held).shortage(job_amounts(requirement.needs, capacity))


def _stopped(host: HostState) -> str:
    """Says why an eligible host takes no job like this one just now, whatever it holds; empty if it would."""
    if host.refused:
        return _REFUSED
    if host.outdated:
        return _OUTDATED
    if not host.online:
        return "offline"
    if host.quarantined:
        return "quarantined"
    if host.paused:
        return "paused"
    return "in quiet hours" if host.quiet else ""


def _lack_of_room(requirement: RequirementClass, host: HostState) -> str:
    """Says whether what a host holds, or what is reserved on it, is in the way; empty if not."""
    capacity = host.profile.capacity
    room, wanted = Room(capacity, host.held), job_amounts(requirement.needs, capacity)
    if not room.fits(wanted):
        return _BUSY
    for amounts in host.reserved.values():
        room.reserve(amounts)
    return "" if room.fits(wanted) else _RESERVED


def _unschedulable(verdicts: Sequence[MatchResult], own: list[Obstacle]) -> Why:
    if not verdicts:
        nobody = Obstacle(what="no host", detail="no host has joined", fix="strata invite, then strata join on a host")
        return Why(headline="no host has joined the fleet", obstacles=(nobody, *own), schedulable=False)
    nearest = min(verdicts, key=lambda each: (len(each.reasons), sum(r.distance for r in each.reasons), each.host))
    return Why(
        headline=f"none of {len(verdicts)} hosts is eligible" if len(verdicts) > 1 else "the only host is not eligible",
        obstacles=(*_by_constraint(verdicts), *own),
        nearest_host=nearest.host,
        nearest_fix=tuple(reason.fix for reason in nearest.reasons),
        schedulable=False,
    )


def _by_constraint(verdicts: Sequence[MatchResult]) -> list[Obstacle]:
    """Counts the hosts that fail each constraint, most first; the fix is for the host that comes nearest."""
    failing: dict[str, list[tuple[str, MismatchReason]]] = {}
    for verdict in verdicts:
        for reason in verdict.reasons:
            failing.setdefault(reason.constraint, []).append((verdict.host, reason))
    obstacles = []
    for constraint, found in sorted(failing.items(), key=lambda each: (-len(each[1]), each[0])):
        host, best = min(found, key=lambda each: (each[1].distance, each[0]))
        if len(verdicts) == 1:
            detail = f"needs {best.needed}, {host} has {best.has}"
        else:
            lacks = f"needs {best.needed}, has {best.has}"
            detail = f"{len(found)} of {len(verdicts)} hosts fail it; {host} comes nearest: {lacks}"
        obstacles.append(
            Obstacle(what=constraint, detail=detail, hosts=len(found), of=len(verdicts), fix=best.fix),
        )
    return obstacles


def _some(names: Sequence[str], count: int = 0) -> str:
    """The first names of so many, or of all of them."""
    shown, more = ", ".join(sorted(names)[:_SHOWN]), max(count, len(names)) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
