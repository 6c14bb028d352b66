"""The mirror to experiment trackers: settings `[mirror]` (every 2 s), names of trackers, at most 32 open runs, and its
record.

The record is written after the tracker has the points. A mirror that is killed in between finds a tracker that is ahead
of its record, and each adapter makes that good (`port`): no point is doubled, and none is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from strata.base import log
from strata.base.atomic import read_json, write_json
from strata.base.errors import Code, StrataError
from strata.base.private import private_folder
from strata.base.suggest import did_you_mean
from strata.sdk.trackers.port import MakeTracker, TrackedRun, Tracker, TrackerPlace, TrackerRun
from strata.sdk.trackers.sources import MetricSource, SourceCursor
from strata.sdk.trackers.tensorboard import TensorBoard
from strata.sdk.trackers.weights_biases import WeightsBiases

SECTION: Final = "mirror"
MAX_OPEN: Final = 32
"""Runs that a tracker has open; others are closed and opened again when there is something new."""
EVERYTHING_EVERY: Final = 30
"""Rounds between two looks at all jobs: for those that began and ended between two rounds."""
TRACKERS: Final[Mapping[str, MakeTracker]] = {"tensorboard": TensorBoard, "wandb": WeightsBiases}
_logger = log.get(__name__)


class MirrorSettings(msgspec.Struct, frozen=True, kw_only=True):
    to: str = ""
    """The tracker: `tensorboard:FOLDER`, `wandb:PROJECT` or `wandb:ENTITY/PROJECT`."""
    offline: bool = False
    """W&B writes files for `wandb sync` and connects to nothing."""
    folder: Path = Path("~/.local/state/strata/mirror")
    """Where the mirror records how far it is, and where offline files are."""
    every_s: float = 2.0
    """How often it looks for new points."""


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cursor: SourceCursor = SourceCursor()
    mark: str = ""


def make_tracker(settings: MirrorSettings) -> Tracker:
    kind, _, target = settings.to.partition(":")
    if kind not in TRACKERS:
        raise StrataError(
            Code.INVALID,
            f"{kind!r} is no tracker{did_you_mean(kind, TRACKERS)}" if kind else "no tracker is chosen",
            hint='--to tensorboard:./runs, or to = "wandb:PROJECT" under [mirror]',
        )
    folder = private_folder(settings.folder.expanduser())
    return TRACKERS[kind](TrackerPlace(target=target, folder=folder, offline=settings.offline))


class Mirror:
    def __init__(self, source: MetricSource, tracker: Tracker, folder: Path) -> None:
        self._source = source
        self._tracker = tracker
        self._folder = folder
        self._open: dict[str, TrackerRun] = {}
        self._unfinished: dict[str, TrackedRun] = {}
        self._rounds = 0

    def run_once(self) -> int:
        """Copy what is new; the number of points."""
        for run, attempt in self._source.runs(everything=self._rounds % EVERYTHING_EVERY == 0):
            cursor = self._read_record(run.id).cursor
            # An ended job that was queued again has another attempt.
            if attempt and not (cursor.ended and attempt <= cursor.attempt):
                self._unfinished[run.id] = run
        self._rounds += 1
        return sum(self._copy_run(run) for run in list(self._unfinished.values()))

    def close(self) -> None:
        while self._open:
            self._close(next(iter(self._open)))

    def _copy_run(self, run: TrackedRun) -> int:
        copied, record = 0, self._read_record(run.id)
        while True:
            batch = self._source.read(run.id, record.cursor)
            if batch.cursor == record.cursor:
                return copied
            mark = record.mark
            if batch.points:
                tracked = self._opened(run, record)
                if tracked.next_number < record.cursor.number:
                    # The tracker lost what it had not written: its points are read again.
                    record = RunRecord()
                    continue
                fresh = [point for point in batch.points if point.number >= tracked.next_number]
                tracked.log(fresh)
                copied += len(fresh)
                mark = tracked.mark()
            record = RunRecord(batch.cursor, mark)
            write_json(self._record_path(run.id), record)
            if record.cursor.ended:
                self._close(run.id)
                del self._unfinished[run.id]
                return copied

    def _opened(self, run: TrackedRun, record: RunRecord) -> TrackerRun:
        tracked = self._open.pop(run.id, None)
        if tracked is None:
            if len(self._open) >= MAX_OPEN:
                self._close(next(iter(self._open)))
            tracked = self._tracker.open_run(run, record.cursor.number, record.mark)
            _logger.info("mirror_run_opened", run=run.id, name=run.name, next_number=tracked.next_number)
        # At the end: the first is the one that had nothing new for the longest time.
        self._open[run.id] = tracked
        return tracked

    def _close(self, run_id: str) -> None:
        tracked = self._open.pop(run_id, None)
        if tracked is not None:
            tracked.close()

    def _read_record(self, run_id: str) -> RunRecord:
        return read_json(self._record_path(run_id), RunRecord) or RunRecord()

    def _record_path(self, run_id: str) -> Path:
        # Ids come from a server: what could be a path does not become one.
        return self._folder / f"{re.sub(r'[^A-Za-z0-9_-]', '-', run_id)[-200:]}.json"
