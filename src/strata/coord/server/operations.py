"""Calls that take more than one decision: they wait for others, or make the contract's words the core's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core import checkpoints, members
from strata.coord.core.facts import Dataset, Verdict
from strata.coord.core.inputs import (
    Ack,
    Arrive,
    Assignment,
    BarrierState,
    Caller,
    CheckpointState,
    CreateJob,
    Issue,
    Issued,
    Leave,
    NextShards,
    Place,
    Recover,
    Recovery,
    Register,
    RegisterDataset,
    Registered,
    Report,
)
from strata.coord.core.ledger import DatasetLedger
from strata.coord.core.state import CoordState, JobState
from strata.coord.server.service import CoordinatorService, not_leading
from strata.coord.server.telemetry import LEFT

PLACE_WAIT_S: Final = 2.0
"""How long a registration waits for the generation it belongs to."""


async def _nothing() -> None:
    pass


async def register(service: CoordinatorService, given: Register) -> tuple[JobState, Place]:
    """Register, and wait for a place; generation 0 if there is none soon."""
    if given.job not in service.state.jobs:
        await service.ask(CreateJob(given.job, service.options.job))
    caller = Caller(given.job, given.worker.worker_id, given.worker.incarnation)
    deadline_s = service.clock.monotonic_s() + PLACE_WAIT_S
    await service.ask(given)
    while True:
        with service.events.subscribe(("formed", given.job)) as formed:
            job = service.state.jobs[given.job]
            members.member_of(job, caller)
            place = members.place_of(job, caller.worker_id)
            # The core may know of a generation that is being written and could still be lost.
            if place.generation and place.generation <= service.watch(given.job).generation:
                service.watch(given.job).unplaced.discard(caller.worker_id)
                return job, place
            left_s = deadline_s - service.clock.monotonic_s()
            if left_s <= 0:
                service.watch(given.job).unplaced.add(caller.worker_id)
                return job, replace(place, generation=0, rank=-1, world_size=0)
            with service.open_call(caller):
                await formed.wait(left_s)
            if formed.cancelled():
                raise not_leading()


def lost_leases(job: JobState, worker_id: str, held: Sequence[int]) -> list[int]:
    """Of the leases a worker says it holds, those that are not its own. What it acked is consumed, not lost."""
    own = {
        lease_id
        for dataset in job.datasets.values()
        for ledger in dataset.epochs.values()
        for lease_id in ledger.held.get(worker_id, ())
    }
    member = job.members.get(worker_id)
    own.update(member.acked if member else ())
    return [lease_id for lease_id in held if lease_id not in own]


async def next_shards(service: CoordinatorService, given: NextShards, wait_s: float) -> Assignment:
    """Ack and ask; if there is nothing now but may be later, wait for it."""
    deadline_s = service.clock.monotonic_s() + wait_s
    given, stale = await _ack_other_epochs(service, given)
    found = (await service.ask(given)).reply
    assert isinstance(found, Assignment)
    if found.leases or found.end_of_epoch or wait_s <= 0:
        return replace(found, stale=(*stale, *found.stale)) if stale else found
    return await _wait_for_shards(service, given, (*stale, *found.stale), deadline_s)


async def _wait_for_shards(
    service: CoordinatorService, given: NextShards, stale: tuple[int, ...], deadline_s: float
) -> Assignment:
    # What was acked is acked.
    given = replace(given, acks=())
    while True:
        with service.events.subscribe(("data", given.caller.job)) as moved:
            try:
                found = (await service.ask(given)).reply
            except StrataError as error:
                # What may free shards is often the loss of a worker, and then a new generation has to form first.
                if not (service.leads and error.code is Code.UNAVAILABLE):
                    raise
                found = Assignment((), end_of_epoch=False, stale=())
            assert isinstance(found, Assignment)
            left_s = deadline_s - service.clock.monotonic_s()
            if found.leases or found.end_of_epoch or left_s <= 0:
                return replace(found, stale=stale)
            with service.open_call(given.caller):
                await moved.wait(left_s)
            if moved.cancelled():
                raise not_leading()


async def _ack_other_epochs(service: CoordinatorService, given: NextShards) -> tuple[NextShards, tuple[int, ...]]:
    """The core acks within one epoch; a worker may ack the last shard of one when it asks for the first of the next."""
    job = service.state.jobs.get(given.caller.job)
    dataset = job.datasets.get(given.dataset_id) if job else None
    if dataset is None or not given.acks or dataset.epochs.keys() <= {given.epoch}:
        return given, ()
    stale: tuple[int, ...] = ()
    for epoch, acks in _by_epoch(dataset, given.caller.worker_id, given.acks).items():
        if epoch != given.epoch:
            stale += await _ack_only(service, replace(given, epoch=epoch, acks=acks), dataset)
            given = replace(given, acks=tuple(ack for ack in given.acks if ack not in acks))
    return given, stale


def _by_epoch(dataset: DatasetLedger, worker_id: str, acks: Sequence[Ack]) -> dict[int, tuple[Ack, ...]]:
    found: dict[int, tuple[Ack, ...]] = {}
    for ack in acks:
        for epoch, ledger in dataset.epochs.items():
            if ack.lease_id in ledger.held.get(worker_id, ()):
                found[epoch] = (*found.get(epoch, ()), ack)
    return found


async def _ack_only(service: CoordinatorService, given: NextShards, dataset: DatasetLedger) -> tuple[int, ...]:
    ledger = dataset.epochs.get(given.epoch)
    held = tuple(ledger.held.get(given.caller.worker_id, ())) if ledger else ()
    found = (await service.ask(replace(given, count=0, held=held))).reply
    assert isinstance(found, Assignment)
    return found.stale


async def confirm_dataset(
    service: CoordinatorService,
    caller: Caller,
    dataset_id: str,
    define: Callable[[Dataset | None], Dataset | None],
) -> tuple[Registered, DatasetLedger]:
    """`define` makes the caller's definition, given the registered one for what it leaves open; None: no definition."""

    def given(state: CoordState) -> RegisterDataset:
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

    found = (await service.ask(given)).reply
    assert isinstance(found, Registered)
    return found, service.state.jobs[caller.job].datasets[dataset_id]


async def arrive(
    service: CoordinatorService, given: Arrive, *, wait: bool, on_wait: Callable[[], Awaitable[None]] = _nothing
) -> BarrierState:
    """Arrive, and wait for the verdict. A timed out barrier is an error only to those who waited.

    `on_wait`: what can be done while the others are awaited need not be done when all are released at once.
    """
    caller = given.caller
    job = service.state.jobs.get(caller.job)
    generation = caller.generation or (job.generation if job else 0)
    # Asked for by its number: while we wait to be decided, the current generation may become another one.
    given = replace(given, caller=replace(caller, generation=generation))
    with service.barriers.subscribe((caller.job, generation, given.barrier_id)) as decided:
        found = (await service.ask(given)).reply
        assert isinstance(found, BarrierState)
        watch = service.watch(caller.job)
        watch.name_step(caller.worker_id, given.step)
        if found.verdict is None:
            if not decided.done():
                watch.opened_s.setdefault(given.barrier_id, service.clock.monotonic_s())
            if not wait:
                return found
            with service.open_call(caller):
                await on_wait()
                if not await decided.wait():
                    raise not_leading()
            found = decided.result()
    if found.verdict is Verdict.TIMED_OUT and wait:
        missing = ", ".join(found.missing) or "nobody"
        raise StrataError(Code.DEADLINE, f"barrier {given.barrier_id!r} timed out; missing: {missing}")
    if found.verdict is Verdict.MEMBERSHIP_CHANGED:
        return replace(found, generation=service.watch(caller.job).generation)
    return found


async def report(
    service: CoordinatorService, caller: Caller, make: Callable[[JobState], Report]
) -> tuple[CheckpointState, int]:
    """How the checkpoint stands, and its step. `make` takes from the job what the caller leaves open."""
    made: list[Report] = []

    def given(state: CoordState) -> Report:
        job = members.job_of(state, caller)
        found = make(job)
        found = replace(found, checkpoint_id=_shared_id(job, found))
        is_committed = job.checkpoint(found.checkpoint_id) is not None
        checkpoints.reporting_member(job, caller, is_committed=is_committed)
        made.append(found)
        return made[-1]

    reply = (await service.ask(given)).reply
    assert isinstance(reply, CheckpointState)
    return reply, made[-1].step


def _shared_id(job: JobState, given: Report) -> str:
    """The ranks may have an id each: a checkpoint is one step of one generation, under the id that came first."""
    for collecting in job.collecting.values():
        if (collecting.generation, collecting.step) == (job.generation, given.step):
            return collecting.checkpoint_id
    for done in reversed(job.checkpoints):
        # One part for each rank, in their order.
        same = done.parts[given.part.rank : given.part.rank + 1] == (given.part,)
        if (done.generation, done.step) == (job.generation, given.step) and same:
            return done.checkpoint_id
    return given.checkpoint_id


async def recover(service: CoordinatorService, given: Recover) -> Recovery:
    def observed(state: CoordState) -> Recover:
        job = members.job_of(state, given.caller)
        return replace(given, observed_generation=given.observed_generation or job.generation)

    reply = (await service.ask(observed)).reply
    assert isinstance(reply, Recovery)
    return reply


async def leave(
    service: CoordinatorService, caller: Caller, reason: str, acks: Sequence[Ack], *, finished: bool = False
) -> tuple[int, list[int]]:
    """The last generation that the worker was in, and the acks that did not count."""
    job = members.job_of(service.state, caller)
    rejected = {ack.lease_id for ack in acks}
    if caller.worker_id in job.members:
        members.member_of(job, caller)
        for dataset_id, dataset in job.datasets.items():
            for epoch, some in _by_epoch(dataset, caller.worker_id, acks).items():
                given = NextShards(caller, dataset_id, epoch, acks=some)
                rejected -= {ack.lease_id for ack in some}
                rejected.update(await _ack_only(service, given, dataset))
    # A program that lost some of what it consumed is not done, whatever it says.
    await service.ask(Leave(caller, f"{LEFT}: {reason}" if reason else LEFT, finished and not rejected))
    return service.watch(caller.job).generation, sorted(rejected)


async def issue(service: CoordinatorService, given: Issue) -> tuple[int, tuple[str, ...]]:
    """The command's id and who gets it. The same request id again is the same command, whoever leads by then."""
    reply = (await service.ask(given)).reply
    assert isinstance(reply, Issued)
    return reply.command_id, reply.workers
