"""Attacks on the coordinator: who calls, as whom, with what, and for how long. The calls come from the contract."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from strata.base.clock import SystemClock
from strata.base.secret import Secret
from strata.coord.core.barriers import MAX_OPEN
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.grpc_handler import MOST_BYTES, MOST_BYTES_OF, has_more_fields
from strata.coord.server.tokens import Claims, RevokedTokens, TokenRole, Tokens
from strata.coord.settings import CoordinatorSettings, ServerTls, check_exposure
from tests.shell.coord.running import CoordinatorProcess, Running, connect, in_process, refused
from tests.shell.coord.test_access import LATER, SECRET, bearer, token
from tests.support.ports import port_of, reserve_port

Status = grpc.StatusCode
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Coordinator"]
METHODS: Final = {method.name: method for method in SERVICE.methods}

# The one table of who may call what; a call of the contract that is missing here fails the suite.
ROLE_OF: Final = {
    "RegisterWorker": "worker",
    "Heartbeat": "worker",
    "HeartbeatBatch": "worker",
    "GetNextShards": "worker",
    "AckDataset": "worker",
    "Barrier": "worker",
    "ReportCheckpoint": "worker",
    "RequestRecovery": "worker",
    "LeaveWorker": "worker",
    "Attach": "worker",
    "GetJob": "both",
    "WatchJob": "both",
    "IssueCommand": "operator",
    "ListJobs": "both",
    "CreateJob": "operator",
    "UpdateJob": "operator",
    "ResetJob": "operator",
    "DeleteJob": "operator",
    "ListEvents": "both",
}

Try = Callable[[int], None]


@pytest.fixture
async def guarded() -> AsyncIterator[Running]:
    async with in_process(tokens=SECRET) as running:
        yield running


async def status_of(running: Running, name: str, metadata: Any, **fields: Any) -> grpc.StatusCode:
    """What a call of this name is answered with."""
    method = METHODS[name]
    request = GetMessageClass(method.input_type)(
        **{key: value for key, value in fields.items() if key in method.input_type.fields_by_name}
    )
    try:
        call = getattr(running.stub, name)(request, metadata=metadata, timeout=5)
        if method.server_streaming:
            await call.read()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Status.OK


FORGED: Final = {
    "no token": (),
    "an empty bearer": (("authorization", "Bearer "),),
    "Basic authorization": (("authorization", "Basic b3BlcmF0b3I6b3BlcmF0b3I="),),
    "an empty signature": bearer(token().rpartition(".")[0] + "."),
    "a forged signature": bearer(token()[:-4] + "AAAA"),
    "another secret": bearer(Tokens(Secret("t" * 32)).issue(Claims("j", TokenRole.WORKER, LATER))),
    "claims of another token": bearer(
        f"{token(role=TokenRole.OPERATOR).rpartition('.')[0]}.{token().rpartition('.')[2]}"
    ),
    "algorithm none": bearer("eyJhbGciOiJub25lIn0.eyJqb2IiOiJqIn0."),
    "an expired token": bearer(token(expires_s=1)),
}


@pytest.mark.attack("coordinator: who calls", "every call of the contract with a token that is none")
@pytest.mark.parametrize("kind", FORGED)
async def test_no_call_is_served_to(kind: str, guarded: Running, tries: Try) -> None:
    for name in METHODS:
        assert await status_of(guarded, name, FORGED[kind]) is Status.UNAUTHENTICATED, name
        tries(1)
    assert not guarded.service.state.jobs


@pytest.mark.attack("coordinator: who calls", "a token of 10 KB and one that is no text")
async def test_a_huge_token_is_refused(guarded: Running, tries: Try) -> None:
    for name in METHODS:
        # gRPC itself refuses metadata of this size.
        found = await status_of(guarded, name, bearer("x" * 10_000))
        assert found in (Status.UNAUTHENTICATED, Status.RESOURCE_EXHAUSTED), name
        tries(1)


@pytest.mark.attack("coordinator: who calls", "a worker's token on the calls of operators")
async def test_a_worker_is_no_operator(guarded: Running, tries: Try) -> None:
    assert ROLE_OF.keys() == METHODS.keys()
    for name in (name for name, role in ROLE_OF.items() if role == "operator"):
        assert await status_of(guarded, name, bearer(token())) is Status.PERMISSION_DENIED, name
        tries(1)


@pytest.mark.attack("coordinator: who calls", "an operator's token on the calls of workers")
async def test_an_operator_is_no_worker(guarded: Running, tries: Try) -> None:
    for name in (name for name, role in ROLE_OF.items() if role == "worker"):
        assert await status_of(guarded, name, bearer(token(role=TokenRole.OPERATOR))) is Status.PERMISSION_DENIED, name
        tries(1)


@pytest.mark.attack("coordinator: who calls", "the token of job b for job a")
@pytest.mark.parametrize("way", ["field", "metadata"])
async def test_a_token_is_good_for_one_job(way: str, guarded: Running, tries: Try) -> None:
    await guarded.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), metadata=bearer(token("a")))
    for name, role in ROLE_OF.items():
        foreign = token("b", TokenRole.OPERATOR if role == "operator" else TokenRole.WORKER)
        if way == "metadata":
            found = await status_of(guarded, name, bearer(foreign, job="a"), worker_id="w")
        elif "job_id" in METHODS[name].input_type.fields_by_name:
            found = await status_of(guarded, name, bearer(foreign), job_id="a", worker_id="w", kind=2)
        else:
            continue
        assert found is Status.PERMISSION_DENIED, name
        tries(1)


@pytest.mark.attack("coordinator: who calls", "job a inside a batch of heartbeats of job b")
async def test_a_batch_is_checked_one_by_one(guarded: Running) -> None:
    await guarded.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), metadata=bearer(token("a")))
    batch = pb.HeartbeatBatchRequest(heartbeats=[pb.HeartbeatRequest(worker_id="w", job_id="a")])
    found = await guarded.stub.HeartbeatBatch(batch, metadata=bearer(token("b")))
    assert [each.status_code for each in found.outcomes] == [Status.PERMISSION_DENIED.value[0]]


@pytest.mark.attack("coordinator: who calls", "a token bound to worker w1 acts for w2")
@pytest.mark.parametrize("way", ["field", "metadata"])
async def test_a_bound_token_is_good_for_one_worker(way: str, guarded: Running, tries: Try) -> None:
    await guarded.stub.RegisterWorker(pb.WorkerInfo(worker_id="w2"), metadata=bearer(token()))
    bound = token(worker="w1")
    for name in (name for name, role in ROLE_OF.items() if role == "worker" and name != "HeartbeatBatch"):
        metadata = bearer(bound) if way == "field" else bearer(bound, worker="w2")
        fields = {"worker_id": "w2"} if way == "field" else {}
        if way == "field" and "worker_id" not in METHODS[name].input_type.fields_by_name:
            continue
        assert await status_of(guarded, name, metadata, **fields) is Status.PERMISSION_DENIED, name
        tries(1)


@pytest.mark.attack("coordinator: who calls", "the operator of another job stops this one")
async def test_another_jobs_operator_stops_nothing(guarded: Running) -> None:
    await guarded.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), metadata=bearer(token("a")))
    stop = pb.IssueCommandRequest(kind=pb.COMMAND_KIND_STOP, job_id="a")
    error = await refused(guarded.stub.IssueCommand(stop, metadata=bearer(token("b", TokenRole.OPERATOR))))
    assert error.code() is Status.PERMISSION_DENIED
    beat = await guarded.stub.Heartbeat(pb.HeartbeatRequest(worker_id="w"), metadata=bearer(token("a")))
    assert not beat.commands


@pytest.mark.proves("Never again: a client certificate alone was worker and operator of every job")
@pytest.mark.attack("coordinator: who calls", "a client certificate alone, as worker and operator of every job")
def test_a_client_certificate_is_no_role() -> None:
    tls = ServerTls(certificate=Path("c"), key=Path("k"), client_ca=Path("a"))
    with pytest.raises(Exception, match="names no job and no role"):
        check_exposure(CoordinatorSettings(listen="0.0.0.0:7070", tls=tls))


@pytest.mark.attack(
    "coordinator: who calls",
    "another user of the machine stops a job of a coordinator without tokens",
    by_design=(
        "docs/coordinator-control.md",
        "Without a secret every user of the machine may call it as any worker or operator",
    ),
)
async def test_loopback_without_tokens_is_open() -> None:
    async with in_process() as running:
        await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"))
        found = await running.stub.IssueCommand(pb.IssueCommandRequest(kind=pb.COMMAND_KIND_STOP))
        assert list(found.worker_ids) == ["w"]


@pytest.mark.attack(
    "coordinator: who calls",
    "health and reflection without a token",
    by_design=(
        "docs/coordinator-control.md",
        "Health and reflection need no token: they show the names of calls only.",
    ),
)
async def test_reflection_shows_names_only(guarded: Running) -> None:
    assert await raw(guarded.channel, "/grpc.health.v1.Health/Check", b"") == b"\x08\x01"


@pytest.mark.proves("Never again: streams outlived their token, tokens could not be revoked")
@pytest.mark.attack("coordinator: streams", "a stream goes on after its token expired")
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.server_streaming])
async def test_a_stream_ends_with_its_token(name: str, guarded: Running) -> None:
    await guarded.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), metadata=bearer(token()))
    short = token(expires_s=round(time.time()) + 2)
    assert await ends_with(guarded, name, short) < 5


@pytest.mark.proves("Never again: streams outlived their token, tokens could not be revoked")
@pytest.mark.attack("coordinator: streams", "a stream goes on after its token was revoked")
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.server_streaming])
async def test_a_stream_ends_when_its_token_is_revoked(name: str, tmp_path: Path) -> None:
    file = tmp_path / "revoked"
    async with in_process(tokens=SECRET, revoked=RevokedTokens(file, SystemClock())) as running:
        await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), metadata=bearer(token()))
        asyncio.get_running_loop().call_later(0.5, file.write_text, "t1\n")
        revoked = SECRET.issue(Claims("j", TokenRole.WORKER, LATER, id="t1"))
        assert await ends_with(running, name, revoked) < 5


async def ends_with(running: Running, name: str, secret: str) -> float:
    """How long a stream lives that nothing else ends; it must be refused for its token."""
    began_s = time.monotonic()
    request = GetMessageClass(METHODS[name].input_type)(worker_id="w") if name == "Attach" else pb.WatchJobRequest()
    call = getattr(running.stub, name)(request, metadata=bearer(secret), timeout=20)
    async for _ in _until_error(call):
        pass
    assert await call.code() is Status.UNAUTHENTICATED
    return time.monotonic() - began_s


async def _until_error(call: Any) -> AsyncIterator[Any]:
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for message in call:
            yield message


async def raw(channel: grpc.aio.Channel, path: str, body: bytes, metadata: Any = ()) -> bytes:
    """A call with these very bytes as its message."""
    call: Any = channel.unary_unary(path)
    reply: bytes = await call(body, metadata=metadata, timeout=20)
    return reply


class RawCoordinator:
    """A real process that asks for tokens, and its memory."""

    def __init__(self, process: CoordinatorProcess) -> None:
        self.address = process.address
        self._pid = process.process.pid

    def resident_mib(self, what: str = "VmRSS") -> int:
        """`VmHWM`: the most that it ever was."""
        found = re.search(rf"{what}:\s+(\d+)", Path(f"/proc/{self._pid}/status").read_text(encoding="utf-8"))
        assert found is not None
        return int(found[1]) >> 10

    async def send(self, name: str, body: bytes, metadata: Any = ()) -> grpc.StatusCode:
        async with connect(self.address) as channel:
            try:
                await raw(channel, f"/{SERVICE.full_name}/{name}", body, metadata)
            except grpc.aio.AioRpcError as error:
                return error.code()
        return Status.OK


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[RawCoordinator]:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("s" * 32, encoding="utf-8")
    with reserve_port() as reserved:
        settings = {"STRATA_COORDINATOR_TOKEN_SECRET_FILE": str(secret)}
        coordinator = CoordinatorProcess(f"sqlite:{tmp_path}/coord.db", port_of(reserved), settings)
        try:
            await coordinator.start()
            await coordinator.serving()
            yield RawCoordinator(coordinator)
        finally:
            await coordinator.close()


@pytest.mark.proves("Never again: 16 MB without a token cost 1.1 GB of memory, kept")
@pytest.mark.attack("coordinator: resources", "five times 16 MB of empty heartbeats without a token")
async def test_a_message_without_a_token_is_not_read(process: RawCoordinator, tries: Try) -> None:
    body = b"\x0a\x00" * 8_000_000
    before = process.resident_mib()
    found = await asyncio.gather(*(process.send("HeartbeatBatch", body) for _ in range(5)))
    tries(5)
    assert set(found) == {Status.UNAUTHENTICATED}
    assert process.resident_mib() - before < 64


@pytest.mark.proves("Never again: 16 MB without a token cost 1.1 GB of memory, kept")
@pytest.mark.attack("coordinator: resources", "16 MB of empty elements with a worker's token")
@pytest.mark.parametrize("name", sorted(METHODS))
async def test_a_message_of_many_elements_is_refused_before_it_is_built(name: str, process: RawCoordinator) -> None:
    roles = {"operator": TokenRole.OPERATOR}
    metadata = bearer(token(role=roles.get(ROLE_OF[name], TokenRole.WORKER)))
    tag = b"\x7a\x00" if name == "AckDataset" else b"\x0a\x00"
    before = process.resident_mib()
    assert await process.send(name, tag * 8_000_000, metadata) is Status.INVALID_ARGUMENT
    assert process.resident_mib() - before < 96


@pytest.mark.attack("coordinator: resources", "4 MB of empty elements below one heartbeat, with a worker's token")
async def test_elements_below_a_heartbeat_cost_little(process: RawCoordinator, tries: Try) -> None:
    before = process.resident_mib()
    # Three bytes each.
    for count in (660_000, 1_330_000):
        beat = pb.HeartbeatRequest(progress=[pb.LeaseProgress()] * count)
        body = pb.HeartbeatBatchRequest(heartbeats=[beat]).SerializeToString()
        found = await process.send("HeartbeatBatch", body, bearer(token()))
        assert found is (Status.OK if len(body) <= MOST_BYTES_OF["HeartbeatBatch"] else Status.INVALID_ARGUMENT)
        tries(1)
    assert process.resident_mib("VmHWM") - before < 48


@pytest.mark.attack("coordinator: resources", "one byte more than a message may have")
async def test_a_message_has_a_limit(guarded: Running) -> None:
    body = b"\x0a\x00" * (MOST_BYTES // 2 + 1)
    error = await refused(raw(guarded.channel, f"/{SERVICE.full_name}/RegisterWorker", body, bearer(token())))
    assert error.code() is Status.INVALID_ARGUMENT
    assert f"{MOST_BYTES:,}" in (error.details() or "")


@pytest.mark.attack("coordinator: resources", "a message that lies about the length of its elements")
@pytest.mark.parametrize(
    "body",
    [b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" + b"\xff" * 20, b"\xff" * 40, b"\x0b", b"\x0a\x05ab", b"\x09ab"],
    ids=["beyond the end", "an endless length", "an endless tag", "an open group", "cut off", "a short fixed field"],
)
async def test_a_broken_message_is_an_invalid_one(body: bytes, guarded: Running) -> None:
    assert has_more_fields(body * 1000, 2_000_000) is False
    path = f"/{SERVICE.full_name}/HeartbeatBatch"
    error = await refused(raw(guarded.channel, path, body * 10_000, bearer(token())))
    assert error.code() is Status.INVALID_ARGUMENT


@pytest.mark.attack("coordinator: resources", "labels of 5 MB and ids of 1 MB")
async def test_texts_have_limits(guarded: Running, tries: Try) -> None:
    long = "x" * (1 << 20)
    requests = [pb.WorkerInfo(worker_id="w", labels={"a": long * 5}), pb.WorkerInfo(worker_id=long)]
    requests.append(pb.WorkerInfo(worker_id="w", incarnation=long[: 1 << 19]))
    for request in requests:
        error = await refused(guarded.stub.RegisterWorker(request, metadata=bearer(token()), timeout=10))
        assert error.code() is Status.INVALID_ARGUMENT
        tries(1)
    assert not guarded.service.state.jobs


@pytest.mark.attack("coordinator: resources", "a weight that is no number of samples")
@pytest.mark.parametrize("weight", [math.inf, math.nan, -1.0], ids=str)
async def test_a_weight_is_a_number(weight: float, guarded: Running) -> None:
    request = pb.WorkerInfo(worker_id="w", weight=weight)
    error = await refused(guarded.stub.RegisterWorker(request, metadata=bearer(token()), timeout=10))
    assert error.code() is Status.INVALID_ARGUMENT


DATASETS: Final = {
    "a hundred million shards": pb.DatasetInfo(dataset_id="d", num_samples=10**8, shard_size=1),
    "a shard more than a million": pb.DatasetInfo(dataset_id="d", num_samples=10**6 + 1, shard_size=1),
    "2**31 buckets": pb.DatasetInfo(dataset_id="d", num_samples=100, shard_size=1, buckets=1 << 31),
    "buckets that are no power of two": pb.DatasetInfo(dataset_id="d", num_samples=100, shard_size=1, buckets=3),
}


@pytest.mark.proves("Never again: a dataset of 10⁸ shards stopped all jobs for 24 s")
@pytest.mark.attack("coordinator: resources", "a dataset that stops all jobs while its order is computed")
@pytest.mark.parametrize("kind", DATASETS)
async def test_a_dataset_is_bounded(kind: str, guarded: Running) -> None:
    metadata = bearer(token(), worker="w")
    await guarded.stub.RegisterWorker(pb.WorkerInfo(), metadata=metadata)
    error = await refused(guarded.stub.AckDataset(DATASETS[kind], metadata=metadata, timeout=10))
    assert error.code() is Status.INVALID_ARGUMENT


@pytest.mark.attack("coordinator: resources", "the largest dataset that is allowed stops nobody for long")
async def test_the_largest_dataset_is_quick(guarded: Running) -> None:
    metadata = bearer(token(), worker="w")
    await guarded.stub.RegisterWorker(pb.WorkerInfo(), metadata=metadata)
    await guarded.stub.AckDataset(pb.DatasetInfo(dataset_id="d", num_samples=10**6, shard_size=1), metadata=metadata)
    began_s = time.monotonic()
    found = await guarded.stub.GetNextShards(pb.ShardRequest(dataset_id="d", epoch=0), metadata=metadata, timeout=20)
    assert found.shards
    assert time.monotonic() - began_s < 5


@pytest.mark.attack("coordinator: resources", "a million shards and 1.5 million leases in one call")
async def test_a_call_for_shards_is_bounded(guarded: Running, tries: Try) -> None:
    metadata = bearer(token(), worker="w")
    await guarded.stub.RegisterWorker(pb.WorkerInfo(), metadata=metadata)
    await guarded.stub.AckDataset(pb.DatasetInfo(dataset_id="d", num_samples=10_000, shard_size=1), metadata=metadata)
    many = pb.ShardRequest(dataset_id="d", epoch=0, max_shards=1_000_000, explicit_acks=True)
    assert len((await guarded.stub.GetNextShards(many, metadata=metadata, timeout=10)).shards) <= 4_096
    held = pb.ShardRequest(dataset_id="d", epoch=0, explicit_acks=True, held_leases=range(1_500_000))
    assert (await refused(guarded.stub.GetNextShards(held, metadata=metadata))).code() is Status.INVALID_ARGUMENT
    tries(2)


@pytest.mark.attack("coordinator: resources", "barriers without end")
async def test_open_barriers_are_bounded(guarded: Running, tries: Try) -> None:
    metadata = bearer(token(), worker="w")
    await guarded.stub.RegisterWorker(pb.WorkerInfo(), metadata=metadata)
    await guarded.stub.RegisterWorker(pb.WorkerInfo(), metadata=bearer(token(), worker="x"))
    found = [
        await status_of(guarded, "Barrier", metadata, barrier_id=f"b{number}", wait=False)
        for number in range(MAX_OPEN + 20)
    ]
    tries(len(found))
    assert found.count(Status.OK) == MAX_OPEN
    assert set(found) == {Status.OK, Status.RESOURCE_EXHAUSTED}


@pytest.mark.attack("coordinator: files", "a secret of the tokens that others can read")
async def test_a_readable_secret_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32, encoding="utf-8")
    secret.chmod(0o644)
    with reserve_port() as reserved:
        settings = {"STRATA_COORDINATOR_TOKEN_SECRET_FILE": str(secret)}
        coordinator = CoordinatorProcess(f"sqlite:{tmp_path}/coord.db", port_of(reserved), settings)
        await coordinator.start()
        assert await asyncio.wait_for(coordinator.process.wait(), 20) != 0
