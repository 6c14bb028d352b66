"""Routes of sampling: open samplers, draw samples, check that a prompt fits, and add, remove and list inference
engines.

Engines are for operators: an engine serves the weights it gets to all its clients.
"""

from __future__ import annotations

from strata.http.route import KIB, MIB, OPERATOR, RESEARCHER, VIEWER, Route
from strata.train.api.context import ApiCall
from strata.train.api.futures import operation_route
from strata.train.core import client_commands, ops
from strata.train.core.sampling import SampleOperation, check_result_size
from strata.train.status import queries, views
from strata.train.wire import bodies, replies, sampling
from strata.train.wire.fields import invalid_field


async def sample(call: ApiCall, body: sampling.SampleRequest) -> sampling.SampleFuture:
    """Draw samples that continue a prompt → future"""
    operation = body.operation()
    room = call.context.settings.sampling.cached_tokens
    check_prompt_fits(operation, room)
    # No rank samples more than it has room for. How many that are without a limit of the client's, the ranks know.
    check_result_size(operation, min(operation.params.max_tokens or 1, room - operation.length + 1))
    accepted = await call.submit(operation)
    sequences = [f"{accepted.future_id}:{place}" for place in range(operation.num_samples)]
    return sampling.SampleFuture(request_id=accepted.future_id, sample_sequence_ids=sequences)


def check_prompt_fits(operation: SampleOperation, room: int) -> None:
    """Refuses, before it is made durable, what no rank can ever take: it does not belong into the journal."""
    if operation.length >= room:
        raise invalid_field("prompt", f"has {operation.length} tokens, and a rank has room for {room}")


async def save_for_sampler(call: ApiCall, body: sampling.SaveWeightsForSampler) -> ops.SaveWeights | ops.SaveSampler:
    """Weights to sample from: files with a name, or a sampler that lives in memory alone."""
    del call
    return body.operation()


async def create_session(call: ApiCall, body: sampling.CreateSamplingSession) -> sampling.SamplingSession:
    """A sampler of the base, or of saved weights."""
    model = call.context.settings.model
    operation = body.operation(model.base_model)
    if operation.weights is None and model.training == "full":
        raise invalid_field(
            "base_model", "this server does full fine-tunes: the base model is not kept beside the model"
        )
    await call.submit(operation, body.session_id)
    return sampling.SamplingSession(sampling_session_id=operation.sampler_id)


async def join_session(call: ApiCall, body: sampling.JoinSamplingSession) -> sampling.JoinedSession:
    """A number for another copy of a sampler's client"""
    joined = await call.request(queries.JoinSampler(body.sampling_session_id), views.SamplerJoined)
    return sampling.JoinedSession(client_counter=joined.copy)


async def show(call: ApiCall) -> sampling.SamplerReply:
    """Returns what a sampler samples from."""
    sampler = await call.request(queries.DescribeSampler(call.path["sampler_id"]), views.SamplerView)
    return sampling.SamplerReply(
        sampler_id=sampler.sampler_id,
        base_model=sampler.base_model,
        model_path=sampler.model_path,
        kind="inflight" if sampler.inflight else "snapshot",
    )


async def add_endpoint(call: ApiCall, body: bodies.AddEndpointBody) -> replies.EndpointAddedReply:
    """Add an engine that gets new weights, at a URL that the settings allow."""
    request = body.to_request()
    await call.request(request, client_commands.Done)
    return replies.EndpointAddedReply(name=request.name)


async def remove_endpoint(call: ApiCall, body: bodies.RemoveEndpointBody) -> None:
    """Tell an engine of nothing more; what it has, it keeps."""
    await call.request(client_commands.RemoveEndpoint(body.name), client_commands.Done)


async def list_endpoints(call: ApiCall) -> replies.EndpointsReply:
    """The engines, whether they are reachable, and which weights they have."""
    found = await call.request(queries.ListEndpoints(), views.EndpointList)
    return replies.EndpointsReply(endpoints=found.endpoints)


async def sync_weights(call: ApiCall, body: bodies.SyncWeightsBody) -> ops.SyncWeights:
    """Save a model's weights for sampling and publish them to the engines."""
    del call
    return body.operation()


ROUTES = (
    Route("POST", "/api/v1/asample", RESEARCHER, sample, 16 * MIB, owner="tenant"),
    operation_route("/api/v1/save_weights_for_sampler", RESEARCHER, save_for_sampler, owner="tenant"),
    Route("POST", "/api/v1/create_sampling_session", RESEARCHER, create_session, 16 * KIB, owner="tenant"),
    Route("POST", "/api/v1/join_sampling_session", RESEARCHER, join_session, 4 * KIB, owner="tenant"),
    Route("GET", "/api/v1/samplers/{sampler_id}", VIEWER, show, KIB),
    Route("POST", "/add_inference_endpoint", OPERATOR, add_endpoint, 16 * KIB, operation="inference.add"),
    Route("POST", "/remove_inference_endpoint", OPERATOR, remove_endpoint, 4 * KIB, operation="inference.remove"),
    Route("GET", "/list_inference_endpoints", OPERATOR, list_endpoints, KIB, operation="inference.listed"),
    operation_route("/api/v1/sync_inference_weights", OPERATOR, sync_weights, 16 * KIB, operation="inference.sync"),
)
