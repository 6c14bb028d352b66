"""The client behind `strata gang`: calls to the coordinator with their timeouts and retries, views and watches of a job
(lost after 6 s of silence), commands to its workers, and the settings `[gang]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Final, Self, TypeAlias

import grpc
import msgspec
from google.protobuf.message import Message

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.base.loopback import is_loopback_address
from strata.base.settings import Secret
from strata.coord.core.facts import CommandKind
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.view import (
    GangEventsView,
    GoodputView,
    JobPageView,
    JobSummaryView,
    JobView,
    LaneSpanView,
    WorkerView,
)
from strata.coord.worker.link import CoordinatorLink, Deadline, Reply, Request, UnaryCall, to_strata_error
from strata.coord.worker.settings import Tls, WorkerSettings

SECTION: Final = "gang"
ATTEMPT_S: Final = 2.0
"""A reply that takes longer than this got lost."""
TOGETHER_MS: Final = 200
"""Changes within this time are coalesced."""
SILENT_S: Final = 6.0
"""A coordinator sends a view at least every two seconds: one that is silent for this long is frozen or gone."""

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
Descriptor: TypeAlias = Any
"""A descriptor of a field or an enum: protobuf has two implementations without a common type."""


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    address: str = "127.0.0.1:7070"
    """HOST:PORT of the coordinator; of several, with commas between, one leads and the others stand by."""
    job: str = ""
    """Empty: what the token says, else `default`."""
    token: Secret | None = None
    """The token of an operator."""
    tls: Tls | None = None
    patience_s: PositiveSeconds = 3.0
    """How long to try before the coordinator counts as unreachable; a takeover by a standby fits in."""

    def __post_init__(self) -> None:
        addresses = [each.strip() for each in self.address.split(",") if each.strip()]
        if not addresses:
            raise StrataError(Code.INVALID, "the address of the coordinator is empty")
        away = [each for each in addresses if not is_loopback_address(each)]
        if self.token is not None and self.tls is None and away:
            raise StrataError(
                Code.INVALID, f"the token would be sent to {away[0]} in the clear", hint=f"set {SECTION}.tls.ca"
            )


@dataclass(frozen=True)
class ConnectionLost:
    """No coordinator replies now; the last view may be out of date. The watch keeps retrying."""

    reason: str
    attempt: int
    """The number of the attempt since the last reply, from 1."""


@dataclass(frozen=True)
class CommandReceipt:
    command_id: int
    worker_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerPage:
    """Selects the workers of a job to describe."""

    limit: int = 50
    offset: int = 0
    search: str = ""
    attention_first: bool = False
    """Those first that a person may have to look at."""
    lanes: bool = False
    """Whether to include what they did over the last hour."""


class Operator:
    """One job through one coordinator, between `async with`."""

    def __init__(self, settings: OperatorSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._ids = Ids(clock)
        same = WorkerSettings(address=settings.address, job=settings.job, token=settings.token, tls=settings.tls)
        self._link = CoordinatorLink(same, "", clock)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._link.close()

    async def job(self, history: int = 0) -> JobView:
        """The job now. `history`: how many checkpoints and incidents; 0: as many as is useful."""
        request = pb.GetJobRequest(history_limit=history)
        return job_view((await self._call(lambda stub: stub.GetJob, request)).job)

    async def page(self, page: WorkerPage) -> JobPageView:
        """The job with some of its workers: for a view that must not grow with the job."""
        request = pb.GetJobRequest(
            worker_limit=page.limit,
            worker_offset=page.offset,
            worker_order=pb.WORKER_ORDER_ATTENTION if page.attention_first else pb.WORKER_ORDER_UNSPECIFIED,
            worker_search=page.search,
            lanes=page.lanes,
        )
        reply = await self._call(lambda stub: stub.GetJob, request)
        times = reply.lane_times_unix_ms
        lanes = [{"worker_id": each.worker_id, "spans": _spans(times, each.states)} for each in reply.lanes]
        known = {"lanes_start_unix_ms": times[0] if times else None, "lanes": lanes}
        return msgspec.convert(message_to_dict(reply) | known, JobPageView)

    async def goodput(self) -> GoodputView | None:
        """Returns how the time of the current run was spent; None from a coordinator that does not count it."""
        return (await self.page(WorkerPage(limit=1))).goodput

    async def events(
        self, kinds: Collection[str] = (), search: str = "", before: int = 0, limit: int = 0
    ) -> GangEventsView:
        """Returns what happened to the job, the latest first. `before`: the `next_before` of the page before this
        one."""
        request = pb.ListEventsRequest(kinds=map(_event_kind, kinds), search=search, before=before, limit=limit)
        found = await self._call(lambda stub: stub.ListEvents, request)
        return msgspec.convert(message_to_dict(found), GangEventsView)

    async def watch(self, history: int = 0) -> AsyncGenerator[JobView | ConnectionLost, None]:
        """The job now and after every change, for ever: restarts and failovers are reported as `ConnectionLost`."""
        attempt = 0
        until_s: float | None = self._clock.monotonic_s() + self._settings.patience_s
        while True:
            index = self._link.index
            try:
                async with aclosing(self._changes(history)) as changes:
                    async for view in changes:
                        attempt, until_s = 0, None
                        yield view
            except grpc.aio.AioRpcError as error:
                failure = to_strata_error(error)
                if failure.code is Code.UNAUTHENTICATED and self._link.reload_token():
                    continue
            except TimeoutError:
                failure = StrataError(Code.UNAVAILABLE, f"nothing was heard of it for {SILENT_S:g} s")
            else:
                failure = StrataError(Code.UNAVAILABLE, "it ended the connection")
            if not self._may_pass(failure, until_s):
                raise self._explained(failure)
            attempt += 1
            yield ConnectionLost(_why(failure), attempt)
            self._link.fail_over(index)
            await self._clock.sleep(self._link.backoff_s(attempt))

    def _may_pass(self, failure: StrataError, until_s: float | None) -> bool:
        """Says whether to connect again: always to a coordinator that was reached once."""
        if failure.code not in (Code.UNAVAILABLE, Code.EXHAUSTED):
            return False
        return until_s is None or self._clock.monotonic_s() <= until_s

    async def issue(
        self, kind: CommandKind, workers: tuple[str, ...], reason: str, arguments: Mapping[str, str] | None = None
    ) -> CommandReceipt:
        """No workers: all members. Retried if the reply got lost; the request id makes it idempotent."""
        request = pb.IssueCommandRequest(
            worker_ids=workers,
            kind=pb.CommandKind.ValueType(kind.value),
            arguments=dict(arguments or {}),
            reason=reason,
            request_id=self._ids.new("order"),
        )
        found = await self._call(lambda stub: stub.IssueCommand, request)
        return CommandReceipt(found.command_id, tuple(found.worker_ids))

    async def jobs(self) -> tuple[JobSummaryView, ...]:
        """All that the token allows."""
        found = await self._call(lambda stub: stub.ListJobs, pb.ListJobsRequest())
        return tuple(map(summary_view, found.jobs))

    async def create(self, **fields: Any) -> JobSummaryView:
        """Create the job with these fields of the contract; others are as the coordinator is configured."""
        request = pb.CreateJobRequest(**fields)
        return summary_view((await self._call(lambda stub: stub.CreateJob, request)).job)

    async def update(self, **fields: Any) -> JobSummaryView:
        """Change these fields of the contract; others stay."""
        request = pb.UpdateJobRequest(**fields)
        return summary_view((await self._call(lambda stub: stub.UpdateJob, request)).job)

    async def reset(self) -> JobSummaryView:
        """Another run, from the beginning. Names the run that it ends: sent again, it ends no other."""
        run = (await self.job(1)).run
        return summary_view((await self._call(lambda stub: stub.ResetJob, pb.ResetJobRequest(run=run))).job)

    async def delete(self) -> None:
        await self._call(lambda stub: stub.DeleteJob, pb.DeleteJobRequest())

    async def _call(
        self, method: Callable[[pb_grpc.CoordinatorAsyncStub], UnaryCall[Request, Reply]], request: Request
    ) -> Reply:
        try:
            return await self._link.call(method, request, self._deadline)
        except StrataError as error:
            raise self._explained(error) from None

    @property
    def _deadline(self) -> Deadline:
        return Deadline(ATTEMPT_S, self._settings.patience_s)

    async def _changes(self, history: int) -> AsyncGenerator[JobView, None]:
        """Yield views until the connection breaks; TimeoutError if it is only silent. TimeoutError if it is only
        silent."""
        request = pb.WatchJobRequest(history_limit=history, min_interval_ms=TOGETHER_MS, deltas=True)
        view: JobView | None = None
        call = self._link.stub().WatchJob(request, metadata=self._link.metadata)
        try:
            while True:
                # Not a deadline of the call: that would end a watch that is well.
                async with asyncio.timeout(SILENT_S):
                    message = await call.read()
                if not isinstance(message, pb.WatchJobResponse):
                    return
                # A coordinator that knows no changes sends the whole job each time.
                if view is not None and message.HasField("change"):
                    view = changed_view(view, message.change)
                else:
                    view = job_view(message.job)
                yield view
        finally:
            call.cancel()

    def _explained(self, error: StrataError) -> StrataError:
        """Returns what happened, where, and what to do about it in terms of the settings."""
        at = f"the coordinator at {self._settings.address}"
        hint: str | None = None
        match error.code:
            case Code.UNAVAILABLE:
                message = f"cannot reach {at}: {_why(error)}"
                hint = "is 'strata coordinator' running there, with the same TLS? see --address, --tls-ca"
            case Code.UNAUTHENTICATED:
                message = f"{at} refused us: {error.message}"
                hint = (
                    "name the file of a token with --token-file;"
                    " 'strata coordinator token --role operator --job JOB' prints one"
                )
            case Code.FORBIDDEN:
                message = f"{at} refused us: {error.message}"
                hint = "a token is good for one job and one role; commands need the role operator"
            case Code.NOT_FOUND:
                message = f"{at} says: {error.message}"
                hint = "a job is there from the first registration of a worker on; is the name right?"
            case _:
                message = f"{at} says: {error.message}"
        return StrataError(error.code, message, hint=hint, **error.detail)


def _why(error: StrataError) -> str:
    """The last cause, without the prefix that gRPC gives every failed connection."""
    return error.message.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")


def job_view(message: pb.JobState) -> JobView:
    return msgspec.convert(message_to_dict(message), JobView)


def changed_view(before: JobView, change: pb.JobChange) -> JobView:
    """The view after a change. Only what the change has is read."""
    replaced = frozenset(change.replaced_fields)
    values = {
        field.name: _value(change.job, field)
        for field in change.job.DESCRIPTOR.fields
        if field.name != "workers" and (not field.is_repeated or field.number in replaced)
    }
    part = msgspec.convert({**_EMPTY, **values}, JobView)
    workers = {each.worker_id: each for each in before.workers}
    workers.update((each.worker_id, msgspec.convert(message_to_dict(each), WorkerView)) for each in change.job.workers)
    found = {name: getattr(part, name) for name in values}
    return msgspec.structs.replace(before, **found, workers=tuple(sorted(workers.values(), key=_place)))


_EMPTY: Final[Mapping[str, Any]] = {
    "workers": (),
    "datasets": (),
    "barriers": (),
    "checkpoints": (),
    "incidents": (),
    "commands": (),
    "refused_commands": (),
    "training_parameters": {},
}


def _spans(times: Sequence[int], states: bytes) -> list[LaneSpanView]:
    """Samples with the same state in a row are one span, which lasts until the next one begins."""
    spans: list[LaneSpanView] = []
    for state, group in groupby(range(len(states)), key=states.__getitem__):
        indices = list(group)
        name = _name(pb.WorkerStatus.DESCRIPTOR, state)
        if name is not None:
            end_ms = times[min(indices[-1] + 1, len(times) - 1)]
            spans.append(LaneSpanView(status=name, start_unix_ms=times[indices[0]], end_unix_ms=end_ms))
    return spans


def _place(worker: WorkerView) -> tuple[bool, bool, int]:
    """Members in order of rank, then those that wait, then those that are gone."""
    return worker.is_gone, worker.rank is None, worker.rank or 0


def _event_kind(name: str) -> pb.EventKind.ValueType:
    known = {each.removeprefix("EVENT_KIND_"): number for each, number in pb.EventKind.items() if number}
    if name.upper() not in known:
        raise StrataError(
            Code.INVALID, f"{name!r} is no kind of event", hint=f"one of {', '.join(sorted(known)).lower()}"
        )
    return known[name.upper()]


def summary_view(message: pb.JobSummary) -> JobSummaryView:
    return msgspec.convert(message_to_dict(message), JobSummaryView)


def message_to_dict(message: Message) -> dict[str, Any]:
    """Every field, also those that are 0 or empty; one that may be absent and is, is None."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Descriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_single(each, field) for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(value, field)


def _single(value: Any, field: Descriptor) -> Any:
    if field.message_type is not None:
        return message_to_dict(value)
    if field.enum_type is not None:
        return _name(field.enum_type, value)
    return value


def _name(enum: Descriptor, number: int) -> str | None:
    """`TRAINING` for WORKER_STATUS_TRAINING; None for what was not said. A later coordinator may know more values."""
    if number == 0:
        return None
    known = enum.values_by_number.get(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(known.name).removeprefix(prefix) if known is not None else f"UNKNOWN_{number}"
