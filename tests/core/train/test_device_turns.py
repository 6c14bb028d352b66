"""Ranks and engines that share devices in turns, in the core: who gets them when, and what has to end before."""

from __future__ import annotations

from typing import Any

import pytest

from strata.train.core import ops
from strata.train.core.device_turns import IDLE_S, may_sleep, reject_reason
from strata.train.core.facts import DeviceTurnRequested, DeviceTurnTaken
from strata.train.core.inputs import (
    CompleteRouted,
    CompleteSlice,
    Decision,
    RanksAttached,
    RequestTurn,
    TakeTurn,
)
from strata.train.core.state import DeviceSide, DeviceTurn
from tests.core.train.servers import forward_backward, step
from tests.core.train.test_publishing import DONE, Endpoints

GROUP = "group-1"
TURN_S = 60.0


class SharedDevices(Endpoints):
    """With a model, an engine `a` that shares the devices of the ranks, and an endpoint `b` elsewhere."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(**({"engines": ("a",), "device_turn_s": TURN_S, "push": True} | rules))
        self.ask(RanksAttached(GROUP))

    @property
    def turn(self) -> DeviceTurn:
        turn = self.state.current_turn
        assert turn is not None
        return turn

    def request(self, after_s: float = 0.0, *starting: DeviceSide) -> Decision:
        self.now_s += after_s
        return self.ask(RequestTurn(self.now_s, frozenset(starting)))

    def take(self, number: int | None = None, group: str = "") -> Decision:
        number = self.turn.number if number is None else number
        return self.ask(TakeTurn(number, self.now_s, group or (GROUP if self.turn.side == "ranks" else "")))

    def pass_to_engines(self) -> None:
        """Of ranks that are idle, for what the engine has to do."""
        self.request(IDLE_S)
        self.take()
        assert self.turn.side == "engines"

    def weights(self, seq: int = 1) -> str:
        """Weights that the engine is to have, and a sampler of them."""
        self.save(seq)
        return self.sampler(f"w{seq}")


def test_idle_ranks_give_the_devices_to_an_engine_that_is_to_get_weights_and_get_them_back_for_work() -> None:
    server = SharedDevices()
    assert server.request(IDLE_S).facts == (), "nobody else wants them"
    sides: list[DeviceSide] = ["engines", "ranks"]
    for waiting in sides:
        assert server.request(IDLE_S, waiting).facts
        server.take()
    server.save(1)
    assert server.request(0.0).facts == (), "a client that goes on at once finds the ranks awake"
    requested = server.request(IDLE_S)
    assert requested.facts == (DeviceTurnRequested(3, "engines", "idle", server.now_s),)
    assert server.take().facts == (DeviceTurnTaken(3, "engines", GROUP, server.now_s),)
    server.push("a", "b")
    assert server.request(IDLE_S).facts == (), "the engine keeps them while nobody else wants them"
    (trained,) = server.accept(step(server.name, 2))
    assert server.dispatch() is None, "the ranks sleep"
    server.request()
    assert server.take().facts == (DeviceTurnTaken(4, "ranks", "", server.now_s),)
    assert server.run_all() == [trained]


def test_neither_side_begins_anything_from_the_request_on() -> None:
    server = SharedDevices()
    sampler = server.weights()
    server.request(IDLE_S)
    server.accept(step(server.name, 2))
    assert server.dispatch() is None
    server.take()
    server.push("a")
    first = server.sample(sampler, 1)
    assert server.route() == {first: "a"}
    server.request(TURN_S)
    assert server.turn.leaving
    second = server.sample(sampler, 2)
    assert server.route() == {first: "a"}
    server.ask(CompleteRouted(first, DONE, server.now_s))
    server.take()
    assert server.turn.side == "ranks"
    assert server.route() == {}
    assert server.future(second).result is None


def test_the_devices_pass_only_when_what_runs_on_them_has_ended() -> None:
    server = SharedDevices(max_running=1)
    sampler = server.weights()
    server.accept(forward_backward(server.name, 2))
    running = server.dispatch()
    assert running is not None
    server.request(TURN_S)
    assert server.turn.leaving
    assert server.take().facts == ()
    server.answer(running)
    assert server.take().facts
    server.push("a")
    sample = server.sample(sampler, 1)
    server.route()
    server.accept(step(server.name, 3))
    server.request(TURN_S)
    assert server.take().facts == ()
    server.ask(CompleteRouted(sample, DONE, server.now_s))
    assert server.take().facts


def test_samples_of_the_ranks_end_before_they_sleep_and_no_others_begin() -> None:
    server = SharedDevices()
    sampler = server.weights()
    first = server.sample(sampler, 1, min_p=0.5)
    slice_1 = server.dispatch()
    assert slice_1 is not None
    assert list(slice_1.future_ids) == [first]
    server.request(TURN_S)
    server.sample(sampler, 2, min_p=0.5)
    server.ask(CompleteSlice(slice_1.number, (), 1, server.now_s))
    assert server.take().facts == ()
    slice_2 = server.dispatch()
    assert slice_2 is not None
    assert list(slice_2.future_ids) == []
    server.ask(CompleteSlice(slice_2.number, [(first, DONE)], 0, server.now_s))
    assert server.dispatch() is None
    assert server.take().facts


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_sides_that_always_have_work_alternate_and_no_turn_is_longer_than_the_limit(from_snapshot: bool) -> None:
    server = SharedDevices(max_running=1)
    sampler = server.weights()
    server.pass_to_engines()
    server.push("a")
    sampled = trained = 0
    turns: list[tuple[str, float]] = []
    since_s, sequence = server.now_s, 2
    for number in range(200):
        server.now_s += 5.0
        server.sample(sampler, number)
        if len(server.state.scheduler) < 3:
            server.accept(step(server.name, sequence))
            sequence += 1
        for future_id in server.route():
            server.ask(CompleteRouted(future_id, DONE, server.now_s))
            sampled += 1
        if (dispatch := server.dispatch()) is not None:
            server.answer(dispatch)
            trained += 1
        before = server.turn.side
        server.request()
        if server.take().facts:
            turns.append((before, server.now_s - since_s))
            since_s = server.now_s
        if number % 20 == 0:
            server.restart(from_snapshot=from_snapshot)
    assert [side for side, _ in turns] == ["engines", "ranks"] * (len(turns) // 2) + ["engines"] * (len(turns) % 2)
    assert len(turns) >= 10
    assert max(lasted for _, lasted in turns) <= TURN_S + 10.0
    assert sampled >= 80
    assert trained >= 80


def test_a_confirmation_that_comes_twice_late_or_from_others_passes_nothing() -> None:
    server = SharedDevices()
    server.weights()
    assert server.take().facts == (), "nobody asked for it"
    server.request(IDLE_S)
    assert server.take(number=0).facts == ()
    assert server.take(group="group-0").facts == (), "ranks that were replaced"
    assert server.take().facts
    assert server.take(number=1).facts == (), "the same once more"
    server.push("a")
    server.accept(step(server.name, 2))
    server.request(IDLE_S)
    assert server.turn == DeviceTurn(2, "engines", leaving=True, at_s=server.turn.at_s, busy_at_s=server.turn.busy_at_s)
    assert server.take(number=1).facts == (), "of the request before"
    assert server.take(number=2).facts
    assert server.take(number=2).facts == ()
    assert [type(each) for each in server.facts if "Turn" in type(each).__name__] == [
        DeviceTurnRequested,
        DeviceTurnTaken,
    ] * 2


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_the_next_leader_goes_on_where_the_journal_ends(from_snapshot: bool) -> None:
    server = SharedDevices()
    server.weights()
    server.request(IDLE_S)
    server.restart(from_snapshot=from_snapshot)
    assert server.turn.leaving
    assert server.request(TURN_S).facts == ()
    assert may_sleep(server.state)
    server.take()
    server.restart(from_snapshot=from_snapshot)
    assert (server.turn.side, server.turn.leaving) == ("engines", False)


def test_ranks_that_start_while_engines_have_the_devices_are_not_used() -> None:
    server = SharedDevices()
    server.weights()
    assert reject_reason(server.state, "group-2") is None
    server.pass_to_engines()
    assert reject_reason(server.state, GROUP) is None
    assert reject_reason(server.state, "group-2") == "it started while engines had its devices"
    server.request(0.0, "ranks")
    server.request(TURN_S, "ranks")
    assert reject_reason(server.state, "group-2") is not None, "engines are awake until they confirm"
    server.take()
    assert reject_reason(server.state, "group-2") is None


def test_processes_that_wait_to_start_get_a_turn() -> None:
    server = SharedDevices()
    assert server.request(IDLE_S, "engines").facts, "the engine never started"
    server.take()
    assert server.request(IDLE_S, "ranks", "engines").facts == (), "the engine loads its model"
    assert server.request(0.0, "ranks").facts, "the ranks died"


def test_a_snapshot_that_is_due_gets_the_ranks_a_turn() -> None:
    server = SharedDevices(snapshot_s=100.0)
    server.weights()
    server.pass_to_engines()
    server.push("a")
    assert server.request(50.0).facts == ()
    assert server.request(100.0).facts
    server.take()
    snapshot = server.dispatch()
    assert snapshot is not None
    assert snapshot.snapshot


def test_without_the_setting_there_are_no_turns_and_no_facts_of_them() -> None:
    server = Endpoints(engines=("a",))
    server.save(1)
    assert server.ask(RequestTurn(server.now_s + 1e6, frozenset({"engines"}))).facts == ()
    assert server.ask(TakeTurn(0, server.now_s)).facts == ()
    assert server.state.current_turn is None
    assert b"device_turn" not in server.saved


def test_endpoints_elsewhere_are_sampled_from_whoever_has_the_devices() -> None:
    server = SharedDevices()
    sampler = server.weights()
    server.pass_to_engines()
    server.push("a", "b")
    server.accept(step(server.name, 2))
    server.request(IDLE_S)
    sample = server.sample(sampler, 1)
    assert server.route() == {sample: "b"}
    assert server.take().facts, "its sample runs elsewhere"


def test_ranks_that_a_client_put_to_sleep_pass_the_devices_as_others_do() -> None:
    server = SharedDevices()
    server.save(1)
    server.accept(ops.Sleep())
    server.run_all()
    server.pass_to_engines()
    server.push("a")
    server.accept(ops.Wake())
    server.request(IDLE_S)
    server.take()
    assert server.run_all()
    assert not server.state.asleep


def test_samples_that_are_paused_since_a_client_put_the_ranks_to_sleep_hold_up_no_turn_and_are_not_computed() -> None:
    server = SharedDevices(max_running=1)
    sampler = server.weights()
    sample = server.sample(sampler, 1, min_p=0.5)
    computed = server.dispatch()
    assert computed is not None
    server.ask(CompleteSlice(computed.number, (), 1, server.now_s))
    server.accept(ops.Sleep())
    asleep = server.dispatch()
    assert asleep is not None
    server.answer(asleep, [ops.Asleep(0)])
    server.request(IDLE_S)
    assert list(server.state.sampling) == [sample]
    assert server.dispatch() is None
    assert server.take().facts
