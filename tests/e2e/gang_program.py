"""A training program for `strata gang run`: its model is the list of samples it has seen.

Files in the folder that it is given say what goes wrong, each once: `crash` ends rank 1, after that `hang` stops rank
0. A file `slow` holds all ranks until it is gone, a file `before` holds them before they join.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import strata.coord.worker as strata
from strata.base.settings import process_environment

OUT = Path(sys.argv[1])
MAY_HANG = not (OUT / "crash").exists()
SHARDS = 20
EVERY = 3


def once(fault: str) -> bool:
    try:
        (OUT / fault).unlink()
    except FileNotFoundError:
        return False
    return True


def hang_here() -> None:
    time.sleep(1_000)


def save(worker: strata.Worker, seen: list[int], step: int, *, wait: bool) -> None:
    part = OUT / f"run-{worker.run_id}-generation-{worker.generation}-step-{step}-rank-{worker.rank}.json"
    part.write_text(json.dumps(seen))
    worker.checkpoint(step, part, commit_within_s=None if wait else 0)


(OUT / f"process-{os.getpid()}").touch()
while (OUT / "before").exists():
    time.sleep(0.05)
with strata.join() as worker:
    assert worker.rank == int(process_environment()["RANK"])
    seen: list[int] = []
    for part in worker.start.parts if worker.start else ():
        if part.rank % worker.world_size == worker.rank:
            strata.verify_part(part.uri, part.digest)
            seen += json.loads(Path(part.uri).read_text())
    step = worker.start.step if worker.start else 0
    worker.dataset("corpus", samples=2 * SHARDS, shard_size=2)
    for epoch in worker.epochs(1):
        for shard in worker.shards("corpus", epoch):
            seen += range(shard.start, shard.end)
            shard.done()
            step += 1
            worker.step(step)
            if step % EVERY == 0:
                save(worker, seen, step, wait=False)
            if worker.rank == 1 and step > 2 and once("crash"):
                os._exit(7)
            if worker.rank == 0 and MAY_HANG and step > EVERY and once("hang"):
                hang_here()
            while step > EVERY and (OUT / "slow").exists():
                worker.step(step)
                time.sleep(0.05)
            time.sleep(0.02)
        save(worker, seen, SHARDS + 1, wait=True)
    (OUT / f"model-{worker.rank}.json").write_text(json.dumps(seen))
