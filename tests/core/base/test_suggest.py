from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.suggest import closest_name, did_you_mean


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("prot", "port"),
        ("databse", "database"),
        ("Database", "database"),
        ("databases", "database"),
        ("rot", "root"),
        ("xyz", None),
        ("", None),
        ("p" * 100_000, None),
    ],
)
def test_the_fewest_typing_mistakes_win(name: str, near: str | None) -> None:
    assert closest_name(name, ["root", "port", "database"]) == near


@given(st.text("abc", min_size=6, max_size=9), st.integers(0, 5), st.sampled_from("abcx"))
def test_one_mistake_in_a_name_is_always_forgiven(name: str, at: int, letter: str) -> None:
    swapped = name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
    for misspelt in (name[:at] + name[at + 1 :], name[:at] + letter + name[at:], swapped):
        assert closest_name(misspelt, ["unrelated", name]) == name


def test_a_shared_prefix_does_not_make_names_near() -> None:
    assert did_you_mean("A_LONG_PREFIX_X", ["A_LONG_PREFIX_ABCDE"], prefix="A_LONG_PREFIX_") == (
        " (known: A_LONG_PREFIX_ABCDE)"
    )


def test_without_known_names_there_is_nothing_to_suggest() -> None:
    assert did_you_mean("x", []) == ""
