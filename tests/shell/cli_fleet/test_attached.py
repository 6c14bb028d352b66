"""Commands that stay attached to a job: they say why it waits, and Ctrl-C leaves it as it is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from strata.cli.exit_codes import ExitCode
from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.shell.fleet_agent.running import STRATA
from tests.shell.fleet_agent.waiting import eventually

HUGE = ("run", "--ram", "4096", "--name", "huge", "--", "python", "train.py")


@pytest.fixture
def project(tmp_path: Path, manifest: Path, person: Person, host: HostByHand) -> Path:
    """The folder of a person who is logged in, with a host in the fleet."""
    del tmp_path, person, host
    return manifest.parent


@contextmanager
def attached(folder: Path, said: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    environ = dict(os.environ)  # noqa: TID251 - the person's, for a process
    with said.open("wb") as file:
        process = subprocess.Popen([STRATA, *words], cwd=folder, env=environ, stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


def says(said: Path, text: str) -> None:
    eventually(lambda: text in said.read_text(), 60.0)


@pytest.mark.parametrize("words", [HUGE, ("logs", "-f", "huge")])
def test_a_job_that_no_host_may_take_is_explained_and_ctrl_c_leaves_it(
    person: Person, project: Path, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    if words[0] == "logs":
        person.says("run", "--detach", *HUGE[1:])
    said = tmp_path / "said"
    with attached(project, said, *words) as process:
        says(said, "strata: huge is pending: the only host is not eligible; needs 4096 GiB, here has 8 GiB")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == ExitCode.INTERRUPTED
    if words[0] == "run":
        job = person.says("show", "huge", "-o", "json").value["id"].partition("_")[2][:10]
        end = f"strata: huge was not cancelled\nhint: strata logs -f {job}, strata cancel {job}\n"
        assert said.read_text().rstrip("\n") + "\n" == said.read_text().partition("strata: huge was not")[0] + end
    assert said.read_text().count("is pending:") == 1, "the same reason is not repeated"
    assert person.says("show", "huge", "-o", "json").value["status"] == "pending"


@pytest.mark.parametrize("words", [("wait", "tree-small"), ("apply", "manifest.toml", "--wait")])
def test_jobs_that_wait_for_a_host_are_explained_and_again_when_the_reason_is_another(
    person: Person, project: Path, host: HostByHand, tmp_path: Path, words: tuple[str, ...]
) -> None:
    person.says("apply", str(project / "manifest.toml"))
    person.says("pause", host.name)
    said = tmp_path / "said"
    with attached(project, said, *words) as process:
        says(
            said,
            "strata: tree-small is pending: none of the 1 eligible hosts can take it now; 1 eligible host is paused",
        )
        person.says("resume", host.name)
        host.fails("ValueError: no")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (ExitCode.INTERRUPTED, ExitCode.FAILED)
    if words[0] == "apply":
        assert "what manifest.toml queued was not cancelled" in said.read_text()


def test_a_follower_says_why_the_next_attempt_waits(
    person: Person, project: Path, host: HostByHand, tmp_path: Path
) -> None:
    text = (project / "manifest.toml").read_text().replace("max_attempts = 1", "max_attempts = 3")
    (project / "manifest.toml").write_text(text)
    person.says("apply", str(project / "manifest.toml"))
    said = tmp_path / "said"
    with attached(project, said, "logs", "-f", "tree-small"):
        host.fails("ValueError: no")
        says(said, "strata: tree-small is pending: ")
