"""A worker in a process of its own that attaches, takes a shard, prints its first sample and then does nothing.

python worker_process.py ADDRESS WORKER_ID
"""

from __future__ import annotations

import sys

import grpc

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc


def main(address: str, worker_id: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        for news in stub.Attach(pb.AttachRequest(worker_id=worker_id)):
            if news.generation:
                shard = stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id=worker_id, explicit_acks=True))
                sys.stdout.write(f"{shard.start_index}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
