"""Binds the core of the orchestrator to a journal: encoding of facts and of snapshots of the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from strata.base.stored import stored_decoder
from strata.train.core import facts
from strata.train.core.apply import apply
from strata.train.core.decide import decide
from strata.train.core.inputs import Decision, Input
from strata.train.core.state import Rules, SavedState, TrainState

_encode = msgspec.msgpack.Encoder().encode
_decode_saved: Callable[[bytes], SavedState] = stored_decoder(SavedState, "a snapshot")


class TrainMachine:
    """Implements `strata.journal.replica.Machine`."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def initial(self) -> TrainState:
        return TrainState(self._rules)

    def observe(self, state: TrainState, request: Input, now_s: float) -> None:
        """A request alone changes no soft state: only a dispatch does, by its outcome."""

    def observe_outcome(self, state: TrainState, request: Input, decision: Decision, now_s: float) -> None:
        """The only writer of soft state: charge the tenants of a dispatch, before its facts remove their operations."""
        del request, now_s
        if decision.charges is not None:
            state.scheduler.charge(decision.charges)

    def decide(self, state: TrainState, request: Input, now_s: float) -> tuple[Sequence[bytes], Decision]:
        del now_s  # Times are parts of the inputs: they end up in facts, and a monotonic clock means nothing there.
        decision = decide(state, request)
        return [facts.encode(fact) for fact in decision.facts], decision

    def apply(self, state: TrainState, fact: bytes) -> TrainState:
        apply(state, facts.decode(fact))
        return state

    def save(self, state: TrainState) -> bytes:
        return _encode(state.save())

    def load(self, saved: bytes) -> TrainState:
        return TrainState(self._rules, _decode_saved(saved))
