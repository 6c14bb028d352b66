"""Counts primes with all workers of a gang: the coordinator gives each number to one worker, once."""

from __future__ import annotations

import json
import sys
import time
from typing import Final

import strata.coord.worker as strata
from strata.fleet.trainer import output_folder, progress, report

NUMBERS: Final = 24_000
SHARD: Final = 1_000
SHARD_S: Final = 0.2


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def main() -> None:
    found = shards = 0
    with strata.join() as worker:
        worker.dataset("numbers", samples=NUMBERS, shard_size=SHARD)
        for epoch in worker.epochs(1):
            for shard in worker.shards("numbers", epoch):
                until_s = time.monotonic() + SHARD_S  # at least: a person watches
                found += sum(map(is_prime, range(shard.start, shard.end)))
                shards += 1
                shard.done()
                worker.step(shards)
                if worker.rank == 0:
                    report(step=shards, primes=found)
                    progress(shards * worker.world_size * SHARD / NUMBERS)
                time.sleep(max(0.0, until_s - time.monotonic()))
        rank = worker.rank
    counted = {"rank": rank, "shards": shards, "primes": found}
    (output_folder() / f"rank-{rank}.json").write_text(json.dumps(counted), encoding="utf-8")
    sys.stdout.write(f"rank {rank}: {found} primes in {shards} shards\n")


if __name__ == "__main__":
    main()
