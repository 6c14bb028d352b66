"""The coordinator as a machine on a journal: its core bound to the encoding of facts and snapshots."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from strata.coord.core.apply import apply
from strata.coord.core.decide import decide
from strata.coord.core.facts import Fact, GangStatus
from strata.coord.core.inputs import Input, Outcome
from strata.coord.core.state import CoordState, JobState

_encode = msgspec.msgpack.Encoder().encode
decode_fact = msgspec.msgpack.Decoder(Fact).decode
_decode_jobs = msgspec.msgpack.Decoder(list[JobState]).decode


class CoordMachine:
    """Implements `strata.journal.replica.Machine`."""

    def initial(self) -> CoordState:
        return CoordState()

    def decide(self, state: CoordState, request: Input, now_s: float) -> tuple[Sequence[bytes], Outcome]:
        outcome = decide(state, request, now_s)
        return [_encode(fact) for fact in outcome.facts], outcome

    def apply(self, state: CoordState, fact: bytes) -> CoordState:
        apply(state, decode_fact(fact))
        return state

    def save(self, state: CoordState) -> bytes:
        return _encode(list(state.jobs.values()))

    def load(self, saved: bytes) -> CoordState:
        jobs = _decode_jobs(saved)
        for job in jobs:
            if job.status is GangStatus.RUNNING and not job.members:
                # Saved before jobs had a status.
                job.status = GangStatus.STOPPED
        return CoordState(jobs={job.job: job for job in jobs})
