"""A worker in a process of its own that is frozen and, when it wakes up, goes on as if nothing had happened.

    python -m soak.coord.zombie_worker ADDRESS WORKER_ID INCARNATION DATASET

It registers, stays attached, takes one shard, and prints what it holds. Every line that it reads from then on makes it
send something, by what it knew when it was frozen; it prints how each message was answered. `write`: an ack, a barrier,
a checkpoint, a heartbeat, a recovery and a farewell. `register`: only that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import msgspec

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc

TIMEOUT_S = 10.0


class HeldLease(msgspec.Struct):
    """What it knows."""

    lease_id: int
    start: int
    end: int
    generation: int
    rank: int


class Answer(msgspec.Struct):
    """What it was told: `reason` is the trailing metadata's, or what an answer of OK said."""

    call: str
    code: str
    reason: str


def say(line: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


class Zombie:
    def __init__(self, stub: Any, worker_id: str, incarnation: str, dataset: str) -> None:
        self._stub = stub
        self._who: dict[str, Any] = {"worker_id": worker_id, "incarnation": incarnation}
        self._dataset = dataset

    def register(self) -> pb.WorkerConfig:
        """Again while there is no answer: its connection may have broken while it was frozen."""
        while True:
            try:
                config: pb.WorkerConfig = self._stub.RegisterWorker(
                    pb.WorkerInfo(**self._who, elastic=True), timeout=TIMEOUT_S
                )
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                return config

    def hold(self) -> HeldLease:
        """Member of a generation, with a lease."""
        config = self.register()
        while not config.generation:
            config = self.register()
        threading.Thread(target=self._attach, daemon=True).start()
        while True:
            request = pb.ShardRequest(dataset_id=self._dataset, explicit_acks=True, **self._who)
            try:
                found = self._stub.GetNextShards(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                # A generation is forming.
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                continue
            config = self.register()
            return HeldLease(found.lease_id, found.start_index, found.end_index, config.generation, config.rank)

    def _attach(self) -> None:
        try:
            for _ in self._stub.Attach(pb.AttachRequest(**self._who)):
                pass
        except grpc.RpcError:
            # It was frozen too long. Another stream would be an honest thing to open; a zombie is not honest.
            return

    def write(self, held: HeldLease) -> None:
        acks = [pb.ShardAck(lease_id=held.lease_id)]
        since: dict[str, Any] = {"generation": held.generation, **self._who}
        request = pb.ShardRequest(dataset_id=self._dataset, explicit_acks=True, acks=acks, acks_only=True, **since)
        self._send("ack", self._stub.GetNextShards, request, _rejected)
        request = pb.ShardRequest(dataset_id=self._dataset, explicit_acks=True, acks=acks, acks_only=True, **self._who)
        self._send("ack of any generation", self._stub.GetNextShards, request, _rejected)
        barrier = pb.BarrierRequest(barrier_id="late", wait=False, **since)
        self._send("barrier", self._stub.Barrier, barrier, lambda found: pb.BarrierVerdict.Name(found.verdict))
        part = pb.CheckpointInfo(
            checkpoint_id="late", path="mem:late", step=1 << 20, rank=held.rank, explicit_consumed=True, **since
        )
        self._send("checkpoint", self._stub.ReportCheckpoint, part, lambda found: f"committed {found.committed}")
        beat = pb.HeartbeatRequest(status=pb.WORKER_STATUS_TRAINING, **since)
        self._send("heartbeat", self._stub.Heartbeat, beat, lambda found: f"generation {found.generation}")

    def leave(self, held: HeldLease) -> None:
        request = pb.LeaveWorkerRequest(acks=[pb.ShardAck(lease_id=held.lease_id)], **self._who)
        self._send("leave", self._stub.LeaveWorker, request, _rejected)

    def _send(self, name: str, call: Any, request: Any, said: Callable[[Any], str]) -> None:
        while True:
            try:
                found = call(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                trailing = {each.key: each.value for each in error.trailing_metadata() or ()}
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    # Its connection broke while it was frozen, or a generation is forming: it asks again.
                    continue
                say(Answer(name, error.code().name, str(trailing.get("strata-reason", ""))))
                return
            say(Answer(name, "OK", said(found)))
            return


def _rejected(found: Any) -> str:
    return f"rejected {list(found.rejected_leases)}"


def main(address: str, worker_id: str, incarnation: str, dataset: str) -> None:
    with grpc.insecure_channel(address) as channel:
        zombie = Zombie(pb_grpc.CoordinatorStub(channel), worker_id, incarnation, dataset)
        held = zombie.hold()
        say(held)
        for line in sys.stdin:
            match line.strip():
                case "register":
                    config = zombie.register()
                    say(Answer("register", "OK", f"generation {config.generation}"))
                case "write":
                    zombie.write(held)
                    say(Answer("done", "", ""))
                case "leave":
                    zombie.leave(held)
                    say(Answer("done", "", ""))


if __name__ == "__main__":
    main(*sys.argv[1:5])
