"""Removes the values of secrets from what a host uploads as text: logs, metrics and errors.

Metrics are JSON, so a value is also found as JSON spells it. It is replaced by as many asterisks, so that offsets in a
log stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

MIN_LENGTH: Final = 8
"""Parts of a value that are shorter would damage the text around them."""
_MASK: Final = b"*"


class Redactor:
    """Knows the values; without any it changes nothing."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        values = {value for text in secrets for value in (text, *text.splitlines()) if len(value) >= MIN_LENGTH}
        values |= {json.dumps(value, ensure_ascii=ascii_only)[1:-1] for value in values for ascii_only in (True, False)}
        encoded = {value.encode(errors="surrogateescape") for value in values}
        self._values = sorted(encoded, key=len, reverse=True)
        self.reach = max(map(len, self._values), default=1) - 1
        """How many bytes before and after a place decide whether it belongs to a value."""

    def redact(self, content: bytes) -> bytes:
        masked = bytearray(content)
        for value in self._values:
            # Every occurrence, also one that overlaps another: the result does not depend on where `content` begins.
            start = content.find(value)
            while start >= 0:
                masked[start : start + len(value)] = _MASK * len(value)
                start = content.find(value, start + 1)
        return bytes(masked)

    def redact_text(self, text: str) -> str:
        return self.redact(text.encode(errors="surrogateescape")).decode(errors="surrogateescape")

    def unfinished(self, content: bytes) -> int:
        """How many bytes at the end may be the beginning of a value whose rest is not written yet."""
        return max((_common(content, value) for value in self._values), default=0)


def _common(content: bytes, value: bytes) -> int:
    """The length of the longest proper prefix of the value that the content ends with."""
    return next((size for size in range(min(len(value) - 1, len(content)), 0, -1) if content.endswith(value[:size])), 0)
