"""Finishes sessions whose client is silent, and aborts operations behind a gap in the sequence after 30 s.

Any request about a session by name shows that its client is alive, not only its heartbeat: some clients send none. The
idle time counts from what this process received, on the monotonic clock. A new orchestrator grants the whole timeout
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from strata.base import log
from strata.base.clock import Clock
from strata.train.core.client_commands import AbortOperation, FinishSession
from strata.train.core.future import FutureStatus
from strata.train.core.inputs import ClientCommand
from strata.train.core.state import TrainState
from strata.train.orchestrator.state_store import StateStore
from strata.train.settings import LimitSettings

IDLE_REASON = "silent"
LOST_GAP_S = 30.0
"""How long operations wait for a missing predecessor that may have been lost with an earlier host of the server."""
_log = log.get(__name__)


class _Gap(NamedTuple):
    released: int
    """The last sequence number before the gap."""
    since_s: float


class SessionReaper:
    def __init__(self, store: StateStore, limits: LimitSettings, lost: str = "") -> None:
        """`lost` says what an earlier host of the server took with it; empty if nothing."""
        self._store = store
        self._limits = limits
        self._lost = lost
        self._gap_s = min(limits.gap_s or LOST_GAP_S, LOST_GAP_S) if lost else limits.gap_s
        self._clock: Clock = store.clock
        self._last_seen_s: dict[str, float] = {}
        self._gaps: dict[str, _Gap] = {}

    @property
    def interval_s(self) -> float:
        """Returns how often to run, so that nothing expires much later than its timeout."""
        timeouts = [timeout_s for timeout_s in (self._limits.silent_session_s, self._gap_s) if timeout_s]
        return min(timeouts, default=86_400.0) / 4

    def touch(self, tenant: str, name: str) -> None:
        """The client of a session is alive. `name` begins with the id of the session. Other tenants do not count."""
        session_id = name.partition(":")[0]
        session = self._store.state.sessions.get(session_id)
        if session is not None and session.tenant == tenant and session.finished is None:
            self._last_seen_s[session_id] = self._clock.monotonic_s()

    async def run_once(self) -> None:
        now_s = self._clock.monotonic_s()
        state = self._store.state
        self._track_gaps(state, now_s)
        for request in [*self._stalled_operations(state, now_s), *self._idle_sessions(state, now_s)]:
            event = "session_expired" if isinstance(request.command, FinishSession) else "held_operation_expired"
            _log.warning(event, tenant=request.tenant, name=request.command.subject)
            await self._store.commit(request)

    def _track_gaps(self, state: TrainState, now_s: float) -> None:
        held = {model_id: model.line.released for model_id, model in state.models.items() if model.line.held}
        self._gaps = {
            model_id: gap if (gap := self._gaps.get(model_id)) and gap.released == released else _Gap(released, now_s)
            for model_id, released in held.items()
        }

    def _stalled_operations(self, state: TrainState, now_s: float) -> Iterator[ClientCommand]:
        timeout_s = self._gap_s
        for model_id, gap in self._gaps.items():
            if not timeout_s or now_s - gap.since_s < timeout_s:
                continue
            model = state.models[model_id]
            reason = f"operation {model.line.wanted} of this model did not come within {timeout_s:g} seconds"
            reason += f"; {self._lost}" if self._lost else ""
            for seq in sorted(model.line.held):
                future = state.futures.get(f"{model_id}:{seq}")
                if future is not None and future.status is FutureStatus.PENDING:
                    command = AbortOperation(future.future_id, reason)
                    yield ClientCommand(model.tenant, command, self._clock.wall_s())

    def _idle_sessions(self, state: TrainState, now_s: float) -> Iterator[ClientCommand]:
        timeout_s = self._limits.silent_session_s
        self._last_seen_s = {
            session_id: seen_s
            for session_id, seen_s in self._last_seen_s.items()
            if (session := state.sessions.get(session_id)) is not None and session.finished is None
        }
        for session in state.sessions.values():
            if not timeout_s or session.finished is not None:
                continue
            if now_s - self._last_seen_s.setdefault(session.session_id, now_s) >= timeout_s:
                command = FinishSession(session.session_id, IDLE_REASON)
                yield ClientCommand(session.tenant, command, self._clock.wall_s())
