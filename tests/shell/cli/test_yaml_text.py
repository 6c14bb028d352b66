"""`-o yaml`: what a YAML parser reads is what was written."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.cli.output import Format
from strata.cli.rows import Column, Rows
from strata.cli.yaml_text import to_yaml

yaml: Any = pytest.importorskip("yaml")

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@given(VALUES)
def test_a_parser_reads_every_value_back(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "No",
        "null",
        "~",
        "1e5",
        "0x10",
        "1:30",
        "2026-11-16",
        "- a",
        "a: b",
        "# a",
        "",
        " ",
        "a ",
        "\u2028",
        "\x85",
        "é 🙂",
        "=",
        "<<",
        "*a",
    ],
)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert yaml.safe_load(to_yaml({text: [text]})) == {text: [text]}


def test_small_numbers_are_numbers() -> None:
    assert yaml.safe_load(to_yaml([1e-05, 1e22, -0.5])) == [1e-05, 1e22, -0.5]
    assert math.isnan(yaml.safe_load(to_yaml(float("nan"))))


def test_it_is_written_in_blocks() -> None:
    value = {"id": "job1_3f", "hyper": {"depth": 3}, "tags": ["a", {"b": None}], "none": [], "text": "a\nb"}
    assert to_yaml(value).splitlines() == [
        "id: job1_3f",
        "hyper:",
        "  depth: 3",
        "tags:",
        "  - a",
        "  - b: null",
        "none: []",
        'text: "a\\nb"',
    ]


def test_rows_are_the_same_in_yaml_and_json_and_a_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"job": "tree", "id": "1"}, {"job": "wood", "id": "2"}]

    def printed(output: Format, *columns: Column) -> str:
        with Rows(output, columns) as target:
            for row in rows:
                target.add(row)
        return capsys.readouterr().out

    assert yaml.safe_load(printed(Format.YAML, Column("id"))) == json.loads(printed(Format.JSON, Column("id"))) == rows
    assert printed(Format.NAME, Column("job"), Column("id", identifies=True)) == "1\n2\n"
    assert printed(Format.NAME, Column("job"), Column("id")) == "tree\nwood\n"
