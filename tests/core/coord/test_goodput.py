"""Goodput: every millisecond of a run is in one part, whatever happens to the job."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import StrataError
from strata.coord.core.goodput import GoodputPhase, parts_at
from strata.coord.core.inputs import Caller, Leave
from strata.coord.core.job_config import JobConfig
from tests.core.coord.jobs import JOB, Job
from tests.core.coord.test_history import WALL_S, know_time, timed

WORKERS = ("w0", "w1", "w2")


def now_ms(job: Job) -> int:
    return round((job.now_s - 1_000.0 + WALL_S) * 1000)


def spent_s(job: Job) -> dict[GoodputPhase, float]:
    parts = parts_at(job.job.history.ledger, now_ms(job))
    return {phase: round(ms / 1000, 1) for phase, ms in parts.items() if ms}


def test_time_before_the_first_generation_is_waiting_and_then_useful() -> None:
    job = timed(JobConfig(min_workers=2))
    job.register("w0")
    job.run(10, beating=("w0",))
    job.join("w1")
    job.run(20, beating=("w0", "w1"))
    assert spent_s(job) == {GoodputPhase.WAITING: 10.0, GoodputPhase.USEFUL: 20.2}


def test_a_checkpoint_takes_from_its_first_part_to_its_commit() -> None:
    job = timed(workers=2)
    job.run(10, beating=WORKERS[:2])
    job.report("w0", 5)
    job.run(3, beating=WORKERS[:2])
    job.report("w1", 5)
    assert spent_s(job)[GoodputPhase.CHECKPOINT] == 3.0


def test_a_recovery_moves_what_was_trained_since_the_checkpoint() -> None:
    job = timed(workers=2)
    job.run(10, beating=WORKERS[:2])
    job.checkpoint(5)
    job.run(30, beating=WORKERS[:2])
    job.recover("w0")
    assert spent_s(job)[GoodputPhase.ROLLED_BACK] == 30.0
    job.run(4, beating=WORKERS[:2])
    # Only one of the two has recovered.
    assert spent_s(job)[GoodputPhase.RESTART] == 4.0
    job.recover("w1", observed=1)
    job.run(6, beating=WORKERS[:2])
    found = spent_s(job)
    assert (found[GoodputPhase.USEFUL], found[GoodputPhase.RESTART]) == (16.0, 4.0)


def test_a_finished_job_counts_no_more_time() -> None:
    job = timed(workers=1)
    job.register_dataset("w0")
    job.read("w0")
    job.run(5, beating=("w0",))
    job.submit(Leave(job.caller("w0"), finished=True))
    before = spent_s(job)
    job.run(100)
    assert spent_s(job) == before


Step = st.tuples(
    st.sampled_from(("run", "join", "leave", "lose", "report", "recover", "restart", "back")),
    st.sampled_from(WORKERS),
    st.integers(0, 40_000),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(Step, max_size=30))
def test_the_parts_add_up_to_the_time_that_has_passed(steps: list[tuple[str, str, int]]) -> None:
    job = timed()
    began_ms = None
    for step, (kind, worker_id, ms) in enumerate(steps, 1):
        # What the coordinator refuses changes nothing.
        with suppress(StrataError, AssertionError, KeyError):
            _do(job, kind, worker_id, ms, step)
        ledger = job.job.history.ledger
        parts = parts_at(ledger, ledger.now_ms)
        assert all(part >= 0 for part in parts.values()), parts
        assert sum(parts.values()) == ledger.now_ms - ledger.began_ms
        if ledger.began_ms and began_ms is None:
            began_ms = ledger.began_ms
        assert ledger.began_ms in (0, began_ms)
        costs = sum(event.cost.total_ms for event in job.job.history.events)
        lost = sum(parts[phase] for phase in (GoodputPhase.DETECT, GoodputPhase.RESTART, GoodputPhase.ROLLED_BACK))
        assert costs <= lost, "no event costs what the job has not lost"


def _do(job: Job, kind: str, worker_id: str, ms: int, step: int) -> None:
    match kind:
        case "run":
            job.now_s += ms / 1000
            for name in list(job.job.members):
                job.beat(name)
            job.tick()
        case "lose":
            job.now_s += ms / 1000
            job.beat(worker_id, failed=True)
        case "join":
            job.register(worker_id, f"incarnation-{step}")
            job.settle()
        case "leave":
            job.submit(Leave(Caller(JOB, worker_id)))
        case "report":
            job.report(worker_id, step // 4)
        case "recover":
            job.recover(worker_id)
        case "restart":
            job.restart()
            know_time(job)
        case _:
            # The clock of another leader is behind.
            job.restart()
            job.state.wall_offset_s = WALL_S - 1_000.0 - ms / 1000
