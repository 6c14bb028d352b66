"""The agent dies at each place where its state has just changed; the next one goes on, and the job runs once."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

import strata.fleet.agent
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import DataSource, EnvironmentSpec, JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.sdk.datasets import push_data
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually, is_alive
from tests.support.wheels import make_wheel

pytestmark = pytest.mark.timeout(240)

SOURCES: Final = Path(strata.fleet.agent.__file__).parent
FAILPOINTS: Final = sorted(
    {name for file in SOURCES.glob("*.py") for name in re.findall(r'failpoint\("([^"]+)"\)', file.read_text())}
)
AT_THE_END: Final = (
    *("agent.attempt.ended", "agent.attempt.logged", "agent.attempt.uploaded", "agent.attempt.completed"),
    "agent.state.removed",
)
NOT_ON_THE_WAY: Final = (
    "agent.fail.",
    "agent.stop.",
    "agent.environment.",
    "agent.data.",
    "agent.exec.",
    "agent.server.",
)
"""Where an attempt comes by only if it does not end well, or if its job brings packages, data or commands of people."""
ARMED: Final = """
import sys
from strata.base.failpoint import arm, kill
from strata.cli.main import main
arm(sys.argv.pop(1), kill)
main()
"""
DEFECTIVE: Final = """
import sys
from strata.base.failpoint import arm
from strata.cli.main import main
def defect(name):
    raise ZeroDivisionError(name)
arm(sys.argv.pop(1), defect)
main()
"""


def supervisors(under: Path) -> list[str]:
    """Processes that watch a child of an agent whose folder is there."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = file.read_text()
            if "supervisor.py" in command and str(under) in command:
                found.append(command)
    return found


def test_the_failpoints_were_found() -> None:
    assert len(FAILPOINTS) >= 20


@pytest.mark.proves(
    "No job is lost, none completes twice, no line of a log is missing or doubled when agents, their "
    "children and the hub are killed"
)
@pytest.mark.parametrize("name", [name for name in FAILPOINTS if not name.startswith(NOT_ON_THE_WAY)])
def test_an_agent_that_dies_there_is_continued_by_the_next_one(hub: HubProcess, tmp_path: Path, name: str) -> None:
    host = name.replace(".", "-")
    release, ran = tmp_path / "release", tmp_path / "ran"
    with agent(hub, tmp_path, host, (sys.executable, "-c", ARMED, name)) as first:
        job = hub.submit(host, "once", release=str(release), ran=str(ran))
        if name in AT_THE_END:
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


@pytest.mark.parametrize("name", [name for name in FAILPOINTS if name.startswith("agent.fail.")])
def test_a_failure_is_told_once_although_the_agent_dies_while_it_tells_it(
    hub: HubProcess, tmp_path: Path, name: str
) -> None:
    host = name.replace(".", "-")
    with agent(hub, tmp_path, host, (sys.executable, "-c", ARMED, name)) as first:
        job = hub.submit(host, "crash")
        assert first.end(0) == -9
        first.start()
        attempt = hub.until_tried(job)
        assert attempt.cause is Cause.USER_ERROR
        assert "the learning rate is a fish" in attempt.error
        eventually(lambda: not [each for each in first.children() if each.endswith("-1")])
        assert hub.job(job).job.status in ("pending", "claimed", "running")


@pytest.mark.parametrize("name", [name for name in FAILPOINTS if name.startswith("agent.stop.")])
def test_a_child_that_nobody_wants_ends_although_the_agent_died_before_it_ended_it(
    hub: HubProcess, tmp_path: Path, name: str
) -> None:
    host = name.replace(".", "-")
    with agent(hub, tmp_path, host, (sys.executable, "-c", ARMED, name)) as first:
        job = hub.submit(host, "stepwise")
        hub.says(job, "counting")
        pid = first.child()
        hub.cancel(job)
        assert first.end(0) == -9
        assert is_alive(pid)
        first.start()
        eventually(lambda: not is_alive(pid), 30.0)
        eventually(lambda: not list((first.state / "attempts").iterdir()))
        assert hub.job(job).job.status == "cancelled"


@pytest.mark.parametrize(
    "name", [name for name in FAILPOINTS if name.startswith(("agent.environment.", "agent.data."))]
)
def test_packages_and_data_are_provided_although_the_agent_died_over_them(
    hub: HubProcess, tmp_path: Path, name: str
) -> None:
    host = name.replace(".", "-")
    source, words = tmp_path / "source", tmp_path / "words"
    for folder in (source, words):
        folder.mkdir()
    make_wheel(tmp_path / "wheels", "greeting", "1.0", "TEXT = 'hello'\n")
    (source / "requirements.txt").write_text("greeting\n")
    (words / "a.txt").write_text(f"words for {host}")
    pushed = push_data(hub.operator, words, host)
    show = (
        "import greeting, os, pathlib; print(greeting.TEXT);"
        "print(pathlib.Path(os.environ['STRATA_DATA_WORDS'], 'a.txt').read_text())"
    )
    trainer = TrainerSpec(
        name=host,
        command=("python", "-c", show),
        directory=str(source),
        environment=EnvironmentSpec(file="requirements.txt"),
        data={"words": DataSource(source=f"strata:{host}", digest=pushed.artifact_id)},
    )
    variables = {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(tmp_path / "wheels")}
    with agent(hub, tmp_path, host, (sys.executable, "-c", ARMED, name), variables=variables) as first:
        spec = JobSpec(model=host, trainer=host, needs=Needs(allowed_hosts=(host,)))
        job = hub.submit_with(trainer, spec)
        assert first.end(0) == -9
        first.start()
        seen = hub.until(job, "completed", "failed")
        assert (seen.job.status, [attempt.epoch for attempt in seen.attempts]) == ("completed", [1]), seen
        assert hub.log(job).splitlines() == ["hello", f"words for {host}"]
        facts = seen.attempts[0].facts
        assert facts["environment"]["packages"] == ["greeting==1.0"]
        assert not facts["environment"]["cached"], "what was half built is not used"
        # What the one that died had begun is no part of the caches.
        for cache in ("environments", "data"):
            (entry,) = (each for each in (first.work / cache).iterdir() if each.is_dir())
            assert sorted(each.name for each in entry.iterdir()) == ["content", "ready.json", "users"]


@pytest.mark.parametrize("name", ["agent.attempt.started", "agent.attempt.seen"])
def test_a_defect_in_an_attempt_is_told_at_once_as_the_hosts(hub: HubProcess, tmp_path: Path, name: str) -> None:
    host = "defect-" + name.replace(".", "-")
    with agent(hub, tmp_path, host, (sys.executable, "-c", DEFECTIVE, name)):
        job = hub.submit(host, "once", release=str(tmp_path / "never"), ran=str(tmp_path / "ran"))
        tried = hub.until_tried(job, within_s=20)
        # Nothing of it runs on, unseen, beside the next attempt.
        assert supervisors(tmp_path) == []
        assert (tried.cause, name in tried.error) == (Cause.INFRA, True), tried
        assert hub.job(job).job.status == "pending"
