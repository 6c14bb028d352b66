"""A trial of a sweep: reports how far its point is from the best one, step by step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from strata.base.settings import process_environment
from strata.fleet.trainer import hyper, output_folder, report

STEPS = 4


def loss(point: dict[str, float]) -> float:
    return (point["x"] - 1) ** 2 + (point["y"] + 2) ** 2


def main() -> None:
    settings: dict[str, Any] = hyper()
    environment = process_environment()
    job = json.loads(Path(environment["STRATA_SPEC"]).read_text())["id"]
    with (Path(settings["marks"]) / f"{job}-{environment['STRATA_EPOCH']}.starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    for step in range(1, STEPS + 1):
        report(step=step, loss=loss(settings) * STEPS / step)
        time.sleep(settings["pace_s"])
    (output_folder() / "result.json").write_text(json.dumps(loss(settings)))


if __name__ == "__main__":
    main()
