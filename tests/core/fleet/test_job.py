from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import HELD, NEXT, TERMINAL, Event, Status, advance, diagram, may, sources, target

statuses = st.sampled_from(Status)
events = st.sampled_from(Event)


@given(st.lists(events, max_size=30))
def test_only_a_requeue_leaves_a_terminal_status(history: list[Event]) -> None:
    status = Status.PENDING
    for event in history:
        if not may(status, event):
            continue
        if status in TERMINAL:
            assert event is Event.REQUEUE
        status = advance(status, event)


@given(statuses, events)
def test_what_the_table_does_not_have_is_refused_with_what_would_be_needed(status: Status, event: Event) -> None:
    if may(status, event):
        assert advance(status, event) is NEXT[status, event]
        return
    with pytest.raises(StrataError) as refused:
        advance(status, event)
    assert refused.value.code is Code.PRECONDITION
    assert all(each in str(refused.value) for each in sources(event))


def test_every_status_can_be_reached_and_left_and_every_event_is_used() -> None:
    assert set(NEXT.values()) == set(Status)
    assert {status for status, _ in NEXT} == set(Status)
    assert {event for _, event in NEXT} == set(Event)


@pytest.mark.parametrize("event", Event)
def test_an_event_leads_to_one_status_whatever_the_status_before(event: Event) -> None:
    assert {NEXT[status, event] for status in sources(event)} == {target(event)}


def test_a_host_can_end_a_job_only_while_it_holds_it() -> None:
    for event in (Event.COMPLETE, Event.RETRY, Event.EXPIRE):
        assert set(sources(event)) == HELD
    # A pending one fails when no host is left that could set it up.
    assert set(sources(Event.FAIL)) == {*HELD, Status.PENDING}


def test_a_job_that_a_host_holds_cannot_be_requeued_and_one_that_has_not_ended_can_be_cancelled() -> None:
    assert set(sources(Event.REQUEUE)) == set(Status) - HELD
    assert set(sources(Event.CANCEL)) == set(Status) - TERMINAL


def test_the_diagram_has_every_transition_of_the_table() -> None:
    edges = {}
    for line in diagram().splitlines()[1:]:
        start, _, rest = line.strip().partition(" --> ")
        end, _, names = rest.partition(": ")
        edges.update({(start, name): end for name in names.split(", ") if name})
    assert edges == {(str(status), str(event)): str(after) for (status, event), after in NEXT.items()}
