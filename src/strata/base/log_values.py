"""How a value appears in a log: depth and length limits, escaping, and which field names are secrets."""

from __future__ import annotations

import datetime
import json
import math
import re
import reprlib
from enum import Enum
from pathlib import PurePath
from typing import Any, Final

import msgspec

from strata.base.secret import MASK, Secret

_MAX_DEPTH: Final = 8
_MAX_ITEMS: Final = 1000

# `tokens` and `token_count` are counts; `token` and `access_token` are credentials, unless the value is a number, as
# that of `bytes_per_token` is. A password may be a number.
_SECRET_NAME: Final = re.compile(
    r"(?:^|_)(?:token|(?:secret|password|passwd|passphrase|authorization|api_?key|private_?key|access_?key)s?(?:_.*)?)$"
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_SCALARS: Final = (bool, float, int, str, Enum, Secret, PurePath, datetime.date, datetime.time)

_repr = reprlib.Repr()
_repr.maxother = 2000


def loggable(value: Any, depth: int = 0) -> Any:
    """JSON values as they are, collections and Structs by their items, everything else by its `repr`."""
    if value is None or isinstance(value, _SCALARS):
        return _scalar(value)
    # A depth limit instead of a search for cycles: both a cycle and an absurdly deep value end here.
    if depth >= _MAX_DEPTH:
        return "…"
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name, None) for name in value.__struct_fields__}
    # Exact types: a subclass may override what iterating it does.
    if type(value) is dict:
        return loggable_mapping(value, depth)
    if type(value) in {list, tuple, set, frozenset}:
        items = [loggable(item, depth + 1) for item, _ in zip(value, range(_MAX_ITEMS), strict=False)]
        return items if len(value) <= _MAX_ITEMS else [*items, f"… {len(value) - _MAX_ITEMS} more"]
    return shortened_repr(value)


def format_value(value: Any) -> str:
    """A plain value on the console: bare if it is one simple word, else as JSON."""
    if isinstance(value, str) and re.fullmatch(r"[\w./:@+*-]+", value):
        return value
    return printable(json.dumps(value, ensure_ascii=False))


def printable(text: str) -> str:
    """`text` with everything that could move the cursor, end the line or hide something written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(_CAMEL.sub("_", name).replace("-", "_").lower()) is not None


def _is_secret(name: str, value: Any) -> bool:
    if value is None or (isinstance(value, int | float) and name.endswith("token")):
        return False
    return is_secret_name(name)


def shortened_repr(value: Any) -> str:
    # reprlib survives a `__repr__` that raises, and cuts what is too long.
    return _repr.repr_instance(value, 1)


def _scalar(value: Any) -> Any:
    if isinstance(value, Secret | PurePath | datetime.date | datetime.time):
        return str(value)
    if isinstance(value, Enum):
        return loggable(value.value, _MAX_DEPTH)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else float.__repr__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        # Few readers take larger integers, and Python refuses to print those of thousands of digits.
        return int(value) if -(2**63) <= value < 2**64 else shortened_repr(value)
    return value


def loggable_mapping(value: dict[Any, Any], depth: int = 0) -> dict[str, Any]:
    result = {}
    for key, item in value.items():
        name = key if type(key) is str else str(loggable(key, _MAX_DEPTH))
        result[name] = MASK if _is_secret(name, item) else loggable(item, depth + 1)
    return result
