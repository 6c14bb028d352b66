"""What a client is told of the ends of its samples, and what is kept for it."""

from __future__ import annotations

import pytest

from strata.train.status.completion_log import CLIENT_BLOCK, MAX_BATCH, CompletionLog, target_of

SAMPLER = "s:sample:0"
MINE = SAMPLER, 0


def ids(*numbers: int) -> list[str]:
    return [f"{SAMPLER}:{number}" for number in numbers]


def truncate(completions: CompletionLog, gone: list[str], *, alive: bool = True) -> None:
    completions.truncate(retained=lambda future_id: future_id not in gone, alive=lambda _: alive)


@pytest.mark.parametrize("future_id", ["s:train:0:3", "s:sample:0:open", "op:3", "s:sample:3", ""])
def test_what_is_no_sample_concerns_nobody(future_id: str) -> None:
    assert target_of(future_id) is None


def test_every_copy_of_a_client_hears_of_its_own_samples_in_the_order_of_their_ends() -> None:
    completions = CompletionLog(3, ids(5, 2))
    assert completions.add(f"{SAMPLER}:{7 * CLIENT_BLOCK + 1}") == (SAMPLER, 7)
    completions.add(ids(9)[0])
    told, cursor = completions.after(MINE, 0)
    assert told == ids(5, 2, 9)
    assert completions.after(MINE, cursor) == ([], cursor)
    completions.add(ids(1)[0])
    assert completions.after(MINE, cursor) == (ids(1), cursor + 1)
    assert list(completions.after((SAMPLER, 7), 0)[0]) == [f"{SAMPLER}:{7 * CLIENT_BLOCK + 1}"]
    assert not completions.after((SAMPLER, 8), 0)[0]


def test_more_than_one_reply_holds_come_with_the_next_ones() -> None:
    completions = CompletionLog(1, ids(*range(2 * MAX_BATCH + 1)))
    told: list[str] = []
    cursor = 0
    for wanted in (MAX_BATCH, MAX_BATCH, 1, 0):
        found, cursor = completions.after(MINE, cursor)
        assert len(found) == wanted
        told += found
    assert told == ids(*range(2 * MAX_BATCH + 1))


@pytest.mark.parametrize("other", [1, 4, 9])
def test_a_cursor_of_another_generation_is_the_beginning(other: int) -> None:
    _, cursor = CompletionLog(other, ids(2)).after(MINE, 0)
    completions = CompletionLog(5, ids(2, 7))
    assert completions.after(MINE, cursor)[0] == ids(2, 7)
    assert completions.after(MINE, 2**63 - 1)[0] == ids(2, 7)


def test_a_result_that_went_before_its_client_heard_of_it_is_told_all_the_same() -> None:
    completions = CompletionLog(1)
    completions.expect(MINE)
    cursor = completions.after(MINE, 0)[1]
    for future_id in ids(1, 2):
        completions.add(future_id)
    truncate(completions, ids(1, 2))
    told, later = completions.after(MINE, cursor)
    assert told == ids(1, 2)
    completions.after(MINE, later)
    truncate(completions, ids(1, 2))
    assert completions.after(MINE, 0)[0] == []
    completions.add(ids(3)[0])
    assert completions.after(MINE, later) == (ids(3), later + 1)


def test_nothing_is_kept_for_whoever_never_asks_or_whose_sampler_is_gone() -> None:
    unasked = CompletionLog(1, ids(1, 2, 3))
    truncate(unasked, ids(1, 2))
    assert unasked.after(MINE, 0)[0] == ids(3)
    asked = CompletionLog(1, ids(1, 2, 3))
    asked.after(MINE, 0)
    truncate(asked, ids(1, 2))
    assert asked.after(MINE, 0)[0] == ids(1, 2, 3)
    truncate(asked, ids(1, 2, 3), alive=False)
    assert asked.after(MINE, 0)[0] == ()
