"""Group commit: what shares a commit, who hears when, and how a writer fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff
from strata.journal.group_commit import Writer, WriterLimits
from strata.journal.port import Journal
from strata.journal.replay import replay
from tests.support.manual_clock import ManualClock
from tests.support.memory_journal import MemoryDisk, MemoryJournal
from tests.support.remote_journal import RemoteJournal, Transport, serve
from tests.support.turns import turns


class GatedDisk(MemoryDisk):
    """Counts syncs, and holds them back while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def sync(self) -> None:
        self.syncs += 1
        await self.gate.wait()


async def led(journal: Journal, limits: WriterLimits | None = None) -> Writer:
    return Writer(journal, await journal.lead("s", "a", 60.0), SystemClock(), limits)


async def facts_of(journal: Journal) -> list[bytes]:
    return [fact async for batch in replay(journal, "s") for fact in batch.facts]


async def test_a_lone_append_costs_one_commit() -> None:
    disk = GatedDisk()
    writer = await led(MemoryJournal(SystemClock(), disk))
    before = disk.syncs
    assert await writer.append([b"x", b"y"]) == 2
    assert disk.syncs - before == 1


async def test_appends_made_while_a_commit_runs_share_the_next_one() -> None:
    disk = GatedDisk()
    journal = MemoryJournal(SystemClock(), disk)
    writer = await led(journal)
    before = disk.syncs
    disk.gate.clear()
    first = writer.submit([b"0"])
    await turns()
    rest = [writer.submit([b"%d" % i]) for i in range(1, 1000)]
    disk.gate.set()
    assert await first == 1
    assert await asyncio.gather(*rest) == list(range(2, 1001))
    assert disk.syncs - before == 2
    assert await facts_of(journal) == [b"%d" % i for i in range(1000)]


async def test_nobody_hears_before_the_commit() -> None:
    disk = GatedDisk()
    journal = MemoryJournal(SystemClock(), disk)
    writer = await led(journal)
    disk.gate.clear()
    told = writer.submit([b"x"])
    settled = asyncio.create_task(writer.settled())
    await turns()
    assert not told.done()
    assert not settled.done()
    assert (writer.submitted, writer.durable) == (1, 0)
    disk.gate.set()
    assert await told == 1
    await settled
    assert writer.durable == 1


async def test_a_batch_has_a_bound_and_a_queue_too() -> None:
    disk = GatedDisk()
    journal = MemoryJournal(SystemClock(), disk)
    writer = await led(journal, WriterLimits(max_batch_bytes=250, max_pending_bytes=1000))
    before = disk.syncs
    disk.gate.clear()
    taken = [writer.submit([b"x" * 100]) for _ in range(10)]
    for refused in (lambda: writer.submit([b"x" * 100]), writer.check_capacity):
        with pytest.raises(StrataError) as caught:
            refused()
        assert caught.value.code is Code.EXHAUSTED
    disk.gate.set()
    await asyncio.gather(*taken)
    assert disk.syncs - before == 5
    assert await writer.append([b"room again"]) == 11


async def test_a_caller_who_stops_waiting_does_not_stop_the_fact() -> None:
    disk = GatedDisk()
    journal = MemoryJournal(SystemClock(), disk)
    writer = await led(journal)
    disk.gate.clear()
    impatient = asyncio.create_task(writer.append([b"kept"]))
    await turns()
    impatient.cancel()
    disk.gate.set()
    assert await writer.append([b"next"]) == 2
    assert await facts_of(journal) == [b"kept", b"next"]


async def test_a_deposed_writer_fails_all_that_wait_and_all_that_come() -> None:
    journal = MemoryJournal(SystemClock())
    writer = await led(journal)
    await journal.resign("s", writer.lead.epoch)
    await journal.lead("s", "b", 60.0)
    waiting = [writer.submit([b"x"]), writer.submit([b"y"])]
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, StrataError)
        assert outcome.code is Code.STALE
    with pytest.raises(StrataError, match="is over"):
        writer.submit([b"z"])
    assert writer.failure is not None
    assert await facts_of(journal) == []


async def test_confirm_waits_for_earlier_facts_and_asks_the_journal() -> None:
    disk = GatedDisk()
    journal = MemoryJournal(SystemClock(), disk)
    writer = await led(journal)
    disk.gate.clear()
    told = writer.submit([b"x"])
    confirmed = asyncio.create_task(writer.confirm())
    await turns()
    assert not confirmed.done()
    disk.gate.set()
    await confirmed
    assert told.done()
    await journal.resign("s", writer.lead.epoch)
    await journal.lead("s", "b", 60.0)
    with pytest.raises(StrataError) as caught:
        await writer.confirm()
    assert caught.value.code is Code.STALE


Wire = Callable[[bytes], Awaitable[bytes]]


def losing(wire: Wire, replies: set[int], requests: set[int] = frozenset()) -> Transport:  # type: ignore[assignment]
    """A transport that loses the n-th request, or its reply after it was done."""
    sent = 0

    async def send(payload: bytes) -> bytes:
        nonlocal sent
        sent += 1
        this = sent
        if this in requests:
            raise StrataError(Code.UNAVAILABLE, "request lost")
        reply = await wire(payload)
        if this in replies:
            raise StrataError(Code.UNAVAILABLE, "reply lost")
        return reply

    return send


async def test_a_reply_lost_after_the_commit_does_not_double_the_facts() -> None:
    journal = MemoryJournal(SystemClock())
    wire = losing(lambda payload: serve(journal, payload), replies={2, 3, 5}, requests={6})
    writer = await led(RemoteJournal(wire), WriterLimits(backoff=Backoff(first_s=0.0)))
    assert await writer.append([b"x", b"y"]) == 2
    assert await writer.append([b"z"]) == 3
    assert await facts_of(journal) == [b"x", b"y", b"z"]


async def test_a_writer_gives_up_on_a_journal_that_stays_away() -> None:
    journal = MemoryJournal(SystemClock())
    away = losing(lambda payload: serve(journal, payload), replies=set(), requests=set(range(2, 10_000)))
    clock = ManualClock()
    remote = RemoteJournal(away)
    writer = Writer(remote, await remote.lead("s", "a", 60.0), clock, WriterLimits(give_up_after_s=30.0))
    told = writer.submit([b"x"])
    await clock.advance(29.0)
    assert not told.done()
    await clock.advance(3.0)
    with pytest.raises(StrataError) as caught:
        await told
    assert caught.value.code is Code.UNAVAILABLE


async def test_a_commit_that_hangs_is_repeated() -> None:
    journal = MemoryJournal(SystemClock())
    sent = 0

    async def hang_once(payload: bytes) -> bytes:
        nonlocal sent
        sent += 1
        reply = await serve(journal, payload)
        if sent == 2:
            await asyncio.Event().wait()
        return reply

    writer = await led(RemoteJournal(hang_once), WriterLimits(commit_timeout_s=0.02, backoff=Backoff(first_s=0.0)))
    assert await writer.append([b"once"]) == 1
    assert await facts_of(journal) == [b"once"]


async def test_a_defect_in_the_journal_fails_the_writer_instead_of_hanging_it() -> None:
    journal = MemoryJournal(SystemClock())
    broken = False

    async def break_down(payload: bytes) -> bytes:
        if broken:
            raise ZeroDivisionError
        return await serve(journal, payload)

    writer = await led(RemoteJournal(break_down))
    broken = True
    told = writer.submit([b"x"])
    flushing = next(task for task in asyncio.all_tasks() if task.get_name() == "journal s")
    with pytest.raises(StrataError) as caught:
        await told
    assert caught.value.code is Code.INTERNAL
    assert isinstance(flushing.exception(), ZeroDivisionError)


async def test_close_waits_for_what_was_submitted() -> None:
    journal = MemoryJournal(SystemClock())
    writer = await led(journal)
    told = writer.submit([b"x"])
    await writer.close()
    assert told.done()
    await writer.close()


async def test_one_callers_cancellation_is_nobody_elses() -> None:
    disk = GatedDisk()
    journal = MemoryJournal(SystemClock(), disk)
    writer = await led(journal)
    disk.gate.clear()
    fact = writer.submit([b"x"])
    impatient = [asyncio.create_task(writer.confirm()), asyncio.create_task(writer.settled())]
    innocent = [asyncio.create_task(writer.confirm()), asyncio.create_task(writer.settled())]
    await turns()
    for task in impatient:
        task.cancel()
    late = asyncio.create_task(writer.settled())
    await turns()
    disk.gate.set()
    await asyncio.gather(*innocent, late)
    assert await fact == 1


async def test_a_stopped_flush_fails_its_callers_even_before_it_began() -> None:
    writer = await led(MemoryJournal(SystemClock()))
    told = writer.submit([b"x"])
    next(task for task in asyncio.all_tasks() if task.get_name() == "journal s").cancel()
    with pytest.raises(StrataError) as caught:
        await told
    assert caught.value.code is Code.UNAVAILABLE
    await writer.close()


async def test_facts_changed_after_submission_are_not_changed_in_the_journal() -> None:
    journal = MemoryJournal(SystemClock())
    writer = await led(journal)
    facts = [b"x"]
    told = writer.submit(facts)
    facts.append(b"y")
    assert await told == 1
    assert await facts_of(journal) == [b"x"]


async def test_what_is_to_follow_a_commit_follows_it_even_if_nobody_waits_any_more() -> None:
    disk = GatedDisk()
    writer = await led(MemoryJournal(SystemClock(), disk))
    heard: list[int] = []
    disk.gate.clear()
    gone = writer.submit([b"x"], lambda: heard.append(writer.durable))
    waited = writer.submit([b"y"], lambda: heard.append(writer.durable))
    await turns()
    gone.cancel()
    assert heard == []
    disk.gate.set()
    assert await waited == 2
    # They shared a commit, and both are told when it is done.
    assert heard == [2, 2]


async def test_nothing_follows_a_commit_that_never_happens() -> None:
    disk = GatedDisk()
    writer = await led(MemoryJournal(SystemClock(), disk))
    heard: list[str] = []
    disk.gate.clear()
    waiting = writer.submit([b"x"], lambda: heard.append("committed"))
    await turns()
    writer.stop(StrataError(Code.STALE, "another one leads"))
    with pytest.raises(StrataError, match="another one leads"):
        await waiting
    disk.gate.set()
    await writer.close()
    assert heard == []


async def test_a_commit_waits_for_more_while_many_submit_and_a_lone_caller_never_waits() -> None:
    clock = ManualClock()
    disk = GatedDisk()
    journal = MemoryJournal(clock, disk)
    writer = Writer(journal, await journal.lead("s", "a", 60.0), clock, WriterLimits(gather_s=0.002))
    before = disk.syncs
    assert await writer.append([b"alone"]) == 1
    await asyncio.gather(writer.append([b"two"]), writer.append([b"at once"]))
    assert disk.syncs - before == 2
    gathered = [writer.submit([b"first"])]
    await turns()
    gathered.append(writer.submit([b"second"]))
    await turns()
    assert disk.syncs - before == 2
    await clock.advance(0.002)
    assert await asyncio.gather(*gathered) == [4, 5]
    assert disk.syncs - before == 3
    # The rush is over.
    await clock.advance(1.0)
    assert await writer.append([b"alone again"]) == 6
