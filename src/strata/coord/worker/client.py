"""`AsyncWorker`: every call of a training loop (join, run, dataset, shards, barrier, checkpoint, recover, leave), with
how long each waits. The blocking `Worker` is this one in a thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from strata.base import log
from strata.base.clock import Clock
from strata.base.describe import refuse_describe
from strata.base.errors import Code, StrataError
from strata.coord.core.facts import CommandKind
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker import checkpoints, hang_report
from strata.coord.worker.checkpoint_store import MemberCheckpoints
from strata.coord.worker.checkpoints import CheckpointReporter, Manifest, Reported
from strata.coord.worker.commands import Command, OnCommand
from strata.coord.worker.garbage_collector import GarbageCollector, Swept
from strata.coord.worker.leases import Capture, HeldLease
from strata.coord.worker.prefetch import Prefetch
from strata.coord.worker.readers import DatasetReader, MapStyle, Readers
from strata.coord.worker.reasons import RECOVERABLE, Reason, reason_of
from strata.coord.worker.session import ATTEMPT_S, MemberAddress, WorkerSession
from strata.coord.worker.settings import WorkerSettings
from strata.coord.worker.shard import DatasetOptions, Shard, pieces
from strata.coord.worker.step_clock import StepClock, StepTimes
from strata.coord.worker.stores import S3Settings

WAIT_S: Final = 2.0
"""How long one call waits for a shard that others may give back."""
START_BARRIER: Final = "strata/start"

Result = TypeVar("Result")

_log = log.get(__name__)


class AsyncWorker:
    """One worker of a job, between `async with`. The training loop is one task; other tasks may use it too."""

    def __init__(
        self,
        settings: WorkerSettings,
        clock: Clock,
        on_command: OnCommand | None = None,
        s3: S3Settings | None = None,
    ) -> None:
        refuse_describe("AsyncWorker")
        self._session = WorkerSession(settings, clock, on_command, self._flush_returned)
        self._readers = Readers(s3)
        self._store: MemberCheckpoints | None = None
        if settings.fetched_checkpoints is not None:
            self._store = MemberCheckpoints(Path(settings.checkpoint_root), settings.fetched_checkpoints, clock)
        self._garbage = GarbageCollector(settings.checkpoint_root, self._readers.stores, self._store)
        self._checkpoints = CheckpointReporter(self._session, self._store)
        self._prefetch = Prefetch(
            self._session.leases,
            self._prefetch_shards,
            lambda held: self._readers.batches(pieces(held.shard, held.position)),
        )
        self._sources: dict[str, MapStyle] = {}
        self._data_lock = asyncio.Lock()
        """One request for data at a time: each lists the known leases, so no other reply may be on its way."""
        self._datasets: dict[str, pb.DatasetInfo] = {}
        self._finished: dict[str, set[int]] = {}
        self._shards: dict[str, int] = {}
        self._step_clock = StepClock()
        self._start: Manifest | None = None
        self._start_taken = True

    async def __aenter__(self) -> Self:
        begun = False
        try:
            await self._session.start()
            await self._recover_at_start()
            begun = True
        finally:
            if not begun:
                await self._session.close(failed=False, reason="did not join")
        return self

    async def _recover_at_start(self) -> None:
        """Ranked workers also meet, so that all of them start in one generation and from one checkpoint."""
        is_ranked = self._session.settings.rank is not None
        while True:
            try:
                if self._session.recover_first:
                    self._start = await self.recover("start")
                    self._start_taken = self._start is None
                if is_ranked:
                    await self.barrier(START_BARRIER, timeout_s=self._session.settings.patience_s)
            except StrataError as error:
                if not is_ranked or reason_of(error) not in (Reason.MEMBERSHIP_CHANGED, Reason.RANK_DIFFERS):
                    raise
            else:
                return
            # Of an earlier life of a rank, which was not known as dead yet, or of one that was started again.
            await self._session.rejoin_generation()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._prefetch.stop()
        on_purpose = error is None or isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError)
        await self._session.close(failed=not on_purpose, reason="" if error is None else type(error).__name__)

    # Identity

    @property
    def checkpoint_root(self) -> str:
        """Returns where checkpoints are to be written: a folder, or `s3://BUCKET/PREFIX`; empty if nothing is set."""
        return self._session.settings.checkpoint_root

    @property
    def worker_id(self) -> str:
        return self._session.worker_id

    @property
    def job(self) -> str:
        return self._session.job

    @property
    def incarnation(self) -> str:
        return self._session.incarnation

    @property
    def generation(self) -> int:
        return self._session.generation

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def world_size(self) -> int:
        return self._session.world_size

    @property
    def is_stale(self) -> bool:
        """Says whether members are known to have come or gone: the next call raises that, or follows if it is
        elastic."""
        return self._session.is_stale

    async def members(self) -> tuple[MemberAddress, ...]:
        """The workers of the generation with their addresses, in order of rank."""
        return await self._session.members()

    @property
    def run_id(self) -> int:
        """The number of this run of the job, from 1; `strata gang reset` begins the next."""
        return self._session.run_id

    @property
    def parameters(self) -> dict[str, str]:
        """System-wide training parameters of the job."""
        return self._session.parameters

    @property
    def should_stop(self) -> bool:
        """An operator wants this worker to end: no more shards come, and `epochs` ends."""
        return self._session.commands.stopping or self._session.commands.draining

    def commands(self) -> list[Command]:
        """The pending commands for this loop (CHECKPOINT_NOW, RELOAD); taking them acknowledges them."""
        return self._session.commands.take()

    # Where to start

    @property
    def start(self) -> Manifest | None:
        """The checkpoint to load before the first shard; None: start from the beginning.

        A start is a recovery: a process that joins a job with progress rewinds all its workers to this checkpoint.
        """
        self._start_taken = True
        return self._start

    def _check_started(self) -> None:
        if not self._start_taken:
            assert self._start is not None
            raise StrataError(
                Code.PRECONDITION,
                f"job {self.job!r} starts from checkpoint {self._start.checkpoint_id} of step {self._start.step},"
                " and this program has not looked at it: its model would lack everything before",
                hint="load worker.start before the first shard, or use worker.run",
            )

    async def run(self, train: Callable[[Manifest | None], Awaitable[Result]]) -> Result:
        """Call `train` with the checkpoint to load (None: the beginning), and again after every recovery.

        Until it returns, or raises anything else than that members came or went, or that it lost shards. A collective
        that fails because its member was lost counts as that: `train` makes its process group anew.
        """
        start, failure = self.start, ""
        while True:
            try:
                start = await self.recover(failure) if failure else start
                return await train(start)
            except StrataError as error:
                if reason_of(error) not in RECOVERABLE:
                    raise
                failure = error.message
            except RuntimeError as error:
                if not await self.lost_a_member(error):
                    raise
                failure = f"a collective failed: {error!r}"

    async def lost_a_member(self, error: RuntimeError) -> bool:
        """Says whether a collective failed because a member was lost: waits until the coordinator can know that."""
        return hang_report.is_collective_error(error) and await self._session.wait_until_stale()

    # Data

    async def dataset(
        self,
        dataset_id: str,
        files: Sequence[str | Path] = (),
        *,
        samples: int | Sequence[int] | None = None,
        shard_size: int = 0,
        options: DatasetOptions | None = None,
        source: MapStyle | None = None,
    ) -> int:
        """Register a dataset, or confirm that it is registered like this; the number of its shards.

        `samples` are those of all files in order, of the whole dataset if there are no files, or None: count those of
        the files. `source`, instead of files and samples, is a dataset of a library. With nothing but its name, a
        dataset that is registered is meant.
        """
        if source is not None:
            if files or samples is not None:
                raise StrataError(
                    Code.INVALID, f"dataset {dataset_id!r}: a source says itself which samples it has", hint="no files"
                )
            samples = len(source)
            self._sources[dataset_id] = source
        counts = await asyncio.to_thread(_counts, self._readers, files, samples)
        message = pb.DatasetInfo(dataset_id=dataset_id, shard_size=shard_size)
        message.files.extend(
            pb.DatasetFile(path=_place(path), num_samples=count) for path, count in zip(files, counts, strict=True)
        )
        message.num_samples = sum(counts) if files else samples if isinstance(samples, int) else 0
        (options or DatasetOptions()).write(message)
        self._datasets[dataset_id] = message
        return await self._confirm(dataset_id)

    async def _confirm(self, dataset_id: str) -> int:
        def make() -> pb.DatasetInfo:
            message = pb.DatasetInfo()
            message.CopyFrom(self._datasets[dataset_id])
            message.job_id, message.worker_id = self.job, self.worker_id
            message.incarnation = self.incarnation
            return message

        # Workers that start together define it while others still join.
        ack = await self._session.call(lambda stub: stub.AckDataset, make, settled=False)
        self._finished[dataset_id] = set(ack.finished_epochs)
        self._shards[dataset_id] = ack.num_shards
        return ack.num_shards

    def epochs(self, count: int) -> Iterator[int]:
        """The data epochs from 0 that are not finished in all datasets of this worker; ends early on a stop command."""
        for epoch in range(count):
            if self._finished and all(epoch in finished for finished in self._finished.values()):
                continue
            if self.should_stop:
                return
            yield epoch

    async def shards(self, dataset_id: str, epoch: int, *, at_once: int = 1, prefetch: int = 0) -> AsyncIterator[Shard]:
        """The shards of an epoch for this worker, until the workers together have consumed all of them.

        To request the next shard marks the one before as consumed; a shard that the loop left early is not consumed
        and comes again. `at_once` shards are leased together. With `prefetch`, so many of the next ones are leased and
        read ahead meanwhile; no other worker gets them then. One loop for each dataset and epoch at a time.
        """
        self._session.leases.restart(dataset_id, epoch)
        while (shard := await self.next_shard(dataset_id, epoch, at_once=at_once, prefetch=prefetch)) is not None:
            yield shard
            shard.done()

    def reader(self, dataset_id: str) -> DatasetReader:
        """Reads samples of the dataset; it may go to another process."""
        return DatasetReader(self._readers, self._sources.get(dataset_id))

    def restart(self, dataset_id: str, epoch: int) -> None:
        """Starts a loop over `next_shard` from its beginning: what an earlier loop left unfinished comes again."""
        self._session.leases.restart(dataset_id, epoch)

    def is_finished(self, dataset_id: str, epoch: int) -> bool:
        """Says whether the coordinator has reported all samples of the epoch as consumed."""
        return epoch in self._finished.get(dataset_id, ())

    async def next_shard(
        self, dataset_id: str, epoch: int, *, at_once: int = 1, wait: bool = True, prefetch: int = 0
    ) -> Shard | None:
        """The next shard, None at the end of the epoch. `Shard.done` marks the one before as consumed.

        Without `wait` it is also None while this worker or others hold all that is left; see `is_finished`.
        """
        session = self._session
        self._check_started()
        with self._reporting_status(pb.WORKER_STATUS_LOADING_DATA, then=pb.WORKER_STATUS_TRAINING):
            while True:
                await session.sync_generation()
                held = None if session.commands.stopping else await self._next_unread(dataset_id, epoch)
                if held is not None:
                    held.delivered = True
                    if prefetch:
                        self._prefetch.begin(dataset_id, epoch, prefetch)
                    return Shard(held, self.reader(dataset_id), self._prefetch.take(held))
                if self.should_stop:
                    # Leaving acks what is consumed; a request only to ack could bring another shard.
                    return None
                if await self._request_shards(dataset_id, epoch, at_once, wait_s=WAIT_S if wait else 0.0):
                    self._finished.setdefault(dataset_id, set()).add(epoch)
                    return None
                if not wait and session.leases.next_unread(dataset_id, epoch) is None:
                    return None

    async def _next_unread(self, dataset_id: str, epoch: int) -> HeldLease | None:
        if self._session.leases.next_unread(dataset_id, epoch) is None:
            await self._prefetch.arrive()
        return self._session.leases.next_unread(dataset_id, epoch)

    async def _prefetch_shards(self, dataset_id: str, epoch: int, count: int) -> None:
        if not self.should_stop:
            await self._request_shards(dataset_id, epoch, count, wait_s=0.0, ahead=True)

    async def _request_shards(
        self, dataset_id: str, epoch: int, count: int, *, wait_s: float, grant: bool = True, ahead: bool = False
    ) -> bool:
        """Ack and, if `grant`, lease shards; whether the epoch is over. `ahead` of the training loop: one attempt."""
        leases = self._session.leases
        call = self._session.attempt if ahead else self._session.call
        async with self._data_lock:
            resets = leases.resets
            sent = leases.pending_acks(dataset_id)
            known = leases.ids(dataset_id)

            def make() -> pb.ShardRequest:
                return pb.ShardRequest(
                    dataset_id=dataset_id,
                    epoch=epoch,
                    job_id=self.job,
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    generation=self.generation,
                    acks=[each.message for each in sent if not each.held.lost],
                    explicit_acks=True,
                    held_leases=known,
                    max_shards=count,
                    wait_ms=round(wait_s * 1000),
                    acks_only=not grant,
                )

            reply = await call(lambda stub: stub.GetNextShards, make, timeout_s=wait_s + ATTEMPT_S)
            leases.confirm(sent, reply.rejected_leases)
            if leases.resets == resets:
                leases.take(dataset_id, epoch, reply.shards)
        # Acks that a checkpoint holds back keep the epoch open, for the coordinator too.
        return reply.end_of_epoch

    async def step_shards(self, dataset_id: str, step: int) -> list[Shard]:
        """This rank's shards of a global step of a DETERMINISTIC dataset; they need no acks."""
        self._check_started()
        batch = self._datasets[dataset_id].global_batch_shards if dataset_id in self._datasets else 0
        if not batch:
            raise StrataError(
                Code.PRECONDITION, f"{dataset_id!r} is not known to be deterministic", hint="call dataset() first"
            )
        epoch = step // -(-self._shards[dataset_id] // batch)

        def make() -> pb.ShardRequest:
            return pb.ShardRequest(
                dataset_id=dataset_id,
                epoch=epoch,
                job_id=self.job,
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                generation=self.generation,
                explicit_acks=True,
                step=step,
            )

        reply = await self._session.call(lambda stub: stub.GetNextShards, make)
        held = [HeldLease(dataset_id, epoch, each, each.start_index, each.start_index) for each in reply.shards]
        return [Shard(each, self.reader(dataset_id)) for each in held]

    async def flush(self) -> None:
        """Ack what is consumed, now; raises LEASE_LOST if some of it does not count."""
        for dataset_id, epoch in self._session.leases.unacked_epochs():
            await self._request_shards(dataset_id, epoch, 1, wait_s=0.0, grant=False)
        # A heartbeat may have found an eviction before this call; then nothing is left to ack, and nothing counts.
        self._session.check_failure()
        self._session.leases.check()

    async def _flush_returned(self) -> None:
        """Returns leases beside the training loop, which may be slow, or hang: others wait for these leases."""
        try:
            for dataset_id, epoch in self._session.leases.unacked_epochs():
                await self._request_shards(dataset_id, epoch, 1, wait_s=0.0, grant=False, ahead=True)
        except StrataError as error:
            # The loop's next request sends them.
            _log.debug("return_of_leases_failed", code=error.code.value, reason=error.message)

    # Together

    async def barrier(self, barrier_id: str, *, timeout_s: float = 0.0, expected: int = 0) -> None:
        """Wait for all members, or for `expected` of them. An elastic job retries after members joined or left."""
        await self.flush()

        def make() -> pb.BarrierRequest:
            return pb.BarrierRequest(
                barrier_id=barrier_id,
                step=self._session.liveness.step or 0,
                expected_participants=expected,
                job_id=self.job,
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                generation=self.generation,
                timeout_ms=round(timeout_s * 1000),
            )

        began_s = self._session.clock.monotonic_s()
        with self._reporting_status(pb.WORKER_STATUS_IDLE, then=pb.WORKER_STATUS_IDLE):
            while True:
                reply = await self._session.call(lambda stub: stub.Barrier, make, timeout_s=None)
                if reply.released:
                    break
                self._session.mark_stale(reply.generation)
        self._step_clock.waited(self._session.clock.monotonic_s() - began_s)

    def step(self, number: int, *, compute_s: float | None = None) -> None:
        """A global step is finished. A safe point: raises what the loop has to know.

        `compute_s` is what this worker spent on the step itself, without waiting for the others in collectives: by it
        the slow one among workers that step together is found. Workers that meet at a barrier in every step need not
        pass it.
        """
        self._session.liveness.report_step(number, self._step_clock.next(self._session.clock.monotonic_s(), compute_s))
        self._session.check()

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Announce a long phase without steps, such as an evaluation: the worker does not count as hung meanwhile, and
        its next step does not count as slow. The coordinator knows it when this returns, if it can be reached."""
        clock, steps = self._session.clock, self._step_clock
        steps.pause(clock.monotonic_s())
        self._session.liveness.busy += 1
        try:
            await self._session.liveness.announce()
            yield
        finally:
            self._session.liveness.busy -= 1
            steps.resume(clock.monotonic_s())

    # Checkpoints

    async def checkpoint_due(self) -> bool:
        """Says whether an operator wants a checkpoint of the step that `step` has just named: the same on all ranks.

        Call it after every step: a step that no rank has finished is agreed on, and the ranks that reach it wait here
        until all of them have agreed. A drain of one of several ranks begins with such a checkpoint.
        """
        if await self._session.agreement.is_reached():
            return True
        # A lone worker has to agree with nobody.
        waiting = self._session.commands.waiting
        return self.world_size == 1 and any(each.kind is CommandKind.CHECKPOINT_NOW for each in waiting)

    def begin_checkpoint(self, step: int) -> Capture:
        """Take note of what is consumed now; until the report nothing is acked. Inside a shard: `progress` first."""
        return self._checkpoints.begin(step)

    def give_up_checkpoint(self, capture: Capture) -> None:
        """It could not be written: acks go on."""
        self._checkpoints.give_up(capture)

    async def report_checkpoint(
        self, capture: Capture, path: str | Path, *, digest: str | None = None, size: int | None = None
    ) -> Reported:
        """This rank's part is stored. Of a local file, size and digest are read from it unless given."""
        return await self._checkpoints.report(capture, path, digest, size)

    async def checkpoint(
        self,
        step: int,
        path: str | Path,
        *,
        digest: str | None = None,
        size: int | None = None,
        commit_within_s: float | None = None,
    ) -> Reported:
        """Report a part that holds everything consumed so far, and wait until all ranks have reported the same step.

        DEADLINE after `commit_within_s`; 0 does not wait: repeat the report to look. Deletes old parts in the root.
        """
        reported = await self._checkpoints.commit(step, path, digest, size, commit_within_s)
        # A worker that is drained acks what it consumed when it leaves.
        if not reported.committed or self._session.commands.draining:
            return reported
        try:
            self._session.check()
            await self.flush()
        except StrataError as error:
            if reason_of(error) is not Reason.MEMBERSHIP_CHANGED:
                raise
            # The next safe point raises it. A worker that is done has none: the other one was done before it.
            return reported
        if self._session.settings.checkpoint_root:
            await self.sweep(reported)
        return reported

    async def sweep(self, reported: Reported) -> Swept:
        """Delete the old parts that the reply to a report names, if they lie below `checkpoint_root`.

        Before the next part is written: a path that is used again is only then safe.
        """
        return await asyncio.to_thread(self._garbage.collect, reported.tombstones)

    async def recover(self, reason: str = "", *, bad_checkpoint_id: str = "") -> Manifest | None:
        """Rewind all workers to the last committed checkpoint: the one to load, None for the beginning.

        What this worker held is void. If the checkpoint cannot be read, call again and name it as bad.
        """
        session = self._session
        session.liveness.status = pb.WORKER_STATUS_RECOVERING
        await self._prefetch.stop()
        session.leases.clear()
        observed = self.generation

        def make() -> pb.RecoveryRequest:
            return pb.RecoveryRequest(
                job_id=self.job,
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                observed_generation=observed,
                reason=reason,
                bad_checkpoint_id=bad_checkpoint_id,
            )

        while True:
            reply = await session.call(lambda stub: stub.RequestRecovery, make, settled=False)
            if not reply.retry_after_ms:
                break
            await asyncio.sleep(reply.retry_after_ms / 1000)
        session.leases.clear()
        session.adopt(reply.generation, reply.rank, reply.world_size)
        self._step_clock = StepClock()
        session.liveness.step_times = StepTimes()
        self._start_taken = True
        for dataset_id in self._datasets:
            await self._confirm(dataset_id)
        if not reply.HasField("checkpoint"):
            return None
        manifest = checkpoints.manifest(reply.checkpoint)
        return manifest if self._store is None else await self._store.resolve(manifest)

    async def follow(self) -> None:
        """Go on in the current generation with what is held: right where nothing has to be undone."""
        await self._session.rejoin_generation()
        self._session.check()

    @contextmanager
    def _reporting_status(
        self, status: pb.WorkerStatus.ValueType, *, then: pb.WorkerStatus.ValueType
    ) -> Iterator[None]:
        """A checkpoint under way shows through whatever else is done meanwhile."""
        self._session.liveness.status = self._shown(status)
        try:
            yield
        finally:
            self._session.liveness.status = self._shown(then)

    def _shown(self, status: pb.WorkerStatus.ValueType) -> pb.WorkerStatus.ValueType:
        return status if self._session.leases.capture is None else pb.WORKER_STATUS_CHECKPOINTING


def _counts(readers: Readers, files: Sequence[str | Path], samples: int | Sequence[int] | None) -> list[int]:
    if not files:
        return []
    if samples is None:
        return [readers.count(_place(path)) for path in files]
    given = [samples] if isinstance(samples, int) else list(samples)
    if len(given) != len(files):
        raise StrataError(Code.INVALID, f"{len(files)} files need as many numbers of samples, not {len(given)}")
    return given


def _place(path: str | Path) -> str:
    text = os.fspath(path)
    return text if "://" in text else str(Path(text).absolute())
