"""Canonical JSON (RFC 8785) and SHA-256 digests of values and files, with the refusals of what JSON cannot carry
exactly.

Pure except `file_digest`, so cores may import it. What JSON cannot carry exactly is refused, never rounded: an identity
that depends on a rounding would differ between languages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import rfc8785

from strata.base.errors import Code, StrataError

MAX_SAFE_INTEGER: Final = 2**53 - 1
"""JSON numbers are IEEE doubles: integers beyond this are not exact in every reader."""

_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def canonical_json(value: Any) -> bytes:
    """The one byte sequence for `value`: JSON values, msgspec Structs, dataclasses, enums, dates, sets (sorted)."""
    try:
        # "deterministic" orders sets, whose iteration order differs from one process to the next.
        return rfc8785.dumps(msgspec.to_builtins(value, order="deterministic"))
    except RecursionError as error:
        raise _refused("$", "is nested too deeply, or contains itself") from error
    except (ValueError, TypeError) as error:
        for path, reason in _violations(value):
            raise _refused(path, reason) from error
        raise _refused("$", f"has no canonical JSON: {error}") from error


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(value: Any) -> str:
    """`sha256:` and the hash of the canonical JSON of `value`."""
    return f"sha256:{sha256_hex(canonical_json(value))}"


def file_digest(path: Path) -> str:
    """`sha256:` and the hash of the file's bytes, read in pieces: the file may be larger than the memory."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def without_defaults(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from their defaults, for a digest that a field added later does not change.

    `omit_defaults` alone will not do: it compares by identity, so a 0.0 that was decoded is not the 0.0 of the default.
    """
    kept: dict[str, Any] = {}
    for field in _fields(type(struct)):
        value = getattr(struct, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if default is msgspec.NODEFAULT or value != default:
            kept[field.encode_name] = without_defaults(value) if isinstance(value, msgspec.Struct) else value
    return kept


@cache
def _fields(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """They never change, and msgspec evaluates all annotations whenever it is called for them."""
    return msgspec.structs.fields(struct)


def _refused(path: str, reason: str) -> StrataError:
    return StrataError(Code.INVALID, f"{path}: {reason}", path=path)


def _violations(value: Any) -> Iterator[tuple[str, str]]:
    """Called only after a failure, so that the common case does not keep track of paths."""
    waiting = [("$", value)]
    while waiting:
        path, here = waiting.pop()
        reason = _refusal(here)
        if reason is not None:
            yield path, reason
        inside = []
        for key, child in _children(here):
            reason = _key_refusal(key) if isinstance(here, dict) else None
            if reason is not None:
                yield path, reason
            else:
                inside.append((_step(path, key), child))
        waiting += reversed(inside)


def _key_refusal(key: Any) -> str | None:
    if not isinstance(key, str):
        return f"the key {key!r} is not a string"
    if not _is_unicode(key):
        return f"the key {key!r} contains half of a surrogate pair, which UTF-8 cannot carry"
    return None


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            yield field.encode_name, getattr(value, field.name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for slot in dataclasses.fields(value):
            yield slot.name, getattr(value, slot.name)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _refusal(value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a JSON number"
    if isinstance(value, int) and not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
        return "the integer is beyond ±(2^53-1) and would not be exact in every reader; write it as a string"
    if isinstance(value, str) and not _is_unicode(value):
        return "the string contains half of a surrogate pair, which UTF-8 cannot carry"
    if isinstance(value, dict | list | tuple):
        return None
    try:
        msgspec.to_builtins(value, order="deterministic")
    except TypeError:
        return f"a value of type {type(value).__name__} has no JSON form"
    return None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _step(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    if _PLAIN_NAME.fullmatch(key):
        return f"{path}.{key}"
    return f"{path}[{msgspec.json.encode(key).decode()}]"
