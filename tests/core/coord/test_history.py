"""The history of a job: events with their time and their cost, made from facts, so that a restart keeps them."""

from __future__ import annotations

from collections import Counter

from strata.coord.core.facts import WORKERS_NAMED, CommandKind
from strata.coord.core.history import (
    EVENTS_KEPT,
    LEAST_KEPT,
    SLOW_BARRIER_S,
    HistoryEvent,
    HistoryKind,
    events_kept,
    find_events,
    open_cost,
)
from strata.coord.core.inputs import Caller, IssueCommand, Leave, ResetJob
from strata.coord.core.job_config import JobConfig
from strata.coord.core.machine import CoordMachine
from strata.coord.core.state import CoordState
from tests.core.coord.jobs import JOB, Job

WALL_S = 1_700_000_000.0


def timed(config: JobConfig | None = None, *, workers: int = 0) -> Job:
    """A job whose facts carry their time."""
    job = Job(config)
    know_time(job)
    if workers:
        job.join(*(f"w{number}" for number in range(workers)))
    return job


def know_time(job: Job) -> None:
    job.state.wall_offset_s = WALL_S - 1_000.0


def events(job: Job, *kinds: HistoryKind) -> list[HistoryEvent]:
    return [event for event in job.job.history.events if not kinds or event.kind in kinds]


def replayed(facts: list[bytes]) -> CoordState:
    machine = CoordMachine()
    state = machine.initial()
    for fact in facts:
        state = machine.apply(state, fact)
    return state


def test_joins_together_are_one_event_with_the_time_of_the_first() -> None:
    job = timed(workers=3)
    (joined,) = events(job, HistoryKind.WORKER_JOINED)
    assert (joined.workers, joined.worker_count, joined.at_ms) == (("w0", "w1", "w2"), 3, round(WALL_S * 1000))
    (formed,) = events(job, HistoryKind.GENERATION_FORMED)
    assert formed.message == "generation 1 formed with 3 members"
    assert formed.at_ms == round((WALL_S + 0.2) * 1000)


def test_an_event_of_many_workers_names_some_and_counts_all() -> None:
    job = timed(workers=WORKERS_NAMED + 8)
    (joined,) = events(job, HistoryKind.WORKER_JOINED)
    assert (len(joined.workers), joined.worker_count) == (WORKERS_NAMED, WORKERS_NAMED + 8)


def test_a_replay_of_the_facts_and_a_snapshot_give_the_same_history() -> None:
    job = timed(workers=2)
    job.checkpoint(7)
    job.submit(IssueCommand(JOB, CommandKind.CHECKPOINT_NOW, (), "before the night"))
    job.run(35, beating=("w0",))
    before = job.job.history
    assert {HistoryKind.WORKER_LOST, HistoryKind.CHECKPOINT_COMMITTED, HistoryKind.COMMAND_ISSUED} <= {
        event.kind for event in before.events
    }
    assert replayed(job.journal).jobs[JOB].history == before
    job.restart()
    assert job.job.history == before


def test_a_takeover_is_an_event_once() -> None:
    job = timed(workers=1)
    assert not events(job, HistoryKind.FAILOVER)
    job.restart()
    know_time(job)
    for _ in range(3):
        job.tick(after_s=0.1)
    (failover,) = events(job, HistoryKind.FAILOVER)
    assert failover.message == "a coordinator took over as leader 2"


def test_a_loss_has_its_cause_and_what_it_cost() -> None:
    job = timed(workers=2)
    job.run(30, beating=("w0", "w1"))
    job.checkpoint(100)
    job.run(20, beating=("w0", "w1"))
    job.run(31, beating=("w0",))
    (lost,) = events(job, HistoryKind.WORKER_LOST)
    assert (lost.workers, lost.message) == (("w1",), "silent for 30 s")
    assert 29_000 <= lost.cost.detect_ms <= 31_000
    job.settle()
    job.recover("w0")
    (lost,) = events(job, HistoryKind.WORKER_LOST)
    # The 20 s since the checkpoint, and what was trained after the loss before the recovery.
    assert 19_000 <= lost.cost.rolled_back_ms <= 22_000
    assert 0 < lost.cost.restart_ms <= 2_000


def test_a_loss_costs_more_while_nobody_goes_on() -> None:
    job = timed(workers=2)
    job.run(10, beating=("w0", "w1"))
    job.recover("w0")
    now_ms = round((job.now_s - 1_000.0 + WALL_S) * 1000)
    assert open_cost(job.job.history, now_ms + 7_000).restart_ms == 7_000
    job.recover("w1", observed=1)
    assert open_cost(job.job.history, now_ms + 7_000).total_ms == 0


def test_a_worker_that_left_is_no_loss() -> None:
    job = timed(workers=2)
    job.submit(Leave(job.caller("w1"), "left: done"))
    assert not events(job, HistoryKind.WORKER_LOST)
    (left,) = events(job, HistoryKind.WORKER_LEFT)
    assert (left.workers, left.message) == (("w1",), "left: done")


def test_a_slow_barrier_names_the_last_to_arrive_and_a_quick_one_is_no_event() -> None:
    job = timed(workers=2)
    job.arrive("w0", "quick")
    job.arrive("w1", "quick")
    job.arrive("w0", "slow")
    job.run(SLOW_BARRIER_S + 1, beating=("w0", "w1"))
    job.arrive("w1", "slow")
    (slow,) = events(job, HistoryKind.BARRIER_SLOW)
    assert slow.workers == ("w1",)
    assert slow.message.startswith("barrier slow was open for 11.0 s")


def test_facts_without_a_time_make_no_events() -> None:
    job = Job(workers=2)
    job.checkpoint(1)
    assert job.job.history.events == []
    assert job.job.history.ledger.spent_ms == {}


def test_a_reset_keeps_the_events_of_the_run_before() -> None:
    job = timed(workers=1)
    job.submit(Leave(Caller(JOB, "w0")))
    job.submit(ResetJob(JOB))
    kinds = [event.kind for event in events(job)]
    assert kinds[-1] is HistoryKind.JOB_RESET
    assert HistoryKind.WORKER_JOINED in kinds
    assert job.job.history.ledger.began_ms == events(job)[-1].at_ms


def test_the_history_has_a_limit_that_shrinks_with_the_number_of_jobs() -> None:
    assert events_kept(1) == EVENTS_KEPT
    assert events_kept(100) == 500
    assert events_kept(1_000_000) == LEAST_KEPT
    job = timed(workers=1)
    for number in range(EVENTS_KEPT + 50):
        job.submit(IssueCommand(JOB, CommandKind.RELOAD, (), f"reason {number}"))
    assert len(events(job)) == EVENTS_KEPT
    assert events(job)[-1].message.endswith(f"reason {EVENTS_KEPT + 49}")
    history = job.job.history
    assert all(history.position(event.number) == at for at, event in enumerate(history.events))


def test_events_are_found_by_kind_and_text_page_by_page() -> None:
    job = timed(workers=3)
    for number in range(5):
        job.submit(IssueCommand(JOB, CommandKind.RELOAD, ("w1",), f"Reason {number}"))
    history = job.job.history
    first, before = find_events(history, frozenset({HistoryKind.COMMAND_ISSUED}), "reason", 0, 2)
    assert [event.message[-1] for event in first] == ["4", "3"]
    rest, end = find_events(history, frozenset({HistoryKind.COMMAND_ISSUED}), "reason", before, 100)
    assert ([event.message[-1] for event in rest], end) == (["2", "1", "0"], 0)
    by_worker, _ = find_events(history, frozenset(), "W2", 0, 100)
    assert Counter(event.kind for event in by_worker) == {HistoryKind.WORKER_JOINED: 1}
    assert find_events(history, frozenset(), "no such thing", 0, 100) == ([], 0)
