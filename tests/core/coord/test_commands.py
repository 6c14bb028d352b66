"""Commands: delivered until acknowledged, to those who were named, and forgotten with those who are gone."""

from __future__ import annotations

import time

from strata.base.errors import Code
from strata.coord.core.facts import CommandIssued, CommandKind
from strata.coord.core.inputs import Beat, Issue, Leave
from tests.core.coord.jobs import JOB, Job


def kinds(job: Job, worker_id: str, *acked: int) -> list[CommandKind]:
    return [command.kind for command in job.beat(worker_id, acked_commands=acked).commands]


def test_a_command_comes_with_every_beat_until_it_is_acknowledged() -> None:
    job = Job(workers=1)
    job.ask(Issue(JOB, CommandKind.CHECKPOINT_NOW, reason="maintenance"))
    for _ in range(3):
        (command,) = job.beat("w0").commands
        assert (command.kind, command.command_id, command.reason) == (CommandKind.CHECKPOINT_NOW, 1, "maintenance")
    assert kinds(job, "w0", 1) == []
    assert kinds(job, "w0") == []
    assert job.job.commands == {}


def test_a_command_reaches_those_who_are_named_and_nobody_else() -> None:
    job = Job(workers=3)
    job.ask(Issue(JOB, CommandKind.DRAIN, workers=("w1",)))
    assert [kinds(job, worker) for worker in ("w0", "w1", "w2")] == [[], [CommandKind.DRAIN], []]


def test_a_command_to_nobody_in_particular_reaches_all_members() -> None:
    job = Job(workers=3)
    job.ask(Issue(JOB, CommandKind.RELOAD))
    job.join("later")
    assert [kinds(job, worker) for worker in ("w0", "w1", "w2", "later")] == [[CommandKind.RELOAD]] * 3 + [[]]


def test_commands_come_in_the_order_of_their_growing_ids() -> None:
    job = Job(workers=2)
    for kind in (CommandKind.CHECKPOINT_NOW, CommandKind.DRAIN, CommandKind.STOP):
        job.ask(Issue(JOB, kind))
    assert [command.command_id for command in job.beat("w1").commands] == [1, 2, 3]
    assert kinds(job, "w1", 2) == [CommandKind.CHECKPOINT_NOW, CommandKind.STOP]
    for worker in ("w0", "w1"):
        job.beat(worker, acked_commands=(1, 2, 3))
    facts = job.ask(Issue(JOB, CommandKind.RELOAD)).facts
    assert isinstance(facts[0], CommandIssued)
    assert facts[0].command_id == 4, "also when no command is open"


def test_an_acknowledgement_counts_once_and_only_for_its_worker() -> None:
    job = Job(workers=2)
    job.ask(Issue(JOB, CommandKind.RELOAD))
    assert len(job.ask(Beat(job.caller("w0"), acked_commands=(1, 1, 77))).facts) == 1
    assert job.ask(Beat(job.caller("w0"), acked_commands=(1,))).facts == ()
    assert kinds(job, "w1") == [CommandKind.RELOAD]


def test_a_worker_named_twice_is_told_once() -> None:
    job = Job(workers=1)
    job.ask(Issue(JOB, CommandKind.RELOAD, workers=("w0", "w0")))
    job.beat("w0", acked_commands=(1,))
    assert kinds(job, "w0") == []


def test_a_command_is_dropped_for_a_worker_that_is_lost() -> None:
    job = Job(workers=2)
    job.ask(Issue(JOB, CommandKind.DRAIN, workers=("w1",)))
    job.ask(Issue(JOB, CommandKind.RELOAD))
    job.ask(Leave(job.caller("w1")))
    assert list(job.job.commands) == [2]
    job.register("w1", "life-2")
    assert kinds(job, "w1") == [], "its next life did nothing to be told"
    job.beat("w0", acked_commands=(2,))
    assert job.job.commands == {}


def test_a_command_survives_a_restart() -> None:
    job = Job(workers=1)
    job.ask(Issue(JOB, CommandKind.STOP))
    job.restart()
    assert kinds(job, "w0") == [CommandKind.STOP]
    job.beat("w0", acked_commands=(1,))
    assert kinds(job, "w0") == []


def test_a_command_to_somebody_unknown_is_refused() -> None:
    job = Job(workers=1)
    assert job.refusal(Issue(JOB, CommandKind.STOP, workers=("w0", "w9"))).code is Code.NOT_FOUND
    assert job.refusal(Issue("no such job", CommandKind.STOP)).code is Code.NOT_FOUND


def test_a_command_to_an_empty_job_is_nothing() -> None:
    assert Job().ask(Issue(JOB, CommandKind.STOP)).facts == ()


def test_the_beats_of_ten_thousand_workers_with_a_command_stay_cheap() -> None:
    job = Job()
    names = [f"w{number}" for number in range(10_000)]
    job.join(*names)
    job.ask(Issue(JOB, CommandKind.RELOAD))
    for name in names[:500]:
        job.ask(Issue(JOB, CommandKind.REBALANCE, workers=(name,)))
    callers = [job.caller(name) for name in names]
    began_s = time.process_time()
    for caller in callers:
        job.ask(Beat(caller))
    for caller in callers:
        job.ask(Beat(caller, acked_commands=(1,)))
    assert time.process_time() - began_s < 6.0
    assert len(job.job.commands) == 500
