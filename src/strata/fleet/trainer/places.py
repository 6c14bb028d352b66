"""Where a trainer finds what the agent gave it, and leaves what it made. Outside of an agent: the working folder.

A checkpoint is a folder that gets its name when it is whole: it is written under a name that begins with a dot, then
renamed, and never touched again. The agent uploads the newest one that has its final name, and the next attempt, on
whichever host, finds it at `resume_from()`. Trainers that do not import this do the same with STRATA_CHECKPOINT.
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


class Assigned(NamedTuple):
    """Which job this is; empty outside of an agent."""

    model: str
    mode: str
    seed: int


def assigned() -> Assigned:
    given = _given()
    return Assigned(given.model, given.mode, given.seed)


def hyper() -> dict[str, Any]:
    """The hyper-parameters of the job; empty outside of an agent."""
    path = _given().hyper
    found: dict[str, Any] = json.loads(Path(path).read_bytes()) if path else {}
    return found


def output_folder() -> Path:
    """What is in here when the trainer ends with exit code 0 is the result."""
    return Path(_given().output or ".")


def resume_from() -> Path | None:
    """The newest checkpoint of an earlier attempt, as it was saved; None for a fresh start."""
    path = _given().checkpoint_in
    return Path(path) if path else None


@contextmanager
def new_checkpoint(name: str) -> Iterator[Path]:
    """A folder to write a checkpoint to, which gets its name at the end of the block, and vanishes if that fails."""
    if not name or name.startswith(".") or name.endswith((".tmp", ".partial")) or os.sep in name:
        raise ValueError(f"{name!r} cannot be the name of a checkpoint")
    folder = Path(_given().checkpoint or "checkpoints")
    writing, final = folder / f".{name}", folder / name
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    try:
        yield writing
        with suppress(FileNotFoundError):
            shutil.rmtree(final)
        writing.rename(final)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def _given() -> TrainerSettings:
    # Only the settings read the environment; late, because describing needs nothing but the standard library.
    from strata.base.settings import load
    from strata.fleet.trainer.settings import SECTION, VARIABLES, TrainerSettings

    return load(TrainerSettings, section=SECTION, file=None, flags={}, aliases=VARIABLES)
