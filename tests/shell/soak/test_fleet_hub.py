"""The campaigns of `make soak` against a real hub, short: the same code with fewer hosts and fewer kills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from soak.fleet_hub import kill, postgres
from soak.fleet_hub.ablation import PROGRAM
from soak.fleet_hub.kill import Kill
from soak.fleet_hub.workers import LEASE_S
from soak.hub_process import ArmedFailpoint
from soak.trials import CampaignRequest, CampaignResult, Database
from tests.support.busy import BUSY

HOSTS = 8


def ask(folder: Path, *, times: int, database: Database = "sqlite", url: str = "", first: int = 0) -> CampaignRequest:
    return CampaignRequest(first=first, times=times, workers=HOSTS, database=database, url=url, folder=folder)


def show(result: CampaignResult) -> None:
    print(f"\n{result.figures}")


KILLS = [
    Kill(0, 1.0, None, 0.0),
    Kill(1, 0.0, ArmedFailpoint("fleet.claim.committed", 3), 0.0),
    Kill(2, 0.0, ArmedFailpoint("fleet.complete.committed", 3), 0.0),
    Kill(3, 0.5, None, LEASE_S * 1.2),
    Kill(4, 0.0, ArmedFailpoint("fleet.http.before_reply", 40), 0.0),
]


@pytest.mark.proves(
    "A hub that is killed, or frozen, or whose PostgreSQL is killed, cut off or loses its replies, takes "
    "nothing back and evicts nobody; what is repeated after a lost reply gets the same answer"
)
async def test_nothing_is_taken_back_when_the_hub_is_killed_and_starts_again(tmp_path: Path) -> None:
    result = await kill.run(ask(tmp_path, times=len(KILLS)), show, kills=KILLS)
    assert result.problems == []
    assert result.times == len(KILLS)


@pytest.mark.proves(
    "A hub that is killed, or frozen, or whose PostgreSQL is killed, cut off or loses its replies, takes "
    "nothing back and evicts nobody; what is repeated after a lost reply gets the same answer"
)
async def test_nothing_is_taken_back_when_the_hub_is_killed_on_postgresql(tmp_path: Path, postgres_url: str) -> None:
    wanted = ask(tmp_path, times=len(KILLS), database="postgres", url=postgres_url)
    result = await kill.run(wanted, show, kills=[replace(each, down_s=0.0) for each in KILLS])
    assert result.problems == []
    assert result.times == len(KILLS)


@pytest.mark.proves(
    "A hub that is killed, or frozen, or whose PostgreSQL is killed, cut off or loses its replies, takes "
    "nothing back and evicts nobody; what is repeated after a lost reply gets the same answer"
)
async def test_nothing_is_taken_back_when_the_database_of_the_hub_is_hurt(tmp_path: Path) -> None:
    result = await postgres.run(ask(tmp_path, first=1, times=3, database="postgres"), show)
    assert result.problems == []
    assert result.times == 3
    assert result.worst_s <= postgres.LIMIT_S * BUSY


@pytest.mark.parametrize(
    ("safeguard", "killed"),
    [
        ("a hub that was blind takes nothing away", Kill(0, 3.0, None, LEASE_S * 1.3)),
        ("a claim that is repeated takes no more", Kill(0, 3.0, None, 0.0)),
        ("a repeated report gets the same answer", Kill(0, 3.0, None, 0.0)),
        ("a write is committed before it is confirmed", Kill(0, 3.3, None, 0.0)),
    ],
)
async def test_a_hub_without_a_safeguard_is_found_out(tmp_path: Path, safeguard: str, killed: Kill) -> None:
    twice = [killed, replace(killed, number=1, down_s=0.0)]
    result = await kill.run(ask(tmp_path, times=2), show, kills=twice, program=(*PROGRAM, safeguard))
    assert result.problems
