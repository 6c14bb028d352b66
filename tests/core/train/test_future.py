"""A future changes only along its table, is counted while it waits, and goes when its time is over."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.future import NEXT, OPEN, SAMPLES_ONLY, FutureEvent, FutureStatus, FutureStore, OperationFuture

DONE = ops.StepDone({})
BROKEN = ops.Failed("server", "broken")
CANCELLED = ops.Failed("cancelled", "given up")


def future(future_id: str = "f", tenant: str = "alice") -> OperationFuture:
    return OperationFuture(future_id, tenant, "m", "digest", ops.AbortGradients("m", 1), 0.0)


def store_with(status: FutureStatus) -> FutureStore:
    store = FutureStore()
    store.add(future())
    if status in (FutureStatus.DISPATCHED, FutureStatus.FINISHED):
        store.dispatch("f", 1)
    ends: dict[FutureStatus, ops.Result] = {
        FutureStatus.FINISHED: DONE,
        FutureStatus.FAILED: BROKEN,
        FutureStatus.CANCELLED: CANCELLED,
    }
    if status in ends:
        store.end("f", ends[status], 5.0)
    return store


def act(store: FutureStore, event: FutureEvent) -> OperationFuture:
    match event:
        case FutureEvent.DISPATCH:
            return store.dispatch("f", 1)
        case FutureEvent.FINISH:
            return store.end("f", DONE, 6.0)
        case FutureEvent.FAIL:
            return store.end("f", BROKEN, 6.0)
        case FutureEvent.CANCEL:
            return store.end("f", CANCELLED, 6.0)
        case FutureEvent.RETURN:
            return store.give_back("f")
        case FutureEvent.EXPIRE:
            return store.expire(10.0)[0]


LIVING = [status for status in FutureStatus if status is not FutureStatus.EXPIRED]


@pytest.mark.parametrize(("status", "event"), list(itertools.product(LIVING, FutureEvent)))
def test_a_future_changes_only_as_the_table_allows(status: FutureStatus, event: FutureEvent) -> None:
    store = store_with(status)
    after = NEXT.get((status, event)) if (status, event) not in SAMPLES_ONLY else None
    if after is not None:
        assert act(store, event).status is after
        return
    with pytest.raises((StrataError, IndexError)):
        act(store, event)
    kept = store.get("f")
    assert kept is not None
    assert kept.status is status


def test_every_change_is_a_step_forward_so_nothing_is_dispatched_twice() -> None:
    order = [FutureStatus.PENDING, FutureStatus.DISPATCHED, "ended", FutureStatus.EXPIRED]

    def place(status: FutureStatus) -> int:
        return order.index(status if status in order else "ended")

    trained = {change: after for change, after in NEXT.items() if change not in SAMPLES_ONLY}
    assert all(place(before) < place(after) for (before, _), after in trained.items())


def test_what_ended_never_begins_again_and_only_expires() -> None:
    ended = set(FutureStatus) - OPEN - {FutureStatus.EXPIRED}
    assert {event for (status, event) in NEXT if status in ended} == {FutureEvent.EXPIRE}
    assert not [status for (status, _) in NEXT if status is FutureStatus.EXPIRED]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "dispatch", "end", "cancel"])), max_size=30))
def test_the_counts_are_those_of_the_futures_also_after_a_restart(history: list[tuple[str, str]]) -> None:
    store = FutureStore()
    for number, (tenant, what) in enumerate(history):
        store.add(future(f"f{number}", tenant))
        if what in ("dispatch", "end"):
            store.dispatch(f"f{number}", number + 1)
        if what in ("end", "cancel"):
            result = ops.PassDone(ops.InlinePayload(b"12345")) if what == "end" else CANCELLED
            store.end(f"f{number}", result, float(number))
    again = FutureStore(list(store), store.ended)
    for each in (store, again):
        assert each.pending() == sum(what == "" for _, what in history)
        assert each.pending("a") == sum(what == "" for tenant, what in history if tenant == "a")
        assert each.result_bytes == 5 * sum(what == "end" for _, what in history)
    gone = store.expire(1e9)
    assert {each.future_id for each in gone} == {
        f"f{n}" for n, (_, what) in enumerate(history) if what in ("end", "cancel")
    }
    assert store.result_bytes == 0


def test_a_result_is_kept_for_its_time_after_it_ended_and_not_after_it_was_accepted() -> None:
    store = store_with(FutureStatus.FINISHED)
    assert store.overdue(5.0 + 59, ttl_s=60, keep=100) is None
    assert store.overdue(5.0 + 60, ttl_s=60, keep=100) == 5.0


def test_beyond_the_number_that_is_kept_the_oldest_results_go() -> None:
    store = FutureStore()
    for number in range(5):
        store.add(future(f"f{number}"))
        store.end(f"f{number}", CANCELLED, float(number))
    until_s = store.overdue(10.0, ttl_s=1e6, keep=3)
    assert until_s == 1.0
    assert [each.future_id for each in store.expire(until_s)] == ["f0", "f1"]


def test_the_same_future_is_not_added_twice() -> None:
    store = store_with(FutureStatus.PENDING)
    with pytest.raises(StrataError) as refused:
        store.add(future())
    assert refused.value.code is Code.INTERNAL
