"""Two projects with a trainer of one name on one hub: a real agent runs each job with the code it was queued with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shell.cli_fleet.driving import Person
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually

CODE = """
import os
print("I am project {0}")
open(os.path.join(os.environ["STRATA_OUTPUT"], "who"), "w").write("{0}")
"""


def write_project(folder: Path, letter: str, project: str) -> str:
    folder.mkdir()
    (folder / "train.py").write_text(CODE.format(letter))
    named = f'project = "{project}"\n' if project else ""
    manifest = folder / "manifest.toml"
    manifest.write_text(
        f'{named}[trainers.default]\ncommand = ["python", "train.py"]\ndirectory = "."\n'
        f'[[jobs]]\nmodel = "proj{letter}"\n'
    )
    return str(manifest)


@pytest.mark.proves(
    "Never again: the last `apply` of any manifest decided which code ran the queued jobs of all projects"
)
@pytest.mark.parametrize(("first", "second"), [("", ""), ("a", "b")])
def test_a_queued_job_runs_the_code_it_was_queued_with_whatever_is_applied_after_it(
    person: Person, hub: HubProcess, tmp_path: Path, first: str, second: str
) -> None:
    with agent(hub, tmp_path, "desk") as desk:
        eventually(lambda: "host_registered" in desk.said())
        assert person.says("pause", "desk").status == 0
        one = write_project(tmp_path / "A", "A", first)
        two = write_project(tmp_path / "B", "B", second)
        assert person.says("apply", one, "--no-describe").out == "+1 new  ~1 trainer\n"
        applied = person.says("apply", two, "--yes", "--no-describe")
        orphaned = "" if second else "  \N{MINUS SIGN}1 orphaned, kept"
        assert applied.out == f"+1 new  ~1 trainer{orphaned}\n"
        assert person.says("resume", "desk").status == 0
        for letter, project in (("A", first), ("B", second)):
            assert person.says("wait", f"proj{letter}-default").status == 0
            assert f"I am project {letter}" in person.says("logs", f"proj{letter}-default").out
            got = tmp_path / f"got{letter}"
            assert person.says("artifacts", "get", f"proj{letter}-default", str(got)).status == 0
            assert (got / "who").read_text() == letter
            shown = person.says("show", f"proj{letter}-default", "-o", "json").value
            assert shown["project"] == (project or "default")
            assert [each["trainer_digest"] for each in shown["attempts"]] == [shown["trainer_digest"]]
            assert ("project" in person.says("show", f"proj{letter}-default").out) == bool(project)
        table = person.says("list").out
        assert ("PROJECT" in table) == bool(first)
        desk.end()


def test_a_changed_trainer_is_taken_by_queued_jobs_as_the_plan_says(
    person: Person, hub: HubProcess, tmp_path: Path
) -> None:
    manifest = write_project(tmp_path / "A", "A", "")
    person.says("apply", manifest, "--no-describe")
    (tmp_path / "A" / "train.py").write_text(CODE.format("better"))
    planned = person.says("apply", manifest, "--no-describe", "--dry-run")
    assert planned.out.splitlines()[0] == "~1 trainer (1 queued job takes it)"
    assert person.says("apply", manifest, "--no-describe", "--yes").out == "~1 trainer (1 queued job takes it)\n"
    with agent(hub, tmp_path, "desk") as desk:
        assert person.says("wait", "projA-default").status == 0
        assert "I am project better" in person.says("logs", "projA-default").out
        (tmp_path / "A" / "train.py").write_text(CODE.format("best"))
        kept = person.says("apply", manifest, "--no-describe", "--yes").out
        assert kept == "~1 trainer  =1 unchanged  =1 of an earlier trainer, kept\n"
        again = person.says("apply", manifest, "--no-describe", "--yes", "--retrain").out
        assert again == "~1 requeued\n"
        assert person.says("wait", "projA-default").status == 0
        assert "I am project best" in person.says("logs", "projA-default").out
        desk.end()


def test_the_names_of_the_folder_and_of_the_file_are_no_part_of_a_job(
    person: Person, hub: HubProcess, tmp_path: Path
) -> None:
    del hub
    here, there = (write_project(tmp_path / name, "A", "") for name in ("here", "there"))
    ids = [
        person.says("apply", each, "--no-describe", "--dry-run", "-o", "json").value["jobs"] for each in (here, there)
    ]
    assert ids[0] == ids[1]
