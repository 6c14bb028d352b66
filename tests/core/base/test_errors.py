from __future__ import annotations

import pytest

from strata.base.errors import Code, StrataError


def test_an_error_reads_as_its_sentence_with_the_next_step_behind() -> None:
    assert str(StrataError(Code.INVALID, "the name is empty")) == "the name is empty"
    assert str(StrataError(Code.INVALID, "the name is empty", hint="give one")) == "the name is empty (give one)"


def test_an_error_carries_code_message_hint_and_detail() -> None:
    error = StrataError(Code.STALE, "replaced", hint="stop", epoch=3)
    assert (error.code, error.message, error.hint, error.detail) == (Code.STALE, "replaced", "stop", {"epoch": 3})
    assert repr(error) == "StrataError(stale, 'replaced')"


def test_an_error_is_caught_like_any_exception() -> None:
    with pytest.raises(Exception, match="gone"):
        raise StrataError(Code.GONE, "gone")


def test_codes_are_distinct_lower_case_words_that_may_travel() -> None:
    values = [code.value for code in Code]
    assert len(set(values)) == len(values)
    assert all(code.value == code.name.lower() for code in Code)
    assert Code("not_found") is Code.NOT_FOUND
