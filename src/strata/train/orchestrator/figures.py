"""What the orchestrator notes while it works, for people and Prometheus. Nothing is decided by it, nor journaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from strata.base.clock import Clock
from strata.train.core import commands
from strata.train.core.facts import SnapshotCommitted
from strata.train.core.inputs import Outcome
from strata.train.core.overview import placed, recent, running, shown, tenants
from strata.train.core.pace import Pace
from strata.train.core.state import TrainState
from strata.train.core.status import MOST_TENANTS, RanksStatus, SnapshotStatus, Status
from strata.train.core.timeline import Rate, Timelines
from strata.train.orchestrator.metrics import Metrics
from strata.train.settings import ServerSettings

KEEP: Final = 1_000


class Figures:
    def __init__(self, clock: Clock, keep: int = KEEP) -> None:
        self._clock = clock
        self._since_s = clock.wall_s()
        self.timelines = Timelines(keep)
        self.metrics = Metrics()
        self._trained, self._sampled = Rate(), Rate()
        self._snapshot: SnapshotCommitted | None = None
        self._at: dict[int, float] = {}
        """Dispatches at the ranks, and when each was sent."""
        self._answered_at_s = 0.0
        self._group = ""
        self._attached_at_s: float | None = None
        self._lost_at_s: float | None = None
        self.recoveries = 0
        self.recovery_s: float | None = None

    def decided(self, outcome: Outcome, state: TrainState) -> None:
        ended = self.timelines.decided(outcome, state, self._clock.wall_s())
        self.metrics.decided(outcome, ended)
        for fact in outcome.facts:
            if isinstance(fact, SnapshotCommitted):
                self._snapshot = fact

    def durable(self, decided_at_s: float) -> None:
        """By the monotonic clock."""
        self.metrics.journal_s.observe(self._clock.monotonic_s() - decided_at_s)

    def sent(self, state: TrainState, number: int, future_ids: Sequence[str]) -> None:
        now_s = self._clock.wall_s()
        self._at[number] = now_s
        self.timelines.sent(state, number, future_ids, now_s)

    def replayed(self) -> None:
        self.metrics.replays.inc()

    def answered(self, reply: commands.Reply) -> None:
        now_s = self._clock.wall_s()
        self._at.pop(reply.number, None)
        self._answered_at_s = now_s
        ended = None if reply.sampled is None else [each.request_id for each in reply.sampled.ended]
        told = self.timelines.answered(reply.number, reply.timing, now_s, ended)
        kind = told[0].kind if told else ""
        self.metrics.answered(reply, kind)
        if reply.sampled is not None:
            self._sampled.note(reply.sampled.sampled_tokens, now_s)
        elif kind == "forward_backward":
            self._trained.note(reply.timing.tokens, now_s)

    def attached(self, group: str) -> None:
        self.metrics.groups.inc(group != self._group)
        self._group, self._attached_at_s = group, self._clock.wall_s()

    def lost(self) -> None:
        """If groups are lost one after the other, it began with the first."""
        self._attached_at_s = None
        self._at.clear()
        if self._lost_at_s is None:
            self._lost_at_s = self._clock.monotonic_s()

    def caught_up(self) -> None:
        if self._lost_at_s is not None:
            self.recovery_s, self._lost_at_s = self._clock.monotonic_s() - self._lost_at_s, None
            self.recoveries += 1
            self.metrics.recovery_s.observe(self.recovery_s)

    def ranks(
        self, state: TrainState, attached: commands.Attached | None, *, caught_up: bool, answered: Sequence[int] | str
    ) -> RanksStatus:
        """`answered` are the ranks that did just now, or why they did not."""
        if attached is None:
            return RanksStatus(state="starting", reason="the ranks are starting")
        said, reason = "ready", "all ranks answered"
        if isinstance(answered, str):
            said, reason = "unhealthy", answered
        elif not caught_up:
            said, reason = "catching up", "they do again what ranks before them had done"
        elif state.dispatches:
            said, reason = "busy", f"with dispatch {min(state.dispatches)}"
        elif state.asleep:
            said, reason = "asleep", "wake them with POST /wake_up"
        return RanksStatus(
            state=said,
            reason=reason,
            size=attached.world_size,
            answered=() if isinstance(answered, str) else answered,
            group=attached.group,
            attached_at_s=self._attached_at_s,
        )

    def status(  # noqa: PLR0913 - what it is told of
        self,
        state: TrainState,
        pace: Pace,
        settings: ServerSettings,
        *,
        generation: int,
        attached: commands.Attached | None,
        ranks: RanksStatus,
        own: str | None,
    ) -> Status:
        """`own` is the tenant that asks, if it may not see the others."""
        now_s, model = self._clock.wall_s(), attached.model if attached else None
        first = min(state.dispatches, default=0)
        # The ranks can have begun with it when it was there and the one before was answered.
        since_s = max(self._at[first], self._answered_at_s) if first in self._at else None
        return Status(
            now_s=now_s,
            leading_since_s=self._since_s,
            generation=generation,
            base_model=settings.model.base_model,
            arch=model.arch if model else "",
            training=settings.model.training,
            parameters=model.parameters if model else 0,
            ranks=ranks,
            models=sum(1 for _ in placed(state)),
            slots=model.slots if model else settings.model.slots,
            samplers=len(state.samplers),
            sampler_places=state.rules.max_samplers,
            waiting=state.futures.pending(),
            max_waiting=state.rules.max_pending,
            samples_waiting=len(state.waiting),
            samples_running=len(state.sampling) + len(state.routed),
            running=running(state, since_s, own=own),
            dispatched=state.dispatched,
            trained_tokens_per_s=self._trained.per_s(now_s),
            sampled_tokens_per_s=self._sampled.per_s(now_s),
            snapshot=self._newest(state),
            recoveries=self.recoveries,
            recovery_s=self.recovery_s,
            tenants=shown(tenants(state, pace), most=MOST_TENANTS, own=own),
            recent=recent(self.timelines, own=own),
        )

    def _newest(self, state: TrainState) -> SnapshotStatus | None:
        if not state.snapshots:
            return None
        number, seen = state.snapshots[-1].number, self._snapshot
        if seen is None or seen.number != number:
            return SnapshotStatus(number=number, behind=state.since.dispatches)
        return SnapshotStatus(
            number=number, behind=state.since.dispatches, at_s=seen.at_s, size=seen.size, held_s=seen.held_s
        )
