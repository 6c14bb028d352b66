"""Clients that are gone without a word: what they left behind is let go after a while.

Anything a client asks about one of its sessions by name is a sign of life, not only its heartbeat: some have none. Time
counts from what this process heard, on a clock that nobody sets: a new orchestrator gives everybody all of it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, assert_never

from strata.base import log
from strata.base.clock import Clock
from strata.train.core import inputs, messages, status
from strata.train.core.future import FutureStatus
from strata.train.core.state import TrainState
from strata.train.orchestrator.ledger import Ledger
from strata.train.settings import Limits

SILENT = "silent"
_log = log.get(__name__)


class _Gap(NamedTuple):
    released: int
    """The last number before it."""
    since_s: float


class Silence:
    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger = ledger
        self._limits = limits
        self._clock: Clock = ledger.clock
        self._heard_s: dict[str, float] = {}
        self._gaps: dict[str, _Gap] = {}

    @property
    def every_s(self) -> float:
        """How often to look, so that nothing is let go much later than was asked for."""
        given = [limit_s for limit_s in (self._limits.silent_session_s, self._limits.gap_s) if limit_s]
        return min(given, default=86_400.0) / 4

    def hear(self, tenant: str, name: str) -> None:
        """Of a session, or of anything that is named after one. What others say of it is no sign of its life."""
        session_id = name.partition(":")[0]
        session = self._ledger.state.sessions.get(session_id)
        if session is not None and session.tenant == tenant and session.finished is None:
            self._heard_s[session_id] = self._clock.monotonic_s()

    def hear_question(self, tenant: str, asked: messages.Abort | messages.Utility) -> None:
        name = _named(asked)
        if name is not None:
            self.hear(tenant, name)

    async def run_once(self) -> None:
        now_s = self._clock.monotonic_s()
        state = self._ledger.state
        self._note_gaps(state, now_s)
        found: list[inputs.Abort | inputs.FinishSession] = [*self._given_up(state, now_s), *self._silent(state, now_s)]
        for given in found:
            _log.warning("let go of what a client left behind", what=given)
            await self._ledger.commit(given)

    def _note_gaps(self, state: TrainState, now_s: float) -> None:
        held = {model_id: model.line.released for model_id, model in state.models.items() if model.line.held}
        self._gaps = {
            model_id: gap if (gap := self._gaps.get(model_id)) and gap.released == released else _Gap(released, now_s)
            for model_id, released in held.items()
        }

    def _given_up(self, state: TrainState, now_s: float) -> Iterator[inputs.Abort]:
        limit_s = self._limits.gap_s
        for model_id, gap in self._gaps.items():
            if not limit_s or now_s - gap.since_s < limit_s:
                continue
            model = state.models[model_id]
            reason = f"operation {model.line.wanted} of this model did not come within {limit_s:g} seconds"
            for seq in sorted(model.line.held):
                future = state.futures.get(f"{model_id}:{seq}")
                if future is not None and future.status is FutureStatus.PENDING:
                    yield inputs.Abort(model.tenant, future.future_id, self._clock.wall_s(), reason)

    def _silent(self, state: TrainState, now_s: float) -> Iterator[inputs.FinishSession]:
        limit_s = self._limits.silent_session_s
        self._heard_s = {name: at_s for name, at_s in self._heard_s.items() if state.sessions[name].finished is None}
        for session in state.sessions.values():
            if not limit_s or session.finished is not None:
                continue
            if now_s - self._heard_s.setdefault(session.session_id, now_s) >= limit_s:
                yield inputs.FinishSession(session.tenant, session.session_id, SILENT, self._clock.wall_s())


def _named(asked: messages.Abort | messages.Utility) -> str | None:
    """What the question is about; None if it is about none in particular, as every list is."""
    match asked:
        case messages.OpenSession() | messages.BeatSession() | messages.FinishSession() | messages.ListSessions():
            return asked.session_id
        case messages.WatchFuture() | messages.Abort() | status.DescribeTimeline():
            return asked.future_id
        case messages.WatchSamples() | messages.JoinSampler() | messages.DescribeSampler():
            return asked.sampler_id
        case messages.DescribeModel() | messages.ListCheckpoints():
            return asked.model_id
        case messages.DescribeCheckpoint() | messages.DeleteCheckpoint() | messages.TimeCheckpoint():
            return asked.run_id
        case (
            messages.ListModels()
            | messages.ImportCheckpoint()
            | messages.DescribeServer()
            | messages.CheckHealth()
            | messages.AddEndpoint()
            | messages.RemoveEndpoint()
            | messages.ListEndpoints()
            | status.DescribeStatus()
            | status.ListTimelines()
            | status.ReadMetrics()
        ):
            return None
        case _:
            assert_never(asked)
