"""The campaigns of `make soak` against real agents, short; and that their judge would notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from soak.fleet_agent import expected_state, kill, outcome, zombie
from soak.fleet_agent.fleet import Plan
from soak.trials import CampaignRequest, CampaignResult
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.records import JobAttempt
from strata.fleet.wire.events import FeedEvent
from strata.fleet.wire.jobs import Job
from tests.support.busy import BUSY

PLAN = Plan(steps=8, lines=3, every=4, tail=50)
SEED = 7


def ask(folder: Path, *, times: int, first: int = 0) -> CampaignRequest:
    return CampaignRequest(
        first=first, times=times, workers=3, database="sqlite", url=f"sqlite:{folder}/hub.db", folder=folder
    )


def show(result: CampaignResult) -> None:
    print(f"\n{result.figures}")


@pytest.mark.proves(
    "No job is lost, none completes twice, no line of a log is missing or doubled when agents, their "
    "children and the hub are killed"
)
@pytest.mark.timeout(180)
async def test_nothing_is_lost_when_agents_children_and_the_hub_are_killed(tmp_path: Path) -> None:
    result = await kill.run(ask(tmp_path, times=6), show)
    assert result.problems == []
    assert result.times >= 6
    assert 0 < result.worst_s <= outcome.LIMIT_S * BUSY


@pytest.mark.proves(
    "A host that was frozen past its lease is refused whatever it says of the job, and ends its child; "
    "one that was not away for so long keeps its job"
)
@pytest.mark.timeout(180)
async def test_a_host_that_was_thought_dead_changes_nothing_and_one_that_was_not_away_long_keeps_its_job(
    tmp_path: Path,
) -> None:
    assert zombie.SCENARIOS[3:5] == ("failpoint", "short")
    result = await zombie.run(ask(tmp_path, times=2, first=3), show)
    assert result.problems == []
    assert result.times == 2
    assert result.worst_s <= zombie.LIMIT_S * BUSY


def event(kind: str, epoch: int, **body: str) -> FeedEvent:
    return FeedEvent(cursor="", at_s=0.0, actor="", kind=kind, subject="", body={"epoch": epoch, **body})


def undisturbed() -> expected_state.JobEvidence:
    """A job whose first attempt was lost behind step 4, as an honest fleet leaves it."""
    states = PLAN.states(SEED)
    metrics = [
        {"type": "metrics", "step": step, "values": {"state": float(states[step + 1])}} for step in range(4, PLAN.steps)
    ]
    spec = JobSpec(model="counting", seed=SEED)
    job = Job(id=spec.id, status=JobStatus.COMPLETED, spec=spec, epoch=2, created_at_s=0, changed_at_s=0, artifact="a")
    first = JobAttempt(epoch=1, host_id="anna", claimed_at_s=0, outcome="lost", cause=Cause.HOST_LOST)
    second = JobAttempt(epoch=2, host_id="bert", claimed_at_s=0, outcome="completed")
    return expected_state.JobEvidence(
        job=job,
        attempts=(first, second),
        events=(
            event("job.claimed", 1),
            event("job.checkpointed", 1, artifact="c"),
            event("job.expired", 1),
            event("job.claimed", 2),
            event("job.completed", 2),
        ),
        logs={1: PLAN.log(0).encode()[:100], 2: PLAN.log(4).encode()},
        metrics=b"".join(msgspec.json.encode(each) + b"\n" for each in metrics),
        files=PLAN.files(SEED),
        checkpoints={"c": 4},
        said={1: PLAN.log(0).encode()[:200], 2: PLAN.log(4).encode()},
        starts={1: 1, 2: 1},
    )


ALLOWED: expected_state.AllowedCauses = {(undisturbed().job.id, 1): {Cause.HOST_LOST}}


def test_the_judge_accepts_what_an_honest_fleet_leaves() -> None:
    assert expected_state.find_problems(undisturbed(), PLAN, ALLOWED) == []


def lost(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    return msgspec.structs.replace(seen, job=msgspec.structs.replace(seen.job, status=JobStatus.FAILED))


def completed_twice(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    return msgspec.structs.replace(seen, events=(*seen.events, event("job.completed", 2)))


def run_twice(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    return msgspec.structs.replace(seen, starts={1: 1, 2: 2})


def tail_lost(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    return msgspec.structs.replace(seen, logs=seen.logs | {2: seen.logs[2][:-1]})


def line_twice(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    return msgspec.structs.replace(seen, logs=seen.logs | {2: seen.logs[2] + b"end 49\n"})


def log_of_a_successor(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    return msgspec.structs.replace(seen, logs=seen.logs | {1: seen.logs[2]})


def begun_anew(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    whole = PLAN.log(0).encode()
    return msgspec.structs.replace(seen, logs=seen.logs | {2: whole}, said=seen.said | {2: whole})


def metrics_lost(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    return msgspec.structs.replace(seen, metrics=b"".join(seen.metrics.splitlines(keepends=True)[:-1]))


def other_result(seen: expected_state.JobEvidence) -> expected_state.JobEvidence:
    return msgspec.structs.replace(seen, files=PLAN.files(SEED + 1))


@pytest.mark.parametrize(
    "spoil",
    [
        lost,
        completed_twice,
        run_twice,
        tail_lost,
        line_twice,
        log_of_a_successor,
        begun_anew,
        metrics_lost,
        other_result,
    ],
)
def test_the_judge_notices(spoil: Callable[[expected_state.JobEvidence], expected_state.JobEvidence]) -> None:
    assert expected_state.find_problems(spoil(undisturbed()), PLAN, ALLOWED)


def test_the_judge_wants_somebody_to_blame_for_an_attempt_that_ended() -> None:
    assert expected_state.find_problems(undisturbed(), PLAN, {})
    assert expected_state.find_problems(undisturbed(), PLAN, {(undisturbed().job.id, 1): {Cause.OOM}})
