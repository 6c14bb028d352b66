"""Composes a hub from its settings, and has the intervals of its background loops: webhooks, subscriptions, sweeps,
schedules, idle servers, hourly maintenance (retention, garbage collection, scrubbing of 4 GiB); also names of files
such as `operator.token`.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.atomic import create_file
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.loop import RunOnce
from strata.base.private import private_folder, require_private_folder
from strata.base.secret import Secret, read_secret
from strata.base.unix_socket import format_unix_address
from strata.coord.server.tokens import Claims, TokenRole, Tokens
from strata.database.address import is_postgres
from strata.database.online_backup import FOLDER, INTERVAL_S, OnlineBackup
from strata.fleet.artifacts.disk import DiskChunks
from strata.fleet.artifacts.maintenance import apply_retention, collect_garbage, scrub
from strata.fleet.artifacts.ports import ChunkStore
from strata.fleet.artifacts.service import Artifacts
from strata.fleet.core.attention import HubBackups, HubDisk
from strata.fleet.execs import ExecBoard
from strata.fleet.http.context import GangCoordinator, HubContext, WriteProbe
from strata.fleet.http.feed import GAP_S, Feed
from strata.fleet.http.hosts import forget_silent
from strata.fleet.http.leased_reads import LeasedReads
from strata.fleet.hub_metrics import HubMetrics
from strata.fleet.metric_history import MetricHistory, thin_streams
from strata.fleet.overview import DAY_S, OVERVIEW_S, FleetHistory
from strata.fleet.service.claims import RESERVE_S
from strata.fleet.service.fleet import Fleet
from strata.fleet.service.leases import TICK_S
from strata.fleet.service.state import FleetSettings
from strata.fleet.streams import AttemptStreams
from strata.http.auth_failures import AuthFailures
from strata.http.body import BodyPace
from strata.http.root import RootApp, RootLimits
from strata.hub.context import GatewayContext
from strata.hub.cursor_store import CursorStore, FeedDelivery, run_leased
from strata.hub.disk import CHECK_S, DiskGuard
from strata.hub.gangs import CoordinatorGangs, open_gangs
from strata.hub.gateway.proxy import ServerProxy
from strata.hub.outbound import WebhookTarget
from strata.hub.routes import ROUTES, application
from strata.hub.scheduled_backups import survey_backups
from strata.hub.schedules import DeclaredSchedules, ScheduleRunner
from strata.hub.secret_store import KEY_FILE, SecretVault, load_key
from strata.hub.settings import BucketSettings, GangCoordinatorSettings, HubSettings
from strata.hub.subscriptions import AppriseSender, SubscriptionDispatcher, SubscriptionStore
from strata.hub.sweeps import DeclaredSweeps, SweepRunner
from strata.hub.tables import Tables, open_tables
from strata.hub.webhooks import WebhookDispatcher
from strata.identity.authenticate import Authenticator
from strata.identity.ca import Authority, HubClientCertificate, ServerCertificate, own_names
from strata.identity.enroll import Enrollment
from strata.web.api import LocalApi
from strata.web.live import LiveTopics
from strata.web.routes import build_pages

_log = log.get(__name__)

HOUR_S: Final = 3600.0
SCRUB_BYTES: Final = 4 << 30
SCRUB_BYTES_PER_S: Final = 20e6
MAINTENANCE_LEASE_S: Final = 2 * HOUR_S
"""Renewed meanwhile. Long, because a hub that is frozen in the middle of its work goes on with it when it wakes."""
IDLE_CHECK_S: Final = 2.0
SHARE: Final = 0.02
"""The share of the time for each loop that looks at the whole fleet."""
WEBHOOK_S: Final = 0.5
SUBSCRIPTION_S: Final = 1.0
SWEEP_S: Final = 1.0
SCHEDULE_S: Final = 1.0
USES_S: Final = 60.0
FORGET_CHECK_S: Final = 60.0
TOKEN_FILE: Final = "operator.token"  # noqa: S105 - the name of a file
HUB_ID_FILE: Final = "hub.id"
FOLDER_ID_FILE: Final = "folder.id"
FILES: Final = "files"
"""The lease of the folder that all hubs of a database share. It never expires."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    interval_s: float
    run_once: RunOnce
    max_backoff_s: float = 60.0
    """The longest pause after failures: short for what everybody waits for once the database is back."""
    max_share: float = 1.0
    """The share of the time, for what reads all hosts or leases, of which there may be many."""


@dataclass(frozen=True, kw_only=True)
class Hub:
    context: GatewayContext
    app: RootApp
    tls: ServerCertificate | None
    loops: Sequence[Loop]


@asynccontextmanager
async def open_hub(settings: HubSettings, clock: Clock, *, owner_only: bool = False) -> AsyncIterator[Hub]:
    """`owner_only` if jobs run as this user, who can read all of the hub: nobody else may submit any."""
    data, files, scheduled = settings.data.expanduser(), settings.files, settings.scheduled_backups
    for folder in (data, files):
        require_private_folder(folder, "the hub's files")
    authority = Authority.load_or_create(files / "ca", "hub", clock.wall_s())
    token = settings.operator_token or operator_token(files)
    tls = _server_certificate(settings, authority, clock.wall_s()) if settings.tls.enabled else None
    hub_client = HubClientCertificate(authority, private_folder(data / "ca"), clock.wall_s())
    counters = HubMetrics()
    database = settings.database or f"sqlite:{data / 'hub.db'}"
    async with open_tables(database, observe=counters.database.observe) as tables:
        if is_postgres(settings.database):
            await _check_folder(tables.cursors, files)
        holder = hub_id(data)
        chunks = await _chunks(settings, files)
        artifacts = Artifacts(tables.index, chunks, clock)
        feed = Feed(
            tables.fleet.events.read,
            tables.newest_event,
            on_published=lambda at_s: counters.event_lag.observe(max(0.0, clock.wall_s() - at_s)),
        )
        key = load_key(settings.secrets_key or files / KEY_FILE, in_use=await tables.secrets.exist())
        vault = SecretVault(tables.secrets, key)
        sender = AppriseSender()
        subscriptions = SubscriptionStore(vault, tables.cursors, feed, sender, clock.wall_s)
        fleet = Fleet(tables.fleet, clock, _fleet_settings(settings), on_expired=counters.leases_expired.inc)
        streams = AttemptStreams(files / "streams", keep_free_bytes=settings.keep_free_bytes)
        metrics, writing = MetricHistory(streams), WriteProbe()

        def backups() -> HubBackups | None:
            return survey_backups(scheduled, clock.wall_s())

        history = FleetHistory(fleet, metrics, lambda: _disk(files, settings.keep_free_bytes, writing), backups)
        gangs = _gangs(settings.coordinator, clock)
        context = GatewayContext(
            fleet=fleet,
            execs=ExecBoard(tables.execs, fleet.now_s),
            artifacts=artifacts,
            leased=LeasedReads(tables.fleet.jobs, tables.fleet.plans, artifacts, clock),
            streams=streams,
            metrics=metrics,
            history=history,
            writing=writing,
            identity=tables.identity,
            enrollment=Enrollment(tables.identity, authority, clock, hub_names=_names(settings)),
            authenticator=Authenticator(tables.identity, clock, authority=authority, operator_token=token),
            authority=authority,
            schemas=tables.cursors,
            secrets=vault,
            subscriptions=subscriptions,
            sweeps=DeclaredSweeps(tables.sweeps, fleet),
            schedules=DeclaredSchedules(tables.schedules, fleet),
            feed=feed,
            clock=clock,
            tls=settings.tls.enabled,
            address=format_unix_address(settings.socket),
            public_read=settings.public_read,
            require_sandbox=settings.require_sandbox,
            owner_only=owner_only,
            manifest=settings.manifest,
            pace=BodyPace(grace_s=settings.body_grace_s),
            proxy=ServerProxy(tls=hub_client.context),
            coordinator=_coordinator(settings.coordinator, clock),
            gangs=gangs,
            front_secret=hmac.digest(token.reveal().encode(), b"keys of servers that are jobs", "sha256"),
            limits=RootLimits(
                send_s=settings.send_s,
                failures=AuthFailures(settings.max_failures),
                trusted_proxies=settings.proxies,
            ),
            hub_metrics=counters,
            data=data,
            backups=backups,
        )
        delivery = FeedDelivery(feed, tables.cursors, holder)
        dispatcher = SubscriptionDispatcher(subscriptions, sender, context=context, delivery=delivery)
        live = LiveTopics(feed, context.stopping)
        pages = build_pages(
            api=LocalApi(ROUTES),
            clock=clock,
            authenticator=context.authenticator,
            failures=context.limits.failures,
            live=live,
            server_id=authority.pin[:8],
            tls=settings.tls.enabled,
        )
        loops = [
            *_loops(settings, context, tables, [hub_client, *([] if tls is None else [tls])]),
            *_maintenance_loops(settings, context, tables.cursors, holder),
            *_webhook_loops(settings, context, delivery),
            Loop(interval_s=SUBSCRIPTION_S, run_once=dispatcher.run_once),
            Loop(interval_s=SWEEP_S, run_once=SweepRunner(tables, context, holder).run_once),
            Loop(interval_s=SCHEDULE_S, run_once=ScheduleRunner(tables.schedules, context).run_once),
            Loop(interval_s=GAP_S, run_once=live.run_once, max_backoff_s=TICK_S),
        ]
        try:
            yield Hub(context=context, app=application(context, pages), tls=tls, loops=loops)
        finally:
            sender.close()
            if gangs is not None:
                await gangs.close()
            await context.proxy.close()
            context.validation.close()
            await chunks.close()


def _disk(files: Path, keep_free_bytes: int, writing: WriteProbe) -> HubDisk:
    found = os.statvfs(files)
    return HubDisk(found.f_bavail * found.f_frsize, keep_free_bytes, writable=not writing.fails)


def _fleet_settings(settings: HubSettings) -> FleetSettings:
    return FleetSettings(
        stale_after_s=settings.stale_after_s, reserve_after_s=settings.reserve_after_s, preempt=settings.preempt
    )


def _coordinator(settings: GangCoordinatorSettings | None, clock: Clock) -> GangCoordinator | None:
    if settings is None:
        return None
    tokens = None if settings.token_secret is None else Tokens(settings.token_secret)

    def sign(job: str, token_id: str) -> str:
        assert tokens is not None
        now_s = round(clock.wall_s())
        expires_s = now_s + round(settings.token_s)
        return tokens.issue(Claims(job=job, role=TokenRole.WORKER, expires_s=expires_s, id=token_id, issued_s=now_s))

    return GangCoordinator(
        address=settings.address,
        ca_pem="" if settings.ca is None else _read_pem(settings.ca),
        checkpoint_root=settings.checkpoint_root,
        token_s=settings.token_s,
        sign=None if tokens is None else sign,
    )


def _gangs(settings: GangCoordinatorSettings | None, clock: Clock) -> CoordinatorGangs | None:
    """The dashboard's view of gangs. A hub that only starts them needs no gRPC."""
    if settings is None:
        return None
    try:
        return open_gangs(settings, clock)
    except ModuleNotFoundError as error:
        _log.warning("gangs_not_shown", missing=error.name, hint="install the extra worker beside hub")
        return None


def _read_pem(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise StrataError(Code.INVALID, f"hub.coordinator.ca cannot be read: {error}") from error


def _server_certificate(settings: HubSettings, authority: Authority, now_s: float) -> ServerCertificate:
    # Each hub has a certificate of its own, with its own names.
    folder = private_folder(settings.data.expanduser() / "ca")
    certificate, key = settings.tls.certificate, settings.tls.key
    files = None if certificate is None or key is None else (certificate, key)
    return ServerCertificate(authority, folder, _names(settings), now_s, files=files)


def _names(settings: HubSettings) -> Sequence[str]:
    return settings.tls.names or own_names(settings.listen)


def operator_token(data: Path) -> Secret:
    """The one of this folder, made at the first start."""
    _made_once(data / TOKEN_FILE, secrets.token_hex(24))
    return read_secret(data / TOKEN_FILE)


def hub_id(data: Path) -> str:
    """The holder of this hub's leases, also after a restart. A copy of the folder on another machine is another hub."""
    return f"{socket.gethostname()}:{_made_once(data / HUB_ID_FILE, secrets.token_hex(8))}"


def _made_once(path: Path, text: str) -> str:
    """The text in this file, which is this one if there is none yet. Of two hubs that start at once the first wins."""
    if not path.exists():
        create_file(path, f"{text}\n".encode())
    return path.read_text(encoding="utf-8").strip()


async def _check_folder(cursors: CursorStore, files: Path) -> None:
    """CONFLICT if the hubs of this database have their files in another folder: one would lack what another stores."""
    if not await cursors.acquire(FILES, _made_once(files / FOLDER_ID_FILE, secrets.token_hex(8)), inf):
        raise StrataError(
            Code.CONFLICT,
            f"{files} is not the folder in which the hubs of this database store their files",
            hint="set hub.shared to that folder; if it is lost, 'strata restore' a backup",
        )


def _loops(
    settings: HubSettings,
    context: HubContext,
    tables: Tables,
    certificates: Sequence[ServerCertificate | HubClientCertificate],
) -> Sequence[Loop]:
    async def renew_certificates() -> None:
        for certificate in certificates:
            certificate.renew(context.clock.wall_s())

    loops = [
        Loop(interval_s=TICK_S, run_once=context.fleet.leases.tick, max_backoff_s=TICK_S),
        Loop(interval_s=TICK_S, run_once=context.fleet.samples.run_once, max_backoff_s=TICK_S),
        Loop(interval_s=TICK_S, run_once=context.execs.run_once, max_backoff_s=TICK_S),
        Loop(interval_s=GAP_S, run_once=context.feed.run_once, max_backoff_s=TICK_S),
        Loop(
            interval_s=RESERVE_S,
            run_once=context.fleet.claims.plan_reservations,
            max_backoff_s=RESERVE_S,
            max_share=SHARE,
        ),
        Loop(interval_s=IDLE_CHECK_S, run_once=context.fleet.servers.choose_to_end, max_backoff_s=IDLE_CHECK_S),
        Loop(interval_s=OVERVIEW_S, run_once=context.history.run_once, max_share=SHARE),
        Loop(interval_s=FORGET_CHECK_S, run_once=partial(forget_silent, context), max_share=SHARE),
        Loop(interval_s=HOUR_S, run_once=renew_certificates),
        Loop(interval_s=USES_S, run_once=context.authenticator.write_uses),
    ]
    guard = DiskGuard(settings.data.expanduser(), tables.cursors, context.writing)
    loops.append(Loop(interval_s=CHECK_S, run_once=guard.run_once, max_backoff_s=CHECK_S))
    if tables.copy is not None:
        online_backup = OnlineBackup(settings.data.expanduser() / FOLDER, tables.copy, context.clock)
        loops.append(Loop(interval_s=INTERVAL_S, run_once=online_backup.run_once))
    return loops


def _maintenance_loops(settings: HubSettings, context: HubContext, cursors: CursorStore, holder: str) -> Iterator[Loop]:
    """Runs loops on one hub at a time: of two that collect garbage, the slower one would erase chunks that were stored
    again."""

    async def keep_and_collect() -> None:
        if settings.retention is not None:
            await apply_retention(context.artifacts, settings.retention, "hub", dry_run=False)
        await collect_garbage(context.artifacts, dry_run=False)

    async def scrub_some() -> None:
        await scrub(context.artifacts, max_bytes=SCRUB_BYTES, bytes_per_s=SCRUB_BYTES_PER_S)

    def exclusive(name: str, run_once: RunOnce) -> RunOnce:
        async def run() -> None:
            await run_leased(cursors, name, holder, run_once, lease_s=MAINTENANCE_LEASE_S)

        return run

    yield Loop(interval_s=HOUR_S, run_once=exclusive("collect", keep_and_collect))
    for name, run_once in _history_retention(settings, context).items():
        yield Loop(interval_s=HOUR_S, run_once=exclusive(name, run_once))
    yield Loop(interval_s=HOUR_S, run_once=exclusive("scrub", scrub_some))


def _history_retention(settings: HubSettings, context: HubContext) -> Mapping[str, RunOnce]:
    async def drop_events() -> None:
        if settings.events_keep_days is not None:
            before_s = context.fleet.now_s() - settings.events_keep_days * DAY_S
            while await context.fleet.store.events.drop(before_s):
                pass

    async def thin_metrics() -> None:
        await asyncio.to_thread(
            thin_streams,
            settings.files / "streams",
            context.fleet.now_s(),
            raw_s=_days(settings.metrics_raw_days),
            minutes_s=_days(settings.metrics_minute_days),
        )

    return {"events": drop_events, "metrics": thin_metrics}


def _days(days: float | None) -> float:
    return inf if days is None else days * DAY_S


def _webhook_loops(settings: HubSettings, context: HubContext, delivery: FeedDelivery) -> Iterator[Loop]:
    for hook in settings.webhooks:
        dispatcher = WebhookDispatcher(
            WebhookTarget(hook.url, hook.allow),
            hook.secret,
            hook.kinds,
            delivery=delivery,
            clock=context.clock,
        )
        yield Loop(interval_s=WEBHOOK_S, run_once=dispatcher.run_once)


async def _chunks(settings: HubSettings, files: Path) -> ChunkStore:
    if settings.bucket is not None:
        return _bucket(settings.bucket)
    return await DiskChunks.open(files / "artifacts", keep_free_bytes=settings.keep_free_bytes)


def _bucket(bucket: BucketSettings) -> ChunkStore:
    from strata.fleet.artifacts.objects import ObjectChunks
    from strata.objects import Bucket, S3Access, connect, static_credentials

    credentials = static_credentials(bucket.access_key, bucket.secret_key.reveal())
    access = S3Access(endpoint=bucket.endpoint, region=bucket.region, credentials=credentials)
    return ObjectChunks(Bucket(connect(bucket.name, access), bucket.prefix))
