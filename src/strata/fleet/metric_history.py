"""Series of metrics and progress of jobs, read from the streams of their attempts: how much is cached, and how old
streams are thinned out.

The stream is the only record. What was read of it is kept in memory by attempt and offset, so that the next request
reads what came since; it is bounded, and the least used attempts are read again when they are wanted.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from strata.base.atomic import write_file
from strata.fleet.core.report import ProgressReport, parse_lines
from strata.fleet.core.series import AttemptMetrics, CombinedSeries, JobProgress, ReportThinner, combine, progress
from strata.fleet.streams import AttemptStreams

MAX_CACHED: Final = 200_000
"""Buckets of all attempts together: some 60 MB."""
_PIECE: Final = 32 * 1024
"""Parsed between two requests of hosts: a few milliseconds."""
_ENDS: Final = 64 * 1024
"""How much of the begin and of the end of a stream is searched for progress."""
_MAX_PROGRESS: Final = 4096
_THINNED: Final = re.compile(rb'\{"type":"thinned","step_s":([0-9]{1,6})\}')


class MetricHistory:
    def __init__(self, streams: AttemptStreams) -> None:
        self._streams = streams
        self._read: OrderedDict[tuple[str, int], AttemptMetrics] = OrderedDict()
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._progress: OrderedDict[tuple[str, int], tuple[int, JobProgress | None]] = OrderedDict()

    async def attempt(self, job_id: str, epoch: int) -> AttemptMetrics:
        """Returns what an attempt has reported until now."""
        key = (job_id, epoch)
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                metrics = self._read.get(key) or AttemptMetrics()
                while content := await self._streams.read(job_id, epoch, "metrics", metrics.offset, _PIECE):
                    # Not in a thread: others read the series meanwhile.
                    metrics.add(content)
                self._read[key] = metrics
        finally:
            if not lock.locked():
                self._locks.pop(key, None)
        self._read.move_to_end(key)
        self._evict()
        return metrics

    async def series(
        self, job_id: str, epochs: Sequence[int], names: Sequence[str], points: int
    ) -> Sequence[CombinedSeries]:
        return combine([await self.attempt(job_id, epoch) for epoch in epochs], names, points)

    async def progress(self, job_id: str, epoch: int) -> JobProgress | None:
        """Returns how far an attempt is, from the first and the last bytes of its stream: for lists of many jobs."""
        key = (job_id, epoch)
        size = await self._streams.size(job_id, epoch, "metrics")
        known = self._progress.get(key)
        if known is None or known[0] != size:
            known = self._progress[key] = (size, await self._read_progress(job_id, epoch, size))
            if len(self._progress) > _MAX_PROGRESS:
                self._progress.popitem(last=False)
        return known[1]

    async def _read_progress(self, job_id: str, epoch: int, size: int) -> JobProgress | None:
        if not size:
            return None
        content = await self._streams.read(job_id, epoch, "metrics", 0, _ENDS)
        if size > _ENDS:
            content += b"\n" + await self._streams.read(job_id, epoch, "metrics", max(_ENDS, size - _ENDS), _ENDS)
        # Parsed as JSON only where it can be progress: metrics are many more.
        lines = [line for line in content.split(b"\n") if b'"progress"' in line]
        reports, _ = parse_lines(lines[:4] + lines[-4:])
        return progress(each for each in reports if isinstance(each, ProgressReport))

    def _evict(self) -> None:
        sizes = {key: metrics.size() for key, metrics in self._read.items()}
        left = sum(sizes.values())
        for key in list(self._read)[:-1]:
            if left <= MAX_CACHED:
                return
            left -= sizes[key]
            del self._read[key]


def thin_streams(folder: Path, now_s: float, *, raw_s: float, minutes_s: float) -> int:
    """Rewrite the streams of metrics that nothing was added to for so long; how many.

    One that was thinned begins with a line that says so, which is no report.
    """
    thinned = 0
    steps = [(minutes_s, 3600), (raw_s, 60)]
    due_s = min(raw_s, minutes_s)
    for path in folder.glob("*/*/*.metrics") if due_s < float("inf") else ():
        changed_at_s = path.stat().st_mtime
        step_s = next((step_s for after_s, step_s in steps if now_s - changed_at_s > after_s), 0)
        if step_s > _step_of(path):
            _thin(path, step_s, changed_at_s)
            thinned += 1
    return thinned


def _step_of(path: Path) -> int:
    """Returns the resolution of a file: 0 as it was reported."""
    with path.open("rb") as file:
        first = _THINNED.fullmatch(file.readline(64).rstrip())
    return int(first[1]) if first else 0


def _thin(path: Path, step_s: int, changed_at_s: float) -> None:
    thinner = ReportThinner(step_s)
    with path.open("rb") as file:
        thinner.add(file)
    lines = [b'{"type":"thinned","step_s":%d}' % step_s, *map(msgspec.json.encode, thinner.reports())]
    write_file(path, b"\n".join(lines) + b"\n")
    # When something was last added to it.
    os.utime(path, (changed_at_s, changed_at_s))
