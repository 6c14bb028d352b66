"""The process of a rank: rank 0 receives dispatches, executes each once, keeps replies and fences old generations
(`RunnerDispatcher`); the others follow its broadcasts.

Dispatches are idempotent: each is executed once. Its reply is kept until the orchestrator says that it is durable, and
a dispatch that arrives again gets the kept reply. A message of an earlier leader generation is fenced off.

A rank reads the settings file of the server. Keys of the link are read from the file that the settings name; a key is
never an argument.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol, assert_never

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from strata import __version__
from strata.base import log, trace
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.parent import name_process
from strata.base.settings import process_environment
from strata.http import otel
from strata.train.core import commands, ops
from strata.train.core.sampling import SampledPart, SamplingSlice, SliceResult
from strata.train.link.rank import RankLink
from strata.train.link.sockets import load_keys
from strata.train.runner.collectives import RankGroup, join_process_group
from strata.train.runner.host_files import HostFiles
from strata.train.runner.model_runner import BroadcastWork, Executed, ModelRunner
from strata.train.runner.passes import partition
from strata.train.runner.sampling import scatter
from strata.train.runner.settings import RunnerSettings, runner_settings
from strata.train.settings import ServerSettings, load_settings

_log = log.get(__name__)


class BroadcastKind(IntEnum):
    """What rank 0 broadcasts to the other ranks."""

    WORK = 1
    PASS = 2
    HEALTH = 3
    SHUTDOWN = 4
    SAMPLE = 5


class OrchestratorLink(Protocol):
    """`RankLink`, or the fake link of a test."""

    def receive(self) -> commands.ToRank | None: ...

    def send(self, message: commands.FromRank) -> bool: ...

    def wake(self) -> None:
        """Let `receive` return without a message. The only method that another thread may call."""
        ...


class RunnerDispatcher:
    def __init__(self, runner: ModelRunner, ranks: RankGroup, link: OrchestratorLink, group: str) -> None:
        self._runner = runner
        self._ranks = ranks
        self._link = link
        self._group = group
        """Identifies this start of the ranks."""
        self._data_ranks = runner.base.mesh.data_ranks
        self._generation = 0
        self._run_id: str | None = None
        self._applied = 0
        self._replies: dict[int, commands.DispatchReply] = {}
        self._scatter = runner.sampler.scatter()
        self._written: commands.SnapshotWritten | None = None
        self._unsent = False
        """Whether `_written` has still to be sent to the attached orchestrator."""
        self._executed_s = 0.0
        """How long the last broadcast work took."""
        runner.snapshots.wake = link.wake

    def run(self) -> None:
        """Serve messages until the orchestrator sends a shutdown."""
        running = True
        while running:
            message = self._link.receive()
            if message is not None:
                running = self.run_once(message)
            self.report_snapshot()

    def report_snapshot(self) -> None:
        """Report that a snapshot was written or failed; retry until it is sent. `Attached` carries the last report."""
        done = self._runner.snapshots.take()
        if done is not None:
            failpoint("train.snapshot.before_told")
            self._written = msgspec.structs.replace(done, generation=self._generation)
            self._unsent = True
        if self._unsent and self._written is not None:
            self._unsent = not self._link.send(self._written)

    def run_once(self, message: commands.ToRank) -> bool:
        """Handle one message; False after a shutdown."""
        refusal = self._refusal(message)
        if refusal is not None:
            _log.warning("message_fenced", reason=refusal, generation=message.generation)
            self._link.send(commands.Fenced(self._generation, refusal))
            return True
        match message:
            case commands.Attach(generation, run_id):
                self._generation, self._run_id = generation, run_id
                self._unsent = False
                self._link.send(self._attached())
            case commands.Restore():
                self._link.send(self._restore(message))
            case commands.DispatchCommand():
                self._link.send(self._execute_once(message))
            case commands.RankRequest(_, ask_id, commands.YieldDevices() | commands.TakeDevices() as work):
                self._link.send(self._move(ask_id, work))
            case commands.RankRequest(_, ask_id, work):
                stop = isinstance(work, commands.Shutdown)
                self._ranks.broadcast_header(
                    BroadcastKind.SHUTDOWN if stop else BroadcastKind.HEALTH, [0] * self._ranks.size
                )
                alive = self._ranks.all_gather_int(self._ranks.rank)
                self._link.send(commands.HealthReply(self._generation, ask_id, alive))
                return not stop
            case _:
                assert_never(message)
        return True

    def _move(self, ask_id: int, work: commands.YieldDevices | commands.TakeDevices) -> commands.HealthReply:
        """Leave the devices to engines, or take them again. On an error the ranks are where they were."""
        leaves = isinstance(work, commands.YieldDevices)
        if not leaves:
            _log.info("devices_taken")
        (result,) = self._execute(commands.ManageModel(ops.Sleep() if leaves else ops.Wake()))
        failure = result.message if isinstance(result, ops.Failed) else ""
        if leaves:
            _log.info("devices_yielded", failure=failure)
        return commands.HealthReply(self._generation, ask_id, [*range(self._ranks.size)], failure)

    def _refusal(self, message: commands.ToRank) -> str | None:
        """Says why this message is not handled; None if it is."""
        if message.generation < self._generation:
            return f"generation {message.generation} is over, it is {self._generation} now"
        if isinstance(message, commands.Attach):
            other = self._applied and message.run_id != self._run_id
            return f"these ranks belong to the run {self._run_id!r}" if other else None
        if message.generation > self._generation:
            return "attach first"
        match message:
            case commands.Restore() if self._applied:
                return f"dispatch {self._applied} was applied already: there is nothing to restore"
            # Numbers may have gaps: an aborted dispatch is not replayed to ranks that restart.
            case commands.DispatchCommand(number=number) if number <= self._applied and number not in self._replies:
                return f"the reply of dispatch {number} was durable, and is not kept any longer"
            case _:
                return None

    def _attached(self) -> commands.AttachReply:
        return commands.AttachReply(
            generation=self._generation,
            group=self._group,
            world_size=self._ranks.size,
            data_ranks=self._data_ranks,
            applied=self._applied,
            model=msgspec.structs.replace(self._runner.base.info(), row_tokens=self._runner.memory.row_tokens),
            written=self._written,
            exhausted=self._runner.memory.exhausted,
            version=__version__,
            numerics=self._runner.numerics,
        )

    def _execute_once(self, command: commands.DispatchCommand) -> commands.DispatchReply:
        for number in [number for number in self._replies if number <= command.durable]:
            del self._replies[number]
        if command.number > self._applied:
            name = f"rank {command.work.__struct_config__.tag}"
            with trace.continued(name, command.traceparent, kind="consumer"):
                self._replies[command.number] = self._dispatch(command)
            self._applied = command.number
        reply = self._replies[command.number]
        return msgspec.structs.replace(reply, generation=self._generation)

    def _dispatch(self, command: commands.DispatchCommand) -> commands.DispatchReply:
        started = perf_counter()
        sampled: SliceResult | None = None
        results: Sequence[ops.Result] = ()
        tokens = 0
        match command.work:
            case SamplingSlice() as work:
                sampled = self._sample(work)
                tokens = sampled.sampled_tokens
            case commands.TakeSnapshot() as work:
                results = self._take_snapshot(command.number, work)
            case commands.PassCommand() as work:
                results, tokens = self._pass(work)
            case work:
                results = self._execute(work)
        timing = self._timing(command.work, perf_counter() - started, tokens)
        return commands.DispatchReply(self._generation, command.number, results, timing, sampled)

    def _timing(self, work: commands.Work, total_s: float, tokens: int) -> commands.Timing:
        times = self._runner.times
        is_pass = isinstance(work, commands.PassCommand)
        return commands.Timing(
            total_s=total_s,
            forward_s=times.forward_s if is_pass else 0.0,
            backward_s=times.backward_s if is_pass else 0.0,
            tokens=tokens,
            optimizer_s=self._executed_s if isinstance(work, commands.StepsCommand) else 0.0,
            publish_s=self._executed_s if isinstance(work, commands.Publishing) else 0.0,
        )

    def _restore(self, message: commands.Restore) -> commands.Restored:
        self._broadcast(message)
        try:
            self._runner.restore(Path(message.path), message.digest)
        except StrataError as error:
            damaged = error.code in (Code.CORRUPT, Code.NOT_FOUND)
            return commands.Restored(self._generation, message.number, str(error), damaged=damaged)
        self._applied = message.number
        return commands.Restored(self._generation, message.number)

    def _take_snapshot(self, number: int, work: commands.TakeSnapshot) -> Sequence[ops.Result]:
        self._broadcast(work)
        failure = self._runner.take_snapshot(number, Path(work.path))
        return [] if failure is None else [failure]

    def _broadcast(self, work: BroadcastWork) -> None:
        data = commands.encode(work)
        self._ranks.broadcast_header(BroadcastKind.WORK, [len(data)] * self._ranks.size)
        self._ranks.broadcast(data)

    def _execute(self, work: Executed) -> Sequence[ops.Result]:
        self._broadcast(work)
        started = perf_counter()
        results = self._runner.execute(work)
        self._executed_s = perf_counter() - started
        return results

    def _sample(self, work: SamplingSlice) -> SliceResult:
        """Scatter the sequences of the requests over the ranks, and merge what they sampled."""
        sampler = self._runner.sampler
        parts = [scatter.encode(part) for part in self._scatter.partition(work)]
        self._ranks.broadcast_header(BroadcastKind.SAMPLE, [len(part) for part in parts])
        self._ranks.scatter(parts)
        report = scatter.encode(sampler.run(scatter.decode_slice(parts[0]), self._report_parts))
        reports = [scatter.decode_slice_result(result) for result in self._ranks.gather(report)]
        # Those of the other ranks, which have no link of their own.
        streamed = [part for each in reports for part in each.outcomes.streamed]
        if streamed:
            self._report_parts(streamed)
        return self._scatter.merge(reports)

    def _report_parts(self, parts: Sequence[tuple[str, SampledPart]]) -> None:
        self._link.send(commands.SampleProgress(self._generation, parts))

    def _pass(self, work: commands.PassCommand) -> tuple[Sequence[ops.Result], int]:
        try:
            partitioned = partition.partition_pass(work, self._data_ranks)
        except StrataError as error:
            return [partition.failed(error.code, str(error)) for _ in work.items], 0
        # Adjacent ranks compute the same rows together, and so do those of the other stages.
        parallel = self._runner.settings.parallel
        encoded = [partition.encode(part) for part in partitioned.of_ranks] if self._ranks.size > 1 else []
        parts = [part for part in encoded for _ in range(parallel.row_ranks)] * parallel.pipeline
        self._ranks.broadcast_header(BroadcastKind.PASS, [len(part) for part in parts])
        self._ranks.scatter(parts)
        report = self._runner.forward_backward(partitioned.of_ranks[0])
        if self._ranks.size == 1:
            return partition.merge_reports(partitioned, [report]), partitioned.tokens
        # Of all ranks: one of a tensor group alone may have had no memory for a row.
        others = self._ranks.gather(partition.encode(report))[1:]
        reports = [report, *map(partition.decode_report, others)]
        return partition.merge_reports(partitioned, reports), partitioned.tokens


def _follow_broadcast(runner: ModelRunner, work: BroadcastWork) -> None:
    match work:
        case commands.TakeSnapshot(path):
            runner.take_snapshot(0, Path(path))
        case commands.Restore():
            # The outcome is the same on all ranks, and rank 0 reports it.
            with contextlib.suppress(StrataError):
                runner.restore(Path(work.path), work.digest)
        case _:
            runner.execute(work)


def follow(runner: ModelRunner, ranks: RankGroup) -> None:
    """The loop of every other rank: execute what rank 0 broadcasts, until a shutdown."""
    while True:
        kind, sizes = ranks.receive_header()
        match BroadcastKind(kind):
            case BroadcastKind.WORK:
                work = commands.decode_work(ranks.receive_broadcast(sizes[ranks.rank]))
                assert isinstance(work, BroadcastWork)
                _follow_broadcast(runner, work)
            case BroadcastKind.PASS:
                report = runner.forward_backward(partition.decode_pass(ranks.receive_scatter(sizes)))
                ranks.gather(partition.encode(report))
            case BroadcastKind.SAMPLE:
                time_slice = scatter.decode_slice(ranks.receive_scatter(sizes))
                ranks.gather(scatter.encode(runner.sampler.run(time_slice)))
            case BroadcastKind.HEALTH:
                ranks.all_gather_int(ranks.rank)
            case BroadcastKind.SHUTDOWN:
                ranks.all_gather_int(ranks.rank)
                return
            case unknown:
                assert_never(unknown)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m strata.train.runner", description="One rank of a training server.")
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="The server's settings, TOML.")
    arguments = parser.parse_args()
    settings = load_settings(arguments.settings)
    log.configure(settings.server.log_format or "json", settings.server.log_level, colour=False)
    name_process(f"strata-rank-{process_environment()['RANK']}")
    return run_rank(settings, lambda: None)


class HostRank(NamedTuple):
    """A rank of a server on several hosts: how it meets the others, and its host's files."""

    meet: Callable[[], Store]
    files: HostFiles


def run_rank(settings: ServerSettings, on_ready: Callable[[], object], host: HostRank | None = None) -> int:
    """Join the other ranks and serve until a shutdown; returns the exit status. The environment has this rank."""
    own = runner_settings(settings)
    stop_traces = otel.configure("strata-rank", process_environment())
    try:
        device = join_process_group(own, settings.rendezvous_file, None if host is None else host.meet)
        serve(settings, own, RankGroup(device, None if host is None else host.files), on_ready)
    except StrataError as error:
        _log.error("rank_start_failed", reason=str(error), code=error.code.value)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        stop_traces()
    return 0


def serve(settings: ServerSettings, own: RunnerSettings, ranks: RankGroup, on_ready: Callable[[], object]) -> None:
    if ranks.is_rank0:
        # Missing keys are reported before the model is loaded, which may take long.
        load_keys(settings)
    runner = ModelRunner(own, ranks)
    if not ranks.is_rank0:
        follow(runner, ranks)
        return
    # Only now: an address that accepts connections means that the model is loaded on every rank.
    # The master address of torchrun is that of rank 0's machine.
    link = RankLink(settings, process_environment().get("MASTER_ADDR", ""))
    try:
        _log.info("ranks_ready", endpoint=link.endpoint, ranks=ranks.size, model=own.name)
        on_ready()
        RunnerDispatcher(runner, ranks, link, os.urandom(8).hex()).run()
    finally:
        link.close()
