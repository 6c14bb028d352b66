"""Calls to the coordinator: channels and TLS, the token, failover between addresses, retries with backoff (0.05 to 2
s), and the table from gRPC statuses to error codes.

A call sends one message until it gets a reply: every message that a worker sends may arrive twice. The only table from
a gRPC status to an error code is here.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

import grpc

import strata
from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff
from strata.base.secret import Secret
from strata.coord.grpc_options import CLIENT_OPTIONS
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.worker.settings import Tls, WorkerSettings

CODE_OF: Final[Mapping[grpc.StatusCode, Code]] = {
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID,
    grpc.StatusCode.OUT_OF_RANGE: Code.INVALID,
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Code.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: Code.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: Code.CONFLICT,
    grpc.StatusCode.FAILED_PRECONDITION: Code.PRECONDITION,
    grpc.StatusCode.ABORTED: Code.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE: Code.UNAVAILABLE,
    # A coordinator that ends cancels the calls it did not finish.
    grpc.StatusCode.CANCELLED: Code.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Code.DEADLINE,
    grpc.StatusCode.UNIMPLEMENTED: Code.UNSUPPORTED,
    grpc.StatusCode.DATA_LOSS: Code.CORRUPT,
    grpc.StatusCode.INTERNAL: Code.INTERNAL,
    grpc.StatusCode.UNKNOWN: Code.INTERNAL,
}

OPTIONS: Final = (
    *CLIENT_OPTIONS,
    # Not a pause but how long one attempt to connect may take at least: a busy coordinator or a far one takes a while.
    ("grpc.min_reconnect_backoff_ms", 5_000),
)

LEADER: Final = "strata-leader"
"""Trailing metadata of a call that another process than the leader has forwarded: the address of the leader."""
BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)

_log = log.get(__name__)

Request = TypeVar("Request")
Request_contra = TypeVar("Request_contra", contravariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)
Reply = TypeVar("Reply")


class Answer(Awaitable[Reply_co], Protocol[Reply_co]):
    async def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class UnaryCall(Protocol[Request_contra, Reply_co]):
    """A unary method of the stub."""

    def __call__(
        self, request: Request_contra, /, *, timeout: float | None, metadata: tuple[tuple[str, str], ...]
    ) -> Answer[Reply_co]: ...


@dataclass(frozen=True)
class Deadline:
    """`timeout_s` is for one attempt; None waits for ever. `patience_s` is for all, after the first failure."""

    timeout_s: float | None
    patience_s: float


def backoff_s(attempt: int, retry_after_s: float | None, jitter: float) -> float:
    """Returns how long to wait after a failed attempt, counted from 0; `jitter` from 0 to 1 scatters a herd."""
    if retry_after_s is not None:
        return retry_after_s * (1 + 0.5 * jitter)
    return BACKOFF.delay_s(attempt + 1, jitter)


def to_strata_error(error: grpc.aio.AioRpcError) -> StrataError:
    """A gRPC status and its trailing metadata as a `StrataError`."""
    said = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    code = CODE_OF.get(error.code(), Code.INTERNAL)
    reason = said.get("strata-reason")
    if reason in ("stale-generation", "stale-incarnation", "recover-first", "lease-lost"):
        code = Code.STALE
    detail: dict[str, object] = {"reason": reason} if reason else {}
    if "strata-generation" in said:
        detail["generation"] = int(said["strata-generation"])
    if "strata-retry-after-ms" in said:
        detail["retry_after_s"] = int(said["strata-retry-after-ms"]) / 1000
    return StrataError(code, error.details() or code.value, hint=None, **detail)


class CoordinatorLink:
    """The connection to the leading coordinator: it fails over to the next address when one does not reply, and goes to
    the leader's when one forwards."""

    def __init__(self, settings: WorkerSettings, worker_id: str, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._rng = random.SystemRandom()
        self._stubs: dict[int, tuple[grpc.aio.Channel, pb_grpc.CoordinatorAsyncStub]] = {}
        self._index = 0
        self._names = {"strata-job": settings.job, "strata-worker": worker_id}
        self.metadata: tuple[tuple[str, str], ...] = ()
        self.use_token(settings.token)

    def use_token(self, token: Secret | None) -> None:
        """Sends this token in all later calls."""
        self._token = token
        bearer = {"authorization": f"Bearer {token.reveal()}"} if token is not None else {}
        self.metadata = tuple((key, value) for key, value in (self._names | bearer).items() if value)

    def reload_token(self) -> bool:
        """Says whether the token file now has another token than the rejected one."""
        if self._settings.token is None:
            return False
        try:
            found = self._settings.token.reload()
        except StrataError as error:
            _log.warning("token_file_unreadable", reason=error.message)
            return False
        if found in (self._token, self._settings.token):
            return False
        _log.info("token_replaced", source="file")
        self.use_token(found)
        return True

    async def close(self) -> None:
        stubs, self._stubs = self._stubs, {}
        for channel, _ in stubs.values():
            await channel.close()

    def stub(self) -> pb_grpc.CoordinatorAsyncStub:
        """The stub of the address in use. To be called in the event loop that uses it."""
        if self._index not in self._stubs:
            channel = _channel(self._settings.addresses[self._index], self._settings.tls)
            stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
            self._stubs[self._index] = (channel, stub)
        return self._stubs[self._index][1]

    async def call(
        self,
        method: Callable[[pb_grpc.CoordinatorAsyncStub], UnaryCall[Request, Reply]],
        request: Request,
        deadline: Deadline,
    ) -> Reply:
        """The reply. Retries while there is none; UNAVAILABLE when the patience is over."""
        attempt = 0
        until_s = 0.0
        while True:
            index = self._index
            address = self._settings.addresses[index]
            try:
                reply = await self._call_once(method, request, deadline)
            except StrataError as error:
                if not _is_retryable(error, deadline):
                    raise
                failure = error
            else:
                if attempt > 1:
                    _log.warning(f"coordinator_reachable {address}", attempts=attempt)
                return reply
            now_s = self._clock.monotonic_s()
            if attempt == 0:
                until_s = now_s + deadline.patience_s
            wait_s = backoff_s(attempt, failure.detail.get("retry_after_s"), self._rng.random())
            if now_s + wait_s > until_s:
                raise StrataError(
                    Code.UNAVAILABLE, f"no answer of the coordinator in {deadline.patience_s:g} s: {failure.message}"
                )
            if attempt == 1:
                # The event carries the address: a program that has configured no logs prints nothing else.
                _log.warning(f"coordinator_unreachable {address}: {failure.message}", code=failure.code.value)
            attempt += 1
            self.fail_over(index)
            await asyncio.sleep(wait_s)

    async def _call_once(
        self,
        method: Callable[[pb_grpc.CoordinatorAsyncStub], UnaryCall[Request, Reply]],
        request: Request,
        deadline: Deadline,
    ) -> Reply:
        """One attempt; another one if the token was rejected and its file has a new one."""
        while True:
            try:
                return await self._send(method, request, deadline)
            except grpc.aio.AioRpcError as error:
                failure = to_strata_error(error)
            if failure.code is not Code.UNAUTHENTICATED or not self.reload_token():
                raise failure

    async def _send(
        self,
        method: Callable[[pb_grpc.CoordinatorAsyncStub], UnaryCall[Request, Reply]],
        request: Request,
        deadline: Deadline,
    ) -> Reply:
        # In a function of its own: an error that is raised elsewhere must not keep the answer, and so the channel.
        answer = method(self.stub())(request, timeout=deadline.timeout_s, metadata=self.metadata)
        reply = await answer
        if len(self._settings.addresses) > 1:
            self._go_to_leader(await answer.trailing_metadata() or ())
        return reply

    def _go_to_leader(self, trailing: Iterable[tuple[str, str | bytes]]) -> None:
        """Save later calls the hop, if the leader is at one of the addresses that this worker was given."""
        for key, value in trailing:
            if key == LEADER and value in self._settings.addresses:
                self._index = self._settings.addresses.index(str(value))

    def fail_over(self, failed: int) -> None:
        """Others may have moved on already from the address that failed."""
        if failed == self._index:
            self._index = (failed + 1) % len(self._settings.addresses)

    @property
    def index(self) -> int:
        return self._index

    def backoff_s(self, attempt: int) -> float:
        return backoff_s(attempt, None, self._rng.random())


def _is_retryable(failure: StrataError, deadline: Deadline) -> bool:
    if failure.code is Code.DEADLINE:
        # Of this attempt, if the call had a timeout; a barrier has none, and its own timeout is a reply.
        return deadline.timeout_s is not None
    return failure.code in (Code.UNAVAILABLE, Code.EXHAUSTED)


def _channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.certificate))
    name = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*OPTIONS, *name))


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise StrataError(Code.INVALID, f"cannot read {path}: {error.strerror}") from error


def registration_message(settings: WorkerSettings, job: str, incarnation: str, held: Iterable[int]) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=settings.worker_id,
        ip=settings.ip,
        port=settings.port,
        gpu_count=settings.gpus,
        job_id=job,
        incarnation=incarnation,
        weight=settings.weight,
        held_leases=held,
        elastic=settings.elastic,
        expected_rank=settings.rank,
        hostname=socket.gethostname(),
        sdk_version=f"strata-python/{strata.__version__}",
    )
