"""Makes identifiers: time-sortable ones (`Ids.new`), content ones with a prefix and version, and the resolution of a
shortened id.

The functions are pure, so cores may use them; `Ids` is for shells, which own a clock and a source of chance.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from strata.base.digest import canonical_json, sha256_hex
from strata.base.errors import Code, StrataError

ENTROPY_BYTES: Final = 10
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS: Final = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_PREFIX: Final = re.compile(r"[a-z]+(?:_[a-z]+)*")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_ENTROPY_BITS: Final = 8 * ENTROPY_BYTES
_MAX_MS: Final = 2**48 - 1
_LISTED_CANDIDATES: Final = 5


class WallClock(Protocol):
    def wall_s(self) -> float: ...


def content_id(prefix: str, version: int, value: Any) -> str:
    """`prefix<version>_<hex>`: equal content, equal id. Raise the version when the meaning of the content changes."""
    if version < 0:
        raise StrataError(Code.INVALID, f"the version of a content id cannot be negative: {version}")
    return f"{_checked_prefix(prefix)}{version}_{sha256_hex(canonical_json(value))}"


def check_content_id(prefix: str, version: int, text: str) -> str:
    head, _, tail = text.rpartition("_")
    if head != f"{_checked_prefix(prefix)}{version}" or not _HASH.fullmatch(tail):
        raise StrataError(Code.INVALID, f'{text!r} is not an id of the form "{prefix}{version}_" and 64 hex digits')
    return text


def resolve_prefix(text: str, known: Iterable[str]) -> str:
    """The one known id that `text` is, or is the beginning of; the beginning may leave out the `prefix_` part."""
    if not text:
        raise StrataError(Code.INVALID, "an empty text names no id")
    found = []
    for candidate in known:
        if candidate == text:
            return candidate
        if candidate.startswith(text) or candidate.rpartition("_")[2].startswith(text):
            found.append(candidate)
    candidates = sorted(set(found))
    if not candidates:
        raise StrataError(Code.NOT_FOUND, f"no id starts with {text!r}")
    if len(candidates) > 1:
        shown = ", ".join(candidates[:_LISTED_CANDIDATES])
        more = f" and {len(candidates) - _LISTED_CANDIDATES} more" if len(candidates) > _LISTED_CANDIDATES else ""
        message = f"{text!r} is the beginning of {len(candidates)} ids: {shown}{more}"
        raise StrataError(Code.CONFLICT, message, hint="give more characters", candidates=candidates)
    return candidates[0]


class Ids:
    """Makes ids that grow within one process, also when the wall clock stands still or steps back.

    An id is a prefix and 26 lower-case Crockford base32 characters: 48 bits of milliseconds, then 80 bits of entropy.
    """

    def __init__(self, clock: WallClock, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._clock = clock
        self._entropy = entropy
        self._lock = threading.Lock()
        self._last = -1

    def new(self, prefix: str) -> str:
        _checked_prefix(prefix)
        chance = int.from_bytes(self._entropy(ENTROPY_BYTES))
        now = _milliseconds(self._clock.wall_s()) << _ENTROPY_BITS
        with self._lock:
            if now >> _ENTROPY_BITS > self._last >> _ENTROPY_BITS:
                self._last = now | chance
            else:
                # A random step, not 1: two processes forked from this one must not count on to the same ids.
                self._last += 1 + (chance >> 16)
            return _encode_id(prefix, self._last)


def _checked_prefix(prefix: str) -> str:
    # No digits: a content id appends its version, and "a1" + 2 must not read as "a" + 12.
    if not _PREFIX.fullmatch(prefix):
        raise StrataError(Code.INVALID, f"{prefix!r} cannot start an id: use lower-case letters, joined by underscores")
    return prefix


def _milliseconds(wall_s: float) -> int:
    if not 0 <= wall_s <= _MAX_MS / 1000:
        raise StrataError(Code.INVALID, f"the time {wall_s} s does not fit into an id: it takes 1970 to 10889")
    return int(wall_s * 1000)


def _encode_id(prefix: str, number: int) -> str:
    return f"{prefix}_" + "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])
