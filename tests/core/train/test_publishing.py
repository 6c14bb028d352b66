"""Weights on endpoints, in the core: when a push begins and ends, and which samples go where."""

from __future__ import annotations

import array
import math
from collections import Counter
from typing import Any

import pytest

from strata.base.errors import Code
from strata.train.core import ops
from strata.train.core.checkpoint_retention import retained_folders
from strata.train.core.client_commands import AddEndpoint, RemoveEndpoint, SubmitOperation
from strata.train.core.future import FutureStatus
from strata.train.core.inputs import ClientCommand, CompletePush, CompleteRouted, RequeueRouted, RouteSamples
from strata.train.core.publishing import RanksReason, choose_endpoint, ranks_reason
from strata.train.core.sampling import Layout, SampleOperation, SampleParams, Targets
from strata.train.core.state import Dispatch
from tests.core.train.servers import TENANT, Server, step

DONE = ops.SampleDone(ops.InlinePayload(b"sampled"))
SAVED = ops.WeightsSaved("tinker://x")


class Endpoints(Server):
    """With a model, and endpoints `a` and `b`."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(**({"route": True} | rules))
        self.name = self.model()
        for name in "ab":
            self.ask(ClientCommand(TENANT, AddEndpoint(name, f"http://{name}:1", "vllm", "10.0.0.1"), self.now_s))

    def save(self, seq: int, operation: ops.Operation | None = None) -> str:
        """The ranks have saved what this is about."""
        (future,) = self.accept(operation or ops.SyncWeights(self.name, seq, f"w{seq}"))
        dispatch = self.dispatch()
        assert dispatch is not None
        self.answer(dispatch, [SAVED])
        return future

    def push(self, *told: str) -> None:
        """All that is on its way; these endpoints take it."""
        for path, each in list(self.state.pushes.items()):
            outcomes = [ops.EndpointOutcome(name, name in told, 0.1) for name in each.endpoints]
            self.ask(CompletePush(path, outcomes, self.now_s))

    def sampler(self, name: str, number: int = 0) -> str:
        session = self.name.partition(":")[0]
        sampler = f"{session}:sample:{number}"
        weights = ops.SavedWeights(self.name, "sampler_weights", name)
        self.ask(ClientCommand(TENANT, SubmitOperation(ops.OpenSampler(sampler, "tiny", weights), session), self.now_s))
        dispatch = self.dispatch()
        assert dispatch is not None
        self.answer(dispatch, [ops.SamplerOpened(sampler)])
        return sampler

    def sample(self, sampler: str, seq: int = 0, **params: Any) -> str:
        wanted = SampleOperation(sampler, seq, b"abcd", SampleParams(**({"max_tokens": 8} | params)))
        return self.accept(wanted)[0]

    def route(self) -> dict[str, str]:
        while self.ask(RouteSamples(8)).facts:
            pass
        return {future_id: endpoint for future_id, (endpoint, _) in self.state.routed.items()}


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_a_sync_ends_with_its_endpoints_and_holds_up_nothing_of_its_model(from_snapshot: bool) -> None:
    server = Endpoints()
    synced = server.save(1)
    assert server.future(synced).status is FutureStatus.DISPATCHED
    assert server.state.settled_through == server.state.dispatched
    (after,) = server.accept(step(server.name, 2))
    assert server.run_all() == [after]
    server.restart(from_snapshot=from_snapshot)
    server.push("a")
    result = server.result(synced)
    assert isinstance(result, ops.WeightsSynced)
    assert [(each.endpoint, each.ok) for each in result.endpoints] == [("a", True), ("b", False)]
    assert result.version == f"{server.name.replace(':', '-')}-v1"
    assert result.path == f"tinker://{server.name}/sampler_weights/w1"
    assert (server.name, "sampler_weights", "w1") in server.state.checkpoints
    assert not server.state.saving
    assert server.ask(CompletePush("gone", (), server.now_s)).facts == ()


def test_weights_that_the_ranks_could_not_save_are_not_pushed() -> None:
    server = Endpoints()
    (synced,) = server.accept(ops.SyncWeights(server.name, 1, "w"))
    dispatch = server.dispatch()
    assert dispatch is not None
    server.answer(dispatch, [ops.Failed("server", "the disk is full")])
    assert server.result(synced) == ops.Failed("server", "the disk is full")
    assert not server.state.pushes
    assert not server.state.saving
    assert not server.state.checkpoints


def test_weights_that_endpoints_have_stay_when_those_to_take_their_name_are_not_saved() -> None:
    server = Endpoints()
    server.accept(
        ops.SyncWeights(server.name, 1, "w"),
        ops.SaveWeights(server.name, 2, "sampler_weights", "w", overwrite=True),
    )
    synced, saving = server.dispatch(), server.dispatch()
    assert synced is not None
    assert saving is not None
    server.answer(synced, [SAVED])
    server.push("a", "b")
    server.answer(saving, [ops.Failed("server", "the disk is full")])
    assert [each.path for each in server.state.checkpoints.values()] == [synced.path]
    assert not server.state.saving


def test_an_endpoint_is_what_it_was_added_as() -> None:
    server = Endpoints()
    assert server.ask(ClientCommand(TENANT, AddEndpoint("a", "http://a:1", "vllm", "10.0.0.1"), 1.0)).facts == ()
    assert (
        server.refusal(ClientCommand(TENANT, AddEndpoint("a", "http://a:2", "vllm", "10.0.0.1"), 1.0)).code
        is Code.CONFLICT
    )
    assert (
        server.refusal(ClientCommand(TENANT, AddEndpoint("../a", "http://a:2", "vllm", "10.0.0.1"), 1.0)).code
        is Code.INVALID
    )
    server.ask(ClientCommand(TENANT, AddEndpoint("a", "http://a:1", "vllm", "10.0.0.2"), 1.0))
    assert server.state.endpoints["a"].address == "10.0.0.2"
    server.ask(ClientCommand(TENANT, RemoveEndpoint("a"), 0.0))
    assert server.refusal(ClientCommand(TENANT, RemoveEndpoint("a"), 0.0)).code is Code.NOT_FOUND
    server.save(1)
    assert [list(each.endpoints) for each in server.state.pushes.values()] == [["b"]]


def test_samples_are_spread_over_endpoints_and_never_go_to_other_weights() -> None:
    server = Endpoints(keep_versions=2)
    server.save(1)
    server.push("a", "b")
    first = server.sampler("w1")
    asked = [server.sample(first, seq) for seq in range(4)]
    assert server.dispatch() is None, "the ranks are not asked for what an endpoint is"
    assert sorted(Counter(server.route().values()).values()) == [1, 3]
    for future in asked:
        server.ask(CompleteRouted(future, DONE, server.now_s))
        assert server.result(future) == DONE
    for seq in (2, 3):
        server.save(seq)
        server.push("a", "b")
    server.sample(first, 9)
    assert server.route() == {}
    assert server.dispatch() is not None


def test_a_name_that_other_weights_get_does_not_change_what_a_sampler_samples() -> None:
    server = Endpoints(push=True, keep_versions=1)
    server.save(1, ops.SaveWeights(server.name, 1, "sampler_weights", "best"))
    server.push("a", "b")
    old = server.sampler("best", 0)
    server.save(2, ops.SaveWeights(server.name, 2, "sampler_weights", "best", overwrite=True))
    server.push("a", "b")
    new = server.sampler("best", 1)
    server.sample(old)
    fresh = server.sample(new)
    assert list(server.route()) == [fresh]


def test_nothing_is_pushed_that_nobody_asked_for() -> None:
    server = Endpoints(push=False)
    server.save(1, ops.SaveWeights(server.name, 1, "sampler_weights", "best"))
    assert not server.state.pushes
    pushing = Endpoints(push=True)
    pushing.save(1, ops.SaveWeights(pushing.name, 1, "weights", "state"))
    assert not pushing.state.pushes


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1e-7},
        {"top_k": 5},
        {"top_p": 0.9},
        {"max_tokens": None},
        {"stop_strings": ("\n",)},
        {"seed": 3, "stop_tokens": (1,), "end_tokens": False},
    ],
)
@pytest.mark.parametrize(
    "numbers", [{}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 2}, {"topk_sample_logprobs": 2}]
)
def test_engines_draw_with_every_parameter_and_number_that_they_have(
    params: dict[str, Any], numbers: dict[str, Any]
) -> None:
    server = Endpoints(refuse_unroutable=True)
    server.save(1)
    server.push("a", "b")
    wanted = SampleOperation(
        server.sampler("w1"), 1, b"abcd", SampleParams(**({"max_tokens": 8} | params)), 2, **numbers
    )
    futures = server.accept(wanted)
    assert list(server.route()) == futures
    assert server.dispatch() is None


NOT_DRAWN: list[tuple[dict[str, Any], dict[str, Any], RanksReason]] = [
    ({}, {"prompt_draws": 1}, RanksReason.PROMPT),
    ({}, {"targets": Targets(b"", Layout((0, 0)))}, RanksReason.PROMPT),
    ({"temperature": 0.005}, {}, RanksReason.PARAMETERS),
    ({"temperature": -1.0}, {}, RanksReason.PARAMETERS),
    ({"temperature": math.nan}, {}, RanksReason.PARAMETERS),
    ({"temperature": math.inf}, {}, RanksReason.PARAMETERS),
    ({"top_p": 0.0}, {}, RanksReason.PARAMETERS),
    ({"top_p": math.nan}, {}, RanksReason.PARAMETERS),
]


@pytest.mark.parametrize(("params", "more", "reason"), NOT_DRAWN)
def test_what_no_engine_draws_is_for_the_ranks_or_refused_with_the_reason(
    params: dict[str, Any], more: dict[str, Any], reason: RanksReason
) -> None:
    for refuse in (False, True):
        server = Endpoints(refuse_unroutable=refuse)
        server.save(1)
        server.push("a", "b")
        sample = SampleOperation(server.sampler("w1"), 1, b"abcd", SampleParams(**({"max_tokens": 8} | params)), **more)
        (future,) = server.accept(sample)
        assert server.route() == {}
        assert ranks_reason(server.state, future, sample) is reason
        time_slice = server.dispatch()
        if refuse:
            assert time_slice is None
            failed = server.result(future)
            assert isinstance(failed, ops.Failed)
            assert failed.category == "user"
            assert "the settings leave it to inference engines, and" in failed.message
        else:
            assert time_slice is not None
            assert list(time_slice.future_ids) == [future]


def test_a_server_that_leaves_samples_to_engines_refuses_weights_that_no_engine_has_and_waits_for_a_push() -> None:
    server = Endpoints(refuse_unroutable=True)
    server.save(1)
    pushed = server.sample(server.sampler("w1"))
    assert server.dispatch() is None, "it waits for the push"
    server.push("a")
    assert list(server.route()) == [pushed]
    server.save(2)
    lost = server.sample(server.sampler("w2", 1))
    server.push()
    assert server.dispatch() is None
    assert "no engine has its weights" in server.result(lost).message  # type: ignore[union-attr]
    base = f"{server.name.partition(':')[0]}:sample:9"
    opened = SubmitOperation(ops.OpenSampler(base, "tiny"), server.name.partition(":")[0])
    server.ask(ClientCommand(TENANT, opened, server.now_s))
    dispatch = server.dispatch()
    assert dispatch is not None
    server.answer(dispatch, [ops.SamplerOpened(base)])
    refused = server.sample(base)
    assert server.dispatch() is None
    assert "of the base model" in server.result(refused).message  # type: ignore[union-attr]


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_what_an_endpoint_does_not_give_is_for_the_ranks_and_stays_so(from_snapshot: bool) -> None:
    server = Endpoints()
    server.save(1)
    server.push("a")
    future = server.sample(server.sampler("w1"))
    server.route()
    server.restart(from_snapshot=from_snapshot)
    assert list(server.state.routed) == [future]
    server.ask(RequeueRouted(future))
    server.restart(from_snapshot=from_snapshot)
    assert server.route() == {}
    time_slice = server.dispatch()
    assert time_slice is not None
    assert list(time_slice.future_ids) == [future]
    assert server.ask(CompleteRouted(future, DONE, server.now_s)).facts == ()


def test_a_sample_that_is_given_up_at_an_endpoint_has_ended() -> None:
    server = Endpoints()
    server.save(1)
    server.push("a")
    future = server.sample(server.sampler("w1"))
    server.route()
    server.abort(future)
    assert server.future(future).status is FutureStatus.CANCELLED
    assert server.state.routed == {}
    assert server.ask(RequeueRouted(future)).facts == ()
    assert server.ask(CompleteRouted(future, DONE, server.now_s)).facts == ()
    assert server.dispatch() is None, "the ranks never heard of it"


def test_a_model_that_was_unloaded_is_not_told_of_again() -> None:
    server = Endpoints()
    server.save(1)
    server.push("a")
    assert [each.seq_id for each in server.state.published.values()] == [1]
    server.save(2)
    server.accept(ops.UnloadModel(server.name))
    server.run_all()
    server.push("a")
    assert server.state.published == {}


class Engines(Endpoints):
    """`a` and `b` are engines of the server: it restarts them."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(**({"engines": ("a", "b"), "push": True} | rules))

    def save_sampler(self, seq: int, number: int = 0) -> tuple[str, Dispatch]:
        """Without a name; the ranks are at it."""
        sampler = f"{self.name.partition(':')[0]}:sample:{number}"
        self.accept(ops.SaveSampler(self.name, seq, sampler))
        dispatch = self.dispatch()
        assert dispatch is not None
        return sampler, dispatch


def test_a_sampler_without_a_name_is_saved_and_pushed_and_its_samples_wait_for_the_engines() -> None:
    server = Engines()
    sampler, dispatch = server.save_sampler(1)
    assert dispatch.path.endswith("/sampler_weights/unnamed@1")
    wanted = server.sample(sampler)
    for _ in range(2):
        assert (server.route(), server.dispatch()) == ({}, None)
        if dispatch.number in server.state.dispatches:
            server.answer(dispatch, [ops.SamplerOpened(sampler)])
    assert list(server.state.pushes) == [dispatch.path]
    assert dispatch.path in retained_folders(server.state)
    server.restart(from_snapshot=True)
    server.push()
    assert list(server.route()) == [wanted], "an engine that is down gets the weights with the sample"
    assert not server.state.checkpoints


def test_without_engines_a_sampler_without_a_name_has_no_files() -> None:
    server = Endpoints()
    server.accept(ops.SaveSampler(server.name, 1, f"{server.name.partition(':')[0]}:sample:0"))
    dispatch = server.dispatch()
    assert dispatch is not None
    assert dispatch.path == ""


def test_what_an_engine_of_the_server_fails_to_draw_waits_for_one_that_replies() -> None:
    server = Engines()
    sampler, dispatch = server.save_sampler(1)
    server.answer(dispatch, [ops.SamplerOpened(sampler)])
    server.push("a", "b")
    wanted = server.sample(sampler)
    (endpoint,) = server.route().values()
    server.ask(RequeueRouted(wanted, again=True))
    server.restart(from_snapshot=True)
    other = {"a": "b", "b": "a"}[endpoint]
    assert server.ask(RouteSamples(8, frozenset("ab"))).facts == ()
    assert server.dispatch() is None, "the ranks draw nothing of it"
    server.ask(RouteSamples(8, frozenset({endpoint})))
    assert {name for name, _ in server.state.routed.values()} == {other}
    failed = ops.Failed("server", "engines died of it")
    server.ask(CompleteRouted(wanted, failed, server.now_s))
    assert server.result(wanted) == failed


def test_with_a_fallback_the_ranks_draw_what_engines_have_not_yet() -> None:
    server = Engines(fallback=True)
    sampler, dispatch = server.save_sampler(1)
    server.sample(sampler)
    server.answer(dispatch, [ops.SamplerOpened(sampler)])
    assert server.dispatch() is not None


def prompt(*tokens: int) -> SampleOperation:
    return SampleOperation("s", 0, array.array("i", tokens).tobytes(), SampleParams(max_tokens=1))


def test_prompts_with_the_same_first_block_go_to_the_same_endpoint_and_few_move_when_one_leaves() -> None:
    names = ["a", "b", "c", "d"]
    blocks = [list(range(first, first + 16)) for first in range(400)]
    before = [choose_endpoint(names, prompt(*block, 1), {}) for block in blocks]
    assert before == [choose_endpoint(names[::-1], prompt(*block, 2, 3), {}) for block in blocks]
    assert min(Counter(before).values()) > 60
    after = [choose_endpoint(names[1:], prompt(*block), {}) for block in blocks]
    assert all(was in ("a", now) for was, now in zip(before, after, strict=True))


def test_no_endpoint_gets_more_than_its_share_and_a_quarter() -> None:
    load: Counter[str] = Counter()
    for _ in range(100):
        load[choose_endpoint("abcd", prompt(1, 2, 3), load)] += 1
    assert max(load.values()) <= 32
    assert len(load) == 4
