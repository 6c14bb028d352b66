"""Why a worker cannot simply go on: errors of code STALE, each with a `reason` that a training loop can act on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from strata.base.errors import Code, StrataError


class Reason(StrEnum):
    """`error.detail["reason"]` of a STALE error; `reason_of` reads it."""

    MEMBERSHIP_CHANGED = "stale-generation"
    """Members came or went: `recover` goes back to the last checkpoint with everybody, `follow` goes on as it is."""
    RECOVER_FIRST = "recover-first"
    """The job has moved or went back without this worker: `recover` says which checkpoint to load."""
    LEASE_LOST = "lease-lost"
    """Shards of this worker are somebody else's now: what it made of them must not count. It may ask for more."""
    EVICTED = "evicted"
    """The coordinator took this worker for dead. Everything it held is somebody else's; it has to join again."""
    REPLACED = "stale-incarnation"
    """Another process of the same worker id has joined: this one must end."""


RECOVERABLE: Final = frozenset({Reason.MEMBERSHIP_CHANGED, Reason.RECOVER_FIRST, Reason.LEASE_LOST})
"""After these, `recover` and go on; after the others this process has to end."""


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
        hint="recover() to go back with everybody, or follow() to go on as it is",
        reason=Reason.MEMBERSHIP_CHANGED.value,
        generation=current,
    )


def lease_lost(leases: Sequence[int]) -> StrataError:
    return StrataError(
        Code.STALE,
        f"{len(leases)} shards of this worker are somebody else's now",
        hint="drop what was made of them",
        reason=Reason.LEASE_LOST.value,
        leases=tuple(leases),
    )


def evicted(message: str) -> StrataError:
    return StrataError(
        Code.STALE, f"this worker was taken for dead: {message}", hint="join again", reason=Reason.EVICTED.value
    )
