"""Webhooks: signed, in order, at least once, and only to where they may go."""

from __future__ import annotations

import http.server
import ipaddress
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet import wire
from strata.fleet.core.jobspec import JobSpec
from strata.hub.outbound import WebhookTarget
from strata.hub.settings import Webhook
from strata.hub.webhooks import WebhookDispatcher, sign
from tests.shell.fleet_http.running import Running, running

SECRET = Secret("a secret of both")


class Receiver:
    """A receiver that can be told to fail."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.location = ""
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(receiver.answers.pop(0) if receiver.answers else 204)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook?token=x"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def events(self) -> list[wire.FeedEvent]:
        return [msgspec.json.decode(body, type=wire.FeedEvent) for _, body in self.got]


@contextmanager
def receiver() -> Iterator[Receiver]:
    started = Receiver()
    try:
        yield started
    finally:
        started.close()


def dispatcher(site: Running, url: str, *kinds: str, allow: tuple[str, ...] = ("127.0.0.0/8",)) -> WebhookDispatcher:
    hub = site.hub.context
    cursors = hub.schemas
    return WebhookDispatcher(
        WebhookTarget(url, allow),
        SECRET,
        kinds,
        feed=hub.feed,
        cursors=cursors,  # type: ignore[arg-type]
        clock=SystemClock(),
    )


async def test_events_are_posted_signed_and_in_order(site: Running) -> None:
    with receiver() as other:
        hook = dispatcher(site, other.url, "job.*")
        await site.add(JobSpec(model="before"))
        await hook.run_once()
        ids = [(await site.add(JobSpec(model="m", seed=n)))[0] for n in range(5)]
        await site.with_role("viewer")
        await hook.run_once()
        assert [event.subject for event in other.events()] == ids
        headers, body = other.got[0]
        assert headers["x-strata-signature"] == sign(SECRET, headers["x-strata-timestamp"], body)
        assert headers["x-strata-signature"] != sign(Secret("other"), headers["x-strata-timestamp"], body)
        assert headers["x-strata-delivery"] == other.events()[0].cursor
        await hook.run_once()
        assert len(other.got) == 5


async def test_a_receiver_that_fails_gets_the_event_again_and_none_is_skipped(site: Running) -> None:
    with receiver() as other:
        hook = dispatcher(site, other.url, "job.created")
        await hook.run_once()
        ids = [(await site.add(JobSpec(model="m", seed=n)))[0] for n in range(3)]
        other.answers = [204, 500]
        with pytest.raises(StrataError) as error:
            await hook.run_once()
        assert error.value.code is Code.UNAVAILABLE
        # A new process goes on where the old one stopped.
        await dispatcher(site, other.url, "job.created").run_once()
        assert [event.subject for event in other.events()] == [ids[0], ids[1], ids[1], ids[2]]


async def test_a_redirect_is_not_followed(site: Running) -> None:
    with receiver() as other, receiver() as inside:
        hook = dispatcher(site, other.url)
        await hook.run_once()
        await site.add(JobSpec(model="m"))
        other.answers, other.location = [302, 307, 301], inside.url
        for _ in range(3):
            with pytest.raises(StrataError):
                await hook.run_once()
        assert inside.got == []


async def test_the_hub_delivers_by_itself(tmp_path: Path) -> None:
    with receiver() as other:
        hook = Webhook(url=other.url, secret=SECRET, kinds=("job.created",), allow=("127.0.0.0/8",))
        async with running(tmp_path / "hub", webhooks=(hook,)) as site:
            records = site.hub.context.schemas
            import asyncio

            async with asyncio.timeout(30):
                # It begins with what comes after its first look.
                while not await _cursors(records):
                    await asyncio.sleep(0)
                (job_id,) = await site.add(JobSpec(model="m"))
                while not other.got:
                    await asyncio.sleep(0)
            assert [event.subject for event in other.events()] == [job_id]


async def _cursors(records: object) -> list[object]:
    thread = records._thread  # type: ignore[attr-defined]
    return list(await thread.read(lambda db: db.execute("SELECT * FROM hub_cursor").fetchall()))


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
