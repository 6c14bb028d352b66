"""Calls that take more than one decision: how register, next shards, barriers, checkpoint reports and recovery wait for
other workers, and how long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.notify import Notification
from strata.coord.core import checkpoints, members
from strata.coord.core.facts import BarrierVerdict, Dataset, barrier_timeout_message
from strata.coord.core.history import LEFT
from strata.coord.core.inputs import (
    Ack,
    ArriveAtBarrier,
    BarrierState,
    Caller,
    CheckpointState,
    CreateJob,
    DatasetRegistration,
    IssueCommand,
    IssuedCommand,
    Leave,
    NextShards,
    RankAssignment,
    Recovery,
    Register,
    RegisterDataset,
    ReportCheckpoint,
    RequestRecovery,
    ShardAssignment,
)
from strata.coord.core.ledger import DatasetLedger
from strata.coord.core.state import CoordState, JobState
from strata.coord.server.service import CoordinatorService, not_leading

RANK_WAIT_S: Final = 2.0
"""How long a registration waits for its generation to form."""


async def _nothing() -> None:
    pass


async def register(service: CoordinatorService, request: Register) -> tuple[JobState, RankAssignment]:
    """Register, and wait for a rank; generation 0 if no generation forms soon."""
    if request.job not in service.state.jobs:
        await service.submit(CreateJob(request.job, service.settings.job))
    caller = Caller(request.job, request.worker.worker_id, request.worker.incarnation)
    deadline_s = service.clock.monotonic_s() + RANK_WAIT_S
    await service.submit(request)
    while True:
        with service.notifier.events.subscribe(("formed", request.job)) as formed:
            job = service.state.jobs[request.job]
            members.member_of(job, caller)
            assignment = members.rank_of(job, caller.worker_id)
            # The core's generation may not be durable yet, and could still be lost.
            if assignment.generation and assignment.generation <= service.telemetry.of(request.job).generation:
                service.telemetry.of(request.job).awaiting_rank.discard(caller.worker_id)
                return job, assignment
            left_s = deadline_s - service.clock.monotonic_s()
            if left_s <= 0:
                service.telemetry.of(request.job).awaiting_rank.add(caller.worker_id)
                return job, replace(assignment, generation=0, rank=-1, world_size=0)
            with service.open_call(caller):
                await formed.wait(left_s)
            if formed.cancelled():
                raise not_leading()


def lost_leases(job: JobState, worker_id: str, held: Sequence[int]) -> list[int]:
    """Returns the leases that a worker reports to hold and that are not its own. What it acked is consumed, not
    lost."""
    own = {
        lease_id
        for dataset in job.datasets.values()
        for ledger in dataset.epochs.values()
        for lease_id in ledger.held.get(worker_id, ())
    }
    member = job.members.get(worker_id)
    own.update(member.acked if member else ())
    return [lease_id for lease_id in held if lease_id not in own]


async def next_shards(service: CoordinatorService, request: NextShards, wait_s: float) -> ShardAssignment:
    """Ack and lease; if no shard is free now but one may be later, wait for it."""
    deadline_s = service.clock.monotonic_s() + wait_s
    request, stale = await _ack_other_epochs(service, request)
    reply = (await service.submit(request)).reply
    assert isinstance(reply, ShardAssignment)
    if reply.leases or reply.end_of_epoch or wait_s <= 0:
        return replace(reply, stale=(*stale, *reply.stale)) if stale else reply
    return await _wait_for_shards(service, request, (*stale, *reply.stale), deadline_s)


async def _wait_for_shards(
    service: CoordinatorService, request: NextShards, stale: tuple[int, ...], deadline_s: float
) -> ShardAssignment:
    # The acks were applied by the first attempt.
    request = replace(request, acks=())
    while True:
        with service.notifier.events.subscribe(("data", request.caller.job)) as data_event:
            try:
                reply = (await service.submit(request)).reply
            except StrataError as error:
                # Shards are often freed by an eviction, and then a new generation has to form first.
                if not (service.leads and error.code is Code.UNAVAILABLE):
                    raise
                reply = ShardAssignment((), end_of_epoch=False, stale=())
            assert isinstance(reply, ShardAssignment)
            left_s = deadline_s - service.clock.monotonic_s()
            if reply.leases or reply.end_of_epoch or left_s <= 0:
                return replace(reply, stale=stale)
            with service.open_call(request.caller):
                await data_event.wait(left_s)
            if data_event.cancelled():
                raise not_leading()


async def _ack_other_epochs(service: CoordinatorService, request: NextShards) -> tuple[NextShards, tuple[int, ...]]:
    """The core acks within one data epoch; a worker may ack the last shard of one when it requests the next."""
    job = service.state.jobs.get(request.caller.job)
    dataset = job.datasets.get(request.dataset_id) if job else None
    if dataset is None or not request.acks or dataset.epochs.keys() <= {request.data_epoch}:
        return request, ()
    stale: tuple[int, ...] = ()
    for epoch, acks in _by_epoch(dataset, request.caller.worker_id, request.acks).items():
        if epoch != request.data_epoch:
            stale += await _ack_only(service, replace(request, data_epoch=epoch, acks=acks), dataset)
            request = replace(request, acks=tuple(ack for ack in request.acks if ack not in acks))
    return request, stale


def _by_epoch(dataset: DatasetLedger, worker_id: str, acks: Sequence[Ack]) -> dict[int, tuple[Ack, ...]]:
    by_epoch: dict[int, tuple[Ack, ...]] = {}
    for ack in acks:
        for epoch, ledger in dataset.epochs.items():
            if ack.lease_id in ledger.held.get(worker_id, ()):
                by_epoch[epoch] = (*by_epoch.get(epoch, ()), ack)
    return by_epoch


async def _ack_only(service: CoordinatorService, request: NextShards, dataset: DatasetLedger) -> tuple[int, ...]:
    ledger = dataset.epochs.get(request.data_epoch)
    held = tuple(ledger.held.get(request.caller.worker_id, ())) if ledger else ()
    reply = (await service.submit(replace(request, count=0, held=held))).reply
    assert isinstance(reply, ShardAssignment)
    return reply.stale


async def confirm_dataset(
    service: CoordinatorService,
    caller: Caller,
    dataset_id: str,
    define: Callable[[Dataset | None], Dataset | None],
) -> tuple[DatasetRegistration, DatasetLedger]:
    """`define` makes the caller's definition from the registered one, for what it leaves open; None: no definition."""

    def request(state: CoordState) -> RegisterDataset:
        job = members.job_of(state, caller)
        members.member_of(job, caller)
        known = job.datasets.get(dataset_id)
        wanted = define(known.dataset if known else None) or (known.dataset if known else None)
        if wanted is None:
            raise StrataError(
                Code.NOT_FOUND,
                f"job {caller.job!r} has no dataset {dataset_id!r}",
                hint="define it: files or samples",
                reason="unknown-dataset",
            )
        return RegisterDataset(caller, wanted)

    reply = (await service.submit(request)).reply
    assert isinstance(reply, DatasetRegistration)
    return reply, service.state.jobs[caller.job].datasets[dataset_id]


async def arrive(
    service: CoordinatorService,
    request: ArriveAtBarrier,
    *,
    wait: bool,
    on_wait: Callable[[], Awaitable[None]] = _nothing,
) -> BarrierState:
    """Arrive, and wait for the verdict. A timed out barrier is an error only to the callers that waited.

    `on_wait` runs before the waiting, and not at all if this arrival releases the barrier.
    """
    caller = request.caller
    job = service.state.jobs.get(caller.job)
    generation = caller.generation or (job.generation if job else 0)
    # By its number: while this call waits, the current generation may become another one.
    request = replace(request, caller=replace(caller, generation=generation))
    with service.notifier.barriers.subscribe((caller.job, generation, request.barrier_id)) as decided:
        state = (await service.submit(request)).reply
        assert isinstance(state, BarrierState)
        service.telemetry.of(caller.job).record_step(caller.worker_id, request.step)
        if state.verdict is None and wait:
            with service.open_call(caller):
                await on_wait()
                state = await _verdict(decided)
    if state.verdict is BarrierVerdict.TIMED_OUT and wait:
        raise StrataError(Code.DEADLINE, barrier_timeout_message(request.barrier_id, state.missing))
    if state.verdict is BarrierVerdict.MEMBERSHIP_CHANGED:
        return replace(state, generation=service.telemetry.of(caller.job).generation)
    return state


async def _verdict(decided: Notification[BarrierState]) -> BarrierState:
    if not await decided.wait():
        raise not_leading()
    return decided.result()


async def report(
    service: CoordinatorService, caller: Caller, make: Callable[[JobState], ReportCheckpoint]
) -> tuple[CheckpointState, int]:
    """The state of the checkpoint, and its step. `make` takes from the job what the caller leaves open."""
    reports: list[ReportCheckpoint] = []

    def request(state: CoordState) -> ReportCheckpoint:
        job = members.job_of(state, caller)
        report = make(job)
        report = replace(report, checkpoint_id=_shared_id(job, report))
        checkpoints.reporting_member(job, report, job.checkpoint(report.checkpoint_id))
        reports.append(report)
        return report

    reply = (await service.submit(request)).reply
    assert isinstance(reply, CheckpointState)
    return reply, reports[-1].step


def _shared_id(job: JobState, request: ReportCheckpoint) -> str:
    """Each rank may send an id of its own: a checkpoint is one step of one generation, under the id that came first."""
    generation = request.caller.generation or job.generation
    for collecting in job.collecting.values():
        if (collecting.generation, collecting.step) == (generation, request.step):
            return collecting.checkpoint_id
    for done in reversed(job.checkpoints):
        # One part for each rank, in their order.
        same = done.parts[request.part.rank : request.part.rank + 1] == (request.part,)
        if (done.generation, done.step) == (generation, request.step) and same:
            return done.checkpoint_id
    return request.checkpoint_id


async def recover(service: CoordinatorService, request: RequestRecovery) -> Recovery:
    def observed(state: CoordState) -> RequestRecovery:
        job = members.job_of(state, request.caller)
        return replace(request, observed_generation=request.observed_generation or job.generation)

    reply = (await service.submit(observed)).reply
    assert isinstance(reply, Recovery)
    return reply


async def leave(
    service: CoordinatorService, caller: Caller, reason: str, acks: Sequence[Ack], *, finished: bool = False
) -> tuple[int, list[int]]:
    """The last generation that the worker was in, and the rejected acks."""
    job = members.job_of(service.state, caller)
    rejected = {ack.lease_id for ack in acks}
    if caller.worker_id in job.members:
        members.member_of(job, caller)
        for dataset_id, dataset in job.datasets.items():
            for epoch, some in _by_epoch(dataset, caller.worker_id, acks).items():
                request = NextShards(caller, dataset_id, epoch, acks=some, leaving=True)
                rejected -= {ack.lease_id for ack in some}
                rejected.update(await _ack_only(service, request, dataset))
    # A program that lost some of what it consumed is not finished, whatever it reports.
    await service.submit(Leave(caller, f"{LEFT}: {reason}" if reason else LEFT, finished and not rejected))
    return service.telemetry.of(caller.job).generation, sorted(rejected)


async def issue(service: CoordinatorService, request: IssueCommand) -> tuple[int, tuple[str, ...]]:
    """The command's id and its workers. Idempotent: the same request id is the same command, also after a failover."""
    reply = (await service.submit(request)).reply
    assert isinstance(reply, IssuedCommand)
    return reply.command_id, reply.workers
