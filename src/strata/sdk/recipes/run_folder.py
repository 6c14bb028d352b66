"""The folder of a run: names of its files, `run.json`, metrics, lock, and the refusals of another recipe or a second
process.

`run.json` is written before anything else is made, and replaced after each saved state, so it always names a state that
the server has. `metrics.jsonl` may be ahead of it: a run that is resumed cuts it back and computes the steps after that
state again, with the same numbers. Before the first saved state nothing can be resumed: the next attempt begins anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base.atomic import read_json, temporary_path, write_file, write_json
from strata.base.errors import Code, StrataError
from strata.base.file_lock import is_locked, lock_folder
from strata.base.private import private_folder
from strata.train.settings import LAUNCHER_LOCK

RECORD: Final = "run.json"
METRICS: Final = "metrics.jsonl"
ROLLOUTS: Final = "rollouts.jsonl"
LOCK: Final = "run.lock"
ADAPTER: Final = "adapter"
SERVER: Final = "server"
TEACHER_SERVER: Final = "teacher-server"
TOKENIZER: Final = "tokenizer"
TASKS: Final = "tasks"
"""What lm-eval has written, by step."""
TINY_MODEL: Final = "model"
TINY_TEACHER: Final = "teacher-model"
_MAX_LISTED: Final = 8


class BestEvaluation(msgspec.Struct, frozen=True):
    step: int
    value: float
    path: str = ""
    """The path of the checkpoint, if the best one is exported."""


class RecipeRunRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    settings: Mapping[str, Any]
    """What decides the numbers: a run with other settings is another run."""
    steps: int = 0
    """The steps of the whole run; 0 before its data was read."""
    step: int = 0
    """Optimizer steps that the state has."""
    state: str = ""
    """Path of the saved weights and optimizer; empty before the first one."""
    sessions: tuple[str, ...] = ()
    """Sessions of this run's processes on the server: those before the last one are closed when it is resumed."""
    best: BestEvaluation | None = None
    bad_evaluations: int = 0
    left_out: tuple[str, ...] = ()
    """The rows of the data that are not used, in sentences."""
    tracker_mark: str = ""
    finished: str = ""
    """Why the run has ended; empty while it has not."""
    exported: str = ""
    """Path of the checkpoint that was exported."""


class MetricLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    step: int
    values: Mapping[str, float]


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = private_folder(path.absolute())

    @contextmanager
    def locked(self) -> Iterator[None]:
        taken = f"another process runs a recipe in {self.path}"
        with lock_folder(self.path, LOCK, taken=taken, hint="give each run a folder of its own: --folder"):
            yield

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def rollouts(self) -> Path:
        return self.path / ROLLOUTS

    @property
    def adapter(self) -> Path:
        return self.path / ADAPTER

    def read(self) -> RecipeRunRecord | None:
        return read_json(self.path / RECORD, RecipeRunRecord)

    def write(self, record: RecipeRunRecord) -> None:
        write_json(self.path / RECORD, record)

    def open_run(self, settings: Mapping[str, Any]) -> RecipeRunRecord:
        """The record to go on from, or that of a new run. CONFLICT if the run has a state with other settings."""
        record = self.read()
        if record is None or not record.state:
            return self._begin(settings, record)
        names = sorted(record.settings.keys() | settings.keys())
        changed = [name for name in names if record.settings.get(name) != settings.get(name)]
        if changed:
            listed = "\n".join(
                f"  {name} was {_shown(record.settings.get(name))} and is {_shown(settings.get(name))}"
                for name in changed[:_MAX_LISTED]
            )
            raise StrataError(
                Code.CONFLICT,
                f"the run in {self.path} began with another recipe:\n{listed}",
                hint="undo the change, or give the new run a folder of its own: --folder",
            )
        return record

    def _begin(self, settings: Mapping[str, Any], before: RecipeRunRecord | None) -> RecipeRunRecord:
        """A new run. What an attempt that saved no state has made may be for another model or server: it is removed.

        CONFLICT if there is a folder that no attempt of this run has made; the run would take it for its own.
        """
        if before is not None:
            for name in _made_folders(before.settings):
                self._discard(self.path / name)
        present = [name for name in (*_made_folders(settings), ADAPTER) if (self.path / name).exists()]
        if present:
            raise StrataError(
                Code.CONFLICT,
                f"{self.path} has {', '.join(f'{name}/' for name in present)}, which this run has not made",
                hint="remove what an earlier run has left, or give the run a folder of its own: --folder",
            )
        record = RecipeRunRecord(settings=settings, sessions=() if before is None else before.sessions)
        self.write(record)
        return record

    def _discard(self, folder: Path) -> None:
        """CONFLICT if a server runs there: it may have more than this run made."""
        if folder.exists():
            running = [data for data in folder.glob("data-*") if is_locked(data / LAUNCHER_LOCK)]
            if running:
                raise StrataError(
                    Code.CONFLICT,
                    f"a server runs in {running[0]}, and the run has saved no state there: it would begin anew",
                    hint="stop the server, or give the run a folder of its own: --folder",
                )
            # Renamed first: processes of an attempt that was killed may still write there.
            doomed = temporary_path(folder)
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def read_metrics(self) -> list[MetricLine]:
        """A last line that was not written to its end is left out."""
        try:
            content = self.metrics.read_bytes()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        return [msgspec.json.decode(line, type=MetricLine) for line in whole.splitlines()]

    def cut_metrics(self, step: int) -> list[MetricLine]:
        """Leave out what came after this step."""
        kept = [line for line in self.read_metrics() if line.step <= step]
        self._write_metrics(kept)
        return kept

    def append_metrics(self, line: MetricLine) -> None:
        with self.metrics.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _write_metrics(self, lines: Sequence[MetricLine]) -> None:
        write_file(self.metrics, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _made_folders(settings: Mapping[str, Any]) -> list[str]:
    """Returns what an attempt with these settings may make before its first state."""
    tiny = (("model.tiny", TINY_MODEL), ("teacher.tiny", TINY_TEACHER))
    return [SERVER, TEACHER_SERVER, TOKENIZER, *(name for setting, name in tiny if settings.get(setting))]


def _shown(value: object) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()
