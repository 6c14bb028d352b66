"""The relay of a host sends the heartbeats of all its workers in one call: it collects for 0.2 s, forwards with a
timeout of 5 s, and a worker sends directly for 30 s when it fails.

A worker sends its heartbeat over a Unix socket and waits for the coordinator's own reply. The relay keeps no state: it
forwards each heartbeat once, under the token of its worker, and only while that worker waits. So the coordinator
notices a lost worker as soon as without a relay. Whatever fails here, the worker sends the same heartbeat to the
coordinator itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final, Self

import grpc

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.worker.link import CoordinatorLink, to_strata_error
from strata.coord.worker.settings import WorkerSettings

COLLECT_S: Final = 0.2
"""How long the first heartbeat of a batch waits for the others."""
FORWARD_S: Final = 5.0
"""A reply of the coordinator that takes longer than this got lost."""
REST_S: Final = 30.0
"""How long a worker does without a relay that failed."""
SHORTEST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = FORWARD_S + COLLECT_S
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
AUTHORIZATION: Final = "authorization"

_log = log.get(__name__)

Context = grpc.aio.ServicerContext[pb.HeartbeatRequest, pb.HeartbeatResponse]


def ms_to_next_turn(interval_ms: int, now_s: float, phase_s: float) -> int:
    """Returns the time until the workers of a host send next, all at once: once in an interval, never later than
    that."""
    interval_s = interval_ms / 1000
    return ceil((interval_s - (now_s + phase_s) % interval_s) * 1000) if interval_ms else 0


@dataclass(frozen=True)
class _Waiting:
    """A worker that waits for the reply to its heartbeat; cancelled when the worker does not wait any more."""

    message: pb.HeartbeatRequest
    reply: asyncio.Future[pb.HeartbeatResponse]


class HeartbeatRelay:
    """Serves Heartbeat on a Unix socket, between `async with`. `phase_s` keeps the hosts of a job from taking turns
    at the same time."""

    def __init__(self, settings: WorkerSettings, path: Path, clock: Clock, phase_s: float) -> None:
        self._path = path
        self._clock = clock
        self._phase_s = phase_s
        # Of the settings only where the coordinator is: each heartbeat brings its own token.
        self._link = CoordinatorLink(settings, "", clock)
        self._server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            self._receive,
            request_deserializer=pb.HeartbeatRequest.FromString,
            response_serializer=pb.HeartbeatResponse.SerializeToString,
        )
        handlers: Any = grpc.method_handlers_generic_handler(SERVICE, {"Heartbeat": handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self._collected: dict[str, list[_Waiting]] = {}
        """Waiting heartbeats by the value of their authorization: a batch is sent with one."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            await self._link.close()
            raise StrataError(Code.UNAVAILABLE, f"cannot listen on {self._path}") from error
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._link.close()

    async def _receive(self, message: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        metadata = context.invocation_metadata() or ()
        bearer = next((value for key, value in metadata if key == AUTHORIZATION and isinstance(value, str)), "")
        waiting = _Waiting(message, asyncio.get_running_loop().create_future())
        if not self._collected:
            task = asyncio.create_task(self._send_collected())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._collected.setdefault(bearer, []).append(waiting)
        try:
            return await waiting.reply
        except StrataError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)

    async def _send_collected(self) -> None:
        await self._clock.sleep(COLLECT_S)
        collected, self._collected = self._collected, {}
        await asyncio.gather(*(self._forward(bearer, batch) for bearer, batch in collected.items()))

    async def _forward(self, bearer: str, batch: Sequence[_Waiting]) -> None:
        # A worker that died after it sent its heartbeat must not count as connected because of it.
        batch = [each for each in batch if not each.reply.done()]
        if not batch:
            return
        index = self._link.index
        request = pb.HeartbeatBatchRequest(heartbeats=[each.message for each in batch], hostname=socket.gethostname())
        metadata = ((AUTHORIZATION, bearer),) if bearer else ()
        try:
            found = await self._link.stub().HeartbeatBatch(request, timeout=FORWARD_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            failure = to_strata_error(error)
            _log.debug("batch_failed", code=failure.code.value, reason=failure.message)
            if failure.code in (Code.UNAVAILABLE, Code.DEADLINE):
                self._link.fail_over(index)
            for each in batch:
                _fail(each, failure)
        else:
            self._reply(batch, found)

    def _reply(self, batch: Sequence[_Waiting], found: pb.HeartbeatBatchResponse) -> None:
        now_s = self._clock.monotonic_s()
        for each, outcome in zip(batch, found.outcomes, strict=False):
            if outcome.status_code:
                # The worker gets the whole of it, with its reason, from the coordinator itself.
                _fail(each, StrataError(Code.UNAVAILABLE, outcome.status_message))
            elif not each.reply.done():
                reply = outcome.response
                reply.token = found.token
                reply.heartbeat_interval_ms = ms_to_next_turn(reply.heartbeat_interval_ms, now_s, self._phase_s)
                each.reply.set_result(reply)
        for each in batch[len(found.outcomes) :]:
            _fail(each, StrataError(Code.INTERNAL, "the coordinator sent no outcome"))


def _fail(waiting: _Waiting, error: StrataError) -> None:
    if not waiting.reply.done():
        waiting.reply.set_exception(error)


class RelayLink:
    """A worker's way to the relay of its host. A relay that failed is left alone for a while."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._rests_until_s = 0.0
        self._works = True

    async def heartbeat(
        self, message: pb.HeartbeatRequest, metadata: tuple[tuple[str, str], ...], interval_s: float
    ) -> pb.HeartbeatResponse | None:
        """The coordinator's reply; None: the worker has to send the heartbeat itself."""
        if self._clock.monotonic_s() < self._rests_until_s:
            return None
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._path}")
        stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(self._channel)
        # A relay that is frozen must cost less than the heartbeats that a worker may miss.
        timeout_s = min(max(interval_s / 2, SHORTEST_WAIT_S), LONGEST_WAIT_S)
        try:
            reply = await stub.Heartbeat(message, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if self._works:
                _log.warning("relay_failed", path=str(self._path), reason=error.details())
            self._works = False
            self._rests_until_s = self._clock.monotonic_s() + REST_S
            return None
        self._works = True
        return reply

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
