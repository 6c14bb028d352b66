"""Webhooks: signed, in order, at least once, and only to where they may go."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path

import msgspec
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.events import FeedEvent
from strata.hub.cursor_store import CursorStore, FeedDelivery
from strata.hub.outbound import WebhookTarget
from strata.hub.settings import Webhook
from strata.hub.webhooks import WebhookDispatcher, sign
from tests.shell.fleet_http.running import Running, running
from tests.support.webhook_receiver import WebhookReceiver

SECRET = Secret("a secret of both")


def events(receiver: WebhookReceiver) -> list[FeedEvent]:
    return [msgspec.json.decode(each.body, type=FeedEvent) for each in receiver.deliveries]


def dispatcher(site: Running, url: str, *kinds: str, allow: tuple[str, ...] = ("127.0.0.0/8",)) -> WebhookDispatcher:
    delivery = FeedDelivery(site.hub.context.feed, site.hub.context.schemas, "a hub")  # type: ignore[arg-type]
    return WebhookDispatcher(WebhookTarget(url, allow), SECRET, kinds, delivery=delivery, clock=SystemClock())


async def test_events_are_posted_signed_and_in_order(site: Running) -> None:
    with WebhookReceiver() as other:
        hook = dispatcher(site, other.url, "job.*")
        await site.add(JobSpec(model="before"))
        await hook.run_once()
        ids = [(await site.add(JobSpec(model="m", seed=n)))[0] for n in range(5)]
        await site.with_role("viewer")
        await hook.run_once()
        assert [event.subject for event in events(other)] == ids
        headers, body = other.deliveries[0]
        assert headers["x-strata-signature"] == sign(SECRET, headers["x-strata-timestamp"], body)
        assert headers["x-strata-signature"] != sign(Secret("other"), headers["x-strata-timestamp"], body)
        assert headers["x-strata-delivery"] == events(other)[0].cursor
        await hook.run_once()
        assert len(other.deliveries) == 5


async def test_a_receiver_that_fails_gets_the_event_again_and_none_is_skipped(site: Running) -> None:
    with WebhookReceiver() as other:
        hook = dispatcher(site, other.url, "job.created")
        await hook.run_once()
        ids = [(await site.add(JobSpec(model="m", seed=n)))[0] for n in range(3)]
        other.answers = [204, 500]
        with pytest.raises(StrataError) as error:
            await hook.run_once()
        assert error.value.code is Code.UNAVAILABLE
        # A new process goes on where the old one stopped.
        await dispatcher(site, other.url, "job.created").run_once()
        assert [event.subject for event in events(other)] == [ids[0], ids[1], ids[1], ids[2]]


async def test_a_redirect_is_not_followed(site: Running) -> None:
    with WebhookReceiver() as other, WebhookReceiver() as inside:
        hook = dispatcher(site, other.url)
        await hook.run_once()
        await site.add(JobSpec(model="m"))
        other.answers, other.location = [302, 307, 301], inside.url
        for _ in range(3):
            with pytest.raises(StrataError):
                await hook.run_once()
        assert inside.deliveries == []


async def test_the_hub_delivers_by_itself(tmp_path: Path) -> None:
    with WebhookReceiver() as other:
        hook = Webhook(url=other.url, secret=SECRET, kinds=("job.created",), allow=("127.0.0.0/8",))
        async with running(tmp_path / "hub", webhooks=(hook,)) as site:
            records = site.hub.context.schemas
            assert isinstance(records, CursorStore)
            async with asyncio.timeout(30):
                # It begins with what comes after its first look.
                while not await records._database.rows("SELECT name FROM hub_cursor"):
                    await asyncio.sleep(0)
                (job_id,) = await site.add(JobSpec(model="m"))
                while not other.deliveries:
                    await asyncio.sleep(0)
            assert [event.subject for event in events(other)] == [job_id]


def test_a_network_that_the_settings_name_may_be_reached() -> None:
    inside = ipaddress.ip_address("10.1.2.3")
    WebhookTarget("https://hook.lan/", ["10.1.0.0/16"]).judge(inside)
    with pytest.raises(StrataError):
        WebhookTarget("https://hook.lan/", ["10.2.0.0/16"]).judge(inside)
    with pytest.raises(StrataError):
        WebhookTarget("http://hook.lan/", ["10.1.0.0/16"]).judge(inside)
    WebhookTarget("https://hook.example.org/").judge(ipaddress.ip_address("93.184.216.34"))
    with pytest.raises(StrataError):
        WebhookTarget("https://hook.example.org/", ["nonsense"])
