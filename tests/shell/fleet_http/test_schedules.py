"""Schedules on both databases: each due time is queued once, by one hub or several, also after an outage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.base import failpoint
from strata.base.errors import Code, StrataError
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.ownership import OPERATOR, Submitter
from strata.fleet.core.plan import ApplyOptions
from strata.fleet.core.quota import Quota
from strata.fleet.core.schedule import JobSchedule, first_due_s
from strata.fleet.records import JobFilter, JobRow, ScheduleRow, StoredSchedule
from strata.fleet.wire.identities import HubKeyReply
from strata.fleet.wire.manifests import ManifestReply, ScheduleReply, SchedulesReply
from strata.hub import schedules
from strata.hub.compose import Hub, open_hub
from strata.hub.schedules import MAX_OF_OWNER, ScheduleRunner
from strata.hub.settings import HubSettings
from tests.shell.fleet_http.running import Running, manifest_body, ok, refused
from tests.support.manual_clock import ManualClock

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()
HOUR_S = 3600.0
MANIFEST = """
project = "hers"
[trainers.t]
command = ["true"]
directory = "/code"

[[schedules]]
name = "nightly"
cron = "0 3 * * *"
timezone = "Europe/Berlin"
model = "m"
"""


def runner(hub: Hub) -> ScheduleRunner:
    owners = [getattr(loop.run_once, "__self__", None) for loop in hub.loops]
    (found,) = [each for each in owners if isinstance(each, ScheduleRunner)]
    return found


async def declare(hub: Hub, *, submitter: Submitter = OPERATOR, actor: str = "operator", **fields: Any) -> None:
    schedule = JobSchedule(base=JobSpec(model="m", name="hourly"), cron="0 * * * *", **fields)
    stored = StoredSchedule(schedule=schedule, actor=actor, submitter=submitter)
    await hub.context.schedules.declare("default", {"hourly": stored})


async def runs(hub: Hub) -> list[JobRow]:
    return sorted(await hub.context.fleet.store.jobs.select(JobFilter(label="hourly")), key=lambda row: row.spec.due)


async def dues(hub: Hub) -> list[str]:
    return [row.spec.due[11:] for row in await runs(hub)]


async def only(hub: Hub) -> ScheduleRow:
    (row,) = await hub.context.schedules.listed()
    return row


async def finish(hub: Hub) -> None:
    for row in await runs(hub):
        await hub.context.fleet.jobs.cancel(row.id, "", "operator")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'hub.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@asynccontextmanager
async def opened(data: Path, database: str, clock: ManualClock, **more: Any) -> AsyncIterator[Hub]:
    settings = HubSettings(data=data, listen="127.0.0.1:0", database=database, keep_free_bytes=0, **more)
    async with open_hub(settings, clock) as hub:
        yield hub


async def test_a_run_is_queued_when_it_is_due_and_once(tmp_path: Path, database: str) -> None:
    clock = ManualClock(NOON)
    async with opened(tmp_path / "hub", database, clock) as hub:
        await declare(hub)
        await clock.advance(HOUR_S - 0.001)
        await runner(hub).run_once()
        assert await dues(hub) == []
        await clock.advance(0.001)
        await runner(hub).run_once()
        await runner(hub).run_once()
        (run,) = await runs(hub)
        assert (run.spec.due, run.owner, run.declared) == ("2026-11-16T13:00Z", "operator", False)
        await finish(hub)
        await clock.advance(HOUR_S)
        await runner(hub).run_once()
        assert await dues(hub) == ["13:00Z", "14:00Z"]
        shown = await hub.context.fleet.store.jobs.select(JobFilter(label="hourly", hidden=False))
        assert [row.spec.due[11:] for row in shown] == ["14:00Z"]
        assert (await only(hub)).last_job == shown[0].id


async def test_after_an_outage_one_run_is_queued_for_all_that_were_missed(tmp_path: Path, database: str) -> None:
    clock = ManualClock(NOON)
    async with opened(tmp_path / "hub", database, clock) as hub:
        await declare(hub)
    await clock.advance(72 * HOUR_S + 1)
    async with opened(tmp_path / "hub", database, clock) as hub:
        for _ in range(3):
            await runner(hub).run_once()
        assert await dues(hub) == ["13:00Z"]
        assert (await only(hub)).next_due_s == NOON + 73 * HOUR_S


async def test_two_hubs_queue_each_run_once(tmp_path: Path, postgres_url: str) -> None:
    clock = ManualClock(NOON)
    async with AsyncExitStack() as stack:
        hubs = [
            await stack.enter_async_context(opened(tmp_path / each, postgres_url, clock, shared=tmp_path / "shared"))
            for each in ("a", "b")
        ]
        await declare(hubs[0], overlap="allow")
        for _ in range(8):
            await clock.advance(HOUR_S)
            await asyncio.gather(*(runner(hub).run_once() for hub in hubs))
        assert await dues(hubs[0]) == [f"{hour}:00Z" for hour in range(13, 21)]
        assert (await only(hubs[1])).note == ""


async def test_a_hub_that_dies_before_the_schedule_moved_on_queues_no_second_run(tmp_path: Path, database: str) -> None:
    clock = ManualClock(NOON)
    async with opened(tmp_path / "hub", database, clock) as hub:
        await declare(hub)
        await clock.advance(HOUR_S)
        failpoint.arm("fleet.schedule.queued", failpoint.fail)
        await runner(hub).run_once()
        assert (await only(hub)).last_job == ""
        assert await dues(hub) == ["13:00Z"]
        await finish(hub)
        await clock.advance(HOUR_S)
        await runner(hub).run_once()
        assert await dues(hub) == ["13:00Z"]
        assert (await only(hub)).next_due_s == NOON + 3 * HOUR_S


async def test_a_run_is_left_out_while_the_last_one_has_not_ended(tmp_path: Path, database: str) -> None:
    clock = ManualClock(NOON)
    async with opened(tmp_path / "hub", database, clock) as hub:
        await declare(hub)
        for _ in range(2):
            await clock.advance(HOUR_S)
            await runner(hub).run_once()
        assert await dues(hub) == ["13:00Z"]
        assert "is pending" in (await only(hub)).note
        await declare(hub, overlap="allow")
        await clock.advance(HOUR_S)
        await runner(hub).run_once()
        assert await dues(hub) == ["13:00Z", "15:00Z"]
        assert {row.status for row in await runs(hub)} == {JobStatus.PENDING}
        assert (await only(hub)).note == ""


async def test_a_paused_schedule_queues_nothing_and_catches_nothing_up(tmp_path: Path, database: str) -> None:
    clock = ManualClock(NOON)
    async with opened(tmp_path / "hub", database, clock) as hub:
        schedules = hub.context.schedules
        await declare(hub)
        assert (await schedules.pause("default", "hourly", "operator", OPERATOR)).paused
        await clock.advance(5 * HOUR_S)
        await runner(hub).run_once()
        await declare(hub, overlap="allow")
        assert (await only(hub)).paused
        resumed = await schedules.resume("default", "hourly", "operator", OPERATOR)
        assert (resumed.paused, resumed.next_due_s) == (False, NOON + 6 * HOUR_S)
        await runner(hub).run_once()
        assert await dues(hub) == []
        await schedules.remove("default", "hourly", "operator", OPERATOR)
        assert await schedules.listed() == []


async def test_a_changed_schedule_is_due_by_its_new_times_and_an_equal_one_stays(tmp_path: Path, database: str) -> None:
    clock = ManualClock(NOON)
    async with opened(tmp_path / "hub", database, clock) as hub:
        await declare(hub)
        await clock.advance(HOUR_S)
        # Applying the same manifest again loses no run that is due.
        await declare(hub)
        await runner(hub).run_once()
        assert await dues(hub) == ["13:00Z"]
        await declare(hub, timezone="Asia/Kolkata")
        assert (await only(hub)).next_due_s == NOON + HOUR_S + HOUR_S / 2


async def test_a_run_beyond_the_quota_of_its_owner_is_left_out_with_the_reason(tmp_path: Path, database: str) -> None:
    clock = ManualClock(NOON)
    async with opened(tmp_path / "hub", database, clock) as hub:
        await hub.context.fleet.store.owners.set_quota("anna", Quota(jobs=1), "operator", NOON)
        await declare(hub, submitter=Submitter(owner="anna"), overlap="allow")
        for _ in range(2):
            await clock.advance(HOUR_S)
            await runner(hub).run_once()
        assert await dues(hub) == ["13:00Z"]
        row = await only(hub)
        assert "the quota of anna is full" in row.note
        assert row.next_due_s == NOON + 3 * HOUR_S
        await finish(hub)
        await clock.advance(HOUR_S)
        await runner(hub).run_once()
        assert await dues(hub) == ["13:00Z", "15:00Z"]


async def listed(client: httpx.AsyncClient) -> tuple[ScheduleReply, ...]:
    return ok(await client.get("/v1/schedules"), SchedulesReply).schedules


async def test_a_manifest_declares_a_schedule_and_its_owner_controls_it(site: Running) -> None:
    anna, bert = await site.with_role("researcher", "anna"), await site.with_role("researcher", "bert")
    body = manifest_body(MANIFEST)
    planned = ok(await anna.post("/v1/manifest", json={**body, "dry_run": True}), ManifestReply)
    assert await listed(anna) == ()
    applied = ok(await anna.post("/v1/manifest", json=body), ManifestReply)
    (schedule,) = await listed(bert)
    assert (schedule.project, schedule.name, schedule.owner) == ("hers", "nightly", "anna")
    assert applied.schedules == planned.schedules == {"nightly": schedule.next_due_s}
    assert datetime.fromtimestamp(schedule.next_due_s, UTC).hour in (1, 2)
    for verb in ("pause", "resume"):
        path = f"/v1/schedule/hers/nightly/{verb}"
        assert refused(await bert.post(path)) == (403, "forbidden")
        assert ok(await anna.post(path), ScheduleReply).paused == (verb == "pause")
    ok(await (await site.operator()).post("/v1/manifest", json=body), ManifestReply)
    assert [each.owner for each in await listed(anna)] == ["anna"]
    # A manifest without it leaves it there.
    without = manifest_body(MANIFEST.partition("[[schedules]]")[0])
    ok(await anna.post("/v1/manifest", json=without), ManifestReply)
    assert len(await listed(anna)) == 1
    assert refused(await bert.delete("/v1/schedule/hers/nightly")) == (403, "forbidden")
    assert (await anna.delete("/v1/schedule/hers/nightly")).is_success
    assert refused(await anna.delete("/v1/schedule/hers/nightly")) == (404, "not_found")
    assert await listed(anna) == ()


async def test_a_run_of_a_schedule_has_the_trainer_of_the_manifest_that_declared_it(
    tmp_path: Path, database: str
) -> None:
    """Another owner of the project may change what the name of the trainer stands for, but not what runs for her."""
    clock = ManualClock(NOON)
    async with opened(tmp_path / "hub", database, clock) as hub:
        fleet, seen = hub.context.fleet, ApplyOptions()
        digests = []
        for command in ("hers", "others"):
            spec = TrainerSpec(name="t", command=(command,), directory="/code")
            manifest = JobManifest(source=f"{command}.toml", project="default", jobs={}, trainers={"t": spec})
            await fleet.jobs.apply(
                await fleet.jobs.plan_manifest(manifest, seen, OPERATOR), "operator", source=manifest.source
            )
            digests.append(spec.digest)
            if command == "hers":
                schedule = JobSchedule(base=JobSpec(model="m", name="hourly", trainer="t"), cron="0 * * * *")
                stored = StoredSchedule(schedule=schedule, trainer=digests[0], actor="operator", submitter=OPERATOR)
                await hub.context.schedules.declare("default", {"hourly": stored})
        await clock.advance(HOUR_S)
        await runner(hub).run_once()
        (run,) = await runs(hub)
        assert run.trainer_digest == digests[0] != digests[1]


async def test_an_unknown_time_zone_and_a_hostile_value_are_refused(site: Running) -> None:
    anna = await site.with_role("researcher", "anna")
    unknown = manifest_body(MANIFEST.replace("Europe/Berlin", "Europe/Atlantis"))
    assert refused(await anna.post("/v1/manifest", json=unknown)) == (400, "invalid")
    for field, value in (("cron", "0 0 30 2 *"), ("cron", "x" * 300), ("timezone", "../../etc/passwd")):
        body = manifest_body(MANIFEST)
        body["manifest"]["schedules"]["nightly"][field] = value
        assert refused(await anna.post("/v1/manifest", json=body))[0] == 400
    for field, value in (("due", "x"), ("sweep", "s"), ("kind", "server"), ("name", "other")):
        body = manifest_body(MANIFEST)
        body["manifest"]["schedules"]["nightly"]["base"][field] = value
        assert refused(await anna.post("/v1/manifest", json=body))[0] == 400, field
    assert await listed(anna) == ()


async def test_schedules_above_the_limit_are_refused_before_a_due_time_is_computed(site: Running) -> None:
    wrong = JobSchedule(base=JobSpec(model="m", name="n"), cron="0 0 30 2 *")
    many = {f"n{n}": wrong for n in range(MAX_OF_OWNER + 1)}
    with pytest.raises(StrataError) as refusal:
        await site.hub.context.schedules.check("hers", many, Submitter(owner="anna"))
    assert refusal.value.code is Code.EXHAUSTED


async def test_due_times_are_not_computed_on_the_event_loop(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def observed(schedule: JobSchedule, after_s: float, zone: tzinfo) -> float:
        threads.add(threading.get_ident())
        return first_due_s(schedule, after_s, zone)

    monkeypatch.setattr(schedules, "first_due_s", observed)
    await declare(site.hub)
    await site.hub.context.schedules.check("default", {"hourly": (await only(site.hub)).stored.schedule}, OPERATOR)
    assert threads
    assert threading.get_ident() not in threads


async def test_a_schedule_pauses_when_the_key_of_its_owner_is_revoked(site: Running) -> None:
    operator = await site.operator()
    made = ok(await operator.post("/v1/keys", json={"name": "anna", "role": "researcher"}), HubKeyReply)
    anna = await site.client(Authorization=f"Bearer {made.secret}")
    body = manifest_body(MANIFEST.replace("0 3 * * *", "* * * * *"))
    ok(await anna.post("/v1/manifest", json=body), ManifestReply)
    assert (await operator.post(f"/v1/key/{made.key.id}/revoke")).is_success
    hub = site.hub
    (row,) = await hub.context.schedules.listed()
    await runner(hub)._take_turn(row)
    (row,) = await hub.context.schedules.listed()
    assert (row.paused, row.note) == (True, "the key of anna is not valid any more")
    assert await hub.context.fleet.store.jobs.select(JobFilter(label="nightly")) == []
