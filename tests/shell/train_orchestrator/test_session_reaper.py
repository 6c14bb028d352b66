"""Clients that are gone without a word do not keep what others need."""

from __future__ import annotations

import asyncio
from pathlib import Path

from strata.base.errors import Code
from strata.train.core import client_commands, ops
from strata.train.status import queries, reports, views
from tests.shell.train_orchestrator.stacks import REPLY_TIMEOUT_S, Stack, running


async def session_of(stack: Stack, tenant: str) -> views.SessionView:
    """Asking for the list says nothing of one session: it is no sign of its life."""
    (session,) = (await stack.look(views.SessionList, queries.ListSessions(), tenant)).sessions
    return session


async def test_operations_behind_one_that_never_comes_are_given_up_and_the_model_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, limits="gap_s = 0.5") as stack:
        model = await stack.model()
        held = [await stack.submit(stack.step(model, seq)) for seq in (2, 3)]
        over = ops.Failed("cancelled", "operation 1 of this model did not come within 0.5 seconds")
        assert [await stack.result(each) for each in held] == [over, over]
        late = [await stack.submit(stack.step(model, seq)) for seq in (1, 4)]
        assert all([isinstance(await stack.result(each), ops.StepDone) for each in late])


async def test_a_silent_session_is_finished_and_its_models_let_go_while_one_that_asks_lives(tmp_path: Path) -> None:
    async with running(tmp_path, limits="silent_session_s = 2.0\ngap_s = 0") as stack:
        gone, alive = await stack.model(tenant="alice"), await stack.model(tenant="bob")
        held = await stack.submit(stack.step(alive, 2), "bob")
        while (await session_of(stack, "alice")).finished is None:
            assert isinstance(await stack.watch(held, 0.2, "bob"), views.QueuePosition)
        assert (await session_of(stack, "alice")).finished == "silent"
        while not (await stack.look(views.ModelView, queries.DescribeModel(gone), "alice")).unloaded:
            await stack.watch(held, 0.2, "bob")
        assert (await session_of(stack, "bob")).finished is None
        first = await stack.submit(stack.step(alive, 1), "bob")
        assert isinstance(await stack.result(first, "bob"), ops.StepDone)


async def test_every_question_that_names_something_of_a_session_is_a_sign_of_its_life_and_others_are_not(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, limits="silent_session_s = 3.0\ngap_s = 0") as stack, asyncio.timeout(REPLY_TIMEOUT_S):
        names = "given-up", "timed", "shown", "listed", "checkpoint", "forever"
        models = {name: await stack.model(tenant=name) for name in names}
        held = await stack.submit(stack.step(models["given-up"], 2), "given-up")
        # There are none. Somebody asked all the same.
        refused: dict[str, client_commands.Command | queries.Query] = {
            "checkpoint": queries.DescribeCheckpoint(models["checkpoint"], "weights", "none"),
            "forever": client_commands.SetCheckpointTtl(models["forever"], "weights", "none", None),
        }
        # Whatever else is silent was so before this one.
        gone = await stack.model(tenant="gone")
        while (await session_of(stack, "gone")).finished is None:
            await stack.look(client_commands.Done, client_commands.AbortOperation(held), "given-up")
            await stack.look(reports.TimelineView, queries.DescribeTimeline(f"{models['timed']}:create"), "timed")
            await stack.look(views.SessionList, queries.ListSessions("session-shown"), "shown")
            await stack.look(views.CheckpointList, queries.ListCheckpoints(models["listed"]), "listed")
            for tenant, asked in refused.items():
                await stack.look(views.ErrorResponse, asked, tenant)
            await stack.look(views.ErrorResponse, queries.DescribeModel(gone), "a stranger")
            await stack.look(views.ErrorResponse, queries.SessionHeartbeat("session-gone"), "a stranger")
            await stack.look(views.CheckpointList, queries.ListCheckpoints(), "gone")
            await stack.look(views.ModelList, queries.ListModels(), "gone")
        assert [name for name in names if (await session_of(stack, name)).finished is not None] == []


async def test_a_session_that_is_named_is_told_alone_and_only_to_who_has_it(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        for name in ("one", "other"):
            await stack.look(client_commands.Done, client_commands.OpenSession(name))
        found = await stack.look(views.SessionList, queries.ListSessions("one"))
        assert [each.session_id for each in found.sessions] == ["one"]
        assert (await stack.look(views.ErrorResponse, queries.ListSessions("one"), "bob")).code is Code.NOT_FOUND
        assert (await stack.look(views.ErrorResponse, queries.ListSessions("none"))).code is Code.NOT_FOUND
