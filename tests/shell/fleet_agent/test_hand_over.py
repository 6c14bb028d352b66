"""`systemctl reload strata-agent`: the agent goes, another one comes, and the job has not noticed."""

from __future__ import annotations

import signal
from pathlib import Path

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
        eventually(lambda: "goes on with an attempt" in vera.said())
        release.touch()
        seen = hub.until(job, "completed", "failed")
        assert (seen.job.status, len(seen.attempts)) == ("completed", 1)
