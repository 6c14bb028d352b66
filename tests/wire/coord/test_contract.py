"""The contract of the coordinator on the wire: names, numbers and types that workers in other languages rely on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc

RPCS: Final = {
    "RegisterWorker": ("WorkerInfo", "WorkerConfig"),
    "Heartbeat": ("HeartbeatRequest", "HeartbeatResponse"),
    "GetNextShards": ("ShardRequest", "ShardAssignment"),
    "AckDataset": ("DatasetInfo", "DatasetAck"),
    "Barrier": ("BarrierRequest", "BarrierResponse"),
    "ReportCheckpoint": ("CheckpointInfo", "CheckpointAck"),
    "RequestRecovery": ("RecoveryRequest", "RecoveryResponse"),
}
"""The seven RPCs that any worker may rely on."""

ADDED: Final = {
    "HeartbeatBatch": "unary",
    "Attach": "stream",
    "LeaveWorker": "unary",
    "GetJob": "unary",
    "WatchJob": "stream",
    "IssueCommand": "unary",
    "ListJobs": "unary",
    "CreateJob": "unary",
    "UpdateJob": "unary",
    "ResetJob": "unary",
    "DeleteJob": "unary",
    "ListEvents": "unary",
}

STATES: Final = ("INITIALIZING", "IDLE", "LOADING_DATA", "TRAINING", "CHECKPOINTING", "RECOVERING", "ERROR")

FIELDS: Final = {
    "WorkerInfo": ("worker_id", "ip", "port", "gpu_count"),
    "WorkerConfig": ("heartbeat_interval_ms", "training_parameters"),
    "HeartbeatRequest": ("worker_id", "status", "resources"),
    "HeartbeatResponse": ("command",),
    "ShardRequest": ("dataset_id", "epoch"),
    "ShardAssignment": ("shard_id", "file_paths", "start_index", "end_index"),
    "DatasetInfo": ("dataset_id",),
    "BarrierRequest": ("barrier_id", "step", "expected_participants"),
    "CheckpointInfo": ("checkpoint_id", "path", "size_bytes"),
}
"""What the minimal worker knows of each message, in the order of the numbers from 1."""

IDENTITY: Final = {"job_id": 10, "worker_id": 11, "incarnation": 12, "generation": 13}

MINIMAL: Final = 10
"""Fields below this number are all that the minimal worker has in its copy of the contract."""


def message(name: str) -> Descriptor:
    return pb.DESCRIPTOR.message_types_by_name[name]


def sent_by_workers() -> Iterable[str]:
    return [taken for taken, _ in RPCS.values()] + ["AttachRequest", "LeaveWorkerRequest"]


def seen_by_workers() -> set[str]:
    """Every message that a worker sends or receives, at any depth; the entries of maps have no numbers to leave."""
    service = pb.DESCRIPTOR.services_by_name["Coordinator"]
    todo = [
        each
        for method in service.methods
        if method.name in RPCS or method.name in ("HeartbeatBatch", "Attach", "LeaveWorker")
        for each in (method.input_type, method.output_type)
    ]
    seen: set[str] = set()
    while todo:
        each = todo.pop()
        if each.name not in seen and not each.GetOptions().map_entry:
            seen.add(each.name)
            todo += [field.message_type for field in each.fields if field.message_type is not None]
    return seen


def minimal_copy() -> descriptor_pool.DescriptorPool:
    """The contract as somebody has it who wrote down only the fields that the minimal worker needs."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for each in file.message_type:
        kept = [field for field in each.field if field.number < MINIMAL]
        del each.field[:], each.oneof_decl[:]
        each.field.extend(kept)
        for field in each.field:
            field.ClearField("oneof_index")
            field.proto3_optional = False
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def minimal(name: str, **fields: object) -> Message:
    kind = message_factory.GetMessageClass(minimal_copy().FindMessageTypeByName(f"strata.v1.{name}"))
    return kind(**fields)


def test_the_service_has_the_seven_rpcs_with_their_messages() -> None:
    service = pb.DESCRIPTOR.services_by_name["Coordinator"]
    methods = {method.name: method for method in service.methods}
    assert service.full_name == "strata.v1.Coordinator"
    assert {name: (methods[name].input_type.name, methods[name].output_type.name) for name in RPCS} == RPCS
    assert not [name for name in RPCS if methods[name].client_streaming or methods[name].server_streaming]


def test_the_other_rpcs_are_ours() -> None:
    methods = pb.DESCRIPTOR.services_by_name["Coordinator"].methods
    ours = {each.name: "stream" if each.server_streaming else "unary" for each in methods if each.name not in RPCS}
    assert ours == ADDED
    assert not [each.name for each in methods if each.client_streaming]


def test_the_generated_servicer_has_every_rpc() -> None:
    assert [name for name in RPCS | ADDED if not hasattr(coordinator_pb2_grpc.CoordinatorServicer, name)] == []


def test_telemetry_has_exactly_the_numbers_and_types_of_the_contract() -> None:
    fields = [(each.number, each.name, each.type, each.is_repeated) for each in pb.ResourceUsage.DESCRIPTOR.fields]
    assert fields == [
        (1, "cpu_percent", FieldDescriptor.TYPE_DOUBLE, False),
        (2, "memory_used_bytes", FieldDescriptor.TYPE_UINT64, False),
        (3, "disk_read_bytes", FieldDescriptor.TYPE_UINT64, False),
        (4, "disk_write_bytes", FieldDescriptor.TYPE_UINT64, False),
        (5, "network_rx_bytes", FieldDescriptor.TYPE_UINT64, False),
        (6, "network_tx_bytes", FieldDescriptor.TYPE_UINT64, False),
        (7, "gpu_metrics", FieldDescriptor.TYPE_MESSAGE, True),
    ]
    assert pb.ResourceUsage.DESCRIPTOR.fields_by_name["gpu_metrics"].message_type is pb.GpuMetrics.DESCRIPTOR


def test_a_worker_has_seven_states_and_zero_is_none_of_them() -> None:
    values = {each.name: each.number for each in pb.WorkerStatus.DESCRIPTOR.values}
    names = ("UNSPECIFIED", *STATES)
    assert values == {f"WORKER_STATUS_{name}": number for number, name in enumerate(names)}


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_of_the_minimal_worker_come_first(name: str) -> None:
    numbered = {field.number: field.name for field in message(name).fields}
    assert tuple(numbered[number] for number in range(1, len(FIELDS[name]) + 1)) == FIELDS[name]


@pytest.mark.parametrize("name", sent_by_workers())
def test_every_request_has_room_for_the_identity_at_the_same_numbers(name: str) -> None:
    fields = {field.name: field.number for field in message(name).fields}
    assert fields["job_id"] == 10
    assert fields["incarnation"] == 12
    assert fields["worker_id"] == (1 if name in ("WorkerInfo", "HeartbeatRequest") else 11)
    assert fields.get("generation", fields.get("observed_generation", 13)) == 13
    owned = {field.name for field in message(name).fields if field.number in range(10, 14)}
    assert owned <= {*IDENTITY, "observed_generation"}


def test_every_message_of_a_worker_leaves_the_same_numbers_to_sites() -> None:
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    reserved = {each.name: {(span.start, span.end) for span in each.reserved_range} for each in file.message_type}
    assert [name for name in seen_by_workers() if (100, 200) not in reserved[name]] == []


def test_a_shard_is_numbered_like_the_top_level_of_an_assignment() -> None:
    shard = {field.number: field.name for field in pb.Shard.DESCRIPTOR.fields}
    top = {field.number: field.name for field in pb.ShardAssignment.DESCRIPTOR.fields}
    assert [shard[number] for number in (1, 2, 3, 4, 10)] == [top[number] for number in (1, 2, 3, 4, 10)]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (
            minimal("WorkerInfo", worker_id="w0", ip="10.0.0.7", port=7000, gpu_count=8),
            pb.WorkerInfo(worker_id="w0", ip="10.0.0.7", port=7000, gpu_count=8),
        ),
        (
            minimal("HeartbeatRequest", worker_id="w0", status=4, resources={"cpu_percent": 12.5}),
            pb.HeartbeatRequest(
                worker_id="w0", status=pb.WORKER_STATUS_TRAINING, resources=pb.ResourceUsage(cpu_percent=12.5)
            ),
        ),
        (minimal("ShardRequest", dataset_id="corpus", epoch=3), pb.ShardRequest(dataset_id="corpus", epoch=3)),
        (minimal("DatasetInfo", dataset_id="corpus"), pb.DatasetInfo(dataset_id="corpus")),
        (
            minimal("BarrierRequest", barrier_id="epoch_3", step=900),
            pb.BarrierRequest(barrier_id="epoch_3", step=900),
        ),
        (
            minimal("CheckpointInfo", checkpoint_id="c", path="s3://b/c", size_bytes=5_000_000_000),
            pb.CheckpointInfo(checkpoint_id="c", path="s3://b/c", size_bytes=5_000_000_000),
        ),
        (minimal("RecoveryRequest"), pb.RecoveryRequest()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_minimal_worker_sends_is_read_and_nothing_else_is_set(sent: Message, read: Message) -> None:
    assert type(read).FromString(sent.SerializeToString()) == read


def test_what_a_minimal_worker_leaves_out_is_told_from_a_zero() -> None:
    assert not pb.BarrierRequest().HasField("wait")
    assert not pb.ShardAck(lease_id=1).HasField("consumed_until")
    assert not pb.CheckpointInfo().HasField("step")
    assert not pb.CheckpointInfo().HasField("rank")
    assert not pb.WorkerInfo().HasField("weight")
    assert not pb.DatasetInfo().HasField("shuffle")
    assert not pb.HeartbeatRequest().HasField("step")


def test_a_minimal_worker_reads_its_shard_from_an_answer_full_of_fields_it_does_not_know() -> None:
    answer = pb.ShardAssignment(
        shard_id="corpus/3/17",
        file_paths=["s3://b/17.parquet"],
        start_index=1700,
        end_index=1800,
        lease_id=5 << 32 | 9,
        shards=[pb.Shard(shard_id="corpus/3/17", lease_id=5 << 32 | 9)],
        generation=4,
        epoch=3,
    )
    read = minimal("ShardAssignment")
    read.ParseFromString(answer.SerializeToString())
    expected = minimal(
        "ShardAssignment",
        shard_id="corpus/3/17",
        file_paths=["s3://b/17.parquet"],
        start_index=1700,
        end_index=1800,
    )
    assert [field.name for field, _ in read.ListFields()] == list(FIELDS["ShardAssignment"])
    assert [value for _, value in read.ListFields()] == [value for _, value in expected.ListFields()]


def test_fields_of_a_newer_contract_survive_an_older_reader() -> None:
    newer = pb.HeartbeatRequest(worker_id="w0").SerializeToString() + b"\xb2\x09\x03new"  # 150, length-delimited
    older = pb.HeartbeatRequest.FromString(newer)
    assert older.worker_id == "w0"
    assert older.SerializeToString() == newer


def test_an_unknown_enum_value_survives_as_a_number() -> None:
    answer = pb.HeartbeatResponse.FromString(b"\x08\x63")
    assert answer.command == 99
    assert answer.SerializeToString() == b"\x08\x63"


@pytest.mark.parametrize(
    ("value", "golden"),
    [
        (
            pb.WorkerInfo(worker_id="w0", ip="10.0.0.7", port=7000, gpu_count=8),
            "0a027730 120831302e302e302e37 18d836 2008",
        ),
        (
            pb.WorkerInfo(worker_id="w0", job_id="j", incarnation="a", held_leases=[1 << 32 | 2]),
            "0a027730 52016a 620161 7a05 8280808010",
        ),
        (
            pb.HeartbeatRequest(
                worker_id="w0",
                status=pb.WORKER_STATUS_TRAINING,
                resources=pb.ResourceUsage(
                    cpu_percent=50.0, memory_used_bytes=300, network_tx_bytes=1, gpu_metrics=[pb.GpuMetrics(index=1)]
                ),
            ),
            "0a027730 1004 1a12 090000000000004940 10ac02 3001 3a020801",
        ),
        (pb.HeartbeatResponse(command=pb.COMMAND_KIND_STOP, generation=3), "0801 5803"),
        (
            pb.ShardRequest(
                dataset_id="d", epoch=2, acks=[pb.ShardAck(lease_id=7, consumed_until=0)], explicit_acks=True
            ),
            "0a0164 1002 7204 0807 1000 7801",
        ),
        (
            pb.ShardAssignment(shard_id="s", file_paths=["a", "b"], start_index=1, end_index=300, lease_id=7),
            "0a0173 120161 120162 1801 20ac02 5007",
        ),
        (pb.BarrierRequest(barrier_id="epoch_1", step=9, wait=False), "0a0765706f63685f31 1009 7800"),
        (pb.BarrierResponse(released=True, verdict=pb.BARRIER_VERDICT_RELEASED), "0801 5001"),
        (pb.CheckpointInfo(checkpoint_id="c", path="p", size_bytes=1, step=0, rank=0), "0a0163 120170 1801 7000 7800"),
        (pb.RecoveryRequest(observed_generation=4, bad_checkpoint_id="c"), "6804 7a0163"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_bytes_are_these(value: Message, golden: str) -> None:
    assert value.SerializeToString().hex() == golden.replace(" ", "")
    assert type(value).FromString(bytes.fromhex(golden)) == value


def test_a_lease_id_keeps_all_64_bits() -> None:
    lease_id = 0xFFFF_FFFF_FFFF_FFFF
    assert pb.ShardAck.FromString(pb.ShardAck(lease_id=lease_id).SerializeToString()).lease_id == lease_id
