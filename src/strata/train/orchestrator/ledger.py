"""The orchestrator's state on its journal: decide, make durable, and wake whoever waits for what became so."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import StrataError
from strata.journal.replica import Replica
from strata.train.core.inputs import Expire, Input, Outcome
from strata.train.core.state import TrainState

KEEP_INLINE_BYTES: Final = 32 << 20
"""Results weigh no more than this in memory and in a snapshot; beyond, also small ones go into files."""
_log = log.get(__name__)

TrainReplica = Replica[TrainState, Input, Outcome]


class Ledger:
    """A leading replica and those who wait on it."""

    def __init__(self, replica: TrainReplica, clock: Clock) -> None:
        self.clock = clock
        self.changed = asyncio.Event()
        """There may be something to dispatch."""
        self.durable = replica.state.settled
        """The results of all dispatches up to this one are in the journal: rank 0 may forget its own copy."""
        self.caught_up = False
        """The ranks have done all they were ever told: they will not ask for an old checkpoint any more."""
        self._replica = replica
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._snapshot_at = replica.position

    @property
    def state(self) -> TrainState:
        return self._replica.state

    @property
    def generation(self) -> int:
        return self._replica.epoch

    def put(self, given: Input) -> tuple[Outcome, asyncio.Future[int] | None]:
        """Decided and applied at once; the future is done when it is durable.

        Whoever awaited a result is woken now. An answer may be told at once, because rank 0 keeps it until it is
        durable; a failure that was decided here is nowhere else, and whoever tells it waits for `settled` first.
        """
        settled: list[int] = []
        outcome, durable = self._replica.put(given, lambda _: self._committed(settled))
        # Noted now: by the time this is durable, there may be answers that are not.
        settled.append(self.state.settled)
        for future_id in outcome.ended:
            for waiting in self._waiting.pop(future_id, ()):
                if not waiting.done():
                    waiting.set_result(None)
        if outcome.facts:
            self.changed.set()
        return outcome, durable

    async def commit(self, given: Input) -> Outcome:
        outcome, durable = self.put(given)
        if durable is not None:
            await durable
        return outcome

    async def settled(self) -> None:
        """Return when all that the state holds now is durable."""
        await self._replica.settled()

    def _committed(self, settled: list[int]) -> None:
        self.durable = max(self.durable, *settled)

    async def ended(self, future_id: str, wait_s: float) -> None:
        """Return when the future has its result, or the time is over."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future_id].add(waiting)
        try:
            async with asyncio.timeout(wait_s):
                await waiting
        except TimeoutError:
            pass
        finally:
            self._waiting[future_id].discard(waiting)
            if not self._waiting[future_id]:
                del self._waiting[future_id]

    async def expire(self) -> None:
        await self.commit(Expire(self.clock.wall_s()))

    async def snapshot(self, every: int) -> None:
        """The journal is not cut: it is what ranks that start anew are told again."""
        if self._replica.position - self._snapshot_at < every:
            return
        self._snapshot_at = self._replica.position
        try:
            await self._replica.snapshot(truncate=False)
        except StrataError as error:
            # It only saves time at the next start.
            _log.warning("a snapshot was not saved", code=error.code.value, reason=str(error))
