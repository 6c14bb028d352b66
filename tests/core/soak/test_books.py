"""The books of a campaign notice every broken promise; if they did not, a campaign would prove nothing."""

from __future__ import annotations

from soak.coord.books import MOST_NAMED, Books


def one_epoch() -> Books:
    """Two workers have read four samples, two each, and were let through."""
    books = Books(4)
    for worker_id, start in (("a", 0), ("b", 2)):
        books.granted(0, worker_id, start, start + 2)
        books.ack_confirmed(0, worker_id, start, start + 2)
        books.released[0] += 1
    return books


def test_an_epoch_in_which_all_went_well_is_no_problem() -> None:
    books = one_epoch()
    assert books.confirmed_in(0) == 2
    books.close(0, workers=2)
    assert books.problems == []
    assert books.confirmed == 2


def test_a_lost_ack_shows_when_its_sample_is_handed_out_again() -> None:
    books = one_epoch()
    books.granted(0, "a", 3, 4)
    assert "handed out again" in books.problems[0]


def test_a_sample_of_two_workers_is_noticed() -> None:
    books = Books(4)
    books.granted(0, "a", 0, 2)
    books.granted(0, "b", 1, 3)
    assert books.problems == ["sample 1 of epoch 0 is a's, and was handed out to b"]


def test_the_same_grant_may_be_heard_of_twice() -> None:
    books = Books(4)
    books.granted(0, "a", 0, 2)
    books.granted(0, "a", 0, 2)
    assert books.problems == []


def test_a_second_ack_of_a_sample_is_noticed() -> None:
    books = one_epoch()
    books.ack_confirmed(0, "b", 0, 1)
    assert "acked twice" in books.problems[0]


def test_a_refused_ack_is_noticed() -> None:
    books = Books(4)
    books.ack_refused(0, "a", 7)
    assert "lease 7" in books.problems[0]


def test_a_sample_that_nobody_read_is_noticed_at_the_end() -> None:
    books = Books(5)
    books.granted(0, "a", 0, 4)
    books.ack_confirmed(0, "a", 0, 4)
    books.released[0] = 1
    books.close(0, workers=1)
    assert books.problems == ["1 samples of epoch 0 were never acked, such as 4"]


def test_somebody_left_in_a_barrier_is_noticed_at_the_end() -> None:
    books = one_epoch()
    books.close(0, workers=3)
    assert books.problems == ["the barrier of epoch 0 released 2 of 3 workers"]


def test_a_grant_of_an_epoch_that_is_over_is_noticed() -> None:
    books = one_epoch()
    books.close(0, workers=2)
    books.granted(0, "a", 0, 2)
    assert "is over" in books.problems[0]


def test_only_so_many_problems_are_told() -> None:
    books = Books(1)
    for number in range(MOST_NAMED + 3):
        books.problem(f"problem {number}")
    assert books.told()[-1] == "and 3 more"
    assert len(books.told()) == MOST_NAMED + 1
