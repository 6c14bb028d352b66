"""The books of a campaign against a hub, where answers come in another order than what they answer."""

from __future__ import annotations

from soak.fleet_hub.books import Books, Hold
from strata.fleet import wire
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec


def test_a_job_that_ended_before_whoever_queued_it_was_answered_is_known_to_have_ended() -> None:
    books = Books()
    books.holds["j", 1] = Hold("host")
    spec = JobSpec(model="m")
    ended = wire.Job(
        id="j", status=JobStatus.COMPLETED, spec=spec, epoch=1, created_at_s=0, changed_at_s=1, artifact="sha256:a"
    )
    books.completed(("j", 1), "sha256:a", 0.5, ended)
    books.queued("j")
    assert (books.jobs["j"].completed_by, books.jobs["j"].final) == (1, JobStatus.COMPLETED)
    assert books.problems == []
