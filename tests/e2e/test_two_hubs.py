"""Two hubs over one PostgreSQL behind one address, each killed in turn under load: `make soak`'s campaign, short."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from soak.fleet_agent.fleet import Plan
from soak.fleet_hub import two_hubs
from soak.trials import CampaignRequest

KILLS = 4


@pytest.mark.timeout(300)
async def test_clients_of_two_hubs_notice_nothing_but_a_retry_when_each_is_killed_in_turn(postgres_url: str) -> None:
    # Short: the sockets of the hubs lie below it.
    with tempfile.TemporaryDirectory(prefix="hubs-") as folder:
        request = CampaignRequest(
            first=0, times=KILLS, workers=2, database="postgres", url=postgres_url, folder=Path(folder)
        )
        plan = Plan(steps=8, lines=3, every=4, tail=500)
        result = await two_hubs.run(request, lambda so_far: print(f"\n{so_far.figures}"), plan)
    print(result.figures)
    assert result.problems == []
    assert result.times == KILLS
