"""A rank of a job on gloo that steps together with the others. One of them hangs outside of the collective."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import strata.coord.worker as strata

SAVE_EVERY = 20


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, "at_s": time.monotonic(), **fields}), flush=True)


def load(worker: strata.Worker, start: strata.Manifest | None) -> list[int]:
    """The model is the list of samples in it; rank 0 carries on what a recovery brought back."""
    if start is None or worker.rank:
        return []
    return [sample for part in start.parts for sample in json.loads(Path(part.uri).read_text("utf-8"))]


def save(worker: strata.Worker, given: dict[str, Any], step: int, model: list[int]) -> None:
    capture = worker.begin_checkpoint(step)
    path = Path(given["out"]) / f"{worker.worker_id}-{worker.generation}-{step}.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    worker.report_checkpoint(capture, path)


def train(worker: strata.Worker, given: dict[str, Any], start: strata.Manifest | None) -> list[int]:
    if distributed.is_initialized():
        distributed.destroy_process_group()
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{given['out']}/store-{worker.generation}",
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(minutes=10),
    )
    model, step = load(worker, start), start.step if start else 0
    say("begun", generation=worker.generation, step=step, world_size=worker.world_size)
    while True:
        began_s = time.monotonic()
        shard = worker.next_shard("corpus", 0, wait=False)
        if shard is not None:
            model += range(shard.start, shard.end)
            shard.done()
        if (worker.worker_id, step) == (given["hangs"], given["hang_at"]):
            say("hangs")
            time.sleep(3_600)
        time.sleep(0.1)
        computed_s = time.monotonic() - began_s
        left = torch.tensor([0.0 if shard is None else 1.0])
        distributed.all_reduce(left)
        step += 1
        worker.step(step, compute_s=computed_s)
        if not left.item():
            save(worker, given, step, model)
            return model
        if step % SAVE_EVERY == 0:
            save(worker, given, step, model)


def main() -> None:
    given = json.loads(sys.argv[1])
    with strata.join(wait_for=given["world_size"], patience_s=120) as worker:
        worker.dataset("corpus", samples=given["samples"], shard_size=2)
        model = worker.run(lambda start: train(worker, given, start))
        say("trained", model=model)
        worker.barrier("end")


if __name__ == "__main__":
    main()
