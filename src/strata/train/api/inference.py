"""Routes of inference engines next to this server. For operators: an engine serves the weights it gets to all its
clients."""

from __future__ import annotations

from strata.http.route import KIB, OPERATOR, Route
from strata.train.api.context import ApiCall
from strata.train.api.operations import operation_route
from strata.train.core import messages, ops
from strata.train.wire import inference


async def add(call: ApiCall, body: inference.AddEndpointBody) -> inference.EndpointAddedReply:
    """Add an engine that gets new weights, at a URL that the settings allow."""
    request = body.to_request()
    await call.request(request, messages.Done)
    return inference.EndpointAddedReply(name=request.name)


async def remove(call: ApiCall, body: inference.RemoveEndpointBody) -> None:
    """Tell an engine of nothing more; what it has, it keeps."""
    await call.request(messages.RemoveEndpoint(body.name), messages.Done)


async def listed(call: ApiCall) -> inference.EndpointsReply:
    """The engines, whether they are reachable, and which weights they have."""
    return inference.endpoints_of(await call.request(messages.ListEndpoints(), messages.EndpointList))


async def sync(call: ApiCall, body: inference.SyncWeightsBody) -> ops.SyncWeights:
    """Save a model's weights for sampling and publish them to the engines."""
    del call
    return body.operation()


ROUTES = (
    Route("POST", "/add_inference_endpoint", OPERATOR, add, 16 * KIB),
    Route("POST", "/remove_inference_endpoint", OPERATOR, remove, 4 * KIB),
    Route("GET", "/list_inference_endpoints", OPERATOR, listed, KIB),
    operation_route("/api/v1/sync_inference_weights", OPERATOR, sync, 16 * KIB),
)
