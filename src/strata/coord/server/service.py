"""The coordinator of one partition: the loop that leads its stream, ticks (every 0.1 s), gathers and decides requests
one at a time, notifies waiters, drains and gives leadership away.

It knows the core's types only. `operations` waits for outcomes; `servicer` translates from and to protobuf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.ids import Ids
from strata.base.loop import every
from strata.coord.core.facts import CommandKind, GenerationFormed
from strata.coord.core.inputs import CallClosed, Caller, CallOpened, Heartbeat, Input, IssueCommand, Outcome, Tick
from strata.coord.core.machine import CoordMachine
from strata.coord.core.state import CoordState
from strata.coord.metrics import CoordinatorMetrics
from strata.coord.server.commit_notifier import CommitNotifier
from strata.coord.server.event_log import log_events
from strata.coord.server.telemetry import CoordinatorTelemetry
from strata.coord.settings import CoordinatorSettings
from strata.journal.failover import RETRY_AFTER_S
from strata.journal.group_commit import WriterLimits
from strata.journal.port import Journal
from strata.journal.replica import Replica

TICK_S: Final = 0.1
GATHER_S: Final = 0.002
"""How long an ack may wait, while there are many, to share its commit with others: a commit is not cheap."""
DRAIN_S: Final = 5.0
"""How long a draining process waits for a database that does not answer."""

_log = log.get(__name__)

CoordReplica = Replica[CoordState, Input, Outcome]
InputSource = Input | Callable[[CoordState], Input]
"""A request, or a function that makes it from the state at the moment of the decision."""


OnChange = Callable[[], Awaitable[None]]
"""Called when a service has begun or ceased to lead."""


def not_leading(reason: StrataError | None = None) -> StrataError:
    """Returns what a caller is told; `reason` is why this coordinator refuses to lead."""
    why = f": {reason.message}" if reason else ""
    return StrataError(
        Code.UNAVAILABLE,
        f"this coordinator does not lead{why}",
        hint="call again after the delay",
        retry_after_s=RETRY_AFTER_S,
    )


class CoordinatorService:
    """Holds at most one leading replica. A deposed replica is dropped, and every call that waits on it is cancelled."""

    def __init__(
        self, journal: Journal, clock: Clock, settings: CoordinatorSettings, metrics: CoordinatorMetrics | None = None
    ) -> None:
        self.clock = clock
        self.settings = settings
        self.ids = Ids(clock)
        self.notifier = CommitNotifier()
        self.telemetry = CoordinatorTelemetry(clock)
        self.metrics = metrics or CoordinatorMetrics()
        self._journal = journal
        self._replica: CoordReplica | None = None
        self._leading: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Outcome]] = set()
        self._draining = asyncio.Event()
        self._refusal: StrataError | None = None
        """Why this process does not want to lead: the database has lost what it saw there."""
        self._logged: dict[str, int] = {}
        """The number of the last event of each job that is in the log."""

    @property
    def leads(self) -> bool:
        return self._replica is not None

    @property
    def state(self) -> CoordState:
        """Returns the state for reading. UNAVAILABLE unless we lead."""
        state = self.state_if_leading
        if state is None:
            raise not_leading(self._refusal)
        return state

    @property
    def state_if_leading(self) -> CoordState | None:
        replica = self._replica
        return replica.state if replica is not None and replica.failure is None else None

    @property
    def states_led(self) -> dict[int, CoordState]:
        """Returns the state by partition, for metrics: this is the only one."""
        state = self.state_if_leading
        return {} if state is None else {0: state}

    async def run(self, on_change: OnChange) -> None:
        """Stand by, lead, stand by again when deposed; until cancelled or drained. `on_change`: `leads` has changed."""
        holder = self.ids.new("coordinator")
        while not self._draining.is_set():
            replica = self._new_replica()
            try:
                if self._refusal is not None:
                    await replica.catch_up()
                    self.accept()
                await replica.stand_by(holder, self.settings.lease_s, WriterLimits(gather_s=GATHER_S))
            except StrataError as error:
                if error.detail.get("went_back"):
                    # To end would be to accept it: the supervisor would start a process that knows nothing of it.
                    self.refuse(error)
                    await self.clock.sleep(self.settings.lease_s)
                    continue
                # Another candidate took the lead while this one still read to the head.
                if error.code not in (Code.STALE, Code.UNAVAILABLE):
                    raise
                await self.clock.sleep(TICK_S)
                continue
            await self._lead_until_lost(replica, on_change)

    async def lead(self, holder: str, on_change: OnChange) -> None:
        """Take the lead, and keep it until it is lost or given away. CONFLICT while another process has it."""
        replica = self._new_replica()
        try:
            # Before taking the lead: a long replay would outlast a lease.
            await replica.catch_up()
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
        await replica.lead(holder, self.settings.lease_s, WriterLimits(gather_s=GATHER_S))
        await self._lead_until_lost(replica, on_change)

    def _new_replica(self) -> CoordReplica:
        return Replica(self._journal, self.settings.stream, CoordMachine(), self.clock)

    async def _lead_until_lost(self, replica: CoordReplica, on_change: OnChange) -> None:
        self.accept()
        if self._draining.is_set():
            await replica.resign()
            return
        self._start_leading(replica)
        await on_change()
        self._leading = asyncio.create_task(self._lead(replica), name=f"lead {self.settings.stream}")
        try:
            await asyncio.wait([self._leading])
        finally:
            self._leading.cancel()
            self._stop_leading()
        if not self._leading.cancelled():
            self._leading.result()
        await on_change()

    def refuse(self, reason: StrataError) -> None:
        """The database has lost what this process saw there: callers are told so while it does not lead."""
        if self._refusal is None:
            _log.error("database_went_back", stream=self.settings.stream, reason=str(reason), hint=reason.hint)
        self._refusal = reason

    def accept(self) -> None:
        """The right database is back."""
        self._refusal = None

    async def drain(self) -> None:
        """Accept no more calls, finish those in progress, and resign, so that a standby takes over at once."""
        self._draining.set()
        await self.give_away()

    async def give_away(self) -> None:
        """Drain and resign, but be ready to lead again."""
        replica, self._replica = self._replica, None
        if replica is None:
            return
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._resign(replica)
        except (StrataError, TimeoutError) as error:
            _log.warning("resign_failed", stream=self.settings.stream, reason=str(error))
        if self._replica is None:
            # Else this process has taken the lead again while the old leader could not resign.
            self._stop_leading()

    async def _resign(self, replica: CoordReplica) -> None:
        if self._background:
            await asyncio.wait(self._background)
        if self._leading is not None:
            # Before resigning: a renewal after it would keep a lease without a leader.
            self._leading.cancel()
            await asyncio.wait([self._leading])
        await replica.resign()

    def _start_leading(self, replica: CoordReplica) -> None:
        state = replica.state
        state.leader_epoch = replica.epoch
        state.wall_offset_s = self.clock.wall_s() - self.clock.monotonic_s()
        self.telemetry.replace(state)
        self._logged = {name: job.history.next_number - 1 for name, job in state.jobs.items()}
        self._replica = replica
        _log.info("leadership_acquired", stream=self.settings.stream, epoch=replica.epoch, jobs=len(state.jobs))

    async def _lead(self, replica: CoordReplica) -> None:
        async def tick() -> None:
            try:
                await self._decide(replica, Tick(self.clock.wall_s()))
                self.telemetry.refresh_replies(replica.state)
                self.telemetry.sample_lanes(replica.state)
                log_events(replica.state, self._logged, self.clock.wall_s())
            except StrataError:
                # A failed leader is about to be dropped; `lead_until_replaced` returns the reason.
                if replica.failure is None:
                    raise

        ticks = every(TICK_S, tick, clock=self.clock, max_backoff_s=1.0)
        ticking = asyncio.create_task(ticks, name=f"tick {self.settings.stream}")
        try:
            reason = await replica.lead_until_replaced(
                self.settings.lease_s, snapshot_every=self.settings.snapshot_every
            )
            _log.warning("leadership_lost", stream=self.settings.stream, code=reason.code.value, reason=str(reason))
        finally:
            ticking.cancel()
            await asyncio.wait([ticking])

    def _stop_leading(self) -> None:
        self._replica = None
        self.notifier.cancel_all()

    async def submit(self, request: InputSource) -> Outcome:
        """Decide, and return once the facts are durable. Waiters are notified even if this caller is cancelled."""
        if self._replica is None:
            raise not_leading(self._refusal)
        return await self._decide(self._replica, request)

    def submit_heartbeat(self, request: Heartbeat) -> tuple[Outcome, Awaitable[Outcome] | None]:
        """Decide a heartbeat. None: it made no facts, and its reply, made of committed values only, may go at once."""
        replica = self._replica
        if replica is None or replica.failure is not None:
            raise not_leading(self._refusal)
        outcome, durable = self._decide_now(replica, request, settle=False)
        return outcome, None if durable is None else self._committed(replica, outcome, durable)

    def _submit_in_background(self, replica: CoordReplica, request: Input) -> None:
        """A request whose outcome no caller waits for, and that may be rejected."""
        task = asyncio.create_task(self._decide(replica, request))
        self._background.add(task)
        task.add_done_callback(self._on_background_done)

    def observe(self, request: Input) -> None:
        """Record a request that needs no decision, while this process leads."""
        replica = self._replica
        if replica is not None and replica.failure is None:
            replica.observe(request)

    def open_call(self, caller: Caller) -> OpenCall:
        """Returns a context manager: while a call of a worker waits here, the worker is alive even if it sends
        nothing."""
        job = self.state.jobs.get(caller.job)
        member = job.members.get(caller.worker_id) if job else None
        if member is not None and not caller.incarnation:
            # The current incarnation: once it has ended, this call says nothing about the next one.
            caller = replace(caller, incarnation=member.worker.incarnation)
        return OpenCall(self, caller)

    def _on_background_done(self, task: asyncio.Task[Outcome]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            # A rejection: no caller waits for it.
            task.exception()

    async def _decide(self, replica: CoordReplica, request: InputSource) -> Outcome:
        try:
            outcome, durable = self._decide_now(replica, request(replica.state) if callable(request) else request)
        except StrataError as error:
            if replica.failure is not None:
                raise not_leading() from error
            raise
        return await self._committed(replica, outcome, durable)

    def _decide_now(
        self, replica: CoordReplica, request: Input, *, settle: bool = True
    ) -> tuple[Outcome, asyncio.Future[int] | None]:
        """Observe, decide, apply and enqueue in one turn of the loop, so that no other request comes in between."""
        on_commit = partial(self._on_committed, replica, request)
        return replica.submit_nowait(request, on_commit, settle=settle)

    async def _committed(self, replica: CoordReplica, outcome: Outcome, durable: asyncio.Future[int] | None) -> Outcome:
        try:
            if durable is not None:
                decided_s = self.clock.monotonic_s()
                await durable
                self.metrics.journal_s.observe(self.clock.monotonic_s() - decided_s)
        except StrataError as error:
            if replica.failure is not None:
                raise not_leading() from error
            raise
        if outcome.facts:
            failpoint("coord.service.before_reply")
        return outcome

    def _on_committed(self, replica: CoordReplica, request: Input, outcome: Outcome) -> None:
        """Facts are committed: add them to the telemetry, and notify the calls that wait for them."""
        for fact in outcome.facts:
            self.metrics.record_fact(fact)
            self.telemetry.record_fact(fact, replica.state)
            self.notifier.notify(fact, request, outcome, replica.state)
            if isinstance(fact, GenerationFormed):
                self._request_reregistration(replica, fact)
        for job in {fact.job for fact in outcome.facts}:
            self.notifier.events.notify(("changed", job), None)

    def _request_reregistration(self, replica: CoordReplica, fact: GenerationFormed) -> None:
        """A generation formed: workers that registered before and got no rank are told to register again."""
        awaiting_rank = self.telemetry.of(fact.job).awaiting_rank
        workers = tuple(worker_id for worker_id in replica.state.jobs[fact.job].ranks if worker_id in awaiting_rank)
        awaiting_rank.difference_update(workers)
        if workers and self.leads:
            reason = f"generation {fact.generation} has formed"
            self._submit_in_background(replica, IssueCommand(fact.job, CommandKind.REBALANCE, workers, reason))


class OpenCall:
    """A call that waits here. Ten thousand of them end at once when a barrier is released."""

    __slots__ = ("_closed", "_opened", "_service")

    def __init__(self, service: CoordinatorService, caller: Caller) -> None:
        self._service = service
        self._opened, self._closed = CallOpened(caller), CallClosed(caller)

    def __enter__(self) -> None:
        self._service.observe(self._opened)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.observe(self._closed)
