"""A job that is a gang: two workers under `strata gang run`. Its folder is shared, so any host can go on with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from strata.base.settings import process_environment
from strata.fleet.trainer import hyper, output_folder

WORKERS = 2


def main() -> int:
    settings = hyper()
    folder = Path(settings["folder"])
    environment = process_environment()
    job = json.loads(Path(environment["STRATA_SPEC"]).read_text())["id"]
    with (Path(settings["marks"]) / f"{job}-{environment['STRATA_EPOCH']}.starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    strata, program = Path(sys.executable).with_name("strata"), Path(__file__).with_name("gang_worker.py")
    gang = (str(strata), "gang", "run", "--nproc", str(WORKERS), "--data", str(folder / "data"), "--job", "mixed")
    worker = (str(program), str(folder), *(str(settings[name]) for name in ("epochs", "samples", "pace_s")))
    is_finished = False
    # A worker that was killed is missed after some heartbeats.
    often = {**environment, "STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": "1"}
    with subprocess.Popen(
        [*gang, "--max-restarts", "1000", "--", *worker], env=often, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            sys.stderr.write(line)
            is_finished = is_finished or "is finished" in line
    if running.returncode and not is_finished:
        return 1
    # An attempt before this one may have ended between its last checkpoint and here.
    for rank in range(WORKERS):
        shutil.copy(folder / f"model-{rank}.json", output_folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
