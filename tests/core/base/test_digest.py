from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.digest import MAX_SAFE_INTEGER, canonical_json, digest, file_digest, sha256_hex
from strata.base.errors import Code, StrataError

# RFC 8785, appendix B.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


class Shape(msgspec.Struct, frozen=True, rename="camel"):
    side_count: int
    names: frozenset[str] = frozenset()
    weight: float = 0.5


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any


class Tone(enum.Enum):
    LOW = "low"


@pytest.mark.parametrize(("bits", "text"), NUMBERS.items())
def test_numbers_are_written_as_the_rfc_says(bits: str, text: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(number).decode() == text


def test_the_sample_of_the_rfc_comes_out_as_published() -> None:
    sample = json.loads(
        r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}"""
    )
    expected = (
        r'{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        r'"string":"€$\u000f\nA' + "'" + r'B\"\\\\\"/"}'
    )
    assert canonical_json(sample).decode() == expected


def test_keys_are_sorted_by_utf16_units_like_the_rfc_example() -> None:
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    written = json.loads(canonical_json(dict.fromkeys(keys, 0)))
    assert list(written) == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@given(json_values)
def test_canonical_json_reads_back_as_the_same_value_and_is_stable(value: Any) -> None:
    written = canonical_json(value)
    # A reader of doubles: the RFC writes 1e17 without an exponent, which Python would take for an exact integer.
    read = json.loads(written, parse_int=float)
    assert read == value
    assert canonical_json(read) == written


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 9)), st.randoms())
def test_the_order_in_which_keys_were_added_does_not_matter(value: dict[str, int], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert digest(dict(items)) == digest(value)


def test_structs_dataclasses_enums_and_sets_have_a_canonical_form() -> None:
    assert canonical_json(Shape(3, frozenset("cab"))) == b'{"names":["a","b","c"],"sideCount":3,"weight":0.5}'
    assert canonical_json(Point((1, 2), Tone.LOW)) == b'{"x":[1,2],"y":"low"}'


def test_a_set_has_the_same_digest_under_every_hash_seed() -> None:
    program = "from strata.base.digest import digest; print(digest({'s': set('abcdefgh')}))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (math.nan, "$"),
        ({"a": [0, math.inf]}, "$.a[1]"),
        ({"a": {"b c": -math.inf}}, '$.a["b c"]'),
        ({"n": MAX_SAFE_INTEGER + 1}, "$.n"),
        ([-MAX_SAFE_INTEGER - 1], "$[0]"),
        ([10**5000], "$[0]"),
        ({"a": {1: "one"}}, "$.a"),
        ({"a": {1: "one", "b": 2}}, "$.a"),
        ({"a": {None: 1}}, "$.a"),
        ([{"s": "\ud800"}], "$[0].s"),
        ({"a": {"\udfff": 1}}, "$.a"),
        ({"a": object()}, "$.a"),
        (Point(1, {"z": [math.nan]}), "$.y.z[0]"),
        ([Shape(1), Shape(2**60)], "$[1].sideCount"),
    ],
)
def test_what_json_cannot_carry_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(StrataError) as caught:
        canonical_json(value)
    assert caught.value.code is Code.INVALID
    assert caught.value.detail["path"] == path
    assert caught.value.message.startswith(f"{path}: ")


def test_the_largest_exact_integers_are_accepted() -> None:
    assert canonical_json([MAX_SAFE_INTEGER, -MAX_SAFE_INTEGER]) == b"[9007199254740991,-9007199254740991]"


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StrataError, match="contains itself") as caught:
        canonical_json(loop)
    assert caught.value.code is Code.INVALID


def test_an_offence_far_down_is_still_found() -> None:
    value: Any = math.nan
    for _ in range(400):
        value = [value]
    with pytest.raises(StrataError) as caught:
        canonical_json(value)
    assert caught.value.detail["path"] == "$" + "[0]" * 400


def test_a_set_of_things_that_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(StrataError) as caught:
        canonical_json({"s": {1, "a"}})
    assert caught.value.code is Code.INVALID


def test_digests_name_their_algorithm() -> None:
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest({}) == "sha256:" + hashlib.sha256(b"{}").hexdigest()


def test_a_file_is_digested_by_its_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert file_digest(tmp_path / "file") == f"sha256:{sha256_hex(content)}"
