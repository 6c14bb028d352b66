"""Writes the learning curves to a file and loads them after a restart.

They are no facts: nothing is decided by them, and a process that is killed may lose what it measured since the last
write.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from strata.base import log
from strata.base.atomic import write_file
from strata.train.status.learning_curves import LearningCurves

_log = log.get(__name__)


class CurveFile:
    def __init__(self, path: Path, curves: LearningCurves) -> None:
        self._path = path
        self._curves = curves
        self._written = 0
        """How many changes the file has."""

    def load(self) -> None:
        """Read what an orchestrator before this one has written. A file that is damaged is reported and replaced."""
        try:
            self._curves.restore(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except msgspec.MsgspecError as error:
            _log.warning("curves_lost", path=self._path, reason=str(error))

    async def run_once(self) -> None:
        """Write the curves, unless nothing has changed since the last time."""
        changes = self._curves.changes
        if changes == self._written:
            return
        await asyncio.to_thread(write_file, self._path, self._curves.encode(), durable=False)
        self._written = changes
