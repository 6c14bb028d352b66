"""What a request may not be: too large, too deep, too slow, or something other than it says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from strata.base.digest import sha256_hex
from strata.fleet import wire
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.http.table import TABLE
from strata.http.declare import Upload
from tests.shell.fleet_http.running import Running, ok, refused, running
from tests.shell.fleet_http.test_access import url

JSON = {"Content-Type": "application/json"}
JSON_ROUTES = [endpoint for endpoint in TABLE if endpoint.signature().body not in (None, Upload)]


async def test_every_route_that_reads_json_refuses_what_is_none(site: Running) -> None:
    operator, host = await site.operator(), await site.host("anna")
    bodies = [
        b"\xff\xfe",
        b"[",
        b'{"x": NaN}',
        b'{"unknown_field": 1}',
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b'{"text": "\\ud800"}',
        b"1e999",
        b"null",
        b'"text"',
    ]
    for endpoint in JSON_ROUTES:
        client = host.http if endpoint.need.role is None and not endpoint.need.public else operator
        for body in bodies:
            if len(body) < endpoint.limit:
                reply = await client.request(endpoint.method, url(endpoint.path), content=body, headers=JSON)
                assert refused(reply) == (400, "invalid"), (endpoint.path, body[:40], reply.text)


async def test_a_body_has_a_limit_whether_it_tells_its_length_or_not(site: Running) -> None:
    host = await site.host("anna")
    large = b'{"claim_id": "' + b"x" * 70_000 + b'"}'
    assert refused(await host.http.post("/v1/job/claim", content=large, headers=JSON)) == (413, "invalid")

    async def parts() -> object:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    undeclared = await host.http.post("/v1/job/claim", content=parts(), headers=JSON)  # type: ignore[arg-type]
    assert refused(undeclared) == (413, "invalid")


@pytest.mark.parametrize(
    "hyper",
    [
        '{"n": 123456789012345678901234567890}',
        '{"n": -9007199254740993}',
        '{"n": 1' + "0" * 5000 + "}",
        '{"text": "a\\u0000b"}',
        '{"a\\u0000b": 1}',
        '{"deep": ' + "[" * 70 + "]" * 70 + "}",
    ],
)
async def test_a_value_that_cannot_be_kept_exactly_is_refused(site: Running, hyper: str) -> None:
    researcher = await site.with_role("researcher")
    trainer = '{"name": "t", "command": ["x"], "directory": "/d"}'
    body = f'{{"spec": {{"model": "m", "trainer": "t", "hyper": {hyper}}}, "trainer": {trainer}}}'
    reply = await researcher.post("/v1/jobs", content=body.encode(), headers=JSON)
    assert refused(reply) == (400, "invalid"), reply.text


async def test_brackets_inside_texts_are_no_depth(site: Running) -> None:
    researcher = await site.with_role("researcher")
    trainer = {"name": "t", "command": ["x"], "directory": "/d"}
    spec = {"model": "m", "trainer": "t", "hyper": {"text": '["{\\"' * 500}}
    ok(await researcher.post("/v1/jobs", json={"spec": spec, "trainer": trainer}), wire.SubmitReply)


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "limit=1&limit=2",
        "unknown=1",
        "model=%00",
        "status=sleeping",
        "after=" + "x" * 200,
        "model=%ff%fe",
    ],
)
async def test_a_query_that_is_not_understood_is_refused(site: Running, query: str) -> None:
    viewer = await site.with_role("viewer")
    assert refused(await viewer.get(f"/v1/jobs?{query}")) == (400, "invalid")


async def test_numbers_of_a_query_are_numbers(site: Running) -> None:
    viewer = await site.with_role("viewer")
    for value in ("nan", "inf", "-1", "1e9"):
        assert refused(await viewer.get(f"/v1/events?wait_s={value}")) == (400, "invalid"), value


@pytest.mark.parametrize("path", ["/v1/job/a%00b", "/v1/job/..%2f..%2fetc", "/v1/job/%ff", "/v1/host/%00/drain"])
async def test_an_id_is_an_id_and_no_path(site: Running, path: str) -> None:
    reply = await (await site.operator()).get(path)
    assert reply.status_code in (400, 404, 405), reply.text


async def test_bytes_that_are_not_what_they_are_called_are_not_kept(site: Running) -> None:
    researcher = await site.with_role("researcher")
    digest = sha256_hex(b"right")
    wrong = await researcher.put(f"/v1/chunk/{digest}", params={"size": 5}, content=b"wrong")
    assert refused(wrong) == (400, "invalid")
    longer = await researcher.put(f"/v1/chunk/{digest}", params={"size": 5}, content=b"right and more")
    assert refused(longer) == (400, "invalid")
    short = await researcher.put(f"/v1/chunk/{digest}", params={"size": 5}, content=b"ri")
    assert refused(short) == (409, "precondition")
    elsewhere = await researcher.put(f"/v1/chunk/{digest}", params={"size": 5, "offset": 4}, content=b"t")
    assert refused(elsewhere) == (409, "conflict")
    assert refused(await researcher.get(f"/v1/chunk/{digest}")) == (404, "not_found")
    assert refused(await researcher.put("/v1/chunk/..", params={"size": 1}, content=b"x"))[0] in (400, 404)
    blob = await researcher.put(f"/v1/source/{hashlib.sha256(b'a').hexdigest()}", content=b"b")
    assert refused(blob) == (400, "invalid")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "C:\\x", "a\x00b", "."])
async def test_a_manifest_cannot_name_a_file_outside(site: Running, path: str) -> None:
    researcher = await site.with_role("researcher")
    file = {"path": path, "size": 0, "sha256": sha256_hex(b""), "chunks": []}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "source"}}
    assert refused(await researcher.post("/v1/artifacts", json=body)) == (400, "invalid")


async def open_raw(site: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(site.url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def test_a_head_that_does_not_end_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", header_s=0.3) as site:
        for beginning in (b"", b"G", b"GET /v1/health HTTP/1.1\r\nX-Slow: "):
            reader, writer = await open_raw(site)
            writer.write(beginning)
            await asyncio.wait_for(reader.read(), 10)
            writer.close()


async def test_bytes_that_trickle_do_not_put_off_the_end_of_a_head(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", header_s=0.3) as site:
        reader, writer = await open_raw(site)
        gone = asyncio.create_task(reader.read())
        for _ in range(200):
            if gone.done():
                break
            writer.write(b"G")
            await asyncio.wait([gone], timeout=0.05)
        assert gone.done()
        writer.close()


async def test_a_body_that_trickles_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", body_grace_s=0.3) as site:
        host = await site.host("anna")
        reader, writer = await open_raw(site)
        head = f"POST /v1/job/claim HTTP/1.1\r\nHost: x\r\nAuthorization: {host.http.headers['authorization']}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert b" 408 " in answer
        writer.close()


async def test_a_request_without_credentials_is_refused_before_its_body_comes(site: Running) -> None:
    reader, writer = await open_raw(site)
    writer.write(b"PUT /v1/model/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\nsome")
    assert b" 401 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.close()


async def test_what_is_no_http_is_refused_and_the_hub_lives(site: Running) -> None:
    for raw in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"x" * 200_000, b"GET \x00 HTTP/1.1\r\n\r\n"):
        reader, writer = await open_raw(site)
        writer.write(raw)
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert (await (await site.client()).get("/v1/health")).json()["status"] == "ok"


async def test_a_log_takes_pieces_only_where_they_belong(site: Running) -> None:
    host = await site.host("anna")
    (job_id,) = await site.add(JobSpec(model="m"))
    await host.claim()
    gap = await host.http.put(f"/v1/job/{job_id}/log", params={"epoch": 1, "offset": 10}, content=b"x")
    assert refused(gap) == (409, "precondition")
    assert gap.json()["error"]["detail"] == {"size": 0}
    large = await host.http.put(f"/v1/job/{job_id}/log", params={"epoch": 1, "offset": 0}, content=b"x" * (4 << 20 | 1))
    assert refused(large) == (413, "invalid")
    none = await host.http.put(f"/v1/job/{job_id}/log", params={"epoch": 7, "offset": 0}, content=b"x")
    assert refused(none) == (404, "not_found")


async def test_a_request_id_comes_back_unless_it_could_do_harm(site: Running) -> None:
    anybody = await site.client()
    kept = await anybody.get("/v1/health", headers={"X-Request-Id": "abc-123"})
    assert kept.headers["x-request-id"] == "abc-123"
    replaced = await anybody.get("/v1/health", headers={"X-Request-Id": "a b\tc" * 50})
    assert len(replaced.headers["x-request-id"]) == 16


async def test_an_error_never_tells_of_the_inside(site: Running) -> None:
    await site.hub.site.fleet.store.close()
    reply = await (await site.operator()).get("/v1/jobs")
    assert reply.status_code in (409, 503)
    assert "Traceback" not in reply.text
    assert json.loads(reply.text)["error"]["code"]
