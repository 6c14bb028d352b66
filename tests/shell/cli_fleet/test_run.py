"""`strata run`: the current folder and a command become a job."""

from __future__ import annotations

import io
import re
from datetime import timedelta
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.cli.exit_codes import ExitCode
from strata.fleet.wire.jobs import JobReply
from strata.fleet.wire.leases import CompleteRequest
from strata.sdk.submit import NONE, RunOptions, submit
from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.support.wheels import make_wheel


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(folder)
    return folder


def test_the_same_command_in_the_same_folder_is_the_same_job(person: Person, here: Path) -> None:
    first = person.says("run", "-d", "--", "python", "train.py", "--fast")
    assert first.status == ExitCode.OK
    assert "my-project is job" in first.err
    assert person.says("run", "-d", "--", "python", "train.py", "--fast").out == first.out
    assert person.says("run", "-d", "--", "python", "train.py").out != first.out
    assert person.says("run", "-d", "--seed", "1", "--", "python", "train.py", "--fast").out != first.out
    (here / "train.py").write_text("print('goodbye')\n")
    assert person.says("run", "-d", "--", "python", "train.py", "--fast").out != first.out


def test_the_host_gets_the_command_and_the_folder_and_the_person_the_outcome(
    person: Person, host: HostByHand, here: Path
) -> None:
    del here
    person.says("run", "-d", "--", "python", "train.py")
    lease = host.claim()
    assert lease.trainer is not None
    assert lease.trainer.command == ("python", "train.py")
    assert b"print('hello')" in host.hub.source(lease.trainer.bundle)
    host.hub.complete(lease, CompleteRequest(epoch=lease.epoch))
    assert person.says("run", "--", "python", "train.py").status == ExitCode.OK
    person.says("cancel", person.says("run", "-d", "--seed", "2", "--", "python", "train.py").out.strip())
    done = person.says("run", "--seed", "2", "--", "python", "train.py")
    assert (done.status, "my-project is cancelled" in done.err) == (ExitCode.CANCELLED, True)


@pytest.mark.proves("Never again: a missing program, folder or commit was tried for ever")
@pytest.mark.parametrize(
    ("command", "error"),
    [
        (("nosuchprog",), "cannot start 'nosuchprog'"),
        (("python", "-c", "import nosuchmodule"), "No module named 'nosuchmodule'"),
    ],
)
def test_a_command_that_no_host_can_start_ends_with_its_reason(
    person: Person, hub: HubProcess, here: Path, tmp_path: Path, command: tuple[str, ...], error: str
) -> None:
    del here
    with agent(hub, tmp_path, "here"):
        done = person.says("run", "--", *command)
    assert done.status == ExitCode.FAILED
    last = done.err.splitlines()[-2]
    assert last.startswith("strata: my-project is failed: setup_error: no eligible host could set it up: ")
    assert error in last
    assert len(person.says("show", "my-project", "-o", "json").value["attempts"]) == 1


def test_the_last_error_of_a_job_that_waits_is_shown(person: Person, host: HostByHand, here: Path) -> None:
    del here
    person.says("run", "-d", "--", "python", "train.py")
    host.fails("Traceback (most recent call last):\nValueError: too small")
    told = person.says("why", "my-project")
    assert "last error: ValueError: too small" in told.out
    shown = person.says("status").out
    assert "ValueError: too small" in shown.partition("WAITS")[2]


def test_a_name_that_several_jobs_have_means_the_newest_and_says_so(person: Person, here: Path) -> None:
    first = person.says("run", "-d", "--", "python", "train.py").out.strip()
    (here / "train.py").write_text("print('better')\n")
    second = person.says("run", "-d", "--", "python", "train.py").out.strip()
    shown = person.says("show", "my-project", "-o", "json")
    older, newer = (each.partition("_")[2][:10] for each in (first, second))
    assert (shown.status, shown.value["id"]) == (ExitCode.OK, second)
    assert shown.err == f"strata: 2 jobs are called my-project; this is the newest, {newer}; before it: {older}\n"
    assert person.says("show", older, "-o", "json").value["id"] == first
    refused = person.says("cancel", "my-project")
    assert refused.status == ExitCode.USAGE, "nothing by guess"
    assert f"choose one by its id: {newer}, {older}" in refused.err


def test_the_packages_that_a_folder_lists_are_installed_on_the_host(
    person: Person, hub: HubProcess, here: Path, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "wheels", "greeting", "1.0", "TEXT = 'installed'\n")
    (here / "requirements.txt").write_text("greeting==1.0\n")
    (here / "train.py").write_text("import greeting\nprint(greeting.TEXT)\n")
    index = {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(tmp_path / "wheels")}
    with agent(hub, tmp_path, "here", variables=index):
        first = person.says("run", "--", "python", "train.py")
        assert (first.status, first.out) == (ExitCode.OK, "installed\n")
        assert "sent; packages from requirements.txt)" in first.err
        person.says("run", "--seed", "1", "--", "python", "train.py")
        bare = person.says("run", "--environment", "none", "--", "python", "train.py")
        assert (bare.status, "No module named 'greeting'" in bare.err) == (ExitCode.FAILED, True)
        (here / "requirements.txt").write_text("nosuchpackage\n")
        failed = person.says("run", "--", "python", "train.py")
        assert failed.status == ExitCode.FAILED
        assert "the environment cannot be built: " in failed.err
        assert "nosuchpackage" in person.says("show", "my-project").out
    jobs = [each["id"] for each in person.says("list", "--all", "-o", "json").value if each["status"] == "completed"]
    attempts = [person.says("show", each, "-o", "json").value["attempts"][0] for each in jobs]
    facts = [each["facts"]["environment"] for each in attempts]
    assert [each["packages"] for each in facts] == [["greeting==1.0"]] * 2
    assert sorted(each["cached"] for each in facts) == [False, True]


def test_options_of_run_reach_the_job(person: Person, host: HostByHand, here: Path) -> None:
    (here / "pyproject.toml").write_text("[tool.ruff]\n")
    words = ("--env", "A=1=2", "--timeout", "2h", "--priority", "7", "--name", "mine")
    assert person.says("run", "-d", *words, "--", "python", "train.py").status == ExitCode.OK
    lease = host.completes()
    assert lease.trainer is not None
    assert (lease.trainer.env, lease.trainer.environment) == ({"A": "1=2"}, None)
    assert (lease.spec.timeout_s, lease.spec.priority, lease.spec.name) == (7200.0, 7, "mine")
    assert person.says("run", "-d", "--env", "A=2", "--", "python", "train.py").status == ExitCode.OK
    other = host.completes()
    assert other.job_id != lease.job_id
    assert person.says("run", "-d", "--gpus", "3", "--", "python", "train.py", "--big").status == ExitCode.OK
    assert "min_gpus: needs 3" in person.says("why", "my-project").out
    for wrong in (("--timeout", "soon"), ("--env", "novalue"), ("--env", "HF_TOKEN=x"), ("--environment", "no.txt")):
        assert person.says("run", "-d", *wrong, "--", "python", "train.py").status == ExitCode.USAGE


def test_a_program_submits_a_job_and_waits_for_it(person: Person, hub: HubProcess, here: Path, tmp_path: Path) -> None:
    del person
    with submit(["python", "train.py"], here, RunOptions(environment=NONE)) as job:
        assert job.new
        with pytest.raises(StrataError) as raised:
            job.wait(timeout_s=0.1)
        assert raised.value.code is Code.DEADLINE
        with agent(hub, tmp_path, "here"):
            assert job.wait(60.0).status == "completed"
        assert job.log() == "hello\n"
    with submit(["python", "train.py"], here, RunOptions(environment=NONE, seed=1)) as job:
        assert job.cancel("enough").status == "cancelled"


def test_a_job_gets_a_secret_and_its_log_does_not_show_it(
    person: Person, hub: HubProcess, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "hf_0123456789abcdef"
    program = "import os\nassert len(os.environ['HF_TOKEN']) == 19\nprint('token', os.environ['HF_TOKEN'])\n"
    (here / "train.py").write_text(program + "raise ValueError(os.environ['HF_TOKEN'])\n")
    refused = person.says("run", "-d", "--secret", "HF_TOKEN", "--", "python", "train.py")
    assert (refused.status, "strata secrets set HF_TOKEN" in refused.err) == (ExitCode.FAILED, True)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{value}\n"))
    assert person.says("secrets", "set", "HF_TOKEN").status == ExitCode.OK
    assert person.says("secrets", "list", "-o", "json").value[0]["name"] == "HF_TOKEN"
    with agent(hub, tmp_path, "here") as running:
        job = person.says("run", "-d", "--secret", "HF_TOKEN", "--", "python", "train.py").out.strip()
        hub.until_tried(job)
        stars = "*" * len(value)
        assert f"token {stars}" in hub.log(job)
        shown = person.says("show", job)
        assert f"ValueError: {stars}" in shown.out
        assert value not in running.said() + hub.log(job) + shown.out
    assert person.says("secrets", "rm", "HF_TOKEN").status == ExitCode.OK
    assert person.says("secrets", "rm", "HF_TOKEN").status == ExitCode.NOT_FOUND


def test_a_job_that_starts_later_says_when(person: Person, host: HostByHand, here: Path) -> None:
    del host, here
    done = person.says("run", "-d", "--at", "+2h", "--", "python", "train.py")
    assert "it starts at 20" in done.err
    assert re.search(r"pending, in 1\d\dm", person.says("list").out)
    assert "starts at 20" in person.says("why", "my-project").out
    assert "start time" in person.says("why", "my-project").out
    shown = person.says("show", "my-project", "-o", "json").value
    assert shown["not_before_s"] > shown["created_at_s"] + 7000
    assert "start     20" in person.says("show", "my-project").out
    assert person.says("run", "-d", "--at", "2040-01-01T00:00", "--seed", "1", "--", "true").status == ExitCode.OK
    assert "is no time" in person.says("run", "--at", "soon", "--", "true").err


def test_a_program_submits_a_job_that_starts_later(person: Person, here: Path) -> None:
    del person
    with submit(["true"], here, RunOptions(environment=NONE, start=timedelta(hours=1))) as job:
        row = job.refresh().job
    assert row.not_before_s == pytest.approx(row.created_at_s + 3600)


def test_a_name_with_other_characters_is_refused_with_one_that_would_do(person: Person, here: Path) -> None:
    del here
    done = person.says("run", "-d", "--name", "größe-7", "--", "python", "train.py")
    assert done.status == ExitCode.USAGE
    assert "'größe-7' cannot be the name of a job" in done.err
    assert "ASCII letters, digits, dots, - and _, at most 64 of them, such as gr-e-7" in done.err
    assert person.says("run", "-d", "--name", "n" * 65, "--", "python", "train.py").status == ExitCode.USAGE


def test_an_error_of_a_command_that_is_watched_ends_its_job(
    person: Person, hub: HubProcess, here: Path, tmp_path: Path
) -> None:
    del here
    with agent(hub, tmp_path, "here"):
        done = person.says("run", "--", "python", "-c", "raise SystemExit('boom')")
    assert done.status == ExitCode.FAILED
    assert done.out.count("boom") == 1
    assert len(person.says("show", "my-project", "-o", "json").value["attempts"]) == 1


def test_what_a_job_takes_and_waits_for_can_be_said_on_the_command_line(
    person: Person, hub: HubProcess, here: Path
) -> None:
    del here
    first = person.says("run", "-d", "--name", "first", "--", "python", "train.py").out.strip()
    words = ("--cores", "2", "--share", "0.5", "--gpus", "1", "--label", "rack=b", "--project", "vision")
    job_id = person.says("run", "-d", *words, "--after", "first", "--", "python", "train.py").out.strip()
    spec = hub.operator.call("GET", f"/v1/job/{job_id}", JobReply).job.spec
    assert (spec.needs.min_cores, spec.needs.gpu_share, spec.needs.min_gpus) == (2, 0.5, 1)
    assert (dict(spec.needs.require_labels), spec.project, spec.after) == ({"rack": "b"}, "vision", (first,))
    assert spec.max_attempts == 3, "nobody looks on"
    more = person.says("run", "-d", "--retries", "4", "--seed", "9", "--", "python", "train.py").out.strip()
    assert hub.operator.call("GET", f"/v1/job/{more}", JobReply).job.spec.max_attempts == 5
    assert person.says("run", "--after", "nothing", "--", "python", "train.py").status == ExitCode.NOT_FOUND
