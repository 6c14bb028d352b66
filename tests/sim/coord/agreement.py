"""Ranks that ask for checkpoints after some of their steps, a leader that names steps, and an operator who wants one.

Programs report and ask as they like: every step, every n-th, at odd places, some of them in step with the others. A
turn is one rank's step, one heartbeat, a tick or another leader. Whatever comes, the request is answered: by one
checkpoint that every rank wrote after the same step, or by a refusal; and afterwards every rank goes on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from strata.coord.core.facts import CheckpointRefused, CommandKind
from strata.coord.core.inputs import IssueCommand, IssuedCommand
from strata.coord.core.state import StepProgress
from tests.core.coord.jobs import JOB, Job

TURN_S = 0.02
MOST_TURNS = 60_000


@dataclass
class Rank:
    """One program with its SDK. `asks` decides after which steps it asks."""

    worker_id: str
    first: int
    strides: tuple[int, ...]
    """The distances between the steps that it asks after, over and over."""
    pace: float
    step: int = 0
    asked: int | None = None
    stride: int = 0
    promise: int = 0
    waits: bool = False
    agreed: int = 0
    wrote: list[int] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    acks: set[int] = field(default_factory=set)
    _next: int = 0
    _turn: int = 0

    def __post_init__(self) -> None:
        self.step, self._next = self.first, self.first + self.strides[0]

    def make_step(self, job: Job) -> None:
        self.step += 1
        if self.step != self._next:
            return
        self._turn += 1
        self._next += self.strides[self._turn % len(self.strides)]
        if self.asked is not None:
            self.stride = self.step - self.asked
        self.asked = self.step
        if self.promise < self.step:
            self.promise = 0
        self.waits = self.promise == self.step
        self.write_if_agreed(job)

    def write_if_agreed(self, job: Job) -> None:
        if self.waits and self.agreed == self.step:
            self.wrote.append(self.step)
            job.report(self.worker_id, self.step)
            self.promise, self.waits = 0, False

    def beat(self, job: Job) -> None:
        progress = StepProgress(
            self.step, 0.1, False, job.job.generation, (), self.promise, self.asked or 0, max(1, self.stride)
        )
        sent = tuple(self.acks)
        reply = job.beat(self.worker_id, progress=progress, acked_commands=sent)
        self.acks.difference_update(sent)
        request = job.job.checkpoint_request
        if request is not None and request.agreed:
            self.agreed = request.step
        for command in reply.commands:
            if command.command_id not in self.seen:
                self.seen.add(command.command_id)
                assert command.kind is CommandKind.CHECKPOINT_NOW
                step = int(command.arguments["step"])
                self.promise = step if step > self.step else 0
                self.waits = self.waits and self.promise == self.step
            self.acks.add(command.command_id)
        self.write_if_agreed(job)


@dataclass
class Outcome:
    committed: int | None
    refusal: str | None
    turns: int


class Agreement:
    """One history; `lockstep`: no rank begins a step before all have finished the one before it."""

    def __init__(self, seed: int, strides: Sequence[tuple[int, ...]], firsts: list[int], *, lockstep: bool) -> None:
        self.chance = random.Random(seed)
        self.job = Job(workers=len(strides))
        self.lockstep = lockstep
        self.ranks = [
            Rank(worker_id, first, each, self.chance.uniform(0.3, 1.0))
            for worker_id, first, each in zip(self.job.job.ranks, firsts, strides, strict=True)
        ]

    def run(self) -> Outcome:
        for rank in self.ranks:
            for _ in range(self.chance.randrange(2 * sum(rank.strides))):
                rank.make_step(self.job)
            rank.beat(self.job)
        if self.lockstep:
            together = max(rank.step for rank in self.ranks)
            for rank in self.ranks:
                while rank.step < together:
                    rank.make_step(self.job)
                rank.beat(self.job)
        issued = self.job.told(IssuedCommand, IssueCommand(JOB, CommandKind.CHECKPOINT_NOW))
        for turn in range(MOST_TURNS):
            self.turn()
            found = next((each for each in self.job.job.checkpoints if each.command_id == issued.command_id), None)
            if found is not None:
                return self.gone_on(Outcome(found.step, None, turn))
            if issued.command_id in self.job.job.refused:
                return self.gone_on(Outcome(None, self.job.job.refused[issued.command_id], turn))
        raise AssertionError(f"not answered after {MOST_TURNS} turns: {self.job.job.checkpoint_request}, {self.ranks}")

    def turn(self) -> None:
        self.job.now_s += TURN_S
        rank = self.chance.choice(self.ranks)
        luck = self.chance.random()
        if luck < 0.002:
            self.job.restart()
        elif luck < 0.2:
            self.job.tick()
        elif luck < 0.4:
            rank.beat(self.job)
        elif luck < 0.4 + 0.6 * rank.pace and not rank.waits:
            behind = min(each.step for each in self.ranks)
            if not self.lockstep or rank.step == behind:
                rank.make_step(self.job)

    def gone_on(self, outcome: Outcome) -> Outcome:
        """Nobody is left waiting at a step."""
        before = [rank.step for rank in self.ranks]
        for _ in range(MOST_TURNS):
            self.turn()
            if all(rank.step >= step + 20 for rank, step in zip(self.ranks, before, strict=True)):
                break
        else:
            raise AssertionError(f"ranks do not go on: {self.ranks}")
        if outcome.committed is not None:
            assert all(outcome.committed in rank.wrote for rank in self.ranks)
        refused = [fact for fact in self.job.facts if isinstance(fact, CheckpointRefused)]
        assert len(refused) == (outcome.committed is None)
        return outcome
