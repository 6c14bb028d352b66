"""A checkpoint that an operator requests is of one step that all ranks share; a drain begins with one."""

from __future__ import annotations

from dataclasses import replace

from strata.base.errors import Code
from strata.coord.core.checkpoint_requests import next_common_step
from strata.coord.core.facts import (
    CheckpointAgreed,
    CheckpointCommitted,
    CheckpointStepNamed,
    CommandIssued,
    CommandKind,
    DrainBegun,
    WorkerLost,
)
from strata.coord.core.inputs import Ack, Heartbeat, HeartbeatReply, IssueCommand, IssuedCommand, Leave, NextShards
from strata.coord.core.state import CheckpointRequest, StepProgress
from tests.core.coord.jobs import CORPUS, JOB, Job

NOW = IssueCommand(JOB, CommandKind.CHECKPOINT_NOW)


class Ranks:
    """Programs that agree on steps: each promises what it has not finished, and goes on to what it promised."""

    def __init__(self, count: int, *steps: int) -> None:
        self.job = Job(workers=count)
        self.steps = dict(zip(self.job.job.ranks, steps, strict=True))
        self.promises = dict.fromkeys(self.steps, 0)
        for worker_id in self.steps:
            self.beat(worker_id)

    def beat(self, worker_id: str, *acked: int) -> HeartbeatReply:
        progress = StepProgress(
            self.steps[worker_id], 0.1, False, self.job.job.generation, (), self.promises[worker_id]
        )
        return self.job.beat(worker_id, progress=progress, acked_commands=acked)

    def hear(self, worker_id: str) -> None:
        """Takes the step of the command, if it is not finished, and acknowledges."""
        for command in self.beat(worker_id).commands:
            if command.kind is CommandKind.CHECKPOINT_NOW:
                step = int(command.arguments["step"])
                self.promises[worker_id] = step if step > self.steps[worker_id] else 0
            self.beat(worker_id, command.command_id)

    @property
    def request(self) -> CheckpointRequest:
        found = self.job.job.checkpoint_request
        assert found is not None
        return found


def test_the_named_step_is_ahead_of_every_rank_and_agreed_when_all_have_promised() -> None:
    ranks = Ranks(2, 54, 57)
    ranks.job.submit(NOW)
    assert ranks.request.step > 57
    ranks.hear("w0")
    assert ranks.job.tick() == ()
    ranks.hear("w1")
    assert ranks.job.tick() == (CheckpointAgreed(JOB, 1, ranks.request.step),)
    assert ranks.job.tick() == ()


def test_a_rank_that_has_finished_the_step_refuses_and_a_later_one_is_named() -> None:
    ranks = Ranks(2, 10, 10)
    ranks.job.submit(NOW)
    first = ranks.request.step
    ranks.hear("w0")
    ranks.steps["w1"] = first + 7
    ranks.hear("w1")
    facts = ranks.job.tick()
    assert not any(isinstance(fact, CheckpointAgreed) for fact in facts)
    assert ranks.request.step > first + 7
    for worker_id in ("w0", "w1"):
        ranks.hear(worker_id)
    assert ranks.job.tick() == (CheckpointAgreed(JOB, 1, ranks.request.step),)
    assert list(ranks.job.job.commands) == []


def test_a_rank_that_is_always_ahead_is_caught_up_with() -> None:
    ranks = Ranks(2, 0, 0)
    ranks.job.submit(NOW)
    for _ in range(12):
        ranks.hear("w0")
        # It makes a hundred steps before each command reaches it.
        if not ranks.promises["w1"]:
            ranks.steps["w1"] += 100
        ranks.hear("w1")
        ranks.job.tick()
        if ranks.request.agreed:
            break
    assert ranks.request.agreed


def test_the_committed_checkpoint_names_the_command() -> None:
    ranks = Ranks(2, 3, 4)
    issued = ranks.job.told(IssuedCommand, NOW)
    for worker_id in ("w0", "w1"):
        ranks.hear(worker_id)
    ranks.job.tick()
    step = ranks.request.step
    ranks.job.checkpoint(step - 1)
    assert ranks.job.job.checkpoints[-1].command_id == 0
    ranks.job.checkpoint(step)
    assert (ranks.job.job.checkpoints[-1].step, ranks.job.job.checkpoints[-1].command_id) == (step, issued.command_id)
    assert ranks.job.job.checkpoint_request is None


def test_a_second_request_shares_the_checkpoint_and_its_repetition_too() -> None:
    ranks = Ranks(2, 3, 4)
    first = ranks.job.told(IssuedCommand, NOW)
    again = replace(NOW, request_id="nightly")
    assert ranks.job.told(IssuedCommand, again).command_id == first.command_id
    for worker_id in ("w0", "w1"):
        ranks.hear(worker_id)
    ranks.job.tick()
    ranks.job.checkpoint(ranks.request.step)
    outcome = ranks.job.submit(again)
    assert outcome.facts == ()
    assert isinstance(outcome.reply, IssuedCommand)
    assert outcome.reply.command_id == first.command_id


def test_another_leader_collects_the_promises_again() -> None:
    ranks = Ranks(2, 3, 4)
    ranks.job.submit(NOW)
    for worker_id in ("w0", "w1"):
        ranks.hear(worker_id)
    ranks.job.restart()
    assert ranks.job.tick() == ()
    ranks.beat("w0")
    assert ranks.job.tick() == ()
    ranks.beat("w1")
    assert ranks.job.tick() == (CheckpointAgreed(JOB, 1, ranks.request.step),)


def test_the_promise_of_an_incarnation_that_is_over_does_not_count() -> None:
    ranks = Ranks(2, 3, 4)
    ranks.job.submit(NOW)
    ranks.hear("w0")
    zombie = replace(ranks.job.caller("w1"), incarnation="before")
    progress = StepProgress(4, 0.1, False, 1, (), ranks.request.step)
    assert ranks.job.refusal(Heartbeat(zombie, progress=progress)).code is Code.STALE
    assert ranks.job.tick() == ()


def test_another_generation_agrees_anew() -> None:
    ranks = Ranks(3, 30, 30, 30)
    ranks.job.submit(NOW)
    for worker_id in ranks.steps:
        ranks.hear(worker_id)
    ranks.job.tick()
    assert ranks.request.agreed
    ranks.job.submit(Leave(ranks.job.caller("w2")))
    ranks.job.settle()
    ranks.steps = {"w0": 5, "w1": 6}
    for worker_id in ranks.steps:
        ranks.promises[worker_id] = 0
        ranks.beat(worker_id)
    facts = ranks.job.tick()
    (named,) = [fact for fact in facts if isinstance(fact, CheckpointStepNamed)]
    assert named.step == ranks.request.step
    assert 6 < named.step < 30, "after a recovery the steps are those of the checkpoint"
    for worker_id in ranks.steps:
        ranks.hear(worker_id)
    assert ranks.job.tick() == (CheckpointAgreed(JOB, ranks.job.job.generation, ranks.request.step),)


def test_a_program_that_goes_past_the_agreed_step_gets_another_one() -> None:
    ranks = Ranks(2, 3, 4)
    ranks.job.submit(NOW)
    for worker_id in ("w0", "w1"):
        ranks.hear(worker_id)
    ranks.job.tick()
    agreed = ranks.request.step
    ranks.steps["w0"] = agreed + 1
    ranks.beat("w0")
    assert ranks.job.tick() == (), "it writes the checkpoint beside the next steps"
    ranks.promises["w0"] = 0
    ranks.beat("w0")
    ranks.job.tick()
    assert ranks.request.step > agreed + 1
    assert not ranks.request.agreed


def test_programs_that_do_not_agree_write_where_they_are() -> None:
    job = Job(workers=2)
    job.beat("w0", progress=StepProgress(3))
    issued = job.told(IssuedCommand, NOW)
    (command,) = job.beat("w1").commands
    assert (command.kind, command.arguments) == (CommandKind.CHECKPOINT_NOW, {})
    job.checkpoint(5)
    assert job.job.checkpoints[-1].command_id == issued.command_id


def test_a_checkpoint_of_some_ranks_is_refused() -> None:
    ranks = Ranks(2, 3, 4)
    assert ranks.job.refusal(replace(NOW, workers=("w0",))).code is Code.INVALID


def test_a_drained_rank_leaves_with_a_checkpoint_and_the_others_go_on_from_it() -> None:
    ranks = Ranks(3, 10, 10, 11)
    drain = IssueCommand(JOB, CommandKind.DRAIN, ("w1",), request_id="r")
    issued = ranks.job.told(IssuedCommand, drain)
    assert issued.workers == ("w1",)
    assert ranks.job.told(IssuedCommand, drain) == issued
    kinds = {each: [command.kind for command in ranks.beat(each).commands] for each in ranks.steps}
    assert kinds["w0"] == kinds["w2"] == [CommandKind.CHECKPOINT_NOW]
    assert kinds["w1"] == [CommandKind.DRAIN, CommandKind.CHECKPOINT_NOW]
    for worker_id in ranks.steps:
        ranks.hear(worker_id)
    ranks.job.tick()
    step = ranks.request.step
    ranks.job.report("w1", step)
    ranks.job.report("w0", step)
    outcome = ranks.job.submit(ranks.job.report_of("w2", step))
    assert [type(fact) for fact in outcome.facts[1:]] == [CheckpointCommitted, DrainBegun, CommandIssued]
    (told,) = [each for each in ranks.beat("w1").commands if each.kind is CommandKind.DRAIN and not each.arguments]
    assert told.reason == drain.reason, "a program that does not wait for the commit learns it too"
    replies = {each: ranks.job.report(each, step) for each in ranks.steps}
    assert all(reply.committed and reply.generation_ends for reply in replies.values())
    assert {each for each, reply in replies.items() if reply.drain} == {"w1"}
    ranks.job.tick(after_s=1.0)
    assert ranks.job.job.generation == 1, "no generation forms with a worker that leaves"
    ranks.job.submit(Leave(ranks.job.caller("w1")))
    ranks.job.settle()
    assert list(ranks.job.job.ranks) == ["w0", "w2"]
    recovered = ranks.job.recover("w0", observed=1)
    assert recovered.checkpoint is not None
    assert recovered.checkpoint.step == step


def test_a_drained_worker_acks_what_it_consumed_before_it_leaves() -> None:
    ranks = Ranks(2, 1, 1)
    ranks.job.register_dataset()
    (lease_id,) = ranks.job.take("w1")
    ranks.job.submit(IssueCommand(JOB, CommandKind.DRAIN, ("w1",)))
    for worker_id in ranks.steps:
        ranks.hear(worker_id)
    ranks.job.tick()
    ranks.job.checkpoint(ranks.request.step)
    assert not ranks.job.job.settled
    reply = ranks.job.next("w1", count=0, acks=(Ack(lease_id),), held=(lease_id,))
    assert (reply.stale, reply.leases) == ((), ())
    assert ranks.job.refusal(NextShards(ranks.job.caller("w0"), CORPUS, 0)).code is Code.UNAVAILABLE


def test_a_drained_worker_that_dies_is_not_drained_again_in_its_next_incarnation() -> None:
    ranks = Ranks(2, 1, 1)
    ranks.job.submit(IssueCommand(JOB, CommandKind.DRAIN, ("w1",)))
    assert list(ranks.request.drain) == ["w1"]
    ranks.job.submit(Leave(ranks.job.caller("w1")))
    assert not ranks.request.drain


def test_a_drained_rank_that_does_not_leave_is_evicted() -> None:
    ranks = Ranks(2, 1, 1)
    ranks.job.submit(IssueCommand(JOB, CommandKind.DRAIN, ("w1",)))
    for worker_id in ranks.steps:
        ranks.hear(worker_id)
    ranks.job.tick()
    ranks.job.checkpoint(ranks.request.step)
    facts = ranks.job.run(30.5, beating=("w0", "w1"))
    assert [fact.worker_id for fact in facts if isinstance(fact, WorkerLost)] == ["w1"]
    ranks.job.run(1.0, beating=("w0",))
    assert list(ranks.job.job.ranks) == ["w0"]


def test_grids_whose_common_steps_are_too_far_apart_share_none() -> None:
    assert next_common_step([(1, 3), (1, 5)], 2) == 16
    primes = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61]
    assert next_common_step([(0, each) for each in primes], 1) is None
