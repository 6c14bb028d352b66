"""Routes of checkpoints and training runs: save, load, copy, list, delete, TTL, publish, run metrics."""

from __future__ import annotations

import asyncio
from typing import Final

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.http.route import KIB, READS, RESEARCHER, VIEWER, Route
from strata.identity.authenticate import Credentials
from strata.identity.roles import CallerKind, Role
from strata.train.api import archive
from strata.train.api.context import ApiCall, project_of
from strata.train.api.futures import operation_route
from strata.train.core import client_commands, ops
from strata.train.core.state import IMPORTED, INITIAL
from strata.train.status import queries, views
from strata.train.wire import bodies, replies

ACCESS_TOKEN: Final = "x-tinker-weights-access-token"  # noqa: S105 - the name of a header

COPY_OF_INITIAL: Final = "initial"
"""A run has its own first checkpoint under the name that the original has."""


async def save(call: ApiCall, body: bodies.SaveWeightsBody) -> ops.SaveWeights:
    """Save what training goes on from: weights and optimizer."""
    del call
    return body.operation()


async def save_external(call: ApiCall, body: bodies.SaveWeightsExternalBody) -> ops.SaveWeights:
    """Save the weights in the form of PEFT or Hugging Face, to be taken away."""
    del call
    return body.operation()


async def copy(call: ApiCall, body: bodies.CopyWeightsBody) -> replies.CopiedWeights:
    """Copy a checkpoint of the caller, a public one, or one that a key of its owner opens, into a run of its own."""
    context, tenant = call.context, await call.context.tenant(call.caller)
    body.check_destination(project_of(tenant))
    run_id, kind, name = bodies.tinker_path(body.source_path)
    token = call.headers.get(ACCESS_TOKEN) or body.weights_access_token
    reader = tenant if not token else await _tenant_of_key(call, token)
    source = await call.request_as(reader, queries.DescribeCheckpoint(run_id, kind, name), views.ModelCheckpointView)
    import_id = f"{context.number}.{context.ids.new('import')}"
    # Idempotent: a client that retries under the same key makes no second copy.
    content = "\n".join((tenant, source.folder, call.headers.get("x-idempotency-key", import_id)))
    copied = f"{IMPORTED}{sha256_hex(content.encode())[:24]}"
    name = COPY_OF_INITIAL if name == INITIAL else name
    request = client_commands.ImportCheckpoint(
        import_id=import_id,
        name=name,
        run_id=copied,
        base_model=source.base_model,
        lora=source.lora,
        ttl_s=body.ttl_seconds,
        user_metadata=source.user_metadata,
        kind=kind,
        optimizer=source.optimizer,
    )
    await archive.import_files(call, request, context.settings.checkpoint_folder / source.folder)
    return replies.CopiedWeights(tinker_path=f"tinker://{copied}/{kind}/{name}")


async def _tenant_of_key(call: ApiCall, token: str) -> str:
    """The tenant of a key that its owner gave away for reading; as everywhere on TCP, no key of operators counts."""
    caller = await call.context.authenticator.identify(Credentials(bearer=token))
    if caller.kind is not CallerKind.KEY or caller.role not in (Role.VIEWER, Role.RESEARCHER):
        raise StrataError(
            Code.FORBIDDEN, "weights_access_token: only the key of a viewer or a researcher opens weights"
        )
    return await call.context.tenant(caller)


async def load(call: ApiCall, body: bodies.LoadWeightsBody) -> ops.LoadWeights:
    """Replace a model's weights, and its optimizer if requested, by saved ones; or make a model of saved weights."""
    operation = body.operation()
    if body.session_id is not None and operation.seq_id == 0:
        request = queries.DescribeCheckpoint(operation.run_id, operation.kind, operation.name)
        checkpoint = await call.request(request, views.ModelCheckpointView)
        saved = checkpoint.optimizer if operation.optimizer else "adamw"
        create = ops.CreateModel(
            model_id=operation.model_id,
            base_model=body.base_model or checkpoint.base_model,
            lora=checkpoint.lora,
            user_metadata=bodies.metadata_as_text(body.user_metadata),
            optimizer=body.optimizer_config.to_core() if body.optimizer_config else saved,
        )
        await call.submit(create, body.session_id)
    return operation


async def info(call: ApiCall, body: bodies.TinkerPathBody) -> replies.WeightsInfo:
    """Returns what a checkpoint needs to be loaded."""
    run_id, kind, name = bodies.tinker_path(body.tinker_path)
    checkpoint = await call.request(queries.DescribeCheckpoint(run_id, kind, name), views.ModelCheckpointView)
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
    await call.request(
        client_commands.SetCheckpointTtl(call.path["run_id"], kind, name, body.ttl_seconds), client_commands.Done
    )


async def publish(call: ApiCall) -> None:
    """Let every tenant of this server load, sample, copy and download a checkpoint."""
    await _publish(call, public=True)


async def unpublish(call: ApiCall) -> None:
    """Let only its owner read a checkpoint."""
    await _publish(call, public=False)


async def _publish(call: ApiCall, *, public: bool) -> None:
    kind, name = bodies.checkpoint_id(call.path["checkpoint_id"])
    await call.request(client_commands.PublishCheckpoint(call.path["run_id"], kind, name, public), client_commands.Done)


async def runs(call: ApiCall, query: bodies.PageQuery) -> replies.TrainingRuns:
    """The caller's models, the newest first."""
    models = sorted(
        (await call.request(queries.ListModels(), views.ModelList)).models,
        key=lambda model: model.created_at_s,
        reverse=True,
    )
    saved = (await call.request(queries.ListCheckpoints(), views.CheckpointList)).checkpoints
    owner = await call.context.tenant(call.caller)
    shown = [replies.training_run(model, saved, owner) for model in models[query.offset :][: query.limit]]
    page = replies.Cursor(offset=query.offset, limit=query.limit, total_count=len(models))
    return replies.TrainingRuns(training_runs=shown, cursor=page)


async def run(call: ApiCall) -> replies.TrainingRun:
    """One model, with its newest checkpoints."""
    model = await call.request(queries.DescribeModel(call.path["run_id"]), views.ModelView)
    saved = (await call.request(queries.ListCheckpoints(model.model_id), views.CheckpointList)).checkpoints
    return replies.training_run(model, saved, await call.context.tenant(call.caller))


async def run_metrics(call: ApiCall, query: bodies.ResultsQuery) -> replies.ModelMetrics:
    """The metrics of the passes and steps of a model that ended after one of them, as long as results are kept."""
    request = queries.ListResults(call.path["run_id"], query.after, query.limit)
    listed = await call.request(request, views.ResultList)
    points = await asyncio.to_thread(lambda: [_point(call, each) for each in listed.results])
    return replies.ModelMetrics(points=[point for point in points if point is not None], unloaded=listed.unloaded)


def _point(call: ApiCall, ended: views.EndedResult) -> replies.ModelPoint | None:
    """None if its result expired since it was listed."""
    if isinstance(ended.result, ops.StepDone):
        return replies.ModelPoint(
            seq_id=ended.seq_id, kind="optim_step", at_s=ended.ended_at_s, values=ended.result.metrics
        )
    try:
        values = ops.decode_pass_metrics(call.context.payloads.read(ended.result.payload)).metrics
    except StrataError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        return None
    return replies.ModelPoint(seq_id=ended.seq_id, kind="pass", at_s=ended.ended_at_s, values=values)


async def _checkpoints(call: ApiCall, model_id: str | None) -> list[replies.CheckpointReply]:
    checkpoints = (await call.request(queries.ListCheckpoints(model_id), views.CheckpointList)).checkpoints
    return [replies.checkpoint(each) for each in sorted(checkpoints, key=lambda one: one.saved_at_s, reverse=True)]


async def _delete(call: ApiCall, model_id: str, checkpoint_id: str) -> None:
    kind, name = bodies.checkpoint_id(checkpoint_id)
    await call.request(client_commands.DeleteCheckpoint(model_id, kind, name), client_commands.Done)


_ONE: Final = "/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}"

ROUTES = (
    operation_route("/api/v1/save_weights", RESEARCHER, save, owner="tenant"),
    operation_route("/api/v1/save_weights_external", RESEARCHER, save_external, owner="tenant"),
    Route("POST", "/api/v1/copy_weights", RESEARCHER, copy, 16 * KIB, owner="tenant"),
    operation_route("/api/v1/load_weights", RESEARCHER, load, owner="tenant"),
    Route("POST", "/api/v1/weights_info", VIEWER, info, 4 * KIB, owner=READS),
    Route("POST", "/api/v1/list_checkpoints", VIEWER, list_checkpoints, 4 * KIB, owner=READS),
    Route("POST", "/api/v1/delete_checkpoint", RESEARCHER, delete_checkpoint, 4 * KIB, owner="tenant"),
    Route("GET", "/api/v1/checkpoints", VIEWER, of_all, KIB),
    Route("GET", "/api/v1/training_runs", VIEWER, runs, KIB),
    Route("GET", "/api/v1/training_runs/{run_id}", VIEWER, run, KIB),
    Route("GET", "/api/v1/training_runs/{run_id}/checkpoints", VIEWER, of_run, KIB),
    Route("GET", "/api/v1/training_runs/{run_id}/metrics", VIEWER, run_metrics, KIB),
    Route("PUT", f"{_ONE}/ttl", RESEARCHER, set_ttl, KIB, owner="tenant"),
    Route("POST", f"{_ONE}/publish", RESEARCHER, publish, KIB, owner="tenant"),
    Route("DELETE", f"{_ONE}/publish", RESEARCHER, unpublish, KIB, owner="tenant"),
    Route("DELETE", _ONE, RESEARCHER, remove, KIB, owner="tenant"),
)
