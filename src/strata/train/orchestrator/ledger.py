"""The orchestrator's state on its journal: decide, make durable, and wake whoever waits for what became so."""

from __future__ import annotations

import asyncio
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import StrataError
from strata.base.notify import KeyedNotifier
from strata.journal.replica import Replica
from strata.train.core.endings import Endings, Target
from strata.train.core.facts import SnapshotCommitted
from strata.train.core.inputs import Expire, Input, Outcome
from strata.train.core.state import TrainState
from strata.train.orchestrator.figures import Figures

KEEP_INLINE_BYTES: Final = 32 << 20
"""Results weigh no more than this in memory and in a snapshot; beyond, also small ones go into files."""
_log = log.get(__name__)

TrainReplica = Replica[TrainState, Input, Outcome]


class Ledger:
    """A leading replica and those who wait on it."""

    def __init__(self, replica: TrainReplica, clock: Clock, figures: Figures | None = None) -> None:
        self.clock = clock
        self.figures = figures or Figures(clock)
        self.changed = asyncio.Event()
        """There may be something to dispatch."""
        self.news = asyncio.Event()
        """There may be something for the inference endpoints."""
        self.durable = replica.state.settled
        """The results of all dispatches up to this one are in the journal: rank 0 may forget its own copy."""
        self.caught_up = False
        """The ranks have done all they were ever told: they will not ask for an old checkpoint any more."""
        self.covered = asyncio.Event()
        """There is a new snapshot of the models, and what came long before it may be let go."""
        self._replica = replica
        self.endings = Endings(replica.epoch, replica.state.futures.ended)
        self._endings: KeyedNotifier[None] = KeyedNotifier()
        self._snapshot_at = replica.position
        self._saved_at = 0

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
        begun_s = self.clock.monotonic_s()
        outcome, durable = self._replica.submit_nowait(given, lambda _: self._committed(settled, begun_s))
        # Noted now: by the time this is durable, there may be answers that are not.
        settled.append(self.state.settled)
        for future_id in outcome.ended:
            self._endings.notify(future_id, None)
            target = self.endings.add(future_id)
            if target is not None:
                self._endings.notify(target, None)
        if outcome.facts:
            self.figures.decided(outcome, self.state)
            self.changed.set()
            self.news.set()
        if any(isinstance(fact, SnapshotCommitted) for fact in outcome.facts):
            self.covered.set()
        return outcome, durable

    async def commit(self, given: Input) -> Outcome:
        outcome, durable = self.put(given)
        if durable is not None:
            await durable
        return outcome

    async def settled(self) -> None:
        """Return when all that the state holds now is durable."""
        await self._replica.settled()

    async def confirm(self) -> None:
        """Return when all that the state holds now is durable, and this process leads still."""
        await self._replica.confirm()

    def _committed(self, settled: list[int], begun_s: float) -> None:
        self.durable = max(self.durable, *settled)
        self.figures.durable(begun_s)

    async def ended(self, awaited: str | Target, wait_s: float) -> None:
        """Return when the future has its result, or the next sample of the target has; or the time is over."""
        with self._endings.subscribe(awaited) as ended:
            await ended.wait(wait_s)

    async def expire(self) -> None:
        await self.commit(Expire(self.clock.wall_s()))
        state = self.state
        self.endings.forget(
            kept=lambda future_id: state.futures.get(future_id) is not None,
            alive=lambda sampler_id: sampler_id in state.samplers,
        )

    async def save_through(self, position: int) -> None:
        """Have a saved state of this position of the journal, or a later one: what led to it may go then."""
        if self._saved_at < position:
            self._snapshot_at = self._replica.position
            self._saved_at = await self._replica.snapshot(truncate=False)

    async def snapshot(self, every: int) -> None:
        """Of this state. The journal is not cut here: it is what ranks that start anew are told again."""
        if self._replica.position - self._snapshot_at < every:
            return
        self._snapshot_at = self._replica.position
        try:
            self._saved_at = await self._replica.snapshot(truncate=False)
        except StrataError as error:
            # It only saves time at the next start.
            _log.warning("a snapshot was not saved", code=error.code.value, reason=str(error))
