"""What each worker did over the last hour, as lanes of its reported state: sampled every 5 s, 720 samples, in memory
alone.

In memory alone: heartbeats are not journaled, so a coordinator that takes over begins with empty lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

SAMPLE_S: Final = 5.0
SAMPLES_KEPT: Final = 720
"""An hour. Cut only when there are twice as many, so that cutting costs nothing."""


@dataclass
class StatusLanes:
    times_ms: list[int] = field(default_factory=list)
    states: dict[str, bytearray] = field(default_factory=dict)
    """A status of each worker for each time; 0 where it was no member or had reported none. 0 where it was no member or
    had reported none."""

    def sample(self, at_ms: int, statuses: Iterable[tuple[str, int]]) -> None:
        before = len(self.times_ms)
        self.times_ms.append(at_ms)
        for worker_id, status in statuses:
            lane = self.states.get(worker_id)
            if lane is None:
                lane = self.states[worker_id] = bytearray()
            # It may have been away for some samples.
            lane.extend(bytes(before - len(lane)))
            lane.append(status)
        if len(self.times_ms) >= 2 * SAMPLES_KEPT:
            self._cut()

    def _cut(self) -> None:
        dropped = len(self.times_ms) - SAMPLES_KEPT
        del self.times_ms[:dropped]
        for worker_id, lane in list(self.states.items()):
            del lane[:dropped]
            if not any(lane):
                del self.states[worker_id]

    def latest(self) -> list[int]:
        """The times of the last hour."""
        return self.times_ms[-SAMPLES_KEPT:]

    def lane(self, worker_id: str) -> bytes:
        """Returns the lane of one worker, for the same times."""
        lane = self.states.get(worker_id, bytearray())
        first = max(0, len(self.times_ms) - SAMPLES_KEPT)
        found = bytes(islice(lane, first, None))
        return found + bytes(len(self.times_ms) - first - len(found))
