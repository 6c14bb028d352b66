"""Operations that do not fit into the memory of the ranks: rejected, or failed alone, and never told to ranks again."""

from __future__ import annotations

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.train.core import facts, ops
from strata.train.core.commands import RowOutOfMemory, Segment
from strata.train.core.inputs import Dispatching, DispatchNext, RanksOutOfMemory
from strata.train.core.out_of_memory import (
    RowLimit,
    describe_out_of_memory,
    most_likely_cause,
    without_operations,
)
from strata.train.core.pack import check_lengths
from strata.train.core.replay import CompletedDispatch, skip_on_replay
from strata.train.core.state import Dispatch
from strata.train.orchestrator.replay_reader import completed_dispatches
from tests.core.train.servers import Server, forward_backward, step
from tests.support.memory_journal import MemoryJournal

pytestmark = pytest.mark.proves(
    "Never again: out of memory in one row restarted the ranks three times and named no limit"
)

LIMIT = 500


def exhausted(model_id: str, tokens: int = 700, *, sure: bool = True) -> RowOutOfMemory:
    return RowOutOfMemory(rank=1, model_id=model_id, tokens=tokens, limit=LIMIT, sure=sure)


def shared_pass(server: Server) -> tuple[Dispatch, str, str]:
    """One dispatch with operations of two tenants: those of `alice` are long."""
    alice, bob = server.model(), server.model(tenant="bob")
    (long,) = server.accept(forward_backward(alice, 1, [700, 40]))
    (short,) = server.accept(forward_backward(bob, 1, [30]), tenant="bob")
    dispatch = server.dispatch()
    assert dispatch is not None
    assert set(dispatch.future_ids) == {long, short}
    return dispatch, long, short


def test_a_datum_beyond_the_limit_fails_with_tokens_and_limit_before_anything_is_dispatched() -> None:
    server = Server()
    (future_id,) = server.accept(forward_backward(server.model(), 1, [20, 700]))
    dispatched = server.state.dispatched
    outcome = server.ask(DispatchNext(2, 1_000, 0.0, LIMIT))
    assert not isinstance(outcome.reply, Dispatching)
    assert server.state.dispatched == dispatched
    result = server.result(future_id)
    assert isinstance(result, ops.Failed)
    assert result.category == "user"
    assert "datum 1 has 700 tokens" in result.message
    assert "about 500" in result.message


def test_rows_are_packed_within_the_limit_and_journaled_before_they_run() -> None:
    server = Server(max_tokens_per_row=1_000)
    server.accept(forward_backward(server.model(), 1, [300, 300, 300, 300]))
    reply = server.ask(DispatchNext(1, 1_000, 0.0, LIMIT)).reply
    assert isinstance(reply, Dispatching)
    assert [[len(row) for row in rank] for rank in reply.dispatch.rows] == [[1, 1, 1, 1]]
    fact = facts.decode(server.journal[-1])
    assert isinstance(fact, facts.Dispatched)
    assert [list(rank) for rank in fact.rows] == [[list(row) for row in rank] for rank in reply.dispatch.rows]


def test_documents_that_would_change_each_other_get_a_row_each_and_a_replay_gets_the_same_rows() -> None:
    server = Server(max_tokens_per_row=1_000)
    server.accept(forward_backward(server.model(), 1, [30, 300, 1, 1]), forward_backward(server.model(1), 1, [40]))
    reply = server.ask(DispatchNext(2, 1_000, 0.0, one_document_per_row=True)).reply
    assert isinstance(reply, Dispatching)
    rows = [[list(row) for row in rank] for rank in reply.dispatch.rows]
    assert sorted(len(row) for rank in rows for row in rank) == [0, 1, 1, 1, 1, 1]
    server.restart(from_snapshot=False)
    (again,) = server.state.dispatches.values()
    assert [[list(row) for row in rank] for rank in again.rows] == rows


def test_no_limit_is_any_length_up_to_that_of_the_model() -> None:
    check_lengths([[999]], 1_000)
    with pytest.raises(StrataError, match="999 tokens") as caught:
        check_lengths([[999]], 1_000, 998)
    assert caught.value.code is Code.INVALID


def test_one_death_for_want_of_memory_fails_the_operation_whose_row_it_was_and_no_other() -> None:
    server = Server()
    dispatch, long, short = shared_pass(server)
    outcome = server.ask(RanksOutOfMemory(dispatch.number, exhausted(server.future(long).model_id), server.now_s))
    assert list(outcome.ended) == [long]
    result = server.result(long)
    assert isinstance(result, ops.Failed)
    assert (result.category, result.memory) == ("user", True)
    assert "700 tokens" in result.message
    assert "about 500" in result.message
    left = server.state.dispatches[dispatch.number]
    assert list(left.future_ids) == [short]
    assert [segment for rank in left.rows for row in rank for segment in row] == [Segment(0, 0)]
    server.answer(left, [ops.PassDone(ops.InlinePayload(b""))])
    assert isinstance(server.result(short, "bob"), ops.PassDone)
    assert not server.state.dispatches


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_what_is_left_of_a_dispatch_is_the_same_after_a_restart_of_the_orchestrator(from_snapshot: bool) -> None:
    server = Server()
    dispatch, long, _ = shared_pass(server)
    server.ask(RanksOutOfMemory(dispatch.number, exhausted(server.future(long).model_id), server.now_s))
    before = server.state.dispatches[dispatch.number]
    server.restart(from_snapshot=from_snapshot)
    after = server.state.dispatches[dispatch.number]
    assert list(after.future_ids) == list(before.future_ids)
    assert [[list(row) for row in rank] for rank in after.rows] == [[list(row) for row in rank] for rank in before.rows]


def test_the_next_operation_of_the_model_goes_on() -> None:
    server = Server()
    model = server.model()
    (long,) = server.accept(forward_backward(model, 1, [700]))
    dispatch = server.dispatch()
    assert dispatch is not None
    server.ask(RanksOutOfMemory(dispatch.number, exhausted(model), server.now_s))
    assert not server.state.dispatches
    (after,) = server.accept(step(model, 2))
    assert server.run_all() == [after]
    assert isinstance(server.result(long), ops.Failed)


def test_a_row_of_another_model_says_nothing_of_this_dispatch() -> None:
    server = Server()
    dispatch, long, short = shared_pass(server)
    assert not server.ask(RanksOutOfMemory(dispatch.number, exhausted("session-eve:train:0"), server.now_s)).facts
    assert not server.ask(RanksOutOfMemory(99, exhausted(server.future(long).model_id), server.now_s)).facts
    assert set(server.state.dispatches[dispatch.number].future_ids) == {long, short}


@pytest.mark.parametrize("first", [0, 1])
def test_an_operation_that_the_ranks_rejected_for_memory_ends_with_the_others_of_its_pass(first: int) -> None:
    server = Server()
    dispatch, _, _ = shared_pass(server)
    results: list[ops.Result] = [ops.Failed("user", "out of memory", memory=True), ops.PassDone(ops.InlinePayload(b""))]
    server.answer(dispatch, results if first else results[::-1])
    assert not server.state.dispatches


def test_what_did_not_fit_is_no_part_of_what_is_replayed() -> None:
    rows = (((Segment(0, 0), Segment(1, 0)), (Segment(2, 1),)), ((Segment(2, 0),), ()))
    left = without_operations(Dispatch(7, ("a", "b", "c"), rows), {"b"})
    assert left.future_ids == ["a", "c"]
    assert left.rows == [[(Segment(0, 0),), (Segment(1, 1),)], [(Segment(1, 0),), ()]]
    nothing = without_operations(Dispatch(7, ("a",), (((Segment(0, 0),),),)), {"a"})
    assert skip_on_replay(CompletedDispatch(nothing, (), ()))


@pytest.mark.parametrize("live", [True, False])
async def test_ranks_that_catch_up_are_told_what_was_left_of_the_pass_and_nothing_that_did_not_fit(live: bool) -> None:
    """Whether the ranks themselves rejected it, or a group died of it."""
    server = Server()
    dispatch, long, short = shared_pass(server)
    done = ops.PassDone(ops.InlinePayload(b""))
    if live:
        failed = ops.Failed("user", "out of memory", memory=True)
        server.answer(dispatch, [failed if each == long else done for each in dispatch.future_ids])
    else:
        server.ask(RanksOutOfMemory(dispatch.number, exhausted(server.future(long).model_id), server.now_s))
        server.answer(server.state.dispatches[dispatch.number], [done])
    (alone,) = server.accept(forward_backward(server.future(long).model_id, 2, [700]))
    nothing = server.dispatch()
    assert nothing is not None
    server.ask(RanksOutOfMemory(nothing.number, exhausted(server.future(alone).model_id), server.now_s))
    journal = MemoryJournal(SystemClock())
    lead = await journal.lead("train/t", "a", 60.0)
    await journal.append("train/t", lead.epoch, 0, server.journal)
    told = [
        past
        async for past in completed_dispatches(
            journal,
            "train/t",
            after=0,
            through=server.state.dispatched,
            failed=server.state.failed_dispatches,
            pending={},
        )
    ]
    passes = [each for each in told if isinstance(each.operations[0], ops.ForwardBackward)]
    assert [list(each.dispatch.future_ids) for each in passes] == [[short]]
    assert [segment for rank in passes[0].dispatch.rows for row in rank for segment in row] == [Segment(0, 0)]
    assert list(passes[0].failed) == [False]


def test_the_note_that_is_believed_is_that_of_the_allocator_and_else_that_of_the_longest_row() -> None:
    killed = [exhausted("idle", 3, sure=False), None, exhausted("long", 900, sure=False)]
    found = most_likely_cause(killed)
    assert found is not None
    assert found.model_id == "long"
    found = most_likely_cause([*killed, exhausted("sure", 40)])
    assert found is not None
    assert found.model_id == "sure"
    assert most_likely_cause([None, None]) is None


def test_rows_are_kept_shorter_than_one_of_which_ranks_are_known_to_have_died() -> None:
    rows = RowLimit()
    assert [rows.of(0), rows.of(LIMIT)] == [0, LIMIT]
    rows.ran_out(exhausted("m", 300))
    assert [rows.of(0), rows.of(LIMIT), rows.of(200)] == [299, 299, 200]
    rows.ran_out(exhausted("m", 250))
    rows.ran_out(exhausted("m", 400))
    assert rows.of(LIMIT) == 249


@pytest.mark.parametrize(("tokens", "limit"), [(30, LIMIT), (LIMIT - 1, LIMIT - 2), (LIMIT, LIMIT - 1)])
def test_a_row_that_ranks_may_have_died_of_counts_only_if_it_was_about_as_long_as_fits(tokens: int, limit: int) -> None:
    """The kernel has killed some process, and nobody says which."""
    rows = RowLimit()
    rows.ran_out(exhausted("m", tokens, sure=False))
    assert rows.of(LIMIT) == limit
    rows = RowLimit()
    rows.ran_out(RowOutOfMemory(rank=0, model_id="m", tokens=tokens, limit=0, sure=False))
    assert rows.of(0) == 0


def test_a_row_as_long_as_the_deadly_one_that_succeeds_ends_the_limit() -> None:
    rows = RowLimit()
    rows.ran_out(exhausted("m", 300))
    rows.succeeded(299)
    assert rows.of(LIMIT) == 299
    rows.succeeded(300)
    assert rows.of(LIMIT) == LIMIT


@pytest.mark.parametrize("limit", [0, 10_000])
def test_nobody_is_told_that_a_row_which_did_not_fit_is_shorter_than_what_fits(limit: int) -> None:
    said = describe_out_of_memory(RowOutOfMemory(rank=0, model_id="m", tokens=3_000, limit=limit))
    assert "a row of 3,000 tokens" in said
    assert "about 2,999" in said
