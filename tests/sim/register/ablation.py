"""The safeguards, each taken out in turn. The simulation must notice every one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from strata.base.errors import Code, StrataError
from strata.journal.group_commit import Writer, WriterLimits
from strata.journal.port import Batch, Lead
from tests.sim.register.core import Register, Reply, Request
from tests.sim.register.node import RegisterReplica
from tests.support.memory_journal import HEADER, Frame, Led, MemoryJournal, StreamLog, decode_frame


class EpochNotChecked(MemoryJournal):
    def _fence(self, stream: str, found: StreamLog, epoch: int) -> None:
        return


class ReplyBeforeCommit(MemoryJournal):
    async def _commit(self, frame: Frame) -> None:
        self._write(frame)
        self._take(frame)
        self._late = asyncio.get_running_loop().create_task(self._disk.sync())


class TornTailAccepted(MemoryJournal):
    def _whole_frame(self, log: bytes, offset: int) -> tuple[Frame, int] | None:
        start = offset + HEADER.size
        if start > len(log):
            return None
        length, _ = HEADER.unpack_from(log, offset)
        try:
            return decode_frame(log[start : start + length]), start + length
        except msgspec.DecodeError:
            return None


class DuplicateAppendNotRecognised(MemoryJournal):
    def _is_duplicate(self, found: StreamLog, batch: Batch) -> bool:
        return False

    def _placed(self, stream: str, found: StreamLog, batch: Batch) -> Batch:
        return Batch(found.head + 1, batch.epoch, batch.facts)


class DuplicateAppendRefused(MemoryJournal):
    """The place is checked, but a batch that stands there already is taken for somebody else's."""

    def _is_duplicate(self, found: StreamLog, batch: Batch) -> bool:
        return False


class AppendNotFenced(MemoryJournal):
    """Only the place decides: a deposed leader may write where nobody has written yet."""

    async def append(self, stream: str, epoch: int, after: int, facts: Sequence[bytes]) -> int:
        return await super().append(stream, self._find(stream).epoch, after, facts)


class EpochForgotten(MemoryJournal):
    """A new epoch is not durable: after a crash the same one is given out again."""

    async def _commit(self, frame: Frame) -> None:
        if isinstance(frame, Led):
            self._take(frame)
        else:
            await super()._commit(frame)


class GoneNotSaid(MemoryJournal):
    """What was truncated looks like nothing."""

    async def read(self, stream: str, after: int) -> list[Batch]:
        return await super().read(stream, max(after, self._find(stream).floor))


class RepeatedRequestNotRecognised(Register):
    def is_repeated(self, number: int, last: int) -> bool:
        return False


JOURNALS: dict[str, type[MemoryJournal]] = {
    "epoch not checked": EpochNotChecked,
    "reply before commit": ReplyBeforeCommit,
    "torn tail accepted": TornTailAccepted,
    "duplicate append not recognised": DuplicateAppendNotRecognised,
    "duplicate append refused": DuplicateAppendRefused,
    "append not fenced": AppendNotFenced,
    "new epoch not durable": EpochForgotten,
    "truncation not said": GoneNotSaid,
}


class UnsettledReplica(RegisterReplica):
    """Answers before the facts it saw are durable."""

    async def submit(self, given: Request) -> Reply | None:
        writer = self._require_writer()
        facts, effect = self._machine.decide(self._state, given, 0.0)
        if facts:
            writer.submit(facts)
            self._apply_own(writer, facts)
        return effect


class ColdReplica(RegisterReplica):
    """Leads without reading to the head first."""

    async def _start_leading(self, lead: Lead, lease_s: float, limits: WriterLimits | None) -> None:
        self._position = lead.head
        self._writer = Writer(self._journal, lead, self._clock, limits)


class StubbornReplica(RegisterReplica):
    """Goes on answering reads when it was deposed."""

    async def confirm(self) -> None:
        return

    async def lead_until_replaced(self, lease_s: float, *, snapshot_every: int | None = None) -> StrataError:
        await asyncio.sleep(20 * lease_s)
        return StrataError(Code.UNAVAILABLE, "enough")


MACHINES: dict[str, type[Register]] = {"repeated request not recognised": RepeatedRequestNotRecognised}
REPLICAS: dict[str, type[RegisterReplica]] = {
    "reply before facts are durable": UnsettledReplica,
    "lead without catching up": ColdReplica,
    "a deposed leader answers": StubbornReplica,
}
EVERY = [*JOURNALS, *MACHINES, *REPLICAS]
