"""Sends messages of subscriptions by Apprise: allowed services, at most 20 of an owner, age of a message (a day),
timeouts, retries, and refusals. Texts of messages are in `fleet.core.subscription`.

A subscription lies in the secret store, encrypted as a whole: its URL holds a token. It reads the event feed with a
cursor of its own, as a webhook does, so a restart repeats at most the message being sent, and of several hubs on one
database one at a time sends to it. A message that its service does not accept is retried with backoff, until its event
is a day old. Apprise opens its own connections, so the guard of webhooks does not see them: a researcher may use only
services whose address Apprise itself knows, and gives no parameters in the URL. No plugin gets a template: Apprise
would fetch it from any address, or from the hub's disk.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.retry import Backoff, no_jitter
from strata.database import event_kinds
from strata.database.events import EventRecord, StoredEvent
from strata.fleet.core.ownership import OPERATOR
from strata.fleet.core.report import MetricsReport, parse_lines
from strata.fleet.core.subscription import (
    EventMessage,
    JobNews,
    SubscribedEvent,
    Subscription,
    compose_host_message,
    compose_message,
)
from strata.fleet.http.context import HubContext
from strata.fleet.http.feed import Feed
from strata.fleet.records import AttemptRow, StoredSubscription
from strata.fleet.streams import Name
from strata.hub.cursor_store import CursorStore, FeedDelivery
from strata.hub.secret_store import SecretVault
from strata.identity.roles import Principal, Role

SCOPE: Final = "subscription"
"""The scope in the secret store, beside the scopes of callers and of projects."""
MAX_PER_OWNER: Final = 20
MAX_AGE_S: Final = 86_400.0
"""An event that is older is not sent any more: after a long outage nobody wants yesterday's messages."""
PUBLIC_SERVICES: Final = frozenset({"Slack", "Discord", "Telegram", "Pushover", "Pushbullet", "Google Chat"})
"""Their plugins connect to addresses that are constants of Apprise. ntfy is added where its URL means ntfy.sh."""
_TAIL: Final = 16_384
_TIMEOUT_S: Final = 10.0
_SENDERS: Final = 4
_log = log.get(__name__)


class AppriseSender:
    """Sends through Apprise, in threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_SENDERS, thread_name_prefix="apprise")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, url: str, caller: Principal) -> str:
        """The name of the URL's service; FORBIDDEN if this caller may not use it."""
        operator = caller.role is not None and caller.role >= Role.OPERATOR
        if "?" in url and not operator:
            raise StrataError(
                Code.FORBIDDEN,
                "only an operator may subscribe with a URL that has parameters",
                hint="leave out what begins with the question mark; gchat://SPACE/KEY/TOKEN for Google Chat",
            )
        plugin = await self._run(lambda: _plugin(url))
        name = str(plugin.service_name)
        if operator:
            return name
        if name in PUBLIC_SERVICES or (name == "ntfy" and str(plugin.mode) == "cloud"):
            return name
        raise StrataError(
            Code.FORBIDDEN,
            f"only an operator may subscribe with {name}, whose URL can name any address",
            hint=f"use ntfy (ntfy://TOPIC), {', '.join(sorted(PUBLIC_SERVICES))}",
        )

    async def send(self, url: str, message: EventMessage) -> None:
        accepted = await self._run(
            lambda: _plugin(url).notify(title=message.title, body=message.body, notify_type=message.severity)
        )
        if not accepted:
            raise StrataError(Code.PRECONDITION, "the service did not accept the message", hint="check its URL")

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _plugin(url: str) -> Any:
    try:
        apprise = importlib.import_module("apprise")
    except ModuleNotFoundError:
        raise StrataError(
            Code.UNSUPPORTED, "the hub needs apprise for this: pip install 'strata-train[notify]' where it runs"
        ) from None
    # Its records quote URLs and bodies.
    logging.getLogger("apprise").disabled = True
    plugin = apprise.Apprise.instantiate(url, asset=apprise.AppriseAsset(http_redirects=False))
    if plugin is None:
        raise StrataError(
            Code.INVALID, "this is not a URL of Apprise", hint="as in ntfy://TOPIC or slack://TOKEN_A/TOKEN_B/TOKEN_C"
        )
    if any(isinstance(value, apprise.AppriseAttachment) and len(value) for value in vars(plugin).values()):
        raise StrataError(Code.FORBIDDEN, "the hub fetches no template for a message", hint="leave out ?template=")
    # A URL can ask for others (`?redirect=yes&rto=9999`).
    plugin.redirects = False
    plugin.socket_connect_timeout = plugin.socket_read_timeout = _TIMEOUT_S
    return plugin


class SubscriptionStore:
    """The subscriptions of all people; no request reads a URL."""

    def __init__(
        self, vault: SecretVault, cursors: CursorStore, feed: Feed, sender: AppriseSender, now_s: Callable[[], float]
    ) -> None:
        self._vault = vault
        self._cursors = cursors
        self._feed = feed
        self._sender = sender
        self._now_s = now_s

    async def add(
        self, caller: Principal, name: str, url: str, events: Sequence[SubscribedEvent], *, project: str, all_jobs: bool
    ) -> StoredSubscription:
        """New, or in place of the one with this name. It covers events from now on."""
        own = [each.name for each in await self.listed(caller.actor)]
        if name not in own and len(own) >= MAX_PER_OWNER:
            raise StrataError(Code.EXHAUSTED, f"there are {MAX_PER_OWNER} subscriptions already")
        service = await self._sender.check(url, caller)
        subscription = Subscription(
            url=url, service=service, events=tuple(dict.fromkeys(events)), project=project, all_jobs=all_jobs
        )
        row = StoredSubscription(owner=caller.actor, name=name, subscription=subscription)
        await self._cursors.put_cursor(cursor_name(row), await self._feed.newest())
        value = msgspec.json.encode(subscription).decode()
        await self._vault.put(SCOPE, _key(row), value, actor=caller.actor, now_s=self._now_s())
        return row

    async def listed(self, owner: str = "") -> Sequence[StoredSubscription]:
        """Those of this owner, or all."""
        keys = [each.name for each in await self._vault.names([SCOPE])]
        if owner:
            keys = [key for key in keys if key.rpartition("/")[0] == owner]
        if not keys:
            return []
        values = await self._vault.reveal([SCOPE], keys)
        return [
            StoredSubscription(
                owner=key.rpartition("/")[0],
                name=key.rpartition("/")[2],
                subscription=msgspec.json.decode(value, type=Subscription),
            )
            for key, value in values.items()
        ]

    async def remove(self, owner: str, name: str) -> None:
        if not await self._vault.remove(SCOPE, f"{owner}/{name}"):
            raise _unknown(name)

    async def send_test(self, owner: str, name: str) -> str:
        """Send a message now; the name of the service that accepted it."""
        row = next((each for each in await self.listed(owner) if each.name == name), None)
        if row is None:
            raise _unknown(name)
        body = f"This is a test of the subscription {name}. It covers: {', '.join(row.subscription.events)}."
        await self._sender.send(row.subscription.url, EventMessage(title="Strata", body=body))
        return row.subscription.service


class SubscriptionDispatcher:
    """Sends what is due. `run_once` never raises for one subscription what would hold up the others."""

    def __init__(
        self,
        subscriptions: SubscriptionStore,
        sender: AppriseSender,
        *,
        context: HubContext,
        delivery: FeedDelivery,
    ) -> None:
        self._subscriptions = subscriptions
        self._sender = sender
        self._delivery = delivery
        self._fleet = context.fleet.store
        self._streams = context.streams
        self._identity = context.identity
        self._clock = context.clock
        self._failures: dict[str, tuple[int, float]] = {}
        """The failures of each subscription that fails: how often in a row, and when to try again."""
        self._done: str | None = None
        """The last published event when all subscriptions had read everything: an idle hub looks at nothing else."""

    async def run_once(self) -> None:
        newest = await self._delivery.feed.published()
        if newest == self._done:
            return
        rows = await self._subscriptions.listed()
        results = await asyncio.gather(*(self._deliver_due(row) for row in rows))
        self._done = newest if all(results) else None

    async def _deliver_due(self, row: StoredSubscription) -> bool:
        """False if something is left for a later try."""
        name = cursor_name(row)
        failures, again_at_s = self._failures.get(name, (0, 0.0))
        if self._clock.monotonic_s() < again_at_s:
            return False
        try:
            delivered = await self._deliver(row, name)
        except Exception as error:  # noqa: BLE001 - the outermost handler of a subscription: plugins raise what they like
            delay_s = Backoff().delay_s(failures + 1, no_jitter())
            self._failures[name] = failures + 1, self._clock.monotonic_s() + delay_s
            # The text of a plugin's error may quote the URL.
            reason = error.message if isinstance(error, StrataError) else type(error).__name__
            _log.warning("subscription_failed", subscription=name, reason=reason, failures=failures + 1)
            return False
        self._failures.pop(name, None)
        return delivered

    async def _deliver(self, row: StoredSubscription, name: str) -> bool:
        subscriber = await self._subscriber(row.owner)
        if subscriber is None:
            await self._delivery.skip(name)
            return True

        async def send(stored: StoredEvent) -> bool:
            message = await self._message(row.subscription, subscriber, stored.event)
            if message is None:
                return False
            await self._sender.send(row.subscription.url, message)
            failpoint("hub.subscription.sent")
            return True

        return await self._delivery.deliver(name, send)

    async def _subscriber(self, actor: str) -> str | None:
        """The name of the key that subscribed, which owns jobs; None if the key is not valid any more."""
        kind, _, key_id = actor.partition(":")
        if kind != "key":
            return OPERATOR.owner
        key = await self._identity.key(key_id)
        return key.name if key is not None and key.valid(self._clock.wall_s()) else None

    async def _message(self, subscription: Subscription, subscriber: str, event: EventRecord) -> EventMessage | None:
        if not subscription.covers_kind(event.kind) or event.at_s < self._clock.wall_s() - MAX_AGE_S:
            return None
        if event.kind == event_kinds.HOST_LOST:
            return compose_host_message(event.kind, await self._host_name(event.subject))
        job = await self._fleet.jobs.get(event.subject)
        if not subscription.covers_job(subscriber, owner=job.owner, project=job.spec.project):
            return None
        attempts = await self._fleet.jobs.attempts(job.id)
        attempt = next((each for each in attempts if each.epoch == event.body.get("epoch")), None)
        news = JobNews(kind=event.kind, job_id=job.id, label=job.spec.label, reason=str(event.body.get("reason") or ""))
        return compose_message(news if attempt is None else await self._with_attempt(news, attempt))

    async def _with_attempt(self, news: JobNews, attempt: AttemptRow) -> JobNews:
        reports, _ = parse_lines((await self._tail(attempt, "metrics")).splitlines()[1:])
        metrics: dict[str, float] = {}
        for report in reports:
            if isinstance(report, MetricsReport):
                metrics |= {name: value for name, value in report.values.items() if isinstance(value, float)}
        text = (await self._tail(attempt, "log")).decode("utf-8", "replace").strip() or attempt.error
        name = await self._host_name(attempt.host_id)
        return msgspec.structs.replace(news, host=name, metrics=metrics, log_tail=text)

    async def _host_name(self, host_id: str) -> str:
        host = await self._identity.host(host_id)
        return host_id if host is None else host.name

    async def _tail(self, attempt: AttemptRow, name: Name) -> bytes:
        """The end of a stream, after a line end: what is before it may be the rest of a longer line."""
        size = await self._streams.size(attempt.job_id, attempt.epoch, name)
        content = await self._streams.read(attempt.job_id, attempt.epoch, name, max(0, size - _TAIL))
        return b"\n" + content if size <= _TAIL else content


def cursor_name(row: StoredSubscription) -> str:
    return f"{SCOPE}:{_key(row)}"


def _key(row: StoredSubscription) -> str:
    return f"{row.owner}/{row.name}"


def _unknown(name: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"you have no subscription {name}", hint="strata notify list")
