"""The functions that a trainer calls: `hyper`, `assigned`, `output_folder`, `new_checkpoint`, `resume_from`, `report`,
`progress`.

Outside of an agent the folders are in the current one, and reports go nowhere.

A checkpoint is a folder that gets its final name when it is complete: it is written under a name that begins with a
dot, then renamed, and never changed again. The agent uploads the newest one that has its final name, and the next
attempt, on any host, finds it at `resume_from()`. Trainers that do not import this do the same with STRATA_CHECKPOINT.

Metrics and progress are JSON lines in the file that the agent named. One write per line to a descriptor opened for
appending, so lines of several processes of one trainer do not mix. The agent uploads them continuously; a trainer that
is killed in the middle of a line loses that line.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from strata.base.describe import refuse_describe
from strata.fleet.trainer.settings import read_settings

_MAX_FRACTION = 1.0


class AssignedJob(NamedTuple):
    """The job of this process; empty outside of an agent."""

    model: str
    mode: str
    seed: int


def assigned() -> AssignedJob:
    """The model, mode and seed that the job asks for."""
    refuse_describe("assigned")
    settings = read_settings()
    return AssignedJob(settings.model, settings.mode, settings.seed)


def hyper() -> dict[str, Any]:
    """The hyper-parameters of the job; empty outside of an agent."""
    refuse_describe("hyper")
    path = read_settings().hyper
    parameters: dict[str, Any] = json.loads(Path(path).read_bytes()) if path else {}
    return parameters


def output_folder() -> Path:
    """The folder whose content is the result when the trainer exits with code 0."""
    refuse_describe("output_folder")
    return Path(read_settings().output or ".")


def resume_from() -> Path | None:
    """The newest checkpoint of an earlier attempt, as it was saved; None for a fresh start."""
    refuse_describe("resume_from")
    path = read_settings().checkpoint_in
    return Path(path) if path else None


@contextmanager
def new_checkpoint(name: str) -> Iterator[Path]:
    """A folder to write a checkpoint to. Renamed to its final name at the end of the block, removed if that fails.

    How long the block took is reported: the goodput of the job counts it as time for checkpoints.
    """
    refuse_describe("new_checkpoint")
    if not name or name.startswith(".") or name.endswith((".tmp", ".partial")) or os.sep in name:
        raise ValueError(f"{name!r} cannot be the name of a checkpoint")
    folder = Path(read_settings().checkpoint or "checkpoints")
    temporary, final = folder / f".{name}", folder / name
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    began_s = time.monotonic()
    try:
        yield temporary
        with suppress(FileNotFoundError):
            shutil.rmtree(final)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _write({"type": "checkpoint", "at_s": time.time(), "took_s": round(time.monotonic() - began_s, 3)})


def report(*, step: int | None = None, **values: SupportsFloat) -> None:
    """Report metrics by name: `report(step=10, loss=0.4)`. A value is anything that `float()` takes, also a tensor."""
    refuse_describe("report")
    line: dict[str, Any] = {"type": "metrics", "at_s": time.time(), "values": _numbers(values)}
    if step is not None:
        line["step"] = int(step)
    _write(line)


def progress(fraction: float, note: str = "") -> None:
    """Report how much is done, from 0 to 1."""
    refuse_describe("progress")
    clamped = min(max(float(fraction), 0.0), _MAX_FRACTION)
    _write({"type": "progress", "at_s": time.time(), "fraction": clamped, "note": note[:256]})


def _numbers(values: dict[str, SupportsFloat]) -> dict[str, float | str]:
    numbers = {name: float(value) for name, value in values.items()}
    # JSON has no NaN or infinity; str() spells them "nan", "inf" and "-inf".
    return {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}


def _write(line: dict[str, Any]) -> None:
    descriptor = _descriptor()
    if descriptor is None:
        return
    # A full disk or a missing agent loses the metrics, but does not stop the training.
    with suppress(OSError):
        os.write(descriptor, json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")


@lru_cache(maxsize=1)
def _descriptor() -> int | None:
    target = read_settings().metrics
    if not target:
        return None
    if target.startswith("fd:"):
        return int(target.removeprefix("fd:"))
    return os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
