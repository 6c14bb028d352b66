"""Keeps the tokens of running samples in memory for clients that stream them; a reply has at most 4,000.

In memory only: a result is durable, its parts are not. Ranks that restart draw the sample again from its first token;
an orchestrator that restarts has the parts from then on. A client that lacks tokens before them waits for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from strata.train.core.sampling import SampledPart

MAX_TOKENS: Final = 4000
"""Tokens of one reply, or a few more: with all that is known of each token it is far below the largest message of the
link."""


class TokenStreams:
    def __init__(self) -> None:
        self._parts: dict[str, dict[int, list[SampledPart]]] = {}
        """Parts by future and by sample: without gaps, in order."""

    def record(self, future_id: str, part: SampledPart) -> None:
        parts = self._parts.setdefault(future_id, {}).setdefault(part.index, [])
        while parts and parts[-1].end > part.start:
            # The sample is drawn again.
            parts.pop()
        if parts and parts[-1].end < part.start:
            parts.clear()
        parts.append(part)

    def after(self, future_id: str, counts: Sequence[int]) -> list[SampledPart]:
        """Returns what follows the first `counts[index]` tokens of each sample, as much of it as one reply has room
        for."""
        samples, room = self._parts.get(future_id, {}), MAX_TOKENS
        parts: list[SampledPart] = []
        for index, count in enumerate(counts):
            for part in _after(samples.get(index, []), count):
                if room <= 0:
                    return parts
                parts.append(part)
                room -= part.end - part.start
        return parts

    def drop(self, future_id: str) -> None:
        self._parts.pop(future_id, None)


def _after(parts: Sequence[SampledPart], count: int) -> list[SampledPart]:
    newer: list[SampledPart] = []
    for part in reversed(parts):
        if part.end <= count:
            break
        newer.append(part.after(count))
    newer.reverse()
    return newer if newer and newer[0].start == count else []
