"""What heartbeats say of steps is judged only where that is fair, and what follows is durable."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from strata.coord.core.facts import CommandKind, Fact, StragglerFinding, WorkerJudged
from strata.coord.core.inputs import Attached, Heartbeat, Tick
from strata.coord.core.job_config import EscalationLevel, JobConfig
from strata.coord.core.state import StepProgress
from tests.core.coord.jobs import Job

BEAT_S = 5.0


class Steps:
    """Workers that make a step between two beats and say so; `slow` ones take their time, `hung` ones make none."""

    def __init__(self, workers: int = 6, config: JobConfig | None = None) -> None:
        self.job = Job(config, workers=workers)
        self.job.register_dataset(samples=10_000, buckets=256)
        self.step = dict.fromkeys(self.job.job.members, 0)
        self.times_s = dict.fromkeys(self.step, 1.0)
        self.hung: set[str] = set()
        self.busy: set[str] = set()
        self.silent: set[str] = set()
        self.mute: set[str] = set()
        """They send no heartbeats at all."""

    def run(self, beats: int, *, generation: int | None = None) -> list[WorkerJudged]:
        found: list[Fact] = []
        for _ in range(beats):
            for worker_id in self.step:
                if worker_id not in self.hung | self.busy:
                    self.step[worker_id] += 1
                if worker_id not in self.job.job.members or worker_id in self.mute:
                    continue
                progress = StepProgress(
                    self.step[worker_id],
                    self.times_s[worker_id],
                    worker_id in self.busy,
                    self.job.job.generation if generation is None else generation,
                )
                self.job.beat(worker_id, progress=None if worker_id in self.silent else progress)
            found += self.job.run(BEAT_S)
        return [fact for fact in found if isinstance(fact, WorkerJudged)]


def rungs(facts: Iterable[WorkerJudged]) -> list[EscalationLevel]:
    return [fact.level for fact in facts]


def test_a_slow_worker_owns_fewer_buckets_at_once_and_after_a_restart() -> None:
    steps = Steps()
    steps.job.next("w1")
    before = len(steps.job.indexes.placements[256].by_worker["w1"])
    steps.times_s["w1"] = 4.0
    (fact,) = steps.run(18)
    assert (fact.worker_id, fact.finding, fact.level) == ("w1", StragglerFinding.SLOW, EscalationLevel.REWEIGHT)
    assert fact.weight == pytest.approx(1 / 4)
    for _ in range(2):
        steps.job.next("w1", held=None)
        assert len(steps.job.indexes.placements[256].by_worker["w1"]) == pytest.approx(before / 4, rel=0.3)
        steps.job.restart()


def test_workers_that_say_nothing_of_steps_are_never_judged() -> None:
    steps = Steps()
    steps.silent = set(steps.step)
    steps.times_s["w1"] = 100.0
    steps.hung = {"w2"}
    assert steps.run(100) == []
    assert steps.job.soft.stragglers.samples == {}


def test_the_next_incarnation_of_a_worker_begins_below() -> None:
    steps = Steps()
    steps.times_s["w1"] = 4.0
    steps.run(18)
    assert steps.job.job.members["w1"].share < 1.0
    steps.job.register("w1", "incarnation-2")
    steps.job.settle()
    member = steps.job.job.members["w1"]
    assert (member.share, member.level) == (1.0, EscalationLevel.NONE)
    steps.times_s["w1"] = 1.0
    assert steps.run(40) == []


def test_the_first_steps_of_a_generation_are_not_judged() -> None:
    steps = Steps()
    steps.times_s["w1"] = 4.0
    steps.run(8)
    steps.job.join("w9")
    steps.step["w9"], steps.times_s["w9"] = 0, 1.0
    assert steps.run(8) == []
    assert rungs(steps.run(12)) == [EscalationLevel.REWEIGHT]


def test_what_is_said_of_another_generation_does_not_count() -> None:
    steps = Steps()
    steps.times_s["w1"] = 4.0
    assert steps.run(40, generation=7) == []
    assert rungs(steps.run(18, generation=0)) == [EscalationLevel.REWEIGHT], "0 is the current one"


def test_a_worker_that_sends_nothing_and_lives_is_judged_by_its_steps() -> None:
    steps = Steps()
    steps.run(10)
    steps.job.submit(Attached(steps.job.caller("w1")))
    steps.hung = steps.mute = {"w1"}
    assert steps.run(11) == [], "55 s"
    facts = steps.run(8)
    assert {(fact.worker_id, fact.finding) for fact in facts} == {("w1", StragglerFinding.HUNG)}
    assert "while its process lives" in facts[0].reason


def test_a_worker_that_was_busy_when_it_last_reported_does_not_hang_while_it_sends_nothing() -> None:
    steps = Steps()
    steps.run(10)
    steps.busy = {"w1"}
    steps.run(1)
    steps.job.submit(Attached(steps.job.caller("w1")))
    steps.mute = {"w1"}
    assert steps.run(40) == [], "200 s"


def test_ranks_that_wait_for_a_busy_one_do_not_hang() -> None:
    steps = Steps(workers=2)
    steps.run(10)
    steps.busy, steps.hung = {"w0"}, {"w1"}
    assert steps.run(60) == [], "300 s"
    assert steps.job.job.members.keys() == {"w0", "w1"}


def test_ranks_that_waited_for_a_busy_one_do_not_hang_when_its_phase_ends() -> None:
    steps = Steps(workers=2)
    steps.run(10)
    for _ in range(2):
        steps.busy, steps.hung = {"w0"}, {"w1"}
        assert steps.run(60) == [], "300 s"
        steps.busy = set()
        assert steps.run(1) == [], "it goes on, and the one that waited reports first after that"
        steps.hung = set()
        assert steps.run(10) == []


def test_a_worker_hangs_while_another_one_is_busy_and_the_rest_goes_on() -> None:
    steps = Steps(workers=4)
    steps.run(10)
    steps.busy, steps.hung = {"w0"}, {"w1"}
    assert {(fact.worker_id, fact.finding) for fact in steps.run(20)} == {("w1", StragglerFinding.HUNG)}


def test_who_waits_at_a_barrier_does_not_hang() -> None:
    steps = Steps()
    steps.run(12)
    waiting = {"w0", "w1"}
    for worker_id in waiting:
        steps.job.arrive(worker_id, timeout_s=10_000.0)
    steps.hung = waiting
    assert steps.run(60) == []


def test_who_does_not_come_to_a_barrier_and_makes_no_steps_hangs() -> None:
    steps = Steps()
    steps.run(12)
    steps.hung = set(steps.step)
    for worker_id in steps.hung - {"w3"}:
        steps.job.arrive(worker_id, timeout_s=10_000.0)
    found = steps.run(30)
    assert {fact.worker_id for fact in found} == {"w3"}
    assert rungs(found) == [EscalationLevel.REBALANCE, EscalationLevel.STOP]


def test_who_found_no_data_does_not_hang() -> None:
    steps = Steps()
    steps.run(12)
    epoch = steps.job.job.datasets["corpus"]
    while not steps.job.next("w5", held=None).end_of_epoch:
        pass
    assert epoch.finished == [0]
    steps.hung = {"w0", "w1"}
    for worker_id in steps.hung:
        assert steps.job.next(worker_id).end_of_epoch
    assert steps.run(60) == []


@pytest.mark.parametrize("busy", [True, False])
def test_who_says_it_does_something_else_does_not_hang(busy: bool) -> None:
    steps = Steps()
    steps.run(12)
    steps.hung = {"w2"}
    if busy:
        steps.busy = {"w2"}
    assert bool(steps.run(60)) is not busy


def test_the_time_in_which_the_coordinator_was_not_looking_is_nobodys_fault() -> None:
    steps = Steps()
    steps.run(12)
    steps.job.now_s += 600.0
    assert steps.run(6) == []


def test_most_of_a_job_is_never_stopped() -> None:
    steps = Steps()
    steps.run(12)
    steps.hung = {"w0", "w1", "w2", "w3"}
    found = steps.run(100)
    assert {fact.worker_id for fact in found} == steps.hung
    assert set(rungs(found)) == {EscalationLevel.REBALANCE}
    assert "it, like 3 more, is at step" in found[0].reason
    assert steps.job.job.stopping == {}


def test_many_findings_of_one_moment_are_one_command() -> None:
    steps = Steps(8)
    steps.run(12)
    steps.hung = {"w0", "w1"}
    steps.run(13)
    (command,) = steps.job.job.commands.values()
    assert (command.kind, list(command.waiting)) == (CommandKind.REBALANCE, ["w0", "w1"])
    assert command.reason.endswith("(and 1 more)")


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        (EscalationLevel.NONE, []),
        (EscalationLevel.REWEIGHT, [EscalationLevel.REWEIGHT]),
        (EscalationLevel.REBALANCE, ["reweight", "rebalance"]),
    ],
)
def test_a_job_says_how_far_a_slow_worker_may_climb(until: EscalationLevel, expected: list[EscalationLevel]) -> None:
    steps = Steps(config=JobConfig(slow_until=until))
    steps.times_s["w1"] = 4.0
    assert rungs(steps.run(60)) == expected


def test_the_hang_of_a_rebalanced_worker_leaves_its_share_as_it_is() -> None:
    steps = Steps(config=JobConfig(slow_until=EscalationLevel.STOP))
    steps.times_s["w1"] = 4.0
    steps.run(18)
    share = steps.job.job.members["w1"].share
    steps.hung = {"w1"}
    assert rungs(steps.run(14))[-1:] == [EscalationLevel.REBALANCE]
    assert steps.job.job.members["w1"].share == pytest.approx(share)


def test_ten_thousand_workers_that_say_their_steps_cost_little() -> None:
    job = Job()
    names = [f"w{number}" for number in range(10_000)]
    job.join(*names)
    beats = [[Heartbeat(job.caller(name), progress=StepProgress(step, 1.0)) for name in names] for step in range(10)]
    took_s: list[float] = []
    for some in beats:
        for beat in some:
            job.submit(beat)
        for _ in range(50):
            job.now_s += 0.1
            began_s = time.process_time()
            assert job.submit(Tick()).facts == ()
            took_s.append(time.process_time() - began_s)
    print(f"\na tick that judges 10,000 workers: {max(took_s):.3f} s")
    assert max(took_s) < 3.0
    assert {sample.steps for sample in job.soft.stragglers.samples.values()} <= {len(beats) - 2, len(beats) - 1}
    assert len(job.soft.stragglers.samples) == 10_000
