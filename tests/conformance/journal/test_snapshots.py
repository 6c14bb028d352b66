"""What every journal adapter promises of snapshots and truncation."""

from __future__ import annotations

from strata.base.errors import Code
from strata.journal.port import MAX_STATE_BYTES, Journal, Snapshot
from tests.conformance.journal.conftest import OpenJournal
from tests.conformance.journal.test_streams import LEASE_S, facts_of, refused


async def led(journal: Journal, facts: int) -> int:
    lead = await journal.lead("s", "a", LEASE_S)
    for position in range(facts):
        await journal.append("s", lead.epoch, position, [b"%d" % (position + 1)])
    return lead.epoch


async def test_there_is_no_snapshot_at_first(journal: Journal) -> None:
    await led(journal, 1)
    assert await journal.load_snapshot("s") is None


async def test_the_newest_snapshot_is_loaded(journal: Journal) -> None:
    epoch = await led(journal, 5)
    await journal.save_snapshot("s", epoch, Snapshot(2, epoch, b"two"))
    await journal.save_snapshot("s", epoch, Snapshot(4, epoch, b"four"))
    await journal.save_snapshot("s", epoch, Snapshot(3, epoch, b"three"))
    assert await journal.load_snapshot("s") == Snapshot(4, epoch, b"four")


async def test_a_snapshot_saved_twice_is_the_same(journal: Journal) -> None:
    epoch = await led(journal, 2)
    await journal.save_snapshot("s", epoch, Snapshot(2, epoch, b"state"))
    await journal.save_snapshot("s", epoch, Snapshot(2, epoch, b"state"))
    assert await journal.load_snapshot("s") == Snapshot(2, epoch, b"state")


async def test_a_snapshot_beyond_the_head_is_refused(journal: Journal) -> None:
    epoch = await led(journal, 2)
    assert await refused(journal.save_snapshot("s", epoch, Snapshot(3, epoch, b""))) is Code.PRECONDITION
    assert await journal.load_snapshot("s") is None


async def test_a_deposed_leader_saves_no_snapshot(journal: Journal) -> None:
    old = await journal.lead("s", "a", 0.0)
    await journal.append("s", old.epoch, 0, [b"x"])
    await journal.lead("s", "b", LEASE_S)
    assert await refused(journal.save_snapshot("s", old.epoch, Snapshot(1, old.epoch, b""))) is Code.STALE


async def test_an_oversized_snapshot_is_refused(journal: Journal) -> None:
    epoch = await led(journal, 1)
    state = b"x" * (MAX_STATE_BYTES + 1)
    assert await refused(journal.save_snapshot("s", epoch, Snapshot(1, epoch, state))) is Code.INVALID


async def test_only_what_a_snapshot_covers_can_be_forgotten(journal: Journal) -> None:
    epoch = await led(journal, 5)
    assert await refused(journal.truncate("s", epoch, 1)) is Code.PRECONDITION
    await journal.save_snapshot("s", epoch, Snapshot(3, epoch, b"three"))
    assert await refused(journal.truncate("s", epoch, 4)) is Code.PRECONDITION
    assert await facts_of(journal) == [b"1", b"2", b"3", b"4", b"5"]


async def test_truncation_keeps_what_comes_after_and_says_gone_below(journal: Journal) -> None:
    epoch = await led(journal, 5)
    await journal.save_snapshot("s", epoch, Snapshot(3, epoch, b"three"))
    await journal.truncate("s", epoch, 3)
    assert await facts_of(journal, after=3) == [b"4", b"5"]
    assert await refused(journal.read("s", 2)) is Code.GONE
    await journal.truncate("s", epoch, 2)
    (status,) = await journal.streams()
    assert (status.head, status.floor, status.snapshot) == (5, 3, 3)


async def test_truncation_inside_a_batch_keeps_its_rest(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    await journal.append("s", lead.epoch, 0, [b"1", b"2", b"3", b"4"])
    await journal.save_snapshot("s", lead.epoch, Snapshot(2, lead.epoch, b"two"))
    await journal.truncate("s", lead.epoch, 2)
    assert await facts_of(journal, after=2) == [b"3", b"4"]
    assert await refused(journal.read("s", 1)) is Code.GONE


async def test_truncation_drops_older_snapshots_only(journal: Journal) -> None:
    epoch = await led(journal, 5)
    for position in (1, 3, 5):
        await journal.save_snapshot("s", epoch, Snapshot(position, epoch, b"%d" % position))
    await journal.truncate("s", epoch, 3)
    assert await journal.load_snapshot("s") == Snapshot(5, epoch, b"5")


async def test_a_stream_truncated_to_its_head_goes_on_after_reopening(open_again: OpenJournal) -> None:
    async with await open_again() as journal:
        epoch = await led(journal, 3)
        await journal.save_snapshot("s", epoch, Snapshot(3, epoch, b"three"))
        await journal.truncate("s", epoch, 3)
        await journal.resign("s", epoch)
    async with await open_again() as journal:
        assert await facts_of(journal, after=3) == []
        lead = await journal.lead("s", "b", LEASE_S)
        assert lead.head == 3
        assert await journal.append("s", lead.epoch, 3, [b"4"]) == 4
        assert await journal.load_snapshot("s") == Snapshot(3, epoch, b"three")
