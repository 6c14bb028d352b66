"""The expected of a campaign against a hub, where answers come in another order than what they answer."""

from __future__ import annotations

from soak.fleet_hub.expected_state import ExpectedState, HeldAttempt
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.jobs import Job


def test_a_job_that_ended_before_whoever_queued_it_was_answered_is_known_to_have_ended() -> None:
    expected = ExpectedState()
    expected.holds["j", 1] = HeldAttempt("host")
    spec = JobSpec(model="m")
    ended = Job(
        id="j", status=JobStatus.COMPLETED, spec=spec, epoch=1, created_at_s=0, changed_at_s=1, artifact="sha256:a"
    )
    expected.completed(("j", 1), "sha256:a", 0.5, ended)
    expected.queued("j")
    assert (expected.jobs["j"].completed_by, expected.jobs["j"].final) == (1, JobStatus.COMPLETED)
    assert expected.problems == []
