"""What a request of the hub may not be: hostile in its head, its body or its artifacts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from strata.base.digest import sha256_hex
from strata.base.errors import StrataError
from strata.fleet.artifacts.manifest import File, Limits, Manifest, check_manifest
from strata.fleet.artifacts.paths import check_together
from strata.fleet.http.table import TABLE
from strata.http.declare import Content
from tests.abuse.test_body_time import assert_linear
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


def deep_paths(count: int, depth: int = 32) -> list[str]:
    return sorted("/".join(f"{number:x}{level:x}" for level in range(depth)) for number in range(count))


@pytest.mark.attack(ARTIFACTS, "a manifest of 65,000 paths 32 folders deep")
def test_the_paths_of_a_manifest_are_compared_in_linear_time() -> None:
    def shape(n: int) -> bytes:
        return "\n".join(deep_paths(n // 24)).encode()

    assert_linear(lambda raw: check_together(raw.decode().split("\n")), shape, 1 << 20, "check_together")
    began_s = time.thread_time()
    check_together(deep_paths(30_000))
    assert time.thread_time() - began_s < 10


@pytest.mark.attack(ARTIFACTS, "a manifest whose paths are longer than 8 MiB together")
def test_the_paths_of_a_manifest_have_a_length_together() -> None:
    paths = sorted("/".join(f"{number:05d}{'x' * 200}" for _ in range(4)) for number in range(11_000))
    empty = sha256_hex(b"")
    with pytest.raises(StrataError, match="all paths"):
        check_manifest(Manifest(files=tuple(File(path=path, size=0, sha256=empty) for path in paths)), Limits())


@pytest.mark.attack(ARTIFACTS, "a manifest of 62 MB while others call")
async def test_a_large_manifest_is_refused_and_nobody_waits_for_it(site: Running) -> None:
    researcher, anybody = await site.with_role("researcher"), await site.client()
    empty = sha256_hex(b"")
    large = b"x" * (17 << 20)
    assert refused(await researcher.post("/v1/artifacts", content=large, headers=AS_JSON)) == (413, "invalid")
    files = [{"path": path, "size": 0, "sha256": empty, "chunks": []} for path in deep_paths(10_000, 16)]
    body = {"manifest": {"files": files}, "lineage": {"kind": "source"}}
    sending = asyncio.create_task(researcher.post("/v1/artifacts", json=body))
    slowest_s = 0.0
    while not sending.done():
        began_s = time.monotonic()
        assert (await anybody.get("/v1/health")).status_code == 200
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    assert (await sending).status_code == 200
    assert slowest_s < 5


@pytest.mark.attack(ARTIFACTS, "a right-to-left override, an isolate or another mark of direction in a path")
async def test_a_path_may_not_change_the_order_in_which_it_is_shown(site: Running, tries: Tries) -> None:
    researcher = await site.with_role("researcher")
    for mark in "\u202e\u202a\u2066\u2069\u200e\u200f\u061c":
        tries(1)
        file = {"path": f"safe{mark}gnp.exe", "size": 0, "sha256": sha256_hex(b""), "chunks": []}
        body = {"manifest": {"files": [file]}, "lineage": {"kind": "source"}}
        assert refused(await researcher.post("/v1/artifacts", json=body)) == (400, "invalid")
