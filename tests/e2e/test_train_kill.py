"""The processes of a training server are killed while clients train: everything ends, once, and bit by bit the same."""

from __future__ import annotations

from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from soak.train.kill import Outcome, hurt_round
from soak.train.server import make_model, serving
from strata.train.launch.child import descendants

pytestmark = pytest.mark.timeout(600)


async def test_killed_servers_and_orchestrators_lose_nothing_and_do_nothing_twice(tmp_path: Path) -> None:
    """With ranks that pretend and that the launcher only connects to."""
    outcome = Outcome()
    await hurt_round(tmp_path, tmp_path / "no-model", "pretending", range(8), 3, outcome)
    assert outcome.problems == []
    assert outcome.times >= 6
    assert outcome.victims["api"] >= 2
    assert outcome.victims["orchestrator"] >= 3


async def test_real_ranks_outlive_the_others_and_are_started_again_when_they_die(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    outcome = Outcome()
    # The last of these kills a rank.
    await hurt_round(tmp_path, tmp_path / "tiny", "real", range(5, 10), 2, outcome)
    assert outcome.problems == []
    assert outcome.victims["rank"] == 1
    assert outcome.times == 5


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
