"""Why a worker cannot go on: the reasons of STALE errors (membership changed, rank differs, lease lost, evicted, too
few members), their messages, and which a recovery mends.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.worker.settings import WorkerSettings


class Reason(StrEnum):
    """`error.detail["reason"]` of a STALE error; `reason_of` reads it."""

    MEMBERSHIP_CHANGED = "stale-generation"
    """Members joined or left: `recover` rewinds all workers to the last checkpoint, `follow` continues as it is."""
    RECOVER_FIRST = "recover-first"
    """The job progressed or rewound without this worker: `recover` returns the checkpoint to load."""
    LEASE_LOST = "lease-lost"
    """Leases of this worker belong to others now: its results of them must not count. It may request more."""
    EVICTED = "evicted"
    """The coordinator evicted this worker. All its leases belong to others; it has to join again."""
    REPLACED = "stale-incarnation"
    """Another process of the same worker id has joined: this one must end."""
    RANK_DIFFERS = "rank-differs"
    """The generation has other members than the launcher started: this process must end and be started again."""


RECOVERABLE: Final = frozenset({Reason.MEMBERSHIP_CHANGED, Reason.RECOVER_FIRST, Reason.LEASE_LOST})
"""Errors after which a program calls `recover` and continues; after the others this process has to end."""


def reason_of(error: BaseException) -> Reason | None:
    """The reason of an error that a worker raised; None if it is about something else."""
    if not isinstance(error, StrataError) or error.code is not Code.STALE:
        return None
    found = error.detail.get("reason")
    return next((reason for reason in Reason if reason.value == found), None)


def membership_changed(ours: int, current: int) -> StrataError:
    return StrataError(
        Code.STALE,
        f"generation {ours} is over: it is {current} now",
        hint="recover() to rewind all workers, or follow() to continue as it is",
        reason=Reason.MEMBERSHIP_CHANGED.value,
        generation=current,
    )


def rank_differs(found: tuple[int, int], settings: WorkerSettings) -> StrataError:
    return StrataError(
        Code.STALE,
        f"rank {found[0]} of {found[1]} workers in the generation is not rank {settings.rank} of"
        f" {settings.wait_for}, as the launcher said",
        hint="end this process: the launcher starts all ranks again",
        reason=Reason.RANK_DIFFERS.value,
    )


def lease_lost(leases: Sequence[int]) -> StrataError:
    return StrataError(
        Code.STALE,
        f"{len(leases)} leases of this worker belong to other workers now",
        hint="discard the results of them",
        reason=Reason.LEASE_LOST.value,
        leases=tuple(leases),
    )


def evicted(message: str) -> StrataError:
    return StrataError(
        Code.STALE, f"this worker was evicted: {message}", hint="join again", reason=Reason.EVICTED.value
    )


def too_few_members(count: int, wait_for: int, waited_s: float) -> StrataError:
    there = f"{count} of {wait_for} members" if wait_for else "not enough members"
    return StrataError(Code.DEADLINE, f"{there} in {waited_s:g} s")
