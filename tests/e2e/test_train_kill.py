"""The processes of a training server are killed while clients train: everything ends, once, and bit by bit the same."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from soak.train.kill import Round, disturbed_round
from soak.train.outcome import Outcome
from soak.train.server import make_model, serving
from strata.train.launch.supervised_process import descendants

pytestmark = pytest.mark.timeout(600)


async def test_killed_servers_and_orchestrators_lose_nothing_and_do_nothing_twice(tmp_path: Path) -> None:
    """With ranks that pretend and that the launcher only connects to."""
    outcome = Outcome()
    victims = ("orchestrator", "api", "launcher", "orchestrator", "api")
    failpoints = ("train.orchestrator.dispatch_durable", "train.orchestrator.answer_heard", "train.api.before_reply")
    await disturbed_round(tmp_path, Round(tmp_path / "none", "pretending", 3), [*victims, *failpoints], outcome)
    assert outcome.problems == []
    assert outcome.victims == {"orchestrator": 4, "api": 3, "launcher": 1}
    assert sorted(outcome.reached) == sorted(failpoints)
    assert outcome.snapshots >= 1


@pytest.fixture
def without_telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.mark.proves("Never: the death of any worker ends the service")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_telemetry")
async def test_real_ranks_are_killed_too_and_the_weights_are_bit_by_bit_those_of_a_calm_run(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "tiny")
    outcome = Outcome()
    moments = ("api", "train.orchestrator.snapshot_heard", "rank 1")
    await disturbed_round(tmp_path, Round(tmp_path / "tiny", "real", 3), moments, outcome)
    assert outcome.problems == []
    assert outcome.victims == {"api": 1, "orchestrator": 1, "rank 1": 1}
    assert [*outcome.reached] == ["train.orchestrator.snapshot_heard"]
    assert outcome.restored >= 1
    assert outcome.equal == 3


@pytest.mark.proves("Never: rank 0's socket is open to the network")
async def test_nothing_of_a_server_can_be_reached_from_other_machines(tmp_path: Path) -> None:
    """Not the store of a rendezvous either, from which torchrun would unpickle what anybody writes."""
    make_model(tmp_path / "tiny")
    async with serving(tmp_path / "s", tmp_path / "tiny", "real") as server:
        found = [
            connection.laddr.ip
            for pid in [server.launcher_pid, *descendants(server.launcher_pid)]
            for connection in psutil.Process(pid).net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert found, "at least the API server listens"
        assert set(found) == {"127.0.0.1"}
