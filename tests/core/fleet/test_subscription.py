"""Which events of which jobs a subscription covers, and what its messages say."""

from __future__ import annotations

from strata.cli.fleet.notify import EVENTS
from strata.fleet.core.subscription import (
    KIND_OF,
    MESSAGE_LINES,
    JobNews,
    Subscription,
    compose_host_message,
    compose_message,
)


def test_the_command_offers_every_event() -> None:
    assert set(EVENTS) == set(KIND_OF)


MINE = Subscription(url="ntfy://topic", service="ntfy")


def covers(subscription: Subscription, *, owner: str, project: str) -> bool:
    return subscription.covers_job("alice", owner=owner, project=project)


def test_a_subscription_covers_the_events_that_it_names() -> None:
    some = Subscription(url="ntfy://topic", service="ntfy", events=("failed", "host_lost"))
    assert [kind for kind in (*KIND_OF.values(), "host.left") if some.covers_kind(kind)] == ["job.failed", "host.lost"]


def test_a_subscription_covers_own_jobs_or_those_of_a_project_or_all() -> None:
    of_project = Subscription(url="ntfy://topic", service="ntfy", project="vision")
    of_all = Subscription(url="ntfy://topic", service="ntfy", all_jobs=True)
    assert covers(MINE, owner="alice", project="vision")
    assert not covers(MINE, owner="bob", project="vision")
    assert covers(of_project, owner="bob", project="vision")
    assert not covers(of_project, owner="alice", project="text")
    assert covers(of_all, owner="bob", project="text")


def test_a_message_has_job_host_reason_metrics_and_the_last_lines_of_the_log() -> None:
    log = "".join(f"line {n}\n" for n in range(30)) + "\x1b[31mValueError: no\n\n"
    message = compose_message(
        JobNews(
            kind="job.failed",
            job_id="job1_0123456789abcdef",
            label="tree/small",
            host="desk",
            reason="user_error: attempt 1 of 1 failed",
            metrics={"loss": 0.25, "step": 12.0},
            log_tail=log,
        )
    )
    assert (message.title, message.severity) == ("tree/small failed", "failure")
    assert message.body.splitlines() == [
        "job: tree/small (0123456789)",
        "host: desk",
        "reason: user_error: attempt 1 of 1 failed",
        "metrics: loss 0.25, step 12",
        "",
        "last lines:",
        *(f"line {n}" for n in range(31 - MESSAGE_LINES, 30)),
        "[31mValueError: no",
        "",
        "strata show 0123456789",
    ]


def test_a_job_without_an_attempt_has_a_shorter_message() -> None:
    message = compose_message(JobNews(kind="job.cancelled", job_id="job1_0123456789abcdef", label="m", reason="enough"))
    assert message.body == "job: m (0123456789)\nreason: enough\n\nstrata show 0123456789"


def test_a_message_about_a_host_has_its_name_and_what_to_look_at() -> None:
    message = compose_host_message("host.lost", "desk")
    assert (message.title, message.severity) == ("desk is lost: it was silent for longer than a lease", "warning")
    assert message.body == "host: desk\n\nstrata hosts"
