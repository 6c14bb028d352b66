"""Decides which hosts of a claim go first, what room they have beside open attempts and reservations, which reserved
jobs they are granted, and which lost attempts a claim displaces. The SQL is in `store/*/claims`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from strata.fleet.core.amounts import Amounts, Capacity, Room, Taken
from strata.fleet.core.reservation import ReservationKind


class OpenAttempt(NamedTuple):
    """An attempt that has not ended."""

    host_id: str
    job_id: str
    epoch: int
    taken: Taken
    expired: bool
    """Its lease."""


class OpenReservation(NamedTuple):
    """What a host keeps free for a job that waits."""

    host_id: str
    amounts: Amounts
    seq: int
    kind: ReservationKind
    expires_at_s: float


def take_turns(claims: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Host and name of each claim: every host once in a turn, so that its second claim sees what its first one took."""
    claims = list(claims)
    if len({host_id for host_id, _ in claims}) == len(claims):
        return [claims] if claims else []
    turns: list[list[tuple[str, str]]] = []
    before: Counter[str] = Counter()
    for host_id, claim_id in claims:
        if before[host_id] == len(turns):
            turns.append([])
        turns[before[host_id]].append((host_id, claim_id))
        before[host_id] += 1
    return turns


def open_rooms(
    hosts: Mapping[str, Capacity], attempts: Iterable[OpenAttempt]
) -> tuple[dict[str, Room], list[OpenAttempt]]:
    """Returns what each host has left beside its leases, and its attempts whose leases have expired."""
    rooms = {host_id: Room(capacity) for host_id, capacity in hosts.items()}
    expired: list[OpenAttempt] = []
    for attempt in attempts:
        if attempt.host_id not in rooms:
            continue
        if attempt.expired:
            expired.append(attempt)
        else:
            rooms[attempt.host_id].hold(attempt.taken)
    return rooms, expired


def grant_reserved(
    rooms: Mapping[str, Room], reserved: Iterable[OpenReservation], counts: Mapping[str, int], now_s: float
) -> list[tuple[str, int, Taken]]:
    """The reserved jobs that fit, each with its host and what it takes of it, at most as many as each host claims. What
    else is reserved is kept from the other jobs of these claims."""
    granted: list[tuple[str, int, Taken]] = []
    left = dict(counts)
    for each in reserved:
        if each.host_id not in rooms or each.kind == "missed" or each.expires_at_s <= now_s:
            continue
        room = rooms[each.host_id]
        if each.kind == "grant" and left[each.host_id] and room.fits(each.amounts):
            (taken,) = room.plan(each.amounts)
            room.hold(taken)
            left[each.host_id] -= 1
            granted.append((each.host_id, each.seq, taken))
        else:
            room.reserve(each.amounts)
    return granted


def displaced_attempts(
    rooms: Mapping[str, Room], expired: Iterable[OpenAttempt], granted: Mapping[str, str]
) -> list[tuple[str, int]]:
    """Job and epoch of the attempts that have expired and do not fit any more beside what was granted now: jobs, with
    the host of each.

    A late heartbeat would otherwise revive them on cards that another job has by then.
    """
    hosts = set(granted.values())
    displaced: list[tuple[str, int]] = []
    for attempt in expired:
        if attempt.host_id not in hosts or attempt.job_id in granted:
            continue
        if rooms[attempt.host_id].admits(attempt.taken):
            rooms[attempt.host_id].hold(attempt.taken)
        else:
            displaced.append((attempt.job_id, attempt.epoch))
    return displaced
