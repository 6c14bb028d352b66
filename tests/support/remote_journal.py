"""A journal behind a wire: the calls as messages, for a simulated database server that nodes reach over the network.

It passes the conformance suite of the adapters, so what the simulation proves on it holds for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar, assert_never

import msgspec

from strata.base.errors import Code, StrataError
from strata.journal.port import Batch, Journal, Lead, Snapshot, StreamStatus


class JournalCall(msgspec.Struct, frozen=True, tag=True):
    stream: str


class LeadCall(JournalCall, frozen=True, tag=True):
    holder: str
    lease_s: float
    expired_lease: str | None


class RenewCall(JournalCall, frozen=True, tag=True):
    epoch: int
    lease_s: float


class ResignCall(JournalCall, frozen=True, tag=True):
    epoch: int


class ConfirmCall(JournalCall, frozen=True, tag=True):
    epoch: int


class AppendCall(JournalCall, frozen=True, tag=True):
    epoch: int
    after: int
    facts: Sequence[bytes]


class ReadCall(JournalCall, frozen=True, tag=True):
    after: int


class GrownCall(JournalCall, frozen=True, tag=True):
    after: int
    timeout_s: float


class SaveCall(JournalCall, frozen=True, tag=True):
    epoch: int
    snapshot: Snapshot


class LoadCall(JournalCall, frozen=True, tag=True):
    pass


class TruncateCall(JournalCall, frozen=True, tag=True):
    epoch: int
    through: int


class StreamsCall(JournalCall, frozen=True, tag=True):
    pass


T = TypeVar("T")
AnyCall = (
    LeadCall
    | RenewCall
    | ResignCall
    | ConfirmCall
    | AppendCall
    | ReadCall
    | GrownCall
    | SaveCall
    | LoadCall
    | TruncateCall
    | StreamsCall
)
Transport = Callable[[bytes], Awaitable[bytes]]
"""Sends a request and gives the reply; raises the StrataError of the other side, UNAVAILABLE if there was no reply."""

_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(AnyCall).decode


async def serve(journal: Journal, request: bytes) -> bytes:
    """Answer one call."""
    try:
        call = _decode_call(request)
    except msgspec.DecodeError as error:
        raise StrataError(Code.INVALID, f"not a call of a journal: {error}") from error
    return _encode(await _serve_call(journal, call))


async def _serve_call(journal: Journal, call: AnyCall) -> object:  # noqa: C901, PLR0911 - one arm per call
    match call:
        case LeadCall():
            return await journal.lead(call.stream, call.holder, call.lease_s, expired_lease=call.expired_lease)
        case RenewCall():
            await journal.renew(call.stream, call.epoch, call.lease_s)
        case ResignCall():
            await journal.resign(call.stream, call.epoch)
        case ConfirmCall():
            await journal.confirm(call.stream, call.epoch)
        case AppendCall():
            return await journal.append(call.stream, call.epoch, call.after, call.facts)
        case ReadCall():
            return await journal.read(call.stream, call.after)
        case GrownCall():
            return await journal.wait_for_growth(call.stream, call.after, call.timeout_s)
        case SaveCall():
            await journal.save_snapshot(call.stream, call.epoch, call.snapshot)
        case LoadCall():
            found = await journal.load_snapshot(call.stream)
            return [] if found is None else [found]
        case TruncateCall():
            await journal.truncate(call.stream, call.epoch, call.through)
        case StreamsCall():
            return await journal.streams()
        case _:
            assert_never(call)
    return None


class RemoteJournal:
    """The client's side."""

    def __init__(self, transport: Transport, longest_wait_s: float = 60.0) -> None:
        self._transport = transport
        # The transport gives up on a reply at some time; a wait at the other side has to end before.
        self._longest_wait_s = longest_wait_s

    async def lead(self, stream: str, holder: str, lease_s: float, *, expired_lease: str | None = None) -> Lead:
        return await self._query(LeadCall(stream, holder, lease_s, expired_lease), Lead)

    async def renew(self, stream: str, epoch: int, lease_s: float) -> None:
        await self._command(RenewCall(stream, epoch, lease_s))

    async def resign(self, stream: str, epoch: int) -> None:
        await self._command(ResignCall(stream, epoch))

    async def confirm(self, stream: str, epoch: int) -> None:
        await self._command(ConfirmCall(stream, epoch))

    async def append(self, stream: str, epoch: int, after: int, facts: Sequence[bytes]) -> int:
        return await self._query(AppendCall(stream, epoch, after, facts), int)

    async def read(self, stream: str, after: int) -> list[Batch]:
        return await self._query(ReadCall(stream, after), list[Batch])

    async def wait_for_growth(self, stream: str, after: int, timeout_s: float) -> int:
        return await self._query(GrownCall(stream, after, min(timeout_s, self._longest_wait_s)), int)

    async def save_snapshot(self, stream: str, epoch: int, snapshot: Snapshot) -> None:
        await self._command(SaveCall(stream, epoch, snapshot))

    async def load_snapshot(self, stream: str) -> Snapshot | None:
        found = await self._query(LoadCall(stream), list[Snapshot])
        return found[0] if found else None

    async def truncate(self, stream: str, epoch: int, through: int) -> None:
        await self._command(TruncateCall(stream, epoch, through))

    async def streams(self) -> list[StreamStatus]:
        return await self._query(StreamsCall(""), list[StreamStatus])

    async def close(self) -> None:
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _command(self, call: AnyCall) -> None:
        await self._transport(_encoded(call))

    async def _query(self, call: AnyCall, reply: type[T]) -> T:
        return msgspec.msgpack.decode(await self._transport(_encoded(call)), type=reply)


def _encoded(call: AnyCall) -> bytes:
    try:
        return _encode(call)
    except (UnicodeEncodeError, OverflowError) as error:
        raise StrataError(Code.INVALID, f"this cannot be sent: {error}") from error
