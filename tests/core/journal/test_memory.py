"""The memory journal's log: torn tails, damage, compaction."""

from __future__ import annotations

import pytest

from strata.base.clock import SystemClock
from strata.journal.port import Snapshot
from strata.journal.replay import replay
from tests.support.memory_journal import MemoryDisk, MemoryJournal


def disk_with(content: bytes) -> MemoryDisk:
    disk = MemoryDisk()
    disk.write(content)
    return disk


async def written(batches: int) -> tuple[bytes, list[int]]:
    """A log with so many batches of two facts, and its length after each."""
    disk = MemoryDisk()
    journal = MemoryJournal(SystemClock(), disk)
    lead = await journal.lead("s", "a", 60.0)
    ends = [len(disk.read())]
    for number in range(batches):
        await journal.append("s", lead.epoch, 2 * number, [b"a%d" % number, b"b%d" % number])
        ends.append(len(disk.read()))
    return disk.read(), ends


async def facts_in(disk: MemoryDisk) -> list[bytes]:
    journal = MemoryJournal(SystemClock(), disk)
    return [fact async for batch in replay(journal, "s") for fact in batch.facts]


@pytest.mark.proves("A log torn at any byte gives whole batches only")
@pytest.mark.parametrize("filler", [b"", b"\x00" * 300, b"\xff" * 300], ids=["cut", "zeros", "ones"])
async def test_a_log_torn_at_any_byte_gives_whole_batches_only(filler: bytes) -> None:
    log, ends = await written(5)
    for length in range(ends[0], len(log)):
        disk = disk_with(log[:length] + filler)
        whole = sum(end <= length for end in ends) - 1
        expected = [fact for n in range(whole) for fact in (b"a%d" % n, b"b%d" % n)]
        assert await facts_in(disk) == expected, f"torn at {length}"
        assert len(disk.read()) == ends[whole], "the torn tail must be cut off"


async def test_a_changed_byte_ends_the_log_before_it() -> None:
    log, ends = await written(3)
    for at in range(ends[1], ends[2]):
        damaged = bytearray(log)
        damaged[at] ^= 0x10
        assert await facts_in(disk_with(bytes(damaged))) == [b"a0", b"b0"]


async def test_writing_goes_on_after_a_torn_tail() -> None:
    log, ends = await written(3)
    disk = disk_with(log[: ends[3] - 1])
    journal = MemoryJournal(SystemClock(), disk)
    lead = await journal.lead("s", "a", 60.0)
    assert lead.head == 4
    await journal.append("s", lead.epoch, 4, [b"new"])
    assert await facts_in(disk) == [b"a0", b"b0", b"a1", b"b1", b"new"]


async def test_truncation_makes_the_log_shorter() -> None:
    disk = MemoryDisk()
    journal = MemoryJournal(SystemClock(), disk)
    lead = await journal.lead("s", "a", 60.0)
    for position in range(100):
        await journal.append("s", lead.epoch, position, [b"x" * 100])
    before = len(disk.read())
    await journal.save_snapshot("s", lead.epoch, Snapshot(100, lead.epoch, b"state"))
    await journal.truncate("s", lead.epoch, 100)
    assert len(disk.read()) < before / 20
