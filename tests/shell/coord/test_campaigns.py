"""The campaigns of `make soak` against real coordinators, short: the same code with fewer workers and fewer kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak.coord import failover, kill, load, partitions, restart, zombie
from soak.coord.workers import WorkerPlan
from soak.coord.zombie_leader import LEADS_S
from soak.trials import CampaignRequest, CampaignResult, Database
from tests.support.busy import BUSY

BRISK = WorkerPlan(workers=100, channels=20, shards=300, think_s=0.2)


def ask(folder: Path, url: str, *, times: int, workers: int = 100, first: int = 0) -> CampaignRequest:
    database: Database = "postgres" if url.startswith("postgresql") else "sqlite"
    return CampaignRequest(first=first, times=times, workers=workers, database=database, url=url, folder=folder)


def show(result: CampaignResult) -> None:
    print(f"\n{result.figures}")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path}/coord.db"


@pytest.mark.proves(
    "A coordinator that is killed under workers at work takes nothing back: acks, open barriers, members"
)
async def test_nothing_is_taken_back_when_the_coordinator_is_killed_and_starts_again(
    tmp_path: Path, sqlite_url: str
) -> None:
    result = await kill.run(ask(tmp_path, sqlite_url, times=3), show, BRISK)
    assert result.problems == []
    assert result.times == 3
    assert 0 < result.worst_s <= kill.LIMIT_S["sqlite"] * BUSY


@pytest.mark.proves(
    "A coordinator that is killed under workers at work takes nothing back: acks, open barriers, members"
)
async def test_nothing_is_taken_back_when_a_standby_takes_over(tmp_path: Path, postgres_url: str) -> None:
    result = await kill.run(ask(tmp_path, postgres_url, times=2), show, BRISK)
    assert result.problems == []
    assert result.times == 2
    assert 0 < result.worst_s <= kill.LIMIT_S["postgres"] * BUSY


@pytest.mark.proves(
    "Several coordinators share the partitions of a PostgreSQL; one that is killed costs no worker, no "
    "ack and no barrier"
)
async def test_nobody_is_evicted_and_nothing_lost_when_a_process_that_leads_partitions_is_killed(
    tmp_path: Path, postgres_url: str
) -> None:
    result = await partitions.run(ask(tmp_path, postgres_url, times=1, workers=48), show)
    assert result.problems == []
    assert result.times == 1
    assert 0 < result.worst_s <= partitions.LIMIT_S * BUSY


@pytest.mark.proves(
    "A worker or a leader that was frozen past its lease changes nothing when it wakes up, and is told so "
    "by the documented code"
)
async def test_a_worker_that_was_thought_dead_changes_nothing_in_any_of_its_fates(
    tmp_path: Path, sqlite_url: str
) -> None:
    result = await zombie.run(ask(tmp_path, sqlite_url, times=len(zombie.FATES)), show)
    assert result.problems == []
    assert result.times == len(zombie.FATES)


@pytest.mark.proves("Never again: the documented worker, killed and restarted, lost samples")
async def test_the_documented_worker_may_be_killed_and_restarted_at_any_moment(tmp_path: Path, sqlite_url: str) -> None:
    result = await restart.run(ask(tmp_path, sqlite_url, times=2, workers=2), show)
    assert result.problems == []
    assert result.times == 2


@pytest.mark.proves(
    "A worker or a leader that was frozen past its lease changes nothing when it wakes up, and is told so "
    "by the documented code"
)
async def test_a_leader_that_was_thought_dead_changes_nothing(tmp_path: Path, postgres_url: str) -> None:
    result = await zombie.run(ask(tmp_path, postgres_url, times=1, workers=20), show)
    assert result.problems == []
    assert result.times == 1
    assert result.worst_s <= LEADS_S * BUSY


@pytest.mark.proves(
    "When PostgreSQL dies and its synchronous standby is promoted, nothing confirmed is lost; a standby "
    "without all facts is refused"
)
async def test_nothing_is_lost_with_the_primary_and_a_standby_without_all_facts_is_refused(tmp_path: Path) -> None:
    # 3 is with a frozen leader, 4 with a standby that lacks facts.
    result = await failover.run(ask(tmp_path, "postgresql:", times=2, workers=20, first=3), show)
    assert result.problems == []
    assert result.times == 2


@pytest.mark.proves("A herd is answered, nobody is cancelled")
async def test_a_herd_registers_beats_and_meets_without_losing_anybody(tmp_path: Path, sqlite_url: str) -> None:
    result = await load.run(ask(tmp_path, sqlite_url, times=1, workers=500), show)
    assert result.problems == []
    assert result.times == 1
