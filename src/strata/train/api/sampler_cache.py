"""Keeps samplers for requests that name a model and no sampler (OpenAI-compatible ones): at most 256 of a tenant,
opened at first use and again when they are lost.

A cache and no state. Another API server, or this one after a restart, opens samplers of its own; sessions that nobody
uses any more expire like those of any client.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from strata.base.errors import Code, StrataError
from strata.train.api.front import session_from_front
from strata.train.core import client_commands, ops
from strata.train.core.sampling import SampleOperation
from strata.train.status import queries, views
from strata.train.status.completion_log import CLIENT_BLOCK
from strata.train.wire.sampling import sampler_id_of

if TYPE_CHECKING:
    from strata.train.api.context import ApiCall

MAX_TENANTS: Final = 10_000
MAX_SAMPLERS: Final = 256
"""The most samplers of one tenant."""
TRIES: Final = 2
"""A sampler that was lost is opened again once for a request."""
_LOST: Final = (Code.NOT_FOUND, Code.PRECONDITION)
"""What a request for a sampler gets that was evicted, could not be opened, or is of an ended session."""

SampledSource = ops.SavedWeights | str | None
"""Saved weights, the id of a sampler that a client has opened, or the base model."""
MakeOperations = Callable[[str, Iterator[int]], Sequence[SampleOperation]]
"""The operations of a request, from the id of its sampler and sequence numbers that are free there."""


@dataclass(eq=False)
class _CachedSampler:
    sampler_id: str
    numbers: Iterator[int] = field(default_factory=itertools.count)


@dataclass(eq=False)
class _TenantSamplers:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session_id: str = ""
    opened: int = 0
    samplers: dict[str, _CachedSampler] = field(default_factory=dict)


class SamplerCache:
    def __init__(self) -> None:
        self._tenants: dict[str, _TenantSamplers] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    async def submit(self, call: ApiCall, weights: SampledSource, version: str, make: MakeOperations) -> Sequence[str]:
        """Submit samples from these weights; returns their futures. All of them are accepted, or none is left behind.

        `version` tells weights of one path apart that were saved one after the other.
        """
        tenant = self._of_tenant(await call.context.tenant(call.caller))
        reason = ""
        for _ in range(TRIES):
            sampler = await self._sampler(call, tenant, weights, version)
            try:
                return await _submit_all(call, make(sampler.sampler_id, sampler.numbers))
            except StrataError as error:
                if error.code not in _LOST:
                    raise
                if tenant.samplers.get(version) is sampler:
                    del tenant.samplers[version]
                reason = error.message
        # The model is there, so this is no NOT_FOUND to the client: the ranks sleep, or have no room for a sampler.
        raise StrataError(Code.UNAVAILABLE, f"no sampler could be opened: {reason}", hint="send it again")

    def abort_later(self, call: ApiCall, future_ids: Sequence[str]) -> None:
        """`abort_all` in a task of its own, for a caller that cannot wait."""
        task = asyncio.create_task(abort_all(call, future_ids))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    def _of_tenant(self, name: str) -> _TenantSamplers:
        tenant = self._tenants.pop(name, None) or _TenantSamplers()
        if len(self._tenants) >= MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        self._tenants[name] = tenant
        return tenant

    async def _sampler(
        self, call: ApiCall, tenant: _TenantSamplers, weights: SampledSource, version: str
    ) -> _CachedSampler:
        async with tenant.lock:
            sampler = tenant.samplers.pop(version, None)
            if sampler is None:
                if len(tenant.samplers) >= MAX_SAMPLERS:
                    del tenant.samplers[next(iter(tenant.samplers))]
                if isinstance(weights, str):
                    sampler = await _join_sampler(call, weights)
                else:
                    sampler = await _open_sampler(call, tenant, weights)
            tenant.samplers[version] = sampler
            return sampler


async def _join_sampler(call: ApiCall, sampler_id: str) -> _CachedSampler:
    """Shares the sampler of a client, with numbers of its own. NOT_FOUND if it is none of the caller's."""
    joined = await call.request(queries.JoinSampler(sampler_id), views.SamplerJoined)
    return _CachedSampler(sampler_id, itertools.count(joined.copy * CLIENT_BLOCK))


async def _open_sampler(call: ApiCall, tenant: _TenantSamplers, weights: ops.SavedWeights | None) -> _CachedSampler:
    """Opens it in the session of the tenant, or in a new one if that has ended."""
    if tenant.session_id:
        try:
            return await _open_in_session(call, tenant, weights)
        except StrataError as error:
            if error.code not in _LOST:
                raise
    session_id = session_from_front(call.caller, call.headers) or call.context.ids.new("session")
    opening = client_commands.OpenSession(session_id, user_metadata={"display_name": "OpenAI-compatible endpoints"})
    await call.request(opening, client_commands.Done)
    tenant.session_id, tenant.opened = session_id, 0
    tenant.samplers.clear()
    return await _open_in_session(call, tenant, weights)


async def _open_in_session(call: ApiCall, tenant: _TenantSamplers, weights: ops.SavedWeights | None) -> _CachedSampler:
    sampler_id = sampler_id_of(tenant.session_id, tenant.opened)
    tenant.opened += 1
    base = call.context.settings.model.base_model
    await call.submit(ops.OpenSampler(sampler_id, base, weights), tenant.session_id)
    return _CachedSampler(sampler_id)


async def _submit_all(call: ApiCall, operations: Sequence[SampleOperation]) -> Sequence[str]:
    outcomes = await asyncio.gather(*map(call.submit, operations), return_exceptions=True)
    accepted = [outcome.future_id for outcome in outcomes if isinstance(outcome, client_commands.Accepted)]
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            await abort_all(call, accepted)
            raise outcome
    return accepted


async def abort_all(call: ApiCall, future_ids: Sequence[str]) -> None:
    """Cancel samples that nobody waits for any more. What cannot be cancelled now is sampled in vain."""
    await asyncio.gather(*map(call.abort, future_ids), return_exceptions=True)
