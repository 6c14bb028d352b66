"""What people look at: series of metrics, searched lists, the cost of a kill, and what needs them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import httpx
import pytest

from strata.base.clock import SystemClock
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.metric_history import thin_streams
from strata.fleet.wire.events import EventsReply
from strata.fleet.wire.history import GoodputReply, JobTimelineReply
from strata.fleet.wire.jobs import Job, JobReply, JobsReply
from strata.fleet.wire.leases import HeartbeatsReply
from strata.fleet.wire.overview import OverviewReply
from strata.fleet.wire.streams import MetricsReply, PieceReply
from strata.hub.compose import open_hub
from strata.hub.settings import HubSettings
from tests.shell.fleet_http.running import HostClient, Running, ok, refused, running


def reports(*losses: float, step: int = 0, at_s: float = 100.0) -> bytes:
    lines = [
        {"type": "metrics", "at_s": at_s + n, "step": step + n, "values": {"loss": loss, "rate": 0.5}}
        for n, loss in enumerate(losses)
    ]
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def put(host: HostClient, job_id: str, piece: bytes, *, epoch: int = 1, offset: int = 0) -> None:
    params = {"epoch": epoch, "offset": offset}
    ok(await host.http.put(f"/v1/job/{job_id}/metrics", params=params, content=piece), PieceReply)


async def start(host: HostClient, job_id: str, epoch: int) -> None:
    leases = [{"job_id": job_id, "epoch": epoch, "running": True}]
    ok(await host.http.post("/v1/heartbeats", json={"leases": leases}), HeartbeatsReply)


async def read(viewer: httpx.AsyncClient, job_id: str, **params: object) -> MetricsReply:
    return ok(await viewer.get(f"/v1/job/{job_id}/metrics", params=params), MetricsReply)  # type: ignore[arg-type]


async def test_metrics_are_series_over_all_attempts_and_go_on_from_what_was_read(site: Running) -> None:
    host, viewer = await site.host("anna"), await site.with_role("viewer")
    (job_id,) = await site.add(JobSpec(model="m"))
    assert (await read(viewer, job_id, points=10)).series == ()
    await host.claim()
    await start(host, job_id, 1)
    losses = [float(n % 7) for n in range(500)]
    losses[123] = 99.0
    piece = reports(*losses)
    await put(host, job_id, piece)
    found = await read(viewer, job_id, points=20)
    assert found.names == ("loss", "rate")
    loss = found.series[0]
    assert (loss.name, loss.count, loss.last, len(loss.values) <= 20) == ("loss", 500, losses[-1], True)
    assert max(loss.values) == 99.0
    assert loss.steps[loss.values.index(99.0)] == 123
    await put(host, job_id, reports(5.5, step=500), offset=len(piece))
    assert (await read(viewer, job_id, points=20, names="rate,loss")).series[1].last == 5.5
    fail = {"epoch": 1, "cause": "preempted"}
    ok(await host.http.post(f"/v1/job/{job_id}/fail", json=fail), Job)
    assert await host.claim("c2", wait_s=30)
    progress = b'{"type":"progress","at_s":%d,"fraction":0.%d,"note":"epoch %d"}\n'
    await put(host, job_id, progress % (100, 2, 2) + reports(4.0, at_s=900.0) + progress % (200, 4, 4), epoch=2)
    await start(host, job_id, 2)
    both = await read(viewer, job_id, points=2000, names="loss")
    assert (both.attempts, both.series[0].count, both.series[0].at_s[-1]) == ((1, 2), 502, 900.0)
    assert (await read(viewer, job_id, points=10, attempt=1)).series[0].count == 501
    assert both.progress is not None
    assert (both.progress.fraction, both.progress.note, round(both.progress.eta_s or 0)) == (0.4, "epoch 4", 300)
    listed = ok(await viewer.get("/v1/jobs", params={"progress": "true"}), JobsReply)
    assert listed.jobs[0].progress == both.progress
    assert ok(await viewer.get(f"/v1/job/{job_id}"), JobReply).job.progress == both.progress
    assert refused(await viewer.get(f"/v1/job/{job_id}/metrics", params={"points": 9999}))[0] == 400
    assert refused(await viewer.get(f"/v1/job/{job_id}/metrics", params={"points": 5, "attempt": 9}))[0] == 404


async def test_jobs_are_searched_and_counted(site: Running) -> None:
    await site.add(*(JobSpec(model="m", name=f"night-{n}", seed=n) for n in range(5)))
    viewer, host = await site.with_role("viewer"), await site.host("anna")
    params = {"search": "NIGHT", "order": "newest", "limit": "3"}
    page = ok(await viewer.get("/v1/jobs", params=params), JobsReply)
    assert [each.spec.name for each in page.jobs] == ["night-4", "night-3", "night-2"]
    assert page.by_status == {"pending": 5}
    rest = ok(await viewer.get("/v1/jobs", params={**params, "after": page.next}), JobsReply)
    assert ([each.spec.name for each in rest.jobs], rest.next) == (["night-1", "night-0"], "")
    assert ok(await host.http.get("/v1/jobs"), JobsReply).by_status == {}, "a host learns of its own alone"
    assert refused(await viewer.get("/v1/jobs", params={"order": "newest", "after": "x"}))[0] == 400


async def test_events_are_read_newest_first_by_kind_and_text(site: Running) -> None:
    operator, viewer = await site.operator(), await site.with_role("viewer")
    ids = await site.add(*(JobSpec(model="m", seed=n) for n in range(4)))
    for job_id in ids[:2]:
        ok(await operator.post(f"/v1/job/{job_id}/cancel", json={"reason": f"too hot {job_id[-4:]}"}), Job)
    query = {"before": "newest", "kind": "job.cancelled", "limit": "1"}
    first = ok(await viewer.get("/v1/events", params=query), EventsReply)
    assert [each.subject for each in first.events] == [ids[1]]
    second = ok(await viewer.get("/v1/events", params={**query, "before": first.cursor}), EventsReply)
    assert [each.subject for each in second.events] == [ids[0]]
    query = {"before": "newest", "search": f"TOO hot {ids[0][-4:]}"}
    found = ok(await viewer.get("/v1/events", params=query), EventsReply)
    assert ([each.subject for each in found.events], found.more) == ([ids[0]], False)
    forward = ok(await viewer.get("/v1/events", params={"kind": "job.can*"}), EventsReply)
    assert [each.subject for each in forward.events] == ids[:2]
    assert refused(await viewer.get("/v1/events", params={"before": "x"}))[0] == 400


async def test_each_event_is_a_line_of_the_log(site: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "strata.fleet.http.feed")
    await site.hub.context.feed.catch_up()
    (job_id,) = await site.add(JobSpec(model="m"))
    await site.hub.context.feed.catch_up()
    lines = [record for record in caplog.records if record.message == "job_created"]
    assert [record.__dict__["fields"]["subject"] for record in lines] == [job_id]


async def test_the_cost_of_a_kill_is_told(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", stale_after_s=0.2) as site:
        anna, viewer = await site.host("anna"), await site.with_role("viewer")
        fleet, store = site.hub.context.fleet, site.hub.context.fleet.store
        (job_id,) = await site.add(JobSpec(model="m"))
        await anna.claim()
        await start(anna, job_id, 1)
        # The host is killed, and its lease runs out.
        await store.leases.expire(fleet.now_s() + 60)
        bert = await site.host("bert")
        await bert.claim()
        await start(bert, job_id, 2)
        ok(await bert.http.post(f"/v1/job/{job_id}/complete", json={"epoch": 2}), Job)
        found = ok(await viewer.get(f"/v1/job/{job_id}/goodput"), GoodputReply)
        (kill,) = found.interruptions
        assert (kill.attempt, kill.host, kill.cause, kill.resumed_at_s is not None) == (1, "anna", "host_lost", True)
        assert kill.cost_s == pytest.approx(kill.detect_s + kill.restart_s + kill.rolled_back_s)
        assert sum(found.seconds.values()) == pytest.approx(found.wall_s)
        drawn = ok(await viewer.get(f"/v1/job/{job_id}/timeline"), JobTimelineReply)
        assert sum(each.to_s - each.from_s for each in drawn.segments) == pytest.approx(found.wall_s)
        assert [each.attempt for each in drawn.attempts] == [1, 2]
        assert set(drawn.hosts.values()) == {"anna", "bert"}
        assert {"job.expired", "job.lost", "job.completed"} <= {each.kind for each in drawn.marks}
        everything = ok(await viewer.get("/v1/goodput"), GoodputReply)
        assert (everything.jobs, everything.whole) == (1, True)
        assert [each.job_id for each in everything.interruptions] == [job_id]
        assert ok(await viewer.get("/v1/goodput", params={"project": "none"}), GoodputReply).jobs == 0


async def test_the_overview_says_what_needs_a_person(site: Running) -> None:
    viewer, operator = await site.with_role("viewer"), await site.operator()
    empty = ok(await viewer.get("/v1/overview"), OverviewReply)
    assert (empty.attention, empty.running.value, empty.goodput.value) == ((), 0, None)
    host = await site.host("anna", cores=4, ram_bytes=8 << 30)
    huge = JobSpec(model="huge", needs=Needs(min_ram_gib=4000.0))
    bad = JobSpec(model="bad")
    await site.add(huge, bad)
    (lease,) = await host.claim()
    assert lease.job_id == bad.id
    fail = {"epoch": 1, "cause": "setup_error", "error": "no such program"}
    ok(await host.http.post(f"/v1/job/{bad.id}/fail", json=fail), Job)
    fleet = site.hub.context.fleet
    await fleet.hosts.set_state(host.id, "quarantined", "three jobs failed on it", "hub")
    await site.hub.context.history.run_once()
    found = ok(await viewer.get("/v1/overview"), OverviewReply)
    by_kind = {each.kind: each for each in found.attention}
    assert list(by_kind) == ["quarantined_host", "unservable_jobs", "failed_job"]
    assert by_kind["quarantined_host"].subject == host.id
    assert by_kind["quarantined_host"].why == "three jobs failed on it"
    why = ok(await viewer.get(f"/v1/job/{huge.id}/why"), dict)
    assert (by_kind["unservable_jobs"].subject, by_kind["unservable_jobs"].why) == (huge.id, why["headline"])
    assert by_kind["failed_job"].what == "bad-default failed"
    assert (found.waiting.value, found.longest_waiting) == (1, huge.id)
    assert found.hosts["online"] == 1
    assert all(each.fix and each.since_s <= found.at_s for each in found.attention)
    other = ok(await viewer.get("/v1/overview", params={"project": "other"}), OverviewReply)
    assert [each.kind for each in other.attention] == ["quarantined_host"], "hosts are those of all projects"
    assert (other.waiting.value, other.longest_waiting) == (0, "")
    default = ok(await viewer.get("/v1/overview", params={"project": "default"}), OverviewReply)
    assert [(each.kind, each.subject) for each in default.attention] == [
        (each.kind, each.subject) for each in found.attention
    ]
    ok(await operator.post(f"/v1/job/{bad.id}/archive"), Job)
    await site.hub.context.history.run_once()
    again = ok(await viewer.get("/v1/overview"), OverviewReply)
    assert "failed_job" not in {each.kind for each in again.attention}, "who archives it has seen it"


async def test_old_metrics_are_thinned_in_place_and_still_shown(site: Running) -> None:
    host, viewer = await site.host("anna"), await site.with_role("viewer")
    (job_id,) = await site.add(JobSpec(model="m"))
    await host.claim()
    await put(host, job_id, reports(*(float(n) for n in range(600))))
    ok(await host.http.post(f"/v1/job/{job_id}/complete", json={"epoch": 1}), Job)
    (path,) = site.files.glob("streams/*/*/1.metrics")
    before = path.stat()
    day_s = 86_400
    limits = {"raw_s": 30.0 * day_s, "minutes_s": 90.0 * day_s}
    folder, now_s = site.files / "streams", before.st_mtime
    assert thin_streams(folder, now_s + 29 * day_s, **limits) == 0
    assert thin_streams(folder, now_s + 31 * day_s, **limits) == 1
    assert thin_streams(folder, now_s + 31 * day_s, **limits) == 0, "once is enough"
    minutes = path.stat()
    assert (minutes.st_size < before.st_size / 10, minutes.st_mtime) == (True, before.st_mtime)
    assert thin_streams(folder, now_s + 91 * day_s, **limits) == 1
    assert path.stat().st_size < minutes.st_size
    loss = (await read(viewer, job_id, points=50, names="loss")).series[0]
    assert (min(loss.values), max(loss.values)) == (0.0, 599.0)
    assert (await viewer.get(f"/v1/job/{job_id}/metrics")).status_code == 200
    assert path.stat().st_mode & 0o777 == 0o600


async def test_the_hub_removes_old_events_only_if_it_is_told_to(tmp_path: Path) -> None:
    settings = {"data": tmp_path / "hub", "listen": "127.0.0.1:0"}
    for days, left in ((None, 3), (1.0, 0)):
        wanted = HubSettings(**settings, events_keep_days=days)  # type: ignore[arg-type]
        async with open_hub(wanted, SystemClock()) as hub:
            store = hub.context.fleet.store
            if days is None:
                for n in range(3):
                    await store.owners.set_quota(f"owner{n}", None, "operator", 1.0)
            for loop in hub.loops:
                if loop.interval_s == 3600.0:
                    await loop.run_once()
            told = [each for each in await store.events.read("", 100) if each.event.kind == "quota.changed"]
            assert len(told) == left


@pytest.mark.parametrize("setting", ["metrics_raw_days", "metrics_minute_days"])
async def test_the_hub_thins_metrics_that_are_as_old_as_its_settings_say(tmp_path: Path, setting: str) -> None:
    async with running(tmp_path, **{setting: 2.0}) as site:
        host = await site.host("anna")
        (job_id,) = await site.add(JobSpec(model="m"))
        await host.claim()
        await put(host, job_id, reports(*(float(n) for n in range(600))))
        ok(await host.http.post(f"/v1/job/{job_id}/complete", json={"epoch": 1}), Job)
        (path,) = site.files.glob("streams/*/*/1.metrics")
        whole = path.stat().st_size
        for days, thinned in ((1.0, False), (3.0, True)):
            then_s = site.hub.context.fleet.now_s() - days * 86_400
            os.utime(path, (then_s, then_s))
            for loop in site.hub.loops:
                if loop.interval_s == 3600.0:
                    await loop.run_once()
            assert (path.stat().st_size < whole / 10) is thinned
