"""Hosts that exist for a time: one token enrols them all, and one that ends without a word is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.database.events import NEWEST, EventFilter
from strata.fleet.core.capability import Capability
from strata.fleet.core.lease import FORGET_S, LEASE_S
from strata.fleet.http.hosts import forget_silent
from strata.fleet.records import HostRow
from strata.hub.compose import Hub, open_hub
from strata.hub.settings import HubSettings
from strata.identity.roles import OPERATOR
from tests.shell.fleet_http.test_tls import new_key
from tests.support.manual_clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def hub(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Hub]:
    async with open_hub(HubSettings(data=tmp_path / "hub", listen="127.0.0.1:0", keep_free_bytes=0), clock) as opened:
        yield opened


async def join(hub: Hub, *names: str, ephemeral: bool = True) -> list[str]:
    """Hosts that joined with one token, and registered."""
    enrollment, fleet = hub.context.enrollment, hub.context.fleet
    token = await enrollment.invite(OPERATOR, ephemeral=ephemeral)
    requests = {name: new_key()[1].encode() for name in names}
    joined = [(await enrollment.join(token.id, token.secret, name, each)).host for name, each in requests.items()]
    for host in joined:
        row = HostRow(host.id, host.name, Capability(hostname="h"), fleet.now_s(), ephemeral=host.ephemeral)
        await fleet.hosts.register(row, f"host:{host.id}")
    return [host.id for host in joined]


async def pass_time(hub: Hub, clock: ManualClock, seconds: float, *alive: str) -> None:
    """The hub ticks, and the hosts that are alive send heartbeats."""
    for _ in range(round(seconds / 5.0)):
        await clock.advance(5.0)
        for host_id in alive:
            hub.context.fleet.hosts.touch(host_id)
        await hub.context.fleet.leases.tick()
        await forget_silent(hub.context)


async def listed(hub: Hub) -> set[str]:
    names = {view.row.name for view in await hub.context.fleet.hosts.views()}
    assert {row.name for row in await hub.context.fleet.hosts.all()} == names
    return names


async def kinds(hub: Hub, host_id: str) -> list[str]:
    page = await hub.context.fleet.store.events.read_before(NEWEST, 100, EventFilter(subject=host_id))
    return sorted(each.event.kind for each in page.events)


async def test_a_silent_ephemeral_host_is_in_no_list_and_nobody_is_alerted(hub: Hub, clock: ManualClock) -> None:
    (node,) = await join(hub, "node")
    (desk,) = await join(hub, "desk", ephemeral=False)
    await pass_time(hub, clock, LEASE_S + 20.0)
    assert await listed(hub) == {"desk"}
    counts = await hub.context.fleet.counts()
    assert counts.hosts["offline"] == 1
    assert "host.lost" in await kinds(hub, desk)
    assert "host.lost" not in await kinds(hub, node)


async def test_it_is_back_when_its_network_is(hub: Hub, clock: ManualClock) -> None:
    (node,) = await join(hub, "node")
    await pass_time(hub, clock, FORGET_S - 60.0)
    assert await listed(hub) == set()
    await pass_time(hub, clock, 10.0, node)
    assert await listed(hub) == {"node"}


async def test_it_is_forgotten_after_an_hour_once_and_its_credentials_end(hub: Hub, clock: ManualClock) -> None:
    silent, alive = await join(hub, "silent", "alive")
    await pass_time(hub, clock, FORGET_S + 600.0, alive)
    assert [host.id for host in await hub.context.identity.hosts() if host.revoked_at_s is None] == [alive]
    left = [host for host in await hub.context.fleet.hosts.find(silent) if host.state == "left"]
    assert [host.state_reason for host in left] == ["it was silent for more than 60 minutes"]
    found = await kinds(hub, silent)
    assert (found.count("host.left"), found.count("host.revoked")) == (1, 1)
    await pass_time(hub, clock, 10.0, silent, alive)
    assert await listed(hub) == {"alive"}, "a late heartbeat brings nothing back"


async def test_no_host_is_forgotten_because_the_hub_was_away(tmp_path: Path, clock: ManualClock) -> None:
    settings = HubSettings(data=tmp_path / "hub", listen="127.0.0.1:0", keep_free_bytes=0)
    async with open_hub(settings, clock) as hub:
        (node,) = await join(hub, "node")
    await clock.advance(3 * FORGET_S)
    async with open_hub(settings, clock) as hub:
        await forget_silent(hub.context)
        await pass_time(hub, clock, LEASE_S + 60.0, node)
        assert await listed(hub) == {"node"}
        # Frozen: the first to run again is not the tick.
        await clock.advance(3 * FORGET_S)
        await forget_silent(hub.context)
        assert not [host for host in await hub.context.identity.hosts() if host.revoked_at_s is not None]


async def test_a_token_for_one_host_makes_no_ephemeral_one(hub: Hub, clock: ManualClock) -> None:
    await join(hub, "desk", ephemeral=False)
    await pass_time(hub, clock, FORGET_S + 600.0)
    assert await listed(hub) == {"desk"}
