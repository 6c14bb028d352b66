"""No tenant alone takes all the room: of operations, of samplers, of samples that wait or run, of models."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.client_commands import FinishSession, OpenSession, SubmitOperation
from strata.train.core.inputs import (
    ClientCommand,
    CompleteSlice,
    Dispatching,
    DispatchNext,
    ExpireResults,
    RanksAttached,
)
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.core.state import Dispatch
from tests.core.train.servers import LORA, Server, forward_backward

DONE = ops.SampleDone(ops.InlinePayload(b"sampled"))


class Shared(Server):
    """Tenants by name, each with a session of its own and a sampler."""

    def __init__(self, **rules: int) -> None:
        super().__init__(**rules)
        self.ask(RanksAttached("g"))
        self.asked = 0

    def sampler(self, tenant: str, number: int = 0) -> str:
        self.ask(ClientCommand(tenant, OpenSession(tenant), self.now_s))
        sampler_id = f"{tenant}:sample:{number}"
        self.ask(ClientCommand(tenant, SubmitOperation(ops.OpenSampler(sampler_id, "tiny"), tenant), self.now_s))
        return sampler_id

    def sample(self, tenant: str) -> None:
        self.asked += 1
        wanted = SampleOperation(f"{tenant}:sample:0", self.asked, b"abcd", SampleParams(max_tokens=4))
        self.ask(ClientCommand(tenant, SubmitOperation(wanted), self.now_s))

    def slice(self) -> Dispatch:
        outcome = self.ask(DispatchNext(2, 1000, self.now_s))
        assert isinstance(outcome.reply, Dispatching)
        assert outcome.reply.dispatch.slice is not None
        return outcome.reply.dispatch

    def end(self, time_slice: Dispatch, *future_ids: str) -> None:
        ended = tuple((each, DONE) for each in future_ids)
        self.ask(CompleteSlice(time_slice.number, ended, len(self.state.sampling) - len(ended), self.now_s))


def until_refused(ask: Callable[[int], object]) -> int:
    """How often it could be asked for."""
    taken: list[int] = []

    def ask_on() -> None:
        for number in range(1_000):
            ask(number)
            taken.append(number)

    with pytest.raises(StrataError) as refused:
        ask_on()
    assert refused.value.code is Code.EXHAUSTED
    return len(taken)


def test_samplers_that_one_tenant_opens_count_as_operations_and_leave_room_for_others() -> None:
    server = Shared(max_pending=10)
    quiet = server.model(tenant="quiet")
    assert until_refused(lambda number: server.sampler("flood", number)) == 5
    server.accept(forward_backward(quiet, 1), tenant="quiet")
    assert server.sampler("quiet") in server.state.samplers


def test_samples_of_one_tenant_that_wait_leave_room_for_others() -> None:
    server = Shared(max_pending_samples=10)
    server.sampler("flood")
    server.sampler("quiet")
    assert until_refused(lambda _: server.sample("flood")) == 5
    server.sample("quiet")
    assert until_refused(lambda _: server.sample("quiet")) == 4


def test_who_has_the_fewest_samples_at_the_ranks_comes_next_and_who_is_alone_leaves_room() -> None:
    server = Shared(max_running_samples=8)
    server.sampler("flood")
    server.sampler("quiet")
    server.run_all()
    for _ in range(20):
        server.sample("flood")
    first = server.slice()
    assert [each.partition(":")[0] for each in first.future_ids] == ["flood"] * 6
    server.end(first)
    for _ in range(5):
        server.sample("quiet")
    second = server.slice()
    assert [each.partition(":")[0] for each in second.future_ids] == ["quiet"] * 2
    server.end(second, *first.future_ids[:3])
    # Three of the flood are left and two of the other: these are made equal, and then they take turns.
    assert [each.partition(":")[0] for each in server.slice().future_ids] == ["quiet", "flood", "quiet"]


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_models_of_one_tenant_are_no_more_than_it_may_have(from_snapshot: bool) -> None:
    server = Shared(max_models_per_tenant=2)
    models = [server.model(number, tenant="many") for number in range(2)]
    server.restart(from_snapshot=from_snapshot)
    third = ClientCommand(
        "many", SubmitOperation(ops.CreateModel("session-many:train:2", "tiny", LORA), "session-many"), server.now_s
    )
    assert server.refusal(third).code is Code.PRECONDITION
    assert server.model(tenant="other")
    server.accept(ops.UnloadModel(models[0]), tenant="many")
    server.run_all()
    assert server.ask(third).facts


def test_sessions_of_one_tenant_are_no_more_than_it_may_have() -> None:
    server = Shared(max_sessions_per_tenant=2)

    def opening(number: int, tenant: str = "many") -> ClientCommand:
        return ClientCommand(tenant, OpenSession(f"{tenant}-{number}"), server.now_s)

    assert all(server.ask(opening(number)).facts for number in range(2))
    assert server.refusal(opening(2)).code is Code.PRECONDITION
    assert server.ask(opening(0, "other")).facts
    server.ask(ClientCommand("many", FinishSession("many-0", "done"), server.now_s))
    assert server.ask(opening(2)).facts


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_a_model_that_was_refused_takes_no_place_also_when_nobody_remembers_the_refusal(from_snapshot: bool) -> None:
    server = Shared(max_models_per_tenant=1, result_ttl_s=60)
    server.model(tenant="many", done=False)
    creating = server.dispatch()
    assert creating is not None
    server.answer(creating, [ops.Failed("user", "all places are taken")])
    server.now_s += 61
    server.ask(ExpireResults(server.now_s))
    server.restart(from_snapshot=from_snapshot)
    second = ops.CreateModel("session-many:train:1", "tiny", LORA)
    assert server.ask(ClientCommand("many", SubmitOperation(second, "session-many"), server.now_s)).facts


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_an_ended_session_without_models_is_forgotten_after_its_ttl(from_snapshot: bool) -> None:
    server = Shared(ended_session_ttl_s=100)
    kept = server.model(tenant="trains").partition(":")[0]
    server.ask(ClientCommand("many", OpenSession("many-0"), server.now_s))
    for tenant, session in (("many", "many-0"), ("trains", kept)):
        server.ask(ClientCommand(tenant, FinishSession(session, "done"), server.now_s))
    server.now_s += 99
    server.ask(ExpireResults(server.now_s))
    assert "many-0" in server.state.sessions
    server.restart(from_snapshot=from_snapshot)
    server.now_s += 1
    server.ask(ExpireResults(server.now_s))
    server.restart(from_snapshot=from_snapshot)
    assert set(server.state.sessions) == {kept}


def test_a_tenant_that_opens_and_ends_sessions_without_end_is_remembered_for_some_of_them() -> None:
    server = Shared(max_ended_sessions=3)
    for number in range(10):
        server.ask(ClientCommand("many", OpenSession(f"many-{number}"), server.now_s))
        server.ask(ClientCommand("many", FinishSession(f"many-{number}", "done"), server.now_s))
        server.now_s += 1
    server.ask(ClientCommand("other", OpenSession("other-0"), server.now_s))
    server.ask(ExpireResults(server.now_s))
    assert set(server.state.sessions) == {"many-7", "many-8", "many-9", "other-0"}
    assert server.ask(ExpireResults(server.now_s)).facts == ()


def test_a_session_stays_while_a_result_of_it_can_be_retrieved() -> None:
    server = Shared(max_ended_sessions=1, ended_session_ttl_s=1, result_ttl_s=50)
    server.sampler("asks")
    server.run_all()
    server.sample("asks")
    session = next(each for each in server.state.sessions.values() if each.tenant == "asks")
    server.ask(ClientCommand("asks", FinishSession(session.session_id, "done"), server.now_s))
    server.now_s += 10
    server.ask(ExpireResults(server.now_s))
    assert session.session_id in server.state.sessions
