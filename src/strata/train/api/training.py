"""Routes of training: each handler returns an operation of the core; the client gets a future once it is durable."""

from __future__ import annotations

import asyncio

from strata.base.errors import Code
from strata.http.body import JSON
from strata.http.errors import HttpRefusal
from strata.http.route import KIB, LIMIT_FROM_SETTINGS, RESEARCHER, VIEWER, RawBody, Route
from strata.train.api.context import ApiCall, ApiContext
from strata.train.api.futures import operation_route
from strata.train.core import messages, ops
from strata.train.wire import bodies, native, replies, tinker, tinker_json


async def create_model(call: ApiCall, body: bodies.CreateModelBody) -> ops.CreateModel:
    """A model: an adapter over the server's base, or the base itself."""
    del call
    return body.operation()


async def get_info(call: ApiCall, body: bodies.ModelBody) -> replies.ModelInfoReply:
    """What a model is, and where its tokenizer comes from."""
    return replies.info(await call.request(messages.DescribeModel(body.model_id), messages.ModelView))


async def forward_backward(call: ApiCall, body: RawBody) -> ops.ForwardBackward | ops.MalformedOperation:
    """A pass over a batch; gradients are added to those the model has."""
    return await asyncio.to_thread(_pass, call.context, body, forward_only=False)


async def forward(call: ApiCall, body: RawBody) -> ops.ForwardBackward | ops.MalformedOperation:
    """A pass over a batch that leaves the gradients alone."""
    return await asyncio.to_thread(_pass, call.context, body, forward_only=True)


def _pass(context: ApiContext, body: RawBody, *, forward_only: bool) -> ops.ForwardBackward | ops.MalformedOperation:
    """Validate and store the batch: when this returns it is durable, and the orchestrator may get the operation."""
    if body.media_type == tinker.MEDIA_TYPE and not forward_only:
        request = tinker.read_pass(body.content)
    elif body.media_type == native.MEDIA_TYPE and not forward_only:
        request = native.read_pass(body.content)
    elif body.media_type == JSON:
        request = tinker_json.read_pass(body.content, forward_only=forward_only)
    else:
        raise HttpRefusal(415, Code.UNSUPPORTED, f"a batch is read as protobuf or JSON, not as {body.media_type!r}")
    if isinstance(request, ops.MalformedOperation):
        return request
    return request.operation(context.payloads.keep(request.encoded()))


async def optim_step(call: ApiCall, body: bodies.OptimStepBody) -> ops.OptimStep:
    """Apply the gradients."""
    del call
    return body.operation()


async def abort_gradients(call: ApiCall, body: bodies.AbortGradientsBody) -> ops.AbortGradients:
    """Discard the gradients since the last step."""
    del call
    return body.operation()


async def unload_model(call: ApiCall, body: bodies.UnloadModelBody) -> ops.UnloadModel:
    """Unload a model."""
    del call
    return body.operation()


ROUTES = (
    operation_route("/api/v1/forward_backward", RESEARCHER, forward_backward, LIMIT_FROM_SETTINGS),
    operation_route("/api/v1/forward", RESEARCHER, forward, LIMIT_FROM_SETTINGS),
    operation_route("/api/v1/optim_step", RESEARCHER, optim_step),
    operation_route("/api/v1/create_model", RESEARCHER, create_model),
    Route("POST", "/api/v1/get_info", VIEWER, get_info),
    operation_route("/api/v1/abort_gradient_epoch", RESEARCHER, abort_gradients, 4 * KIB),
    operation_route("/api/v1/unload_model", RESEARCHER, unload_model, 4 * KIB),
)
