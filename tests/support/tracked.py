"""What trackers have recorded, as their own readers find it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from wandb.util import get_core_path


def scalars(folder: Path, tag: str = "loss") -> list[tuple[int, float]]:
    """By TensorBoard, of the one run in the folder."""
    (run,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    return [(event.step, event.value) for event in EventAccumulator(str(run)).Reload().Scalars(tag)]


def wandb_records(folder: Path) -> Iterator[dict[str, Any]]:
    """By W&B, of all files of a run, in the order in which they were written."""
    for file in sorted(folder.rglob("*.wandb")):
        words = [get_core_path(), "leet", "inspect", "-no-observability", "-json", "-run-file", str(file)]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
        yield from map(json.loads, done.stdout.splitlines())


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in wandb_records(folder) if record["type"] == "history"]
