"""The coordinator as a process: listens with TLS, serves health, metrics and backups, leads or stands by, and drains on
SIGTERM; with its gRPC pings, connection and garbage-collector limits.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from strata.base import log
from strata.base.clock import Clock, SystemClock
from strata.base.errors import Code, StrataError
from strata.base.loop import every
from strata.base.private import set_private_umask
from strata.base.support import report_experimental
from strata.coord.grpc_options import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.authenticator import OPERATOR, TokenAuthenticator
from strata.coord.server.grpc_handler import CoordinatorHandler, GenericOnly
from strata.coord.server.partitions import Partitions, check_partitions
from strata.coord.server.router import PartitionRouter, Peers
from strata.coord.server.service import CoordinatorService
from strata.coord.server.servicer import Servicer
from strata.coord.server.tokens import RevokedTokens, Tokens
from strata.coord.settings import CoordinatorSettings, ServerTls, check_exposure, check_partitioned
from strata.database.online_backup import INTERVAL_S, OnlineBackup
from strata.http.metrics import serve_metrics
from strata.journal.open import open_journal
from strata.journal.port import Journal
from strata.journal.sqlite import SqliteJournal

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
PINGS: Final = 3
"""Pings are sent so many times within their timeout: a frozen process is found after one timeout and a third."""
SPARE_CONNECTIONS: Final = 4
"""Connections to PostgreSQL for renewals, snapshots and reads, and for the commits of one partition."""
MOST_COMMITS: Final = 12
"""The most commits of several partitions at once."""
GC_THRESHOLDS: Final = (50_000, 20, 20)

OPTIONS: Final = (
    # Two coordinators on one port would each get some of the workers.
    ("grpc.so_reuseport", 0),
    # Of one connection. A host with more workers than this waits in its own client.
    ("grpc.max_concurrent_streams", 4_096),
    # The defaults lose a herd: of 10,000 simultaneous calls nearly half were cancelled.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
)

Leadership = CoordinatorService | Partitions
"""What a process leads: all jobs, or some of the partitions into which they are divided."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_log = log.get(__name__)


def _pings(timeout_s: float) -> tuple[tuple[str, int], ...]:
    """A frozen peer answers no ping. Without ping_timeout_ms that is never noticed."""
    timeout_ms = max(1, round(timeout_s * 1000))
    return (
        ("grpc.keepalive_time_ms", max(1, timeout_ms // PINGS)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )


def run(settings: CoordinatorSettings, announce: Callable[[str], None]) -> None:
    """Run the coordinator until SIGTERM or SIGINT. `announce` is called with a line that says where the coordinator
    listens."""
    import uvloop

    check_exposure(settings)
    check_partitioned(settings)
    report_experimental()
    set_private_umask()
    # Calls make many objects and few cycles: at the usual thresholds the state of all jobs is looked through too often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, announce))


async def _serve(settings: CoordinatorSettings, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock = SystemClock()
    tokens = Tokens(settings.token_secret) if settings.token_secret else None
    revoked = RevokedTokens(settings.revoked_tokens, clock) if settings.revoked_tokens else frozenset[str]()
    count = settings.partitions
    connections = SPARE_CONNECTIONS + min(count, MOST_COMMITS) if count > 1 else SPARE_CONNECTIONS
    async with await open_journal(settings.database, clock, connections=connections) as journal:
        await check_partitions(journal, settings.stream, count, lease_s=settings.lease_s, clock=clock)
        service: Leadership = (
            CoordinatorService(journal, clock, settings) if count == 1 else Partitions(journal, clock, settings)
        )
        authenticator = TokenAuthenticator(tokens, clock, revoked)
        server = CoordinatorServer(service, authenticator, settings)
        async with (
            expose_metrics(settings, service, authenticator) as metrics_url,
            serve_backups(settings, journal, clock),
        ):
            await server.start(lambda line: announce(f"{line}, metrics on {metrics_url}" if metrics_url else line))
            await server.serve_until(stop)


@asynccontextmanager
async def expose_metrics(
    settings: CoordinatorSettings, service: Leadership, authenticator: TokenAuthenticator
) -> AsyncIterator[str]:
    """Serve the metrics where the settings say so. Gives their URL, empty if they are not served."""
    if not settings.metrics_listen:
        yield ""
        return

    def check(authorization: str) -> None:
        if not authenticator.allows_anonymous:
            authenticator.identify((("authorization", authorization),), OPERATOR)

    def render() -> bytes:
        return service.metrics.render(service.states_led)

    tls = None if settings.tls is None else _ssl_context(settings.tls)
    async with serve_metrics(settings.metrics_listen, render, check, tls) as url:
        yield url


@asynccontextmanager
async def serve_backups(settings: CoordinatorSettings, journal: Journal, clock: Clock) -> AsyncIterator[None]:
    """Copy the journal whenever a file in the folder of backups requests it."""
    if settings.backups is None:
        yield
        return
    if not isinstance(journal, SqliteJournal):
        raise StrataError(Code.INVALID, "only a journal in SQLite is copied for backups", hint="unset backups")

    async def copy(path: Path, _: float) -> None:
        partial = path.with_name(f"{path.name}.partial")
        partial.unlink(missing_ok=True)
        await journal.copy_to(partial)
        partial.rename(path)

    backup = OnlineBackup(settings.backups, copy, clock)
    serving = asyncio.create_task(every(INTERVAL_S, backup.run_once, clock=clock, max_backoff_s=INTERVAL_S))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait([serving])


class CoordinatorServer:
    """The gRPC server around one service, or around all partitions."""

    def __init__(self, service: Leadership, authenticator: TokenAuthenticator, settings: CoordinatorSettings) -> None:
        self._service = service
        self._settings = settings
        self._health = health.aio.HealthServicer()
        others: Any = GenericOnly()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, others)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        add_reflection: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        add_reflection(reflection.aio.ReflectionServicer(names), others)
        self._peers = Peers(None if settings.tls is None else _peer_credentials(settings.tls))
        servicer = (
            PartitionRouter(service, authenticator, self._peers)
            if isinstance(service, Partitions)
            else Servicer(service, authenticator)
        )
        handlers = (CoordinatorHandler(servicer.calls, servicer.check_access), *others.handlers)
        self._server = grpc.aio.server(handlers=handlers, options=(*OPTIONS, *_pings(settings.ping_timeout_s)))
        self.port = 0

    async def start(self, announce: Callable[[str], None]) -> None:
        """Listen: a standby replies too, that it does not lead."""
        await self._health.set(SERVICE, _NOT_SERVING)
        self.port = self._bind()
        await self._server.start()
        host = self._settings.listen.rpartition(":")[0]
        if isinstance(self._service, Partitions):
            self._service.address = self._settings.advertise or f"{host}:{self.port}"
        announce(f"listening on {host}:{self.port}, {self._guarded_by()}")

    async def serve_until(self, stop: asyncio.Event) -> None:
        leading = asyncio.create_task(self._service.run(self._on_change), name="lead")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait([leading, stopping], return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stopping.cancel()
            if not leading.done():
                leading.cancel()
            await asyncio.wait([leading, stopping])
        if not leading.cancelled():
            leading.result()

    async def _drain(self) -> None:
        _log.info("coordinator_draining")
        await self._health.enter_graceful_shutdown()
        await self._service.drain()
        self._peers.end_streams()
        await self._server.stop(self._settings.drain_s)
        await self._peers.close()
        _log.info("coordinator_drained")

    async def _on_change(self) -> None:
        await self._health.set(SERVICE, _SERVING if self._service.leads else _NOT_SERVING)

    def _bind(self) -> int:
        listen, tls = self._settings.listen, self._settings.tls
        try:
            if tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, _credentials(tls))
        except RuntimeError as error:
            raise StrataError(
                Code.UNAVAILABLE, f"cannot listen on {listen}", hint="is another process using that port?"
            ) from error
        return port

    def _guarded_by(self) -> str:
        tls = self._settings.tls
        transport = "no TLS" if tls is None else "TLS" if tls.client_ca is None else "mTLS"
        if self._settings.token_secret is not None:
            return f"{transport}, tokens required"
        return f"{transport}, no tokens required: every user of this machine may call as any worker or operator"


def _ssl_context(tls: ServerTls) -> ssl.SSLContext:
    """Makes the context as for gRPC: with `client_ca`, clients need a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise StrataError(Code.INVALID, f"the certificate of the coordinator cannot be used: {error}") from error
    return context


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    client_ca = _read(tls.client_ca) if tls.client_ca is not None else None
    return grpc.ssl_server_credentials(
        [(_read(tls.key), _read(tls.certificate))],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def _peer_credentials(tls: ServerTls) -> grpc.ChannelCredentials | None:
    """Returns credentials for calls to other coordinators; the own certificate is shown to those that ask for one."""
    if tls.ca is None:
        return None
    return grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.certificate))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StrataError(Code.INVALID, f"cannot read {path}: {error.strerror}") from error
