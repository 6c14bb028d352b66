"""`strata data`: a folder goes to the hub by content, and to the job as a folder of its host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.cli.exit_codes import ExitCode
from tests.shell.cli_fleet.driving import Person
from tests.shell.fleet_agent.running import HubProcess, agent

PROGRAM = """\
import os, pathlib
folder = pathlib.Path(os.environ["STRATA_DATA_WORDS"])
print(sorted(path.name for path in folder.rglob("*")), (folder / "a.txt").read_text())
"""


@pytest.fixture
def words(tmp_path: Path) -> Path:
    folder = tmp_path / "words"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "deep" / "b.bin").write_bytes(bytes(3 << 20))
    return folder


def test_data_is_sent_once_by_content_and_a_name_stands_for_the_newest(
    person: Person, words: Path, tmp_path: Path
) -> None:
    first = person.says("data", "push", str(words))
    assert (first.status, "words is" in first.err, "3.0 MiB sent" in first.err) == (ExitCode.OK, True, True)
    (words / "a.txt").write_text("second")
    second = person.says("data", "push", str(words), "words")
    assert "6 B sent" in second.err
    assert second.out != first.out
    assert person.says("data", "pull", "words", str(tmp_path / "there")).status == ExitCode.OK
    assert (tmp_path / "there" / "a.txt").read_text() == "second"
    assert person.says("data", "pull", "words", str(tmp_path / "there")).status != ExitCode.OK
    (words / "a.txt").write_text("first")
    assert person.says("data", "push", str(words)).out == first.out
    assert [each["id"] for each in person.says("data", "ls", "words", "-o", "json").value] == [
        first.out.strip(),
        second.out.strip(),
        first.out.strip(),
    ]
    assert {each["owner"] for each in person.says("data", "ls", "-o", "json").value} == {"operator"}
    assert person.says("data", "pull", "nothing").status == ExitCode.NOT_FOUND
    assert person.says("data", "push", str(words), "no name").status == ExitCode.USAGE


def test_jobs_read_it_as_a_folder_that_the_host_fetched_once(
    person: Person, hub: HubProcess, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "project"
    here.mkdir()
    (here / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(here)
    missing = person.says("run", "-d", "--data", "words", "--", "python", "train.py")
    assert (missing.status, "strata data push" in missing.err) == (ExitCode.NOT_FOUND, True)
    artifact = person.says("data", "push", str(words)).out.strip()
    manifest = here / "manifest.toml"
    trainer = '[trainers.default]\ncommand = ["python", "train.py"]\ndirectory = "."\nenv = { PYTHONUTF8 = "1" }\n'
    data = '[trainers.default.data]\nwords = "strata:words"\n[[jobs]]\nmodel = "m"\nretrain_on = ["data"]\n'
    manifest.write_text(trainer + data)
    with agent(hub, tmp_path, "here") as running:
        done = person.says("run", "--data", "words", "--", "python", "train.py")
        assert (done.status, done.out) == (ExitCode.OK, "['a.txt', 'b.bin', 'deep'] first\n")
        assert f"words is {artifact.partition('_')[2][:10]} of operator" in done.err
        assert person.says("apply", str(manifest), "--wait").status == ExitCode.OK
        (words / "a.txt").write_text("second")
        newer = person.says("data", "push", str(words)).out.strip()
        assert "+1 new" in person.says("apply", str(manifest), "--wait").out, "other data is another job"
        assert "second" in person.says("logs", "m-default").out
        assert {each.name for each in (running.work / "data").iterdir() if each.is_dir()} == {artifact, newer}
    facts = [
        attempt["facts"]["data"]["words"]
        for job in person.says("list", "--all", "-o", "json").value
        for attempt in person.says("show", job["id"], "-o", "json").value["attempts"]
    ]
    assert sorted((each["artifact"] == artifact, each["cached"]) for each in facts) == [
        (False, False),
        (True, False),
        (True, True),
    ], json.dumps(facts)
