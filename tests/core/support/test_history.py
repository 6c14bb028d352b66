"""The checker against classic histories, hand-made: what each one must be called, and how it is explained."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from tests.support.history import History, Operation, Outcome, Returned, Unknown
from tests.support.linearizable import Linearizable, Undecided, Verdict, Violation, check
from tests.support.register_model import Add, CompareAndSet, Read, RegisterInput, RegisterModel, Value, Write

RegisterOperation = Operation[RegisterInput, Value]


def op(client: str, input: RegisterInput, start: float, end: float, output: Value = None) -> RegisterOperation:
    return Operation(client, input, start, end, Returned(output))


def lost(client: str, input: RegisterInput, start: float) -> RegisterOperation:
    return Operation(client, input, start, None, Unknown())


def judge(*operations: RegisterOperation) -> Verdict[RegisterInput, Value]:
    return check(operations, RegisterModel())


def violation(*operations: RegisterOperation) -> Violation[RegisterInput, Value]:
    verdict = judge(*operations)
    assert isinstance(verdict, Violation)
    return verdict


def accepted(*operations: RegisterOperation) -> tuple[RegisterOperation, ...]:
    verdict = judge(*operations)
    assert isinstance(verdict, Linearizable)
    assert list(verdict.orders) == ["x"]
    return verdict.orders["x"]


W1, W2, R = Write("x", 1), Write("x", 2), Read("x")


def test_an_empty_history_is_linearizable() -> None:
    assert judge() == Linearizable({}, 0)


def test_a_stale_read_is_a_violation_and_the_writes_that_make_it_stale_are_kept() -> None:
    first, second, stale = op("a", W1, 0, 1), op("b", W2, 2, 3), op("c", R, 4, 5, 1)
    noise = [op("d", Write("x", 9), -9, -8), op("d", R, -7, -6, 9), op("d", R, 6, 7, 2), lost("e", Write("x", 8), 2)]
    found = violation(first, second, stale, *noise)
    assert found.culprit == stale
    assert found.operations == (first, second, stale)
    assert found.placed == (first, second)
    assert found.unplaced == (stale,)
    assert found.states == (2,)


def test_a_read_that_overlaps_the_write_may_see_either_value() -> None:
    accepted(op("a", W1, 0, 1), op("b", W2, 2, 5), op("c", R, 3, 4, 1))
    accepted(op("a", W1, 0, 1), op("b", W2, 2, 5), op("c", R, 3, 4, 2))


def test_two_reads_may_not_see_an_overlapping_write_in_the_wrong_order() -> None:
    found = violation(op("a", W2, 0, 9), op("b", R, 1, 2, 2), op("c", R, 3, 4, 0))
    assert found.culprit == op("c", R, 3, 4, 0)


def test_a_lost_update_is_a_violation() -> None:
    one, other = op("a", Add("x", 1), 0, 3, 1), op("b", Add("x", 1), 1, 4, 1)
    assert violation(one, other).operations == (one, other)
    accepted(one, op("b", Add("x", 1), 1, 4, 2))


def test_a_lost_update_keeps_the_history_that_gives_the_totals_their_meaning() -> None:
    history = [op("a", Add("x", 1), 0, 1, 1), op("a", Add("x", 1), 2, 3, 2), op("b", Add("x", 1), 4, 5, 2)]
    assert violation(*history).operations == tuple(history)


def test_a_duplicate_effect_is_a_violation() -> None:
    once, read = op("a", Add("x", 1), 0, 1, 1), op("b", R, 2, 3, 2)
    assert violation(once, read).culprit == read
    accepted(once, lost("c", Add("x", 1), 0), read)


def test_an_unknown_operation_takes_effect_at_most_once() -> None:
    assert violation(lost("a", Add("x", 1), 0), op("b", R, 1, 2, 1), op("b", R, 3, 4, 2)).unplaced[0].outcome == (
        Returned(2)
    )


def test_two_winners_of_one_compare_and_set_are_a_violation() -> None:
    claim = CompareAndSet("x", 0, 1)
    accepted(op("a", claim, 0, 3, True), op("b", claim, 1, 4, False))
    found = violation(op("a", claim, 0, 3, True), op("b", claim, 1, 4, True))
    assert found.culprit.client == "b"


def test_clients_read_what_another_client_finished_writing() -> None:
    accepted(op("a", W1, 0, 1), op("b", R, 2, 3, 1))
    found = violation(op("a", W1, 0, 1), op("b", R, 2, 3, 0))
    assert found.states == (1,)


def test_an_unknown_write_may_be_seen_late() -> None:
    order = accepted(lost("a", W1, 0), op("b", R, 1, 2, 0), op("b", W2, 3, 4), op("b", R, 5, 6, 2), op("b", R, 7, 8, 1))
    assert [each.client for each in order] == ["b", "b", "b", "a", "b"]


def test_an_unknown_write_may_never_be_seen() -> None:
    order = accepted(lost("a", W1, 0), op("b", R, 1, 2, 0), op("b", R, 3, 4, 0))
    assert [each.client for each in order] == ["b", "b"]


def test_an_unknown_write_may_not_be_seen_before_its_invocation() -> None:
    assert violation(op("b", R, 1, 2, 1), lost("a", W1, 3)).culprit.client == "b"


def test_an_unknown_write_seen_and_then_unseen_is_a_violation() -> None:
    history = [lost("a", W1, 0), op("b", R, 1, 2, 1), op("c", R, 3, 4, 0)]
    found = violation(*history)
    assert found.culprit == history[2]
    assert found.operations == tuple(history)


def test_a_wrong_answer_whose_effect_others_saw_is_blamed_on_the_answer() -> None:
    wrong = op("a", Add("x", 1), 0, 9, 7)
    found = violation(wrong, op("b", Add("x", 1), 1, 2, 2), op("c", R, 3, 4, 2))
    assert found.culprit == wrong


def test_an_operation_that_the_culprit_contradicts_stays_in_the_picture() -> None:
    lied, later = op("b", CompareAndSet("x", 5, 8), 2, 3, False), op("c", Add("x", 3), 4, 5, 11)
    history = [op("a", W1, -4, -3), op("a", Write("x", 5), 0, 1), lost("d", Write("x", 9), 1), lied, later]
    assert violation(*history).culprit == later
    assert violation(*history).operations == tuple(history[1:])


def test_keys_are_checked_alone_and_a_violation_names_its_key() -> None:
    history = [op("a", W1, 0, 1), op("a", Read("y"), 2, 3, 0), op("b", R, 4, 5, 1)]
    assert isinstance(judge(*history), Linearizable)
    assert violation(*history, op("b", Read("y"), 6, 7, 1)).partition == "y"


def test_operations_at_equal_times_overlap_unless_the_recorder_knows_their_order() -> None:
    accepted(op("a", W1, 0, 1), op("b", R, 1, 2, 0))
    history: History[RegisterInput, Value] = History()
    history.invoke("a", W1, 5).returned(None, 5)
    history.invoke("b", R, 5).returned(0, 5)
    assert isinstance(check(history, RegisterModel()), Violation)


def test_the_explanation_is_a_timeline_for_a_person() -> None:
    text = violation(op("a", W1, 0, 1), op("b", W2, 2, 6), op("d", R, 3, 4, 2), op("c", R, 7, 8, 1)).explain()
    assert text == (
        "partition 'x': no order of these 3 operations explains\n"
        "  c: Read(key='x') -> 1  (invoked 7, returned 8)\n"
        "  a: Write(key='x', value=1) -> None  |===|\n"
        "  b: Write(key='x', value=2) -> None          |===|\n"
        "  c: Read(key='x') -> 1                               |===|   <-- cannot be placed\n"
        "longest order found places 2:\n"
        "  a: Write(key='x', value=1) -> None\n"
        "  b: Write(key='x', value=2) -> None\n"
        "state there: 2\n"
        "cannot come next: c: Read(key='x') -> 1"
    )


def test_a_long_explanation_shows_its_end() -> None:
    history = [op("a", Add("x", 1), 2 * n, 2 * n + 1, n + 1) for n in range(40)]
    text = violation(*history, op("b", Add("x", 1), 100, 101, 40)).explain()
    assert "(17 earlier operations not shown)" in text
    assert "b: Add(key='x', n=1) -> 40" in text
    assert len(text.splitlines()) < 60


def test_a_search_over_its_limit_is_undecided_and_says_where() -> None:
    history = [lost("u", Add("x", 3**n), 0) for n in range(12)] + [op("a", R, 1, 2, 2)]
    verdict = check(history, RegisterModel(), limit=500)
    assert isinstance(verdict, Undecided)
    assert verdict.furthest == history[-1]
    assert "undecided after 5" in verdict.explain()
    assert isinstance(check(history, RegisterModel()), Violation)


def test_a_violation_outweighs_an_undecided_partition() -> None:
    hard = [lost("u", Add("x", 3**n), 0) for n in range(12)] + [op("a", R, 1, 2, 2)]
    verdict = check([*hard, op("a", Read("y"), 3, 4, 5)], RegisterModel(), limit=500)
    assert isinstance(verdict, Violation)
    assert verdict.partition == "y"


def test_equal_unknown_operations_do_not_multiply_the_search() -> None:
    history = [lost("u", Add("x", 1), n) for n in range(60)] + [op("a", R, 100, 101, 61)]
    verdict = judge(*history)
    assert isinstance(verdict, Violation)
    assert isinstance(judge(*history[:-1], op("a", R, 100, 101, 60)), Linearizable)


def test_the_recorder_keeps_returned_unknown_and_open_operations_and_drops_failed_ones() -> None:
    history: History[RegisterInput, Value] = History()
    done, timed_out, refused = (history.invoke(name, W1, 1) for name in ("done", "timed out", "refused"))
    history.invoke("open", R, 2)
    refused.failed()
    timed_out.unknown()
    done.returned(None, 3)
    assert [(each.client, each.outcome, each.returned_at) for each in history.operations()] == [
        ("done", Returned(None), 3),
        ("timed out", Unknown(), None),
        ("open", Unknown(), None),
    ]


def test_an_operation_is_closed_once() -> None:
    history: History[RegisterInput, Value] = History()
    handle = history.invoke("a", W1, 1)
    with pytest.raises(ValueError, match="before it was invoked"):
        handle.returned(None, 0)
    handle.unknown()
    with pytest.raises(RuntimeError, match="already been closed"):
        handle.returned(None, 2)


def test_real_threads_can_share_a_recorder() -> None:
    history: History[RegisterInput, Value] = History()
    lock, ticks = threading.Lock(), iter(range(10**6))
    total = 0

    def client(name: int) -> None:
        nonlocal total
        for _ in range(50):
            handle = history.invoke(name, Add("x", 1), next(ticks))
            with lock:
                total += 1
                seen = total
            handle.returned(seen, next(ticks))

    threads = [threading.Thread(target=client, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(history.operations()) == 400
    assert isinstance(check(history, RegisterModel()), Linearizable)


class Jobs:
    """A nondeterministic model with unhashable inputs: ["put", job] and ["claim"], which gives any job or None."""

    def initial(self) -> frozenset[str]:
        return frozenset()

    def partition(self, input: list[str]) -> None:
        return None

    def is_read(self, input: list[str], outcome: Outcome[str | None]) -> bool:
        return False

    def step(self, state: frozenset[str], input: list[str], outcome: Outcome[str | None]) -> Iterable[frozenset[str]]:
        if input[0] == "put":
            return [state | {input[1]}]
        if not state:
            return [state] if outcome.allows(None) else []
        return [state - {job} for job in sorted(state) if outcome.allows(job)]


def test_a_nondeterministic_model_allows_any_choice_and_an_unknown_choice() -> None:
    puts = [Operation("p", ["put", job], n, n + 0.5, Returned(None)) for n, job in enumerate("abc")]
    claimed_c = Operation("w", ["claim"], 10, 11, Returned("c"))
    died: Operation[list[str], str | None] = Operation("v", ["claim"], 10, None, Unknown())
    claimed_a = Operation("w", ["claim"], 12, 13, Returned("a"))
    empty = Operation("w", ["claim"], 14, 15, Returned(None))
    model = Jobs()
    assert isinstance(check([*puts, claimed_c, died, claimed_a, empty], model), Linearizable)
    lost_job = check([*puts, claimed_c, claimed_a, empty], model)
    assert isinstance(lost_job, Violation)
    assert lost_job.culprit == empty
    assert lost_job.states == (frozenset("b"),)
    claimed_twice = check([*puts, claimed_c, Operation("v", ["claim"], 12, 13, Returned("c"))], model)
    assert isinstance(claimed_twice, Violation)
    assert claimed_twice.culprit.client == "v"
