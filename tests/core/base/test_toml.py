from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.base.toml import Key, parse

DOCUMENT = '''\
# comment with [brackets] and key = value
title = "x # not a comment"   # comment
"quoted key".'a.b' = 1

dotted . name = 2
text = """
[not_a_table]
fake = 1
"quotes" and \\"""escaped\\"""
four quotes""""
literal = \'\'\'
fake2 = ' '' \'\'\'
array = [
  1, # ] comment
  [2, 3],
  { a = 1, b.c = [ { d = "}" } ] },

  "],",
]
when = 1979-05-27 07:32:00
[jobs_default]
lr = 1
[[jobs]]
name = "first"
[[jobs]]
name = "second"
hyper = { lr = 0.1, "odd\\u0041" = 2 }
[jobs.env]
PATH = 'C:\\'
[[jobs.parts]]
size = 1
[[jobs.parts]]
size = 2
[deep.er.still]
x = 1
[deep]
y = 2
'''

PLACES: dict[tuple[Key, ...], int | None] = {
    ("title",): 2,
    ("quoted key",): 3,
    ("quoted key", "a.b"): 3,
    ("dotted", "name"): 5,
    ("text",): 6,
    ("literal",): 11,
    ("array",): 13,
    ("array", 0): 14,
    ("array", 1): 15,
    ("array", 1, 1): 15,
    ("array", 2, "b", "c", 0, "d"): 16,
    ("array", 3): 18,
    ("when",): 20,
    ("jobs",): 23,
    ("jobs", 0): 23,
    ("jobs", 0, "name"): 24,
    ("jobs", 1): 25,
    ("jobs", 1, "name"): 26,
    ("jobs", 1, "hyper", "lr"): 27,
    ("jobs", 1, "hyper", "oddA"): 27,
    ("jobs", 1, "env"): 28,
    ("jobs", 1, "env", "PATH"): 29,
    ("jobs", 1, "parts", 1): 32,
    ("jobs", 1, "parts", 1, "size"): 33,
    ("deep",): 36,
    ("deep", "er"): 34,
    ("deep", "er", "still", "x"): 35,
    ("deep", "y"): 37,
    # The nearest thing around what is not there.
    ("jobs", 1, "hyper", "momentum"): 27,
    ("jobs", 1, "missing", "x"): 25,
    ("jobs", 7, "x"): 23,
    ("array", 0, "x"): 14,
    ("fake",): None,
    (): None,
}


@pytest.mark.parametrize(("path", "line"), PLACES.items())
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_keys_are_placed(path: tuple[Key, ...], line: int | None, line_break: str) -> None:
    document = parse(DOCUMENT.replace("\n", line_break), "strata.toml")
    assert document.line(path) == line
    assert document.where(path) == ("strata.toml" if line is None else f"strata.toml:{line}")


def test_a_byte_order_mark_is_passed_over() -> None:
    document = parse("\ufeffa = 1", "f")
    assert document.data == {"a": 1}
    assert document.line(("a",)) == 1


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("a = 1\nb = = 2\n", 2, 5),
        ("a = 1\n\n[t\n", 3, 3),
        ("a = [\n1,\n", 3, 1),
        ('a = "x', 1, 7),
        ("a = 1\na = 2", 2, 6),
        ("a = 2021-02-30", 1, 5),
    ],
)
def test_a_syntax_error_names_source_line_and_column(text: str, line: int, column: int) -> None:
    with pytest.raises(StrataError) as caught:
        parse(text, "strata.toml")
    assert caught.value.code is Code.INVALID
    assert caught.value.message.startswith(f"strata.toml:{line}:{column}: not valid TOML: ")
    assert caught.value.detail == {"source": "strata.toml", "line": line, "column": column}
    assert "(at " not in caught.value.message


@pytest.mark.parametrize("text", [f"a = {'9' * 10_000}", f"a = {'[' * 100_000}"])
def test_hostile_documents_are_refused_like_any_other(text: str) -> None:
    with pytest.raises(StrataError) as caught:
        parse(text, "strata.toml")
    assert caught.value.code is Code.INVALID
    assert caught.value.message.startswith("strata.toml: ")


def test_nesting_that_the_parser_accepts_is_placed_from_any_depth_of_the_call_stack() -> None:
    depth = 150
    document = parse(f"a = {'[' * depth}1{']' * depth}", "f")
    sunk = sys.getrecursionlimit() - len_of_stack() - 60

    def sink(levels: int) -> int | None:
        return sink(levels - 1) if levels else document.line(("a", *[0] * depth))

    assert sink(sunk) == 1


def len_of_stack() -> int:
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def test_a_very_long_dotted_key_costs_no_more_than_its_length() -> None:
    names = [f"k{number}" for number in range(2000)]
    document = parse("\n" + ".".join(names) + " = 1", "f")
    assert document.line(names) == 2


def test_a_document_of_a_hundred_thousand_lines_is_placed() -> None:
    # The suite's timeout is the only bound on time here: a quadratic pass would take hours.
    text = "".join(
        f'[[jobs]]\nname = "j{number}"\nhyper = {{ lr = 0.1 }}\nnotes = """\n"""\n' for number in range(20_000)
    )
    document = parse(text, "f")
    assert document.line(("jobs", 19_999, "hyper", "lr")) == 99_998


# --- Documents written by an independent writer, which notes the line of everything it writes. ---

keys = st.text(st.sampled_from("ab1-_ .#='[]{}\"\\é"), max_size=4)
scalars = st.one_of(
    st.integers(-99, 99),
    st.booleans(),
    st.sampled_from(
        [1.5, "", "a = 1", "[x]", "# no", 'say "hi"', "it's", "'''", "back\\slash", "}", "],", "two\nlines\n"]
    ),
)
tables = st.recursive(
    st.dictionaries(keys, scalars, max_size=3),
    lambda inner: st.dictionaries(
        keys,
        scalars | inner | st.lists(scalars | inner, max_size=3) | st.lists(inner, min_size=1, max_size=3),
        max_size=4,
    ),
    max_leaves=15,
)


class Writer:
    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self.text = ""
        self.places: dict[tuple[Key, ...], tuple[int, str]] = {}

    def table(self, path: tuple[Key, ...], names: list[str], table: dict[str, Any]) -> None:
        later = []
        for key, value in table.items():
            is_array = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
            if (isinstance(value, dict) or is_array) and self._maybe():
                later.append((key, value))
            else:
                self._noise()
                self._pair((*path, key), "", value)
                self.text += self._draw(st.sampled_from(["\n", "  # [c] = 'x'\n", "\n\n"]))
        for key, value in later:
            name = self._key(key)
            if isinstance(value, dict):
                self._header("[", [*names, name], "]", (*path, key))
                self.table((*path, key), [*names, name], value)
                continue
            for index, item in enumerate(value):
                self._header("[[", [*names, name], "]]", (*path, key, index))
                self.table((*path, key, index), [*names, name], item)

    def _header(self, opening: str, names: list[str], closing: str, path: tuple[Key, ...]) -> None:
        self._noise()
        self.places[path] = (self._line(), names[-1])
        self.text += opening + self._dot().join(names) + closing + "\n"

    def _pair(self, path: tuple[Key, ...], before: str, value: Any) -> None:
        name = before + self._key(str(path[-1]))
        if isinstance(value, dict) and value and self._maybe() and len(value) == 1:
            ((key, inner),) = value.items()
            self._pair((*path, key), name + self._dot(), inner)
            return
        self.places[path] = (self._line(), name)
        self.text += name + self._draw(st.sampled_from([" = ", "=", "\t="]))
        self._value(path, value)

    def _value(self, path: tuple[Key, ...], value: Any) -> None:
        if isinstance(value, dict):
            self.text += "{ "
            for index, (key, item) in enumerate(value.items()):
                self.text += ", " if index else ""
                self._pair((*path, key), "", item)
            self.text += " }"
        elif isinstance(value, list):
            self.text += "["
            for index, item in enumerate(value):
                self.text += self._draw(st.sampled_from(["", "\n  ", ' # ], "\n']))
                self.places[(*path, index)] = (self._line(), "")
                self._value((*path, index), item)
                self.text += self._draw(st.sampled_from([",", "\n,", " , # }\n"]))
            self.text += "]"
        else:
            self.text += self._scalar(value)

    def _scalar(self, value: Any) -> str:
        if not isinstance(value, str):
            return json.dumps(value)
        escaped = json.dumps(value, ensure_ascii=False)[1:-1]
        forms = [f'"{escaped}"', f'"""{escaped}"""', f'"""\n{escaped}"""', f'"""\\\n  {escaped}"""']
        if "'" not in value:
            forms.append(f"'''{value}'''")
            forms.append(f"'{value}'" if "\n" not in value else f"'''\n{value}'''")
        if escaped.startswith((" ", "\\n")):
            del forms[3]
        return self._draw(st.sampled_from(forms))

    def _key(self, key: str) -> str:
        forms = [json.dumps(key, ensure_ascii=False)]
        if "'" not in key:
            forms.append(f"'{key}'")
        if re.fullmatch(r"[A-Za-z0-9_-]+", key):
            forms.append(key)
        return self._draw(st.sampled_from(forms))

    def _noise(self) -> None:
        self.text += self._draw(st.sampled_from(["", "\n", '# [c] "\n', "  "]))

    def _dot(self) -> str:
        return self._draw(st.sampled_from([".", " . "]))

    def _maybe(self) -> bool:
        return self._draw(st.booleans())

    def _line(self) -> int:
        return self.text.count("\n") + 1


@st.composite
def written_documents(draw: st.DrawFn) -> tuple[dict[str, Any], Writer]:
    data = draw(tables)
    writer = Writer(draw)
    writer.table((), [], data)
    return data, writer


@given(written_documents())
def test_everything_is_placed_on_the_line_that_holds_its_key(written: tuple[dict[str, Any], Writer]) -> None:
    data, writer = written
    document = parse(writer.text, "f")
    assert document.data == data
    lines = writer.text.split("\n")
    for path, (line, name) in writer.places.items():
        assert document.line(path) == line
        assert name in lines[line - 1]
