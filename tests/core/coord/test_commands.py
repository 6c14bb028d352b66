"""Commands: delivered until acknowledged, to those who were named, and forgotten with those who are gone."""

from __future__ import annotations

import time

from strata.base.errors import Code
from strata.coord.core.facts import CommandIssued, CommandKind
from strata.coord.core.inputs import Heartbeat, IssueCommand, IssuedCommand, Leave
from strata.coord.core.state import REQUESTS_KEPT
from strata.journal.port import MAX_FACT_BYTES
from tests.core.coord.jobs import JOB, Job


def kinds(job: Job, worker_id: str, *acked: int) -> list[CommandKind]:
    return [command.kind for command in job.beat(worker_id, acked_commands=acked).commands]


def test_a_command_comes_with_every_beat_until_it_is_acknowledged() -> None:
    job = Job(workers=1)
    job.submit(IssueCommand(JOB, CommandKind.CHECKPOINT_NOW, reason="maintenance"))
    for _ in range(3):
        (command,) = job.beat("w0").commands
        assert (command.kind, command.command_id, command.reason) == (CommandKind.CHECKPOINT_NOW, 1, "maintenance")
    assert kinds(job, "w0", 1) == []
    assert kinds(job, "w0") == []
    assert job.job.commands == {}


def test_a_command_reaches_those_who_are_named_and_nobody_else() -> None:
    job = Job(workers=3)
    job.submit(IssueCommand(JOB, CommandKind.DRAIN, workers=("w1",)))
    assert [kinds(job, worker) for worker in ("w0", "w1", "w2")] == [[], [CommandKind.DRAIN], []]


def test_a_command_to_nobody_in_particular_reaches_all_members() -> None:
    job = Job(workers=3)
    job.submit(IssueCommand(JOB, CommandKind.RELOAD))
    job.join("later")
    assert [kinds(job, worker) for worker in ("w0", "w1", "w2", "later")] == [[CommandKind.RELOAD]] * 3 + [[]]


def test_commands_come_in_the_order_of_their_growing_ids() -> None:
    job = Job(workers=2)
    for kind in (CommandKind.CHECKPOINT_NOW, CommandKind.DRAIN, CommandKind.STOP):
        job.submit(IssueCommand(JOB, kind))
    assert [command.command_id for command in job.beat("w1").commands] == [1, 2, 3]
    assert kinds(job, "w1", 2) == [CommandKind.CHECKPOINT_NOW, CommandKind.STOP]
    for worker in ("w0", "w1"):
        job.beat(worker, acked_commands=(1, 2, 3))
    facts = job.submit(IssueCommand(JOB, CommandKind.RELOAD)).facts
    assert isinstance(facts[0], CommandIssued)
    assert facts[0].command_id == 4, "also when no command is open"


def test_an_acknowledgement_counts_once_and_only_for_its_worker() -> None:
    job = Job(workers=2)
    job.submit(IssueCommand(JOB, CommandKind.RELOAD))
    assert len(job.submit(Heartbeat(job.caller("w0"), acked_commands=(1, 1, 77))).facts) == 1
    assert job.submit(Heartbeat(job.caller("w0"), acked_commands=(1,))).facts == ()
    assert kinds(job, "w1") == [CommandKind.RELOAD]


def test_a_worker_named_twice_is_told_once() -> None:
    job = Job(workers=1)
    job.submit(IssueCommand(JOB, CommandKind.RELOAD, workers=("w0", "w0")))
    job.beat("w0", acked_commands=(1,))
    assert kinds(job, "w0") == []


def test_a_command_is_dropped_for_a_worker_that_is_lost() -> None:
    job = Job(workers=2)
    job.submit(IssueCommand(JOB, CommandKind.DRAIN, workers=("w1",)))
    job.submit(IssueCommand(JOB, CommandKind.RELOAD))
    job.submit(Leave(job.caller("w1")))
    assert list(job.job.commands) == [2]
    job.register("w1", "incarnation-2")
    assert kinds(job, "w1") == [], "its next incarnation did nothing to be told"
    job.beat("w0", acked_commands=(2,))
    assert job.job.commands == {}


def test_a_command_survives_a_restart() -> None:
    job = Job(workers=1)
    job.submit(IssueCommand(JOB, CommandKind.STOP))
    job.restart()
    assert kinds(job, "w0") == [CommandKind.STOP]
    job.beat("w0", acked_commands=(1,))
    assert kinds(job, "w0") == []


def test_a_command_to_somebody_unknown_is_refused() -> None:
    job = Job(workers=1)
    assert job.refusal(IssueCommand(JOB, CommandKind.STOP, workers=("w0", "w9"))).code is Code.NOT_FOUND
    assert job.refusal(IssueCommand("no such job", CommandKind.STOP)).code is Code.NOT_FOUND


def test_a_command_to_an_empty_job_is_nothing() -> None:
    assert Job().submit(IssueCommand(JOB, CommandKind.STOP)).facts == ()


def test_the_beats_of_ten_thousand_workers_with_a_command_stay_cheap() -> None:
    job = Job()
    names = [f"w{number}" for number in range(10_000)]
    job.join(*names)
    job.submit(IssueCommand(JOB, CommandKind.RELOAD))
    for name in names[:500]:
        job.submit(IssueCommand(JOB, CommandKind.REBALANCE, workers=(name,)))
    callers = [job.caller(name) for name in names]
    began_s = time.process_time()
    for caller in callers:
        job.submit(Heartbeat(caller))
    for caller in callers:
        job.submit(Heartbeat(caller, acked_commands=(1,)))
    assert time.process_time() - began_s < 6.0
    assert len(job.job.commands) == 500


def test_a_command_brings_its_arguments_also_after_a_restart() -> None:
    job = Job(workers=1)
    job.submit(IssueCommand(JOB, CommandKind.RELOAD, arguments={"config": "new"}))
    for _ in range(2):
        (command,) = job.beat("w0").commands
        assert command.arguments == {"config": "new"}
        job.restart()


def test_a_request_asked_twice_is_one_command_whoever_leads() -> None:
    job = Job(workers=2)
    given = IssueCommand(JOB, CommandKind.DRAIN, request_id="nightly")
    first = job.told(IssuedCommand, given)
    assert first == IssuedCommand(1, ("w0", "w1"))
    for worker in ("w0", "w1"):
        job.beat(worker, acked_commands=(1,))
    for _ in range(2):
        again = job.submit(given)
        assert (again.facts, again.reply) == ((), first)
        job.restart()
    assert job.told(IssuedCommand, IssueCommand(JOB, CommandKind.DRAIN, request_id="weekly")).command_id == 2
    assert job.told(IssuedCommand, IssueCommand(JOB, CommandKind.DRAIN)).command_id == 3, (
        "without an id each is its own"
    )


def test_the_memory_of_requests_is_bounded() -> None:
    job = Job(workers=1)
    for number in range(REQUESTS_KEPT + 1):
        job.submit(IssueCommand(JOB, CommandKind.RELOAD, request_id=f"r{number}"))
        job.beat("w0", acked_commands=(number + 1,))
    assert len(job.job.requests) == REQUESTS_KEPT
    assert job.submit(IssueCommand(JOB, CommandKind.RELOAD, request_id="r0")).facts
    assert not job.submit(IssueCommand(JOB, CommandKind.RELOAD, request_id="r5")).facts


def test_a_command_to_more_workers_than_one_fact_names_is_one_command() -> None:
    names = tuple(f"{number:0200}" for number in range(6_000))
    job = Job()
    job.join(*names)
    outcome = job.submit(IssueCommand(JOB, CommandKind.RELOAD, request_id="r", arguments={"a": "b"}))
    assert len(outcome.facts) > 1
    assert max(map(len, job.journal)) <= MAX_FACT_BYTES
    assert outcome.reply == IssuedCommand(1, names)
    assert job.told(IssuedCommand, IssueCommand(JOB, CommandKind.RELOAD, request_id="r")) == IssuedCommand(1, names)
    assert list(job.job.commands[1].waiting) == list(names)
    assert kinds(job, names[-1]) == [CommandKind.RELOAD]
