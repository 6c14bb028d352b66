"""The generic gRPC handler: finds the function of a call, bounds the bytes and fields of each message, and has the
table from error codes to gRPC statuses.

The caller is authenticated from the metadata before a byte of the message is read: a rejected call costs no more than
the flow-control window of its stream. Only then is the message read, bounded, and parsed.

The handler is a generic one on purpose. The generated `add_…_to_server` also registers every method by name, and then
`grpc.aio` waits, for every single call, on one future for each registered method. Generic handlers share one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from strata.base.errors import Code, StrataError
from strata.coord.grpc_options import MAX_REQUEST_BYTES
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.authenticator import Metadata

_SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]

STATUS_OF: Final[Mapping[Code, grpc.StatusCode]] = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.GONE: grpc.StatusCode.NOT_FOUND,
    Code.CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    Code.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Code.STALE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.CORRUPT: grpc.StatusCode.INTERNAL,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}
assert STATUS_OF.keys() == set(Code), "every code needs a status"

DEFAULT_RETRY_S: Final = 0.5
_REASONS: Final = (
    "not-registered",
    "stale-generation",
    "stale-incarnation",
    "recover-first",
    "lease-lost",
    "job-finished",
    "job-running",
    "evicted",
    "unknown-worker",
    "unknown-dataset",
    "unknown-job",
)

MAX_BATCH: Final = 10_000
"""Heartbeats in one call."""
MOST_BYTES: Final = 1 << 20
MOST_BYTES_OF: Final[Mapping[str, int]] = {"AckDataset": MAX_REQUEST_BYTES, "HeartbeatBatch": 2 << 20}
MOST_FIELDS_OF: Final[Mapping[str, int]] = {"AckDataset": 200_000, "HeartbeatBatch": MAX_BATCH}
"""Fields of a message, each element of a list counted: an empty element is two bytes to send and 140 to keep."""
_COUNTED_FROM: Final = 32
"""Bytes for each allowed field: a shorter message is parsed without counting, as it cannot have many more."""

CheckAccess = Callable[[str, Metadata], None]
"""Raises unless the metadata may make the call of that name."""


class CoordinatorHandler(grpc.GenericRpcHandler):
    """All calls of the contract. `calls` has a coroutine function for each of them, by name."""

    def __init__(self, calls: Mapping[str, Callable[[Any, Any], Awaitable[Any]]], check_access: CheckAccess) -> None:
        self._check_access = check_access
        self._handlers: dict[str, tuple[str, Any]] = {}
        for method in _SERVICE.methods:
            make = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            self._handlers[f"/{_SERVICE.full_name}/{method.name}"] = (
                method.name,
                make(
                    calls[method.name],
                    request_deserializer=_reader(method.name, GetMessageClass(method.input_type)),
                    response_serializer=_to_bytes,
                ),
            )

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        found = self._handlers.get(details.method)
        if found is None:
            return None
        name, handler = found
        try:
            self._check_access(name, details.invocation_metadata or ())
        except StrataError as error:
            return _refusing(error)
        return handler


def _refusing(error: StrataError) -> Any:
    """A handler of a stream, because gRPC reads the message of every other kind before it calls."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(STATUS_OF[error.code], str(error), trailing(error))

    return grpc.stream_unary_rpc_method_handler(refuse)


def _reader(name: str, kind: type[Message]) -> Callable[[bytes], Message | StrataError]:
    most_bytes = MOST_BYTES_OF.get(name, MOST_BYTES)
    most_fields = MOST_FIELDS_OF.get(name, most_bytes)

    def read(body: bytes) -> Message | StrataError:
        """An error is returned, for the handler to raise: what a deserializer raises reaches the client as UNKNOWN."""
        if len(body) > most_bytes:
            return StrataError(
                Code.INVALID, f"a message of {name} has at most {most_bytes:,} bytes, this one has {len(body):,}"
            )
        if len(body) > _COUNTED_FROM * most_fields and has_more_fields(body, most_fields):
            return StrataError(Code.INVALID, f"a message of {name} has at most {most_fields:,} elements")
        try:
            return kind.FromString(body)
        except DecodeError:
            return StrataError(Code.INVALID, f"this is no message of {name}")

    return read


def has_more_fields(body: bytes, most: int) -> bool:
    """Says whether a message has more than `most` fields, counted without building any; a broken one is for the
    parser."""
    at, end, count = 0, len(body), 0
    try:
        while at < end:
            count += 1
            if count > most:
                return True
            tag, at = _varint(body, at)
            kind = tag & 7
            if kind == 0:
                _, at = _varint(body, at)
            elif kind == 2:
                length, at = _varint(body, at)
                at += length
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                return False
    except IndexError:
        return False
    return False


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _to_bytes(reply: Message | bytes) -> bytes:
    """A reply that many callers share is encoded once, where it is made."""
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


class GenericOnly:
    """Stands in for a server in generated code: it keeps generic handlers and ignores registered methods."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See above."""


def trailing(error: StrataError) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    if error.code in (Code.UNAVAILABLE, Code.EXHAUSTED):
        retry_s = float(error.detail.get("retry_after_s", DEFAULT_RETRY_S))
        found.append(("strata-retry-after-ms", str(max(1, round(retry_s * 1000)))))
    reason = error.detail.get("reason")
    if reason in _REASONS:
        found.append(("strata-reason", str(reason)))
    if reason == "stale-generation":
        found.append(("strata-generation", str(error.detail["generation"])))
    return tuple(found)


def number(code: grpc.StatusCode) -> int:
    value: int = code.value[0]
    return value
