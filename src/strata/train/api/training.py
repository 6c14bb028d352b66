"""Routes of training: create and unload models, forward, forward_backward, optim_step, custom losses, abort of
gradients.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from strata.base.errors import Code, StrataError
from strata.http.body import JSON
from strata.http.errors import HttpRefusal
from strata.http.reading import offload
from strata.http.route import KIB, LIMIT_FROM_SETTINGS, READS, RESEARCHER, VIEWER, RawBody, Route
from strata.train.api.context import ApiCall, ApiContext
from strata.train.api.futures import operation_route
from strata.train.api.images import decode_images
from strata.train.core import client_commands, ops
from strata.train.images import ImageForm
from strata.train.payload import Payloads
from strata.train.status import queries, views
from strata.train.wire import bodies, native, replies, tinker, tinker_json
from strata.train.wire.pass_request import PassRequest


async def create_model(call: ApiCall, body: bodies.CreateModelBody) -> ops.CreateModel:
    """A model: an adapter over the server's base, or the base itself."""
    del call
    return body.operation()


async def get_info(call: ApiCall, body: bodies.ModelBody) -> replies.ModelInfoReply:
    """Returns what a model is, and where its tokenizer comes from."""
    return replies.info(await call.request(queries.DescribeModel(body.model_id), views.ModelView))


async def create_custom_loss(call: ApiCall, body: bodies.CreateCustomLossBody) -> replies.FutureReply:
    """Create a loss from a traced function, as plain data; passes of the session may name it."""
    accepted = await call.request(body.command(), client_commands.Accepted)
    return replies.FutureReply(request_id=accepted.future_id)


async def forward_backward(call: ApiCall, body: RawBody) -> ops.ForwardBackward | ops.MalformedOperation:
    """A pass over a batch; gradients are added to those the model has."""
    return await _accept_pass(call, body, forward_only=False)


async def forward(call: ApiCall, body: RawBody) -> ops.ForwardBackward | ops.MalformedOperation:
    """A pass over a batch that leaves the gradients alone."""
    return await _accept_pass(call, body, forward_only=True)


async def _accept_pass(
    call: ApiCall, body: RawBody, *, forward_only: bool
) -> ops.ForwardBackward | ops.MalformedOperation:
    """Validate and store the batch: when this returns it is durable, and the orchestrator may get the operation.

    A small batch is stored by the journal: nothing of it is worth a change of threads.
    """
    images = call.context.images
    read = await offload(body.content, lambda: _read_and_encode(body, images, forward_only=forward_only))
    if isinstance(read, ops.MalformedOperation):
        return read
    request, encoded = read
    if request.loss_id:
        completed = await _with_custom_loss(call, request)
        if isinstance(completed, ops.MalformedOperation):
            return completed
        request, encoded = completed, completed.encoded()
    if request.images:
        # A client that is gone does not stop the thread, which keeps the next request out until it ends.
        return await asyncio.shield(_decode_alone(call.context, request))
    large = len(encoded) > ops.INLINE_BYTES
    return request.operation(await offload(encoded, lambda: call.context.payloads.keep(encoded), large=large))


async def _decode_alone(context: ApiContext, request: PassRequest) -> ops.ForwardBackward | ops.MalformedOperation:
    """One request at a time: pixels are many times the bytes of a body."""
    async with context.decoding:
        return await asyncio.to_thread(_decode_and_keep, request, context.payloads)


def _decode_and_keep(request: PassRequest, payloads: Payloads) -> ops.ForwardBackward | ops.MalformedOperation:
    try:
        decoded = decode_images(request)
    except StrataError as error:
        return request.key.malformed(error)
    return decoded.operation(payloads.keep(decoded.encoded()))


async def _with_custom_loss(call: ApiCall, request: PassRequest) -> PassRequest | ops.MalformedOperation:
    """The pass with the graph of its loss; one that cannot be found fails in its turn."""
    if request.loss_id.partition(":")[0] != request.model_id.partition(":")[0]:
        other = StrataError(Code.INVALID, f"loss {request.loss_id!r} was created in another session than the model")
        return request.key.malformed(other)
    try:
        view = await call.request(queries.DescribeCustomLoss(request.loss_id), views.CustomLossView)
    except StrataError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        return request.key.malformed(error)
    return replace(request, custom=view.loss)


def _read_and_encode(
    body: RawBody, images: ImageForm | str, *, forward_only: bool
) -> tuple[PassRequest, bytes] | ops.MalformedOperation:
    request = _read_pass(body, images, forward_only=forward_only)
    return request if isinstance(request, ops.MalformedOperation) else (request, request.encoded())


def _read_pass(body: RawBody, images: ImageForm | str, *, forward_only: bool) -> PassRequest | ops.MalformedOperation:
    if body.media_type == tinker.MEDIA_TYPE and not forward_only:
        return tinker.read_pass(body.content, images)
    if body.media_type == native.MEDIA_TYPE and not forward_only:
        return native.read_pass(body.content)
    if body.media_type == JSON:
        return tinker_json.read_pass(body.content, images, forward_only=forward_only)
    raise HttpRefusal(415, Code.UNSUPPORTED, f"a batch is read as protobuf or JSON, not as {body.media_type!r}")


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
    operation_route("/api/v1/forward_backward", RESEARCHER, forward_backward, LIMIT_FROM_SETTINGS, owner="tenant"),
    operation_route("/api/v1/forward", RESEARCHER, forward, LIMIT_FROM_SETTINGS, owner="tenant"),
    operation_route("/api/v1/optim_step", RESEARCHER, optim_step, owner="tenant"),
    operation_route("/api/v1/create_model", RESEARCHER, create_model, owner="tenant"),
    Route("POST", "/api/v1/create_custom_loss", RESEARCHER, create_custom_loss, 256 * KIB, owner="tenant"),
    Route("POST", "/api/v1/get_info", VIEWER, get_info, owner=READS),
    operation_route("/api/v1/abort_gradient_epoch", RESEARCHER, abort_gradients, 4 * KIB, owner="tenant"),
    operation_route("/api/v1/unload_model", RESEARCHER, unload_model, 4 * KIB, owner="tenant"),
)
