"""Subscriptions: messages about jobs to services of people, through Apprise, to a real receiver."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from strata.fleet.wire.identities import HubKeyReply
from strata.fleet.wire.jobs import Job, SubmitReply
from strata.fleet.wire.owners import SubscriptionReply, SubscriptionsReply, SubscriptionTestReply
from strata.hub.compose import hub_id
from strata.hub.cursor_store import FeedDelivery
from strata.hub.subscriptions import AppriseSender, SubscriptionDispatcher, SubscriptionStore
from tests.shell.fleet_http.running import HostClient, Running, ok, refused, running
from tests.support.webhook_receiver import WebhookReceiver

# Apprise imports it when it loads its plugins.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")


def url_of(receiver: WebhookReceiver, **parameters: str) -> str:
    """As Apprise spells a POST of JSON."""
    port = receiver.url.rpartition(":")[2].partition("/")[0]
    query = "".join(f"&{name}={value}" for name, value in parameters.items())
    return f"json://127.0.0.1:{port}/sEcReT-token?format=text{query}"


def messages(receiver: WebhookReceiver) -> list[dict[str, Any]]:
    return [msgspec.json.decode(each.body) for each in receiver.deliveries]


async def subscribe(client: httpx.AsyncClient, url: str, name: str = "phone", **more: Any) -> SubscriptionReply:
    reply = await client.put(f"/v1/subscription/{name}", json={"url": url, **more})
    return ok(reply, SubscriptionReply)


async def submit(client: httpx.AsyncClient, mode: str) -> str:
    trainer = {"name": "t", "command": ["x"], "directory": "/d"}
    body = {"spec": {"model": "tree", "mode": mode, "trainer": "t", "max_attempts": 1}, "trainer": trainer}
    return ok(await client.post("/v1/jobs", json=body), SubmitReply).job.id


async def run_job(host: HostClient, claim: str, *, error: str = "") -> None:
    (lease,) = await host.claim(claim)
    path = f"/v1/job/{lease.job_id}"
    await host.http.put(f"{path}/log?epoch={lease.epoch}&offset=0", content=b"epoch 1\nepoch 2\n")
    metrics = b'{"type": "metrics", "at_s": 1, "step": 3, "values": {"loss": 0.25}}\n'
    await host.http.put(f"{path}/metrics?epoch={lease.epoch}&offset=0", content=metrics)
    if error:
        body = {"epoch": lease.epoch, "cause": "user_error", "error": error}
        ok(await host.http.post(f"{path}/fail", json=body), Job)
    else:
        ok(await host.http.post(f"{path}/complete", json={"epoch": lease.epoch}), Job)


def dispatcher(site: Running) -> SubscriptionDispatcher:
    """One of a hub that has just been started."""
    context = site.hub.context
    store = context.subscriptions
    assert isinstance(store, SubscriptionStore)
    delivery = FeedDelivery(context.feed, context.schemas, hub_id(site.data))  # type: ignore[arg-type]
    return SubscriptionDispatcher(store, AppriseSender(), context=context, delivery=delivery)


async def received(receiver: WebhookReceiver, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(30):
        while len(receiver.deliveries) < count:
            await asyncio.sleep(0.01)
    return messages(receiver)


async def test_the_owner_of_a_job_gets_a_message_when_it_ends(site: Running) -> None:
    operator, other = await site.operator(), await site.with_role("researcher")
    host = await site.host("desk")
    with WebhookReceiver() as receiver:
        added = await subscribe(operator, url_of(receiver))
        assert (added.service, added.events) == ("JSON", ("completed", "failed", "expired"))
        for client, mode, error in ((operator, "good", ""), (other, "of-another", ""), (operator, "bad", "boom")):
            await submit(client, mode)
            await run_job(host, mode, error=error)
        first, second = await received(receiver, 2)
    assert (first["title"], first["type"]) == ("tree-good is completed", "success")
    assert (second["title"], second["type"]) == ("tree-bad failed", "failure")
    for part in ("host: desk", "metrics: loss 0.25", "epoch 2", "strata show "):
        assert part in first["message"]
    assert "reason: user_error: attempt 1 of 1 failed" in second["message"]


async def test_a_lost_host_is_reported_to_those_who_subscribe_to_it(site: Running) -> None:
    operator, host = await site.operator(), await site.host("desk")
    with WebhookReceiver() as receiver:
        await subscribe(operator, url_of(receiver), events=["host_lost"])
        await submit(operator, "a")
        await run_job(host, "a")
        fleet = site.hub.context.fleet
        assert await fleet.store.hosts.record_lost(fleet.now_s() + 1, fleet.now_s()) == 1
        await dispatcher(site).run_once()
        message, *_ = await received(receiver, 1)
    assert (message["title"], message["type"]) == ("desk is lost: it was silent for longer than a lease", "warning")


async def test_a_message_that_is_refused_is_sent_again_and_a_restart_repeats_none(site: Running) -> None:
    operator, host = await site.operator(), await site.host("desk")
    with WebhookReceiver() as receiver:
        receiver.answers = [500]
        await subscribe(operator, url_of(receiver), events=["started", "completed"])
        await submit(operator, "a")
        await run_job(host, "a")
        await received(receiver, 1)
        # The hub waits some seconds; a new one does not know of the failure.
        await dispatcher(site).run_once()
        assert [each["title"] for each in messages(receiver)] == ["tree-a is completed"] * 2
        await dispatcher(site).run_once()
        assert len(receiver.deliveries) == 2


async def test_nothing_is_sent_for_a_revoked_key(site: Running) -> None:
    operator = await site.operator()
    made = ok(await operator.post("/v1/keys", json={"name": "o", "role": "operator"}), HubKeyReply)
    leaver = await site.private_client(Authorization=f"Bearer {made.secret}")
    host = await site.host("desk")
    with WebhookReceiver() as receiver, WebhookReceiver() as stays:
        await subscribe(leaver, url_of(receiver), all_jobs=True)
        await subscribe(operator, url_of(stays), all_jobs=True)
        await operator.post(f"/v1/key/{made.key.id}/revoke")
        await submit(operator, "a")
        await run_job(host, "a")
        await received(stays, 1)
        await dispatcher(site).run_once()
        assert receiver.deliveries == []


async def test_a_plugin_that_breaks_does_not_hold_up_the_others(
    site: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = importlib.import_module("apprise.plugins.custom_form").NotifyForm

    def broken(*_: object, **__: object) -> None:
        raise ValueError("form://sEcReT-token")

    monkeypatch.setattr(plugin, "notify", broken)
    operator, host = await site.operator(), await site.host("desk")
    with WebhookReceiver() as receiver:
        await subscribe(operator, url_of(receiver).replace("json:", "form:"), "a-broken")
        await subscribe(operator, url_of(receiver), "b-good")
        await submit(operator, "a")
        await run_job(host, "a")
        await received(receiver, 1)
        await dispatcher(site).run_once()
    failed = [vars(each)["fields"] for each in caplog.records if each.message == "subscription_failed"]
    assert {each["reason"] for each in failed} == {"ValueError"}, "without the text, which may hold a URL"


async def test_a_test_message_is_sent_at_once_or_says_that_it_was_not_accepted(site: Running) -> None:
    operator, other = await site.operator(), await site.with_role("researcher")
    with WebhookReceiver() as receiver, WebhookReceiver() as inside:
        await subscribe(operator, url_of(receiver, redirect="yes"))
        reply = ok(await operator.post("/v1/subscription/phone/test"), SubscriptionTestReply)
        assert reply.service == "JSON"
        assert messages(receiver)[0]["message"].startswith("This is a test of the subscription phone.")
        receiver.answers, receiver.location = [307], inside.url
        assert refused(await operator.post("/v1/subscription/phone/test")) == (409, "precondition")
        assert inside.deliveries == [], "redirects are not followed, whatever the URL says"
        assert refused(await other.post("/v1/subscription/phone/test")) == (404, "not_found")


async def test_a_researcher_may_not_name_an_address(site: Running) -> None:
    researcher = await site.with_role("researcher")
    for url in (
        "json://127.0.0.1/",
        "ntfy://127.0.0.1/topic",
        "ntfys://10.0.0.1/topic?mode=private",
        "matrixs://user:pass@10.0.0.1/#room",
        "mailto://user:pass@mail.example.org",
        "syslog://",
    ):
        reply = await researcher.put("/v1/subscription/x", json={"url": url})
        assert refused(reply) == (403, "forbidden"), url


async def test_a_researcher_may_use_public_services_and_sees_no_url_again(site: Running, tmp_path: Path) -> None:
    researcher, viewer = await site.with_role("researcher"), await site.with_role("viewer")
    slack = "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    for name, url in (
        ("a", slack),
        ("b", "ntfy://sEcReT-topic"),
        ("c", "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3d"),
    ):
        await subscribe(researcher, url, name)
    reply = await researcher.get("/v1/subscriptions")
    listed = ok(reply, SubscriptionsReply).subscriptions
    assert [(each.name, each.service) for each in listed] == [("a", "Slack"), ("b", "ntfy"), ("c", "Discord")]
    assert "TIiajkdnlazkcOXrIdevi7FQ" not in reply.text
    on_disk = b"".join(path.read_bytes() for path in site.data.rglob("*") if path.is_file())
    assert b"TIiajkdnlazkcOXrIdevi7FQ" not in on_disk
    assert (await viewer.get("/v1/subscriptions")).status_code == 403
    assert (await researcher.delete("/v1/subscription/b")).status_code == 204
    assert (await researcher.delete("/v1/subscription/b")).status_code == 404
    assert refused(await researcher.put("/v1/subscription/d", json={"url": "nonsense://x"}))[0] == 400
    assert refused(await researcher.put("/v1/subscription/no%20name", json={"url": slack}))[0] == 400
    both = {"url": slack, "project": "p", "all_jobs": True}
    assert refused(await researcher.put("/v1/subscription/d", json=both))[0] == 400


async def test_a_hub_without_apprise_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    async with running(tmp_path / "hub") as site:
        reply = await (await site.operator()).put("/v1/subscription/x", json={"url": "ntfy://topic"})
        assert "pip install 'strata-train[notify]'" in reply.text
