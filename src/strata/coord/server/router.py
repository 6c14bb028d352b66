"""Routes calls where there are several partitions: served here if this process leads the job, else forwarded one hop,
with the connections to peers and their health checks.

The caller is authenticated here and, by the same metadata, again by the leader. A forwarded call that meets a process
which does not lead is UNAVAILABLE and never forwarded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from strata.base.errors import StrataError
from strata.coord.grpc_options import CLIENT_OPTIONS
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.authenticator import Metadata, TokenAuthenticator
from strata.coord.server.grpc_handler import MAX_BATCH, STATUS_OF, number, trailing
from strata.coord.server.partitions import Partitions
from strata.coord.server.service import not_leading
from strata.coord.server.servicer import FORWARDED, STREAMS, Context, Handler, Servicer, forwarder_of
from strata.coord.server.wire import Identity

PASSED_ON: Final = frozenset({"authorization", "strata-job", "strata-worker"})
"""Metadata of the caller that the leader gets too."""
LISTED: Final = "strata-partitions"
"""Metadata of a forwarded ListJobs: the partitions to list, with commas between."""
LEADER: Final = "strata-leader"
"""Trailing metadata of a call that was forwarded: where its leader is, so that the caller can save the hop."""
CALLS_PER_CHANNEL: Final = 2_000
"""Half of the calls that a connection carries at once (see `grpc.max_concurrent_streams`)."""
HEALTH_S: Final = 1.0
OPTIONS: Final = (*CLIENT_OPTIONS, ("grpc.min_reconnect_backoff_ms", 2_000))
_PREFIX: Final = f"/{pb.DESCRIPTOR.services_by_name['Coordinator'].full_name}/"


@dataclass
class _Connection:
    channel: grpc.aio.Channel
    calls: int = 0


class Peers:
    """Connections to the other processes of the installation, opened when they are needed."""

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._credentials = credentials
        self._connections: dict[str, list[_Connection]] = {}
        self._streams: set[Any] = set()
        self._checks: dict[str, asyncio.Task[bool]] = {}

    async def call(
        self, address: str, name: str, request: Message, timeout_s: float | None, metadata: Metadata
    ) -> bytes:
        """The encoded reply."""
        async with self._connection(address) as channel:
            method: Any = channel.unary_unary(_PREFIX + name, request_serializer=_serialize)
            reply: bytes = await method(request, timeout=timeout_s, metadata=metadata)
            return reply

    async def stream(
        self, address: str, name: str, request: Message, timeout_s: float | None, metadata: Metadata
    ) -> AsyncGenerator[bytes, None]:
        async with self._connection(address) as channel:
            method: Any = channel.unary_stream(_PREFIX + name, request_serializer=_serialize)
            call: Any = method(request, timeout=timeout_s, metadata=metadata)
            self._streams.add(call)
            try:
                async for message in call:
                    yield message
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # `end_streams` has cancelled the call, and no one this task: the caller is still there.
                raise not_leading() from None
            finally:
                self._streams.discard(call)
                call.cancel()

    async def is_serving(self, address: str) -> bool:
        """Says whether the process there serves. Checks of many streams at once share one call."""
        check = self._checks.get(address)
        if check is None:
            check = self._checks[address] = asyncio.create_task(self._check(address))
            check.add_done_callback(lambda _: self._checks.pop(address, None))
        return await asyncio.shield(check)

    async def _check(self, address: str) -> bool:
        async with self._connection(address) as channel:
            method: Any = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=_serialize,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            try:
                found = await method(health_pb2.HealthCheckRequest(), timeout=HEALTH_S)
            except grpc.aio.AioRpcError:
                return False
        return bool(found.status == health_pb2.HealthCheckResponse.SERVING)

    def end_streams(self) -> None:
        """This process drains: the workers whose streams it forwards go on at another one."""
        for call in self._streams:
            call.cancel()

    async def close(self) -> None:
        for connections in self._connections.values():
            for connection in connections:
                await connection.channel.close()
        self._connections.clear()

    @asynccontextmanager
    async def _connection(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        connections = self._connections.setdefault(address, [])
        found = next((each for each in connections if each.calls < CALLS_PER_CHANNEL), None)
        if found is None:
            found = _Connection(self._open(address))
            connections.append(found)
        found.calls += 1
        try:
            yield found.channel
        finally:
            found.calls -= 1

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=OPTIONS)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


class PartitionRouter:
    """The calls of the contract, like those of a `Servicer`, for all partitions."""

    def __init__(self, partitions: Partitions, authenticator: TokenAuthenticator, peers: Peers) -> None:
        self._partitions = partitions
        self._authenticator = authenticator
        self._peers = peers
        self._servicers = [Servicer(service, authenticator, self._is_hop_broken) for service in partitions.services]
        self.check_access = self._servicers[0].check_access
        special: dict[str, Handler] = {"HeartbeatBatch": self._heartbeat_batch, "ListJobs": self._list_jobs}
        self.calls: Final[Mapping[str, Handler]] = {
            name: special.get(name) or self._routed(name) for name in self._servicers[0].calls
        }

    def _routed(self, name: str) -> Handler:
        forward = self._forward_stream if name in STREAMS else self._forward

        async def route(request: Any, context: Context) -> Any:
            if isinstance(request, StrataError):
                return await _abort(context, request)
            try:
                partition = self._partitions.find(self._identify(name, context).job_of(request.job_id))
                return await self._serve(name, partition, request, context, forward)
            except StrataError as error:
                await _abort(context, error)

        return route

    async def _serve(
        self,
        name: str,
        partition: int,
        request: Any,
        context: Context,
        forward: Callable[[str, str, Any, Context], Awaitable[Any]],
    ) -> Any:
        if self._partitions.services[partition].leads:
            return await self._servicers[partition].calls[name](request, context)
        return await forward(self._leader(partition, context), name, request, context)

    def _identify(self, name: str, context: Context) -> Identity:
        return self._authenticator.identify(_metadata(context), self._servicers[0].roles[name])

    def _leader(self, partition: int, context: Context) -> str:
        """The address to forward to; raises if there is none, or if this is the second hop."""
        address = self._partitions.leader_address(partition)
        if address is None or forwarder_of(context):
            raise not_leading()
        return address

    async def _forward(self, address: str, name: str, request: Message, context: Context) -> bytes:
        try:
            reply = await self._peers.call(address, name, request, context.time_remaining(), self._hop(context))
        except grpc.aio.AioRpcError as error:
            await self._abort_like(error, context)
        self._partitions.metrics.record_forward("OK")
        context.set_trailing_metadata(((LEADER, address),))
        return reply

    async def _forward_stream(self, address: str, name: str, request: Message, context: Context) -> None:
        timeout_s, metadata = context.time_remaining(), self._hop(context)
        try:
            async with aclosing(self._peers.stream(address, name, request, timeout_s, metadata)) as messages:
                async for message in messages:
                    await context.write(message)
        except grpc.aio.AioRpcError as error:
            await self._abort_like(error, context)
        self._partitions.metrics.record_forward("OK")

    def _hop(self, context: Context, *more: tuple[str, str]) -> Metadata:
        kept = tuple((key, value) for key, value in _metadata(context) if key in PASSED_ON)
        return (*kept, (FORWARDED, self._partitions.address), *more)

    async def _abort_like(self, error: grpc.aio.AioRpcError, context: Context) -> NoReturn:
        """End a call as the leader has ended it; UNAVAILABLE if the leader is gone."""
        self._partitions.metrics.record_forward(error.code().name)
        failure = _unreachable(error)
        if failure is not None:
            raise failure
        await context.abort(error.code(), error.details() or "", _trailing(error))

    async def _heartbeat_batch(self, request: Any, context: Context) -> Any:
        """The heartbeats of each partition go to its leader; the outcomes come in the order of the request."""
        name = "HeartbeatBatch"
        if isinstance(request, StrataError):
            return await _abort(context, request)
        try:
            who = self._identify(name, context)
            groups: dict[int, list[int]] = {}
            for index, heartbeat in enumerate(request.heartbeats):
                groups.setdefault(self._partition_of_heartbeat(heartbeat, who), []).append(index)
            if len(groups) <= 1 or len(request.heartbeats) > MAX_BATCH:
                # A batch that is too large is rejected as a whole.
                return await self._serve(name, next(iter(groups), 0), request, context, self._forward)
        except StrataError as error:
            return await _abort(context, error)
        return await self._split_batch(request, groups, who, context)

    def _partition_of_heartbeat(self, heartbeat: pb.HeartbeatRequest, who: Identity) -> int:
        try:
            return self._partitions.find(who.job_of(heartbeat.job_id))
        except StrataError:
            # The leader of any partition rejects it.
            return 0

    async def _split_batch(
        self, request: pb.HeartbeatBatchRequest, groups: Mapping[int, Sequence[int]], who: Identity, context: Context
    ) -> pb.HeartbeatBatchResponse:
        parts = [
            pb.HeartbeatBatchRequest(
                heartbeats=[request.heartbeats[index] for index in indexes], hostname=request.hostname
            )
            for indexes in groups.values()
        ]
        replies = await asyncio.gather(
            *(self._batch_part(number, part, who, context) for number, part in zip(groups, parts, strict=True))
        )
        outcomes: list[pb.HeartbeatOutcome | None] = [None] * len(request.heartbeats)
        token = self._authenticator.renewal(_metadata(context)) or ""
        for indexes, reply in zip(groups.values(), replies, strict=True):
            for index, outcome in zip(indexes, reply.outcomes, strict=True):
                outcomes[index] = outcome
        return pb.HeartbeatBatchResponse(outcomes=[each for each in outcomes if each is not None], token=token)

    async def _batch_part(
        self, partition: int, part: pb.HeartbeatBatchRequest, who: Identity, context: Context
    ) -> pb.HeartbeatBatchResponse:
        """A partition without a leader is UNAVAILABLE for its own heartbeats only."""
        try:
            if self._partitions.services[partition].leads:
                encoded = await self._servicers[partition].heartbeats.batch(part, who, None)
            else:
                address = self._leader(partition, context)
                timeout_s, metadata = context.time_remaining(), self._hop(context)
                encoded = await self._peers.call(address, "HeartbeatBatch", part, timeout_s, metadata)
                self._partitions.metrics.record_forward("OK")
            return pb.HeartbeatBatchResponse.FromString(encoded)
        except StrataError as error:
            code, message = number(STATUS_OF[error.code]), str(error)
        except grpc.aio.AioRpcError as error:
            self._partitions.metrics.record_forward(error.code().name)
            code, message = number(error.code()), error.details() or ""
        return pb.HeartbeatBatchResponse(
            outcomes=[
                pb.HeartbeatOutcome(
                    worker_id=each.worker_id, job_id=each.job_id, status_code=code, status_message=message
                )
                for each in part.heartbeats
            ]
        )

    async def _list_jobs(self, request: Any, context: Context) -> Any:
        """All partitions or an error: a list without some of the jobs would look as if they were gone."""
        if isinstance(request, StrataError):
            return await _abort(context, request)
        try:
            who = self._identify("ListJobs", context)
            wanted = _listed(context, len(self._servicers)) if forwarder_of(context) else range(len(self._servicers))
            remote: dict[str, list[int]] = {}
            jobs: list[pb.JobSummary] = []
            for partition in wanted:
                if self._partitions.services[partition].leads:
                    jobs += self._list_own(partition, who)
                else:
                    remote.setdefault(self._leader(partition, context), []).append(partition)
            for found in await asyncio.gather(
                *(self._list_remote(address, numbers, request, context) for address, numbers in remote.items())
            ):
                jobs += found
        except StrataError as error:
            return await _abort(context, error)
        return pb.ListJobsResponse(jobs=sorted(jobs, key=lambda each: each.job_id))

    def _list_own(self, partition: int, who: Identity) -> list[pb.JobSummary]:
        jobs = self._servicers[partition].list_jobs(who)
        for job in jobs:
            job.partition, job.leader = partition, self._partitions.address
        return jobs

    async def _list_remote(
        self, address: str, numbers: Sequence[int], request: pb.ListJobsRequest, context: Context
    ) -> list[pb.JobSummary]:
        metadata = self._hop(context, (LISTED, ",".join(map(str, numbers))))
        try:
            encoded = await self._peers.call(address, "ListJobs", request, context.time_remaining(), metadata)
        except grpc.aio.AioRpcError as error:
            raise _unreachable(error) or not_leading() from error
        return list(pb.ListJobsResponse.FromString(encoded).jobs)

    async def _is_hop_broken(self, address: str) -> bool:
        """Says whether a stream may have ended because of the process at `address`, which forwarded it.

        One that holds no lease any more was cut off or frozen, and its workers are elsewhere: heartbeats decide. Only
        addresses from the database are called.
        """
        return not self._partitions.is_process(address) or not await self._peers.is_serving(address)


def _metadata(context: Context) -> Metadata:
    return cast(Metadata, context.invocation_metadata() or ())


def _listed(context: Context, partitions: int) -> Sequence[int]:
    """The partitions that a forwarded ListJobs names."""
    numbers = next((str(value) for key, value in _metadata(context) if key == LISTED), "")
    found = [int(each) for each in numbers.split(",") if each.isdecimal()]
    return [each for each in found if each < partitions]


def _unreachable(error: grpc.aio.AioRpcError) -> StrataError | None:
    """Returns what to tell a caller if the leader said nothing itself: it is gone, it ends, or it moved."""
    if error.code() is grpc.StatusCode.CANCELLED:
        return not_leading()
    is_answer = any(key == "strata-retry-after-ms" for key, _ in error.trailing_metadata() or ())
    return not_leading() if error.code() is grpc.StatusCode.UNAVAILABLE and not is_answer else None


def _trailing(error: grpc.aio.AioRpcError) -> tuple[tuple[str, str], ...]:
    said = error.trailing_metadata() or ()
    return tuple((key, value) for key, value in said if key.startswith("strata-") and isinstance(value, str))


async def _abort(context: Context, error: StrataError) -> NoReturn:
    await context.abort(STATUS_OF[error.code], str(error), trailing(error))
