"""The judge of the campaign `mixed-kill` notices what is lost or doubled."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from soak.fleet_agent.expected_state import JobEvidence
from soak.mixed.expected_state import GangPlan, find_gang_problems, find_sweep_problems, plain_study
from soak.mixed.programs.trial import loss
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.records import JobAttempt
from strata.fleet.wire.jobs import Job

PLAN = GangPlan(epochs=2, samples=4)
LEDGER = ["1 0 0 0 2", "1 1 0 2 4", "2 1 0 2 4", "2 0 1 0 4"]
MODELS = ({"0": [0, 1], "1": [0, 1, 2, 3]}, {"0": [2, 3]})


def evidence(spec: JobSpec, files: dict[str, bytes], **facts: object) -> JobEvidence:
    job = Job(id=spec.id, status=JobStatus.COMPLETED, spec=spec, epoch=1, created_at_s=0, changed_at_s=0)
    attempt = JobAttempt(epoch=1, host_id="anna", claimed_at_s=0, outcome="completed", facts=facts)
    return JobEvidence(
        job=job,
        attempts=(attempt,),
        events=(),
        logs={},
        metrics=b"",
        files=files,
        checkpoints={},
        said={},
        starts={},
    )


def test_a_gang_that_read_a_sample_twice_and_kept_it_once_is_accepted() -> None:
    assert find_gang_problems(1, MODELS, PLAN, LEDGER) == []


@pytest.mark.parametrize(
    "models",
    [
        ({"0": [0, 1], "1": [0, 1, 2]}, {"0": [2, 3]}),
        ({"0": [0, 1, 2], "1": [0, 1, 2, 3]}, {"0": [2, 3]}),
        ({"0": [0, 1], "1": [0, 1, 2, 3]},),
        ({"0": [0, 1, 2, 3]}, {}),
    ],
)
def test_a_sample_that_a_gang_lacks_or_has_twice_is_noticed(models: tuple[dict[str, list[int]], ...]) -> None:
    assert find_gang_problems(1, models, PLAN, LEDGER)


def test_a_sample_that_no_worker_read_is_noticed() -> None:
    assert find_gang_problems(1, MODELS, PLAN, LEDGER[:-1])


def trial(name: str, point: dict[str, float]) -> JobEvidence:
    spec = JobSpec(model="trial", name=name, hyper=dict(point))
    return evidence(spec, {"result.json": json.dumps(loss(point)).encode()}, metrics={"loss": loss(point)})


@pytest.fixture
def trials() -> list[JobEvidence]:
    return [trial(f"tune/{number}", point) for number, point in enumerate(plain_study(7, 3))]


def test_the_trials_of_a_plain_study_are_accepted(trials: list[JobEvidence]) -> None:
    assert find_sweep_problems("tune", 7, 3, trials) == []


def number_twice(trials: list[JobEvidence]) -> list[JobEvidence]:
    return [*trials, trials[0]]


def number_lost(trials: list[JobEvidence]) -> list[JobEvidence]:
    return trials[:-1]


def other_point(trials: list[JobEvidence]) -> list[JobEvidence]:
    return [*trials[:-1], trial("tune/2", {"x": 0.0, "y": 0.0})]


def other_result(trials: list[JobEvidence]) -> list[JobEvidence]:
    return [*trials[:-1], msgspec.structs.replace(trials[-1], files={})]


@pytest.mark.parametrize("spoil", [number_twice, number_lost, other_point, other_result])
def test_a_sweep_that_differs_from_a_plain_study_is_noticed(
    trials: list[JobEvidence], spoil: Callable[[list[JobEvidence]], list[JobEvidence]]
) -> None:
    assert find_sweep_problems("tune", 7, 3, spoil(trials))
