"""What every journal adapter promises: order, durability, the fence, exactly once."""

from __future__ import annotations

import asyncio

import pytest

from strata.base.errors import Code, StrataError
from strata.journal.port import MAX_FACT_BYTES, Batch, Journal, Lead
from strata.journal.replay import replay, tail
from tests.conformance.journal.conftest import OpenJournal

pytestmark = pytest.mark.proves("All journal adapters behave alike")

LEASE_S = 60.0


async def facts_of(journal: Journal, stream: str = "s", after: int = 0) -> list[bytes]:
    return [fact async for batch in replay(journal, stream, after) for fact in batch.facts]


async def refused(attempt: object) -> Code:
    with pytest.raises(StrataError) as caught:
        await attempt  # type: ignore[misc]
    return caught.value.code


async def test_positions_begin_at_one_and_have_no_gaps(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    assert (lead.epoch, lead.head) == (1, 0)
    assert await journal.append("s", lead.epoch, 0, [b"one"]) == 1
    assert await journal.append("s", lead.epoch, 1, [b"two", b"three"]) == 3
    batches = [batch async for batch in replay(journal, "s")]
    assert [(batch.first, batch.last, batch.epoch) for batch in batches] == [(1, 1, 1), (2, 3, 1)]
    assert await facts_of(journal) == [b"one", b"two", b"three"]


async def test_a_replay_can_start_inside_a_batch(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    await journal.append("s", lead.epoch, 0, [b"%d" % i for i in range(10)])
    assert await facts_of(journal, after=7) == [b"7", b"8", b"9"]
    assert await facts_of(journal, after=10) == []


async def test_streams_do_not_see_each_other(journal: Journal) -> None:
    first, second = await journal.lead("s", "a", LEASE_S), await journal.lead("t", "a", LEASE_S)
    await journal.append("s", first.epoch, 0, [b"in s"])
    await journal.append("t", second.epoch, 0, [b"in t"])
    assert await facts_of(journal, "s") == [b"in s"]
    assert await facts_of(journal, "t") == [b"in t"]


async def test_what_was_appended_is_there_after_reopening(open_again: OpenJournal) -> None:
    async with await open_again() as journal:
        lead = await journal.lead("s", "a", LEASE_S)
        await journal.append("s", lead.epoch, 0, [b"kept", bytes(range(256)), b""])
        await journal.resign("s", lead.epoch)
    async with await open_again() as journal:
        assert await facts_of(journal) == [b"kept", bytes(range(256)), b""]
        again = await journal.lead("s", "b", LEASE_S)
        assert (again.epoch, again.head) == (2, 3)


async def test_a_second_holder_waits_for_the_lease(journal: Journal) -> None:
    await journal.lead("s", "a", LEASE_S)
    assert await refused(journal.lead("s", "b", LEASE_S)) is Code.CONFLICT


async def test_a_holder_that_asks_again_gets_a_new_epoch_and_fences_itself(journal: Journal) -> None:
    lost_reply = await journal.lead("s", "a", LEASE_S)
    lead = await journal.lead("s", "a", LEASE_S)
    assert lead.epoch == lost_reply.epoch + 1
    assert await refused(journal.append("s", lost_reply.epoch, 0, [b"old"])) is Code.STALE


async def test_an_expired_lease_lets_the_next_one_in(journal: Journal) -> None:
    first = await journal.lead("s", "a", 0.02)

    async def second_lead() -> Lead:
        while True:
            try:
                return await journal.lead("s", "b", LEASE_S)
            except StrataError as error:
                if error.code is not Code.CONFLICT:
                    raise
            await asyncio.sleep(0.005)

    async with asyncio.timeout(5):
        second = await second_lead()
    assert second.epoch == first.epoch + 1


async def lease_of(journal: Journal) -> str:
    with pytest.raises(StrataError) as caught:
        await journal.lead("s", "b", LEASE_S)
    return str(caught.value.detail["lease"])


async def test_a_lease_seen_silent_for_its_whole_time_counts_as_over_but_not_one_that_was_renewed(
    journal: Journal,
) -> None:
    first = await journal.lead("s", "a", LEASE_S)
    seen = await lease_of(journal)
    assert await lease_of(journal) == seen
    await journal.renew("s", first.epoch, LEASE_S + 1)
    assert await refused(journal.lead("s", "b", LEASE_S, expired_lease=seen)) is Code.CONFLICT
    second = await journal.lead("s", "b", LEASE_S, expired_lease=await lease_of(journal))
    assert second.epoch == first.epoch + 1


async def test_a_renewed_lease_keeps_others_out(journal: Journal) -> None:
    lead = await journal.lead("s", "a", 0.0)
    await journal.renew("s", lead.epoch, LEASE_S)
    assert await refused(journal.lead("s", "b", LEASE_S)) is Code.CONFLICT


async def test_resigning_lets_a_standby_in_at_once_and_only_for_its_own_epoch(journal: Journal) -> None:
    first = await journal.lead("s", "a", LEASE_S)
    await journal.resign("s", first.epoch)
    second = await journal.lead("s", "b", LEASE_S)
    await journal.resign("s", first.epoch)
    assert await refused(journal.lead("s", "c", LEASE_S)) is Code.CONFLICT
    await journal.confirm("s", second.epoch)


async def test_a_deposed_leader_can_write_nothing(journal: Journal) -> None:
    old = await journal.lead("s", "a", 0.0)
    await journal.append("s", old.epoch, 0, [b"mine"])
    new = await journal.lead("s", "b", LEASE_S)
    assert new.head == 1
    assert await refused(journal.append("s", old.epoch, 1, [b"zombie"])) is Code.STALE
    assert await refused(journal.confirm("s", old.epoch)) is Code.STALE
    assert await refused(journal.renew("s", old.epoch, LEASE_S)) is Code.STALE
    assert await refused(journal.truncate("s", old.epoch, 1)) is Code.STALE
    assert await facts_of(journal) == [b"mine"]


async def test_a_batch_sent_twice_is_there_once(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    assert await journal.append("s", lead.epoch, 0, [b"x", b"y"]) == 2
    assert await journal.append("s", lead.epoch, 0, [b"x", b"y"]) == 2
    assert await journal.append("s", lead.epoch, 2, [b"z"]) == 3
    assert await journal.append("s", lead.epoch, 0, [b"x", b"y"]) == 2
    assert await facts_of(journal) == [b"x", b"y", b"z"]


async def test_a_repeated_batch_is_confirmed_even_to_a_deposed_leader_because_it_did_happen(journal: Journal) -> None:
    old = await journal.lead("s", "a", 0.0)
    await journal.append("s", old.epoch, 0, [b"committed, reply lost"])
    await journal.lead("s", "b", LEASE_S)
    assert await journal.append("s", old.epoch, 0, [b"committed, reply lost"]) == 1


@pytest.mark.parametrize(
    ("after", "facts"),
    [(0, [b"other"]), (0, [b"x", b"y", b"more"]), (0, [b"x"]), (1, [b"y"]), (5, [b"beyond"])],
    ids=["other content", "longer", "shorter", "in the middle", "beyond the head"],
)
async def test_another_batch_at_a_taken_place_is_a_conflict(journal: Journal, after: int, facts: list[bytes]) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    await journal.append("s", lead.epoch, 0, [b"x", b"y"])
    assert await refused(journal.append("s", lead.epoch, after, facts)) is Code.CONFLICT
    assert await facts_of(journal) == [b"x", b"y"]


async def test_of_many_appends_at_one_place_one_wins(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    tries = [journal.append("s", lead.epoch, 0, [b"%d" % i]) for i in range(16)]
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(outcome == 1 for outcome in outcomes) == 1
    assert len(await facts_of(journal)) == 1


async def test_of_many_candidates_each_epoch_goes_to_one(journal: Journal) -> None:
    outcomes = await asyncio.gather(*(journal.lead("s", f"h{i}", LEASE_S) for i in range(16)), return_exceptions=True)
    assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 1


async def test_an_unknown_stream_is_not_found(journal: Journal) -> None:
    assert await refused(journal.append("nowhere", 1, 0, [b"x"])) is Code.NOT_FOUND
    assert await refused(journal.read("nowhere", 0)) is Code.NOT_FOUND
    assert await refused(journal.load_snapshot("nowhere")) is Code.NOT_FOUND
    assert await refused(journal.confirm("nowhere", 1)) is Code.NOT_FOUND
    assert await refused(journal.wait_for_growth("nowhere", 0, 0.0)) is Code.NOT_FOUND
    assert await refused(journal.truncate("nowhere", 1, 0)) is Code.NOT_FOUND


@pytest.mark.parametrize("name", ["", " s", "s s", "s\n", "s\x00", "é", "-s", "s" * 201, "../s", "'; DROP TABLE"])
async def test_a_strange_stream_name_is_refused(journal: Journal, name: str) -> None:
    assert await refused(journal.lead(name, "a", LEASE_S)) is Code.INVALID


async def test_empty_and_oversized_appends_are_refused(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    assert await refused(journal.append("s", lead.epoch, 0, [])) is Code.INVALID
    assert await refused(journal.append("s", lead.epoch, 0, [b"x" * (MAX_FACT_BYTES + 1)])) is Code.INVALID
    assert await journal.append("s", lead.epoch, 0, [b"x" * MAX_FACT_BYTES]) == 1


async def test_a_large_stream_is_read_page_by_page(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    position = 0
    for _ in range(12):
        position = await journal.append("s", lead.epoch, position, [b"x" * 1_000_000])
    page = await journal.read("s", 0)
    assert 0 < len(page) < 12
    assert len(await facts_of(journal)) == 12


async def test_grown_returns_when_the_head_moves_and_not_before(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    assert await journal.wait_for_growth("s", 0, 0.01) == 0
    waiting = asyncio.create_task(journal.wait_for_growth("s", 0, 30.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await journal.append("s", lead.epoch, 0, [b"x"])
    async with asyncio.timeout(5):
        assert await waiting == 1


async def test_a_tail_sees_what_is_appended_behind_it(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    seen: list[Batch] = []

    async def watch() -> None:
        async for batch in tail(journal, "s"):
            seen.append(batch)
            if batch.last == 5:
                return

    watching = asyncio.create_task(watch())
    for position in range(5):
        await journal.append("s", lead.epoch, position, [b"%d" % position])
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await watching
    assert [fact for batch in seen for fact in batch.facts] == [b"0", b"1", b"2", b"3", b"4"]


async def test_the_status_tells_what_an_operator_needs(journal: Journal) -> None:
    lead = await journal.lead("s", "holder-1", LEASE_S)
    await journal.append("s", lead.epoch, 0, [b"x", b"y"])
    (status,) = await journal.streams()
    assert (status.stream, status.epoch, status.holder, status.led) == ("s", 1, "holder-1", True)
    assert (status.head, status.floor, status.snapshot) == (2, 0, None)
    await journal.resign("s", lead.epoch)
    (status,) = await journal.streams()
    assert not status.led


async def test_what_is_no_fact_no_holder_no_lease_and_no_position_is_refused(journal: Journal) -> None:
    lead = await journal.lead("s", "a", LEASE_S)
    assert await refused(journal.append("s", lead.epoch, 0, ["text"])) is Code.INVALID  # type: ignore[list-item]
    assert await refused(journal.append("s", lead.epoch, 1 << 63, [b"x"])) is Code.INVALID
    assert await refused(journal.append("s", lead.epoch, 0, [bytes(1 << 20)] * 65)) is Code.INVALID
    assert await refused(journal.read("s", -1)) is Code.INVALID
    assert await refused(journal.read("s", 1 << 63)) is Code.INVALID
    assert await refused(journal.renew("s", lead.epoch, float("inf"))) is Code.INVALID
    assert await refused(journal.lead("t", "a", float("nan"))) is Code.INVALID
    for holder in ("", "a b", "nul\x00", "\ud800", "x" * 201):
        assert await refused(journal.lead("t", holder, LEASE_S)) is Code.INVALID
