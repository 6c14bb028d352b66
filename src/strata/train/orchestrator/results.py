"""Answers queries that wait (at most 120 s): the result of an operation, the tokens of a running sample, the next
samples that end.

A result is sent when it is durable, except one that rank 0 keeps until then.
"""

from __future__ import annotations

from typing import Final

from strata.base.errors import Code, StrataError
from strata.train.core import custom_losses, ops
from strata.train.core.lookup import check_sampler_owner, find_future, find_model, find_sampler
from strata.train.link import messages
from strata.train.orchestrator.rank_session import OrchestratorContext
from strata.train.orchestrator.state_store import StateStore
from strata.train.status import queries, views
from strata.train.status.completion_log import target_of
from strata.train.status.throughput import describe_wait

MAX_WAIT_S: Final = 120.0


async def watch_future(context: OrchestratorContext, tenant: str, query: queries.WatchFuture) -> messages.Output:
    store, state = context.store, context.store.state
    if query.future_id in state.custom_losses:
        created = custom_losses.find(state, tenant, query.future_id)
        return views.FutureResult(ops.LossCreated(created.loss_id))
    future = find_future(state, tenant, query.future_id)
    if future.result is None and query.wait_s > 0:
        await store.wait_for_completion(query.future_id, min(query.wait_s, MAX_WAIT_S))
    if future.result is not None:
        if future.ended_at_s + context.settings.limits.result_ttl_s <= store.clock.wall_s():
            await store.expire_results()
            find_future(state, tenant, query.future_id)
        if isinstance(future.result, ops.Failed | ops.WeightsSynced | ops.SampleDone) or not future.number:
            await _wait_durable(store)
        return views.FutureResult(future.result)
    return describe_wait(state, future, context.throughput, attached=context.attached is not None)


async def watch_tokens(context: OrchestratorContext, tenant: str, query: queries.WatchTokens) -> messages.Output:
    store = context.store
    deadline_s = store.clock.monotonic_s() + min(query.wait_s, MAX_WAIT_S)
    while True:
        future = find_future(store.state, tenant, query.future_id)
        parts = store.streams.after(query.future_id, query.counts)
        left_s = deadline_s - store.clock.monotonic_s()
        if parts or future.result is not None or left_s <= 0:
            break
        # Tokens that this client has, or cannot use yet, wake it too.
        await store.wait_for_completion(query.future_id, left_s)
    if parts:
        return views.TokensSampled(parts)
    return await watch_future(context, tenant, queries.WatchFuture(query.future_id, 0.0))


async def watch_samples(context: OrchestratorContext, tenant: str, query: queries.WatchSamples) -> views.SamplesEnded:
    store, state = context.store, context.store.state
    check_sampler_owner(state, tenant, query.sampler_id)
    target = query.sampler_id, query.copy
    ended, cursor = store.completions.after(target, query.cursor)
    if not ended:
        has_open = any(target_of(future_id) == target for future_id in state.samples_of(query.sampler_id))
        if has_open:
            store.completions.expect(target)
        elif query.linger:
            # NOT_FOUND if the sampler was evicted: nothing of it will ever end.
            find_sampler(state, tenant, query.sampler_id)
        if query.wait_s > 0 and (has_open or query.linger):
            await store.wait_for_completion(target, min(query.wait_s, MAX_WAIT_S))
            ended, cursor = store.completions.after(target, query.cursor)
    samples = [views.view_ended_sample(state, future_id) for future_id in ended]
    if samples:
        await _wait_durable(store)
    return views.SamplesEnded(samples, cursor)


async def list_results(context: OrchestratorContext, tenant: str, query: queries.ListResults) -> views.ResultList:
    model = find_model(context.store.state, tenant, query.model_id)
    results = views.ended_results(context.store.state, query.model_id, query.after, query.limit)
    # A result that is lost with the leadership may come again with another end.
    await _wait_durable(context.store)
    return views.ResultList(results, model.unloaded)


async def _wait_durable(store: StateStore) -> None:
    """Waits before a failure or a sample is sent: were it lost with the leadership, the client would see another
    one."""
    try:
        await store.wait_durable()
    except StrataError as error:
        raise lead_lost(error) from error


def lead_lost(reason: StrataError) -> StrataError:
    return StrataError(Code.UNAVAILABLE, f"the lead was lost: {reason.message}", hint="ask again")
