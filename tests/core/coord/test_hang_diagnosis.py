"""A generation that stands still: who is the cause is found by two probes, and in doubt nobody is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from strata.coord.core.facts import (
    IF_HUNG,
    KILL,
    CommandIssued,
    CommandKind,
    Fact,
    StragglerFinding,
    WorkerJudged,
    WorkerLost,
)
from strata.coord.core.hang_diagnosis import HangReport, find_suspects
from strata.coord.core.inputs import Heartbeat
from strata.coord.core.job_config import EscalationLevel, JobConfig
from strata.coord.core.state import StepProgress
from strata.coord.core.straggler_reaction import open_probe
from tests.core.coord.jobs import Job

BEAT_S = 1.0
FLOOR_S = 8.0
WAITS = HangReport(waits=True, busy=False, collective=41, cpu_s=2.0, frames=("c10d.py:1 in all_reduce",))
STANDS = HangReport(
    waits=False, busy=False, collective=40, cpu_s=3.0, frames=("train.py:7 in load", "train.py:1 in main")
)


@dataclass
class Ranks:
    """Ranks that make a step in every second, until all of them stand still and answer what they are asked."""

    workers: int = 4
    elastic: bool = False
    standing: bool = False
    busy: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    """They do not answer probes."""
    reports: dict[str, HangReport] = field(default_factory=dict)
    cpu_per_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.job = Job(JobConfig(heartbeat_interval_s=BEAT_S, hang_floor_s=FLOOR_S))
        self.names = [f"w{number}" for number in range(self.workers)]
        self.job.join(*self.names, elastic=self.elastic)
        self.step = 0
        self.late: set[str] = set()
        """Their heartbeats come before their steps end."""
        self.step_time_s: float | None = 1.0
        self.asked: list[int] = []

    def run(self, seconds: int) -> list[Fact]:
        found: list[Fact] = []
        for _ in range(seconds):
            self.step += not self.standing
            probe = open_probe(self.job.soft)
            if probe and probe not in self.asked:
                self.asked.append(probe)
            for worker_id in self.names:
                if worker_id in self.job.job.members:
                    self._beat(worker_id, probe)
            found += self.job.run(BEAT_S)
        return [fact for fact in found if isinstance(fact, WorkerJudged | WorkerLost | CommandIssued)]

    def _beat(self, worker_id: str, probe: int) -> None:
        answer = self.reports.get(worker_id, WAITS)
        if answer.cpu_s is not None:
            answer = answer._replace(cpu_s=answer.cpu_s + self.cpu_per_s.get(worker_id, 0.0) * self.job.now_s)
        progress = StepProgress(
            self.step - (worker_id in self.late), self.step_time_s, worker_id in self.busy, self.job.job.generation
        )
        given = (probe, answer) if probe and worker_id not in self.silent else None
        for _ in range(2):
            # Every heartbeat may arrive twice.
            self.job.submit(Heartbeat(self.job.caller(worker_id), progress=progress, hang_report=given))

    def hang(self, seconds: int = 60) -> list[Fact]:
        self.standing = True
        return self.run(seconds)


def stopped(facts: list[Fact]) -> list[str]:
    return [fact.worker_id for fact in facts if isinstance(fact, WorkerJudged) and fact.level is EscalationLevel.STOP]


@pytest.mark.parametrize("after_s", [4, 60])
def test_the_worker_that_others_wait_for_is_named_with_its_stack_and_ends_its_process(after_s: int) -> None:
    ranks = Ranks(reports={"w2": STANDS})
    assert ranks.run(after_s) == []
    began_s = ranks.job.now_s
    judged, command = ranks.hang(20)
    assert isinstance(judged, WorkerJudged)
    assert (judged.worker_id, judged.finding, judged.level) == ("w2", StragglerFinding.HUNG, EscalationLevel.STOP)
    assert "the others wait for it in a collective; it began 40 collectives where others began 41" in judged.reason
    assert judged.reason.endswith("it stands in train.py:7 in load < train.py:1 in main")
    assert isinstance(command, CommandIssued)
    assert (command.kind, command.workers) == (CommandKind.STOP, ("w2",))
    assert command.arguments == {IF_HUNG: KILL}
    assert len(ranks.asked) == 2
    assert ranks.job.now_s - began_s <= 20.0
    assert ranks.job.job.stopping == {}, "the process ends itself, or it moves and stays"


def test_workers_that_only_wait_are_not_named_beside_the_cause() -> None:
    ranks = Ranks(reports={"w2": STANDS})
    ranks.run(20)
    assert {fact.worker_id for fact in ranks.hang(20) if isinstance(fact, WorkerJudged)} == {"w2"}


def test_workers_that_report_their_last_step_earlier_are_not_named_either() -> None:
    ranks = Ranks(reports={"w2": STANDS})
    ranks.late = {"w3"}
    ranks.run(20)
    ranks.hang(2)
    ranks.late.clear()
    found = ranks.run(20)
    assert {fact.worker_id for fact in found if isinstance(fact, WorkerJudged)} == {"w2"}


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_per_s": {"w2": 0.5}},
        {"busy": {"w2"}},
        {"busy": {"w0"}},
        {"silent": {"w1"}},
        {"elastic": True},
        {"reports": {"w2": STANDS._replace(cpu_s=None)}},
        {"reports": {"w2": STANDS._replace(busy=True)}},
        {"reports": {"w2": STANDS._replace(collective=None)}},
        {"reports": {"w2": STANDS._replace(collective=41)}},
        {"reports": {"w2": STANDS, "w1": WAITS._replace(busy=True)}},
        {"reports": {"w2": STANDS, "w1": WAITS._replace(waits=False)}},
        {"reports": dict.fromkeys(("w0", "w1", "w2"), STANDS)},
        {"workers": 1, "reports": {"w0": STANDS}},
    ],
    ids=str,
)
def test_in_doubt_nobody_is_stopped(changes: dict[str, object]) -> None:
    given: dict[str, object] = {"reports": {"w2": STANDS}, **changes}
    ranks = Ranks(**given)  # type: ignore[arg-type]
    ranks.run(20)
    found = ranks.hang(300)
    assert stopped(found) == []
    assert not any(isinstance(fact, WorkerLost) for fact in found)


def test_a_worker_that_stands_elsewhere_at_the_second_question_is_not_stopped() -> None:
    ranks = Ranks(reports={"w2": STANDS})
    ranks.run(20)
    ranks.standing = True
    while len(ranks.asked) < 1:
        ranks.run(1)
    ranks.run(1)
    ranks.reports["w2"] = STANDS._replace(frames=("train.py:8 in load",))
    assert stopped(ranks.run(12)) == []


def test_workers_that_make_their_first_step_are_not_asked() -> None:
    ranks = Ranks(reports={"w2": STANDS})
    ranks.step_time_s = None
    assert ranks.hang(200) == []
    assert ranks.asked == []


def test_before_a_step_was_seen_to_end_it_may_take_much_longer() -> None:
    ranks = Ranks(reports={"w2": STANDS})
    ranks.hang(48)
    assert ranks.asked == [], "five times ten steps of a second"
    assert stopped(ranks.run(60)) == ["w2"]


def test_steps_end_the_questions() -> None:
    ranks = Ranks()
    ranks.run(20)
    ranks.standing = True
    while not ranks.asked:
        ranks.run(1)
    ranks.standing = False
    ranks.run(2)
    assert open_probe(ranks.job.soft) == 0
    assert ranks.run(60) == []


def test_an_answer_to_an_earlier_question_does_not_count() -> None:
    ranks = Ranks(reports={"w2": STANDS})
    ranks.run(20)
    ranks.standing = True
    while len(ranks.asked) < 2:
        ranks.run(1)
    probe = ranks.job.soft.stragglers.probe
    assert probe is not None
    assert probe.before is not None
    late = Heartbeat(ranks.job.caller("w0"), hang_report=(probe.number - 1, WAITS))
    probe.reports.clear()
    ranks.job.submit(late)
    assert probe.reports == {}


def test_a_rank_that_waits_in_a_collective_of_some_ranks_is_no_suspect() -> None:
    waits_for_w0 = WAITS._replace(collective=40)
    now = {"w0": STANDS, "w1": waits_for_w0, "w2": WAITS, "w3": WAITS}
    assert find_suspects(now, now) == {}


def test_children_that_have_ended_are_no_hang() -> None:
    before = {"w0": STANDS._replace(cpu_s=31.0), "w1": WAITS, "w2": WAITS}
    now = {"w0": STANDS._replace(cpu_s=25.0), "w1": WAITS, "w2": WAITS}
    assert find_suspects(before, now) == {}
    assert list(find_suspects(now, now)) == ["w0"]


def test_ten_thousand_answers_are_compared_in_less_than_a_second() -> None:
    now = {f"w{number}": WAITS for number in range(9_999)} | {"suspect": STANDS}
    began_s = time.process_time()
    assert list(find_suspects(now, now)) == ["suspect"]
    assert time.process_time() - began_s < 1.0
