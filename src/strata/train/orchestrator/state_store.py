"""The orchestrator's state on its journal: decides an input, makes its facts durable, wakes waiting requests, and
bounds results in one append (32 MiB).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import StrataError
from strata.base.notify import KeyedNotifier
from strata.journal.replica import Replica
from strata.train.core import inflight
from strata.train.core.facts import SnapshotCommitted
from strata.train.core.inputs import Decision, ExpireResults, Input
from strata.train.core.sampling import SampledPart
from strata.train.core.state import TrainState
from strata.train.orchestrator.metrics import ServerTelemetry
from strata.train.status.completion_log import CompletionLog, Target
from strata.train.status.token_streams import TokenStreams

MAX_INLINE_RESULT_BYTES: Final = 32 << 20
"""Inline results take no more than this in memory and in a snapshot; beyond it small results go into files too."""
_log = log.get(__name__)

TrainReplica = Replica[TrainState, Input, Decision]


class StateStore:
    """A leading replica, and the tasks that wait for a change of its state."""

    def __init__(self, replica: TrainReplica, clock: Clock, telemetry: ServerTelemetry | None = None) -> None:
        self.clock = clock
        self.telemetry = telemetry or ServerTelemetry(clock)
        self.dispatchable = asyncio.Event()
        """Set when the scheduler may have something to dispatch."""
        self.publishable = asyncio.Event()
        """Set when the publisher may have something for the inference endpoints."""
        self.snapshot_committed = asyncio.Event()
        """Set when a new snapshot of the models is committed: compaction may remove what it covers."""
        self.durable_through = replica.state.settled_through
        """The results of all dispatches up to this one are in the journal: rank 0 may drop its own copies."""
        self.inherited_through = replica.state.dispatched
        """Dispatches up to this one were made by earlier leaders."""
        self.replayed = False
        """The ranks have applied every dispatch that has results: they load no old checkpoint any more."""
        self._replica = replica
        self.completions = CompletionLog(replica.epoch, replica.state.futures.ended)
        self.streams = TokenStreams()
        self._completed: KeyedNotifier[None] = KeyedNotifier()
        self._snapshot_attempted_at = replica.position
        self._snapshot_saved_at = 0

    @property
    def state(self) -> TrainState:
        return self._replica.state

    @property
    def leader_epoch(self) -> int:
        return self._replica.epoch

    @property
    def position(self) -> int:
        """The position of the last fact in the journal."""
        return self._replica.position

    def submit_nowait(self, request: Input) -> tuple[Decision, asyncio.Future[int] | None]:
        """Decide an input and apply its facts now; the future is done when the facts are durable.

        Requests that wait for a result are woken now. A result of the ranks may be sent at once, because rank 0 keeps
        it until it is durable. A failure that was decided here exists nowhere else: its reader awaits `wait_durable`
        first.
        """
        settled: list[int] = []
        streamed: list[tuple[str, SampledPart]] = []
        decided_at_s = self.clock.monotonic_s()
        self.telemetry.rollouts.observe(request, self.state)
        decision, durable = self._replica.submit_nowait(
            request, lambda _: self._on_committed(settled, decided_at_s, streamed)
        )
        # Recorded now: by the time these facts are durable, the state may hold results that are not.
        settled.append(self.state.settled_through)
        streamed += inflight.streamed_parts(self.state, decision.facts)
        for future_id in decision.ended:
            self._completed.notify(future_id, None)
            self.streams.drop(future_id)
            target = self.completions.add(future_id)
            if target is not None:
                self._completed.notify(target, None)
        if decision.facts:
            self.telemetry.record_decision(decision, self.state)
            self.dispatchable.set()
            self.publishable.set()
        if any(isinstance(fact, SnapshotCommitted) for fact in decision.facts):
            self.snapshot_committed.set()
        return decision, durable

    async def commit(self, request: Input) -> Decision:
        """Decide an input and return when its facts are durable."""
        decision, durable = self.submit_nowait(request)
        if durable is not None:
            await durable
        return decision

    async def wait_durable(self) -> None:
        """Return when every fact that the state holds now is durable."""
        await self._replica.settled()

    async def confirm_leadership(self) -> None:
        """Return when every fact that the state holds now is durable, and this process still leads."""
        await self._replica.confirm()

    def _on_committed(
        self, settled: list[int], decided_at_s: float, streamed: Sequence[tuple[str, SampledPart]]
    ) -> None:
        self.durable_through = max(self.durable_through, *settled)
        self.telemetry.record_durable(decided_at_s)
        for future_id, part in streamed:
            self.record_tokens(future_id, part)

    async def wait_for_completion(self, key: str | Target, wait_s: float) -> None:
        """Return when the future has its result or more tokens, the next sample of the target has ended, or the time is
        over."""
        with self._completed.subscribe(key) as completion:
            await completion.wait(wait_s)

    def record_tokens(self, future_id: str, part: SampledPart) -> None:
        """Tokens of a sample that runs. They wake the client that reads them; a sample that has ended needs none."""
        if future_id in self.state.sampling or future_id in self.state.routed:
            self.streams.record(future_id, part)
            self._completed.notify(future_id, None)

    async def expire_results(self) -> None:
        """Drop results beyond their TTL, and the entries of the completion log that pointed to them."""
        await self.commit(ExpireResults(self.clock.wall_s()))
        state = self.state
        self.completions.truncate(
            retained=lambda future_id: state.futures.get(future_id) is not None,
            alive=lambda sampler_id: sampler_id in state.samplers,
        )

    async def ensure_snapshot(self, position: int) -> None:
        """Have a saved state at this position of the journal or later, so that the facts before it may be removed."""
        if self._snapshot_saved_at < position:
            self._snapshot_attempted_at = self._replica.position
            self._snapshot_saved_at = await self._replica.snapshot(truncate=False)

    async def snapshot_if_due(self, every: int) -> None:
        """Save the state after so many facts. Does not truncate the journal: new ranks replay its dispatches."""
        if self._replica.position - self._snapshot_attempted_at < every:
            return
        self._snapshot_attempted_at = self._replica.position
        try:
            self._snapshot_saved_at = await self._replica.snapshot(truncate=False)
        except StrataError as error:
            # A snapshot only shortens the next start.
            _log.warning("state_snapshot_failed", code=error.code.value, reason=str(error))
