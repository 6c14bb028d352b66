"""Collects every problem of a manifest with its key path and line (at most 200 are listed), and checks types, sizes and
nesting of values. Its wording of misfits is here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import isfinite
from typing import Any, Final

import msgspec

from strata.base.digest import MAX_SAFE_INTEGER
from strata.base.errors import Code, StrataError
from strata.base.suggest import did_you_mean
from strata.base.toml import Key, TomlDocument
from strata.fleet.core.hyper_schema import shown
from strata.fleet.core.requirement import NAME_RULE

MAX_LISTED: Final = 200
MAX_VALUE_BYTES: Final = 65_536
_MAX_DEPTH: Final = 32

KeyPath = tuple[Key, ...]


class Problems:
    """What is wrong with a document, each as `file:line: jobs[3].hyper.learning_rat: …`, in the order of its lines."""

    def __init__(self, document: TomlDocument) -> None:
        self._document = document
        self._found: dict[tuple[int, str], None] = {}

    def copy(self) -> Problems:
        other = Problems(self._document)
        other._found.update(self._found)
        return other

    def add(self, place: KeyPath, message: str) -> None:
        line = self._document.line(place) or 0
        self._found[line, f"{self._document.where(place)}: {dotted(place)}: {message}"] = None

    def add_all(self, findings: Iterable[tuple[KeyPath, str]]) -> None:
        for place, message in findings:
            self.add(place, message)

    def line(self, place: KeyPath) -> int | None:
        return self._document.line(place)

    @property
    def many(self) -> bool:
        """More than will be listed: what only makes a message better is no longer worth its time."""
        return len(self._found) >= MAX_LISTED

    def __len__(self) -> int:
        return len(self._found)

    def raise_any(self) -> None:
        if not self._found:
            return
        lines = [text for _, text in sorted(self._found, key=lambda describe_value: describe_value[0])]
        shown_lines = lines[:MAX_LISTED]
        if len(lines) > MAX_LISTED:
            shown_lines.append(f"{self._document.source}: and at least {len(lines) - MAX_LISTED} more problems")
        raise StrataError(Code.INVALID, "\n".join(shown_lines), problems=tuple(shown_lines))


def dotted(place: KeyPath) -> str:
    """`jobs[3].hyper."a b"`."""
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            bare = step.replace("-", "_").isidentifier() and step.isascii()
            text += f"{'.' if text else ''}{step if bare else shown(step)}"
    return text or "manifest"


def table_at(problems: Problems, place: KeyPath, value: Any) -> dict[str, Any] | None:
    if isinstance(value, dict):
        return value
    problems.add(place, f"expected a table, found {describe_value(value)}")
    return None


def tables_at(problems: Problems, place: KeyPath, value: Any) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """The tables of an array of tables (`[[jobs]]`), each with its place."""
    if not isinstance(value, list):
        problems.add(place, f"expected an array of tables ([[{dotted(place)}]]), found {describe_value(value)}")
        return
    for index, inner in enumerate(value):
        table = table_at(problems, (*place, index), inner)
        if table is not None:
            yield (*place, index), table


def read_fields(
    problems: Problems,
    place: KeyPath,
    table: Mapping[str, Any],
    kinds: Mapping[str, Any],
    *,
    required: Collection[str] = (),
) -> dict[str, Any]:
    """The values of `table` as the types `kinds` says; what does not fit is a problem and left out."""
    values = {}
    for key, value in table.items():
        if key not in kinds:
            problems.add((*place, key), f"unknown{'' if problems.many else did_you_mean(key, kinds)}")
            continue
        try:
            values[key] = msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            for inside, message in _misfits(str(error), value, kinds[key]):
                problems.add((*place, key, *inside), message)
    for key in required:
        if key not in table:
            problems.add(place, f"{key} is required")
    return values


def fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def kinds_of(struct: type[msgspec.Struct], *, without: Collection[str] = ()) -> dict[str, Any]:
    """The types of a Struct's fields, by name."""
    return {field.name: field.type for field in msgspec.structs.fields(struct) if field.name not in without}


def json_problems(value: Any, place: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yields what of a TOML value is no exact JSON, or too large to be kept with every job."""
    waiting: list[tuple[KeyPath, Any]] = [(place, value)]
    clean = True
    while waiting:
        here, inner = waiting.pop()
        problem = _json_problem(inner) if len(here) - len(place) <= _MAX_DEPTH else "it is nested too deeply"
        if problem:
            clean = False
            yield here, problem
        elif isinstance(inner, dict):
            waiting += [((*here, key), each) for key, each in inner.items()]
        elif isinstance(inner, list):
            waiting += [((*here, index), each) for index, each in enumerate(inner)]
    if clean and (size := len(msgspec.json.encode(value))) > MAX_VALUE_BYTES:
        yield place, f"it takes {size} bytes as JSON, and at most {MAX_VALUE_BYTES} are kept with a job"


def _json_problem(value: Any) -> str | None:
    if isinstance(value, float) and not isfinite(value):
        return f"{value} is not a JSON number"
    if isinstance(value, int) and not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
        return "the integer is beyond ±(2^53-1) and would not be exact in every reader; write it as a string"
    if value is None or isinstance(value, str | int | float | dict | list):
        return None
    return f"JSON has no {type(value).__name__}; write it as a string"


def describe_value(value: Any) -> str:
    """A value of the manifest in a message."""
    if isinstance(value, dict):
        return "a table"
    return "an array" if isinstance(value, list) else shown(value)


_STEP: Final = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_WORDS: Final = {
    "`str`": "a string",
    "`int`": "an integer",
    "`float`": "a number",
    "`bool`": "true or false",
    "`array`": "an array",
    "`object`": "a table",
    " | null`": "`",
}


def _misfits(message: str, value: Any, kind: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yields where a value does not fit, and why. msgspec does not tell the keys of a table, so they are tried one by
    one."""
    if not isinstance(value, dict) or not ("`$[...]" in message or "`key` in `$`" in message):
        yield _worded(message, value)
        return
    for key, inner in value.items():
        try:
            msgspec.convert({key: inner}, kind)
        except msgspec.ValidationError as error:
            inside, reason = _worded(str(error).replace("`$[...]", "`$"), inner)
            yield (key, *inside), reason


def _worded(message: str, value: Any) -> tuple[KeyPath, str]:
    """msgspec's complaint in the words of a manifest, and where inside the value it is."""
    reason, _, at = message.partition(" - at ")
    inside: list[Key] = []
    inner = value
    # `$.a[2]` is a field and an array's index; deeper tables, whose keys are only `[...]` there, stay the place.
    for field, index in _STEP.findall(at):
        if index.isdecimal() and isinstance(inner, list):
            inside.append(int(index))
        elif field and isinstance(inner, dict) and field in inner:
            inside.append(field)
        else:
            break
        inner = inner[inside[-1]]
    if "matching regex" in reason:
        if at.startswith("`key`"):
            return tuple(inside), "expected a key of ASCII letters, digits, dots, - and _"
        return tuple(inside), f"expected {NAME_RULE}, found {describe_value(inner)}"
    expected = reason.partition(", got")[0]
    for word, spoken in reversed(_WORDS.items()):
        expected = expected.replace(word, spoken)
    expected = expected.replace("`", '"')
    return tuple(inside), f"{expected[:1].lower()}{expected[1:]}, found {describe_value(inner)}"
