"""A worker in a process of its own: trains a little, writes a checkpoint, then stays until it is stopped or killed.

python gang_worker.py ADDRESS WORKER_ID GANG_SIZE PLAN

With the plan `wait` it reports its part of one more checkpoint and waits at a barrier; with `idle` it does neither, so
that the others wait for it. It says `there` when it is that far.
"""

from __future__ import annotations

import sys
import threading

import strata.coord.worker as strata

DIGEST = f"sha256:{'0' * 64}"


def main(address: str, worker_id: str, size: int, plan: str) -> None:
    pause = threading.Event()
    with strata.join(address=address, job="my-run", id=worker_id, gpus=2, elastic=True) as worker:
        worker.dataset("corpus", samples=4_000, shard_size=100)
        while worker.world_size < size:
            pause.wait(0.02)
            worker.follow()
        worker.barrier("start")
        shards = worker.shards("corpus", 0)
        for step in (1, 2, 3):
            next(shards)
            worker.step(step)
        worker.checkpoint(3, f"/checkpoints/3/{worker_id}", digest=DIGEST, size=3_000_000)
        if plan == "wait":
            part = worker.begin_checkpoint(6)
            worker.report_checkpoint(part, f"/checkpoints/6/{worker_id}", digest=DIGEST, size=3_000_000)
        sys.stdout.write("there\n")
        sys.stdout.flush()
        if plan == "wait":
            worker.barrier("epoch_0")
        while not worker.should_stop:
            pause.wait(0.05)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
