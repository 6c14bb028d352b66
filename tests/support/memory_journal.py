"""A journal in memory over a log of frames on a `Disk`, for tests and simulation.

The disk is where a simulation tears things: a frame that was not synced may be lost, or be there in part. Opening reads
the frames, checks each and drops the torn tail, as a real log does. The small methods at the end of the class each are
one safeguard; the simulation replaces them one by one to prove that it would notice.
"""

from __future__ import annotations

import asyncio
import bisect
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar
from zlib import crc32

import msgspec

from strata.base.clock import Clock
from strata.journal.encoding import pack
from strata.journal.port import (
    PAGE_BYTES,
    Batch,
    Lead,
    Snapshot,
    StreamStatus,
    beyond_head,
    check_candidate,
    check_facts,
    check_lease,
    check_position,
    check_snapshot,
    lease_held,
    not_covered,
    stale,
    truncated,
    unknown_stream,
    wrong_position,
)


class Disk(Protocol):
    """An append-only file. What `sync` has returned for survives a crash; of the rest any prefix may."""

    def read(self) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    async def sync(self) -> None: ...

    async def replace(self, data: bytes) -> None:
        """Atomically make `data` the whole content, durable."""
        ...

    def cut(self, length: int) -> None:
        """Drop everything after the first `length` bytes."""
        ...


class MemoryDisk:
    """Its content ends with the process."""

    def __init__(self) -> None:
        self._content = bytearray()

    def read(self) -> bytes:
        return bytes(self._content)

    def write(self, data: bytes) -> None:
        self._content += data

    async def sync(self) -> None:
        return

    async def replace(self, data: bytes) -> None:
        self._content[:] = data

    def cut(self, length: int) -> None:
        del self._content[length:]


class Led(msgspec.Struct, frozen=True, tag=True):
    stream: str
    epoch: int
    holder: str
    expires_s: float
    floor: int


class Appended(msgspec.Struct, frozen=True, tag=True):
    stream: str
    batch: Batch


class Snapshotted(msgspec.Struct, frozen=True, tag=True):
    stream: str
    snapshot: Snapshot


T = TypeVar("T")

Frame = Led | Appended | Snapshotted

HEADER = struct.Struct("<II")
_encode = msgspec.msgpack.Encoder().encode
decode_frame = msgspec.msgpack.Decoder(Frame).decode


@dataclass
class StreamLog:
    """All there is to know of one stream."""

    epoch: int = 0
    holder: str = ""
    expires_s: float = 0.0
    head: int = 0
    floor: int = 0
    batches: list[Batch] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    growth: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryJournal:
    def __init__(self, clock: Clock, disk: Disk | None = None) -> None:
        self._clock = clock
        self._disk = disk or MemoryDisk()
        self._streams: dict[str, StreamLog] = {}
        self._turn = asyncio.Lock()
        for frame in self._frames(self._disk.read()):
            self._take(frame)

    async def lead(self, stream: str, holder: str, lease_s: float, *, expired_lease: str | None = None) -> Lead:
        check_candidate(stream, holder, lease_s)

        async def take() -> Lead:
            found = self._streams.get(stream, StreamLog())
            now_s = self._clock.wall_s()
            lease = f"{found.epoch}@{found.expires_s}"
            if found.holder != holder and found.expires_s > now_s and lease != expired_lease:
                raise lease_held(stream, found.holder, lease)
            lead = Lead(stream, found.epoch + 1, found.head)
            await self._commit(Led(stream, lead.epoch, holder, now_s + lease_s, found.floor))
            return lead

        return await self._in_turn(take)

    async def renew(self, stream: str, epoch: int, lease_s: float) -> None:
        check_lease(lease_s)
        # Kept in memory only: losing it in a crash lets a standby try sooner, and the epoch still decides.
        found = self._find(stream)
        self._fence(stream, found, epoch)
        found.expires_s = self._clock.wall_s() + lease_s

    async def resign(self, stream: str, epoch: int) -> None:
        async def end() -> None:
            found = self._find(stream)
            if found.epoch == epoch:
                await self._commit(Led(stream, epoch, found.holder, 0.0, found.floor))

        await self._in_turn(end)

    async def confirm(self, stream: str, epoch: int) -> None:
        self._fence(stream, self._find(stream), epoch)

    async def append(self, stream: str, epoch: int, after: int, facts: Sequence[bytes]) -> int:
        check_facts(facts)
        check_position(after)

        async def add() -> int:
            found = self._find(stream)
            batch = Batch(after + 1, epoch, tuple(facts))
            if self._is_duplicate(found, batch):
                return batch.last
            self._fence(stream, found, epoch)
            batch = self._placed(stream, found, batch)
            await self._commit(Appended(stream, batch))
            return batch.last

        return await self._in_turn(add)

    async def read(self, stream: str, after: int) -> list[Batch]:
        check_position(after)
        found = self._find(stream)
        if after < found.floor:
            raise truncated(stream, after, found.floor)
        page: list[Batch] = []
        size = 0
        start = bisect.bisect_right(found.batches, after, key=lambda batch: batch.last)
        for batch in found.batches[start:]:
            page.append(batch.after(after))
            size += sum(map(len, batch.facts))
            if size >= PAGE_BYTES:
                break
        return page

    async def wait_for_growth(self, stream: str, after: int, timeout_s: float) -> int:
        found = self._find(stream)
        try:
            async with asyncio.timeout(timeout_s):
                while found.head <= after:
                    await found.growth.wait()
        except TimeoutError:
            pass
        return found.head

    async def save_snapshot(self, stream: str, epoch: int, snapshot: Snapshot) -> None:
        check_snapshot(snapshot)

        async def save() -> None:
            found = self._find(stream)
            self._fence(stream, found, epoch)
            if snapshot.position > found.head:
                raise beyond_head(stream, snapshot.position, found.head)
            if all(kept.position != snapshot.position for kept in found.snapshots):
                await self._commit(Snapshotted(stream, snapshot))

        await self._in_turn(save)

    async def load_snapshot(self, stream: str) -> Snapshot | None:
        return max(self._find(stream).snapshots, key=lambda snapshot: snapshot.position, default=None)

    async def truncate(self, stream: str, epoch: int, through: int) -> None:
        check_position(through)

        async def forget() -> None:
            found = self._find(stream)
            self._fence(stream, found, epoch)
            covering = [kept for kept in found.snapshots if kept.position >= through]
            if not covering:
                raise not_covered(stream, through)
            found.floor = max(found.floor, through)
            found.batches = [batch for batch in found.batches if batch.last > through]
            found.snapshots = covering
            await self._disk.replace(b"".join(map(_framed, self._image())))

        await self._in_turn(forget)

    async def streams(self) -> list[StreamStatus]:
        now_s = self._clock.wall_s()
        return [
            StreamStatus(
                stream=name,
                epoch=found.epoch,
                holder=found.holder,
                led=found.expires_s > now_s,
                head=found.head,
                floor=found.floor,
                snapshot=max((kept.position for kept in found.snapshots), default=None),
            )
            for name, found in sorted(self._streams.items())
        ]

    async def close(self) -> None:
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _in_turn(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One change at a time, each to its end even if its caller stops waiting: half a change must not be seen."""

        async def whole() -> T:
            async with self._turn:
                return await change()

        return await asyncio.shield(asyncio.get_running_loop().create_task(whole()))

    def _find(self, stream: str) -> StreamLog:
        found = self._streams.get(stream)
        if found is None:
            raise unknown_stream(stream)
        return found

    def _take(self, frame: Frame) -> None:
        found = self._streams.setdefault(frame.stream, StreamLog())
        match frame:
            case Led():
                found.epoch, found.holder, found.expires_s = frame.epoch, frame.holder, frame.expires_s
                found.floor = frame.floor
                found.head = max(found.head, frame.floor)
            case Appended():
                found.batches.append(frame.batch)
                found.head = frame.batch.last
                found.growth.set()
                found.growth = asyncio.Event()
            case Snapshotted():
                found.snapshots.append(frame.snapshot)
                found.head = max(found.head, frame.snapshot.position)

    def _image(self) -> Iterator[Frame]:
        """The shortest log that rebuilds the present state."""
        for name, found in self._streams.items():
            yield Led(name, found.epoch, found.holder, found.expires_s, found.floor)
            yield from (Appended(name, batch) for batch in found.batches)
            yield from (Snapshotted(name, kept) for kept in found.snapshots)

    # The safeguards.

    async def _commit(self, frame: Frame) -> None:
        """Durable first; readers see it only then."""
        self._write(frame)
        await self._disk.sync()
        self._take(frame)

    def _write(self, frame: Frame) -> None:
        self._disk.write(_framed(frame))

    def _fence(self, stream: str, found: StreamLog, epoch: int) -> None:
        if found.epoch != epoch:
            raise stale(stream, epoch, found.epoch)

    def _is_duplicate(self, found: StreamLog, batch: Batch) -> bool:
        start = bisect.bisect_left(found.batches, batch.first, key=lambda kept: kept.first)
        kept = found.batches[start] if start < len(found.batches) else None
        return (
            kept is not None
            and (kept.first, kept.epoch) == (batch.first, batch.epoch)
            and pack(kept.facts) == pack(batch.facts)
        )

    def _placed(self, stream: str, found: StreamLog, batch: Batch) -> Batch:
        if batch.first != found.head + 1:
            raise wrong_position(stream, batch.first - 1, found.head)
        return batch

    def _frames(self, log: bytes) -> Iterator[Frame]:
        """The frames up to the first one that is not whole; the log is cut there."""
        offset = 0
        while (found := self._whole_frame(log, offset)) is not None:
            frame, offset = found
            yield frame
        if offset < len(log):
            self._disk.cut(offset)

    def _whole_frame(self, log: bytes, offset: int) -> tuple[Frame, int] | None:
        """The frame at an offset and the offset after it, or None if it is torn or there is none."""
        start = offset + HEADER.size
        if start > len(log):
            return None
        length, checksum = HEADER.unpack_from(log, offset)
        payload = log[start : start + length]
        # A file that grew before its bytes came reads as zeros, and the checksum of nothing is zero.
        if length == 0 or len(payload) < length or crc32(payload) != checksum:
            return None
        return decode_frame(payload), start + length


def _framed(frame: Frame) -> bytes:
    payload = _encode(frame)
    return HEADER.pack(len(payload), crc32(payload)) + payload
