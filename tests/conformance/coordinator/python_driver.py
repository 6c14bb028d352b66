"""The driver of the worker SDK in Python: commands as lines of JSON in, answers as lines of JSON out.

The protocol is in docs/coordinator-protocol.md; a driver in another language answers the same commands with its own
SDK.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import grpc
from google.protobuf import json_format

import strata.coord.worker as strata
from strata.base.settings import load
from strata.coord.core.permutation import key_of, order_of, slice_of
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.server.grpc_handler import STATUS_OF
from strata.coord.worker.leases import Capture
from strata.coord.worker.settings import SECTION

Given = Mapping[str, Any]
Answer = dict[str, Any]

REQUESTS: Final[Mapping[str, type[Any]]] = {
    "RegisterWorker": pb.WorkerInfo,
    "Heartbeat": pb.HeartbeatRequest,
    "GetNextShards": pb.ShardRequest,
    "AckDataset": pb.DatasetInfo,
    "Barrier": pb.BarrierRequest,
    "ReportCheckpoint": pb.CheckpointInfo,
    "RequestRecovery": pb.RecoveryRequest,
    "HeartbeatBatch": pb.HeartbeatBatchRequest,
    "LeaveWorker": pb.LeaveWorkerRequest,
}


def refusal(error: strata.StrataError) -> Answer:
    """Codes are those of gRPC, which every language has."""
    found: Answer = {
        "code": STATUS_OF[error.code].name,
        "reason": error.detail.get("reason", ""),
        "message": error.message,
    }
    if "generation" in error.detail:
        found["generation"] = error.detail["generation"]
    if "leases" in error.detail:
        found["leases"] = [str(lease_id) for lease_id in error.detail["leases"]]
    return found


def status(error: Any) -> Answer:
    """Of a call as gRPC raises it: an `RpcError` that is also a `Call`, which its types do not say."""
    said = dict(error.trailing_metadata() or ())
    found: Answer = {
        "code": error.code().name,
        "reason": said.get("strata-reason", ""),
        "message": error.details(),
    }
    if "strata-generation" in said:
        found["generation"] = int(said["strata-generation"])
    if "strata-retry-after-ms" in said:
        found["retry_after_ms"] = int(said["strata-retry-after-ms"])
    return found


def shown(shard: strata.Shard) -> Answer:
    return {
        "shard_id": shard.shard_id,
        "epoch": shard.epoch,
        "lease_id": str(shard.lease_id),
        "start": shard.start,
        "end": shard.end,
        "slices": [[each.path, each.start, each.end] for each in shard.slices],
    }


def manifest(found: strata.Manifest | None) -> Answer | None:
    if found is None:
        return None
    return {
        "checkpoint_id": found.checkpoint_id,
        "step": found.step,
        "generation": found.generation,
        "parts": [
            {"rank": each.rank, "uri": each.uri, "size": each.size, "digest": each.digest} for each in found.parts
        ],
    }


def call(given: Given) -> Answer:
    """One message exactly as it is given, without any of the SDK's care: how the contract itself is tested."""
    settings = load(strata.WorkerSettings, section=SECTION, file=None, flags={})
    metadata = tuple(given.get("metadata", {}).items())
    if settings.token is not None:
        metadata = (*metadata, ("authorization", f"Bearer {settings.token.reveal()}"))
    if settings.tls is None:
        channel = grpc.insecure_channel(settings.addresses[0])
    else:
        credentials = grpc.ssl_channel_credentials(settings.tls.ca.read_bytes())
        channel = grpc.secure_channel(settings.addresses[0], credentials)
    with channel:
        method = getattr(pb_grpc.CoordinatorStub(channel), given["method"])
        request = json_format.ParseDict(given["request"], REQUESTS[given["method"]]())
        reply = method(request, timeout=20, metadata=metadata)
        return json_format.MessageToDict(reply, preserving_proto_field_name=True)


def order(given: Given) -> Answer:
    dataset_id, seed, epoch = given["dataset_id"], int(given["seed"]), int(given["epoch"])
    found = order_of(dataset_id, seed, epoch, given["n"], shuffle=given.get("shuffle", True))
    return {
        "key": f"{key_of(dataset_id, seed, epoch):#018x}",
        "half": found.half,
        "round_keys": [f"{each:#018x}" for each in found.round_keys],
        "items": [found.at(position) for position in given["positions"]],
    }


def cut(given: Given) -> Answer:
    found = slice_of(
        given["step"], given["rank"], given["world_size"], global_batch=given["global_batch"], n=given["n"]
    )
    return {"epoch": found.epoch, "start": found.start, "stop": found.stop}


class Driver:
    """The worker of this process, and what the commands refer to by id."""

    def __init__(self) -> None:
        self._worker: strata.Worker | None = None
        self._shards: dict[str, strata.Shard] = {}
        self._capture: Capture | None = None
        self._phases = ExitStack()
        self.commands: Final[Mapping[str, Callable[[Given], Answer | None]]] = {
            "join": self.join,
            "state": self.state,
            "dataset": self.dataset,
            "next_shard": self.next_shard,
            "read": lambda given: {"samples": list(self.shard(given).open())},
            "progress": lambda given: self.shard(given).progress(given["until"]),
            "done": lambda given: self.shard(given).done(),
            "fail": lambda given: self.shard(given).fail(given["reason"]),
            "flush": lambda given: self.worker.flush(),
            "step_shards": self.step_shards,
            "barrier": self.barrier,
            "step": lambda given: self.worker.step(given["number"], compute_s=given.get("compute_s")),
            "busy": self.busy,
            "checkpoint_due": lambda given: {"due": self.worker.checkpoint_due()},
            "begin_checkpoint": self.begin_checkpoint,
            "report_checkpoint": self.report_checkpoint,
            "recover": self.recover,
            "follow": self.follow,
            "commands": self.take_commands,
            "leave": self.leave,
            "crash": self.crash,
            "order": order,
            "slice": cut,
            "call": call,
            "die": lambda given: os._exit(1),
        }

    @property
    def worker(self) -> strata.Worker:
        if self._worker is None:
            raise strata.StrataError(strata.Code.PRECONDITION, "the worker is not joined")
        return self._worker

    def shard(self, given: Given) -> strata.Shard:
        return self._shards[given["lease_id"]]

    def identity(self) -> Answer:
        worker = self.worker
        return {
            "job": worker.job,
            "worker_id": worker.worker_id,
            "incarnation": worker.incarnation,
            "generation": worker.generation,
            "rank": worker.rank,
            "world_size": worker.world_size,
            "parameters": worker.parameters,
        }

    def join(self, given: Given) -> Answer:
        named = {"job": "job", "worker_id": "id", "elastic": "elastic"}
        joining = strata.join(**{named[name]: given[name] for name in given if name in named})
        self._worker = joining.__enter__()
        return {**self.identity(), "start": manifest(self._worker.start)}

    def state(self, given: Given) -> Answer:
        worker = self.worker
        return {
            **self.identity(),
            "should_stop": worker.should_stop,
        }

    def busy(self, given: Given) -> None:
        if given["on"]:
            self._phases.enter_context(self.worker.busy())
        else:
            self._phases.close()

    def dataset(self, given: Given) -> Answer:
        options = strata.DatasetOptions(
            seed=int(given.get("seed", 0)),
            shuffle=given.get("shuffle", True),
            global_batch_shards=given.get("global_batch_shards", 0),
        )
        shards = self.worker.dataset(
            given["dataset_id"],
            given.get("files", ()),
            samples=given.get("samples"),
            shard_size=given.get("shard_size", 0),
            options=options,
        )
        return {"num_shards": shards}

    def next_shard(self, given: Given) -> Answer:
        shard = self.worker.next_shard(given["dataset_id"], given["epoch"], at_once=given.get("at_once", 1))
        if shard is None:
            return {"shard": None}
        self._shards[str(shard.lease_id)] = shard
        return {"shard": shown(shard)}

    def step_shards(self, given: Given) -> Answer:
        return {"shards": [shown(shard) for shard in self.worker.step_shards(given["dataset_id"], given["step"])]}

    def barrier(self, given: Given) -> None:
        timeout_s = given.get("timeout_ms", 0) / 1000
        self.worker.barrier(given["barrier_id"], timeout_s=timeout_s, expected=given.get("expected", 0))

    def begin_checkpoint(self, given: Given) -> None:
        self._capture = self.worker.begin_checkpoint(given["step"])

    def report_checkpoint(self, given: Given) -> Answer:
        assert self._capture is not None, "no checkpoint is begun"
        found = self.worker.report_checkpoint(self._capture, given["path"])
        return {
            "step": found.step,
            "committed": found.committed,
            "missing_ranks": list(found.missing_ranks),
            "tombstones": list(found.tombstones),
            "drained": found.drained,
        }

    def recover(self, given: Given) -> Answer:
        found = self.worker.recover(given.get("reason", ""), bad_checkpoint_id=given.get("bad_checkpoint_id", ""))
        return {**self.identity(), "checkpoint": manifest(found)}

    def follow(self, given: Given) -> Answer:
        self.worker.follow()
        return self.identity()

    def take_commands(self, given: Given) -> Answer:
        return {
            "commands": [
                {"kind": each.kind.value, "arguments": dict(each.arguments), "reason": each.reason}
                for each in self.worker.commands()
            ]
        }

    def leave(self, given: Given) -> None:
        # Whatever comes of it, this life is over.
        leaving, self._worker = self.worker, None
        leaving.__exit__(None, None, None)

    def crash(self, given: Given) -> None:
        """As if the loop that trains had raised."""
        crashing, self._worker = self.worker, None
        error = RuntimeError("told to")
        crashing.__exit__(type(error), error, None)


def main() -> None:
    driver = Driver()
    for line in sys.stdin:
        given = json.loads(line)
        try:
            answer: Answer = {"ok": driver.commands[given["do"]](given) or {}}
        except strata.StrataError as error:
            answer = {"error": refusal(error)}
        except grpc.RpcError as error:
            answer = {"error": status(error)}
        print(json.dumps(answer), flush=True)
    # The input is over without a goodbye: a worker that just ends has failed.
    os._exit(0)


if __name__ == "__main__":
    main()
