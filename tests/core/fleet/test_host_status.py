"""The status of a host in one word, its policy in words, and what an action on it would do."""

from __future__ import annotations

from typing import Any

import pytest

from strata.fleet.core.host_status import (
    AgentSightings,
    HostFacts,
    host_status,
    plan_action,
    policy_rules,
    quiet_in_words,
)
from strata.fleet.core.jobspec import HostSpec, parse_quiet_hours


@pytest.mark.parametrize(
    ("state", "presence", "quiet", "status"),
    [
        ("active", "online", False, "online"),
        ("active", "online", True, "quiet"),
        ("active", "suspect", True, "suspect"),
        ("active", "offline", False, "offline"),
        ("draining", "online", True, "draining"),
        ("paused", "suspect", False, "paused"),
        ("paused", "offline", False, "offline"),
        ("quarantined", "offline", False, "quarantined"),
        ("left", "offline", False, "left"),
    ],
)
def test_the_word_says_what_keeps_jobs_away(state: Any, presence: Any, quiet: bool, status: str) -> None:
    assert host_status(state, presence, quiet=quiet) == status


def test_a_policy_is_told_in_sentences() -> None:
    assert policy_rules(HostSpec(name="h")) == ("Every job may run here, as far as it fits.",)
    rules = policy_rules(
        HostSpec(name="h", allow_jobs=("llama*",), deny_jobs=("x",), slots=1, cuda=False, ram_gib=32, labels={"a": "b"})
    )
    assert rules == (
        "Only these jobs may run here: llama*.",
        "These jobs may not run here: x.",
        "At most 1 job runs at once.",
        "Jobs may not use its cards.",
        "Jobs have at most 32 GiB of memory.",
        "It has the labels a=b.",
    )
    assert policy_rules(HostSpec(name="h", allow_jobs=())) == ("No job may run here.",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("22:00-07:00", "every day 22:00-07:00"),
        ("mon-fri 09:00-17:30", "Monday to Friday 09:00-17:30"),
        ("sat,sun 00:00-24:00", "Saturday, Sunday 00:00-24:00"),
        ("wed 10:00-11:00", "Wednesday 10:00-11:00"),
    ],
)
def test_quiet_hours_are_told_in_words(text: str, words: str) -> None:
    hours = parse_quiet_hours(text)
    assert hours is not None
    assert quiet_in_words(hours) == words


def facts(**changes: Any) -> HostFacts:
    known: dict[str, Any] = {"name": "h", "state": "active", "presence": "online", "jobs": 0, "servers": 0}
    return HostFacts(**{**known, "stranded": 0, "lease_s": 45.0, **changes})


def test_draining_lets_jobs_end_and_moves_servers() -> None:
    plan = plan_action("drain", facts(jobs=2, servers=1, stranded=3))
    assert plan.possible
    assert (plan.ends_jobs, plan.ends_servers) == (False, True)
    assert plan.effects == (
        "It gets no new jobs until it is resumed.",
        "2 jobs that it has run to the end.",
        "1 training server saves its state and moves to another host.",
        "3 jobs in the queue wait until it is back: no other host can take them.",
    )


def test_pausing_leaves_servers_where_they_are() -> None:
    plan = plan_action("pause", facts(jobs=1, servers=2))
    assert (plan.ends_jobs, plan.ends_servers) == (False, False)
    assert plan.effects[1:] == ("1 job that it has runs to the end.", "2 training servers serve on.")


def test_revoking_says_that_work_is_lost() -> None:
    plan = plan_action("revoke", facts(jobs=1))
    assert plan.ends_jobs
    assert plan.effects[1] == (
        "Its 1 job goes to other hosts when the leases run out, in 45 s at most; what no checkpoint has is lost."
    )


def test_what_is_so_already_or_has_left_cannot_be_done() -> None:
    assert plan_action("drain", facts(state="draining")).effects == ("h is draining already.",)
    assert not plan_action("resume", facts()).possible
    for action in ("drain", "pause", "resume", "revoke"):
        assert not plan_action(action, facts(state="left")).possible


def test_a_host_in_quarantine_can_be_resumed_with_a_warning() -> None:
    plan = plan_action("resume", facts(state="quarantined"))
    assert plan.possible
    assert "quarantined" in plan.effects[1]


@pytest.mark.parametrize(
    ("agents", "cloned"),
    [
        ("aaaa", False),
        ("aabbccdd", False),
        # The heartbeat of an agent that has ended came late.
        ("aababb", False),
        ("ababa", True),
        ("aabbaabba", True),
        ("abcabc", True),
    ],
)
def test_agents_that_take_turns_are_two_and_one_that_was_restarted_is_one(agents: str, cloned: bool) -> None:
    seen = AgentSightings(agents[0])
    for incarnation in agents[1:]:
        seen = seen.see(incarnation)
    assert bool(seen.clone_reason) == cloned
    if agents == "ababa":
        assert seen.clone_reason.startswith("two agents work as this host at once: a and b;")
