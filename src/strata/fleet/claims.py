"""Batches claims: many long polls share one transaction at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.core.fair_share import OwnerShares
from strata.fleet.ports import LeaseStore
from strata.fleet.records import Claim, JobLease

ReadShares = Callable[[], Awaitable[OwnerShares | None]]
BATCH: Final = 64
"""Claims per transaction at most; claims that arrive while it runs share the next one."""


class ClaimQueue:
    def __init__(
        self, store: LeaseStore, lease_s: float, now_s: Callable[[], float], shares: ReadShares | None = None
    ) -> None:
        self._store = store
        self._read_shares = shares
        self._lease_s = lease_s
        self._now_s = now_s
        self._pending: list[tuple[Claim, asyncio.Future[Sequence[JobLease]]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, claim: Claim) -> Sequence[JobLease]:
        reply: asyncio.Future[Sequence[JobLease]] = asyncio.get_running_loop().create_future()
        self._pending.append((claim, reply))
        if self._worker is None or self._worker.done():
            self._start_worker()
        return await reply

    def _start_worker(self) -> None:
        self._worker = asyncio.create_task(self._run())
        self._worker.add_done_callback(self._on_worker_done)

    def _on_worker_done(self, task: asyncio.Task[None]) -> None:
        """A defect ends the worker task with its batch; another worker serves the pending claims."""
        if self._pending and task is self._worker and not task.cancelled():
            self._start_worker()

    async def _run(self) -> None:
        while self._pending:
            # Yield to the event loop once: requests that arrived together share a batch.
            await asyncio.sleep(0)
            batch = [(claim, reply) for claim, reply in self._pending[:BATCH] if not reply.done()]
            del self._pending[:BATCH]
            if batch:
                await self._claim_batch(batch)

    async def _claim_batch(self, batch: list[tuple[Claim, asyncio.Future[Sequence[JobLease]]]]) -> None:
        failure = StrataError(Code.INTERNAL, "the claim was not answered")
        try:
            shares = None if self._read_shares is None else await self._read_shares()
            granted = await self._store.claim([claim for claim, _ in batch], self._lease_s, self._now_s(), shares)
            if any(granted):
                failpoint("fleet.claim.committed")
            # A client that has disconnected meanwhile repeats its claim_id and gets the same leases.
            for (_, reply), leases in zip(batch, granted, strict=True):
                if not reply.done():
                    reply.set_result(leases)
        except StrataError as error:
            failure = error
        finally:
            # No claim stays without a reply, whatever failed.
            for _, reply in batch:
                if not reply.done():
                    reply.set_exception(failure)
