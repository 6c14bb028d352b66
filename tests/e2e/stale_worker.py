"""Two workers of which one is cut off with a shard in its hands: `steady` and `stale`.

The stale one makes raw calls, as no SDK would let a worker write late. It writes what it holds to `held.json`, and what
became of each late call to `refusals.json`: status and reason. The model of the steady one is the list of samples it
has seen, in `model.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

import strata.coord.worker as strata
from strata.base.atomic import write_file
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc

ROLE, OUT, ADDRESS = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
SHARDS: Final = 10
SHARD_SIZE: Final = 2
MIDDLE: Final = 6
OLD, NEW = "stale-1", "stale-2"


def save(name: str, content: Any) -> None:
    write_file(OUT / name, json.dumps(content).encode())


def stay() -> None:
    with strata.join(address=ADDRESS, id="steady", wait_for=2) as worker:
        worker.dataset("corpus", samples=SHARDS * SHARD_SIZE, shard_size=SHARD_SIZE)

        def commit(step: int, seen: list[int]) -> None:
            name = f"part-{worker.generation}-{step}.json"
            save(name, seen)
            worker.checkpoint(step, OUT / name)

        def train(start: strata.Manifest | None) -> list[int]:
            seen: list[int] = []
            for part in start.parts if start else ():
                seen += json.loads(Path(part.uri).read_text("utf-8"))
            for shard in worker.shards("corpus", 0):
                seen += range(shard.start, shard.end)
                shard.done()
                step = len(seen) // SHARD_SIZE
                worker.step(step)
                if worker.world_size == 1 and step == MIDDLE:
                    commit(step, seen)
                    save("committed.json", worker.generation)
                # In mid-epoch, until the other one is lost, and until it is back.
                while (worker.world_size, step) in ((2, 2), (1, MIDDLE)) and not worker.is_stale:
                    time.sleep(0.02)
            commit(SHARDS, seen)
            return seen

        save("model.json", worker.run(train))


def write_late() -> None:
    stub = connect()
    old = register(stub, OLD)
    while outcome(stub.AckDataset, pb.DatasetInfo(dataset_id="corpus", worker_id="stale"))[0] != "OK":
        time.sleep(0.05)
    lease_id = call(stub.GetNextShards, shards(worker_id="stale", incarnation=OLD, generation=old)).lease_id
    save("held.json", {"lease": lease_id, "generation": old})
    send_heartbeats_until_cut_off(stub)
    while not (OUT / "return").exists():
        time.sleep(0.05)
    stub = connect()
    found: dict[str, Any] = {"evicted": late_writes(stub, OLD, old, lease_id)}
    # The host is taken back, and the process from before the cut is still there.
    current = register(stub, NEW)
    found["replaced"] = late_writes(stub, OLD, old, lease_id)
    found["old generation"] = late_writes(stub, NEW, old, lease_id)
    call(stub.RequestRecovery, pb.RecoveryRequest(worker_id="stale", incarnation=NEW, observed_generation=current))
    found["generation"] = register(stub, NEW)
    # The new incarnation itself, which is welcome, cannot complete what the old one held.
    ack = shards(worker_id="stale", incarnation=NEW, acks=[pb.ShardAck(lease_id=lease_id)], acks_only=True)
    found["rejected"] = [*call(stub.GetNextShards, ack).rejected_leases]
    save("refusals.json", found)
    call(stub.LeaveWorker, pb.LeaveWorkerRequest(worker_id="stale", incarnation=NEW))


def connect() -> Any:
    credentials = grpc.ssl_channel_credentials((OUT / "ca.pem").read_bytes())
    return pb_grpc.CoordinatorStub(grpc.secure_channel(ADDRESS, credentials))


def call(method: Callable[..., Any], request: Any) -> Any:
    """Again while the coordinator is out of reach, or forms a generation."""
    while True:
        try:
            return method(request, timeout=5, metadata=bearer(), wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            time.sleep(0.1)


def bearer() -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {(OUT / 'worker.token').read_text('utf-8').strip()}"),)


def outcome(method: Callable[..., Any], request: Any) -> list[str]:
    try:
        call(method, request)
    except grpc.RpcError as error:
        trailing: Any = error.trailing_metadata()
        said = dict(trailing or ())
        return [error.code().name, said.get("strata-reason", "")]
    return ["OK", ""]


def register(stub: Any, incarnation: str) -> int:
    """The generation, once both are in it."""
    while True:
        config = call(stub.RegisterWorker, pb.WorkerInfo(worker_id="stale", incarnation=incarnation))
        if config.world_size == 2:
            return int(config.generation)
        time.sleep(0.1)


def shards(**given: Any) -> pb.ShardRequest:
    return pb.ShardRequest(dataset_id="corpus", explicit_acks=True, **given)


def send_heartbeats_until_cut_off(stub: Any) -> None:
    heartbeat = pb.HeartbeatRequest(worker_id="stale", incarnation=OLD)
    while not (OUT / "cut").exists():
        try:
            stub.Heartbeat(heartbeat, timeout=1, metadata=bearer())
        except grpc.RpcError:
            continue
        time.sleep(0.2)


def late_writes(stub: Any, incarnation: str, generation: int, lease_id: int) -> dict[str, list[str]]:
    who: dict[str, Any] = {"worker_id": "stale", "incarnation": incarnation, "generation": generation}
    ack = shards(acks=[pb.ShardAck(lease_id=lease_id)], acks_only=True, **who)
    checkpoint = pb.CheckpointInfo(checkpoint_id="late", path="late", step=SHARDS, explicit_consumed=True, **who)
    return {
        "heartbeat": outcome(stub.Heartbeat, pb.HeartbeatRequest(**who)),
        "shard": outcome(stub.GetNextShards, ack),
        "checkpoint": outcome(stub.ReportCheckpoint, checkpoint),
    }


if __name__ == "__main__":
    stay() if ROLE == "steady" else write_late()
