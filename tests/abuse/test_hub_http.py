"""What a request of the hub may not be: hostile in its head, its body or its artifacts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from strata.fleet.http.table import TABLE
from strata.http.declare import Content
from tests.shell.fleet_http.running import Running, refused, running
from tests.shell.fleet_http.test_access import url

Tries = Callable[[int], None]
HTTP, JSON, ARTIFACTS = "hub: HTTP", "hub: JSON", "hub: artifacts"
AS_JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


@pytest.mark.attack(JSON, "a body that a web page can send to another origin: text/plain, a form, no type at all")
async def test_a_body_that_does_not_say_it_is_json_is_refused_unread(site: Running, tries: Tries) -> None:
    operator, host = await site.operator(), await site.host("anna")
    for endpoint in TABLE:
        kind = endpoint.signature().body
        if kind is None or issubclass(kind, Content):
            continue
        client = host.http if endpoint.need.role is None and not endpoint.need.public else operator
        for sent in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            tries(1)
            headers = {"Content-Type": sent, "Origin": "http://evil.example", "Host": "evil.example"}
            reply = await client.request(endpoint.method, url(endpoint.path), content=b"{}", headers=headers)
            assert refused(reply) == (415, "unsupported"), (endpoint.path, sent)
        typed = await client.request(
            endpoint.method, url(endpoint.path), content=b"[]", headers={"Content-Type": "application/json; charset=x"}
        )
        assert refused(typed) == (400, "invalid"), endpoint.path


@pytest.mark.attack(JSON, "more than 20 KiB to the one route that reads a body of anybody")
async def test_who_is_unknown_may_send_20_kib_at_most(site: Running) -> None:
    anybody = await site.client(**AS_JSON)
    large = b'{"invite_id": "' + b"x" * (20 << 10) + b'"}'
    assert refused(await anybody.post("/v1/join", content=large)) == (413, "invalid")
    public = [each for each in TABLE if each.need.public and each.signature().body is not None]
    assert [(each.path, each.limit) for each in public] == [("/v1/join", 20 << 10)]
