"""Adapter for Weights & Biases: project, run ids (64 characters), steps, offline runs.

The number of a point is W&B's own step, which only grows, and the trainer's step is the metric `step`: so W&B itself
drops a point that it has, and the curves of a resumed attempt may go back.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.sdk.trackers.port import TrackedPoint, TrackedRun, TrackerPlace, TrackerRun

if TYPE_CHECKING:
    from wandb import Run

STEP: Final = "step"
READ_S: Final = 600.0
_ID: Final = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_ID: Final = 64


class WeightsBiases:
    def __init__(self, place: TrackerPlace) -> None:
        import wandb  # noqa: F401 - a missing package is an error now, and not at the first job

        entity, slash, project = place.target.rpartition("/")
        if not project:
            raise StrataError(Code.INVALID, "wandb needs a project", hint="wandb:PROJECT or wandb:ENTITY/PROJECT")
        self._entity = entity if slash else None
        self._project = project
        self._folder = place.folder / "wandb"
        self._offline = place.offline

    def open_run(self, run: TrackedRun, next_number: int, mark: str) -> TrackerRun:
        del next_number, mark  # The files and the server know better what was written.
        import wandb

        run_id = _ID.sub("-", run.id)[-_MAX_ID:]
        self._folder.mkdir(parents=True, exist_ok=True)
        stored = _stored_points(self._folder, run_id) if self._offline else 0
        opened = wandb.init(
            entity=self._entity,
            project=self._project,
            id=run_id,
            name=run.name,
            group=run.group or None,
            config={**run.config},
            dir=str(self._folder),
            mode="offline" if self._offline else "online",
            resume=None if self._offline else "allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )
        opened.define_metric(STEP, hidden=True)
        opened.define_metric("*", step_metric=STEP)
        return _WandbRun(opened, stored if self._offline else opened.step)


class _WandbRun:
    def __init__(self, run: Run, next_number: int) -> None:
        self._run = run
        self.next_number = next_number

    def log(self, points: Sequence[TrackedPoint]) -> None:
        for point in points:
            self._run.log({STEP: point.step, "_timestamp": point.at_s, **point.values}, step=point.number)
            self.next_number = point.number + 1

    def mark(self) -> str:
        return ""

    def close(self) -> None:
        self._run.finish()


def _stored_points(folder: Path, run_id: str) -> int:
    """The number after the last point in the offline files of a run: what was not written is logged again."""
    files = folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    return max((step + 1 for file in files for step in _history_steps(file)), default=0)


def _history_steps(file: Path) -> Iterator[int]:
    """W&B's own reader prints a line for each record, of a file whose writer was killed up to the last whole one."""
    from wandb.util import get_core_path

    words = [get_core_path(), "leet", "inspect", "-no-observability", "-json", "-run-file", str(file)]
    printed = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=READ_S).stdout
    for line in printed.splitlines():
        if b'"type":"history"' in line:
            yield msgspec.json.decode(line, type=_HistoryRecord).history.step.num


class _Step(msgspec.Struct, frozen=True):
    num: int = 0


class _History(msgspec.Struct, frozen=True):
    step: _Step = _Step()


class _HistoryRecord(msgspec.Struct, frozen=True):
    history: _History
