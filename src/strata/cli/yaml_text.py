"""Values of JSON's kinds as YAML: the small part of YAML that needs, which parsers of YAML 1.1 and 1.2 read alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_WORDS: Final = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])
"""Words that a parser of YAML 1.1 takes for something else than text."""
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_yaml(value: object) -> str:
    return "\n".join(_lines(value))


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, member in value.items():
            yield from _under(f"{_text(str(key))}:", member, inside="  ")
    elif _is_list(value) and value:
        assert isinstance(value, Sequence)
        for member in value:
            yield from _item(member)
    else:
        yield _scalar(value)


def _under(head: str, value: object, inside: str) -> Iterator[str]:
    if (isinstance(value, Mapping) or _is_list(value)) and value:
        yield head
        yield from (f"{inside}{line}" for line in _lines(value))
    else:
        yield f"{head} {_scalar(value)}"


def _item(value: object) -> Iterator[str]:
    """The first line of what is in a list stands behind its dash."""
    for number, line in enumerate(_lines(value)):
        yield f"  {line}" if number else f"- {line}"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{}"
    return "[]" if _is_list(value) else _text(str(value))


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # Without a point YAML 1.1 reads 1e-05 as text.
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return '"' + "".join(_ESCAPES.get(char) or _character(char) for char in text) + '"'


def _character(char: str) -> str:
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
