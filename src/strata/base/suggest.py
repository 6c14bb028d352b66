"""Suggests a known name for an unknown one ("did you mean …"): synonyms and edit distance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_LISTED_NAMES: Final = 12
_LONGEST_NAME: Final = 64
"""What is compared: the time for a comparison grows with the square of the length."""


def closest_name(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str | None:
    """Returns what `synonyms` has for it; else the known name with the smallest edit distance, at most a third of its
    length.

    A word of another program means what it means there, however near the letters of another name are.
    """
    if synonyms and name.lower() in synonyms:
        return synonyms[name.lower()]
    best: tuple[int, str] | None = None
    if len(name) > _LONGEST_NAME:
        return None
    for candidate in known:
        limit = max(1, len(candidate) // 3)
        if abs(len(candidate) - len(name)) > limit:
            continue
        distance = _edit_distance(name.lower(), candidate.lower())
        if distance <= limit and (best is None or distance < best[0]):
            best = (distance, candidate)
    return best[1] if best else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """` (did you mean "…"?)` or, if nothing is near, ` (known: …)`, for the end of a message.

    The names are compared without `prefix`, which they share, and shown with it.
    """
    names = [candidate.removeprefix(prefix) for candidate in known]
    near = closest_name(name.removeprefix(prefix), names)
    if near is not None:
        return f' (did you mean "{prefix}{near}"?)'
    listed = [f"{prefix}{candidate}" for candidate in names[:_LISTED_NAMES]]
    if len(names) > _LISTED_NAMES:
        listed.append("…")
    return f" (known: {', '.join(listed)})" if listed else ""


def _edit_distance(one: str, other: str) -> int:
    """Letters added, left out, replaced or swapped with their neighbour (optimal string alignment)."""
    # difflib is not enough: it finds "root" nearer to "prot" than "port".
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        current = [row]
        for column, wanted in enumerate(other, 1):
            cost = min(last[column] + 1, current[-1] + 1, last[column - 1] + (letter != wanted))
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == wanted:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, last = last, current
    return last[-1]
