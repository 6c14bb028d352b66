"""Decodes values from a journal, and words the refusal of tags that this version does not know."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

from strata.base.errors import Code, StrataError

T = TypeVar("T")


class _Tagged(msgspec.Struct):
    type: str = ""


def stored_decoder(kind: type[T] | Any, what: str, removed_tags: Collection[str] = ()) -> Callable[[bytes], T]:
    """The decoder of `kind`; UNSUPPORTED for anything else. `removed_tags` are those that earlier versions wrote."""
    decode: Callable[[bytes], T] = msgspec.msgpack.Decoder(kind).decode

    def decode_stored(encoded: bytes) -> T:
        try:
            return decode(encoded)
        except msgspec.ValidationError as error:
            raise StrataError(
                Code.UNSUPPORTED,
                f"the journal holds {_describe(encoded, what, removed_tags)}: {error}",
                hint="start with a new journal, or go on with the version of Strata that wrote this one",
            ) from None

    return decode_stored


def _describe(encoded: bytes, what: str, removed_tags: Collection[str]) -> str:
    try:
        tag = msgspec.msgpack.decode(encoded, type=_Tagged).type
    except msgspec.MsgspecError:
        tag = ""
    if tag in removed_tags:
        return f"{what} {tag!r} of an earlier version, which this version does not read"
    return f"{what} {tag!r} of another version" if tag else f"{what} of another version"
