"""The campaign `mixed-kill`, short: one hub with script jobs, a gang, a sweep and a training server is disturbed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from soak.mixed.expected_state import GangPlan
from soak.mixed.kill import run
from soak.mixed.work import MixPlan
from soak.trials import CampaignRequest, CampaignResult

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture
def without_telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def show(result: CampaignResult) -> None:
    print(f"\n{result.figures}")


@pytest.mark.usefixtures("without_telemetry")
async def test_nothing_is_lost_or_doubled_when_a_hub_with_all_kinds_of_work_and_its_parts_are_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # The paths of Unix sockets have to be short.
    folder = tmp_path_factory.mktemp("x")
    request = CampaignRequest(
        first=0, times=4, workers=2, database="sqlite", url=f"sqlite:{folder}/hub.db", folder=folder
    )
    plan = MixPlan(gang=GangPlan(samples=80), trials=3)
    result = await run(request, show, plan=plan, kinds=("hub", "server rank", "gang worker", "agent"))
    assert result.problems == []
    assert result.times == 4
