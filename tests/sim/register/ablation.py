"""The safeguards, each taken out in turn. The simulation must notice every one of them."""

from __future__ import annotations

import asyncio

import msgspec

from strata.journal.memory import HEADER, Frame, MemoryJournal, StreamLog, decode_frame
from strata.journal.port import Batch
from tests.sim.register.core import Register


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


class RepeatedRequestNotRecognised(Register):
    def is_repeated(self, number: int, last: int) -> bool:
        return False


JOURNALS: dict[str, type[MemoryJournal]] = {
    "epoch not checked": EpochNotChecked,
    "reply before commit": ReplyBeforeCommit,
    "torn tail accepted": TornTailAccepted,
    "duplicate append not recognised": DuplicateAppendNotRecognised,
}
MACHINES: dict[str, type[Register]] = {"repeated request not recognised": RepeatedRequestNotRecognised}
EVERY = [*JOURNALS, *MACHINES]
