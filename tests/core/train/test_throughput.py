"""Where somebody who waits is told to stand, and how long that takes."""

from __future__ import annotations

from strata.train.core import ops
from strata.train.core.client_commands import SubmitOperation
from strata.train.core.inputs import ClientCommand, RanksAttached
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.core.scheduler import QueuedOperation
from strata.train.core.state import Dispatch
from strata.train.status.overview import running_dispatches, tenant_rows
from strata.train.status.throughput import ThroughputEstimate, describe_wait
from strata.train.status.views import QueueState
from tests.core.train.servers import TENANT, Server, forward_backward, step


def reason(server: Server, future_id: str, pace: ThroughputEstimate, tenant: str = TENANT) -> str:
    return describe_wait(server.state, server.future(future_id, tenant), pace, attached=True).reason


def paced(**seconds: float) -> ThroughputEstimate:
    """Seconds per token, or per operation, by kind."""
    pace = ThroughputEstimate()
    for kind, each_s in seconds.items():
        pace.record(kind, 1, each_s)
    return pace


def dispatched(server: Server) -> Dispatch:
    dispatch = server.dispatch()
    assert dispatch is not None
    return dispatch


def with_a_slice_at_the_ranks() -> tuple[Server, list[str]]:
    """And two operations that wait, of ten tokens and one."""
    server = Server(max_running=1)
    model = server.model()
    server.ask(RanksAttached("g"))
    sampler = f"session-{TENANT}:sample:0"
    server.ask(
        ClientCommand(TENANT, SubmitOperation(ops.OpenSampler(sampler, "tiny"), f"session-{TENANT}"), server.now_s)
    )
    server.answer(dispatched(server), [ops.SamplerOpened(sampler)])
    server.accept(SampleOperation(sampler, 0, b"abcd", SampleParams(max_tokens=8)))
    time_slice = dispatched(server)
    assert time_slice.slice is not None
    assert time_slice.future_ids
    return server, server.accept(forward_backward(model, 1, (10,)), step(model, 2))


def test_how_long_it_takes_is_told_also_while_new_samples_are_at_the_ranks() -> None:
    server, (first, second) = with_a_slice_at_the_ranks()
    pace = paced(forward_backward=2.0, optim_step=1.0, slice=5.0)
    assert reason(server, second, pace) == "2nd in queue, ~20 s, sampling for 1 requests"
    assert reason(server, first, pace) == "1st in queue, sampling for 1 requests"
    (row,) = tenant_rows(server.state, pace)
    assert row.eta_s == 20.0


def test_nothing_is_told_of_how_long_if_the_kind_of_one_before_was_never_measured() -> None:
    server, (_, second) = with_a_slice_at_the_ranks()
    assert reason(server, second, paced(optim_step=1.0)) == "2nd in queue, sampling for 1 requests"


def test_what_is_measured_later_counts_for_those_who_waited_before() -> None:
    server, (_, second) = with_a_slice_at_the_ranks()
    pace = ThroughputEstimate()
    assert "~" not in reason(server, second, pace)
    pace.record("forward_backward", 1, 3.0)
    assert "~30 s" in reason(server, second, pace)


def test_what_comes_and_goes_moves_those_who_wait() -> None:
    server = Server(max_running=1, pack_tenants=False)
    first, other = server.model(), server.model(1)
    server.accept(step(first, 1))
    ahead, last = server.accept(step(first, 2), step(other, 1))
    pace = paced(optim_step=1.0)
    dispatch = dispatched(server)
    assert reason(server, last, pace) == f"2nd in queue, ~2 s, running {TENANT}/optim_step"
    server.abort(ahead)
    assert reason(server, last, pace) == f"1st in queue, ~1 s, running {TENANT}/optim_step"
    server.answer(dispatch)
    assert reason(server, last, pace) == "1st in queue, nothing is running"


def test_who_waits_for_others_is_paused_and_who_waits_for_himself_is_not() -> None:
    server = Server(max_running=1, pack_tenants=False)
    alice, bob = server.model(), server.model(tenant="bob")
    server.accept(step(alice, 1))
    dispatched(server)
    own, behind = *server.accept(step(alice, 2)), *server.accept(step(bob, 1), tenant="bob")
    states = [
        describe_wait(server.state, server.future(future_id, tenant), ThroughputEstimate(), attached=True).queue_state
        for future_id, tenant in ((own, TENANT), (behind, "bob"))
    ]
    assert states == [QueueState.ACTIVE, QueueState.PAUSED_CAPACITY]


def test_a_pass_without_its_way_back_is_named_so_and_has_a_pace_of_its_own() -> None:
    server = Server(max_running=1, pack_tenants=False)
    model = server.model()
    server.accept(forward_backward(model, 1, (10,), forward_only=True))
    _, last = server.accept(forward_backward(model, 2, (10,)), step(model, 3))
    dispatched(server)
    pace = paced(forward=1.0, forward_backward=3.0, optim_step=1.0)
    assert reason(server, last, pace) == f"2nd in queue, ~40 s, running {TENANT}/forward"
    assert [each.kind for each in running_dispatches(server.state, None)] == ["forward"]
    (row,) = tenant_rows(server.state, pace)
    assert row.eta_s == 40.0


def test_many_who_ask_in_between_cost_one_sum() -> None:
    pace = paced(kind=1.0)
    order = [QueuedOperation(f"f{number}", "a", "m", "kind", 2, number) for number in range(3)]
    first = pace.start_times_s(order)
    assert first == [0.0, 2.0, 4.0]
    assert pace.start_times_s(order) is first
    assert pace.start_times_s(order[1:]) == [0.0, 2.0]
