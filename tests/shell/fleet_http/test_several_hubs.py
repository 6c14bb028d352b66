"""Two hubs over one PostgreSQL and one shared folder: each message and each trial once, whichever hub does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.ownership import OPERATOR
from strata.fleet.core.search import SearchPlan, SearchSweep
from strata.fleet.core.sweep_points import Range
from strata.fleet.records import JobFilter, StoredSweep
from strata.fleet.wire.jobs import Job, SubmitReply
from strata.fleet.wire.manifests import ManifestReply
from strata.fleet.wire.owners import SubscriptionReply
from strata.fleet.wire.streams import PieceReply
from strata.hub.compose import open_hub
from strata.hub.cursor_store import CursorStore, FeedDelivery, run_leased
from strata.hub.settings import HubSettings
from strata.hub.sweep_store import SweepChanges
from strata.hub.sweeps import LEASE, SweepRunner
from strata.hub.tables import Tables, open_tables
from tests.shell.fleet_http.running import Running, manifest_body, ok, running
from tests.support.busy import BUSY
from tests.support.webhook_receiver import WebhookReceiver

MANIFEST = """
[trainers.default]
command = ["python", "train.py"]
directory = "/code"

[[sweeps]]
name = "tune"
model = "gbt"

[sweeps.search]
objective = { loss = "minimize" }
trials = 12
parallel = 12
space = { x = { uniform = [-5.0, 5.0] } }
"""


@pytest.fixture(params=["sqlite", "postgres"])
async def tables(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tables]:
    sqlite = request.param == "sqlite"
    url = f"sqlite:{tmp_path / 'hub.db'}" if sqlite else str(request.getfixturevalue("postgres_url"))
    async with open_tables(url) as opened:
        yield opened


@pytest.fixture
async def pair(tmp_path: Path, postgres_url: str) -> AsyncIterator[tuple[Running, Running]]:
    shared: Any = {"database": postgres_url, "shared": tmp_path / "shared"}
    async with running(tmp_path / "a", **shared) as one, running(tmp_path / "b", **shared) as other:
        yield one, other


async def test_a_lease_has_one_holder_until_it_expires_or_is_released(tables: Tables) -> None:
    cursors = tables.cursors
    assert await cursors.acquire("a", "one", 600.0)
    assert await cursors.acquire("a", "one", 600.0), "its holder renews it"
    assert not await cursors.acquire("a", "other", 600.0)
    assert await cursors.acquire("b", "other", 600.0)
    await cursors.release("a", "other")
    assert not await cursors.acquire("a", "other", 600.0), "only its holder releases it"
    await cursors.release("a", "one")
    assert await cursors.acquire("a", "other", 0.0)
    assert await cursors.acquire("a", "one", 600.0), "it had expired"


class Renewals:
    """The leases of a database, and how often one was taken or renewed."""

    def __init__(self, cursors: CursorStore) -> None:
        self._cursors = cursors
        self.count = 0

    async def acquire(self, name: str, holder: str, lease_s: float) -> bool:
        acquired = await self._cursors.acquire(name, holder, lease_s)
        self.count += acquired
        return acquired

    async def release(self, name: str, holder: str) -> None:
        await self._cursors.release(name, holder)


async def test_work_under_a_lease_renews_it_and_ends_when_another_hub_has_it(tables: Tables) -> None:
    cursors, leases = tables.cursors, Renewals(tables.cursors)
    enough, ends = asyncio.Event(), []

    async def work() -> None:
        try:
            await enough.wait()
        finally:
            ends.append(enough.is_set())

    async with asyncio.timeout(60 * BUSY):
        run = asyncio.create_task(run_leased(leases, "a", "one", work, lease_s=0.3))
        while leases.count < 4:
            await asyncio.sleep(0.05)
        enough.set()
        assert await run
        assert await cursors.acquire("a", "other", 600.0), "it was released"
        assert not await run_leased(leases, "a", "one", work, lease_s=0.3)
        await cursors.release("a", "other")
        enough.clear()
        run = asyncio.create_task(run_leased(leases, "a", "one", work, lease_s=0.3))
        # As after a time in which the first hub was frozen.
        while not await cursors.acquire("a", "other", 600.0):
            await cursors.release("a", "one")
        assert not await run
    assert ends in ([True, False], [True]), "it was cancelled, perhaps before it had begun"
    assert not await cursors.acquire("a", "one", 600.0), "the lease of the other hub stays"


async def test_a_cursor_is_moved_only_from_where_it_was(tables: Tables) -> None:
    cursors = tables.cursors
    await cursors.put_cursor("a", "1")
    assert await cursors.advance_cursor("a", "1", "2")
    assert not await cursors.advance_cursor("a", "1", "3"), "a hub that was frozen does not move it back"
    assert await cursors.cursor("a") == "2"


async def test_a_hub_reads_the_schemas_of_the_trainers_that_it_asks_for(tables: Tables) -> None:
    cursors = tables.cursors
    await cursors.put_schemas({"p/t": {"a": 1}, "u": {"b": "é"}, "p/v'": 3})
    assert await cursors.schemas(["p/t", "p/v'", "missing"]) == {"p/t": b'{"a":1}', "p/v'": b"3"}
    assert await cursors.schemas([]) == {}
    assert set(await cursors.schemas()) == {"p/t", "u", "p/v'"}
    await cursors.put_schemas({"u": 1})
    assert await cursors.schemas(["u"]) == {"u": b"1"}


async def test_a_number_of_a_trial_has_one_point_until_the_sweep_changes(tables: Tables) -> None:
    search = SearchPlan(objective={"loss": "minimize"}, trials=2, space={"x": Range(uniform=(0.0, 1.0))})
    sweep = SearchSweep(base=JobSpec(model="m", project="p", sweep="s"), search=search)
    changed = SearchSweep(base=sweep.base, search=msgspec.structs.replace(search, trials=3))
    assert await tables.sweeps.claim_trial(sweep, 0, {"x": 0.25}) == {"x": 0.25}
    assert await tables.sweeps.claim_trial(sweep, 0, {"x": 0.5}) == {"x": 0.25}
    assert await tables.sweeps.claim_trial(sweep, 1, {"x": 0.5}) == {"x": 0.5}
    assert await tables.sweeps.claim_trial(changed, 0, {"x": 0.75}) == {"x": 0.75}
    before = StoredSweep(project="p", name="s", sweep=changed, actor="operator", submitter=OPERATOR)
    after = msgspec.structs.replace(before, sweep=sweep)
    await tables.sweeps.change("p", lambda _there: SweepChanges([before]))
    await tables.sweeps.change("p", lambda _there: SweepChanges([after]))
    assert await tables.sweeps.claim_trial(sweep, 0, {"x": 0.5}) == {"x": 0.25}
    assert await tables.sweeps.claim_trial(changed, 0, {"x": 0.5}) == {"x": 0.5}, "it is not declared"


async def test_each_event_is_delivered_once_by_two_hubs_that_deliver_at_once(pair: tuple[Running, Running]) -> None:
    sent: list[str] = []

    async def deliver(site: Running, holder: str) -> None:
        context = site.hub.context
        delivery = FeedDelivery(context.feed, context.schemas, holder)  # type: ignore[arg-type]

        async def send(stored: Any) -> bool:
            sent.append(stored.event.subject)
            await asyncio.sleep(0)
            return True

        await delivery.deliver("receiver", send)

    await deliver(pair[0], "one")
    ids = [(await pair[n % 2].add(JobSpec(model="m", seed=n)))[0] for n in range(40)]
    async with asyncio.timeout(30 * BUSY):
        while not set(ids) <= set(sent):
            await asyncio.gather(*(deliver(site, holder) for site, holder in zip(pair, ("one", "other"), strict=True)))
    assert [subject for subject in sent if subject in ids] == ids


# Apprise imports it when it loads its plugins.
@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
async def test_people_get_each_message_once(tmp_path: Path, postgres_url: str) -> None:
    shared: Any = {"database": postgres_url, "shared": tmp_path / "shared"}
    with WebhookReceiver() as receiver:
        url = f"json://127.0.0.1:{receiver.url.rpartition(':')[2].partition('/')[0]}/x?format=text"
        async with running(tmp_path / "a", **shared) as one, running(tmp_path / "b", **shared) as other:
            operator = await one.operator()
            ok(await operator.put("/v1/subscription/phone", json={"url": url}), SubscriptionReply)
            hosts = [await one.host("a"), await other.host("b")]
            for number in range(6):
                trainer = {"name": "t", "command": ["x"], "directory": "/d"}
                body = {"spec": {"model": "tree", "mode": f"m{number}", "trainer": "t"}, "trainer": trainer}
                ok(await operator.post("/v1/jobs", json=body), SubmitReply)
                host = hosts[number % 2]
                (lease,) = await host.claim(f"c{number}", wait_s=20)
                ok(await host.http.post(f"/v1/job/{lease.job_id}/complete", json={"epoch": lease.epoch}), Job)
            async with asyncio.timeout(30 * BUSY):
                while len(receiver.deliveries) < 6:
                    await asyncio.sleep(0.05)
        # Both hubs have ended: nothing more is sent.
    titles = [msgspec.json.decode(each.body)["title"] for each in receiver.deliveries]
    assert titles == [f"tree-m{number} is completed" for number in range(6)]


async def test_two_hubs_queue_each_trial_once_even_if_both_run_the_sweep(
    pair: tuple[Running, Running], postgres_url: str
) -> None:
    async with open_tables(postgres_url) as tables:
        # Both believe that they hold the lease, as after one of them was frozen.
        await tables.cursors.acquire(LEASE, "frozen", 600.0)
        ok(await (await pair[0].operator()).post("/v1/manifest", json=manifest_body(MANIFEST)), ManifestReply)
        (stored,) = await tables.sweeps.sweeps()
        # One was frozen before it queued the first trial; no sampler would choose this point.
        assert stored.sweep is not None
        await tables.sweeps.claim_trial(stored.sweep, 0, {"x": 0.25})
        runners = [SweepRunner(tables, site.hub.context, "frozen") for site in pair]
        async with asyncio.timeout(60 * BUSY):
            while len(await pair[0].hub.context.fleet.store.jobs.select(JobFilter(sweep="tune"))) < 12:
                await asyncio.gather(*(runner.run_once() for runner in runners))
        await asyncio.gather(*(runner.run_once() for runner in runners))
    rows = await pair[1].hub.context.fleet.store.jobs.select(JobFilter(sweep="tune"))
    assert sorted(row.spec.name for row in rows) == sorted(f"tune/{number}" for number in range(12))
    (first,) = [row.spec for row in rows if row.spec.name == "tune/0"]
    assert first.hyper["x"] == 0.25, "the point that was claimed"


async def test_a_log_that_goes_to_one_hub_is_read_and_continued_at_the_other(pair: tuple[Running, Running]) -> None:
    one, other = pair
    (job_id,) = await one.add(JobSpec(model="m"))
    host = await one.host("desk")
    (lease,) = await host.claim()
    path = f"/v1/job/{job_id}/log"
    await host.http.put(f"{path}?epoch={lease.epoch}&offset=0", content=b"one\n")
    same = await other.private_client(Authorization=host.http.headers["Authorization"])
    ok(await same.put(f"{path}?epoch={lease.epoch}&offset=4", content=b"two\n"), PieceReply)
    for site in pair:
        assert (await (await site.operator()).get(path)).content == b"one\ntwo\n"


async def test_a_hub_with_its_files_in_another_folder_is_refused(tmp_path: Path, postgres_url: str) -> None:
    async with running(tmp_path / "a", database=postgres_url):
        settings = HubSettings(data=tmp_path / "b", database=postgres_url)
        with pytest.raises(StrataError, match="not the folder") as refused:
            async with open_hub(settings, SystemClock()):
                pass
        assert refused.value.code is Code.CONFLICT
    with pytest.raises(StrataError, match="a SQLite database serves one"):
        HubSettings(shared=tmp_path / "a")
