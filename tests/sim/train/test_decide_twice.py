"""`decide` writes nothing: every input of simulated histories is decided twice, with the same outcome and state."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from strata.base.errors import StrataError
from strata.train.core.inputs import Decision, Input
from strata.train.core.machine import TrainMachine
from strata.train.core.state import TrainState
from tests.sim.train.scenario import run_seed

SEEDS = (0, 7, 13)


def fingerprint(state: TrainState) -> bytes:
    """All that facts build, and the soft state beside it."""
    return msgspec.msgpack.encode((state.save(), state.scheduler.deficits()))


@pytest.mark.parametrize("seed", SEEDS)
def test_deciding_twice_gives_the_same_and_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[type[Input]] = []
    decide = TrainMachine.decide

    def decide_twice(
        machine: TrainMachine, state: TrainState, request: Input, now_s: float
    ) -> tuple[Sequence[bytes], Decision]:
        before = fingerprint(state)
        outcomes: list[tuple[Sequence[bytes], Decision] | StrataError] = []
        for _ in range(2):
            try:
                outcomes.append(decide(machine, state, request, now_s))
            except StrataError as error:
                outcomes.append(error)
            assert fingerprint(state) == before, request
        first, second = outcomes
        decided.append(type(request))
        if isinstance(first, StrataError):
            assert isinstance(second, StrataError), request
            assert (second.code, second.message) == (first.code, first.message), request
            raise first
        assert second == first, request
        return first

    monkeypatch.setattr(TrainMachine, "decide", decide_twice)
    outcome = run_seed(seed)
    assert outcome.problem is None, outcome.problem
    assert len(set(decided)) >= 5, "the histories hold too few kinds of inputs"
