"""Jobs that cannot be set up: they fail with a reason after one attempt per host, and no host pays for them."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.artifacts import CommitReply
from strata.fleet.wire.hosts import HostsReply
from strata.fleet.wire.jobs import JobReply
from tests.shell.cli_fleet.driving import HostByHand
from tests.shell.fleet_agent.running import AgentProcess, HubProcess
from tests.shell.fleet_agent.waiting import eventually

pytestmark = pytest.mark.proves("Never again: mistakes of a job quarantined a healthy host")

AREA: Final = "hub: mistakes of jobs"
MISTAKES: Final = 3
"""So many different jobs with trouble of the host would quarantine it."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path_factory.mktemp("site"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def healthy(hub: HubProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """A host that is well, beside another one that may take the same jobs: so it could be quarantined."""
    other = HostByHand(hub, "other")
    made = AgentProcess(hub, tmp_path_factory.mktemp("hosts"), "healthy")
    eventually(lambda: len(hub.operator.call("GET", "/v1/workers", HostsReply).hosts) == 2)
    yield made
    made.close()
    other.close()


def state_of(hub: HubProcess, name: str) -> str:
    hosts = hub.operator.call("GET", "/v1/workers", HostsReply).hosts
    return next(host.state for host in hosts if host.name == name)


def refuse_three(hub: HubProcess, name: str, tries: Callable[[int], None], **fields: Any) -> list[JobReply]:
    """Three jobs for the healthy host alone, all with the same mistake, when they have ended."""
    trainer = TrainerSpec(**({"name": name, "command": ("python", "x.py")} | fields))
    found = []
    for seed in range(MISTAKES):
        spec = JobSpec(model=name, trainer=name, seed=seed, needs=Needs(allowed_hosts=("healthy",)))
        seen = hub.until(hub.submit_with(trainer, spec), "failed", "completed")
        assert (seen.job.status, [each.cause for each in seen.attempts]) == ("failed", [Cause.SETUP_ERROR]), seen
        assert seen.attempts[0].error, "the reason is shown"
        found.append(seen)
        tries(1)
    assert state_of(hub, "healthy") == "active"
    return found


def upload(hub: HubProcess, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    hub.operator.send("PUT", f"/v1/source/{digest}", content, CommitReply)
    return digest


def archive(*names: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return made.getvalue()


@pytest.mark.attack(AREA, "three jobs with a bad git URL, to quarantine a healthy host (row 71, M8)")
def test_jobs_with_a_bad_git_url_do_not_quarantine_a_host(
    hub: HubProcess, healthy: AgentProcess, tries: Callable[[int], None]
) -> None:
    seen = refuse_three(hub, "git", tries, git="https://127.0.0.1:9/nothing.git", commit="0" * 40)
    assert "git fetch failed" in seen[0].attempts[0].error


@pytest.mark.attack(AREA, "three jobs with a folder that no host has (M8)")
def test_jobs_with_a_missing_folder_do_not_quarantine_a_host(
    hub: HubProcess, healthy: AgentProcess, tries: Callable[[int], None]
) -> None:
    refuse_three(hub, "folder", tries, directory="/no/such/folder")


@pytest.mark.attack(AREA, "three jobs whose bundle is no archive (M8)")
def test_jobs_with_a_broken_bundle_do_not_quarantine_a_host(
    hub: HubProcess, healthy: AgentProcess, tries: Callable[[int], None]
) -> None:
    refuse_three(hub, "broken", tries, bundle=upload(hub, b"no archive at all"))


@pytest.mark.attack(AREA, "three jobs whose bundle has a name that no file system takes (M8)")
def test_jobs_with_an_impossible_name_in_their_bundle_do_not_quarantine_a_host(
    hub: HubProcess, healthy: AgentProcess, tries: Callable[[int], None]
) -> None:
    refuse_three(hub, "names", tries, bundle=upload(hub, archive("n" * 300)))


@pytest.mark.attack(AREA, "three jobs whose command is an option, a folder, or not there (M8)")
@pytest.mark.parametrize("command", [("--help",), ("nosuchprog",), ("/etc",), ("/etc/passwd",)])
def test_jobs_with_a_command_that_cannot_be_started_do_not_quarantine_a_host(
    hub: HubProcess, healthy: AgentProcess, tries: Callable[[int], None], command: tuple[str, ...], tmp_path: Path
) -> None:
    name = "command" + command[0].replace("/", ".")
    seen = refuse_three(hub, name, tries, command=command, directory=str(tmp_path))
    assert f"cannot start {command[0]!r}" in seen[0].attempts[0].error


@pytest.mark.attack(AREA, "three jobs with an interpreter that is not there (M8)")
def test_jobs_with_a_missing_interpreter_do_not_quarantine_a_host(
    hub: HubProcess, healthy: AgentProcess, tries: Callable[[int], None], tmp_path: Path
) -> None:
    refuse_three(hub, "interpreter", tries, directory=str(tmp_path), interpreter="/no/such/python")


@pytest.mark.attack(AREA, "a variable whose name has =, is empty, has NUL or a space; a value with NUL (row 111)")
def test_a_variable_that_no_process_can_have_is_refused_by_the_hub(
    hub: HubProcess, tries: Callable[[int], None], tmp_path: Path
) -> None:
    for number, env in enumerate(({"A=B": "c"}, {"": "c"}, {"A\0": "c"}, {"A B": "c"}, {"A": "c\0"}, {"Ä": "c"})):
        trainer = TrainerSpec(name=f"env{number}", command=("python", "x.py"), directory=str(tmp_path), env=env)
        with pytest.raises(StrataError) as refused:
            hub.submit_with(trainer, JobSpec(model="env", trainer=trainer.name))
        assert refused.value.code is Code.INVALID
        tries(1)


@pytest.mark.attack(AREA, "a command and a folder with a NUL character")
def test_a_command_with_a_nul_character_is_refused_by_the_hub(hub: HubProcess, tries: Callable[[int], None]) -> None:
    for number, fields in enumerate(
        ({"command": ("a\0b",), "directory": "/x"}, {"command": ("a",), "directory": "\0"})
    ):
        trainer = TrainerSpec(name=f"nul{number}", **fields)  # type: ignore[arg-type]
        with pytest.raises(StrataError) as refused:
            hub.submit_with(trainer, JobSpec(model="nul", trainer=trainer.name))
        assert refused.value.code is Code.INVALID
        tries(1)


@pytest.mark.attack(AREA, "a job that imports what is not there, to run max_attempts times")
def test_a_missing_module_is_tried_once_per_host(hub: HubProcess, healthy: AgentProcess) -> None:
    trainer = TrainerSpec(name="imports", command=("python", "-c", "import nosuchmodule"), directory="/")
    spec = JobSpec(model="imports", trainer="imports", needs=Needs(allowed_hosts=("healthy",)))
    seen = hub.until(hub.submit_with(trainer, spec), "failed")
    assert [each.cause for each in seen.attempts] == [Cause.SETUP_ERROR]
    assert "No module named 'nosuchmodule'" in seen.attempts[0].error
