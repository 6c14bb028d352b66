"""Heartbeats on the wire: most are answered with bytes that were made once for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord import beats
from strata.coord.core.inputs import Beat
from strata.coord.observed import Plain
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.rpc.status import STATUS_OF, number
from strata.coord.service import CoordinatorService, not_leading
from strata.coord.wire import Identity

MAX_BATCH: Final = 10_000


class Heartbeats:
    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def plain(self, request: pb.HeartbeatRequest) -> bytes | None:
        """The answer to nearly every heartbeat where nobody needs a token; None: `one` has it."""
        service = self._service
        # A call that leaves its names to the metadata finds no job without a name here.
        found = beats.plain(service, request, request.job_id, request.worker_id, service.clock.monotonic_s())
        return None if found is None else found.encoded

    async def one(self, request: pb.HeartbeatRequest, who: Identity, _: object) -> pb.HeartbeatResponse | bytes:
        job_id, worker_id = who.job_of(request.job_id), who.worker_of(request.worker_id)
        found = beats.at_once(self._service, request, job_id, worker_id, self._service.clock.monotonic_s())
        if isinstance(found, Plain):
            return found.encoded
        return found if not isinstance(found, Beat) else await beats.after_commit(self._service, request, found)

    async def batch(self, request: pb.HeartbeatBatchRequest, who: Identity, _: object) -> bytes:
        """Most beats make no facts and are answered in this one turn of the loop."""
        heartbeats = request.heartbeats
        if len(heartbeats) > MAX_BATCH:
            raise StrataError(Code.INVALID, f"a batch has at most {MAX_BATCH} heartbeats")
        service = self._service
        if not service.leads:
            raise not_leading()
        # A repeated field on the wire is its elements one after the other.
        parts: list[bytes] = []
        rest: list[tuple[int, pb.HeartbeatOutcome]] = []
        later: list[Awaitable[None]] = []
        now_s = service.clock.monotonic_s()
        for message in heartbeats:
            name, job_id = message.worker_id, message.job_id
            outcome: pb.HeartbeatOutcome | None = None
            try:
                job_id, worker_id = who.job_of(job_id), who.worker_of(name)
                found = beats.at_once(service, message, job_id, worker_id, now_s)
                if isinstance(found, Plain):
                    parts.append(found.outcomes.get(name) or _keep(found, name, job_id))
                    continue
                outcome = pb.HeartbeatOutcome(worker_id=name, job_id=job_id)
                if isinstance(found, Beat):
                    later.append(self._later(message, found, outcome))
                else:
                    outcome.response.CopyFrom(found)
            except StrataError as error:
                outcome = outcome or pb.HeartbeatOutcome(worker_id=name, job_id=job_id)
                _refuse(outcome, error)
            rest.append((len(parts), outcome))
            parts.append(b"")
        if later:
            await asyncio.gather(*later)
        for at, outcome in rest:
            parts[at] = _field(outcome)
        return b"".join(parts)

    async def _later(self, message: pb.HeartbeatRequest, beat: Beat, outcome: pb.HeartbeatOutcome) -> None:
        try:
            outcome.response.CopyFrom(await beats.after_commit(self._service, message, beat))
        except StrataError as error:
            _refuse(outcome, error)


def _keep(plain: Plain, name: str, job_id: str) -> bytes:
    made = _field(pb.HeartbeatOutcome(worker_id=name, job_id=job_id, response=plain.message))
    # An empty name is that of whoever the metadata says: not the same worker every time, but the same bytes.
    plain.outcomes[name] = made
    return made


def _field(outcome: pb.HeartbeatOutcome) -> bytes:
    return pb.HeartbeatBatchResponse(outcomes=(outcome,)).SerializeToString()


def _refuse(outcome: pb.HeartbeatOutcome, error: StrataError) -> None:
    outcome.status_code = number(STATUS_OF[error.code])
    outcome.status_message = str(error)
