"""A machine on a journal: restart, standby, deposition, snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.journal.group_commit import WriterLimits
from strata.journal.port import Batch, Journal, Snapshot
from strata.journal.replica import Machine, Replica
from tests.support.manual_clock import ManualClock
from tests.support.memory_journal import MemoryDisk, MemoryJournal
from tests.support.turns import turns
from tests.support.world import CALM, World

LEASE_S = 60.0


class Counter(Machine[int, int, int]):
    """Adds what it is given; a fact is the amount. Zero asks for the total and is no fact."""

    def initial(self) -> int:
        return 0

    def decide(self, state: int, given: int, now_s: float) -> tuple[Sequence[bytes], int]:
        del now_s
        return ([b"%d" % given] if given else []), state + given

    def apply(self, state: int, fact: bytes) -> int:
        return state + int(fact)

    def save(self, state: int) -> bytes:
        return b"%d" % state

    def load(self, saved: bytes) -> int:
        return int(saved)


CounterReplica = Replica[int, int, int]


def replica(journal: Journal) -> CounterReplica:
    return Replica(journal, "counter", Counter(), SystemClock())


async def leading(journal: Journal, holder: str = "a") -> CounterReplica:
    made = replica(journal)
    await made.lead(holder, LEASE_S)
    return made


class SlowDisk(MemoryDisk):
    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def sync(self) -> None:
        await self.gate.wait()


async def test_an_effect_is_seen_after_its_facts_are_durable() -> None:
    disk = SlowDisk()
    leader = await leading(MemoryJournal(SystemClock(), disk))
    disk.gate.clear()
    answer = asyncio.create_task(leader.submit(5))
    await turns()
    assert leader.state == 5
    assert not answer.done()
    disk.gate.set()
    assert await answer == 5


async def test_an_answer_without_facts_waits_for_the_facts_it_saw() -> None:
    disk = SlowDisk()
    leader = await leading(MemoryJournal(SystemClock(), disk))
    disk.gate.clear()
    change = asyncio.create_task(leader.submit(5))
    await asyncio.sleep(0)
    look = asyncio.create_task(leader.submit(0))
    await turns()
    assert not look.done()
    disk.gate.set()
    assert await look == 5
    assert change.done()


async def test_concurrent_decisions_each_see_all_before_them() -> None:
    journal = MemoryJournal(SystemClock())
    leader = await leading(journal)
    totals = await asyncio.gather(*(leader.submit(1) for _ in range(100)))
    assert totals == list(range(1, 101))
    again = replica(journal)
    await again.catch_up()
    assert (again.state, again.position) == (100, 100)


async def test_a_restart_reads_the_snapshot_and_what_came_after() -> None:
    journal = MemoryJournal(SystemClock())
    leader = await leading(journal)
    for amount in (1, 2, 3):
        await leader.submit(amount)
    assert await leader.snapshot() == 3
    await leader.submit(4)
    with pytest.raises(StrataError) as caught:
        await journal.read("counter", 0)
    assert caught.value.code is Code.GONE
    again = await leading(journal)
    assert (again.state, again.position) == (10, 4)


async def test_a_snapshot_waits_until_what_it_holds_is_durable() -> None:
    disk = SlowDisk()
    journal = MemoryJournal(SystemClock(), disk)
    leader = await leading(journal)
    disk.gate.clear()
    change = asyncio.create_task(leader.submit(7))
    await asyncio.sleep(0)
    saving = asyncio.create_task(leader.snapshot())
    await turns()
    assert await journal.load_snapshot("counter") is None
    disk.gate.set()
    assert await saving == 1
    await change


async def test_a_follower_stays_warm_and_takes_over_at_once_when_the_leader_resigns() -> None:
    journal = MemoryJournal(SystemClock())
    leader = await leading(journal)
    standby = replica(journal)
    waiting = asyncio.create_task(standby.stand_by("b", 0.04))
    await leader.submit(5)
    async with asyncio.timeout(5):
        while standby.state != 5:
            await asyncio.sleep(0)
        assert not waiting.done()
        await leader.resign()
        await waiting
    assert await standby.submit(1) == 6
    assert standby.epoch == leader.epoch + 1


async def test_a_standby_waits_for_a_stream_that_is_not_there_yet() -> None:
    follower = replica(MemoryJournal(SystemClock()))
    following = asyncio.create_task(follower.follow())
    await turns()
    assert not following.done()
    following.cancel()


async def test_a_follower_overtaken_by_truncation_starts_from_the_snapshot() -> None:
    journal = MemoryJournal(SystemClock())
    leader = await leading(journal)
    await leader.submit(1)
    follower = replica(journal)
    await follower.catch_up()
    for _ in range(5):
        await leader.submit(1)
    await leader.snapshot()
    await leader.submit(1)
    await follower.catch_up()
    assert (follower.state, follower.position) == (7, 7)


async def test_a_deposed_leader_answers_nothing_any_more() -> None:
    journal = MemoryJournal(SystemClock())
    old = await leading(journal)
    await old.submit(1)
    await journal.resign("counter", old.epoch)
    new = await leading(journal, "b")
    for attempt in (old.submit(1), old.confirm(), old.snapshot()):
        with pytest.raises(StrataError) as caught:
            await attempt
        assert caught.value.code is Code.STALE
    assert old.failure is not None
    assert await new.submit(0) == 1


async def test_reign_ends_when_somebody_else_leads() -> None:
    journal = MemoryJournal(SystemClock())
    old = await leading(journal)
    await journal.resign("counter", old.epoch)
    await leading(journal, "b")
    async with asyncio.timeout(5):
        assert (await old.lead_until_replaced(0.06)).code is Code.STALE


async def test_reign_ends_by_itself_when_the_lease_cannot_be_renewed() -> None:
    clock = ManualClock()
    journal = Cut(clock)
    leader: CounterReplica = Replica(journal, "counter", Counter(), clock)
    await leader.lead("a", LEASE_S)
    leading = asyncio.create_task(leader.lead_until_replaced(LEASE_S))
    await clock.advance(3 * LEASE_S)
    assert not leading.done()
    journal.away = True
    await clock.advance(LEASE_S / 2)
    assert not leading.done()
    await clock.advance(LEASE_S)
    assert (await leading).code is Code.UNAVAILABLE


class Cut(MemoryJournal):
    """A journal that can be out of reach."""

    away = False

    async def renew(self, stream: str, epoch: int, lease_s: float) -> None:
        if self.away:
            raise StrataError(Code.UNAVAILABLE, "away")
        await super().renew(stream, epoch, lease_s)


async def test_a_lead_lost_while_catching_up_is_stale() -> None:
    journal = Overtaken(SystemClock())
    late = replica(journal)
    with pytest.raises(StrataError) as caught:
        await late.lead("a", LEASE_S)
    assert caught.value.code is Code.STALE


class Overtaken(MemoryJournal):
    """Somebody else leads and writes as soon as anybody looks for a snapshot."""

    async def load_snapshot(self, stream: str) -> None:
        await self.resign(stream, 1)
        lead = await self.lead(stream, "b", LEASE_S)
        await self.append(stream, lead.epoch, lead.head, [b"1"])


async def test_only_a_leader_submits() -> None:
    with pytest.raises(StrataError, match="does not lead"):
        await replica(MemoryJournal(SystemClock())).submit(1)


async def test_a_replica_that_has_led_never_follows_or_leads_again() -> None:
    journal = MemoryJournal(SystemClock())
    leader = await leading(journal)
    await leader.submit(5)
    for attempt in (leader.catch_up(), leader.follow(), leader.lead("a", LEASE_S), leader.stand_by("a", LEASE_S)):
        with pytest.raises(StrataError) as caught:
            await attempt
        assert caught.value.code is Code.PRECONDITION


async def test_two_readers_of_one_replica_apply_each_fact_once() -> None:
    journal = MemoryJournal(SystemClock())
    leader = await leading(journal)
    standby = replica(journal)
    following = asyncio.create_task(standby.follow())
    waiting = asyncio.create_task(standby.stand_by("b", 0.04))
    for _ in range(5):
        await leader.submit(1)
    await leader.resign()
    async with asyncio.timeout(5):
        await waiting
    assert (standby.state, standby.position) == (5, 5)
    assert await standby.submit(1) == 6
    following.cancel()


async def test_a_leader_that_knows_it_is_deposed_answers_nothing() -> None:
    journal = MemoryJournal(SystemClock())
    old = await leading(journal)
    await old.submit(1)
    await journal.resign("counter", old.epoch)
    new = await leading(journal, "b")
    await new.submit(41)
    await old.lead_until_replaced(0.06)
    with pytest.raises(StrataError) as caught:
        await old.submit(0)
    assert caught.value.code is Code.STALE


class Unlucky(Counter):
    def apply(self, state: int, fact: bytes) -> int:
        if int(fact) == 13:
            raise ZeroDivisionError
        return super().apply(state, fact)


class BadObserver(Counter):
    def observe_outcome(self, state: int, given: int, effect: int, now_s: float) -> None:
        del state, effect, now_s
        if given == 13:
            raise ZeroDivisionError


@pytest.mark.parametrize("machine", [Unlucky(), BadObserver()], ids=["fact", "outcome"])
async def test_a_fact_or_outcome_that_cannot_be_taken_in_ends_the_leader(machine: Counter) -> None:
    leader: CounterReplica = Replica(MemoryJournal(SystemClock()), "counter", machine, SystemClock())
    await leader.lead("a", LEASE_S)
    await leader.submit(1)
    with pytest.raises(ZeroDivisionError):
        await leader.submit(13)
    for attempt in (leader.submit(1), leader.snapshot()):
        with pytest.raises(StrataError) as caught:
            await attempt
        assert caught.value.code is Code.INTERNAL


class Watched(Counter):
    """Writes down when the replica calls it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def observe(self, state: int, given: int, now_s: float) -> None:
        del now_s
        self.calls.append(f"observe {given} at {state}")

    def decide(self, state: int, given: int, now_s: float) -> tuple[Sequence[bytes], int]:
        self.calls.append(f"decide {given} at {state}")
        return super().decide(state, given, now_s)

    def observe_outcome(self, state: int, given: int, effect: int, now_s: float) -> None:
        del given, now_s
        self.calls.append(f"outcome {effect} at {state}")


async def test_a_request_is_observed_once_before_its_decision_and_once_before_its_facts_are_applied() -> None:
    machine = Watched()
    leader: CounterReplica = Replica(MemoryJournal(SystemClock()), "counter", machine, SystemClock())
    await leader.lead("a", LEASE_S)
    await leader.submit(2)
    await leader.submit(0)
    leader.observe(7)
    assert machine.calls == [
        *("observe 2 at 0", "decide 2 at 0", "outcome 2 at 0"),
        *("observe 0 at 2", "decide 0 at 2", "outcome 2 at 2"),
        "observe 7 at 2",
    ]


async def test_a_request_that_a_full_queue_refuses_is_not_observed() -> None:
    machine = Watched()
    leader: CounterReplica = Replica(MemoryJournal(SystemClock()), "counter", machine, SystemClock())
    await leader.lead("a", LEASE_S, WriterLimits(max_pending=1))
    _, durable = leader.submit_nowait(1)
    seen = list(machine.calls)
    with pytest.raises(StrataError) as caught:
        leader.submit_nowait(2)
    assert caught.value.code is Code.EXHAUSTED
    assert machine.calls == seen
    assert durable is not None
    await durable


class Slow(MemoryJournal):
    """Reading takes longer than the lease."""

    async def read(self, stream: str, after: int) -> list[Batch]:
        found = await super().read(stream, after)
        if found:
            await self._clock.sleep(5.0)
        return found


def test_cold_standbys_lead_although_a_replay_takes_longer_than_the_lease() -> None:
    world = World(1, CALM)
    clock = world.world_clock()

    async def scenario() -> None:
        journal = Slow(clock)
        lead = await journal.lead("counter", "first", 0.0)
        await journal.append("counter", lead.epoch, 0, [b"1"])
        standbys: list[CounterReplica] = [Replica(journal, "counter", Counter(), clock) for _ in range(2)]
        waiting = [asyncio.create_task(each.stand_by(f"h{n}", 2.0)) for n, each in enumerate(standbys)]
        done, _ = await asyncio.wait(waiting, timeout=30.0, return_when=asyncio.FIRST_COMPLETED)
        assert done
        leader = standbys[waiting.index(done.pop())]
        assert await leader.submit(1) == 2
        for task in waiting:
            task.cancel()

    world.run(scenario())


async def test_a_snapshot_that_cannot_be_saved_is_not_tried_at_every_turn() -> None:
    clock = ManualClock()
    journal = NoSnapshots(clock)
    leader: CounterReplica = Replica(journal, "counter", Counter(), clock)
    await leader.lead("a", LEASE_S)
    for _ in range(10):
        await leader.submit(1)
    leading = asyncio.create_task(leader.lead_until_replaced(LEASE_S, snapshot_every=10))
    await clock.advance(5 * LEASE_S)
    assert journal.tries == 1
    for _ in range(10):
        await leader.submit(1)
    await clock.advance(LEASE_S)
    assert journal.tries == 2
    leading.cancel()


class NoSnapshots(MemoryJournal):
    tries = 0

    async def save_snapshot(self, stream: str, epoch: int, snapshot: Snapshot) -> None:
        self.tries += 1
        raise StrataError(Code.INVALID, "too large")


async def test_put_decides_at_once_and_its_effect_follows_the_commit_although_the_caller_has_gone() -> None:
    disk = MemoryDisk()
    leader = await leading(MemoryJournal(SystemClock(), disk))
    told: list[int] = []
    effect, durable = leader.submit_nowait(3, told.append)
    assert (effect, leader.state, told) == (3, 3, [])
    assert durable is not None
    durable.cancel()
    asked, settled = leader.submit_nowait(0, told.append)
    assert asked == 3
    assert settled is not None
    await settled
    assert told == [3]
    assert leader.submit_nowait(0, told.append) == (3, None)
    assert told == [3]
