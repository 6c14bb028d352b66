"""Each model in its order, each tenant its share of tokens, nobody starved."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.train.core.scheduler import OPERATIONS_PER_QUANTUM, STEP, QueuedOperation, Scheduler

QUANTUM = 100

operations = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 300), st.sampled_from(["", "pass"])),
    max_size=40,
)


def filled(given_operations: list[tuple[str, int, int, str]]) -> tuple[Scheduler, list[QueuedOperation]]:
    scheduler = Scheduler(QUANTUM)
    entries = [
        QueuedOperation(f"f{turn}", tenant, f"{tenant}{model}", "kind", tokens, turn, batch_key)
        for turn, (tenant, model, tokens, batch_key) in enumerate(given_operations)
    ]
    for entry in entries:
        scheduler.add(entry)
    return scheduler, entries


def take(scheduler: Scheduler, *, budget: int, coalesce: bool, most: int | None = None) -> tuple[QueuedOperation, ...]:
    """Select and charge, as the machine does before it applies the facts."""
    selection = scheduler.select(budget_tokens=budget, coalesce=coalesce, most=most)
    scheduler.charge(selection.charges())
    return selection.operations


def drain(
    scheduler: Scheduler, *, coalesce: bool = False, budget: int = 4 * QUANTUM
) -> list[tuple[QueuedOperation, ...]]:
    ran = []
    while chosen := take(scheduler, budget=budget, coalesce=coalesce):
        for entry in chosen:
            scheduler.remove(entry.future_id)
        ran.append(chosen)
    assert len(scheduler) == 0
    return ran


@given(operations, st.booleans())
def test_every_operation_runs_once_and_those_of_a_model_in_their_order(
    given_operations: list[tuple[str, int, int, str]], coalesce: bool
) -> None:
    scheduler, entries = filled(given_operations)
    ran = [entry for chosen in drain(scheduler, coalesce=coalesce) for entry in chosen]
    assert Counter(ran) == Counter(entries)
    turns = defaultdict(list)
    for entry in ran:
        turns[entry.model_id].append(entry.turn)
    assert all(each == sorted(each) for each in turns.values())


@given(operations, st.integers(0, 600))
def test_what_shares_a_pass_is_of_different_models_alike_and_within_the_budget(
    given_operations: list[tuple[str, int, int, str]], budget: int
) -> None:
    scheduler, _ = filled(given_operations)
    for chosen in drain(scheduler, coalesce=True, budget=budget):
        assert len({entry.model_id for entry in chosen}) == len(chosen)
        if len(chosen) > 1:
            assert {entry.batch_key for entry in chosen} == {"pass"}
            assert sum(entry.tokens for entry in chosen) <= budget


@given(st.integers(1, 400), st.integers(1, 400), st.booleans())
def test_two_busy_tenants_get_the_same_tokens_whatever_the_size_of_their_batches(
    large: int, small: int, coalesce: bool
) -> None:
    scheduler = Scheduler(QUANTUM)
    turn = itertools.count()
    costs = {"a": large, "b": small}

    def submit(tenant: str) -> None:
        number = next(turn)
        scheduler.add(QueuedOperation(f"f{number}", tenant, tenant, "kind", costs[tenant], number, "pass"))

    for tenant in costs:
        submit(tenant)
        submit(tenant)
    served: Counter[str] = Counter()
    for _ in range(300):
        for entry in take(scheduler, budget=0, coalesce=coalesce):
            served[entry.tenant] += max(entry.tokens, QUANTUM // OPERATIONS_PER_QUANTUM)
            submit(entry.tenant)
            scheduler.remove(entry.future_id)
    assert abs(served["a"] - served["b"]) <= QUANTUM + 2 * max(large, small, QUANTUM // OPERATIONS_PER_QUANTUM)


def test_a_long_session_is_not_starved_by_new_ones_of_its_own_tenant() -> None:
    scheduler = Scheduler(QUANTUM)
    scheduler.add(QueuedOperation("old", "a", "old", "kind", 50, 0))
    for number in range(1, 20):
        scheduler.add(QueuedOperation(f"new{number}", "a", f"new{number}", "kind", 50, number))
    assert take(scheduler, budget=0, coalesce=False)[0].future_id == "old"


@pytest.mark.proves("Never: long sessions are starved by new ones")
def test_a_long_session_is_not_starved_by_tenants_that_keep_coming() -> None:
    scheduler = Scheduler(QUANTUM)
    scheduler.add(QueuedOperation("old", "old", "old", "kind", 5 * QUANTUM, 0))
    for number in range(1, 200):
        scheduler.add(QueuedOperation(f"f{number}", f"new{number % 7}", f"m{number % 7}", "kind", 1, number))
        chosen = take(scheduler, budget=0, coalesce=False)[0]
        scheduler.remove(chosen.future_id)
        if chosen.future_id == "old":
            return
    raise AssertionError("the old session never ran")


def test_who_cannot_share_a_pass_is_not_starved_by_those_who_do() -> None:
    scheduler = Scheduler(QUANTUM)
    turn = itertools.count()
    scheduler.add(QueuedOperation("alone", "b", "b", "optim_step", 0, next(turn)))

    def submit(tenant: str) -> None:
        number = next(turn)
        scheduler.add(QueuedOperation(f"f{number}", tenant, tenant, "pass", QUANTUM, number, "pass"))

    for tenant in "ac":
        submit(tenant)
    for _ in range(4):
        for entry in take(scheduler, budget=2 * QUANTUM, coalesce=True):
            if entry.future_id == "alone":
                return
            submit(entry.tenant)
            scheduler.remove(entry.future_id)
    raise AssertionError("it never ran")


@given(operations, st.lists(st.tuples(st.sampled_from(["choose", "give back", "remove"]), st.booleans()), max_size=20))
def test_what_is_foreseen_is_what_happens_if_nothing_else_comes_whenever_it_is_asked(
    given_operations: list[tuple[str, int, int, str]], changes: list[tuple[str, bool]]
) -> None:
    scheduler, entries = filled([])

    def check() -> None:
        drained = [entry for chosen in drain(copy.deepcopy(scheduler)) for entry in chosen]
        forecast = scheduler.forecast()
        assert forecast.order == drained
        assert forecast.positions == {entry.future_id: place for place, entry in enumerate(drained)}
        for place, tenant in itertools.product(range(len(drained)), "abc"):
            assert forecast.others_before(place, tenant) == any(entry.tenant != tenant for entry in drained[:place])

    for entry in filled(given_operations)[1]:
        scheduler.add(entry)
        entries.append(entry)
        check()
    for change, coalesce in changes:
        if change == "remove":
            scheduler.remove(entries.pop().future_id if entries else "none")
        elif chosen := (selection := scheduler.select(budget_tokens=4 * QUANTUM, coalesce=coalesce)).operations:
            check()
            scheduler.charge(selection.charges({chosen[0].future_id} if change == "give back" else None))
            check()
            for entry in chosen:
                scheduler.remove(entry.future_id)
                check()
        check()


def test_who_asks_again_is_told_the_same_without_another_look_at_everything() -> None:
    scheduler, _ = filled([("a", 0, 10, "")] * 3)
    first = scheduler.forecast()
    scheduler.remove("one that is not here")
    assert scheduler.forecast() is first
    scheduler.remove("f0")
    assert scheduler.forecast() is not first


def test_what_is_given_back_moves_its_tenant_in_what_is_foreseen() -> None:
    scheduler, (first, along, large, later) = filled(
        [("a", 0, 10, "pass"), ("b", 0, 50, "pass"), ("a", 1, 95, ""), ("b", 1, 50, "")]
    )
    selection = scheduler.select(budget_tokens=QUANTUM, coalesce=True)
    assert selection.operations == (first, along)
    charged, alone = copy.deepcopy(scheduler), copy.deepcopy(scheduler)
    charged.charge(selection.charges())
    assert charged.forecast().order == [first, along, large, later]
    alone.charge(selection.charges({first.future_id}))
    assert alone.forecast().order == [first, along, later, large]


@given(operations, st.integers(0, 600), st.booleans())
def test_selecting_changes_nothing_and_gives_the_same_again(
    given_operations: list[tuple[str, int, int, str]], budget: int, coalesce: bool
) -> None:
    scheduler, _ = filled(given_operations)
    before = scheduler.deficits()
    first = scheduler.select(budget_tokens=budget, coalesce=coalesce)
    assert scheduler.select(budget_tokens=budget, coalesce=coalesce) == first
    assert scheduler.deficits() == before


def lockstep(models: int, steps: int, late: int) -> list[tuple[QueuedOperation, ...]]:
    """Passes and steps of models that take turns with them; `late` of them come after the first dispatch."""
    scheduler = Scheduler(QUANTUM)
    tokens = 2 * QUANTUM // models

    def submit(model: int) -> None:
        for step in range(steps):
            turn = (model * steps + step) * 2
            name = f"t{model}"
            scheduler.add(QueuedOperation(f"p{turn}", name, name, "forward_backward", tokens, turn, "forward_backward"))
            scheduler.add(QueuedOperation(f"s{turn}", name, name, STEP, 0, turn + 1, STEP))

    for model in range(models - late):
        submit(model)
    ran = [take(scheduler, budget=2 * QUANTUM, coalesce=True)]
    for entry in ran[0]:
        scheduler.remove(entry.future_id)
    for model in range(models - late, models):
        submit(model)
    return ran + drain(scheduler, coalesce=True, budget=2 * QUANTUM)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 7))
def test_models_that_take_turns_with_their_steps_meet_in_every_pass(models: int, steps: int, late: int) -> None:
    ran = lockstep(models, steps, min(late, models - 1))
    # Who comes late joins the second pass of those before it, and makes its last one after theirs.
    most = steps + (1 if late else 0)
    assert sum(chosen[0].batch_key != STEP for chosen in ran) <= most
    assert sum(chosen[0].batch_key == STEP for chosen in ran) <= most


@given(st.integers(0, 40), st.integers(1, QUANTUM), st.integers(1, 3 * QUANTUM))
def test_a_pass_waits_for_the_steps_that_there_is_room_for_and_for_all_of_them_at_once(
    models: int, tokens: int, room: int
) -> None:
    """However many models have a step and a pass behind it."""
    scheduler = Scheduler(QUANTUM)
    scheduler.add(QueuedOperation("first", "first", "first", "forward_backward", 1, 0, "pass"))
    for number in range(models):
        name, turn = f"t{number}", 2 * number + 1
        scheduler.add(QueuedOperation(f"s{turn}", name, name, STEP, 0, turn, STEP))
        scheduler.add(QueuedOperation(f"p{turn}", name, name, "forward_backward", tokens, turn + 1, "pass"))
    along = min(room // tokens, models)
    if along:
        steps = take(scheduler, budget=1 + room, coalesce=True)
        assert len(steps) == along
        assert {entry.kind for entry in steps} == {STEP}
        for entry in steps:
            scheduler.remove(entry.future_id)
    chosen = take(scheduler, budget=1 + room, coalesce=True)
    assert chosen[0].future_id == "first"
    assert len(chosen) == 1 + along


@given(st.integers(1, 12), st.integers(1, 12))
def test_steps_that_wait_go_together_and_are_no_more_than_there_are_slots(models: int, slots: int) -> None:
    scheduler = Scheduler(QUANTUM)
    for number in range(models):
        scheduler.add(QueuedOperation(f"s{number}", f"t{number % 3}", f"m{number}", STEP, 0, number, STEP))
    assert len(take(scheduler, budget=0, coalesce=True, most=slots)) == min(models, slots)
    assert len(take(scheduler, budget=0, coalesce=False, most=slots)) == 1
