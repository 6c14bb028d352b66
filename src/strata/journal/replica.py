"""A replicated state machine on a journal: leading, following, renewal of the lease, snapshots, and the errors of a
lost lead.

The machine decides in values. The replica makes facts durable before their effects are published, rebuilds its state
from a snapshot and the facts after it, follows as a standby, and stops for good when it is deposed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.retry import no_jitter, retry
from strata.journal import failover
from strata.journal.group_commit import Writer, WriterLimits
from strata.journal.port import Batch, Journal, Lead, Snapshot
from strata.journal.replay import replay, tail

_log = log.get(__name__)

State = TypeVar("State")
Input_contra = TypeVar("Input_contra", contravariant=True)
Input = TypeVar("Input")
Effect = TypeVar("Effect")


class Machine(Protocol[State, Input_contra, Effect]):
    """A core bound to its encoding. No clock, no chance, no I/O inside; facts leave and enter as bytes.

    `now_s` is this process's monotonic clock: for measuring how long something takes, never for a fact. Soft state is
    what no fact holds; a machine without any inherits the two methods that write it.
    """

    def initial(self) -> State: ...

    def observe(self, state: State, request: Input_contra, now_s: float) -> None:
        """A request arrived, and the journal has room for its facts: record in soft state what it says by itself."""
        del state, request, now_s

    def observe_outcome(self, state: State, request: Input_contra, effect: Effect, now_s: float) -> None:
        """A request was decided, and its facts are about to be applied: record in soft state what follows from it."""
        del state, request, effect, now_s

    def decide(self, state: State, request: Input_contra, now_s: float) -> tuple[Sequence[bytes], Effect]:
        """The facts, and the effect for the caller. It writes nothing, neither soft state nor what facts build."""
        ...

    def apply(self, state: State, fact: bytes) -> State:
        """The state after a fact; may change and return the one given."""
        ...

    def save(self, state: State) -> bytes: ...

    def load(self, saved: bytes) -> State: ...


class Replica(Generic[State, Input, Effect]):
    """One process's copy of one stream's state: first a follower, perhaps a leader, never a follower again.

    A leader that fails may have applied facts that were never committed. It is dropped; a new replica starts from what
    is durable.
    """

    def __init__(self, journal: Journal, stream: str, machine: Machine[State, Input, Effect], clock: Clock) -> None:
        self._journal = journal
        self._stream = stream
        self._machine = machine
        self._clock = clock
        self._state = machine.initial()
        self._position = 0
        self._snapshot_at = 0
        self._snapshot_tried_at = 0
        self._writer: Writer | None = None

    @property
    def state(self) -> State:
        """Returns the state for reading only. On a leader it may hold facts that are not durable yet."""
        return self._state

    @property
    def position(self) -> int:
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that this replica leads under."""
        return self._require_writer().lead.epoch

    @property
    def failure(self) -> StrataError | None:
        """Returns why this leader is finished, if it is."""
        return self._writer.failure if self._writer else None

    async def catch_up(self) -> None:
        """Replay all that is committed now, from the newest snapshot if the state is behind it."""
        self._require_follower()
        while True:
            try:
                await self._load_newer_snapshot()
                async for batch in replay(self._journal, self._stream, self._position):
                    self._apply_batch(batch)
            except StrataError as error:
                # A truncation between the snapshot and the facts: a newer snapshot is there.
                if error.code is not Code.GONE:
                    raise
            else:
                return

    async def follow(self) -> None:
        """Stay warm: apply facts as they are committed, until cancelled. Waits for a stream that is not there yet."""
        while True:
            try:
                await self.catch_up()
                async for batch in tail(self._journal, self._stream, self._position):
                    self._require_follower()
                    self._apply_batch(batch)
            except StrataError as error:
                if error.code not in (Code.GONE, Code.NOT_FOUND, Code.UNAVAILABLE):
                    raise
                if error.code is not Code.GONE:
                    await self._clock.sleep(failover.RETRY_AFTER_S)

    async def lead(self, holder: str, lease_s: float, limits: WriterLimits | None = None) -> None:
        """Take the lead now, or fail with CONFLICT while another process has it."""
        self._require_follower()
        await self._start_leading(await self._journal.lead(self._stream, holder, lease_s), lease_s, limits)

    async def stand_by(self, holder: str, lease_s: float, limits: WriterLimits | None = None) -> None:
        """Follow until the lead is free, then take it. Warm first: a long replay would outlast a lease."""
        await self._catch_up_first()
        following = asyncio.get_running_loop().create_task(self.follow(), name=f"follow {self._stream}")
        lead: Lead | None = None
        seen: str | None = None
        seen_s = self._clock.monotonic_s()
        try:
            while lead is None:
                expired_lease = seen if self._clock.monotonic_s() - seen_s >= lease_s else None
                try:
                    lead = await self._journal.lead(self._stream, holder, lease_s, expired_lease=expired_lease)
                except StrataError as error:
                    if error.code not in (Code.CONFLICT, Code.UNAVAILABLE):
                        raise
                    if error.detail.get("lease", seen) != seen:
                        seen, seen_s = error.detail["lease"], self._clock.monotonic_s()
                    await asyncio.wait([following], timeout=lease_s / 4)
                    if following.done():
                        following.result()
        finally:
            following.cancel()
            await asyncio.wait([following])
        await self._start_leading(lead, lease_s, limits)

    async def lead_until_replaced(self, lease_s: float, *, snapshot_every: int | None = None) -> StrataError:
        """Renew the lease and take snapshots until the lead is lost; return why. Then this replica accepts no request.

        A leader that could not renew for a whole lease steps down by itself: a standby may be leading already.
        """
        writer = self._require_writer()
        saving: asyncio.Task[None] | None = None
        renewed_s = self._clock.monotonic_s()
        try:
            while writer.failure is None:
                if self._is_snapshot_due(snapshot_every) and (saving is None or saving.done()):
                    saving = asyncio.get_running_loop().create_task(self._try_snapshot())
                if await self._renew(writer.lead, lease_s):
                    renewed_s = self._clock.monotonic_s()
                elif self._clock.monotonic_s() - renewed_s >= lease_s:
                    late = StrataError(Code.UNAVAILABLE, f"the lease on stream {self._stream!r} could not be renewed")
                    writer.stop(late)
                await self._clock.sleep(lease_s / 6)
        except StrataError as error:
            writer.stop(error)
        finally:
            if saving is not None:
                saving.cancel()
        assert writer.failure is not None
        return writer.failure

    def _is_snapshot_due(self, snapshot_every: int | None) -> bool:
        since = max(self._snapshot_at, self._snapshot_tried_at)
        return snapshot_every is not None and self._position - since >= snapshot_every

    async def _renew(self, lead: Lead, lease_s: float) -> bool:
        """Says whether the lease was extended; raises when it can never be again."""
        try:
            async with asyncio.timeout(lease_s / 3):
                await self._journal.renew(self._stream, lead.epoch, lease_s)
        except TimeoutError:
            return False
        except StrataError as error:
            if error.code is not Code.UNAVAILABLE:
                raise
            return False
        return True

    async def _catch_up_first(self) -> None:
        def warn(error: StrataError, _failures: int) -> None:
            _log.warning("journal_unavailable", stream=self._stream, reason=str(error))

        try:
            await retry(self.catch_up, failover.RETRY, clock=self._clock, chance=no_jitter, on_retry=warn)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise

    async def _start_leading(self, lead: Lead, lease_s: float, limits: WriterLimits | None) -> None:
        """Replay to the head at which the epoch began: only facts of this leader can come after it."""
        failpoint("journal.replica.after_lead")

        async def keep() -> None:
            while True:
                await self._clock.sleep(lease_s / 3)
                await self._renew(lead, lease_s)

        keeping = asyncio.get_running_loop().create_task(keep(), name=f"keep {self._stream}")
        try:
            await self.catch_up()
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
        if self._position > lead.head:
            raise StrataError(Code.STALE, f"epoch {lead.epoch} of stream {self._stream!r} was over before it began")
        if self._position < lead.head:
            raise StrataError(
                Code.CORRUPT, f"stream {self._stream!r} ends at {self._position}, but its head is {lead.head}"
            )
        self._writer = Writer(self._journal, lead, self._clock, limits)

    def _require_follower(self) -> None:
        if self._writer is not None:
            raise StrataError(
                Code.PRECONDITION, "this replica has led and holds facts of its own: start over with a new one"
            )

    async def resign(self) -> None:
        """Commit what was submitted and end the lease, so that a standby takes over at once."""
        writer = self._require_writer()
        await writer.close()
        writer.stop(StrataError(Code.UNAVAILABLE, f"this process has resigned from stream {self._stream!r}"))
        await self._journal.resign(self._stream, writer.lead.epoch)

    async def submit(self, request: Input) -> Effect:
        """Decide, apply, and return the effect once all it rests on is durable.

        Between `decide` and `submit` nothing awaits, so decisions are made one after the other, each on the facts of
        all before it, and the journal has them in that order. An input without facts waits too: what it saw may not be
        committed yet.
        """
        effect, durable = self.submit_nowait(request)
        if durable is not None:
            await durable
            failpoint("journal.replica.after_commit")
        return effect

    def submit_nowait(
        self, request: Input, on_commit: Callable[[Effect], None] | None = None, *, settle: bool = True
    ) -> tuple[Effect, asyncio.Future[int] | None]:
        """Submits as `submit` does, but returns at once: the effect may be published only after the future is done.

        The future belongs to the caller; None if there is nothing to wait for. `on_commit` is called with the effect
        after its facts are committed, even if the caller was cancelled; never for a request without facts. It must not
        raise. Not to `settle` is for an effect that, if there are no facts, contains committed values only: then there
        is no future, and a full queue does not matter. Else a full queue refuses the request before it is observed.
        """
        writer = self._require_writer()
        if settle:
            writer.check_capacity()
        machine, now_s = self._machine, self._clock.monotonic_s()
        machine.observe(self._state, request, now_s)
        facts, effect = machine.decide(self._state, request, now_s)
        if not facts:
            machine.observe_outcome(self._state, request, effect, now_s)
            return effect, writer.settling() if settle else None
        durable = writer.submit(facts, None if on_commit is None else partial(on_commit, effect))
        try:
            machine.observe_outcome(self._state, request, effect, now_s)
            self._apply_own(writer, facts)
        except BaseException:
            # The journal has the facts, this state has not: no decision may be based on it.
            writer.stop(StrataError(Code.INTERNAL, f"a fact of stream {self._stream!r} could not be applied"))
            raise
        failpoint("journal.replica.before_commit")
        return effect, durable

    def _apply_own(self, writer: Writer, facts: Sequence[bytes]) -> None:
        for fact in facts:
            self._state = self._machine.apply(self._state, fact)
        self._position = writer.submitted

    async def settled(self) -> None:
        """Return when all that the state holds is durable: call it before publishing anything of it."""
        await self._require_writer().settled()

    async def confirm(self) -> None:
        """Return if this replica still leads: call it before replying to a read that must be linearizable."""
        await self._require_writer().confirm()

    async def snapshot(self, *, truncate: bool = True) -> int:
        """Save the state as it is now, once it is durable, and forget the facts it covers. Returns its position."""
        writer = self._require_writer()
        position, saved = self._position, self._machine.save(self._state)
        await writer.settled()
        await self._journal.save_snapshot(self._stream, writer.lead.epoch, Snapshot(position, writer.lead.epoch, saved))
        self._snapshot_at = position
        failpoint("journal.replica.between_snapshot_and_truncate")
        if truncate:
            await self._journal.truncate(self._stream, writer.lead.epoch, position)
        return position

    async def _try_snapshot(self) -> None:
        """A snapshot only saves time at the next start: one that fails is tried again later."""
        self._snapshot_tried_at = self._position
        try:
            await self.snapshot()
        except StrataError as error:
            _log.warning("snapshot_failed", stream=self._stream, code=error.code.value, reason=str(error))

    def observe(self, request: Input) -> None:
        """Record a request that needs no decision."""
        self._machine.observe(self._state, request, self._clock.monotonic_s())

    def _require_writer(self) -> Writer:
        if self._writer is None:
            raise StrataError(Code.UNAVAILABLE, f"this process does not lead stream {self._stream!r}")
        return self._writer

    async def _load_newer_snapshot(self) -> None:
        try:
            snapshot = await self._journal.load_snapshot(self._stream)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return
        if snapshot is not None and snapshot.position > self._position:
            self._state = self._machine.load(snapshot.state)
            self._position = self._snapshot_at = snapshot.position

    def _apply_batch(self, batch: Batch) -> None:
        """Apply what is new in a batch; another reader of this replica may have been faster."""
        if batch.last <= self._position:
            return
        new = batch.after(self._position)
        if new.first != self._position + 1:
            raise StrataError(Code.CORRUPT, f"after position {self._position} comes {new.first}")
        for fact in new.facts:
            self._state = self._machine.apply(self._state, fact)
        self._position = new.last
