"""The expected state of a campaign notices every broken promise; if it did not, a campaign would prove nothing."""

from __future__ import annotations

from soak.coord.expected_state import MOST_NAMED, ExpectedState


def one_epoch() -> ExpectedState:
    """Two workers have read four samples, two each, and were let through."""
    expected = ExpectedState(4)
    for worker_id, start in (("a", 0), ("b", 2)):
        expected.granted(0, worker_id, start, start + 2)
        expected.ack_confirmed(0, worker_id, start, start + 2)
        expected.released[0] += 1
    return expected


def test_an_epoch_in_which_all_went_well_is_no_problem() -> None:
    expected = one_epoch()
    assert expected.confirmed_in(0) == 2
    expected.close(0, workers=2)
    assert expected.problems == []
    assert expected.confirmed == 2


def test_a_lost_ack_shows_when_its_sample_is_handed_out_again() -> None:
    expected = one_epoch()
    expected.granted(0, "a", 3, 4)
    assert "handed out again" in expected.problems[0]


def test_a_sample_of_two_workers_is_noticed() -> None:
    expected = ExpectedState(4)
    expected.granted(0, "a", 0, 2)
    expected.granted(0, "b", 1, 3)
    assert expected.problems == ["sample 1 of epoch 0 is a's, and was handed out to b"]


def test_the_same_grant_may_be_heard_of_twice() -> None:
    expected = ExpectedState(4)
    expected.granted(0, "a", 0, 2)
    expected.granted(0, "a", 0, 2)
    assert expected.problems == []


def test_a_second_ack_of_a_sample_is_noticed() -> None:
    expected = one_epoch()
    expected.ack_confirmed(0, "b", 0, 1)
    assert "acked twice" in expected.problems[0]


def test_a_refused_ack_is_noticed() -> None:
    expected = ExpectedState(4)
    expected.ack_refused(0, "a", 7)
    assert "lease 7" in expected.problems[0]


def test_a_sample_that_nobody_read_is_noticed_at_the_end() -> None:
    expected = ExpectedState(5)
    expected.granted(0, "a", 0, 4)
    expected.ack_confirmed(0, "a", 0, 4)
    expected.released[0] = 1
    expected.close(0, workers=1)
    assert expected.problems == ["1 samples of epoch 0 were never acked, such as 4"]


def test_somebody_left_in_a_barrier_is_noticed_at_the_end() -> None:
    expected = one_epoch()
    expected.close(0, workers=3)
    assert expected.problems == ["the barrier of epoch 0 released 2 of 3 workers"]


def test_a_grant_of_an_epoch_that_is_over_is_noticed() -> None:
    expected = one_epoch()
    expected.close(0, workers=2)
    expected.granted(0, "a", 0, 2)
    assert "is over" in expected.problems[0]


def test_only_so_many_problems_are_told() -> None:
    expected = ExpectedState(1)
    for number in range(MOST_NAMED + 3):
        expected.problem(f"problem {number}")
    assert expected.summary()[-1] == "and 3 more"
    assert len(expected.summary()) == MOST_NAMED + 1
