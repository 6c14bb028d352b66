"""How gRPC finds the function that answers a call, with as little of gRPC as possible between the two.

Handlers are generic ones on purpose. The generated `add_…_to_server` also registers every method by name, and then
`grpc.aio` waits, for every single call, on one future for each registered method. Generic handlers share one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from strata.coord.pb import coordinator_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]


def coordinator_handler(calls: Mapping[str, Callable[[Any, Any], Awaitable[Any]]]) -> grpc.GenericRpcHandler:
    """For all calls of the contract. `calls` has a coroutine function for each of them, by name."""
    handlers: dict[str, Any] = {}
    for method in _SERVICE.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            calls[method.name],
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=_to_bytes,
        )
    return grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)


def _to_bytes(reply: Message | bytes) -> bytes:
    """A reply that many callers share is made to bytes once, by whoever makes it."""
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


class GenericOnly:
    """What generated code takes for a server: it keeps generic handlers and lets the registering of methods be."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See above."""
