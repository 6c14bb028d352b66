"""The leader's append queue: group commit, and its limits (`WriterLimits`: batch 4 MiB, pending 64 MiB, commit timeout
10 s, giving up after 30 s).

While a commit runs, further submissions collect into the next batch. So a lone append costs one commit, and a thousand
at once cost one or two. Each caller continues after its own facts are durable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Final

import msgspec

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff, RetryPolicy, no_jitter, retry
from strata.journal import failover
from strata.journal.port import Journal, Lead, check_facts

GATHER_PERIODS: Final = 5
"""The next commit waits for more for so many times `gather_s` after one that several shared."""


class WriterLimits(msgspec.Struct, frozen=True):
    max_batch_bytes: int = 4 << 20
    """A commit carries at most about this much; the rest goes into the next one."""
    max_pending_bytes: int = 64 << 20
    """Bytes beyond which `submit` raises EXHAUSTED: the callers must slow down."""
    max_pending: int = 1_000_000
    commit_timeout_s: float = 10.0
    """How long one attempt may take before it is repeated."""
    give_up_after_s: float = 30.0
    """How long the database may be unavailable before the writer fails and its owner has to take a new lead."""
    gather_s: float = 0.0
    """How long a commit waits for more to carry while many submit at once. A lone caller never waits."""
    follow_up: bool = False
    """A commit waits one turn of the event loop: a decision that follows at once from the first shares its commit."""
    backoff: Backoff = failover.BACKOFF


class _Submission(msgspec.Struct, frozen=True):
    facts: Sequence[bytes]
    size: int
    position: int
    confirm: bool
    committed: asyncio.Future[int]
    on_commit: Callable[[], None] | None


class Writer:
    """The append queue of a leader: it owns the next position of its stream under its epoch.

    It fails once and for all when the epoch is over or the database stays away. A failed submission may still have been
    committed: its owner forgets its state, takes a new lead and reads what is there.
    """

    def __init__(self, journal: Journal, lead: Lead, clock: Clock, limits: WriterLimits | None = None) -> None:
        self.lead = lead
        self._journal = journal
        self._clock = clock
        self._limits = limits or WriterLimits()
        self._retry_policy = RetryPolicy(backoff=self._limits.backoff, give_up_after_s=self._limits.give_up_after_s)
        self._durable = lead.head
        self._submitted = lead.head
        self._queue: deque[_Submission] = deque()
        self._queued_bytes = 0
        self._flushing: asyncio.Task[None] | None = None
        self._failure: StrataError | None = None
        self._gather_until_s = -inf

    @property
    def durable(self) -> int:
        """Everything up to this position is committed."""
        return self._durable

    @property
    def submitted(self) -> int:
        """The last position given out."""
        return self._submitted

    @property
    def failure(self) -> StrataError | None:
        return self._failure

    def submit(self, facts: Sequence[bytes], on_commit: Callable[[], None] | None = None) -> asyncio.Future[int]:
        """Append the facts after everything submitted before; the future gives their last position once committed.

        The future belongs to the caller: cancelling it stops the waiting and nothing else. `on_commit` is called after
        the commit, even if the caller no longer waits; it must not raise.

        Facts submitted together are committed together, all or none.
        Not a coroutine on purpose: a caller decides, applies and submits without another task in between.
        """
        self.check_capacity()
        return self._enqueue(facts, check_facts(facts), on_commit=on_commit)

    def check_capacity(self) -> None:
        """Raise if the queue is full: call it before deciding, so that a rejection leaves nothing half done."""
        self._check()
        full = self._queued_bytes >= self._limits.max_pending_bytes
        if full or len(self._queue) >= self._limits.max_pending:
            raise StrataError(
                Code.EXHAUSTED,
                f"{len(self._queue):,} submissions of {self._queued_bytes:,} bytes wait for the journal of"
                f" {self.lead.stream!r}",
            )

    async def append(self, facts: Sequence[bytes]) -> int:
        return await self.submit(facts)

    def settling(self) -> asyncio.Future[int] | None:
        """Done when everything submitted so far is committed; None if it is."""
        self._check()
        return self._enqueue((), 0) if self._submitted > self._durable else None

    async def settled(self) -> None:
        """Return when everything submitted so far is committed: what a reply that rests on earlier facts waits for."""
        settling = self.settling()
        if settling is not None:
            await settling

    async def confirm(self) -> None:
        """Return when all submitted so far is committed and this leader is current: for linearizable reads."""
        self._check()
        await self._enqueue((), 0, confirm=True)

    def stop(self, reason: StrataError) -> None:
        """Fail everything that waits and everything that comes. What is under way may still be committed."""
        self._fail(reason)

    async def close(self) -> None:
        """Wait for what was submitted."""
        while self._flushing is not None and not self._flushing.done():
            await asyncio.wait([self._flushing])

    def _check(self) -> None:
        if self._failure is not None:
            raise _copy(self._failure)

    def _enqueue(
        self, facts: Sequence[bytes], size: int, *, confirm: bool = False, on_commit: Callable[[], None] | None = None
    ) -> asyncio.Future[int]:
        loop = asyncio.get_running_loop()
        committed: asyncio.Future[int] = loop.create_future()
        self._submitted += len(facts)
        self._queue.append(_Submission(tuple(facts), size, self._submitted, confirm, committed, on_commit))
        self._queued_bytes += size
        if self._flushing is None or self._flushing.done():
            self._flushing = loop.create_task(self._flush(), name=f"journal {self.lead.stream}")
            self._flushing.add_done_callback(self._flushed)
        return committed

    async def _flush(self) -> None:
        while self._queue:
            if self._limits.gather_s and self._clock.monotonic_s() < self._gather_until_s:
                await self._clock.sleep(self._limits.gather_s)
            if self._limits.follow_up:
                await asyncio.sleep(0)
            count, facts, confirm = self._next_batch()
            try:
                await self._commit(facts, confirm=confirm)
            except StrataError as error:
                self._fail(error)
                return
            if count > 1:
                self._gather_until_s = self._clock.monotonic_s() + GATHER_PERIODS * self._limits.gather_s
            for _ in range(min(count, len(self._queue))):
                done = self._queue.popleft()
                self._queued_bytes -= done.size
                if done.on_commit is not None:
                    done.on_commit()
                if not done.committed.done():
                    done.committed.set_result(done.position)

    def _flushed(self, task: asyncio.Task[None]) -> None:
        """However the task ended, even before it began: no caller waits for ever."""
        if task.cancelled():
            self._fail(StrataError(Code.UNAVAILABLE, f"the writer of stream {self.lead.stream!r} was stopped"))
        elif task.exception() is not None:
            self._fail(StrataError(Code.INTERNAL, f"the writer of stream {self.lead.stream!r} broke down"))

    def _next_batch(self) -> tuple[int, list[bytes], bool]:
        """Returns how many submissions go into the next commit, their facts, and whether one needs to confirm the
        lead."""
        facts: list[bytes] = []
        size = count = 0
        confirm = False
        for submission in self._queue:
            if count and size + submission.size > self._limits.max_batch_bytes:
                break
            facts.extend(submission.facts)
            size += submission.size
            count += 1
            confirm = confirm or submission.confirm
        return count, facts, confirm

    async def _commit(self, facts: list[bytes], *, confirm: bool) -> None:
        """Repeat the very same batch until its fate is known: the journal recognises one that got through."""
        attempt = partial(self._try_commit, facts, confirm=confirm)
        await retry(attempt, self._retry_policy, clock=self._clock, chance=no_jitter)

    async def _try_commit(self, facts: list[bytes], *, confirm: bool) -> None:
        lead = self.lead
        try:
            async with asyncio.timeout(self._limits.commit_timeout_s):
                if facts:
                    self._durable = await self._journal.append(lead.stream, lead.epoch, self._durable, facts)
                elif confirm:
                    await self._journal.confirm(lead.stream, lead.epoch)
        except TimeoutError as error:
            raise StrataError(Code.UNAVAILABLE, f"stream {lead.stream!r}: a commit took too long") from error

    def _fail(self, error: StrataError) -> None:
        self._failure = self._failure or error
        while self._queue:
            committed = self._queue.popleft().committed
            if not committed.done():
                committed.set_exception(_copy(error))
                # Retrieved, because a caller that no longer waits would leave it unhandled.
                committed.exception()
        self._queued_bytes = 0


def _copy(error: StrataError) -> StrataError:
    # One exception raised in many places would collect all their tracebacks.
    return StrataError(error.code, error.message, hint=error.hint, **error.detail)
