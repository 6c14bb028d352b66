"""When an operation was where, who waits and how long, and how much there was in the last minute."""

from __future__ import annotations

from typing import Any

from strata.train.core import ops
from strata.train.core.commands import Timing
from strata.train.core.inputs import CompleteDispatch, Decision, Dispatching, DispatchNext, Input
from strata.train.core.state import resident_models
from strata.train.status.overview import fold_tenants, recently_ended, running_dispatches, tenant_rows
from strata.train.status.reports import OTHER_TENANTS, TenantStatus, Timeline
from strata.train.status.throughput import ThroughputEstimate
from strata.train.status.timeline import Rate, Timelines
from tests.core.train.servers import TENANT, Server, forward_backward, step


class Watched(Server):
    """One whose every decision is noted, and whose clock goes on with each."""

    def __init__(self, keep: int = 100, **rules: Any) -> None:
        super().__init__(**rules)
        self.lines = Timelines(keep)

    def ask(self, given: Input) -> Decision:
        outcome = super().ask(given)
        self.lines.record_decision(outcome, self.state, self.now_s)
        return outcome

    def told(self, spent: Timing) -> list[str]:
        """A dispatch that is sent two seconds after it was decided, and answered when it was done."""
        reply = self.ask(DispatchNext(self.ranks, self.max_context, self.now_s)).reply
        assert isinstance(reply, Dispatching)
        number, ids = reply.dispatch.number, reply.dispatch.future_ids
        self.now_s += 2
        self.lines.record_sent(self.state, number, ids, self.now_s)
        self.now_s += 1 + spent.total_s
        self.lines.record_reply(number, spent, self.now_s, None)
        self.ask(CompleteDispatch(number, [ops.StepDone({})] * len(ids), self.now_s))
        return list(ids)

    def line(self, future_id: str) -> Timeline:
        line = self.lines.get(future_id)
        assert line is not None
        return line


def test_every_second_of_an_operation_is_in_one_phase() -> None:
    server = Watched()
    model = server.model()
    begun_s = server.now_s
    (late,) = server.accept(step(model, 2))
    server.now_s += 10
    (early,) = server.accept(forward_backward(model, 1))
    server.now_s += 5
    assert server.told(Timing(4.0, forward_s=1.0, backward_s=2.0, tokens=3)) == [early]
    assert server.told(Timing(3.0, optimizer_s=3.0)) == [late]
    assert server.line(early).phases() == {
        "queue": 5.0, "pack": 2.0, "behind": 1.0, "forward": 1.0, "backward": 2.0, "other": 1.0
    }  # fmt: skip
    line = server.line(late)
    assert line.phases() == {"held": 10.0, "queue": 12.0, "pack": 2.0, "behind": 1.0, "optimizer": 3.0}
    assert (line.outcome, line.accepted_at_s, line.ended_at_s) == ("finished", begun_s, begun_s + 28)
    assert sum(line.phases().values()) == 28


def test_what_failed_before_the_ranks_heard_of_it_has_no_phases_there() -> None:
    server = Watched()
    (future_id,) = server.accept(forward_backward(server.model(), 1, lengths=(5_000,)))
    assert server.dispatch() is None
    line = server.line(future_id)
    assert (line.outcome, line.number, line.begun_at_s) == ("failed", 0, None)


def test_operations_that_share_a_pass_have_its_number_and_its_times() -> None:
    server = Watched()
    models = [server.model(tenant=tenant) for tenant in ("alice", "bob")]
    ids = [server.accept(forward_backward(each, 1), tenant=each[8:].partition(":")[0])[0] for each in models]
    assert sorted(server.told(Timing(4.0, forward_s=4.0))) == sorted(ids)
    first, second = map(server.line, ids)
    assert (first.number, first.spent) == (second.number, second.spent)


def test_only_the_last_are_kept() -> None:
    server = Watched(keep=2)
    model = server.model()
    ids = server.accept(*(step(model, seq) for seq in (1, 2, 3)))
    server.run_all()
    assert [line.future_id for line in server.lines] == ids[1:]
    assert server.lines.get(ids[0]) is None
    assert [line.future_id for line in recently_ended(server.lines, own="somebody")] == []


def test_an_operation_from_before_a_restart_is_known_from_when_it_is_dispatched() -> None:
    server = Watched()
    (future_id,) = server.accept(step(server.model(), 1))
    accepted_s = server.now_s
    server.restart()
    server.lines = Timelines(100)
    server.now_s += 30
    server.told(Timing(1.0, optimizer_s=1.0))
    line = server.line(future_id)
    assert (line.accepted_at_s, line.outcome) == (accepted_s, "finished")


def test_tenants_are_told_what_waits_is_held_and_runs_and_when_their_turn_comes() -> None:
    server = Watched(max_running=1, pack_tenants=False)
    alice, bob = server.model(), server.model(tenant="bob")
    server.accept(forward_backward(alice, 1, (100,)), forward_backward(alice, 2, (50,)), forward_backward(alice, 9))
    server.accept(forward_backward(bob, 1, (70,)), tenant="bob")
    assert server.dispatch() is not None
    pace = ThroughputEstimate()
    pace.record("forward_backward", 10, 1.0)
    first, second = tenant_rows(server.state, pace)
    assert first == TenantStatus(tenant=TENANT, waiting=2, held=1, tokens=50, running=1, models=1, eta_s=first.eta_s)
    assert second == TenantStatus(tenant="bob", waiting=1, tokens=70, models=1, eta_s=second.eta_s)
    # Ten seconds run already; a quantum is more than both, so the tenant at its turn goes on.
    assert (first.eta_s, second.eta_s) == (10.0, 15.0)
    (now,) = running_dispatches(server.state, server.now_s)
    assert (now.kind, now.tenants, now.tokens) == ("forward_backward", [TENANT], 100)
    assert running_dispatches(server.state, None, own="bob")[0].tenants == [OTHER_TENANTS]


def test_of_other_tenants_only_the_sum_is_shown() -> None:
    rows = [TenantStatus(tenant=f"t{number}", waiting=number, eta_s=1.0 * number) for number in (3, 2, 1)]
    assert [each.tenant for each in fold_tenants(rows, most=5)] == ["t3", "t2", "t1"]
    assert fold_tenants(rows, most=5, own="t2") == [rows[1], TenantStatus(tenant=OTHER_TENANTS, waiting=4, eta_s=3.0)]
    assert fold_tenants(rows, most=1) == [rows[0], TenantStatus(tenant=OTHER_TENANTS, waiting=3, eta_s=2.0)]


def test_a_model_that_could_not_be_made_or_is_gone_has_no_place() -> None:
    server = Watched()
    kept, _, gone = server.model(0), server.model(1, done=False), server.model(2, done=False)
    dispatch = server.dispatch()
    assert dispatch is not None
    server.answer(dispatch, [ops.Failed("user", "all places are taken")])
    server.run_all()
    server.accept(ops.UnloadModel(gone))
    server.run_all()
    assert [each.model_id for each in resident_models(server.state)] == [kept]


def test_a_rate_is_of_the_last_minute() -> None:
    rate = Rate()
    for second in range(100):
        rate.note(60, 1_000.0 + second)
    assert rate.per_s(1_099.5) == 60.0
    assert rate.per_s(1_129.0) == 30.0
    assert rate.per_s(1_200.0) == 0.0
