from __future__ import annotations

from typing import Any, Final

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.core.hyper import HyperSchema
from tests.core.fleet.jobs import json_values

NAMES: Final = st.sampled_from(["a", "b", "c"])
NUMBERS: Final = st.integers(-5, 5) | st.floats(-5, 5)
COUNTS: Final = st.integers(0, 3)


def found(schema: Any, value: Any) -> list[tuple[tuple[str | int, ...], str]]:
    return [(finding.path, finding.message) for finding in HyperSchema(schema).check(value)]


def refused(schema: Any) -> str:
    with pytest.raises(StrataError) as error:
        HyperSchema(schema, source="p.json")
    assert error.value.code is Code.INVALID
    return error.value.message


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # additionalProperties is always said, because what it means if it is not said is where this module differs.
    table = st.fixed_dictionaries(
        {"additionalProperties": st.booleans() | inner},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "minProperties": COUNTS,
            "maxProperties": COUNTS,
        },
    )
    rest = st.fixed_dictionaries(
        {},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": COUNTS,
            "maxItems": COUNTS,
            "uniqueItems": st.booleans(),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=3),
            "oneOf": st.lists(inner, min_size=1, max_size=3),
        },
    )
    return st.tuples(table, rest).map(lambda both: both[0] | both[1])


TYPES: Final = st.sampled_from(["string", "boolean", "number", "integer", "array", "object", "null"])
SCHEMAS: Final[st.SearchStrategy[Any]] = st.recursive(
    st.booleans()
    | st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
            "enum": st.lists(json_values, min_size=1, max_size=3),
            "const": json_values,
            "minimum": NUMBERS,
            "maximum": NUMBERS,
            "exclusiveMinimum": NUMBERS,
            "exclusiveMaximum": NUMBERS,
            "multipleOf": st.integers(1, 4),
            "minLength": COUNTS,
            "maxLength": COUNTS,
        },
    ),
    keywords,
    max_leaves=6,
)
VALUES: Final[st.SearchStrategy[Any]] = st.recursive(
    st.none() | st.booleans() | st.integers(-6, 6) | st.floats(-6, 6) | st.text("xyz", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(SCHEMAS, VALUES | json_values)
def test_it_agrees_with_a_full_implementation_where_objects_say_whether_they_are_open(schema: Any, value: Any) -> None:
    assert (not found(schema, value)) == jsonschema_rs.Draft202012Validator(schema).is_valid(value)


@given(json_values, json_values)
def test_any_schema_is_understood_or_refused(schema: Any, value: Any) -> None:
    try:
        understood = HyperSchema(schema)
    except StrataError as error:
        assert error.code is Code.INVALID  # noqa: PT017 - either outcome is right
    else:
        understood.check(value)


TRAINER: Final = {
    "type": "object",
    "properties": {
        "learning_rate": {"type": "number", "exclusiveMinimum": 0},
        "layers": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        "optimizer": {"$ref": "#/$defs/Optimizer"},
    },
    "required": ["learning_rate"],
    "$defs": {
        "Optimizer": {
            "type": "object",
            "properties": {"name": {"enum": ["adamw", "lion"]}, "momentum": {"type": "number"}},
        }
    },
}


def test_what_is_wrong_is_told_with_its_path() -> None:
    value = {"learning_rat": 0.1, "layers": [1, 0, "x"], "optimizer": {"name": "adam", "momentun": 1}}
    assert found(TRAINER, value) == [
        ((), "learning_rate is required"),
        (("learning_rat",), 'unknown (did you mean "learning_rate"?)'),
        (("layers", 1), "expected at least 1, found 0"),
        (("layers", 2), 'expected integer, found "x"'),
        (("optimizer", "name"), 'expected one of "adamw", "lion", found "adam" (did you mean "adamw"?)'),
        (("optimizer", "momentun"), 'unknown (did you mean "momentum"?)'),
    ]


@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}])
def test_an_object_is_closed_unless_it_says_otherwise(more: dict[str, Any]) -> None:
    schema = {"properties": {"a": {}}} | more
    assert [path for path, _ in found(schema, {"a": 1, "b": 2})] == [("b",)]
    assert found(schema | {"additionalProperties": True}, {"a": 1, "b": 2}) == []
    assert found({"type": "object"}, {"anything": 1}) == []


def test_parts_that_are_combined_are_closed_together() -> None:
    schema = {
        "properties": {"a": {}},
        "allOf": [{"properties": {"b": {}}}, {"$ref": "#/$defs/C"}],
        "$defs": {"C": {"properties": {"c": {"type": "integer"}}}},
    }
    assert found(schema, {"a": 1, "b": 2, "c": 3}) == []
    assert {path for path, _ in found(schema, {"d": 1})} == {("d",)}


def test_the_alternative_that_was_meant_is_the_one_complained_about() -> None:
    schema = {
        "anyOf": [
            {"type": "object", "properties": {"kind": {"const": "sgd"}, "momentum": {"type": "number"}}},
            {"type": "null"},
        ]
    }
    assert found(schema, None) == []
    assert found(schema, {"kind": "sgd", "momentun": 1}) == [(("momentun",), 'unknown (did you mean "momentum"?)')]
    assert found({"anyOf": [{"type": "string"}, {"type": "null"}]}, 3) == [
        ((), "expected string, found 3 or expected null, found 3")
    ]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"pattern": "^a+$"}, "p.json: #/pattern: this keyword is not understood"),
        ({"properties": {"a": {"if": {}}}}, "p.json: #/properties/a/if: this keyword is not understood"),
        ({"minimun": 1}, '(did you mean "minimum"?)'),
        ({"minimum": "1"}, '#/minimum: expected a number, found "1"'),
        ({"type": "float"}, "#/type: expected one of string"),
        ({"items": 3}, "#/items: expected a schema"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "expected Draft 2020-12"),
        ({"$ref": "https://example.org/x"}, "only references to definitions"),
        ({"$ref": "#/default", "default": {"pattern": "x"}}, "only references to definitions"),
        ({"$ref": "#/$defs/X"}, 'there is nothing at "#/$defs/X"'),
        ({"$ref": "#"}, '"#" refers to itself'),
        ({"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {}]}}}, "refers to itself"),
        (3, "p.json: #: expected a schema"),
    ],
)
def test_a_schema_that_is_not_fully_understood_is_refused(schema: Any, message: str) -> None:
    assert message in refused(schema)


def test_a_schema_may_contain_itself_where_the_value_ends() -> None:
    tree = {"properties": {"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "size": {"type": "integer"}}}
    assert found(tree, {"child": {"child": None, "size": 1}}) == []
    assert found(tree, {"child": {"child": {"size": "x"}}}) != []


def test_alternatives_inside_alternatives_cannot_run_for_ever() -> None:
    schema = {"properties": {"a": {"anyOf": [{"$ref": "#"}] * 8}, "b": False}}
    value: dict[str, Any] = {"b": 1}
    for _ in range(25):
        value = {"a": value}
    with pytest.raises(StrataError, match="too many alternatives"):
        HyperSchema(schema).check(value)


@pytest.mark.parametrize(("items", "differ"), [([1, 2], True), ([1, 1.0], False), ([1, True], True), ([[], []], False)])
def test_items_that_must_differ_are_compared_as_json(items: list[Any], differ: bool) -> None:
    assert (not found({"uniqueItems": True}, items)) == differ


def test_a_fraction_is_a_multiple_as_people_count() -> None:
    assert found({"multipleOf": 0.1}, 0.3) == []
    assert found({"multipleOf": 0.1}, 0.35) != []
