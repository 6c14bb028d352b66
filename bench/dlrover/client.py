"""The clients of DLRover, its own `MasterClient` in its own interpreter: one order at a time, a JSON line each.

Imports nothing of Strata: it runs in an environment that has DLRover alone.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from dlrover.python.common.constants import NodeType  # type: ignore[import-not-found]
from dlrover.python.elastic_agent.master_client import GrpcMasterClient  # type: ignore[import-not-found]

DATASET = "corpus"
TASK_TRAINING = 1


class Clients:
    def __init__(self, address: str, callers: int) -> None:
        self._clients = [GrpcMasterClient(address, number, NodeType.WORKER) for number in range(callers)]

    def define(self, shards: int) -> list[float]:
        self._clients[0].report_dataset_shard_params(
            batch_size=1,
            num_epochs=1,
            dataset_size=shards,
            num_minibatches_per_shard=1,
            dataset_name=DATASET,
            task_type=TASK_TRAINING,
            storage_type="table",
        )
        return []

    def heartbeats(self, seconds: float) -> list[float]:
        return self._again_and_again(seconds, lambda client: client.report_heart_beat(int(time.time())))

    def shards(self, seconds: float) -> list[float]:
        return self._again_and_again(seconds, self._take)

    def zombie(self) -> list[float]:
        """1 if the master takes the result of a task from a worker that never had it."""
        _, task = self._clients[0].get_task(DATASET)
        assert task.task_id >= 0, "the dataset has ended"
        reply = self._clients[1].report_task_result(DATASET, task.task_id, "")
        return [float(reply.success)]

    def _take(self, client: Any) -> None:
        taken, task = client.get_task(DATASET)
        assert taken and task.task_id >= 0, "the dataset has ended"  # noqa: PT018 - no test
        client.report_task_result(DATASET, task.task_id, "")

    def _again_and_again(self, seconds: float, call: Any) -> list[float]:
        counts = [0] * len(self._clients)
        until_s = time.monotonic() + seconds

        def run(number: int) -> None:
            while time.monotonic() < until_s:
                call(self._clients[number])
                counts[number] += 1

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(self._clients))]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [sum(counts) / (time.monotonic() - began_s)]


def main() -> None:
    clients = Clients(sys.argv[1], int(sys.argv[2]))
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        order = json.loads(line)
        values = getattr(clients, order.pop("type"))(**order)
        print(json.dumps({"values": values}), file=answers, flush=True)


if __name__ == "__main__":
    main()
