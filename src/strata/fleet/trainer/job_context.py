"""The job for its trainer: hyper-parameters, output folder, checkpoints. Outside of an agent: the current folder.

A checkpoint is a folder that gets its final name when it is complete: it is written under a name that begins with a
dot, then renamed, and never changed again. The agent uploads the newest one that has its final name, and the next
attempt, on any host, finds it at `resume_from()`. Trainers that do not import this do the same with STRATA_CHECKPOINT.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from strata.fleet.trainer.settings import TrainerSettings


class AssignedJob(NamedTuple):
    """Which job this is; empty outside of an agent."""

    model: str
    mode: str
    seed: int


def assigned() -> AssignedJob:
    settings = _load_settings()
    return AssignedJob(settings.model, settings.mode, settings.seed)


def hyper() -> dict[str, Any]:
    """The hyper-parameters of the job; empty outside of an agent."""
    path = _load_settings().hyper
    parameters: dict[str, Any] = json.loads(Path(path).read_bytes()) if path else {}
    return parameters


def output_folder() -> Path:
    """The folder whose content is the result when the trainer exits with code 0."""
    return Path(_load_settings().output or ".")


def resume_from() -> Path | None:
    """The newest checkpoint of an earlier attempt, as it was saved; None for a fresh start."""
    path = _load_settings().checkpoint_in
    return Path(path) if path else None


@contextmanager
def new_checkpoint(name: str) -> Iterator[Path]:
    """A folder to write a checkpoint to. Renamed to its final name at the end of the block, removed if that fails."""
    if not name or name.startswith(".") or name.endswith((".tmp", ".partial")) or os.sep in name:
        raise ValueError(f"{name!r} cannot be the name of a checkpoint")
    folder = Path(_load_settings().checkpoint or "checkpoints")
    temporary, final = folder / f".{name}", folder / name
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        with suppress(FileNotFoundError):
            shutil.rmtree(final)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _load_settings() -> TrainerSettings:
    # Only the settings read the environment; imported late, because describing needs the standard library alone.
    from strata.base.settings import load
    from strata.fleet.trainer.settings import SECTION, VARIABLES, TrainerSettings

    return load(TrainerSettings, section=SECTION, file=None, flags={}, aliases=VARIABLES)
