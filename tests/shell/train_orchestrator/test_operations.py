"""Operations through the real orchestrator process to ranks that pretend, and back."""

from __future__ import annotations

import array
import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from strata.base.errors import Code
from strata.train.core import client_commands, ops
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.status import queries, views
from tests.shell.train_orchestrator.stacks import TENANT, running

SMALL = "max_running_requests = 1\nmax_pending_requests = 6\nmax_pending_per_tenant = 3"


async def test_operations_run_in_order_and_their_results_come_back(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        ids = [
            await stack.submit(stack.step(model, 2)),
            await stack.submit(stack.batch(model, 1, [[1, 2, 3], [4, 5]])),
            await stack.submit(stack.batch(model, 3, [[1, 2, 3], [4, 5]])),
        ]
        stepped, before, after = [await stack.result(each) for each in ids]
        assert isinstance(stepped, ops.StepDone)
        losses = [stack.outputs(each).metrics["loss:sum"] for each in (before, after)]
        assert losses[0] != losses[1]
        assert [each for _, each in stack.applied()][1:] == [f"{model}:1", f"{model}:2", f"{model}:3"]


@pytest.mark.proves("Never: outputs are permuted by packing")
async def test_outputs_come_back_in_the_order_of_the_datums_although_they_were_packed(tmp_path: Path) -> None:
    async with running(tmp_path, model="max_tokens_per_row = 8\ninitial_checkpoint = false") as stack:
        model = await stack.model()
        tokens = [[place] * length for place, length in enumerate([2, 7, 1, 5, 3, 8, 4])]
        outputs = stack.outputs(await stack.result(await stack.submit(stack.batch(model, 1, tokens)))).outputs
        assert [len(each.fields["logprobs"].data) // 4 for each in outputs] == [len(each) for each in tokens]


async def test_operations_of_two_tenants_share_a_pass_and_each_gets_its_own_result(tmp_path: Path) -> None:
    async with running(tmp_path, limits="max_running_requests = 1") as stack:
        model, other = await stack.model(), await stack.model(tenant="bob")
        slow = await stack.submit(stack.batch(model, 1, [[1]], pretend_s=0.3))
        first = await stack.submit(stack.batch(model, 2, [[1, 2]]))
        second = await stack.submit(stack.batch(other, 1, [[3, 4, 5]]), "bob")
        server = await stack.look(views.ServerView, queries.DescribeServer())
        for each, tenant, datums in ((slow, TENANT, 1), (first, TENANT, 1), (second, "bob", 1)):
            assert len(stack.outputs(await stack.result(each, tenant)).outputs) == datums
        after = await stack.look(views.ServerView, queries.DescribeServer())
        assert after.dispatched == server.dispatched + 1


async def test_a_large_batch_and_a_large_result_go_through_files(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        batch = stack.batch(model, 1, [list(range(2000))] * 20)
        assert isinstance(batch.payload, ops.StoredPayload)
        result = await stack.result(await stack.submit(batch))
        assert isinstance(result, ops.PassDone)
        assert isinstance(result.payload, ops.StoredPayload)
        assert len(stack.outputs(result).outputs) == 20


async def test_a_payload_that_is_lost_fails_its_operation_and_the_next_one_runs(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        batch = stack.batch(model, 1, [list(range(2000))] * 20)
        assert isinstance(batch.payload, ops.StoredPayload)
        next(stack.settings.payloads.glob(f"*/{batch.payload.sha256}")).write_bytes(b"something else")
        lost = await stack.result(await stack.submit(batch))
        assert isinstance(lost, ops.Failed)
        assert lost.category == "server"
        assert isinstance(await stack.result(await stack.submit(stack.step(model, 2))), ops.StepDone)


@pytest.mark.proves("Never: a full queue drops requests without a reply")
async def test_a_full_queue_is_refused_with_a_reply_and_nothing_accepted_is_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, limits=SMALL) as stack:
        model = await stack.model()
        ids = [await stack.submit(stack.batch(model, 1, [[1]], pretend_s=0.5))]
        ids += [await stack.submit(stack.step(model, seq)) for seq in (2, 3, 4)]
        refused = await stack.refused(stack.step(model, 5))
        assert refused.code is Code.EXHAUSTED
        for each in ids:
            assert not isinstance(await stack.result(each), ops.Failed)


async def test_who_waits_is_told_their_place_how_long_and_what_runs(tmp_path: Path) -> None:
    async with running(tmp_path, limits="max_running_requests = 1") as stack:
        model = await stack.model()
        await stack.result(await stack.submit(stack.batch(model, 1, [[1]], pretend_s=0.1)))
        await stack.submit(stack.batch(model, 2, [[1]], pretend_s=1.0))
        await stack.submit(stack.batch(model, 3, [[1]]))
        last = await stack.submit(stack.batch(model, 4, [[1]]))
        waiting = await stack.look(views.QueuePosition, queries.WatchFuture(last, 0.0))
        assert waiting.reason.startswith("2nd in queue, ~")
        assert waiting.reason.endswith(f" s, running {TENANT}/forward_backward")
        held = await stack.submit(stack.step(model, 9))
        waiting = await stack.look(views.QueuePosition, queries.WatchFuture(held, 0.0))
        assert waiting.reason == "held until operation 5 of this model comes"


async def test_how_long_a_pass_without_its_way_back_takes_is_measured_by_itself(tmp_path: Path) -> None:
    async with running(tmp_path, limits="max_running_requests = 1") as stack:
        model = await stack.model()
        passes = [stack.batch(model, seq, [[1]], pretend_s=pretend_s) for seq, pretend_s in ((1, 0.1), (2, 1.0))]
        first, slow = (msgspec.structs.replace(each, forward_only=True) for each in passes)
        await stack.result(await stack.submit(first))
        await stack.submit(slow)
        last = await stack.submit(stack.batch(model, 3, [[1]]))
        waiting = await stack.look(views.QueuePosition, queries.WatchFuture(last, 0.0))
        assert re.fullmatch(rf"1st in queue, ~\d+ s, running {TENANT}/forward", waiting.reason)


async def test_a_watcher_hears_of_the_result_without_asking_again(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        slow = await stack.submit(stack.batch(model, 1, [[1]], pretend_s=0.3))
        watching = [stack.look(views.FutureResult, queries.WatchFuture(slow, 30.0)) for _ in range(3)]
        assert len({each.result.payload.data for each in await asyncio.gather(*watching)}) == 1  # type: ignore[union-attr]


async def test_what_waits_can_be_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, limits="max_running_requests = 1") as stack:
        model = await stack.model()
        await stack.submit(stack.batch(model, 1, [[1]], pretend_s=0.3))
        given_up = await stack.submit(stack.step(model, 2))
        await stack.look(client_commands.Done, client_commands.AbortOperation(given_up))
        assert isinstance(await stack.result(await stack.submit(stack.step(model, 3))), ops.StepDone)
        result = await stack.result(given_up)
        assert isinstance(result, ops.Failed)
        assert result.category == "cancelled"


async def test_checkpoints_are_saved_listed_loaded_and_deleted(tmp_path: Path) -> None:
    async with running(tmp_path, model="") as stack:
        model = await stack.model()
        save = ops.SaveWeights(model, 1, "weights", "first", ttl_s=60.0, user_metadata={"a": "b"})
        assert await stack.result(await stack.submit(save)) == ops.WeightsSaved(f"tinker://{model}/weights/first")
        listed = await stack.look(views.CheckpointList, queries.ListCheckpoints(model))
        assert {each.name for each in listed.checkpoints} == {"000000", "first"}
        view = await stack.look(views.ModelCheckpointView, queries.DescribeCheckpoint(model, "weights", "first"))
        assert view.size > 0
        assert view.expires_at_s == view.saved_at_s + 60.0
        load = ops.LoadWeights(model, 2, model, "weights", "first", optimizer=True)
        assert isinstance(await stack.result(await stack.submit(load)), ops.WeightsLoaded)
        await stack.look(client_commands.Done, client_commands.DeleteCheckpoint(model, "weights", "first"))
        gone = await stack.look(views.ErrorResponse, queries.DescribeCheckpoint(model, "weights", "first"))
        assert gone.code is Code.NOT_FOUND
        assert not list(stack.settings.checkpoint_folder.rglob("first@*"))


async def test_models_sessions_server_and_health_are_described(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        view = await stack.look(views.ModelView, queries.DescribeModel(model))
        assert (view.arch, view.next_seq, view.unloaded) == ("pretended", 1, False)
        assert len((await stack.look(views.ModelList, queries.ListModels(), "bob")).models) == 0
        sessions = await stack.look(views.SessionList, queries.ListSessions())
        assert [each.models for each in sessions.sessions] == [[model]]
        await stack.look(client_commands.Done, queries.SessionHeartbeat("session-alice"))
        await stack.look(client_commands.Done, client_commands.FinishSession("session-alice", "done"))
        assert isinstance(await stack.result(f"{model}:unload"), ops.ModelUnloaded)
        health = await stack.look(views.HealthReport, queries.CheckHealth())
        assert (health.status, list(health.ranks)) == ("healthy", [0, 1])
        assert (await stack.look(views.ServerView, queries.DescribeServer())).world_size == 2


async def test_a_client_is_not_answered_for_tokens_that_it_has(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        sampler = f"{model.partition(':')[0]}:sample:0"
        assert await stack.result(await stack.submit(ops.SaveSampler(model, 1, sampler))) == ops.SamplerOpened(sampler)
        params = SampleParams(max_tokens=300, seed=3, end_tokens=False)
        sample = SampleOperation(sampler, 0, array.array("i", [1, 2, 3]).tobytes(), params, stream=True)
        future_id = await stack.submit(sample)
        output = await stack.watch_tokens(future_id, [300], 20.0)
        assert isinstance(output, views.FutureResult), output
