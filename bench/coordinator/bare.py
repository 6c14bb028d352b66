"""The bare side of `bench coordinator`: a `grpc.aio` server that answers the same calls and does nothing for them.

Bytes in, bytes out: it neither reads a request nor makes an answer, so all that it costs is gRPC. Only its barrier
reads what it gets, as it has to: one `asyncio.Event` and a set of names, what anybody would write first.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import msgspec
import uvloop

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.process import OPTIONS, SERVICE

TEACH: Final = "/bench.Bare/Teach"
CANNED: Final = ("RegisterWorker", "Heartbeat", "HeartbeatBatch", "GetNextShards")

Handle = Callable[[Any, Any], Awaitable[Any]]
Handlers = dict[str, Any]


class Echo:
    """Answers each call with the bytes it was taught, so that both sides send as much as they receive."""

    def __init__(self) -> None:
        self._replies: dict[str, bytes] = {}

    async def teach(self, request: bytes, _: Any) -> bytes:
        self._replies = msgspec.msgpack.decode(request, type=dict[str, bytes])
        return b""

    def handler(self, method: str) -> Handle:
        async def reply(_request: bytes, _context: Any) -> bytes:
            return self._replies[method]

        return reply


class NaiveBarriers:
    """Nothing is written down, nobody is checked, and who is lost is waited for."""

    def __init__(self) -> None:
        self._arrived: dict[str, set[str]] = {}
        self._released: dict[str, asyncio.Event] = {}

    async def arrive(self, request: pb.BarrierRequest, _: Any) -> pb.BarrierResponse:
        arrived = self._arrived.setdefault(request.barrier_id, set())
        released = self._released.setdefault(request.barrier_id, asyncio.Event())
        arrived.add(request.worker_id)
        if len(arrived) == request.expected_participants:
            released.set()
        if request.wait:
            await released.wait()
        return pb.BarrierResponse(
            released=released.is_set(), arrived=len(arrived), expected=request.expected_participants
        )


async def serve(address: str) -> None:
    echo, barriers = Echo(), NaiveBarriers()
    handlers: Handlers = {name: grpc.unary_unary_rpc_method_handler(echo.handler(name)) for name in CANNED}
    handlers["Barrier"] = grpc.unary_unary_rpc_method_handler(
        barriers.arrive,
        request_deserializer=pb.BarrierRequest.FromString,
        response_serializer=pb.BarrierResponse.SerializeToString,
    )
    taught: Handlers = {TEACH.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(echo.teach)}
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE, handlers),
            grpc.method_handlers_generic_handler("bench.Bare", taught),
        )
    )
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
