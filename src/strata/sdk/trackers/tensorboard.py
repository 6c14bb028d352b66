"""Adapter for TensorBoard: event files of a run, their names, and cutting off what was not recorded.

A mark is the name and size of the file that is written: what stands behind it when a run is opened again was logged,
but not recorded by the mirror, and is cut off. A resumed attempt begins a new file whose first record makes readers
drop the steps that were rolled back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.sdk.trackers.port import TrackedPoint, TrackedRun, TrackerPlace, TrackerRun

EVENTS: Final = "events.out.tfevents.*"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._@=+-]+")


class TensorBoard:
    def __init__(self, place: TrackerPlace) -> None:
        import_module("tensorboardX")  # A missing package is an error now, and not at the first job.

        if not place.target:
            raise StrataError(Code.INVALID, "tensorboard needs a folder", hint="tensorboard:./runs")
        self._folder = Path(place.target).expanduser()

    def open_run(self, run: TrackedRun, next_number: int, mark: str) -> TrackerRun:
        folder = self._folder
        # A name from elsewhere becomes a folder below ours, and the id keeps two runs of one name apart.
        for part in (run.group, f"{run.name}-{run.id.rpartition('_')[2][:10]}"):
            folder /= _UNSAFE.sub("_", part).lstrip(".") if part else ""
        return _EventFiles(folder, next_number if _cut_off(folder, mark) else 0)


class _EventFiles:
    def __init__(self, folder: Path, next_number: int) -> None:
        self.next_number = next_number
        self._folder = folder
        self._writer: Any = None
        if not next_number:
            # Files without a record of ours are of a mirror that lost its folder: they would be doubled.
            for file in folder.glob(EVENTS):
                file.unlink()

    def log(self, points: Sequence[TrackedPoint]) -> None:
        events, summaries = _messages("event"), _messages("summary")
        for point in points:
            if self._writer is None or point.resumed:
                self._begin(point)
            values = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            summary = summaries.Summary(value=values)
            self._writer.write_event(events.Event(wall_time=point.at_s, step=point.step, summary=summary))
            self.next_number = point.number + 1

    def _begin(self, first: TrackedPoint) -> None:
        """A new file: one that another process has written is never appended to."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a run in the order of their names, which have the second and then this number. The
        # writer of the library that has a thread of its own cannot tell when something is written; this one can.
        number = len(list(self._folder.glob(EVENTS)))
        writers: Any = import_module("tensorboardX.event_file_writer")
        self._writer = writers.EventsWriter(str(self._folder / "events"), f".{number:08d}")
        if first.resumed:
            events = _messages("event")
            start = events.SessionLog(status=events.SessionLog.START)
            self._writer.write_event(events.Event(wall_time=first.at_s, step=first.step, session_log=start))

    def mark(self) -> str:
        if self._writer is not None:
            self._writer.flush()
        newest = max(self._folder.glob(EVENTS), key=_order, default=None)
        if newest is None:
            return ""
        with newest.open("rb") as file:
            os.fsync(file.fileno())
        return f"{newest.name}:{newest.stat().st_size}"

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def _messages(name: str) -> Any:
    """The package has no types."""
    return import_module(f"tensorboardX.proto.{name}_pb2")


def _order(file: Path) -> str:
    return file.name


def _cut_off(folder: Path, mark: str) -> bool:
    """Says whether the files are as they were at the mark, after what came later was removed."""
    name, _, size = mark.rpartition(":")
    file = folder / name
    if not name or "/" in name or not file.is_file() or file.stat().st_size < int(size):
        return False
    os.truncate(file, int(size))
    for later in folder.glob(EVENTS):
        if _order(later) > name:
            later.unlink()
    return True
