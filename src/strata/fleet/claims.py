"""Claims that wait: many long polls, one transaction at a time, and nobody asks twice while nothing has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.ports import Claim, JobLease, Store

BATCH: Final = 64
"""Claims that share a transaction at most; those that come while it runs share the next."""


class ClaimQueue:
    def __init__(self, store: Store, lease_s: float, now_s: Callable[[], float]) -> None:
        self._store = store
        self._lease_s = lease_s
        self._now_s = now_s
        self._waiting: list[tuple[Claim, asyncio.Future[Sequence[JobLease]]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def submit(self, claim: Claim) -> Sequence[JobLease]:
        reply: asyncio.Future[Sequence[JobLease]] = asyncio.get_running_loop().create_future()
        self._waiting.append((claim, reply))
        if self._serving is None or self._serving.done():
            self._start()
        return await reply

    def _start(self) -> None:
        self._serving = asyncio.create_task(self._serve())
        self._serving.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        """A defect ends the task with the batch that met it; those behind it are served by another."""
        if self._waiting and task is self._serving and not task.cancelled():
            self._start()

    async def _serve(self) -> None:
        while self._waiting:
            # A turn of the loop: requests that have arrived together are answered together.
            await asyncio.sleep(0)
            batch = [(claim, reply) for claim, reply in self._waiting[:BATCH] if not reply.done()]
            del self._waiting[:BATCH]
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: list[tuple[Claim, asyncio.Future[Sequence[JobLease]]]]) -> None:
        failure = StrataError(Code.INTERNAL, "the claim was not answered")
        try:
            given = await self._store.claim([claim for claim, _ in batch], self._lease_s, self._now_s())
            if any(given):
                failpoint("fleet.claim.committed")
            # Who has gone meanwhile asks again under the same claim_id, and gets the same.
            for (_, reply), leases in zip(batch, given, strict=True):
                if not reply.done():
                    reply.set_result(leases)
        except StrataError as error:
            failure = error
        finally:
            # Nobody is left waiting, whatever went wrong.
            for _, reply in batch:
                if not reply.done():
                    reply.set_exception(failure)
