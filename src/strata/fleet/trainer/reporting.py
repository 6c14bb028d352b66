"""Reports metrics and progress as JSON lines to the file that the agent named.

One write per line to a descriptor opened for appending, so lines of several processes of one trainer do not mix. The
agent uploads them continuously; a trainer that is killed in the middle of a line loses that line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from functools import lru_cache
from typing import Any, SupportsFloat

_MAX_FRACTION = 1.0


def report(*, step: int | None = None, **values: SupportsFloat) -> None:
    """Report metrics by name: `report(step=10, loss=0.4)`. A value is anything that `float()` takes, also a tensor."""
    line: dict[str, Any] = {"type": "metrics", "at_s": time.time(), "values": _numbers(values)}
    if step is not None:
        line["step"] = int(step)
    _write(line)


def progress(fraction: float, note: str = "") -> None:
    """Report how much is done, from 0 to 1."""
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
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")


@lru_cache(maxsize=1)
def _descriptor() -> int | None:
    # Only the settings read the environment. They are imported late: describing needs nothing but the standard library.
    from strata.base.settings import load
    from strata.fleet.trainer.settings import SECTION, VARIABLES, TrainerSettings

    target = load(TrainerSettings, section=SECTION, file=None, flags={}, aliases=VARIABLES).metrics
    if not target:
        return None
    if target.startswith("fd:"):
        return int(target.removeprefix("fd:"))
    return os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
