from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import HELD, NEXT, TERMINAL, JobEvent, JobStatus, advance, diagram, may, sources, target

statuses = st.sampled_from(JobStatus)
events = st.sampled_from(JobEvent)


@given(st.lists(events, max_size=30))
def test_only_a_requeue_leaves_a_terminal_status(history: list[JobEvent]) -> None:
    status = JobStatus.PENDING
    for event in history:
        if not may(status, event):
            continue
        if status in TERMINAL:
            assert event is JobEvent.REQUEUE
        status = advance(status, event)


@given(statuses, events)
def test_what_the_table_does_not_have_is_refused_with_what_would_be_needed(status: JobStatus, event: JobEvent) -> None:
    if may(status, event):
        assert advance(status, event) is NEXT[status, event]
        return
    with pytest.raises(StrataError) as refused:
        advance(status, event)
    assert refused.value.code is Code.PRECONDITION
    assert all(each in str(refused.value) for each in sources(event))


def test_every_status_can_be_reached_and_left_and_every_event_is_used() -> None:
    assert set(NEXT.values()) == set(JobStatus)
    assert {status for status, _ in NEXT} == set(JobStatus)
    assert {event for _, event in NEXT} == set(JobEvent)


@pytest.mark.parametrize("event", JobEvent)
def test_an_event_leads_to_one_status_whatever_the_status_before(event: JobEvent) -> None:
    assert {NEXT[status, event] for status in sources(event)} == {target(event)}


def test_a_host_can_end_a_job_only_while_it_holds_it() -> None:
    for event in (JobEvent.COMPLETE, JobEvent.RETRY, JobEvent.EXPIRE):
        assert set(sources(event)) == HELD
    # A pending one fails when no host is left that could set it up.
    assert set(sources(JobEvent.FAIL)) == {*HELD, JobStatus.PENDING}


def test_a_job_that_a_host_holds_cannot_be_requeued_and_one_that_has_not_ended_can_be_cancelled() -> None:
    assert set(sources(JobEvent.REQUEUE)) == set(JobStatus) - HELD
    assert set(sources(JobEvent.CANCEL)) == set(JobStatus) - TERMINAL


def test_the_diagram_has_every_transition_of_the_table() -> None:
    edges = {}
    for line in diagram().splitlines()[1:]:
        start, _, rest = line.strip().partition(" --> ")
        end, _, names = rest.partition(": ")
        edges.update({(start, name): end for name in names.split(", ") if name})
    assert edges == {(str(status), str(event)): str(after) for (status, event), after in NEXT.items()}
