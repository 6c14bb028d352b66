from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.base.ids import Ids, check_content_id, content_id, resolve_prefix
from tests.support.manual_clock import ManualClock

FORM = re.compile(r"two_words_[0-7][0-9a-hjkmnp-tv-z]{25}")
entropies = st.binary(min_size=10, max_size=10)
times = st.floats(0, 2**48 / 1000 - 1)


class SetClock:
    """A wall clock that says what it is told to, also the past."""

    def __init__(self, wall_s: float) -> None:
        self.now_s = wall_s

    def wall_s(self) -> float:
        return self.now_s


def make_id(prefix: str, wall_s: float, entropy: bytes) -> str:
    return Ids(SetClock(wall_s), lambda _: entropy).new(prefix)


def test_an_id_is_spelled_in_lower_case_crockford_base32() -> None:
    # The time part of the example in the ULID specification.
    assert make_id("thing", 1469918176.385, bytes(10)) == "thing_01aryz6s410000000000000000"
    assert make_id("thing", 0, b"\xff" * 10) == "thing_0000000000zzzzzzzzzzzzzzzz"


@given(times, entropies)
def test_every_id_has_its_prefix_and_26_characters(wall_s: float, entropy: bytes) -> None:
    assert FORM.fullmatch(make_id("two_words", wall_s, entropy))


@given(times, times, entropies, entropies)
def test_ids_sort_by_time(first_s: float, second_s: float, one: bytes, other: bytes) -> None:
    first_ms, second_ms = int(first_s * 1000), int(second_s * 1000)
    if first_ms != second_ms:
        assert (make_id("a", first_s, one) < make_id("a", second_s, other)) == (first_ms < second_ms)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_id("Thing", 0, bytes(10)),
        lambda: make_id("thing1", 0, bytes(10)),
        lambda: make_id("", 0, bytes(10)),
        lambda: make_id("thing", -1, bytes(10)),
        lambda: make_id("thing", float("nan"), bytes(10)),
        lambda: make_id("thing", float("inf"), bytes(10)),
        lambda: make_id("thing", 2**48, bytes(10)),
        lambda: content_id("thing", -1, {}),
    ],
)
def test_an_id_is_not_made_from_parts_that_do_not_fit(make: Callable[[], str]) -> None:
    with pytest.raises(StrataError) as caught:
        make()
    assert caught.value.code is Code.INVALID


def test_equal_content_has_the_equal_id_and_another_version_another_one() -> None:
    one = content_id("thing", 1, {"a": 1, "b": [2.0]})
    assert one == content_id("thing", 1, {"b": [2], "a": 1})
    assert one.startswith("thing1_")
    assert one != content_id("thing", 2, {"a": 1, "b": [2.0]})
    assert check_content_id("thing", 1, one) == one
    with pytest.raises(StrataError):
        check_content_id("thing", 2, one)
    with pytest.raises(StrataError):
        check_content_id("thing", 1, one.upper())


def test_ids_grow_within_one_millisecond() -> None:
    ids = Ids(ManualClock())
    made = [ids.new("thing") for _ in range(1000)]
    assert made == sorted(set(made))


@given(st.lists(st.integers(-5000, 5000), min_size=1, max_size=50), st.data())
def test_ids_grow_whatever_the_wall_clock_and_the_entropy_do(steps_ms: list[int], data: st.DataObject) -> None:
    clock = SetClock(1_700_000_000.0)
    ids = Ids(clock, lambda size: data.draw(st.binary(min_size=size, max_size=size)))
    made = []
    for step_ms in steps_ms:
        clock.now_s += step_ms / 1000
        made.append(ids.new("thing"))
    assert made == sorted(set(made))


def test_ids_go_on_with_the_new_time_once_the_clock_caught_up() -> None:
    clock = SetClock(1000.0)
    ids = Ids(clock, bytes)
    ids.new("thing")
    clock.now_s = 500.0
    ids.new("thing")
    clock.now_s = 1001.0
    assert ids.new("thing") == make_id("thing", 1001.0, bytes(10))


def test_two_copies_of_one_process_do_not_count_on_to_the_same_ids() -> None:
    made = []
    for chance in (b"\x01" * 10, b"\x02" * 10):
        entropy = iter([bytes(10), chance])
        ids = Ids(SetClock(1.0), lambda _size, entropy=entropy: next(entropy))  # type: ignore[misc]
        ids.new("thing")
        made.append(ids.new("thing"))
    assert made[0] != made[1]


def test_threads_never_get_the_same_id() -> None:
    ids = Ids(ManualClock())
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.extend(ids.new("t") for _ in range(200))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1600


KNOWN = ["thing_01aaa", "thing_01aab", "thing_02ccc", "other_01aaa0"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("thing_02", "thing_02ccc"), ("02c", "thing_02ccc"), ("thing_01aaa", "thing_01aaa"), ("o", "other_01aaa0")],
)
def test_the_beginning_of_one_id_is_enough(text: str, found: str) -> None:
    assert resolve_prefix(text, KNOWN) == found


def test_a_whole_id_wins_over_longer_ones_that_begin_with_it() -> None:
    assert resolve_prefix("a_1", ["a_12", "a_1", "a_13"]) == "a_1"


def test_the_beginning_of_several_ids_lists_them() -> None:
    with pytest.raises(StrataError) as caught:
        resolve_prefix("thing_01", KNOWN)
    assert caught.value.code is Code.CONFLICT
    assert "thing_01aaa, thing_01aab" in caught.value.message
    assert caught.value.detail["candidates"] == ["thing_01aaa", "thing_01aab"]


def test_a_long_list_of_candidates_is_cut_in_the_message() -> None:
    with pytest.raises(StrataError, match="and 95 more"):
        resolve_prefix("a", [f"a_{number:03}" for number in range(100)])


@pytest.mark.parametrize(("text", "code"), [("zzz", Code.NOT_FOUND), ("", Code.INVALID)])
def test_the_beginning_of_no_id_is_refused(text: str, code: Code) -> None:
    with pytest.raises(StrataError) as caught:
        resolve_prefix(text, KNOWN)
    assert caught.value.code is code
