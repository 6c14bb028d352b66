"""Routes of checkpoints: save, load, list, delete, expire; and of models as training runs."""

from __future__ import annotations

from typing import Final

from strata.base.errors import Code, StrataError
from strata.http.route import KIB, RESEARCHER, VIEWER, Route
from strata.train.api.context import ApiCall
from strata.train.api.futures import operation_route
from strata.train.core import messages, ops
from strata.train.wire import bodies, replies


async def save(call: ApiCall, body: bodies.SaveWeightsBody) -> ops.SaveWeights:
    """Save what training goes on from: weights and optimizer."""
    del call
    return body.operation()


async def save_external(call: ApiCall, body: bodies.SaveWeightsExternalBody) -> ops.SaveWeights:
    """Save the weights in the form of PEFT or Hugging Face, to be taken away."""
    del call
    return body.operation()


async def copy(call: ApiCall) -> None:
    """Refused with 400: there are no projects here that weights could be copied into."""
    del call
    raise StrataError(
        Code.INVALID,
        "there are no projects here that weights could be copied into",
        hint="load_weights makes a model of any checkpoint of yours",
    )


async def load(call: ApiCall, body: bodies.LoadWeightsBody) -> ops.LoadWeights:
    """Replace a model's weights, and its optimizer if requested, by saved ones; or make a model of saved weights."""
    operation = body.operation()
    if body.session_id is not None and operation.seq_id == 0:
        request = messages.DescribeCheckpoint(operation.run_id, operation.kind, operation.name)
        checkpoint = await call.request(request, messages.ModelCheckpointView)
        create = ops.CreateModel(
            model_id=operation.model_id,
            base_model=body.base_model or checkpoint.base_model,
            lora=checkpoint.lora,
            user_metadata=bodies.metadata_as_text(body.user_metadata),
        )
        await call.submit(create, body.session_id)
    return operation


async def info(call: ApiCall, body: bodies.TinkerPathBody) -> replies.WeightsInfo:
    """What a checkpoint needs to be loaded."""
    run_id, kind, name = bodies.tinker_path(body.tinker_path)
    checkpoint = await call.request(messages.DescribeCheckpoint(run_id, kind, name), messages.ModelCheckpointView)
    return replies.weights_info(checkpoint)


async def list_checkpoints(call: ApiCall, body: bodies.ModelBody) -> replies.CheckpointsReply:
    """The checkpoints of a model."""
    return replies.CheckpointsReply(checkpoints=await _checkpoints(call, body.model_id))


async def delete_checkpoint(call: ApiCall, body: bodies.CheckpointBody) -> None:
    """Delete a checkpoint."""
    await _delete(call, body.model_id, body.checkpoint_id)


async def of_run(call: ApiCall) -> replies.CheckpointsReply:
    """The checkpoints of a model."""
    return replies.CheckpointsReply(checkpoints=await _checkpoints(call, call.path["run_id"]))


async def of_all(call: ApiCall, query: bodies.PageQuery) -> replies.CheckpointsReply:
    """The checkpoints of all the caller's models, the newest first."""
    checkpoints = await _checkpoints(call, None)
    page = replies.Cursor(offset=query.offset, limit=query.limit, total_count=len(checkpoints))
    return replies.CheckpointsReply(checkpoints=checkpoints[query.offset :][: query.limit], cursor=page)


async def remove(call: ApiCall) -> None:
    """Delete a checkpoint."""
    await _delete(call, call.path["run_id"], call.path["checkpoint_id"])


async def set_ttl(call: ApiCall, body: bodies.CheckpointTtlBody) -> None:
    """Expire a checkpoint after so many seconds from now, or never."""
    kind, name = bodies.checkpoint_id(call.path["checkpoint_id"])
    await call.request(messages.SetCheckpointTtl(call.path["run_id"], kind, name, body.ttl_seconds), messages.Done)


async def publish(call: ApiCall) -> None:
    """Refused with 403: checkpoints are for their owner alone."""
    await _describe_checkpoint(call)
    raise StrataError(
        Code.FORBIDDEN, "checkpoints of this server are for their owner alone", hint="send an archive of it"
    )


async def unpublish(call: ApiCall) -> None:
    """Nothing is ever public here, so there is nothing to do."""
    await _describe_checkpoint(call)


async def _describe_checkpoint(call: ApiCall) -> messages.ModelCheckpointView:
    kind, name = bodies.checkpoint_id(call.path["checkpoint_id"])
    return await call.request(
        messages.DescribeCheckpoint(call.path["run_id"], kind, name), messages.ModelCheckpointView
    )


async def runs(call: ApiCall, query: bodies.PageQuery) -> replies.TrainingRuns:
    """The caller's models, the newest first."""
    models = sorted(
        (await call.request(messages.ListModels(), messages.ModelList)).models,
        key=lambda model: model.created_at_s,
        reverse=True,
    )
    saved = (await call.request(messages.ListCheckpoints(), messages.CheckpointList)).checkpoints
    owner = await call.context.tenant(call.caller)
    shown = [replies.training_run(model, saved, owner) for model in models[query.offset :][: query.limit]]
    page = replies.Cursor(offset=query.offset, limit=query.limit, total_count=len(models))
    return replies.TrainingRuns(training_runs=shown, cursor=page)


async def run(call: ApiCall) -> replies.TrainingRun:
    """One model, with its newest checkpoints."""
    model = await call.request(messages.DescribeModel(call.path["run_id"]), messages.ModelView)
    saved = (await call.request(messages.ListCheckpoints(model.model_id), messages.CheckpointList)).checkpoints
    return replies.training_run(model, saved, await call.context.tenant(call.caller))


async def _checkpoints(call: ApiCall, model_id: str | None) -> list[replies.CheckpointReply]:
    checkpoints = (await call.request(messages.ListCheckpoints(model_id), messages.CheckpointList)).checkpoints
    return [replies.checkpoint(each) for each in sorted(checkpoints, key=lambda one: one.saved_at_s, reverse=True)]


async def _delete(call: ApiCall, model_id: str, checkpoint_id: str) -> None:
    kind, name = bodies.checkpoint_id(checkpoint_id)
    await call.request(messages.DeleteCheckpoint(model_id, kind, name), messages.Done)


_ONE: Final = "/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}"

ROUTES = (
    operation_route("/api/v1/save_weights", RESEARCHER, save),
    operation_route("/api/v1/save_weights_external", RESEARCHER, save_external),
    Route("POST", "/api/v1/copy_weights", RESEARCHER, copy, 16 * KIB),
    operation_route("/api/v1/load_weights", RESEARCHER, load),
    Route("POST", "/api/v1/weights_info", VIEWER, info, 4 * KIB),
    Route("POST", "/api/v1/list_checkpoints", VIEWER, list_checkpoints, 4 * KIB),
    Route("POST", "/api/v1/delete_checkpoint", RESEARCHER, delete_checkpoint, 4 * KIB),
    Route("GET", "/api/v1/checkpoints", VIEWER, of_all, KIB),
    Route("GET", "/api/v1/training_runs", VIEWER, runs, KIB),
    Route("GET", "/api/v1/training_runs/{run_id}", VIEWER, run, KIB),
    Route("GET", "/api/v1/training_runs/{run_id}/checkpoints", VIEWER, of_run, KIB),
    Route("PUT", f"{_ONE}/ttl", RESEARCHER, set_ttl, KIB),
    Route("POST", f"{_ONE}/publish", RESEARCHER, publish, KIB),
    Route("DELETE", f"{_ONE}/publish", RESEARCHER, unpublish, KIB),
    Route("DELETE", _ONE, RESEARCHER, remove, KIB),
)
