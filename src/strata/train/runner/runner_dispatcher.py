"""RunnerDispatcher: rank 0's conversation with the orchestrator, and how a command reaches every rank.

A dispatch is done once. Its reply is kept until the orchestrator says that it is durable; a dispatch that comes again
is answered from there. Whoever speaks with a generation that is over is told so and not heard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from time import perf_counter
from typing import Protocol, assert_never

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.core import commands, ops
from strata.train.core.sampling import SamplingSlice, SliceResult
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model_runner import Executed, ModelRunner, Whole
from strata.train.runner.passes import partition
from strata.train.runner.sampling import scatter

_log = log.get(__name__)


class Kind(IntEnum):
    """What rank 0 announces to the others."""

    WORK = 1
    PASS = 2
    HEALTH = 3
    SHUTDOWN = 4
    SAMPLE = 5


class Link(Protocol):
    """`strata.train.link.rank.RankLink`, or whatever a test speaks through."""

    def receive(self) -> commands.ToRank | None: ...

    def send(self, message: commands.FromRank) -> bool: ...

    def wake(self) -> None:
        """Let `receive` return without a message. The only one that another thread may call."""
        ...


class RunnerDispatcher:
    def __init__(self, runner: ModelRunner, ranks: RankGroup, link: Link, group: str) -> None:
        self._runner = runner
        self._ranks = ranks
        self._link = link
        self._group = group
        """New with every start of the ranks."""
        self._generation = 0
        self._run_id: str | None = None
        self._applied = 0
        self._replies: dict[int, commands.DispatchReply] = {}
        self._spread = runner.sampler.spread()
        self._written: commands.SnapshotWritten | None = None
        self._untold = False
        """It could not be sent, and this conversation does not know of it."""
        self._executed_s = 0.0
        """Of the last work that every rank got whole."""
        runner.snapshots.wake = link.wake

    def run(self) -> None:
        """Until the orchestrator says that it is over."""
        going = True
        while going:
            message = self._link.receive()
            if message is not None:
                going = self.run_once(message)
            self.tell_written()

    def tell_written(self) -> None:
        """That a snapshot is on the disk, or never will be, until it is heard. Whoever attaches later is told then."""
        done = self._runner.snapshots.take()
        if done is not None:
            failpoint("train.snapshot.before_told")
            self._written = commands.SnapshotWritten(
                self._generation, done.number, done.digest, done.size, done.held_s, done.written_s, done.trouble
            )
            self._untold = True
        if self._untold and self._written is not None:
            self._untold = not self._link.send(self._written)

    def run_once(self, message: commands.ToRank) -> bool:
        """Answer one message; False after a shutdown."""
        refusal = self._refusal(message)
        if refusal is not None:
            _log.warning("a message was refused", reason=refusal, generation=message.generation)
            self._link.send(commands.Fenced(self._generation, refusal))
            return True
        match message:
            case commands.Attach(generation, run_id):
                self._generation, self._run_id = generation, run_id
                self._untold = False
                self._link.send(self._attached())
            case commands.Restore():
                self._link.send(self._restore(message))
            case commands.DispatchCommand():
                self._link.send(self._answer(message))
            case commands.RankRequest(_, ask_id, work):
                stop = isinstance(work, commands.Shutdown)
                self._ranks.announce(Kind.SHUTDOWN if stop else Kind.HEALTH, [0] * self._ranks.size)
                alive = self._ranks.numbers(self._ranks.rank)
                self._link.send(commands.HealthReply(self._generation, ask_id, alive))
                return not stop
            case _:
                assert_never(message)
        return True

    def _refusal(self, message: commands.ToRank) -> str | None:
        """Why this speaker is not heard."""
        if message.generation < self._generation:
            return f"generation {message.generation} is over, it is {self._generation} now"
        match message:
            case commands.Attach(_, run_id):
                if self._applied and run_id != self._run_id:
                    return f"these ranks belong to the run {self._run_id!r}"
            case _:
                if message.generation > self._generation:
                    return "attach first"
                if isinstance(message, commands.Restore) and self._applied:
                    return f"dispatch {self._applied} was applied already: there is nothing to restore"
        # Numbers may have gaps: a dispatch that was given up is not told to ranks that start anew.
        if (
            isinstance(message, commands.DispatchCommand)
            and message.number <= self._applied
            and message.number not in self._replies
        ):
            return f"the reply of dispatch {message.number} was durable, and is not kept any longer"
        return None

    def _attached(self) -> commands.AttachReply:
        return commands.AttachReply(
            generation=self._generation,
            group=self._group,
            world_size=self._ranks.size,
            applied=self._applied,
            model=msgspec.structs.replace(self._runner.base.info(), row_tokens=self._runner.memory.row_tokens),
            written=self._written,
            exhausted=self._runner.memory.exhausted,
        )

    def _answer(self, command: commands.DispatchCommand) -> commands.DispatchReply:
        for number in [number for number in self._replies if number <= command.durable]:
            del self._replies[number]
        if command.number > self._applied:
            started = perf_counter()
            sampled: SliceResult | None = None
            results: Sequence[ops.Result] = ()
            if isinstance(command.work, SamplingSlice):
                sampled = self._sample(command.work)
                tokens = sampled.sampled_tokens
            elif isinstance(command.work, commands.TakeSnapshot):
                results, tokens = self._take_snapshot(command.number, command.work), 0
            else:
                results, tokens = self._do(command.work)
            times = self._runner.times
            passed = isinstance(command.work, commands.PassCommand)
            timing = commands.Timing(
                total_s=perf_counter() - started,
                forward_s=times.forward_s if passed else 0.0,
                backward_s=times.backward_s if passed else 0.0,
                tokens=tokens,
                optimizer_s=self._executed_s if isinstance(command.work, commands.StepsCommand) else 0.0,
                publish_s=self._executed_s if isinstance(command.work, commands.Publishing) else 0.0,
            )
            self._replies[command.number] = commands.DispatchReply(
                self._generation, command.number, results, timing, sampled
            )
            self._applied = command.number
        kept = self._replies[command.number]
        return msgspec.structs.replace(kept, generation=self._generation)

    def _restore(self, message: commands.Restore) -> commands.Restored:
        self._tell_all(message)
        try:
            self._runner.restore(Path(message.path), message.digest)
        except StrataError as error:
            damaged = error.code in (Code.CORRUPT, Code.NOT_FOUND)
            return commands.Restored(self._generation, message.number, str(error), damaged=damaged)
        self._applied = message.number
        return commands.Restored(self._generation, message.number)

    def _take_snapshot(self, number: int, work: commands.TakeSnapshot) -> Sequence[ops.Result]:
        self._tell_all(work)
        trouble = self._runner.take_snapshot(number, Path(work.path))
        return [] if trouble is None else [trouble]

    def _tell_all(self, work: Whole) -> None:
        data = commands.encode(work)
        self._ranks.announce(Kind.WORK, [len(data)] * self._ranks.size)
        self._ranks.send_to_all(data)

    def _do(self, work: commands.PassCommand | Executed) -> tuple[Sequence[ops.Result], int]:
        if isinstance(work, commands.PassCommand):
            return self._pass(work)
        self._tell_all(work)
        started = perf_counter()
        results = self._runner.execute(work)
        self._executed_s = perf_counter() - started
        return results, 0

    def _sample(self, work: SamplingSlice) -> SliceResult:
        """Rank 0 alone knows whole requests; each rank gets its own sequences of them."""
        sampler = self._runner.sampler
        parts = [scatter.encode(part) for part in self._spread.cut(work)]
        self._ranks.announce(Kind.SAMPLE, [len(part) for part in parts])
        self._ranks.scatter(parts)
        report = scatter.encode(sampler.run(scatter.decode_quantum(parts[0])))
        return self._spread.put_together([scatter.decode_sampled(one) for one in self._ranks.gather(report)])

    def _pass(self, work: commands.PassCommand) -> tuple[Sequence[ops.Result], int]:
        try:
            made = partition.cut(work, self._ranks.size)
        except StrataError as error:
            return [partition.failed(error.code, str(error)) for _ in work.items], 0
        parts = [partition.encode(part) for part in made.parts] if self._ranks.size > 1 else []
        self._ranks.announce(Kind.PASS, [len(part) for part in parts])
        self._ranks.scatter(parts)
        report = self._runner.forward_backward(made.parts[0])
        if self._ranks.size == 1:
            return partition.put_together(made, [report]), made.tokens
        others = self._ranks.gather(partition.encode(report))[1:]
        return partition.put_together(made, [report, *map(partition.decode_report, others)]), made.tokens


def _follow_whole(runner: ModelRunner, work: Whole) -> None:
    match work:
        case commands.TakeSnapshot(path):
            runner.take_snapshot(0, Path(path))
        case commands.Restore():
            # Rank 0 says what came of it; it is the same here.
            with contextlib.suppress(StrataError):
                runner.restore(Path(work.path), work.digest)
        case _:
            runner.execute(work)


def follow(runner: ModelRunner, ranks: RankGroup) -> None:
    """What every other rank does: as rank 0 announces, until it announces the end."""
    while True:
        kind, sizes = ranks.await_announcement()
        match Kind(kind):
            case Kind.WORK:
                work = commands.decode_work(ranks.receive(sizes[ranks.rank]))
                assert isinstance(work, Whole)
                _follow_whole(runner, work)
            case Kind.PASS:
                report = runner.forward_backward(partition.decode_pass(ranks.receive_part(sizes)))
                ranks.gather(partition.encode(report))
            case Kind.SAMPLE:
                quantum = scatter.decode_quantum(ranks.receive_part(sizes))
                ranks.gather(scatter.encode(runner.sampler.run(quantum)))
            case Kind.HEALTH:
                ranks.numbers(ranks.rank)
            case Kind.SHUTDOWN:
                ranks.numbers(ranks.rank)
                return
            case unknown:
                assert_never(unknown)
