"""`decide` writes nothing: asked twice it answers the same, and it leaves the state as it was."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from strata.base.errors import StrataError
from strata.coord.core.inputs import Input, Outcome
from strata.coord.core.machine import CoordMachine
from strata.coord.core.state import CoordState
from tests.sim.coord.lineage import run_history


class DecidesTwice(CoordMachine):
    """Compares two decisions about each request, and the state before and after them."""

    def __init__(self) -> None:
        self.requests: set[str] = set()

    def decide(self, state: CoordState, given: Input, now_s: float) -> tuple[Sequence[bytes], Outcome]:
        before = self._picture(state)
        first, second = self._attempt(state, given, now_s), self._attempt(state, given, now_s)
        assert first == second, f"{given} was decided in two ways"
        assert self._picture(state) == before, f"the decision about {given} wrote something"
        self.requests.add(type(given).__name__)
        return super().decide(state, given, now_s)

    def _attempt(self, state: CoordState, given: Input, now_s: float) -> object:
        try:
            return super().decide(state, given, now_s)
        except StrataError as error:
            return error.code, error.message, error.detail

    def _picture(self, state: CoordState) -> object:
        """Everything but the indexes, which are caches."""
        soft = copy.deepcopy(state.soft)
        return self.save(state), soft, state.leader_epoch, state.leases_given, state.ticked_s, state.fleet


def test_every_request_of_random_histories_is_decided_twice_alike() -> None:
    machine = DecidesTwice()
    for seed in range(6):
        assert run_history(seed, machine) is None
    assert {"Tick", "NextShards", "Heartbeat", "ReportCheckpoint", "RequestRecovery", "Register"} <= machine.requests
