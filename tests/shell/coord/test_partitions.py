"""Jobs divided into partitions over several processes: any process serves any call, and processes come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import msgspec
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.server.authenticator import TokenAuthenticator
from strata.coord.server.partitions import Partitions, check_partitions, partition_of
from strata.coord.server.process import CoordinatorServer
from strata.coord.server.service import CoordinatorService
from strata.coord.server.tokens import Claims, TokenRole, Tokens
from strata.coord.settings import CoordinatorSettings, ServerTls, check_exposure, check_partitioned
from strata.coord.worker.link import CoordinatorLink, Deadline
from strata.coord.worker.settings import WorkerSettings
from tests.shell.coord.running import QUICK, connect, patiently, refused, register, trailing
from tests.shell.coord.test_access import LATER, SECRET, bearer, certificate, tls_files
from tests.support.memory_journal import MemoryJournal

COUNT = 4
LEASE_S = 4.0
Status = grpc.StatusCode


def job_in(partition: int, of: int = COUNT, skip: int = 0) -> str:
    """A job of this partition."""
    found = (name for name in map("job-{}".format, range(10_000)) if partition_of(name, of) == partition)
    for _ in range(skip):
        next(found)
    return next(found)


@dataclass
class Process:
    partitions: Partitions
    server: CoordinatorServer
    stub: pb_grpc.CoordinatorAsyncStub
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.create_task(self.server.serve_until(self._stop))

    async def drain(self) -> None:
        self._stop.set()
        await self.drained()

    async def drained(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving

    @property
    def led(self) -> set[int]:
        return {number for number, service in enumerate(self.partitions.services) if service.leads}


@dataclass
class Installation:
    stack: AsyncExitStack
    journal: MemoryJournal
    tokens: Tokens | None
    tls: ServerTls | None
    credentials: grpc.ChannelCredentials | None
    processes: list[Process] = field(default_factory=list)

    async def add(self, advertise: str = "", lease_s: float = LEASE_S) -> Process:
        clock = SystemClock()
        options = CoordinatorSettings(partitions=COUNT, lease_s=lease_s, job=JobConfig(settle_s=QUICK.settle_s))
        partitions = Partitions(self.journal, clock, options)
        settings = CoordinatorSettings(listen="127.0.0.1:0", drain_s=0, tls=self.tls, advertise=advertise)
        server = CoordinatorServer(partitions, TokenAuthenticator(self.tokens, clock), settings)
        await server.start(lambda line: None)
        channel = await self.stack.enter_async_context(connect(f"127.0.0.1:{server.port}", self.credentials))
        process = Process(partitions, server, pb_grpc.CoordinatorStub(channel))
        self.processes.append(process)
        self.stack.push_async_callback(process.drain)
        return process

    async def balanced(self, *shares: int) -> None:
        """Wait until the processes lead so many partitions each, whichever of them."""
        await until(lambda: sorted(len(each.led) for each in self.processes) == sorted(shares))
        # And until each knows where all the others are.
        for each in self.processes:
            await patiently(each.stub.ListJobs, pb.ListJobsRequest(), metadata=self._operator)

    @property
    def _operator(self) -> tuple[tuple[str, str], ...]:
        return () if self.tokens is None else bearer(self.tokens.issue(Claims("*", TokenRole.OPERATOR, LATER)))


async def until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s, "it never came about"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def installation(
    count: int,
    *,
    tokens: Tokens | None = None,
    tls: ServerTls | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> AsyncIterator[Installation]:
    async with AsyncExitStack() as stack:
        found = Installation(stack, MemoryJournal(SystemClock()), tokens, tls, credentials)
        for _ in range(count):
            await found.add()
        for each in found.processes:
            each.start()
        yield found


async def test_any_process_serves_every_call_of_every_job() -> None:
    async with installation(2) as found:
        await found.balanced(2, 2)
        first, second = found.processes
        for partition in range(COUNT):
            job = job_in(partition)
            leads, other = (first, second) if partition in first.led else (second, first)
            await register(other.stub, "a", "b", job=job)
            assert set(leads.partitions.services[partition].state.jobs[job].members) == {"a", "b"}
            dataset = pb.DatasetInfo(job_id=job, dataset_id="d", worker_id="a", num_samples=20, shard_size=10)
            assert (await other.stub.AckDataset(dataset)).created
            request = pb.ShardRequest(job_id=job, dataset_id="d", worker_id="a", incarnation="a-1")
            assert (await other.stub.GetNextShards(request)).shards
            meet = [
                each.stub.Barrier(pb.BarrierRequest(job_id=job, barrier_id="all", worker_id=name))
                for each, name in ((first, "a"), (second, "b"))
            ]
            assert [each.released for each in await asyncio.gather(*meet)] == [True, True]
            assert (await other.stub.Heartbeat(pb.HeartbeatRequest(job_id=job, worker_id="b"))).generation
            watch = other.stub.WatchJob(pb.WatchJobRequest(job_id=job))
            seen = await watch.read()
            assert isinstance(seen, pb.WatchJobResponse)
            assert {each.worker_id for each in seen.job.workers} == {"a", "b"}
            watch.cancel()
            presence = other.stub.Attach(pb.AttachRequest(job_id=job, worker_id="a"))
            assert isinstance(await presence.read(), pb.AttachResponse)
            await other.stub.IssueCommand(pb.IssueCommandRequest(job_id=job, kind=pb.COMMAND_KIND_DRAIN))
            pushed = await presence.read()
            assert isinstance(pushed, pb.AttachResponse)
            assert [each.kind for each in pushed.commands] == [pb.COMMAND_KIND_DRAIN]
            presence.cancel()
        for each in found.processes:
            listed = (await each.stub.ListJobs(pb.ListJobsRequest())).jobs
            assert [row.job_id for row in listed] == sorted(map(job_in, range(COUNT)))
            for row in listed:
                leader = next(process for process in found.processes if row.partition in process.led)
                assert (partition_of(row.job_id, COUNT), leader.partitions.address) == (row.partition, row.leader)


async def test_an_error_of_the_leader_reaches_the_caller_with_its_reason() -> None:
    async with installation(2) as found:
        await found.balanced(2, 2)
        for partition in range(COUNT):
            for each in found.processes:
                error = await refused(each.stub.Heartbeat(pb.HeartbeatRequest(job_id=job_in(partition), worker_id="x")))
                assert (error.code(), trailing(error)["strata-reason"]) == (Status.NOT_FOUND, "unknown-worker")


async def test_a_batch_for_several_leaders_is_answered_in_its_order() -> None:
    async with installation(2) as found:
        await found.balanced(2, 2)
        for partition in range(COUNT):
            await register(found.processes[0].stub, "w", job=job_in(partition))
        jobs = [job_in(partition) for partition in (3, 0, 2, 1, 0, 3)]
        beats = [pb.HeartbeatRequest(job_id=job, worker_id="w") for job in jobs]
        beats.insert(2, pb.HeartbeatRequest(job_id=job_in(1), worker_id="stranger"))
        for each in found.processes:
            reply = await each.stub.HeartbeatBatch(pb.HeartbeatBatchRequest(heartbeats=beats))
            assert [(one.job_id, one.worker_id) for one in reply.outcomes] == [
                (beat.job_id, beat.worker_id) for beat in beats
            ]
            assert [one.status_code for one in reply.outcomes] == [0, 0, 5, 0, 0, 0, 0]


async def test_a_call_takes_one_hop_and_never_two() -> None:
    async with installation(2) as found:
        await found.balanced(2, 2)
        first, second = found.processes
        job = job_in(min(second.led))
        await register(first.stub, "w", job=job)
        beat, hop = pb.HeartbeatRequest(job_id=job, worker_id="w"), (("strata-forwarded", "127.0.0.1:1"),)
        assert (await second.stub.Heartbeat(beat, metadata=hop)).generation
        error = await refused(first.stub.Heartbeat(beat, metadata=hop))
        assert error.code() is Status.UNAVAILABLE
        assert int(trailing(error)["strata-retry-after-ms"]) > 0


async def test_a_worker_goes_to_the_leader_after_the_first_hop_and_on_when_it_is_gone() -> None:
    async with installation(2) as found:
        await found.balanced(2, 2)
        first, second = found.processes
        job = job_in(min(second.led))
        await register(first.stub, "w", job=job)
        hop, led = (f"127.0.0.1:{each.server.port}" for each in (first, second))
        beat = pb.HeartbeatRequest(job_id=job, worker_id="w")
        given = {address: WorkerSettings(address=address, job=job) for address in (f"{hop},{led}", hop, f"{hop},{hop}")}
        links = {address: CoordinatorLink(each, "w", SystemClock()) for address, each in given.items()}
        for address, link in links.items():
            assert (await link.call(lambda stub: stub.Heartbeat, beat, Deadline(5, 30))).generation
            # Only where it was told that a coordinator is.
            assert link.index == int(led in address)
        await second.drain()
        link = links[f"{hop},{led}"]
        assert (await link.call(lambda stub: stub.Heartbeat, beat, Deadline(5, 30))).generation
        assert link.index == 0
        for each in links.values():
            await each.close()


async def test_tokens_are_checked_by_both_processes() -> None:
    async with installation(2, tokens=SECRET) as found:
        await found.balanced(2, 2)
        first, second = found.processes
        job, other = job_in(min(second.led)), job_in(min(first.led))
        worker = bearer(SECRET.issue(Claims(job, TokenRole.WORKER, LATER, "w")))
        # The token alone names the job and the worker: the process that forwards has to read it too.
        assert (await first.stub.RegisterWorker(pb.WorkerInfo(), metadata=worker)).job_id == job
        assert (await refused(first.stub.Heartbeat(pb.HeartbeatRequest()))).code() is Status.UNAUTHENTICATED
        named = pb.HeartbeatRequest(job_id=other)
        assert (await refused(second.stub.Heartbeat(named, metadata=worker))).code() is Status.PERMISSION_DENIED
        # A process is no more trusted than a worker.
        hop = (("strata-forwarded", first.partitions.address),)
        request = pb.HeartbeatRequest(job_id=job, worker_id="w")
        assert (await refused(second.stub.Heartbeat(request, metadata=hop))).code() is Status.UNAUTHENTICATED
        listed = await first.stub.ListJobs(pb.ListJobsRequest(), metadata=worker)
        assert [each.job_id for each in listed.jobs] == [job]


async def test_processes_call_each_other_by_tls_with_their_own_certificates(tmp_path: Path) -> None:
    authority = certificate("authority")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    tls = tls_files(tmp_path, certificate("server", authority), client_ca=authority)
    tls = msgspec.structs.replace(tls, ca=tmp_path / "ca.pem")
    worker = certificate("worker", authority)
    credentials = grpc.ssl_channel_credentials(authority.pem, worker.key_pem, worker.pem)
    async with installation(2, tls=tls, credentials=credentials) as found:
        await found.balanced(2, 2)
        for partition in range(COUNT):
            for each in found.processes:
                await register(each.stub, "w", job=job_in(partition))


async def test_a_worker_whose_stream_breaks_behind_a_hop_is_lost_at_once() -> None:
    async with installation(2) as found:
        await found.balanced(2, 2)
        first, second = found.processes
        partition = min(second.led)
        job = job_in(partition)
        await register(first.stub, "a", "doomed", job=job)
        presence = first.stub.Attach(pb.AttachRequest(job_id=job, worker_id="doomed"))
        assert isinstance(await presence.read(), pb.AttachResponse)
        presence.cancel()
        await until(lambda: set(second.partitions.services[partition].state.jobs[job].members) == {"a"}, 20.0)


async def test_workers_outlive_the_process_that_forwards_their_streams() -> None:
    async with installation(2) as found:
        await found.balanced(2, 2)
        first, second = found.processes
        partition = min(second.led)
        job = job_in(partition)
        await register(first.stub, "a", "b", job=job)
        presence = first.stub.Attach(pb.AttachRequest(job_id=job, worker_id="b"))
        assert isinstance(await presence.read(), pb.AttachResponse)
        state = second.partitions.services[partition].state
        assert state.soft_of(job).attached == {"b"}
        await first.drain()
        assert (await refused(presence.read())).code() in (Status.UNAVAILABLE, Status.CANCELLED)
        await until(lambda: not state.soft_of(job).attached)
        # Longer than the grace period that follows the break of a worker's own stream.
        await asyncio.sleep(3 * JobConfig().reconnect_grace_s)
        assert set(state.jobs[job].members) == {"a", "b"}
        assert second.led == set(range(COUNT))


async def test_partitions_move_to_a_process_that_joins_and_nothing_is_lost() -> None:
    async with installation(1) as found:
        await found.balanced(COUNT)
        first = found.processes[0]
        for partition in range(COUNT):
            await register(first.stub, "w", job=job_in(partition))
        second = await found.add()
        second.start()
        await found.balanced(2, 2)
        for partition in range(COUNT):
            for each in found.processes:
                job = (await patiently(each.stub.GetJob, pb.GetJobRequest(job_id=job_in(partition)))).job
                assert ([one.worker_id for one in job.workers], job.generation) == (["w"], 1)
        await first.drain()
        await until(lambda: second.led == set(range(COUNT)))
        for partition in range(COUNT):
            await patiently(second.stub.Heartbeat, pb.HeartbeatRequest(job_id=job_in(partition), worker_id="w"))


async def test_a_process_with_the_address_of_another_one_ends_with_the_reason() -> None:
    async with installation(1) as found:
        await found.balanced(COUNT)
        (first,) = found.processes
        second = await found.add(first.partitions.address, lease_s=0.5)
        found.processes.remove(second)
        second.start()
        with pytest.raises(StrataError) as refused:
            await second.drained()
        assert refused.value.code is Code.INVALID
        assert f"advertises {first.partitions.address} and is alive" in refused.value.message
        assert not second.led
        await found.balanced(COUNT)


async def test_a_process_takes_the_address_of_one_that_was_killed() -> None:
    async with installation(0) as found:
        for stream in ("coord/0/process/0", "coord/0/0"):
            await found.journal.lead(stream, "coordinator_dead@127.0.0.1:9", LEASE_S / 2)
        process = await found.add("127.0.0.1:9")
        process.start()
        await found.balanced(COUNT)


async def check(journal: MemoryJournal, partitions: int) -> None:
    await check_partitions(journal, "coord/0", partitions, lease_s=0.2, clock=SystemClock())


async def test_the_number_of_partitions_stays_as_it_was_first() -> None:
    journal = MemoryJournal(SystemClock())
    await check(journal, 8)
    await check(journal, 8)
    for other in (1, 16):
        with pytest.raises(StrataError, match="has 8 partitions, not") as caught:
            await check(journal, other)
        assert caught.value.code is Code.INVALID


async def test_processes_that_start_together_agree_on_one_number() -> None:
    journal = MemoryJournal(SystemClock())
    found = await asyncio.gather(*(check(journal, 2 + number % 2) for number in range(6)), return_exceptions=True)
    assert sorted(isinstance(each, StrataError) for each in found) == [False] * 3 + [True] * 3


async def test_an_installation_with_one_partition_stays_one() -> None:
    journal = MemoryJournal(SystemClock())
    await check(journal, 1)
    assert await journal.streams() == []
    lead = await journal.lead("coord/0", "coordinator", 60.0)
    with pytest.raises(StrataError, match="a coordinator with one partition leads"):
        await check(journal, 8)
    await journal.append("coord/0", lead.epoch, 0, [b"\x81\xa4type\xaaJobCreated"])
    with pytest.raises(StrataError, match="has one partition, not 8"):
        await check(journal, 8)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (CoordinatorSettings(partitions=2), "need PostgreSQL"),
        (CoordinatorSettings(partitions=2, database="postgresql://db/x", listen="0.0.0.0:7070"), "cannot reach"),
        (
            CoordinatorSettings(
                partitions=2, database="postgresql://db/x", tls=ServerTls(certificate=Path("c"), key=Path("k"))
            ),
            "cannot check each other's certificates",
        ),
    ],
)
def test_settings_that_several_processes_cannot_share_are_refused(settings: CoordinatorSettings, reason: str) -> None:
    with pytest.raises(StrataError, match=reason):
        check_partitioned(settings)


def test_an_advertised_address_is_exposed_like_one_that_it_listens_on() -> None:
    with pytest.raises(StrataError, match="in the clear"):
        check_exposure(CoordinatorSettings(partitions=2, advertise="10.0.0.1:7070"))


class StuckJournal(MemoryJournal):
    """Its database does not answer a leader that resigns, as one that is cut off."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def resign(self, stream: str, epoch: int) -> None:
        self.asked.set()
        await self.answer.wait()
        await super().resign(stream, epoch)


async def test_a_process_that_leads_again_while_it_could_not_resign_goes_on_leading() -> None:
    journal = StuckJournal()
    service = CoordinatorService(journal, SystemClock(), CoordinatorSettings(lease_s=LEASE_S))

    async def nothing() -> None:
        pass

    first = asyncio.create_task(service.lead("me", nothing))
    await until(lambda: service.leads)
    giving = asyncio.create_task(service.give_away())
    await journal.asked.wait()
    await first
    again = asyncio.create_task(service.lead("me", nothing))
    await until(lambda: service.leads)
    journal.answer.set()
    await giving
    assert service.leads
    assert service.state.leader_epoch == 2
    await service.drain()
    await again


async def test_steps_that_no_fact_could_hold_are_refused() -> None:
    async with installation(1) as one:
        await one.balanced(COUNT)
        (process,) = one.processes
        await register(process.stub, "w", job=job_in(0))
        for field_name in ("step", "checkpoint_asked_step", "checkpoint_stride"):
            beat = pb.HeartbeatRequest(worker_id="w", job_id=job_in(0), step=1, checkpoint_step=0)
            setattr(beat, field_name, (1 << 64) - 1)
            error = await refused(process.stub.Heartbeat(beat))
            assert error.code() is Status.INVALID_ARGUMENT
