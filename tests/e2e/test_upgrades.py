"""The last release beside this version, in each order of an upgrade and of the way back, under load.

By hand beside any commit: `pytest tests/e2e/test_upgrades.py --against REV`.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from soak.coord.expected_state import ExpectedState
from soak.train.outcome import Outcome
from soak.train.server import make_model
from soak.trees import CURRENT, Tree, older_revision, older_tree
from soak.trials import CampaignRequest, Database
from soak.upgrade import coordinator, fleet, train

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
    pytest.mark.proves(
        "A fleet, a coordinator and a training server are upgraded in any documented order, and back, without losing "
        "or doubling anything"
    ),
]


@pytest.fixture(scope="module")
def older(request: pytest.FixtureRequest) -> Iterator[Tree]:
    revision = older_revision(request.config.getoption("--against"))
    if revision is None:
        pytest.skip("no version is released yet: bench/released.toml names none")
    with older_tree(revision) as tree:
        yield tree


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The paths of Unix sockets have to be short.
    return tmp_path_factory.mktemp("x")


def ask(folder: Path, url: str = "") -> CampaignRequest:
    database: Database = "postgres" if url else "sqlite"
    return CampaignRequest(
        first=0, times=1, workers=2, database=database, url=url or f"sqlite:{folder}/s.db", folder=folder
    )


def assert_whole(outcome: fleet.UpgradeOutcome) -> None:
    print(f"\n{outcome.jobs} jobs in {outcome.attempts} attempts; refused to go back: {outcome.refused or 'none'}")
    assert outcome.problems == []
    assert outcome.attempts == outcome.jobs > 0


@pytest.mark.parametrize("order", fleet.ORDERS)
async def test_no_job_is_lost_or_tried_twice_while_a_fleet_is_upgraded(folder: Path, older: Tree, order: str) -> None:
    assert_whole(await fleet.run_order(ask(folder), older, fleet.ORDERS[order]))


@pytest.mark.parametrize("order", fleet.ORDERS_OF_TWO_HUBS)
async def test_no_job_is_lost_or_tried_twice_while_two_hubs_are_upgraded(
    folder: Path, older: Tree, order: str, postgres_url: str
) -> None:
    assert_whole(await fleet.run_order(ask(folder, postgres_url), older, fleet.ORDERS_OF_TWO_HUBS[order], hubs=2))


@pytest.mark.parametrize("hub", [fleet.OLD, fleet.NEW])
async def test_commands_of_one_version_work_with_a_hub_of_the_other(folder: Path, older: Tree, hub: str) -> None:
    assert_whole(await fleet.run_commands(ask(folder), older, hub_version=hub))


def assert_kept(expected: ExpectedState) -> None:
    print(f"\n{expected.confirmed} acks confirmed")
    assert expected.problems == []
    assert expected.confirmed > 0


async def test_a_coordinator_is_replaced_by_the_other_version_and_back(folder: Path, older: Tree) -> None:
    assert_kept(await coordinator.run_in_place(ask(folder), [older, CURRENT, older, CURRENT]))


async def test_a_standby_of_the_other_version_takes_over_and_back(folder: Path, older: Tree, postgres_url: str) -> None:
    assert_kept(await coordinator.run_take_over(ask(folder, postgres_url), [older, CURRENT, older, CURRENT]))


async def test_workers_of_two_versions_share_an_epoch_while_their_coordinator_is_upgraded(
    folder: Path, older: Tree
) -> None:
    assert await coordinator.run_gang(ask(folder), [older, CURRENT], [older, CURRENT]) == []


@pytest.fixture
def without_telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


@pytest.mark.parametrize("back", [False, True], ids=["forward", "and back"])
@pytest.mark.usefixtures("without_telemetry")
async def test_weights_are_those_of_a_calm_run_after_another_version_went_on_with_the_data_folder(
    folder: Path, older: Tree, model: Path, back: bool
) -> None:
    outcome = Outcome()
    versions = [older, CURRENT, older] if back else [older, CURRENT]
    disturbed = await train.train(folder / "disturbed", model, versions, outcome)
    train.compare(disturbed, await train.train(folder / "calm", model, [CURRENT], Outcome()), outcome)
    print(f"\n{outcome.operations} operations, {outcome.times} restarts, {outcome.equal} models equal")
    assert outcome.problems == []
    assert outcome.equal == train.CLIENTS


async def test_ranks_of_the_other_version_are_refused_and_replaced_without_losing_an_operation(
    folder: Path, older: Tree
) -> None:
    outcome = Outcome()
    reasons = await train.replace_ranks_last(folder / "server", older, outcome)
    assert outcome.problems == []
    assert "start both from one version" in reasons[0]


@pytest.mark.parametrize("server", [fleet.OLD, fleet.NEW])
async def test_the_training_sdk_of_either_version_gets_the_same_losses(folder: Path, older: Tree, server: str) -> None:
    tree = older if server == fleet.OLD else CURRENT
    first, second = await train.run_clients(folder / "server", tree, [older, CURRENT])
    assert first == second
    assert len(first) == 6
