"""What one caller may take of the hub: connections, memory, streams, and for how long after a revocation."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import resource
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.database.migrations import SqliteComponents
from strata.database.sqlite import SqliteThread
from strata.database.transaction import SqliteDatabase
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.http.context import WriteProbe
from strata.fleet.streams import AttemptStreams
from strata.fleet.wire.events import EventsReply
from strata.fleet.wire.identities import HubKeyReply, LocalHostReply
from strata.fleet.wire.jobs import SubmitReply
from strata.fleet.wire.leases import ClaimReply
from strata.http.anonymous import AnonymousConnections
from strata.http.auth_failures import AuthFailures
from strata.hub import disk
from strata.hub.cursor_store import SQLITE, CursorStore
from tests.shell.fleet_http.running import STRATA, Running, ok, process, refused, running

Tries = Callable[[int], None]
RESOURCES, REVOCATION, HTTP, WHO = "hub: resources", "hub: revocation", "hub: HTTP", "hub: who calls"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


async def connect(site: Running, request: bytes = b"") -> Stream:
    parts = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 16)
    writer.write(request)
    return reader, writer


def request(path: str, client: httpx.AsyncClient | None = None) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: x"]
    if client is not None:
        lines += [f"{name}: {value}" for name, value in client.headers.items() if name in _SHOWN]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


_SHOWN = ("authorization", "x-operator-token")


@pytest.mark.proves("Never again: idle connections without credentials kept all clients out; slow readers kept memory")
@pytest.mark.attack(HTTP, "idle connections without credentials up to max_connections")
async def test_idle_strangers_do_not_keep_others_out(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub", max_connections=100) as site:
        operator = await site.operator()
        assert (await operator.get("/v1/jobs")).status_code == 200
        idle = []
        for _ in range(150):
            tries(1)
            reader, writer = await connect(site, request("/v1/health"))
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"}")
            idle.append((reader, writer))
        assert (await operator.get("/v1/jobs")).status_code == 200
        fresh = await site.operator()
        assert (await fresh.get("/v1/jobs")).status_code == 200
        for _, writer in idle:
            writer.close()


class Idle:
    def __init__(self, *, working: bool = False, arriving: bool = False) -> None:
        self.working = working
        self.arriving = arriving
        self.ended = False

    def busy(self) -> bool:
        return self.working

    def incomplete(self) -> bool:
        return self.arriving

    def abort(self) -> None:
        self.ended = True


@pytest.mark.proves(
    "Never again: requests that never became whole, or one IPv6 network, locked out hosts with certificates"
)
@pytest.mark.attack(HTTP, "connections from every address of one IPv6 network")
async def test_a_network_of_ipv6_counts_as_one_address(tries: Tries) -> None:
    anonymous = AnonymousConnections()
    first = [Idle() for _ in range(1001)]
    for number, each in enumerate(first):
        tries(1)
        assert anonymous.add(each, f"2001:db8:0:1::{number:x}", 800)
    assert len(anonymous) == 100
    elsewhere = Idle()
    assert anonymous.add(elsewhere, "2001:db8:0:2::1", 800)
    assert anonymous.add(Idle(), "::ffff:192.0.2.1", 800)
    assert not elsewhere.ended
    for number in range(150):
        assert anonymous.add(Idle(), f"fe80::{number:x}%eth0", 800)
    assert len(anonymous) == 202


@pytest.mark.attack(HTTP, "places that are kept with requests which do not become whole")
async def test_the_oldest_request_that_is_not_whole_gives_way(tries: Tries) -> None:
    anonymous = AnonymousConnections()
    served, slow, fast = Idle(working=True), Idle(working=True, arriving=True), Idle(working=True, arriving=True)
    others = [Idle(working=True) for _ in range(61)]
    for each in (served, slow, fast, *others):
        tries(1)
        assert anonymous.add(each, "192.0.2.1", 200)
    assert anonymous.add(Idle(working=True), "192.0.2.1", 200)
    assert [each.ended for each in (served, slow, fast)] == [False, True, False]


@pytest.mark.attack(HTTP, "connections that send nothing at all, from one address")
async def test_an_address_has_few_places_without_credentials(tries: Tries) -> None:
    anonymous = AnonymousConnections()
    first = [Idle() for _ in range(64)]
    assert all(anonymous.add(each, "192.0.2.1", 200) for each in first)
    elsewhere = Idle()
    assert anonymous.add(elsewhere, "192.0.2.2", 200)
    first[0].working = True
    another = Idle()
    assert anonymous.add(another, "192.0.2.1", 200)
    assert [each.ended for each in first[:3]] == [False, True, False], "the oldest idle one gives way"
    assert not elsewhere.ended
    for each in (*first, another):
        each.working = True
    assert not anonymous.add(Idle(), "192.0.2.1", 200), "nobody who is served gives way"
    many = [Idle() for _ in range(500)]
    for number, each in enumerate(many):
        tries(1)
        anonymous.add(each, f"198.51.100.{number}", 200)
    assert len(anonymous) == 100, "half of the places are for those who are known"
    for each in (*first, another, elsewhere, *many):
        anonymous.remove(each)
    assert len(anonymous) == 0


@pytest.mark.attack(HTTP, "a connection without credentials that stays idle")
async def test_who_is_unknown_may_be_idle_for_a_short_time_only(site: Running) -> None:
    reader, writer = await connect(site, request("/v1/health"))
    await reader.readuntil(b"}")
    began_s = time.monotonic()
    assert await asyncio.wait_for(reader.read(), 30) == b""
    assert time.monotonic() - began_s < 20
    writer.close()
    known_reader, known_writer = await connect(site, request("/v1/caller", await site.with_role("viewer")))
    await known_reader.readuntil(b"}")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(known_reader.read(1), 7)
    known_writer.close()


async def stored_chunk(site: Running) -> str:
    content = os.urandom(8 << 20)
    digest = hashlib.sha256(content).hexdigest()
    researcher = await site.with_role("researcher")
    put = await researcher.put(f"/v1/chunk/{digest}", params={"size": len(content)}, content=content)
    assert put.status_code == 204
    file = {"path": "x", "size": len(content), "sha256": digest, "chunks": [digest]}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "source"}}
    assert (await researcher.post("/v1/artifacts", json=body)).is_success
    return digest


@pytest.mark.proves("Never again: idle connections without credentials kept all clients out; slow readers kept memory")
@pytest.mark.attack(HTTP, "readers that never read a chunk of 8 MiB")
async def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub", send_s=0.5) as site:
        viewer, digest = await site.with_role("viewer"), await stored_chunk(site)
        open_before = connections(site)
        slow = []
        for _ in range(20):
            tries(1)
            reader, writer = await connect(site, request(f"/v1/chunk/{digest}", viewer))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            slow.append((reader, writer))
        async with asyncio.timeout(60):
            while connections(site) > open_before:
                await asyncio.sleep(0.05)
        assert (await viewer.get(f"/v1/chunk/{digest}")).status_code == 200
        for _, writer in slow:
            writer.close()


def connections(site: Running) -> int:
    """Of the hub, in the kernel's list: those that it has not closed."""
    port = urlsplit(site.url).port
    listed = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(1 for line in listed if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01")


@pytest.mark.attack(HTTP, "small replies that are asked for again and again and never read")
async def test_replies_that_pile_up_are_cut_off(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", send_s=0.5) as site:
        viewer = await site.with_role("viewer")
        before = connections(site)
        _, writer = await connect(site)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        wanted = request("/v1/openapi.json", viewer)
        async with asyncio.timeout(60):
            for _ in range(200):
                writer.write(wanted)
                await asyncio.sleep(0.01)
            while connections(site) > before:
                await asyncio.sleep(0.05)
        writer.close()


@pytest.mark.proves("Never again: the stream of a revoked key went on")
@pytest.mark.attack(REVOCATION, "event stream of a revoked key in a busy fleet")
async def test_the_stream_of_a_revoked_key_ends_however_much_there_is_to_tell(site: Running) -> None:
    operator, viewer = await site.operator(), await site.with_role("viewer")
    key_id = viewer.headers["Authorization"].split("-")[1]
    ended = asyncio.Event()

    async def listen() -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with viewer.stream("GET", "/v1/events", headers={"Accept": "text/event-stream"}) as stream:
                async for _ in stream.aiter_bytes():
                    pass
        ended.set()

    async def be_busy() -> None:
        for number in range(10_000):
            await operator.post("/v1/invites", json={"pool": f"p{number}"})

    listening, busy = asyncio.create_task(listen()), asyncio.create_task(be_busy())
    async with asyncio.timeout(30):
        while site.hub.context.feed.listeners == 0:
            await asyncio.sleep(0.01)
        assert (await operator.post(f"/v1/key/{key_id}/revoke")).status_code == 204
        revoked_s = time.monotonic()
        await ended.wait()
    assert time.monotonic() - revoked_s < 10
    busy.cancel()
    await asyncio.wait([busy, listening])


@pytest.mark.attack(REVOCATION, "long poll of a key that is revoked meanwhile")
async def test_a_poll_of_a_revoked_key_is_told_nothing(site: Running) -> None:
    operator, viewer = await site.operator(), await site.with_role("viewer")
    key_id = viewer.headers["Authorization"].split("-")[1]
    newest = ok(await viewer.get("/v1/events", params={"after": "newest"}), EventsReply).cursor
    polling = asyncio.create_task(viewer.get("/v1/events", params={"after": newest, "wait_s": 20}))
    await asyncio.sleep(0.2)
    assert (await operator.post(f"/v1/key/{key_id}/revoke")).status_code == 204
    assert refused(await polling) == (401, "unauthenticated")


@pytest.mark.attack(REVOCATION, "a log that is followed with a key that is revoked meanwhile")
async def test_a_follower_with_a_revoked_key_is_told_nothing(site: Running) -> None:
    operator, viewer, host = await site.operator(), await site.with_role("viewer"), await site.host("anna")
    (job,) = await site.add(JobSpec(model="m"))
    (lease,) = await host.claim()
    key_id = viewer.headers["Authorization"].split("-")[1]
    following = asyncio.create_task(viewer.get(f"/v1/job/{job}/log", params={"wait_s": 20}))
    await asyncio.sleep(0.5)
    assert (await operator.post(f"/v1/key/{key_id}/revoke")).status_code == 204
    put = await host.http.put(f"/v1/job/{job}/log", params={"epoch": lease.epoch, "offset": 0}, content=b"secret")
    assert put.status_code == 200
    assert refused(await following) == (401, "unauthenticated")


@pytest.mark.attack(REVOCATION, "the next request of a revoked key")
async def test_a_revoked_key_is_refused_at_once(site: Running) -> None:
    viewer = await site.with_role("viewer")
    assert (await viewer.get("/v1/jobs")).status_code == 200
    key_id = viewer.headers["Authorization"].split("-")[1]
    assert (await (await site.operator()).post(f"/v1/key/{key_id}/revoke")).status_code == 204
    assert refused(await viewer.get("/v1/jobs")) == (401, "unauthenticated")


@pytest.mark.attack(RESOURCES, "150 event streams of one viewer")
async def test_many_streams_of_one_viewer_leave_the_hub_to_others(site: Running, tries: Tries) -> None:
    viewer, operator = await site.with_role("viewer"), await site.operator()
    streams = []
    wanted = request("/v1/events", viewer).replace(b"\r\n\r\n", b"\r\nAccept: text/event-stream\r\n\r\n")
    for _ in range(150):
        tries(1)
        streams.append(await connect(site, wanted))
    for reader, _ in streams:
        await reader.readuntil(b"retry: 1000")
    assert (await operator.get("/v1/jobs")).status_code == 200
    for _, writer in streams:
        writer.close()


@pytest.mark.proves("Never again: wrong credentials cost nothing and left no trace; a used invite certified for ever")
@pytest.mark.attack(WHO, "thousands of wrong tokens from one client")
async def test_wrong_credentials_are_slowed_down(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub", max_failures=20) as site:
        stranger = await site.client(Authorization="Bearer tml-0123456789ab-" + "0" * 40)
        statuses = []
        for _ in range(60):
            tries(1)
            statuses.append((await stranger.get("/v1/jobs")).status_code)
        assert statuses[:20] == [401] * 20
        assert set(statuses[45:]) == {429}
        assert (await (await site.operator()).get("/v1/jobs")).status_code == 200, "good credentials are not locked out"


@pytest.mark.attack(WHO, "wrong tokens from every address of one IPv6 network")
def test_failures_are_counted_for_a_network_of_ipv6(tries: Tries) -> None:
    tries(8)
    failures = AuthFailures(5, 1.0, monotonic_s=lambda: 0.0)
    over = [failures.record(f"2001:db8:0:1::{number}", "GET", "/v1/jobs", "unknown") for number in range(8)]
    assert over == [False] * 5 + [True] * 3
    assert not failures.record("2001:db8:0:2::1", "GET", "/v1/jobs", "unknown"), "another network has its own count"


@pytest.mark.attack(WHO, "guesses that leave no trace")
def test_failed_credentials_are_told_once_a_second_with_their_address(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    log.configure("json", "info")
    failures = AuthFailures(5, 1.0, monotonic_s=lambda: now[0])
    over = [failures.record("192.0.2.7", "GET", "/v1/jobs", "unknown") for _ in range(8)]
    assert over == [False] * 5 + [True] * 3
    assert not failures.record("192.0.2.8", "GET", "/v1/jobs", "unknown"), "another address has its own count"
    now[0] = 100.0
    assert not failures.record("192.0.2.7", "GET", "/v1/jobs", "unknown")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [(each["event"], each["address"], each["more"]) for each in lines]
    assert told == [
        ("authentication_failed", "192.0.2.7", 0),
        ("authentication_failed", "192.0.2.8", 0),
        ("authentication_failed", "192.0.2.7", 7),
    ]


SMALL_DISK = 'mount -t tmpfs -o size=96m,mode=700 tmpfs "$0" && exec "$@"'


@pytest.mark.proves("Never again: logs filled the disk, and then no key could be revoked")
@pytest.mark.attack(RESOURCES, "logs of a host, then strangers, fill the disk of the hub")
def test_a_full_disk_stops_neither_heartbeats_nor_revocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: Tries
) -> None:
    """On a small disk that only this hub sees."""
    monkeypatch.setenv("STRATA_HUB_KEEP_FREE_BYTES", str(48 << 20))
    namespace = ("unshare", "--mount", "--propagation=private", "sh", "-c", SMALL_DISK, str(tmp_path), STRATA)
    with process(tmp_path, python=namespace) as hub:
        disk = Path(f"/proc/{hub.pid}/root{tmp_path}")
        hub.data = disk
        with hub.client() as operator:
            made = ok(operator.post("/v1/hosts/local", json={"name": "anna"}), LocalHostReply)
            key = ok(operator.post("/v1/keys", json={"name": "k", "role": "viewer"}), HubKeyReply)
            secret = {"Authorization": f"Bearer {made.secret}"}
            with httpx.Client(base_url="http://hub", headers=secret, transport=hub.transport()) as host:
                host.post("/v1/host/register", json={"capability": {"hostname": "h"}})
                trainer = {"name": "t", "command": ["x"], "directory": "/d"}
                body = {"spec": {"model": "m", "trainer": "t"}, "trainer": trainer}
                job = ok(operator.post("/v1/jobs", json=body), SubmitReply).job.id
                ok(host.post("/v1/job/claim", json={"claim_id": "c"}), ClaimReply)
                piece, sent = b"x" * (4 << 20), httpx.Response(200)
                for number in range(24):
                    tries(1)
                    at = {"epoch": 1, "offset": number * len(piece)}
                    sent = host.put(f"/v1/job/{job}/log", params=at, content=piece)
                    if sent.status_code != 200:
                        break
                assert refused(sent) == (429, "exhausted")
                assert str(tmp_path) not in sent.text
                assert free(disk) >= 44 << 20, "logs leave alone what has to stay free"
                with (disk / "stranger").open("wb") as file, contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * (1 << 20))
                        file.flush()
                assert until(lambda: operator.post(f"/v1/key/{key.key.id}/revoke").status_code == 204)
                beat = {"epoch": 1}
                assert until(lambda: host.post(f"/v1/job/{job}/heartbeat", json=beat).status_code == 200)
                assert until(lambda: operator.get("/v1/health").status_code == 200)
        assert hub.end()[0] == 0


@pytest.mark.attack(RESOURCES, "no room for the reserve of the hub, once")
async def test_a_reserve_that_cannot_be_made_is_made_later_and_stops_no_check(tmp_path: Path) -> None:
    """The limit of this process for the size of files stands for the disk."""
    thread = await SqliteThread.open(tmp_path / "hub.db", SqliteComponents([SQLITE]))
    cursors, writing, reserve = CursorStore(SqliteDatabase(thread)), WriteProbe(), tmp_path / disk.FILE
    guard = disk.DiskGuard(tmp_path, cursors, writing)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (disk.RESERVE_BYTES // 2, before[1]))
    try:
        await guard.run_once()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    probes = await thread.read(lambda db: db.execute("SELECT probes FROM hub_health").fetchone())
    assert (probes, writing.fails) == ((1,), False)
    assert not reserve.exists()
    reserve.touch()
    await guard.run_once()
    assert reserve.stat().st_size == disk.RESERVE_BYTES
    await thread.close()


@pytest.mark.attack(RESOURCES, "a hub that cannot write says that all is well")
async def test_health_tells_that_nothing_can_be_written(site: Running) -> None:
    anybody = await site.client()
    assert (await anybody.get("/v1/health")).status_code == 200
    await site.hub.context.fleet.store.close()
    async with asyncio.timeout(30):
        while (reply := await anybody.get("/v1/health")).status_code == 200:
            await asyncio.sleep(0.1)
    assert refused(reply) == (503, "unavailable")


@pytest.mark.attack(RESOURCES, "attempt after attempt of one job, each with a log")
async def test_the_logs_of_a_job_have_a_size_together(tmp_path: Path) -> None:
    streams = AttemptStreams(tmp_path, max_job_bytes=3 << 20)
    job, piece = f"job1_{'a' * 64}", b"x" * (1 << 20)
    for epoch in (1, 2, 3):
        await streams.append(job, epoch, "log", 0, piece)
    with pytest.raises(StrataError) as refusal:
        await streams.append(job, 4, "log", 0, piece)
    assert refusal.value.code is Code.EXHAUSTED


def free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def until(holds: Callable[[], bool]) -> bool:
    """Within a time that a loaded machine may need."""
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        if holds():
            return True
        time.sleep(0.2)
    return False
