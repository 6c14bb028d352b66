"""A hub that could not see takes nothing away, and a hub without that safeguard is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.fleet.core.capability import Capability
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.records import HostRow
from strata.fleet.service import leases
from strata.fleet.service.fleet import Fleet
from tests.shell.fleet_proof.stores import open_sqlite
from tests.support.manual_clock import ManualClock


async def status_after_a_restart(path: Path) -> JobStatus:
    """Of a job whose lease ran out while no hub was there, as soon as the next hub has ticked."""
    clock = ManualClock(wall_s=1_800_000_000.0)
    store = await open_sqlite(path)
    first = Fleet(store, clock)
    host = HostRow(id="h", name="h", capability=Capability(hostname="h"), registered_at_s=first.now_s())
    await first.hosts.register(host, "test")
    spec = JobSpec(model="m")
    await first.jobs.apply(ApplyPlan(new={spec.id: spec}), "test", source="test")
    await first.claims.claim("h", "c1")
    await clock.advance(3600)
    second = Fleet(store, clock)
    await second.leases.tick()
    status = (await store.jobs.get(spec.id)).status
    await store.close()
    return status


async def test_a_hub_that_starts_gives_every_lease_a_full_term(tmp_path: Path) -> None:
    assert await status_after_a_restart(tmp_path / "hub.db") is JobStatus.CLAIMED


async def test_a_hub_that_sweeps_blindly_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "may_expire_leases", lambda **_: True)
    assert await status_after_a_restart(tmp_path / "hub.db") is not JobStatus.CLAIMED
