"""What hosts do, kept at three resolutions and no longer than each is kept."""

from __future__ import annotations

from strata.fleet.core.samples import SamplePoint
from strata.fleet.ports import Store
from tests.conformance.fleet.fleet import add_host


async def test_samples_become_means_of_minutes_and_hours_and_go_when_they_are_old(store: Store) -> None:
    await add_host(store)
    points = [SamplePoint("host_a", float(at_s), {"cpu_use": at_s / 4096}) for at_s in range(0, 7200, 30)]
    await store.samples.record([*points, SamplePoint("host_unknown", 0.0, {"cpu_use": 1.0})])
    assert await store.samples.read("host_a", 0, 7100.0) == points[-3:]
    await store.samples.roll_up(7240.0)
    minutes = await store.samples.read("host_a", 60, 0.0)
    assert len(minutes) == 120
    assert minutes[1] == SamplePoint("host_a", 60.0, {"cpu_use": 75 / 4096})
    hours = await store.samples.read("host_a", 3600, 0.0)
    assert [(point.at_s, round(point.values["cpu_use"], 2)) for point in hours] == [(0.0, 0.44), (3600.0, 1.31)]
    assert min(point.at_s for point in await store.samples.read("host_a", 0, 0.0)) >= 3640
    await store.samples.roll_up(7240.0)
    assert await store.samples.read("host_a", 60, 0.0) == minutes, "again makes no difference"
    await store.samples.roll_up(7240.0 + 86_400)
    assert (await store.samples.read("host_a", 0, 0.0), await store.samples.read("host_a", 60, 0.0)) == ([], [])
    assert await store.samples.read("host_a", 3600, 0.0) == hours
    assert await store.samples.read("host_unknown", 0, 0.0) == []


async def test_a_step_is_not_averaged_before_its_samples_can_have_come(store: Store) -> None:
    await add_host(store)
    await store.samples.record([SamplePoint("host_a", 10.0, {"x": 1.0})])
    await store.samples.roll_up(65.0)
    assert await store.samples.read("host_a", 60, 0.0) == []
    await store.samples.record([SamplePoint("host_a", 50.0, {"x": 3.0})])
    await store.samples.roll_up(91.0)
    assert await store.samples.read("host_a", 60, 0.0) == [SamplePoint("host_a", 0.0, {"x": 2.0})]
