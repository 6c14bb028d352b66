"""Sampling in the core: slices between training, requests that outlive ranks, samplers that make room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from strata.base.errors import Code
from strata.train.core import ops
from strata.train.core.client_commands import AbortOperation, FinishSession, OpenSession, SubmitOperation
from strata.train.core.future import FutureStatus
from strata.train.core.inputs import (
    ClientCommand,
    CompleteDispatch,
    CompleteSlice,
    Dispatching,
    DispatchNext,
    FailDispatch,
    RanksAttached,
)
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.core.state import Dispatch
from tests.core.train.servers import TENANT, Server, step

DONE = ops.SampleDone(ops.InlinePayload(b"sampled"))


class Sampling(Server):
    """A server with a session `s`, spoken to by the ranks of group `g`."""

    def __init__(self, **rules: int) -> None:
        super().__init__(**rules)
        self.ask(ClientCommand(TENANT, OpenSession("s"), self.now_s))
        self.ask(RanksAttached("g"))

    def base(self, number: int = 0) -> str:
        sampler_id = f"s:sample:{number}"
        self.ask(ClientCommand(TENANT, SubmitOperation(ops.OpenSampler(sampler_id, "tiny"), "s"), self.now_s))
        return sampler_id

    def sample(self, sampler_id: str, seq: int = 0, prompt: bytes = b"abcd") -> str:
        self.ask(ClientCommand(TENANT, SubmitOperation(wanted(sampler_id, seq, prompt)), self.now_s))
        return f"{sampler_id}:{seq}"

    def next(self) -> Dispatch | None:
        """What the ranks are told next; failures on the way are no dispatches."""
        while True:
            outcome = self.ask(DispatchNext(2, 1000, self.now_s))
            if isinstance(outcome.reply, Dispatching):
                return outcome.reply.dispatch
            if not outcome.facts:
                return None

    def slice(self) -> Dispatch:
        found = self.next()
        assert found is not None
        assert found.slice is not None, found
        return found

    def opened(self, number: int = 0) -> str:
        sampler_id = self.base(number)
        told = self.next()
        assert told is not None
        self.answer_one(told)
        return sampler_id

    def answer_one(self, dispatch: Dispatch) -> None:
        self.ask(CompleteDispatch(dispatch.number, [ops.SamplerOpened("x")] * len(dispatch.future_ids), self.now_s))

    def sampled(self, dispatch: Dispatch, ended: Sequence[str] = (), left: int = 1) -> None:
        self.ask(CompleteSlice(dispatch.number, [(each, DONE) for each in ended], left, self.now_s))

    def status(self, future_id: str) -> FutureStatus:
        found = self.state.futures.get(future_id)
        assert found is not None
        return found.status


def wanted(sampler_id: str, seq: int = 0, prompt: bytes = b"abcd") -> SampleOperation:
    return SampleOperation(sampler_id, seq, prompt, SampleParams(max_tokens=8))


def test_requests_wait_for_their_sampler_and_go_in_one_slice_and_end_in_another() -> None:
    server = Sampling(max_running=1)
    sampler = server.base()
    first, second = server.sample(sampler, 0), server.sample(sampler, 1)
    opening = server.next()
    assert opening is not None
    assert opening.slice is None
    assert server.next() is None
    server.answer_one(opening)
    time_slice = server.slice()
    assert time_slice.future_ids == (first, second)
    server.sampled(time_slice, [first])
    assert (server.status(first), server.status(second)) == (FutureStatus.FINISHED, FutureStatus.DISPATCHED)
    again = server.slice()
    assert again.future_ids == ()
    server.sampled(again, [second], left=0)
    assert server.next() is None
    assert not server.state.dispatches


def test_training_and_slices_take_turns() -> None:
    server = Sampling(max_running=1)
    model = server.model()
    sampler = server.opened()
    server.accept(*(step(model, seq) for seq in (1, 2, 3)))
    server.sample(sampler)
    kinds = []
    for _ in range(6):
        told = server.next()
        assert told is not None
        kinds.append("slice" if told.slice else "training")
        if told.slice:
            server.sampled(told)
        else:
            server.answer_one(told)
    assert kinds == ["slice", "training", "slice", "training", "slice", "training"]


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_what_dead_ranks_were_sampling_is_given_to_the_next_ones_and_a_result_stays(from_snapshot: bool) -> None:
    server = Sampling()
    sampler = server.opened()
    done, going = server.sample(sampler, 0), server.sample(sampler, 1)
    server.sampled(server.slice(), [done])
    server.slice()
    later = server.sample(sampler, 2)
    server.restart(from_snapshot=from_snapshot)
    assert server.next() is None, "the same ranks are still at their slice"
    server.ask(RanksAttached("another"))
    assert server.slice().future_ids == (going, later)
    assert server.status(done) is FutureStatus.FINISHED


def test_an_answer_of_ranks_that_are_gone_changes_nothing() -> None:
    server = Sampling()
    sample = server.sample(server.opened())
    old = server.slice()
    server.ask(RanksAttached("another"))
    server.sampled(old, [sample], left=0)
    assert server.status(sample) is FutureStatus.PENDING


def test_a_request_that_is_given_up_ends_at_once_and_the_ranks_are_told_with_the_next_slice() -> None:
    server = Sampling()
    sample = server.sample(server.opened())
    time_slice = server.slice()
    server.ask(ClientCommand(TENANT, AbortOperation(sample), server.now_s))
    assert server.status(sample) is FutureStatus.CANCELLED
    server.sampled(time_slice, [sample])
    assert server.status(sample) is FutureStatus.CANCELLED
    told = server.slice().slice
    assert told is not None
    assert told.cancel == (sample,)


def test_a_request_that_the_ranks_have_lost_fails_and_is_not_waited_for() -> None:
    server = Sampling()
    sample = server.sample(server.opened())
    server.sampled(server.slice(), left=0)
    assert server.status(sample) is FutureStatus.FAILED
    assert server.next() is None


def test_a_slice_that_ranks_do_not_survive_fails_what_was_in_it() -> None:
    server = Sampling()
    sample = server.sample(server.opened())
    assert server.ask(FailDispatch(server.slice().number, "it was deadly", server.now_s)).ended == (sample,)
    assert server.status(sample) is FutureStatus.FAILED
    assert server.next() is None


def test_too_many_that_wait_are_refused_and_the_same_again_is_the_same() -> None:
    server = Sampling(max_pending_samples=4)
    sampler = server.opened()
    server.sample(sampler, 0)
    server.sample(sampler, 1)
    refused = server.refusal(ClientCommand(TENANT, SubmitOperation(wanted(sampler, 2)), server.now_s))
    assert refused.code is Code.EXHAUSTED
    server.sample(sampler, 1)
    other = server.refusal(ClientCommand(TENANT, SubmitOperation(wanted(sampler, 1, b"efgh")), server.now_s))
    assert other.code is Code.CONFLICT
    assert (
        server.refusal(ClientCommand("bob", SubmitOperation(wanted(sampler, 3)), server.now_s)).code is Code.NOT_FOUND
    )


def test_the_sampler_that_is_longest_unused_makes_room_and_none_that_is_waited_for() -> None:
    server = Sampling(max_samplers=3)
    waited_for, used, unused = server.opened(0), server.opened(1), server.opened(2)
    long, short = server.sample(waited_for), server.sample(used)
    server.sampled(server.slice(), [short])
    for number, gone in ((3, unused), (4, used)):
        server.base(number)
        told = server.next()
        if told is not None and told.slice is not None:
            server.sampled(told)
            told = server.next()
        assert told is not None
        assert told.close == (gone,)
        server.answer_one(told)
    assert server.status(long) is FutureStatus.DISPATCHED
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(wanted(used, 1)), server.now_s)).code is Code.NOT_FOUND


def test_a_sampler_that_could_not_be_opened_takes_no_samples_and_those_it_had_may_be_retried() -> None:
    server = Sampling()
    sampler = server.base()
    accepted = server.sample(sampler, 0)
    opening = server.next()
    assert opening is not None
    failure = ops.Failed("server", "no memory for its weights")
    server.ask(CompleteDispatch(opening.number, [failure], server.now_s))
    assert server.next() is None
    future = server.state.futures.get(accepted)
    assert future is not None
    assert isinstance(future.result, ops.Failed)
    assert future.result.category == "server"
    refused = server.refusal(ClientCommand(TENANT, SubmitOperation(wanted(sampler, 1)), server.now_s))
    assert refused.code is Code.NOT_FOUND
    server.sample(sampler, 0)
    another = server.sample(server.opened(1))
    assert server.slice().future_ids == (another,)


def test_a_sample_that_the_ranks_got_before_its_sampler_failed_may_be_retried() -> None:
    server = Sampling(max_running=2)
    sampler = server.base()
    sample = server.sample(sampler)
    opening = server.next()
    assert opening is not None
    time_slice = server.slice()
    assert time_slice.future_ids == (sample,)
    server.ask(CompleteDispatch(opening.number, [ops.Failed("server", "no memory for its weights")], server.now_s))
    rejected = ops.Failed("user", "there is no such sampler")
    server.ask(CompleteSlice(time_slice.number, [(sample, rejected)], 0, server.now_s))
    future = server.state.futures.get(sample)
    assert future is not None
    assert isinstance(future.result, ops.Failed)
    assert future.result.category == "server"


def test_a_finished_session_gives_up_its_samples() -> None:
    server = Sampling()
    sampler = server.opened()
    running = server.sample(sampler, 0)
    server.slice()
    waiting = server.sample(sampler, 1)
    server.ask(ClientCommand(TENANT, FinishSession("s", "success"), server.now_s))
    assert {server.status(each) for each in (running, waiting)} == {FutureStatus.CANCELLED}
    assert (
        server.refusal(ClientCommand(TENANT, SubmitOperation(wanted(sampler, 2)), server.now_s)).code
        is Code.PRECONDITION
    )
