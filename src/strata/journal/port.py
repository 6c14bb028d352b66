"""The port of a journal: its promises, its limits (fact 1 MiB, append and snapshot 64 MiB), names of streams, and the
errors that all adapters raise.

A journal holds *streams*. A stream is a gapless sequence of facts at positions 1, 2, 3, …, with one leader at a time.
Facts are opaque bytes here; the layer above owns their meaning. Three promises carry everything else:

- **Durable**: `append` returns after the commit, never before.
- **Fenced**: the leader epoch is checked in the same statement as the write. A deposed leader cannot add a fact, a
  snapshot or a truncation.
- **Exactly once**: a leader names the position its batch comes after. The same batch sent twice (because the reply to
  the first was lost) is recognised and gets the same position: appends are idempotent.

An error with code UNAVAILABLE leaves the outcome unknown; the caller repeats the call with the same arguments. Every
call ends in bounded time, with a result or with an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol, Self

import msgspec

from strata.base.errors import Code, StrataError

MAX_FACT_BYTES: Final = 1 << 20
MAX_APPEND_BYTES: Final = 64 << 20
MAX_STATE_BYTES: Final = 64 << 20
PAGE_BYTES: Final = 4 << 20
"""How much `read` returns at most in one page (but always at least one batch)."""

_STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
_HOLDER_NAME = re.compile(r"[!-~]{1,200}")
_LARGEST: Final = (1 << 63) - 1


class Lead(msgspec.Struct, frozen=True):
    """The right to write one stream: valid until another candidate takes the next epoch."""

    stream: str
    epoch: int
    head: int
    """Last position at the moment the lead was taken; no other process can add to it under this epoch."""


class Batch(msgspec.Struct, frozen=True):
    """Facts at consecutive positions that became durable together."""

    first: int
    epoch: int
    facts: Sequence[bytes]

    @property
    def last(self) -> int:
        return self.first + len(self.facts) - 1

    def after(self, position: int) -> Batch:
        """The part of this batch that comes after `position`."""
        skip = position + 1 - self.first
        return self if skip <= 0 else Batch(position + 1, self.epoch, self.facts[skip:])


class Snapshot(msgspec.Struct, frozen=True):
    """The state of the machine after the fact at `position`."""

    position: int
    epoch: int
    state: bytes


class StreamStatus(msgspec.Struct, frozen=True):
    """What an operator sees of a stream."""

    stream: str
    epoch: int
    holder: str
    led: bool
    """Whether the holder's lease is running. Only the epoch fences writes; the lease decides when a standby may try."""
    head: int
    floor: int
    """Positions up to and including this one were truncated."""
    snapshot: int | None
    """Position of the newest snapshot."""


class Journal(Protocol):
    """One database of streams. Adapters: memory, SQLite, PostgreSQL; one conformance suite over all three."""

    async def lead(self, stream: str, holder: str, lease_s: float, *, expired_lease: str | None = None) -> Lead:
        """Take the next epoch, creating the stream if need be. CONFLICT while another holder's lease runs.

        `holder` is unique to one run of one process. A holder that calls again gets a new epoch, so a lost first reply
        does not matter. The conflict's detail `lease` names the running lease and changes with every renewal. A
        candidate that has seen the same lease for a whole lease time by its own clock passes it as `expired_lease`, and
        the journal treats it as expired: the journal's own clock may have been set back.
        """
        ...

    async def renew(self, stream: str, epoch: int, lease_s: float) -> None:
        """Extend the lease from now. STALE if the epoch is over."""
        ...

    async def resign(self, stream: str, epoch: int) -> None:
        """End the lease now, so that a standby need not wait for it. No effect if the epoch is over."""
        ...

    async def confirm(self, stream: str, epoch: int) -> None:
        """Return only if the epoch was current at a moment after the call began; else STALE."""
        ...

    async def append(self, stream: str, epoch: int, after: int, facts: Sequence[bytes]) -> int:
        """Commit the facts at positions after+1 … and return the last one.

        STALE if the epoch is over, CONFLICT if the head is elsewhere. A batch that already stands there, from this
        epoch and with this content, gets the same result again, even if the epoch is over by now: it is committed.
        """
        ...

    async def read(self, stream: str, after: int) -> list[Batch]:
        """One page of committed batches after a position, in order; empty at the head. GONE below the floor."""
        ...

    async def wait_for_growth(self, stream: str, after: int, timeout_s: float) -> int:
        """Wait until the head is beyond `after` or the time is over, and return the head."""
        ...

    async def save_snapshot(self, stream: str, epoch: int, snapshot: Snapshot) -> None:
        """Keep the state at a committed position. The same position twice is the same state: no effect."""
        ...

    async def load_snapshot(self, stream: str) -> Snapshot | None:
        """The newest snapshot, verified."""
        ...

    async def truncate(self, stream: str, epoch: int, through: int) -> None:
        """Forget facts up to and including a position that a snapshot covers, and snapshots older than that one."""
        ...

    async def streams(self) -> list[StreamStatus]: ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


def check_stream(stream: str) -> None:
    if not _STREAM_NAME.fullmatch(stream):
        raise StrataError(
            Code.INVALID,
            f"{stream!r} is not a stream name",
            hint="1 to 200 letters, digits and . _ : / -, beginning with a letter or digit",
        )


def check_candidate(stream: str, holder: str, lease_s: float) -> None:
    check_stream(stream)
    if not _HOLDER_NAME.fullmatch(holder):
        raise StrataError(Code.INVALID, "a holder needs a name of 1 to 200 printable characters without spaces")
    check_lease(lease_s)


def check_lease(lease_s: float) -> None:
    if not 0.0 <= lease_s <= 1e9:
        raise StrataError(Code.INVALID, f"a lease of {lease_s} seconds makes no sense")


def check_position(position: int) -> None:
    if not 0 <= position < _LARGEST:
        raise StrataError(Code.INVALID, f"{position} is not a position")


def check_facts(facts: Sequence[bytes]) -> int:
    """The size of the facts together; raises if there is none, or if they are too large."""
    if not facts:
        raise StrataError(Code.INVALID, "an append needs at least one fact")
    total = 0
    for fact in facts:
        if type(fact) is not bytes:
            raise StrataError(Code.INVALID, "a fact is bytes and nothing else")
        size = len(fact)
        if size > MAX_FACT_BYTES:
            raise StrataError(
                Code.INVALID,
                f"a fact of {size:,} bytes is over the limit of {MAX_FACT_BYTES:,}",
                hint="keep large payloads in content-addressed files and journal their digest",
            )
        total += size
    if total > MAX_APPEND_BYTES:
        raise StrataError(
            Code.INVALID, f"an append of {total:,} bytes is over the limit of {MAX_APPEND_BYTES:,}", hint="split it"
        )
    return total


def check_snapshot(snapshot: Snapshot) -> None:
    check_position(snapshot.position)
    size = len(snapshot.state)
    if size > MAX_STATE_BYTES:
        raise StrataError(Code.INVALID, f"a snapshot of {size:,} bytes is over the limit of {MAX_STATE_BYTES:,}")


def unknown_stream(stream: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"stream {stream!r} does not exist", stream=stream)


def lease_held(stream: str, holder: str, lease: str) -> StrataError:
    return StrataError(
        Code.CONFLICT, f"stream {stream!r} is led by {holder}", stream=stream, holder=holder, lease=lease
    )


def stale(stream: str, epoch: int, current: int) -> StrataError:
    return StrataError(
        Code.STALE, f"epoch {epoch} of stream {stream!r} is over: {current} leads now", stream=stream, epoch=current
    )


def wrong_position(stream: str, after: int, head: int) -> StrataError:
    return StrataError(
        Code.CONFLICT,
        f"stream {stream!r} is at position {head}; the append comes after {after}",
        stream=stream,
        head=head,
    )


def went_back(stream: str, known: int, head: int) -> StrataError:
    return StrataError(
        Code.CORRUPT,
        f"the database has lost facts of stream {stream!r}: of {known} that were committed some are missing,"
        f" and it has {head} now",
        hint="it is a standby that had not received everything, or a backup: bring the right database back, or restart"
        " this process to go on with what is there",
        stream=stream,
        went_back=True,
    )


def truncated(stream: str, after: int, floor: int) -> StrataError:
    return StrataError(
        Code.GONE,
        f"facts of stream {stream!r} after position {after} are gone up to {floor}",
        hint="start from the newest snapshot",
        stream=stream,
        floor=floor,
    )


def not_covered(stream: str, through: int) -> StrataError:
    return StrataError(Code.PRECONDITION, f"no snapshot of stream {stream!r} covers position {through}", stream=stream)


def beyond_head(stream: str, position: int, head: int) -> StrataError:
    return StrataError(
        Code.PRECONDITION,
        f"a snapshot at {position} is beyond the head {head} of stream {stream!r}",
        stream=stream,
        head=head,
    )
