"""What a request of the hub may not be: hostile in its head, its body or its artifacts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from strata.base.digest import sha256_hex
from strata.base.errors import StrataError
from strata.fleet.artifacts.manifest import ArtifactFile, ArtifactLimits, ArtifactManifest, check_manifest
from strata.fleet.artifacts.paths import check_collisions
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.artifacts import CommitReply
from strata.fleet.wire.jobs import SubmitReply
from strata.http.route import Content, Upload
from strata.hub.routes import ROUTES
from tests.abuse.test_body_time import assert_linear
from tests.shell.fleet_http.running import Running, ok, refused, running
from tests.shell.fleet_http.test_access import url

Tries = Callable[[int], None]
HTTP, JSON, ARTIFACTS = "hub: HTTP", "hub: JSON", "hub: artifacts"
AS_JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


@pytest.mark.proves("Never again: a web page could send a body to a hub on loopback")
@pytest.mark.attack(JSON, "a body that a web page can send to another origin: text/plain, a form, no type at all")
async def test_a_body_that_does_not_say_it_is_json_is_refused_unread(site: Running, tries: Tries) -> None:
    operator, host = await site.operator(), await site.host("anna")
    for route in ROUTES:
        kind = route.signature().body
        if kind is None or issubclass(kind, Content):
            continue
        client = host.http if route.access.role is None and not route.access.public else operator
        for sent in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            tries(1)
            headers = {"Content-Type": sent, "Origin": "http://evil.example", "Host": "evil.example"}
            reply = await client.request(route.method, url(route.path), content=b"{}", headers=headers)
            assert refused(reply) == (415, "unsupported"), (route.path, sent)
        typed = await client.request(
            route.method, url(route.path), content=b"[]", headers={"Content-Type": "application/json; charset=x"}
        )
        assert refused(typed) == (400, "invalid"), route.path


@pytest.mark.attack(JSON, "more than 20 KiB to the one route that reads a body of anybody")
async def test_who_is_unknown_may_send_20_kib_at_most(site: Running) -> None:
    anybody = await site.client(**AS_JSON)
    large = b'{"invite_id": "' + b"x" * (20 << 10) + b'"}'
    assert refused(await anybody.post("/v1/join", content=large)) == (413, "invalid")
    public = [each for each in ROUTES if each.access.public and each.signature().body is not None]
    limits = sorted((each.path, each.limit) for each in public)
    assert limits == [("/api/v1/archive", 1 << 10), ("/v1/join", 20 << 10)]


def deep_paths(count: int, depth: int = 32) -> list[str]:
    return sorted("/".join(f"{number:x}{level:x}" for level in range(depth)) for number in range(count))


@pytest.mark.proves("Never again: a manifest of 65,000 deep paths stopped the hub for 17 s")
@pytest.mark.attack(ARTIFACTS, "a manifest of 65,000 paths 32 folders deep")
def test_the_paths_of_a_manifest_are_compared_in_linear_time() -> None:
    def shape(n: int) -> bytes:
        return "\n".join(deep_paths(n // 24)).encode()

    assert_linear(lambda raw: check_collisions(raw.decode().split("\n")), shape, 1 << 20, "check_together")
    began_s = time.thread_time()
    check_collisions(deep_paths(30_000))
    assert time.thread_time() - began_s < 10


@pytest.mark.attack(ARTIFACTS, "a manifest whose paths are longer than 8 MiB together")
def test_the_paths_of_a_manifest_have_a_length_together() -> None:
    paths = sorted("/".join(f"{number:05d}{'x' * 200}" for _ in range(4)) for number in range(11_000))
    empty = sha256_hex(b"")
    with pytest.raises(StrataError, match="all paths"):
        check_manifest(
            ArtifactManifest(files=tuple(ArtifactFile(path=path, size=0, sha256=empty) for path in paths)),
            ArtifactLimits(),
        )


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


JSON_ROUTES = [route for route in ROUTES if route.signature().body not in (None, Upload)]


@pytest.mark.attack(JSON, "no JSON, wrong JSON, deep JSON, at every route that reads it")
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
    for route in JSON_ROUTES:
        client = host.http if route.access.role is None and not route.access.public else operator
        for body in bodies:
            if len(body) < route.limit:
                reply = await client.request(route.method, url(route.path), content=body, headers=AS_JSON)
                assert refused(reply) == (400, "invalid"), (route.path, body[:40], reply.text)


@pytest.mark.attack(JSON, "a body beyond its limit, with and without its length")
async def test_a_body_has_a_limit_whether_it_tells_its_length_or_not(site: Running) -> None:
    host = await site.host("anna")
    large = b'{"claim_id": "' + b"x" * 70_000 + b'"}'
    assert refused(await host.http.post("/v1/job/claim", content=large, headers=AS_JSON)) == (413, "invalid")

    async def parts() -> object:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    undeclared = await host.http.post("/v1/job/claim", content=parts(), headers=AS_JSON)  # type: ignore[arg-type]
    assert refused(undeclared) == (413, "invalid")


@pytest.mark.attack(JSON, "numbers, NULs and depths that cannot be kept")
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
    reply = await researcher.post("/v1/jobs", content=body.encode(), headers=AS_JSON)
    assert refused(reply) == (400, "invalid"), reply.text


@pytest.mark.attack(JSON, "brackets inside texts")
async def test_brackets_inside_texts_are_no_depth(site: Running) -> None:
    researcher = await site.with_role("researcher")
    trainer = {"name": "t", "command": ["x"], "directory": "/d"}
    spec = {"model": "m", "trainer": "t", "hyper": {"text": '["{\\"' * 500}}
    ok(await researcher.post("/v1/jobs", json={"spec": spec, "trainer": trainer}), SubmitReply)


@pytest.mark.attack(HTTP, "a query that is not understood")
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


@pytest.mark.attack(HTTP, "numbers in a query that are none")
async def test_numbers_of_a_query_are_numbers(site: Running) -> None:
    viewer = await site.with_role("viewer")
    for value in ("nan", "inf", "-1", "1e9"):
        assert refused(await viewer.get(f"/v1/events?wait_s={value}")) == (400, "invalid"), value


@pytest.mark.attack(HTTP, "path traversal in ids")
@pytest.mark.parametrize("path", ["/v1/job/a%00b", "/v1/job/..%2f..%2fetc", "/v1/job/%ff", "/v1/host/%00/drain"])
async def test_an_id_is_an_id_and_no_path(site: Running, path: str) -> None:
    reply = await (await site.operator()).get(path)
    assert reply.status_code in (400, 404, 405), reply.text


@pytest.mark.attack(ARTIFACTS, "chunks: wrong bytes, too long, too short, wrong offset")
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


@pytest.mark.attack(ARTIFACTS, "manifest paths that lead outside")
@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "C:\\x", "a\x00b", "."])
async def test_a_manifest_cannot_name_a_file_outside(site: Running, path: str) -> None:
    researcher = await site.with_role("researcher")
    file = {"path": path, "size": 0, "sha256": sha256_hex(b""), "chunks": []}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "source"}}
    assert refused(await researcher.post("/v1/artifacts", json=body)) == (400, "invalid")


async def open_raw(site: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(site.url)
    return await asyncio.open_connection(parts.hostname, parts.port)


@pytest.mark.attack(HTTP, "heads that do not end")
async def test_a_head_that_does_not_end_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", header_s=0.3) as site:
        for beginning in (b"", b"G", b"GET /v1/health HTTP/1.1\r\nX-Slow: "):
            reader, writer = await open_raw(site)
            writer.write(beginning)
            await asyncio.wait_for(reader.read(), 10)
            writer.close()


@pytest.mark.attack(HTTP, "slow heads")
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


@pytest.mark.attack(HTTP, "slow bodies")
async def test_a_body_that_trickles_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", body_grace_s=0.3) as site:
        researcher = await site.with_role("researcher")
        reader, writer = await open_raw(site)
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: {researcher.headers['authorization']}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert b" 408 " in answer
        writer.close()


@pytest.mark.attack(HTTP, "a body of a gigabyte without credentials")
async def test_a_request_without_credentials_is_refused_before_its_body_comes(site: Running) -> None:
    reader, writer = await open_raw(site)
    writer.write(b"PUT /v1/model/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\nsome")
    assert b" 401 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.close()


@pytest.mark.attack(HTTP, "TLS, other versions, long lines and NULs instead of HTTP")
async def test_what_is_no_http_is_refused_and_the_hub_lives(site: Running) -> None:
    for raw in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"x" * 200_000, b"GET \x00 HTTP/1.1\r\n\r\n"):
        reader, writer = await open_raw(site)
        writer.write(raw)
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert (await (await site.client()).get("/v1/health")).json()["status"] == "ok"


@pytest.mark.attack("hub: host against host", "pieces of a log at wrong places")
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


@pytest.mark.attack(HTTP, "a request id that could do harm in logs")
async def test_a_request_id_comes_back_unless_it_could_do_harm(site: Running) -> None:
    anybody = await site.client()
    kept = await anybody.get("/v1/health", headers={"X-Request-Id": "abc-123"})
    assert kept.headers["x-request-id"] == "abc-123"
    replaced = await anybody.get("/v1/health", headers={"X-Request-Id": "a b\tc" * 50})
    assert len(replaced.headers["x-request-id"]) == 16


@pytest.mark.attack(HTTP, "errors that tell of the inside")
async def test_an_error_never_tells_of_the_inside(site: Running) -> None:
    await site.hub.context.fleet.store.close()
    reply = await (await site.operator()).get("/v1/jobs")
    assert reply.status_code in (409, 503)
    assert "Traceback" not in reply.text
    assert json.loads(reply.text)["error"]["code"]


SECOND = b"GET /v1/keys HTTP/1.1\r\nHost: x\r\n\r\n"
RAW = {
    "CL and TE": b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
    "two lengths": b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 40\r\n\r\n" + SECOND,
    "an unknown coding": b"POST /v1/join HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "no Host": b"GET /v1/keys HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /v1/keys HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a folded header": b"GET /v1/keys HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n x\r\n\r\n",
    "a long header": b"GET /v1/keys HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    "many headers": b"GET /v1/keys HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 20_000 + b"\r\n",
    "a long URL": b"GET /v1/keys?" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a WebSocket": b"GET /v1/events HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
    "an absolute URL": b"GET http://x/v1/health/../keys HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", RAW)
@pytest.mark.attack(HTTP, "smuggling, odd heads and upgrades on a raw connection")
async def test_a_raw_request_gains_nothing(site: Running, name: str) -> None:
    reader, writer = await open_raw(site)
    writer.write(RAW[name])
    writer.write_eof()
    with contextlib.suppress(ConnectionResetError):
        answer = await asyncio.wait_for(reader.read(), 20)
        statuses = [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert set(statuses) <= {b"400", b"401", b"415", b"404", b"405", b"431"}, answer[:300]
    writer.close()
    assert (await (await site.client()).get("/v1/health")).status_code == 200


@pytest.mark.attack(HTTP, "reach closed routes through the paths of public ones")
async def test_no_spelling_of_a_public_path_opens_a_closed_route(site: Running, tries: Tries) -> None:
    anybody = await site.client()
    for path in (
        "/v1/health/../keys",
        "/v1/health/%2e%2e/keys",
        "/v1/health%2f..%2fkeys",
        "/v1/health;/../keys",
        "/v1/ca/../jobs",
        "/v1/./keys",
        "/%76%31/keys",
        "/v1/health/..;/keys",
        "/v1//keys",
    ):
        tries(1)
        assert (await anybody.get(f"{site.url}{path}")).status_code in (401, 404), path


@pytest.mark.attack(ARTIFACTS, "SQL in names, metrics and cursors")
async def test_values_never_become_sql(site: Running, tries: Tries) -> None:
    viewer = await site.with_role("viewer")
    for value in ("' OR 1=1 --", '"; DROP TABLE artifact; --', "%", "_", "\\", "${jndi:x}", "1) UNION SELECT 1"):
        for path, name in (("/v1/artifacts", "model"), ("/v1/artifacts", "metric"), ("/v1/jobs", "model")):
            tries(1)
            reply = await viewer.get(path, params={name: value})
            assert reply.status_code in (200, 400), reply.text
            if reply.status_code == 200:
                assert not next(iter(reply.json().values()))


@pytest.mark.attack(ARTIFACTS, "a file of an artifact by a path outside of it")
async def test_a_file_of_an_artifact_is_one_of_its_files(site: Running, tries: Tries) -> None:
    researcher = await site.with_role("researcher")
    file = {"path": "a", "size": 0, "sha256": sha256_hex(b""), "chunks": []}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "source"}}
    artifact = ok(await researcher.post("/v1/artifacts", json=body), CommitReply).artifact_id
    for path in ("../../operator.token", "/etc/passwd", "a/../../x", "..", ""):
        tries(1)
        reply = await researcher.get(f"/v1/artifact/{artifact}/file", params={"path": path})
        assert reply.status_code in (400, 404), path
