"""Clients that are gone without a word do not keep what others need."""

from __future__ import annotations

from pathlib import Path

from strata.train.core import messages, ops
from tests.shell.train_orchestrator.stacks import Stack, running


async def session_of(stack: Stack, tenant: str) -> messages.SessionView:
    """Asking for the list says nothing of one session: it is no sign of its life."""
    (session,) = (await stack.look(messages.Sessions, messages.ListSessions(), tenant)).sessions
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
            assert isinstance(await stack.watch(held, 0.2, "bob"), messages.Waiting)
        assert (await session_of(stack, "alice")).finished == "silent"
        while not (await stack.look(messages.ModelView, messages.DescribeModel(gone), "alice")).unloaded:
            await stack.watch(held, 0.2, "bob")
        assert (await session_of(stack, "bob")).finished is None
        first = await stack.submit(stack.step(alive, 1), "bob")
        assert isinstance(await stack.result(first, "bob"), ops.StepDone)
