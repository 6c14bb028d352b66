"""`strata apply`: the folder goes along, mistakes are found before anything is queued, the plan is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from strata.cli.exit_codes import ExitCode
from strata.fleet.wire.manifests import TrainersReply
from strata.sdk.bundle import MAX_BYTES
from tests.shell.cli_fleet.driving import Person
from tests.shell.fleet_agent.running import HubProcess


def test_a_relative_folder_is_sent_and_the_schema_with_it(person: Person, hub: HubProcess, manifest: Path) -> None:
    done = person.says("apply", str(manifest))
    assert (done.status, done.out) == (0, "+2 new  ~1 trainer\n")
    assert "sent the source of trainer default (1 file, " in done.err
    trainer = hub.operator.call("GET", "/v1/trainers", TrainersReply).trainers["default"]
    assert trainer.params["properties"].keys() == {"learning_rate", "depth"}
    assert trainer.spec.directory == ""
    assert hub.operator.fetch(f"/v1/source/{trainer.spec.bundle}").content


def test_applying_again_changes_nothing_and_sends_nothing(person: Person, manifest: Path) -> None:
    person.says("apply", str(manifest))
    done = person.says("apply", str(manifest))
    assert (done.status, done.out) == (0, "=2 unchanged\n")
    assert "sent" not in done.err


def test_a_dry_run_shows_the_jobs_and_queues_none(person: Person, manifest: Path) -> None:
    done = person.says("apply", "--dry-run", str(manifest))
    lines = done.out.splitlines()
    assert lines[0] == "+2 new  ~1 trainer"
    assert [line.split()[0::2] for line in lines[1:]] == [["+", "tree-small"], ["+", "tree-large"]]
    assert person.says("list", "-o", "json").value == []


def test_a_misspelt_parameter_is_found_at_its_line_before_anything_is_sent(person: Person, manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace("{ depth = 3 }", "{ dept = 3 }"))
    done = person.says("apply", str(manifest))
    assert done.status == ExitCode.USAGE
    assert f"{manifest}:9: jobs[0].hyper.dept" in done.err
    assert 'did you mean "depth"?' in done.err
    assert "sent" not in done.err


CALLS = "from strata.fleet.trainer import handle_describe\nhandle_describe({})\n"


def test_a_trainer_that_cannot_describe_itself_is_applied_with_a_word_about_it(person: Person, manifest: Path) -> None:
    (manifest.parent / "code" / "train.py").write_text("import nothing_of_this_name\n" + CALLS)
    done = person.says("apply", str(manifest))
    assert done.status == ExitCode.OK
    assert "trainer default: its parameters are not checked now" in done.err
    assert "No module named 'nothing_of_this_name'" in done.err


NOSY = """\
import pathlib
pathlib.Path("started.txt").write_text("here")
pathlib.Path({outside!r}).write_text("here")
"""


def nosy(manifest: Path, *more: str) -> Path:
    """A trainer that ignores its arguments, and a file that is there once it was started."""
    outside = manifest.parent / "it-ran"
    text = NOSY.format(outside=str(outside)) + "".join(f"{line}\n" for line in more)
    (manifest.parent / "code" / "train.py").write_text(text)
    return outside


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# knows --describe",
        "from strata.fleet.trainer import hyper",
        "from strata.fleet.trainer import handle_describe",
    ],
)
def test_a_trainer_that_does_not_call_handle_describe_is_not_started(person: Person, manifest: Path, line: str) -> None:
    ran = nosy(manifest, line)
    done = person.says("apply", str(manifest))
    assert (done.status, ran.exists(), "asking trainer" in done.err) == (0, False, False)


@pytest.mark.parametrize(
    "call",
    [
        *("report(loss=1)", "hyper()", "output_folder()", "assigned()", "resume_from()", "progress(0.5)"),
        *("new_checkpoint('a').__enter__()", "coord.join()", "coord.join_async()"),
        *("coord.Worker(None)", "coord.AsyncWorker(coord.WorkerSettings(job='a'), None)"),
    ],
)
def test_a_trainer_never_trains_under_describe(tmp_path: Path, call: str) -> None:
    ran = tmp_path / "it-ran"
    program = "import pathlib\nfrom strata.fleet.trainer import *\n"
    if call.startswith("coord."):
        program = "import pathlib\nimport strata.coord.worker as coord\n"
    program += f"{call}\npathlib.Path({str(ran)!r}).touch()\n"
    done = subprocess.run(
        [sys.executable, "-c", program, "--describe"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert "was called under --describe: call strata.fleet.trainer.handle_describe" in done.stderr


def test_a_torchrun_joins_no_job_under_describe(tmp_path: Path) -> None:
    program = "from strata.coord.torchrun import backend; backend()(None)"
    done = subprocess.run(
        [sys.executable, "-c", program, "train.py", "--describe"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "torchrun was started under --describe, and would join the job before its program can answer" in done.stderr


def test_a_trainer_that_trains_before_it_describes_itself_is_ended(person: Person, manifest: Path) -> None:
    ran = manifest.parent / "it-ran"
    (manifest.parent / "code" / "train.py").write_text(
        "import pathlib\nimport strata.fleet.trainer as trainer\ntrainer.hyper()\n"
        f"pathlib.Path({str(ran)!r}).touch()\ntrainer.handle_describe({{}})\n"
    )
    done = person.says("apply", str(manifest))
    assert (done.status, ran.exists()) == (0, False)
    assert "asking trainer default for its parameters: python train.py --describe" in done.err
    assert "--describe failed: hyper() was called under --describe" in done.err


@pytest.mark.proves("Never again: attached commands and Ctrl-C were silent; a dry run started the user's program")
def test_a_dry_run_starts_no_program_and_says_what_it_does_not_check(person: Person, manifest: Path) -> None:
    ran = nosy(manifest, CALLS)
    for words in ((), ("--describe",)):
        done = person.says("apply", "--dry-run", *words, str(manifest))
        assert (done.status, ran.exists()) == (0, False)
        assert "a dry run starts no program" in done.err


def test_a_trainer_is_described_in_a_copy_of_its_folder_with_a_line_about_it(person: Person, manifest: Path) -> None:
    ran = nosy(manifest, "from strata.fleet.trainer import handle_describe as tell", "tell({})")
    done = person.says("apply", str(manifest))
    assert (done.status, ran.exists()) == (0, True)
    assert "asking trainer default for its parameters: python train.py --describe" in done.err
    assert not (manifest.parent / "code" / "started.txt").exists()


def test_describe_can_be_asked_for_and_forbidden(person: Person, manifest: Path) -> None:
    ran = nosy(manifest)
    person.says("apply", "--describe", str(manifest))
    assert ran.exists()
    ran = nosy(manifest, CALLS)
    ran.unlink()
    person.says("apply", "--no-describe", str(manifest))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[[jobs]]", "[jobs]", "jobs: expected an array of tables ([[jobs]]), found a table"),
        ('model = "tree"', 'model = "tree"\ntrainer = "other"', 'there is no trainer "other"'),
        ("hyper = ", "hyperr = ", 'did you mean "hyper"?'),
        ('model = "tree"', 'model = "tree"\nafter = ["nothing"]', 'there is no job "nothing"'),
        ('model = "tree"', 'model = "tree"\nname = "g"\nworkers = 2\nmin_workers = 3', "min_workers"),
    ],
)
def test_what_is_wrong_in_the_file_is_found_before_a_program_is_started(
    person: Person, manifest: Path, before: str, after: str, message: str
) -> None:
    ran = nosy(manifest, CALLS)
    one_job = manifest.read_text().rpartition("[[jobs]]")[0]
    manifest.write_text(one_job.replace(before, after, 1))
    done = person.says("apply", str(manifest))
    assert (done.status, ran.exists()) == (ExitCode.USAGE, False)
    assert message in done.err
    assert "asking trainer" not in done.err


def test_a_folder_that_cannot_be_sent_is_found_before_the_program_of_another_is_started(
    person: Person, manifest: Path
) -> None:
    ran = nosy(manifest, CALLS)
    manifest.write_text(
        manifest.read_text().replace(
            "[[jobs]]", '[trainers.second]\ncommand = ["python", "train.py"]\ndirectory = "huge"\n\n[[jobs]]', 1
        )
    )
    (manifest.parent / "huge").mkdir()
    with (manifest.parent / "huge" / "weights.bin").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    done = person.says("apply", str(manifest))
    assert (done.status, ran.exists(), "asking trainer" in done.err) == (ExitCode.USAGE, False, False)
    assert "the largest is weights.bin" in done.err


def test_a_folder_that_is_not_there_is_a_mistake_of_the_manifest(person: Person, manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace('"code"', '"elsewhere"'))
    done = person.says("apply", str(manifest))
    assert done.status == ExitCode.USAGE
    assert "trainers.default.directory: there is no folder" in done.err


def test_an_inline_table_keeps_its_line_too(person: Person, manifest: Path) -> None:
    text = manifest.read_text().replace(
        '[trainers.default]\ncommand = ["python", "train.py"]\ndirectory = "code"\n',
        'trainers.default = { command = ["python", "train.py"], directory = "code" }\n\n\n',
    )
    manifest.write_text(text)
    assert person.says("apply", str(manifest)).out == "+2 new  ~1 trainer\n"


def test_a_hub_without_a_manifest_of_its_own_says_so_at_reload(person: Person) -> None:
    done = person.says("reload")
    assert done.status == ExitCode.FAILED
    assert "this hub has no manifest of its own" in done.err


def test_waiting_for_a_manifest_ends_when_no_host_may_take_what_is_left(person: Person, manifest: Path) -> None:
    done = person.says("apply", "--wait", str(manifest))
    assert done.status == ExitCode.UNSCHEDULABLE
    assert "2 pending; no host can run the remaining jobs" in done.err


def test_a_parameter_that_only_the_hub_knows_to_be_wrong_is_found_at_its_line_too(
    person: Person, manifest: Path
) -> None:
    person.says("apply", str(manifest))
    manifest.write_text(manifest.read_text().replace("{ depth = 3 }", "{ dept = 3 }"))
    for words in (("--no-describe",), ("--dry-run",)):
        done = person.says("apply", *words, str(manifest))
        assert done.status == ExitCode.USAGE
        assert f"{manifest}:9: jobs[0].hyper.dept" in done.err


def test_schedules_are_listed_paused_resumed_and_removed(person: Person, manifest: Path) -> None:
    manifest.write_text(
        manifest.read_text() + '[[schedules]]\nname = "nightly"\ncron = "0 3 * * *"\nmodel = "tree"\nmode = "night"\n'
    )
    assert "nightly is due next at 20" in person.says("apply", str(manifest)).err
    (row,) = person.says("schedules", "-o", "json").value
    assert (row["schedule"], row["cron"], row["timezone"], row["owner"]) == ("nightly", "0 3 * * *", "UTC", "operator")
    assert "0 3 * * *" in person.says("schedules", "list").out
    assert person.says("schedules", "pause", "nightly").status == ExitCode.OK
    assert "paused" in person.says("schedules").out
    assert "due next at 20" in person.says("schedules", "resume", "default/nightly").err
    assert "did you mean" in person.says("schedules", "remove", "nightli").err
    assert person.says("schedules", "remove", "nightly").status == ExitCode.OK
    assert person.says("schedules", "-o", "json").value == []


SEARCH = """
[[sweeps]]
name = "tune"
model = "tree"
[sweeps.search]
trials = 4
parallel = 2
objective = { loss = "minimize" }
space = { depth = { integer = [1, 9] } }
"""


def test_a_sweep_is_listed_stopped_and_resumed_and_belongs_to_its_file(person: Person, manifest: Path) -> None:
    manifest.write_text(manifest.read_text() + SEARCH)
    assert "the hub queues the 4 trials of tune" in person.says("apply", str(manifest)).err
    (row,) = person.says("sweeps", "-o", "json").value
    assert (row["sweep"], row["planned"], row["method"], row["file"]) == ("tune", 4, "tpe", str(manifest.resolve()))
    assert " of 4" in person.says("sweeps", "list").out
    other = manifest.with_name("other.toml")
    other.write_text(manifest.read_text())
    refused = person.says("apply", str(other))
    assert refused.status == ExitCode.FAILED
    assert f"{other.resolve()}: the sweep tune belongs to {manifest.resolve()}" in refused.err
    assert "strata apply --take-over" in refused.err
    # The hub may have queued its first trials meanwhile.
    assert re.search(r"tune is stopped at [0-2] of 4", person.says("sweeps", "stop", "tune").err)
    assert "stopped" in person.says("sweeps").out
    assert "'strata sweeps resume tune' goes on with it" in person.says("apply", str(manifest)).err
    assert "goes on at " in person.says("sweeps", "resume", "default/tune").err
    assert "did you mean" in person.says("sweeps", "stop", "tuna").err
    assert person.says("apply", "--take-over", str(other)).status == ExitCode.OK


def test_points_of_a_stopped_sweep_are_not_waited_for(person: Person, manifest: Path) -> None:
    grid = '[[sweeps]]\nname = "rates"\nmodel = "tree"\nmode = "swept"\ngrid = {{ depth = [{}] }}\n'
    text = manifest.read_text()
    manifest.write_text(text + grid.format("1, 2"))
    assert person.says("apply", str(manifest)).status == ExitCode.OK
    assert person.says("sweeps", "stop", "rates").status == ExitCode.OK
    manifest.write_text(text + grid.format("1, 2, 3"))
    done = person.says("apply", "--wait", "--yes", str(manifest))
    assert done.status == ExitCode.UNSCHEDULABLE, "the jobs beside it wait for a host"
    assert "2 pending; no host can run the remaining jobs" in done.err
