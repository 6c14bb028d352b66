"""`systemctl reload strata-agent`: the agent goes, another one comes, and the job has not noticed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually, is_alive


def test_an_agent_that_is_told_to_hand_over_leaves_its_job_to_the_next_one(hub: HubProcess, tmp_path: Path) -> None:
    release = tmp_path / "release"
    with agent(hub, tmp_path, "vera", on_stop="preempt") as vera:
        job = hub.submit("vera", "held", release=str(release))
        hub.says(job, "held")
        pid = vera.child()
        assert vera.end(signal.SIGUSR1) == 0
        assert is_alive(pid)
        vera.start()
        eventually(lambda: "attempt_resumed" in vera.said())
        release.touch()
        seen = hub.until(job, "completed", "failed")
        assert (seen.job.status, len(seen.attempts)) == ("completed", 1)


def test_an_agent_that_stops_already_is_not_hurried_by_being_told_to_hand_over(hub: HubProcess, tmp_path: Path) -> None:
    release = tmp_path / "release"
    with agent(hub, tmp_path, "wanda", on_stop="finish") as wanda:
        job = hub.submit("wanda", "held", release=str(release))
        hub.says(job, "held")
        pid = wanda.child()
        wanda.send(signal.SIGTERM)
        eventually(lambda: "agent_stopping" in wanda.said())
        wanda.send(signal.SIGUSR1)
        with pytest.raises(AssertionError, match="not within"):
            eventually(lambda: not is_alive(pid), within_s=1.0)
        release.touch()
        seen = hub.until(job, "completed", "failed")
        assert (seen.job.status, len(seen.attempts)) == ("completed", 1)
        # It was told to stop: a second signal could meet a program that is past its handlers.
        assert wanda.ended() == 0
