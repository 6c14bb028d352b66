"""`strata mirror`: TensorBoard's and W&B's own readers find what the trainers of jobs reported, each point once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from strata.cli.exit_codes import ExitCode
from strata.fleet.core.job import Cause
from strata.fleet.wire.leases import CompleteRequest
from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.support.tracked import scalars, wandb_history, wandb_records

MANIFEST = """\
[trainers.default]
command = ["python", "train.py"]
directory = "code"

[[jobs]]
model = "tree"
mode = "small"
max_attempts = 3
hyper = { depth = 3 }
"""


def lines(attempt: int, steps: range) -> bytes:
    """The loss at a step of an attempt tells both."""
    each = [
        {"type": "metrics", "at_s": 1000.0 * attempt + step, "step": step, "values": {"loss": attempt + step / 100}}
        for step in steps
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in each)


def expected(attempt: int, steps: range) -> list[tuple[int, Any]]:
    return [(step, pytest.approx(attempt + step / 100)) for step in steps]


class MirroredJob:
    """A job that reports, and a mirror that copies it when it is told to."""

    def __init__(self, person: Person, host: HostByHand, folder: Path) -> None:
        self.person, self.host, self.folder = person, host, folder
        self.lease = host.claim()
        self._sent = 0

    def report(self, content: bytes, *, last: bool = False) -> None:
        self.host.hub.append(self.lease, "metrics", self._sent, content, last=last)
        self._sent += len(content)

    def resume(self) -> None:
        """The attempt ends, and another one begins."""
        self.host.hub.fail(self.lease, Cause.PREEMPTED, "", {})
        self.lease, self._sent = self.host.claim(), 0

    def mirror(self, *words: str) -> None:
        done = self.person.says("mirror", "--once", "--folder", str(self.folder / "records"), *words)
        assert done.status == ExitCode.OK, done.err

    def to_tensorboard(self) -> None:
        self.mirror("--to", f"tensorboard:{self.folder / 'runs'}")

    def scalars(self, tag: str = "loss") -> list[tuple[int, float]]:
        return scalars(self.folder / "runs", tag)

    def to_wandb(self) -> None:
        self.mirror("--to", "wandb:trees", "--offline")


@pytest.fixture
def job(person: Person, host: HostByHand, manifest: Path, tmp_path: Path) -> MirroredJob:
    manifest.write_text(MANIFEST)
    assert person.says("apply", str(manifest)).status == ExitCode.OK
    return MirroredJob(person, host, tmp_path)


def test_tensorboard_reads_what_was_reported_as_it_comes(job: MirroredJob) -> None:
    job.report(lines(1, range(5)))
    job.to_tensorboard()
    assert job.scalars() == expected(1, range(5))
    job.report(lines(1, range(5, 8)) + b'{"type":"metrics","at_s":9,')
    job.to_tensorboard()
    job.to_tensorboard()
    assert job.scalars() == expected(1, range(8))


def test_a_resumed_attempt_takes_the_place_of_what_was_rolled_back(job: MirroredJob) -> None:
    job.report(lines(1, range(10)), last=True)
    job.to_tensorboard()
    job.resume()
    job.report(lines(2, range(6, 12)), last=True)
    job.to_tensorboard()
    assert job.scalars() == expected(1, range(6)) + expected(2, range(6, 12))


def test_a_mirror_that_was_killed_before_it_recorded_doubles_nothing(job: MirroredJob) -> None:
    job.report(lines(1, range(4)))
    job.to_tensorboard()
    shutil.copytree(job.folder / "records", job.folder / "before")
    job.report(lines(1, range(4, 9)))
    job.to_tensorboard()
    shutil.rmtree(job.folder / "records")
    (job.folder / "before").rename(job.folder / "records")
    job.report(lines(1, range(9, 11)))
    job.to_tensorboard()
    assert job.scalars() == expected(1, range(11))


def test_without_its_records_a_mirror_copies_everything_again_and_once(job: MirroredJob) -> None:
    job.report(lines(1, range(4)))
    job.to_tensorboard()
    shutil.rmtree(job.folder / "records")
    job.to_tensorboard()
    assert job.scalars() == expected(1, range(4))


def test_a_job_that_ended_is_read_no_more_unless_it_is_queued_again(job: MirroredJob) -> None:
    job.report(lines(1, range(3)), last=True)
    job.host.hub.complete(job.lease, CompleteRequest(epoch=job.lease.epoch))
    job.to_tensorboard()
    (record,) = (job.folder / "records").glob("job1_*.json")
    assert json.loads(record.read_bytes())["cursor"]["ended"] is True
    assert job.person.says("requeue", "tree-small").status == ExitCode.OK
    job.lease, job._sent = job.host.claim(), 0
    job.report(lines(2, range(5)))
    job.to_tensorboard()
    assert job.scalars() == expected(2, range(5))


def test_wandb_reads_every_point_once_with_the_trainers_step(job: MirroredJob) -> None:
    job.report(lines(1, range(4)))
    job.to_wandb()
    # As if the mirror had been killed before it recorded anything.
    (job.folder / "records" / f"{job.lease.job_id}.json").unlink()
    job.report(lines(1, range(4, 6)), last=True)
    job.resume()
    job.report(lines(2, range(5, 7)), last=True)
    job.to_wandb()
    rows = wandb_history(job.folder / "records")
    assert [row["_step"] for row in rows] == list(range(8))
    assert [(row["step"], row["loss"]) for row in rows] == expected(1, range(6)) + expected(2, range(5, 7))
    first = next(record["run"] for record in wandb_records(job.folder / "records") if record["type"] == "run")
    assert (first["project"], first["display_name"]) == ("trees", "tree-small")
    config = first["config"]["update"]
    assert (config["depth"], config["model"]) == (3, "tree")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no tracker is chosen"),
        (("--to", "tensorbord:x"), 'did you mean "tensorboard"?'),
        (("--to", "wandb:"), "wandb needs a project"),
        (("--to", "tensorboard:"), "tensorboard needs a folder"),
    ],
)
def test_a_setting_that_names_no_tracker_is_refused_with_a_hint(
    person: Person, words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = person.says("mirror", "--once", "--folder", str(tmp_path / "records"), *words)
    assert done.status == ExitCode.USAGE
    assert said in done.err
    assert "hint:" in done.err
