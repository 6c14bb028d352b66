"""Figures of many jobs side by side: in an order people expect, with what makes the points of a sweep differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cli.exit_codes import ExitCode
from strata.fleet.wire.leases import CompleteRequest
from tests.shell.cli_fleet.driving import HostByHand, Person

SWEEP = """\
[trainers.default]
command = ["python", "train.py"]
directory = "code"

[[sweeps]]
name = "search"
model = "tree"
mode = "small"
hyper = { depth = 3 }

[sweeps.grid]
learning_rate = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1]
"""


@pytest.fixture
def searched(person: Person, host: HostByHand, manifest: Path) -> Person:
    manifest.write_text(SWEEP)
    assert person.says("apply", str(manifest)).status == ExitCode.OK
    rates = {row["id"]: row["hyper"]["learning_rate"] for row in person.says("list", "-o", "json").value}
    for _ in rates:
        lease = host.claim()
        line = f'{{"type":"metrics","at_s":1.5,"values":{{"auc":{1 - rates[lease.job_id] / 3}}}}}\n'
        host.hub.append(lease, "metrics", 0, line.encode(), last=True)
        host.hub.complete(lease, CompleteRequest(epoch=lease.epoch))
    return person


def test_the_points_of_a_sweep_are_compared_with_the_parameter_they_differ_in(searched: Person) -> None:
    lines = searched.says("metrics", "--sweep", "search", "--sort", "auc").out.splitlines()
    assert lines[0].split() == ["ID", "JOB", "LEARNING_RATE", "AUC"]
    assert [line.split()[2] for line in lines[1:4]] == ["0.1", "0.2", "0.3"]
    assert max(map(len, lines)) <= 80


def test_the_best_comes_first_whichever_way_is_better(person: Person, host: HostByHand, manifest: Path) -> None:
    manifest.write_text(SWEEP.replace(", 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1", ""))
    person.says("apply", str(manifest))
    for _ in range(3):
        lease = host.claim()
        line = f'{{"type":"metrics","at_s":1.5,"values":{{"val_loss":{lease.spec.hyper["learning_rate"]}}}}}\n'
        host.hub.append(lease, "metrics", 0, line.encode(), last=True)
        host.hub.complete(lease, CompleteRequest(epoch=lease.epoch))

    def order(*words: str) -> list[str]:
        return [line.split()[2] for line in person.says("metrics", "--sort", "val_loss", *words).out.splitlines()[1:]]

    assert order() == order("--lowest") == ["0.1", "0.2", "0.3"]
    assert order("--highest") == ["0.3", "0.2", "0.1"]


def test_without_an_order_the_tenth_point_comes_after_the_ninth(searched: Person) -> None:
    names = [line.split()[1] for line in searched.says("metrics").out.splitlines()[1:]]
    assert names == [f"search/{number}" for number in range(11)]


def test_applying_again_and_waiting_says_nothing_of_what_was_completed(searched: Person, manifest: Path) -> None:
    done = searched.says("apply", str(manifest), "--wait")
    assert (done.status, done.out) == (ExitCode.OK, "=11 unchanged\n")
    assert done.err == "strata: asking trainer default for its parameters: python train.py --describe\n"
