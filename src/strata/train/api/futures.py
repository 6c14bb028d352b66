"""Routes that submit an operation and that poll, retrieve or cancel its future; in which format a result is sent, and
what a client gets while it waits.

If the content of such a request cannot be read, it becomes an operation that fails in its turn: clients count on after
a refusal, and every operation after it would wait for ever.
A known future never gets a 404, which clients take for a final failure: not while the operation waits, not while the
orchestrator is away, not after the result has expired.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.http.body import decode_json, path_first
from strata.http.reading import offload
from strata.http.route import KIB, MIB, RESEARCHER, Access, Handler, RawBody, RawReply, Route, Signature, signature_of
from strata.train.api.context import ApiCall
from strata.train.core import ops
from strata.train.core.sampling import SampleResult, decode_result
from strata.train.status import queries, views
from strata.train.status.views import QueueState
from strata.train.wire import bodies, native, sampling, tinker, tinker_json
from strata.train.wire.pass_request import OperationKey
from strata.train.wire.replies import FutureReply, TryAgain
from strata.train.wire.sdk_fields import SdkDecoder


class _Head(msgspec.Struct):
    model_id: str
    seq_id: int


_heads: Final = msgspec.json.Decoder(_Head)


def operation_route(
    path: str, access: Access, handler: Handler, limit: int = 64 * KIB, *, owner: str = "", operation: str = ""
) -> Route:
    """A route whose handler returns an operation of the core: it is made durable, and the client gets its future."""
    declared = signature_of(handler)
    decoder = None if declared.body is RawBody else SdkDecoder(declared.body)

    def decode(body: RawBody) -> Any:
        return body if decoder is None else decode_json(decoder, body.content or b"{}", path_first)

    async def submit(call: ApiCall, body: RawBody) -> FutureReply:
        operation: ops.Operation | None = None
        try:
            content = await offload(body.content, lambda: decode(body))
            operation = await handler(call, body=content)
            assert operation is not None
            accepted = await call.submit(operation, _session_of(operation))
        except StrataError as error:
            key = _key_of(operation, body.content) if error.code in (Code.INVALID, Code.UNSUPPORTED) else None
            if key is None:
                raise
            accepted = await call.submit(key.malformed(error))
        failpoint("train.api.before_reply")
        return FutureReply(request_id=accepted.future_id, model_id=accepted.model_id)

    submit.__doc__, submit.__module__, submit.__name__ = handler.__doc__, handler.__module__, handler.__name__
    documented = Signature(declared.body, declared.query, FutureReply)
    return Route("POST", path, access, submit, limit, owner=owner, operation=operation, documented=documented)


def _key_of(operation: ops.Operation | None, raw: bytes) -> OperationKey | None:
    """Returns where an operation that cannot be done stands in the order of its model; None if it has no place
    there."""
    if isinstance(operation, ops.Sequenced):
        return OperationKey(operation.model_id, operation.seq_id)
    try:
        head = decode_json(_heads, raw or b"{}")
        return OperationKey.of(head.model_id, head.seq_id)
    except StrataError:
        return None


def _session_of(operation: ops.Operation) -> str:
    return operation.model_id.rpartition(":train:")[0] if isinstance(operation, ops.CreateModel) else ""


async def retrieve(call: ApiCall, body: bodies.RetrieveFutureBody) -> RawReply:
    """The result of an operation, or after a while 408 with its place in the queue."""
    longest_s = call.context.settings.server.poll_s
    wait_s = longest_s if body.wait_s is None else min(body.wait_s, longest_s)
    try:
        outcome = await call.watch(body.request_id, wait_s)
    except StrataError as error:
        # Clients retry a 5xx here at once and for ever; a 408 only after we have waited for the orchestrator.
        if error.code not in (Code.UNAVAILABLE, Code.EXHAUSTED):
            raise
        outcome = views.QueuePosition(QueueState.PAUSED_CAPACITY, error.message)
    if isinstance(outcome, views.QueuePosition):
        waiting = TryAgain(
            request_id=body.request_id, queue_state=outcome.queue_state, queue_state_reason=outcome.reason
        )
        return RawReply(msgspec.json.encode(waiting), 408)
    result = outcome.result
    if not isinstance(result, ops.PassDone | ops.SampleDone):
        return RawReply(tinker_json.write_result(result))
    # A result that came with the reply is small: nothing of it is worth a change of threads.
    stored = isinstance(result.payload, ops.StoredPayload)
    return await offload(b"", lambda: _payload_reply(call, result), large=stored)


def _payload_reply(call: ApiCall, done: ops.PassDone | ops.SampleDone) -> RawReply:
    return _pass_reply(call, done) if isinstance(done, ops.PassDone) else _sample_reply(call, done)


def _pass_reply(call: ApiCall, done: ops.PassDone) -> RawReply:
    accepted = call.headers.get("accept", "")
    content = call.context.payloads.read(done.payload)
    if native.MEDIA_TYPE in accepted:
        return RawReply(content, media_type=native.MEDIA_TYPE)
    try:
        result = ops.decode_pass_result(content)
    except msgspec.MsgspecError as error:
        raise StrataError(Code.CORRUPT, f"the result of the pass cannot be read: {error}") from None
    if tinker.MEDIA_TYPE in accepted:
        return RawReply(tinker.write_output(result), media_type=tinker.MEDIA_TYPE)
    return RawReply(tinker_json.write_output(result))


def read_sample(call: ApiCall, done: ops.SampleDone) -> SampleResult:
    """Blocking."""
    try:
        return decode_result(call.context.payloads.read(done.payload))
    except msgspec.MsgspecError as error:
        raise StrataError(Code.CORRUPT, f"what was sampled cannot be read: {error}") from None


def _sample_reply(call: ApiCall, done: ops.SampleDone) -> RawReply:
    result = read_sample(call, done)
    if tinker.MEDIA_TYPE in call.headers.get("accept", ""):
        return RawReply(sampling.write_proto(result), media_type=tinker.MEDIA_TYPE)
    return RawReply(sampling.write_json(result))


async def retrieve_many(call: ApiCall, body: sampling.RetrieveFutures) -> sampling.SampleCompletions:
    """Return the samples of a sampler that have ended since the last time; none after a while."""
    longest_s = call.context.settings.server.poll_s
    wait_s = longest_s if body.timeout is None else min(body.timeout, longest_s)
    target = body.target
    # A client that has fetched everything says so once, and is not kept waiting for samples it has not requested.
    linger = not body.retrieved_request_ids
    watch = queries.WatchSamples(target.sampling_session_id, target.cloned_sampler_id, body.prev_cursor, wait_s, linger)
    return sampling.completions_of(await call.watch_samples(watch))


async def cancel(call: ApiCall, body: bodies.FutureBody) -> None:
    """Cancel an operation that has not started, or a sample at any time; a training operation that runs goes on."""
    await call.abort(body.request_id)


ROUTES = (
    Route("POST", "/api/v1/retrieve_future", RESEARCHER, retrieve, 4 * KIB, owner="tenant"),
    Route("POST", "/api/v1/retrieve_futures", RESEARCHER, retrieve_many, 16 * MIB, owner="tenant"),
    Route("POST", "/api/v1/cancel_future", RESEARCHER, cancel, 4 * KIB, owner="tenant"),
)
