"""Where the time of a job went: its parts add up to its time, and a kill costs what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.fleet.core.goodput import PARTS, AttemptTimes, JobGoodput, JobTimes, LedgerEvent, goodput, share

LEASE_S = 45.0


@dataclass
class Life:
    """Plays the life of a job as a hub and its hosts would, and keeps what they would: attempts and events.

    `open_s` is the oracle: how long the job was neither ended nor not yet there.
    """

    now_s: float = 1000.0
    attempts: list[AttemptTimes] = field(default_factory=list)
    events: list[LedgerEvent] = field(default_factory=list)
    open_s: float = 0.0
    held: bool = False
    ended: bool = False

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if not self.ended:
            self.open_s += seconds

    def tell(self, kind: str, seen_at_s: float | None = None) -> None:
        epoch = self.attempts[-1].epoch if self.attempts else 0
        self.events.append(LedgerEvent(self.now_s, kind, epoch, seen_at_s))

    def change(self, **fields: object) -> None:
        self.attempts[-1] = replace(self.attempts[-1], **fields)  # type: ignore[arg-type]

    def claim(self) -> None:
        if self.ended or self.held:
            return
        if self.attempts and self.attempts[-1].ended_at_s is None:
            self.change(ended_at_s=self.now_s, outcome="lost", cause="host_lost")
        number = len(self.attempts) + 1
        self.attempts.append(AttemptTimes(number=number, epoch=number, host_id="h", claimed_at_s=self.now_s))
        self.held = True

    def start(self) -> None:
        if self.held and self.attempts[-1].started_at_s is None:
            self.change(started_at_s=self.now_s)

    def checkpoint(self) -> None:
        if self.held and self.attempts[-1].started_at_s is not None:
            self.tell("job.checkpointed")

    def expire(self, silent_s: float) -> None:
        if self.held:
            seen_at_s = self.now_s
            self.wait(silent_s)
            self.tell("job.expired", seen_at_s)
            self.held = False

    def revive(self) -> None:
        if not self.held and not self.ended and self.attempts and self.attempts[-1].ended_at_s is None:
            self.tell("job.revived")
            self.held = True

    def end(self, outcome: str, ran_s: float | None) -> None:
        if not self.held:
            return
        self.held = False
        self.ended = outcome != "retried"
        self.change(ended_at_s=self.now_s, outcome=outcome, ran_s=ran_s, cause="" if outcome == "completed" else "oom")
        self.tell(f"job.{outcome}")

    def cancel(self) -> None:
        if self.ended:
            return
        if self.attempts and self.attempts[-1].ended_at_s is None:
            self.change(ended_at_s=self.now_s, outcome="cancelled", cause="cancelled")
        self.tell("job.cancelled")
        self.held, self.ended = False, True

    def requeue(self) -> None:
        if self.ended:
            self.tell("job.requeued")
            self.ended = False

    def times(self) -> JobTimes:
        ends = [each.at_s for each in self.events if each.kind in ("job.completed", "job.failed", "job.cancelled")]
        until_s = max(ends) if self.ended else self.now_s
        return JobTimes(
            created_at_s=1000.0, until_s=until_s, ended=self.ended, attempts=self.attempts, events=self.events
        )


SPANS = st.floats(0, 10_000).map(lambda seconds: round(seconds, 3))
STEPS = st.one_of(
    st.tuples(st.just("wait"), SPANS),
    st.tuples(st.just("expire"), SPANS),
    st.tuples(st.just("end"), st.sampled_from(["completed", "failed", "retried"]), st.one_of(st.none(), SPANS)),
    st.tuples(st.sampled_from(["claim", "start", "checkpoint", "revive", "cancel", "requeue"])),
)


@given(st.lists(STEPS, max_size=40), st.floats(0, 1e5), st.booleans())
def test_the_parts_add_up_to_the_time_of_the_job(
    steps: list[tuple[object, ...]], checkpoint_s: float, server: bool
) -> None:
    life = Life()
    for name, *values in steps:
        getattr(life, str(name))(*values)
    attempts = [replace(each, checkpoint_s=checkpoint_s) for each in life.attempts]
    found = goodput(replace(life.times(), attempts=attempts, server=server))
    seconds = found.seconds()
    assert set(seconds) == set(PARTS)
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(life.open_s, abs=1e-3)
    check_whole(found)
    assert all(min(each.detect_s, each.restart_s, each.rolled_back_s) >= 0 for each in found.interruptions)
    cost_s = sum(each.cost_s for each in found.interruptions)
    assert cost_s <= seconds["detect"] + seconds["restart"] + seconds["rolled_back"] + 1e-3
    assert sum(found.seconds(2000.0, 3000.0).values()) <= 1000.0 + 1e-6


@given(st.lists(STEPS, max_size=40))
def test_without_events_it_is_less_exact_and_still_no_part_is_negative(steps: list[tuple[object, ...]]) -> None:
    life = Life()
    for name, *values in steps:
        getattr(life, str(name))(*values)
    found = goodput(replace(life.times(), events=()))
    assert min(found.seconds().values()) >= 0
    check_whole(found)


def check_whole(found: JobGoodput) -> None:
    """Segments follow each other, and none overlaps another."""
    for before, after in zip(found.segments, found.segments[1:], strict=False):
        assert before.from_s < before.to_s <= after.from_s < after.to_s


def test_a_kill_costs_the_work_since_the_checkpoint_the_detection_and_the_restart() -> None:
    life = Life()
    life.wait(30)
    life.claim()
    life.wait(10)
    life.start()
    life.wait(600)
    life.checkpoint()
    life.wait(120)
    life.expire(LEASE_S)
    life.wait(5)
    life.claim()
    life.wait(20)
    life.start()
    life.wait(300)
    life.end("completed", 290.0)
    found = goodput(life.times())
    seconds = found.seconds()
    assert seconds == {
        "waiting": 40.0,
        "useful": 600.0 + 290.0,
        "checkpoint": 10.0,
        "detect": LEASE_S,
        "restart": 25.0,
        "rolled_back": 120.0,
    }
    (kill,) = found.interruptions
    assert (kill.attempt, kill.cause, kill.cost_s) == (1, "host_lost", LEASE_S + 25.0 + 120.0)
    assert kill.resumed_at_s == 1000.0 + 30 + 10 + 600 + 120 + LEASE_S + 25
    assert share(seconds) == pytest.approx(890.0 / 1090.0)
    assert [(each.phase, each.attempt) for each in found.segments] == [
        ("queued", 0), ("prepare", 1), ("run", 1), ("run", 1), ("silent", 1), ("queued", 0), ("prepare", 2),
        ("run", 2), ("upload", 2),
    ]  # fmt: skip


def test_a_lease_that_was_revived_cost_nothing() -> None:
    life = Life()
    life.claim()
    life.start()
    life.wait(100)
    life.expire(LEASE_S)
    life.revive()
    life.wait(100)
    life.end("completed", None)
    assert goodput(life.times()).seconds()["useful"] == 200 + LEASE_S


def test_the_time_between_an_end_and_a_requeue_is_nobodys() -> None:
    life = Life()
    life.claim()
    life.start()
    life.wait(10)
    life.end("failed", None)
    life.wait(86_400)
    life.requeue()
    life.wait(7)
    found = goodput(life.times())
    assert found.seconds() == dict.fromkeys(PARTS, 0.0) | {"rolled_back": 10.0, "waiting": 7.0}
    assert found.segments[1].from_s - found.segments[0].to_s == 86_400


def test_checkpoints_that_a_trainer_reports_are_not_useful_time_and_a_server_loses_no_work() -> None:
    attempt = AttemptTimes(
        number=1, epoch=1, host_id="h", claimed_at_s=0.0, started_at_s=0.0, ended_at_s=100.0, outcome="completed",
        checkpoint_s=20.0,
    )  # fmt: skip
    job = JobTimes(created_at_s=0.0, until_s=100.0, ended=True, attempts=[attempt])
    assert goodput(job).seconds()["checkpoint"] == 20.0
    killed = replace(attempt, outcome="cancelled", checkpoint_s=0.0)
    assert goodput(replace(job, attempts=[killed])).seconds()["rolled_back"] == 100.0
    assert goodput(replace(job, attempts=[killed], server=True)).seconds()["useful"] == 100.0
