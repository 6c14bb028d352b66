"""While the ranks sleep: what is said without them, what is told them all the same, and who is awake afterwards."""

from __future__ import annotations

import pytest

from strata.base.clock import SystemClock
from strata.train.core import ops
from strata.train.core.facts import Dispatched
from strata.train.orchestrator.replay_reader import completed_dispatches
from tests.core.train.servers import Server, forward_backward, step
from tests.support.memory_journal import MemoryJournal


def asleep() -> tuple[Server, str]:
    server = Server(max_running=1)
    model = server.model()
    server.accept(ops.Sleep())
    server.run_all()
    assert server.state.asleep
    return server, model


def test_what_trains_fails_while_the_ranks_sleep_and_they_are_not_told_of_it() -> None:
    """Told to others later, it might succeed."""
    server, model = asleep()
    told = server.state.dispatched
    ids = server.accept(forward_backward(model, 1), step(model, 2), ops.SaveWeights(model, 3, "weights", "mine"))
    assert server.run_all() == []
    assert server.state.dispatched == told
    for future_id in ids:
        result = server.result(future_id)
        assert isinstance(result, ops.Failed)
        assert "sleeps" in result.message
    server.accept(ops.Wake())
    server.run_all()
    (later,) = server.accept(step(model, 4))
    assert server.run_all() == [later]


def test_a_model_can_be_let_go_while_the_ranks_sleep() -> None:
    server, model = asleep()
    ids = server.accept(ops.AbortGradients(model, 1), ops.UnloadModel(model))
    assert server.run_all() == ids


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_the_ranks_sleep_on_when_waking_them_was_given_up(from_snapshot: bool) -> None:
    """New ones are told to sleep, and not to wake."""
    server, _ = asleep()
    server.accept(ops.Wake())
    waking = server.dispatch()
    assert waking is not None
    server.give_up(waking.number)
    server.restart(from_snapshot=from_snapshot)
    assert server.state.asleep


async def test_new_ranks_are_told_to_unload_a_model_although_that_was_given_up() -> None:
    """Its client takes it for gone, and nobody would ever let go of it."""
    server = Server(max_running=1)
    model = server.model()
    server.accept(step(model, 1))
    given_up = server.dispatch()
    assert given_up is not None
    server.give_up(given_up.number)
    server.accept(ops.UnloadModel(model))
    unloading = server.dispatch()
    assert unloading is not None
    server.give_up(unloading.number)
    assert server.state.models[model].unloaded
    journal = MemoryJournal(SystemClock())
    lead = await journal.lead("train/t", "a", 60.0)
    await journal.append("train/t", lead.epoch, 0, server.journal)
    last = max(fact.number for fact in server.facts if isinstance(fact, Dispatched))
    told = [
        past.operations[0]
        async for past in completed_dispatches(
            journal, "train/t", after=0, through=last, failed=server.state.failed_dispatches, pending={}
        )
    ]
    assert [type(each) for each in told] == [ops.CreateModel, ops.UnloadModel]
