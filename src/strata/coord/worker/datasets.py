"""How a dataset is handed out, beyond its files."""

from __future__ import annotations

from dataclasses import dataclass

from strata.coord.pb import coordinator_pb2 as pb


@dataclass(frozen=True)
class DatasetOptions:
    seed: int = 0
    shuffle: bool = True
    buckets: int = 0
    """Units of placement; 0 leaves it to the coordinator."""
    global_batch_shards: int = 0
    """Not 0: the dataset is DETERMINISTIC, and all workers together take so many shards in a step."""

    def write(self, message: pb.DatasetInfo) -> None:
        message.seed, message.shuffle, message.buckets = self.seed, self.shuffle, self.buckets
        message.global_batch_shards = self.global_batch_shards
        deterministic = self.global_batch_shards > 0
        message.mode = pb.DATASET_MODE_DETERMINISTIC if deterministic else pb.DATASET_MODE_LEASED
