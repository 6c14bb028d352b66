"""Messages into the core's words and back: what is left out, what contradicts, what the minimal worker sees."""

from __future__ import annotations

from itertools import accumulate

import pytest

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import BarrierVerdict, CommandKind, DataFile, Dataset
from strata.coord.core.inputs import BarrierState, Caller, LeasedShard, ShardAssignment
from strata.coord.core.job_config import JobConfig
from strata.coord.core.ledger import DatasetLedger, EpochLedger, Lease, ShardRange
from strata.coord.core.state import JobState
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server import wire
from strata.coord.server.wire import Identity

FILES = Dataset(
    dataset_id="d",
    samples=30,
    shard_size=10,
    files=(DataFile("a", 5), DataFile("b", 0), DataFile("c", 18), DataFile("d", 7)),
)
ENDS = list(accumulate(file.samples for file in FILES.files))


def test_a_field_comes_before_metadata_and_metadata_before_the_token() -> None:
    identity = Identity("meta-job", "meta-worker", "", "")
    assert wire.caller(pb.BarrierRequest(job_id="j", worker_id="w"), identity) == Caller("j", "w")
    assert wire.caller(pb.BarrierRequest(), identity) == Caller("meta-job", "meta-worker")
    token = Identity("", "", "token-job", "token-worker")
    assert wire.caller(pb.BarrierRequest(), token) == Caller("token-job", "token-worker")
    assert wire.caller(pb.BarrierRequest(worker_id="w"), Identity()) == Caller("default", "w")


@pytest.mark.parametrize("message", [pb.BarrierRequest(job_id="x"), pb.BarrierRequest(worker_id="x")])
def test_a_field_that_contradicts_the_token_is_forbidden(message: pb.BarrierRequest) -> None:
    with pytest.raises(StrataError) as caught:
        wire.caller(message, Identity("", "", "job", "worker"))
    assert caught.value.code is Code.FORBIDDEN


@pytest.mark.parametrize("message", [pb.BarrierRequest(), pb.BarrierRequest(worker_id="w" * 257)])
def test_a_call_of_nobody_is_invalid(message: pb.BarrierRequest) -> None:
    with pytest.raises(StrataError) as caught:
        wire.caller(message, Identity())
    assert caught.value.code is Code.INVALID


def test_a_worker_weighs_as_much_as_it_has_gpus_unless_it_says_otherwise() -> None:
    def weight(message: pb.WorkerInfo) -> float:
        return wire.worker(message, Identity(), "life").worker.weight

    assert weight(pb.WorkerInfo(worker_id="w")) == 1.0
    assert weight(pb.WorkerInfo(worker_id="w", gpu_count=8)) == 8.0
    assert weight(pb.WorkerInfo(worker_id="w", gpu_count=8, weight=0.5)) == 0.5


def test_only_a_worker_without_a_life_is_given_one() -> None:
    assert wire.worker(pb.WorkerInfo(worker_id="w"), Identity(), "given").worker.incarnation == "given"
    own = pb.WorkerInfo(worker_id="w", incarnation="own")
    assert wire.worker(own, Identity(), "given").worker.incarnation == "own"


def test_the_address_of_a_worker_survives_the_way_through_the_core() -> None:
    found = wire.worker(pb.WorkerInfo(worker_id="w", ip="fe80::1", port=9), Identity(), "life").worker
    assert wire.address(found) == ("fe80::1", 9)
    assert wire.address(wire.worker(pb.WorkerInfo(worker_id="w"), Identity(), "life").worker) == ("", 0)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 5, [("a", 0, 5)]),
        (0, 10, [("a", 0, 5), ("c", 0, 5)]),
        (10, 20, [("c", 5, 15)]),
        (20, 30, [("c", 15, 18), ("d", 0, 7)]),
        (29, 30, [("d", 6, 7)]),
    ],
)
def test_samples_are_counted_within_each_file(start: int, end: int, expected: list[tuple[str, int, int]]) -> None:
    found = wire.slices(FILES, ENDS, start, end)
    assert [(each.path, each.start_index, each.end_index) for each in found] == expected


def test_the_first_shard_stands_where_the_minimal_worker_looks() -> None:
    leases = (LeasedShard(7, ShardRange(1, 10, 20), ("c",)), LeasedShard(8, ShardRange(2, 24, 30), ("d",)))
    reply = wire.assignment(ShardAssignment(leases, end_of_epoch=False, stale=(3,)), 4, 2, FILES, ENDS)
    assert (reply.shard_id, list(reply.file_paths), reply.start_index, reply.end_index) == ("d/2/1", ["c"], 10, 20)
    assert (reply.lease_id, reply.generation, reply.epoch, list(reply.rejected_leases)) == (7, 4, 2, [3])
    assert [(each.shard_id, each.lease_id, each.shard_index) for each in reply.shards] == [
        ("d/2/1", 7, 1),
        ("d/2/2", 8, 2),
    ]


def test_no_shard_is_either_the_end_or_a_time_to_ask_again() -> None:
    over = wire.assignment(ShardAssignment((), end_of_epoch=True, stale=()), 1, 0, FILES, ENDS)
    assert (over.end_of_epoch, over.retry_after_ms, over.shard_id) == (True, 0, "")
    later = wire.assignment(ShardAssignment((), end_of_epoch=False, stale=()), 1, 0, FILES, ENDS)
    assert (later.end_of_epoch, later.retry_after_ms) == (False, wire.EMPTY_RETRY_MS)


def test_who_does_not_ack_says_nothing_of_what_it_holds() -> None:
    minimal = wire.next_shards(pb.ShardRequest(dataset_id="d", worker_id="w"), Identity())
    assert (minimal.held, minimal.acks, minimal.count) == (None, (), 1)
    explicit = wire.next_shards(
        pb.ShardRequest(
            dataset_id="d",
            worker_id="w",
            explicit_acks=True,
            held_leases=[1, 2],
            acks=[pb.ShardAck(lease_id=1), pb.ShardAck(lease_id=2, consumed_until=0, failed=True)],
            max_shards=3,
        ),
        Identity(),
    )
    assert (explicit.held, explicit.count) == ((1, 2), 3)
    assert [(ack.until, ack.failed) for ack in explicit.acks] == [(None, False), (0, True)]


def test_a_name_alone_defines_no_dataset() -> None:
    assert wire.dataset(pb.DatasetInfo(dataset_id="d"), None) is None
    assert wire.dataset(pb.DatasetInfo(dataset_id="d"), FILES) is None


def test_what_a_definition_leaves_open_is_as_registered() -> None:
    message = pb.DatasetInfo(
        dataset_id="d", files=[pb.DatasetFile(path=f.path, num_samples=f.samples) for f in FILES.files]
    )
    fresh = wire.dataset(message, None)
    assert fresh is not None
    assert (fresh.samples, fresh.shard_size, fresh.shuffle) == (30, wire.DEFAULT_SHARD_SIZE, True)
    assert wire.dataset(message, FILES) == FILES
    message.shard_size = 11
    assert wire.dataset(message, FILES) != FILES


def test_a_report_takes_from_the_job_what_it_leaves_out() -> None:
    lease = Lease(5, "w", 0, 0, 10, 0)
    ledger = EpochLedger(0, [0], leases={5: lease}, held={"w": [5]})
    job = JobState("j", JobConfig(), ranks={"v": 0, "w": 1}, datasets={"d": DatasetLedger(FILES, epochs={0: ledger})})
    message = pb.CheckpointInfo(
        checkpoint_id="c",
        path="p",
        consumed=[
            pb.ConsumedLease(dataset_id="d", lease_id=5),
            pb.ConsumedLease(dataset_id="d", lease_id=4),
            pb.ConsumedLease(dataset_id="d", lease_id=6, consumed_until=3),
        ],
    )
    found = wire.report(message, Caller("j", "w"), job, step=9)
    assert (found.step, found.part.rank) == (9, 1)
    assert [(each.lease_id, each.until) for each in found.consumed] == [(5, 10), (6, 3)]
    message.step, message.rank = 0, 0
    found = wire.report(message, Caller("j", "w"), job, step=9)
    assert (found.step, found.part.rank) == (0, 0)


def test_every_verdict_and_every_command_has_its_number() -> None:
    assert wire.VERDICT_OF.keys() == set(BarrierVerdict)
    assert wire.KIND_OF.keys() == set(CommandKind)
    for ours, theirs in wire.KIND_OF.items():
        assert pb.CommandKind.Name(theirs) == f"COMMAND_KIND_{ours.name}"
    for ours_, theirs_ in wire.VERDICT_OF.items():
        assert pb.BarrierVerdict.Name(theirs_) == f"BARRIER_VERDICT_{ours_.name}"


def test_an_open_barrier_is_pending() -> None:
    reply = wire.barrier(BarrierState(None, 3, 1, 2, ("w",)))
    assert (reply.released, reply.verdict, list(reply.missing)) == (False, pb.BARRIER_VERDICT_PENDING, ["w"])
