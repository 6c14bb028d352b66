"""The agent dies at each place where its state has just changed; the next one goes on, and the job runs once."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

import pytest

import strata.fleet.agent
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually

pytestmark = pytest.mark.timeout(240)

SOURCES: Final = Path(strata.fleet.agent.__file__).parent
FAILPOINTS: Final = sorted(
    {name for file in SOURCES.glob("*.py") for name in re.findall(r'failpoint\("([^"]+)"\)', file.read_text())}
)
ARMED: Final = """
import sys
from strata.base.failpoint import arm, kill
from strata.cli.main import main
arm(sys.argv.pop(1), kill)
main()
"""


def test_the_failpoints_were_found() -> None:
    assert len(FAILPOINTS) >= 9


@pytest.mark.parametrize("name", FAILPOINTS)
def test_an_agent_that_dies_there_is_continued_by_the_next_one(hub: HubProcess, tmp_path: Path, name: str) -> None:
    host = name.replace(".", "-")
    release, ran = tmp_path / "release", tmp_path / "ran"
    with agent(hub, tmp_path, host, (sys.executable, "-c", ARMED, name)) as first:
        job = hub.submit(host, "once", release=str(release), ran=str(ran))
        if name in ("agent.attempt.ended", "agent.attempt.logged", "agent.attempt.uploaded", "agent.attempt.completed"):
            eventually(ran.exists)
            release.touch()
        assert first.end(0) == -9
        first.start()
        release.touch()
        seen = hub.until(job, "completed", "failed")
        assert seen.job.status == "completed", seen
        assert [attempt.epoch for attempt in seen.attempts] == [1]
        assert ran.read_text() == "ran\n"
        assert hub.log(job).splitlines() == [f"line {line}" for line in range(100)]
        assert hub.file(seen.job.artifact, "model.txt") == "once"
        eventually(lambda: not list((first.state / "attempts").iterdir()))
