"""A worker of a gang: its model is the samples that it has seen, by data epoch. It notes in a file what it does."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import strata.coord.worker as strata

FOLDER = Path(sys.argv[1])
EPOCHS, SAMPLES, PACE_S = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
SHARD = 4
EVERY = 4
Model = dict[str, list[int]]


def load(worker: strata.Worker, start: Any) -> Model:
    model: Model = {}
    for part in start.parts if start else ():
        if part.rank % worker.world_size == worker.rank:
            strata.verify_part(part.uri, part.digest)
            for epoch, samples in json.loads(Path(part.uri).read_text()).items():
                model.setdefault(epoch, []).extend(samples)
    return model


def save(worker: strata.Worker, model: Model, step: int, *, wait: bool) -> None:
    part = FOLDER / f"run-{worker.run_id}-generation-{worker.generation}-step-{step}-rank-{worker.rank}.json"
    part.write_text(json.dumps(model))
    worker.checkpoint(step, part, commit_within_s=None if wait else 0)


with strata.join() as worker:
    shards = worker.dataset("corpus", samples=SAMPLES, shard_size=SHARD)

    def train(start: Any) -> Model:
        model, step = load(worker, start), start.step if start else 0
        for epoch in worker.epochs(EPOCHS):
            for shard in worker.shards("corpus", epoch):
                model.setdefault(str(epoch), []).extend(range(shard.start, shard.end))
                with (FOLDER / "ledger").open("a") as ledger:
                    ledger.write(f"{worker.generation} {worker.rank} {epoch} {shard.start} {shard.end}\n")
                shard.done()
                step += 1
                worker.step(step)
                if step % EVERY == 0:
                    save(worker, model, step, wait=False)
                time.sleep(PACE_S)
            step = (epoch + 1) * (shards + 1)
            save(worker, model, step, wait=True)
        return model

    (FOLDER / f"model-{worker.rank}.json").write_text(json.dumps(worker.run(train)))
    # A rank that leaves alone would be missing if another one has to start again.
    worker.barrier("end")
