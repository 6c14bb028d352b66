"""The contract message by message: what a worker without any library meets, through each language's own stubs."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.coord.pb import coordinator_pb2 as pb
from tests.conformance.coordinator.drivers import Answer, Driver
from tests.conformance.coordinator.fleet import MARKS, Fleet

pytestmark = MARKS


async def define(driver: Driver, fleet: Fleet, worker: str) -> None:
    request = {"dataset_id": "corpus", "num_samples": 30, "shard_size": 10}
    assert (await driver.call("AckDataset", request, job=fleet.job, worker=worker))["created"]


async def test_a_worker_that_knows_only_the_first_fields_can_live(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    who = {"job": fleet.job, "worker": "w"}

    async def call(method: str, **request: object) -> Answer:
        return await driver.call(method, request, **who)

    config = await call("RegisterWorker", worker_id="w", ip="127.0.0.1", port=4000, gpu_count=2)
    assert config["heartbeat_interval_ms"] == 1000
    assert config["training_parameters"] == {"learning_rate": "0.1", "name": "größer"}
    assert config["world_size"] == 1
    files = {fleet.folder / "a.txt": 1_500, fleet.folder / "b.txt": 1_000}
    for path, lines in files.items():
        path.write_text("".join(f"{path.name} {number}\n" for number in range(lines)), encoding="utf-8")
    defined = await call(
        "AckDataset", dataset_id="corpus", file_paths=[str(path) for path in files], file_samples=[*files.values()]
    )
    assert (defined["created"], defined["num_shards"]) == (True, "3")

    # All files one after the other: that is what the indexes count.
    everything = [line for path in files for line in path.read_text("utf-8").splitlines()]
    read: list[str] = []
    while not (assigned := await call("GetNextShards", dataset_id="corpus", epoch=0)).get("end_of_epoch"):
        lines_of_shard = everything[int(assigned.get("start_index", "0")) : int(assigned["end_index"])]
        assert {line.split()[0] for line in lines_of_shard} == {Path(each).name for each in assigned["file_paths"]}
        read += lines_of_shard
    assert sorted(read) == sorted(everything)

    resources = {
        "cpu_percent": 12.5,
        "memory_used_bytes": str(2**60),
        "gpu_metrics": [{"index": 1, "power_watts": 250}],
    }
    await call("Heartbeat", worker_id="w", status="WORKER_STATUS_TRAINING", resources=resources)
    (shown,) = (await fleet.stub.GetJob(pb.GetJobRequest(job_id=fleet.job))).job.workers
    assert (shown.status, shown.gpu_count) == (pb.WORKER_STATUS_TRAINING, 2)
    assert (shown.resources.cpu_percent, shown.resources.memory_used_bytes) == (12.5, 2**60)
    assert shown.resources.gpu_metrics[0].power_watts == 250

    assert (await call("Barrier", barrier_id="epoch_0", step=3))["released"]
    stored = await call("ReportCheckpoint", checkpoint_id="c", path="mem://c", size_bytes="7")
    assert (stored["committed"], stored["step"]) == (True, "3")
    recovery = await call("RequestRecovery")
    assert recovery["checkpoint"]["parts"] == [{"uri": "mem://c", "size_bytes": "7"}]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"file_paths": ["a", "b"], "file_samples": ["1"]}, "2 file_paths need as many file_samples, not 1"),
        ({"file_samples": ["1", "2"]}, "0 file_paths need as many file_samples, not 2"),
        ({"file_paths": ["a"]}, "1 file_paths need as many file_samples, not 0"),
        ({"file_paths": ["a"], "file_samples": ["1"], "num_samples": "1"}, "in place of files and num_samples"),
    ],
)
async def test_a_dataset_that_is_defined_twice_or_by_half_is_refused(
    fleet: Fleet, sdk: str, request_: Answer, problem: str
) -> None:
    driver = await fleet.start(sdk)
    await driver.call("RegisterWorker", {"worker_id": "w"}, job=fleet.job)
    metadata = {"strata-job": fleet.job, "strata-worker": "w"}
    error = await driver.refused(
        "call", method="AckDataset", request={"dataset_id": "corpus", **request_}, metadata=metadata
    )
    assert error.code == "INVALID_ARGUMENT"
    assert problem in error.message


async def test_a_command_reaches_a_minimal_worker_once(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    who = {"job": fleet.job, "worker": "w"}
    await driver.call("RegisterWorker", {"worker_id": "w"}, **who)
    await fleet.tell(pb.COMMAND_KIND_STOP)
    told = [(await driver.call("Heartbeat", {"worker_id": "w"}, **who)).get("command") for _ in range(2)]
    assert told == ["COMMAND_KIND_STOP", None]
    await fleet.until(lambda job: not job.commands)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("GetNextShards", {"dataset_id": "corpus"}),
        ("AckDataset", {"dataset_id": "corpus"}),
        ("Barrier", {"barrier_id": "here"}),
        ("ReportCheckpoint", {"checkpoint_id": "c"}),
        ("RequestRecovery", {}),
        ("LeaveWorker", {}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
async def test_a_call_before_registration_is_refused(fleet: Fleet, sdk: str, method: str, request_: Answer) -> None:
    driver = await fleet.start(sdk)
    await driver.call("RegisterWorker", {"worker_id": "somebody"}, job=fleet.job)
    metadata = {"strata-job": fleet.job, "strata-worker": "nobody"}
    error = await driver.refused("call", method=method, request=request_, metadata=metadata)
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "not-registered")


async def test_a_heartbeat_of_an_unknown_worker_is_not_found(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    await driver.call("RegisterWorker", {"worker_id": "somebody"}, job=fleet.job)
    request = {"worker_id": "nobody", "job_id": fleet.job}
    error = await driver.refused("call", method="Heartbeat", request=request)
    assert (error.code, error.reason) == ("NOT_FOUND", "unknown-worker")
    batch = {"heartbeats": [request, {"worker_id": "somebody", "job_id": fleet.job}]}
    outcomes = (await driver.call("HeartbeatBatch", batch))["outcomes"]
    assert [each.get("status_code", 0) for each in outcomes] == [5, 0]


async def test_an_ack_counts_only_under_the_current_lease(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    who = {"job": fleet.job, "worker": "w"}
    await driver.call("RegisterWorker", {"worker_id": "w", "incarnation": "first"}, **who)
    await define(driver, fleet, "w")
    ask = {"dataset_id": "corpus", "explicit_acks": True}
    old = await driver.call("GetNextShards", ask, **who)
    # More than a JSON number can say exactly in every language.
    assert int(old["lease_id"]) > 2**32
    # The same worker in a new life, which holds nothing: its shards went back.
    await driver.call("RegisterWorker", {"worker_id": "w", "incarnation": "second", "elastic": True}, **who)
    late = await driver.call("GetNextShards", {**ask, "acks": [{"lease_id": old["lease_id"]}]}, **who)
    assert late["rejected_leases"] == [old["lease_id"]]
    assert late["lease_id"] != old["lease_id"]
    current = await driver.call("GetNextShards", {**ask, "acks": [{"lease_id": late["lease_id"]}]}, **who)
    assert "rejected_leases" not in current
    job = (await fleet.stub.GetJob(pb.GetJobRequest(job_id=fleet.job))).job
    assert job.datasets[0].open_epochs[0].done_shards == 1


async def test_a_call_of_another_generation_is_told_the_current_one(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    config = await driver.call("RegisterWorker", {"worker_id": "w"}, job=fleet.job)
    await define(driver, fleet, "w")
    stale = int(config["generation"]) + 7
    error = await driver.refused(
        "call",
        method="GetNextShards",
        request={"dataset_id": "corpus", "generation": str(stale)},
        metadata={"strata-job": fleet.job, "strata-worker": "w"},
    )
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "stale-generation")
    assert error.detail["generation"] == int(config["generation"])
