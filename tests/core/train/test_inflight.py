"""In-flight samplers in the core: shared weights, tokens that are durable with each slice, bounded staleness."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from strata.base.errors import Code
from strata.train.core import facts, inflight, ops
from strata.train.core.client_commands import OpenSession, SubmitOperation
from strata.train.core.decide import digest_of
from strata.train.core.inputs import ClientCommand, CompleteDispatch, CompleteSlice, DispatchNext, RanksAttached
from strata.train.core.sampling import (
    AddedSample,
    DrawnPart,
    DrawnSequence,
    SampleOperation,
    SampleParams,
    TopLogprobs,
    VersionSpan,
    add_span,
)
from strata.train.core.state import Dispatch, DrawnSample
from tests.core.train.servers import TENANT, Server, step

DONE = ops.SampleDone(ops.InlinePayload(b"sampled"))
MODEL = f"session-{TENANT}:train:0"
WEIGHTS = f"{MODEL}:inflight"


def part(start: int, count: int, version: int, *, index: int = 0, recomputed: bool = False) -> DrawnPart:
    tokens, logprobs = struct.pack(f"<{count}i", *range(start, start + count)), struct.pack(f"<{count}f", *[-1] * count)
    return DrawnPart(index, start, DrawnSequence(tokens, logprobs, (VersionSpan(version, count, recomputed),)))


class InFlight(Server):
    def __init__(self, **rules: int) -> None:
        super().__init__(**rules)
        self.ask(RanksAttached("g"))
        self.model()

    def save(self, seq: int, number: int | None = None, *, inflight: bool = True) -> str:
        sampler_id = f"session-{TENANT}:sample:{seq if number is None else number}"
        self.accept(ops.SaveSampler(MODEL, seq, sampler_id, inflight))
        self.finish(self.next())
        return sampler_id

    def finish(self, dispatch: Dispatch) -> None:
        self.ask(CompleteDispatch(dispatch.number, [ops.SamplerOpened("x")] * len(dispatch.future_ids), self.now_s))

    def next(self) -> Dispatch:
        dispatch = self.dispatch()
        assert dispatch is not None
        return dispatch

    def sample(self, sampler_id: str, seq: int = 0, staleness: int | None = None, *, stream: bool = False) -> str:
        sample = SampleOperation(sampler_id, seq, b"abcd", SampleParams(max_tokens=99), num_samples=2, stream=stream)
        if staleness is not None:
            sample = SampleOperation(sampler_id, seq, b"abcd", SampleParams(max_tokens=99), max_staleness=staleness)
        (future_id,) = self.accept(sample)
        return future_id

    def sliced(self, drawn: Mapping[str, Sequence[DrawnPart]], ended: Sequence[str] = ()) -> Dispatch:
        dispatch = self.next()
        assert dispatch.slice is not None
        ends = [(each, DONE) for each in ended]
        self.ask(CompleteSlice(dispatch.number, ends, 1, self.now_s, drawn))
        return dispatch

    def added(self, future_id: str) -> AddedSample:
        operation = self.future(future_id).operation
        assert isinstance(operation, SampleOperation)
        return inflight.added_sample(self.state, future_id, operation, routing=False)


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_new_ranks_and_a_new_orchestrator_go_on_after_the_durable_tokens(from_snapshot: bool) -> None:
    server = InFlight()
    future_id = server.sample(server.save(1))
    server.sliced({future_id: [part(0, 3, 1), part(0, 2, 1, index=1)]})
    server.save(2)
    server.sliced({future_id: [part(3, 2, 2)]})
    server.restart(from_snapshot=from_snapshot)
    server.ask(RanksAttached("h"))
    added = server.added(server.next().future_ids[0])
    assert added.request_id == future_id
    assert added.weights_name == WEIGHTS
    first, second = added.drawn[0], added.drawn[1]
    assert struct.unpack("<5i", first.tokens) == (0, 1, 2, 3, 4)
    assert (first.versions, second.versions) == ((VersionSpan(1, 3), VersionSpan(2, 2)), (VersionSpan(1, 2),))


def test_samples_of_other_samplers_leave_nothing_in_the_slices_facts() -> None:
    server = InFlight()
    future_id = server.sample(server.save(1, inflight=False))
    server.sliced({})
    server.ask(RanksAttached("h"))
    server.next()
    assert server.added(future_id).drawn == {}
    assert server.added(future_id).weights_name == f"session-{TENANT}:sample:1"
    plain = [raw for raw in server.journal if isinstance(facts.decode(raw), facts.SliceEnded)]
    assert b"drawn" not in plain[0]
    assert b"drawn" not in server.saved


def test_parts_that_do_not_follow_or_are_of_ended_samples_are_left_out() -> None:
    server = InFlight()
    sampler = server.save(1)
    future_id, cancelled = server.sample(sampler), server.sample(sampler, 1)
    first = server.next()
    server.abort(cancelled)
    drawn = {future_id: [part(0, 2, 1)], cancelled: [part(0, 2, 1)]}
    server.ask(CompleteSlice(first.number, [], 2, server.now_s, drawn))
    server.ask(CompleteSlice(first.number, [], 2, server.now_s, drawn))
    server.sliced({future_id: [part(0, 2, 1)]})
    server.sliced({future_id: [part(7, 2, 1)]})
    assert list(server.state.drawn) == [future_id]
    assert server.state.drawn[future_id].sequences[0].length == 2
    server.sliced({future_id: [part(2, 2, 1)]}, [future_id])
    assert server.state.drawn == {}


def test_a_sample_that_becomes_too_stale_is_cancelled_at_the_save() -> None:
    server = InFlight()
    sampler = server.save(1)
    unbounded, never, once = (server.sample(sampler, number, bound) for number, bound in enumerate((None, 0, 1)))
    server.sliced({each: [part(0, 2, 1)] for each in (unbounded, never, once)})
    server.save(2)
    result = server.result(never)
    assert isinstance(result, ops.Failed)
    assert result.category == "cancelled"
    assert "max_staleness is 0" in result.message
    assert server.state.cancelled_samples == {never}
    server.sliced({})
    server.restart()
    server.save(3)
    assert isinstance(server.result(once), ops.Failed)
    assert list(server.state.sampling) == [unbounded]


def test_a_save_that_failed_makes_nothing_staler() -> None:
    server = InFlight()
    bounded = server.sample(server.save(1), 0, 0)
    server.sliced({bounded: [part(0, 2, 1)]})
    server.accept(ops.SaveSampler(MODEL, 2, f"session-{TENANT}:sample:2", inflight=True))
    saving = server.next()
    server.ask(CompleteDispatch(saving.number, [ops.Failed("server", "no")], server.now_s))
    assert server.future(bounded).result is None
    assert server.state.drawn[bounded].saves == 0


def test_a_sampler_whose_weights_never_change_has_no_staleness() -> None:
    server = InFlight()
    sampler = server.save(1, inflight=False)
    sample = SampleOperation(sampler, 0, b"abcd", SampleParams(), max_staleness=1)
    refused = server.refusal(ClientCommand(TENANT, SubmitOperation(sample), server.now_s))
    assert refused.code is Code.INVALID


def test_the_shared_weights_go_with_the_last_sampler_that_has_them() -> None:
    server = InFlight(max_samplers=2)
    server.save(1)
    server.save(2)
    server.accept(ops.SaveSampler(MODEL, 3, f"session-{TENANT}:sample:3"))
    evicting = server.next()
    server.finish(evicting)
    server.accept(ops.SaveSampler(MODEL, 4, f"session-{TENANT}:sample:4"))
    last = server.next()
    assert [*evicting.close] == [f"session-{TENANT}:sample:1"]
    assert [*last.close] == [f"session-{TENANT}:sample:2", WEIGHTS]


def test_a_full_fine_tune_has_no_inflight_samplers() -> None:
    server = Server()
    session = f"session-{TENANT}"
    server.ask(RanksAttached("g"))
    server.ask(ClientCommand(TENANT, OpenSession(session), 0.0))
    server.ask(ClientCommand(TENANT, SubmitOperation(ops.CreateModel(MODEL, "tiny", None), session), 0.0))
    server.run_all()
    (future_id,) = server.accept(ops.SaveSampler(MODEL, 1, f"{session}:sample:1", inflight=True))
    assert server.ask(DispatchNext(2, 1000, 0.0)).ended == (future_id,)
    assert server.result(future_id) == ops.Failed("user", inflight.ONLY_ADAPTERS)


def test_engines_of_the_server_get_nothing_of_an_inflight_save() -> None:
    server = InFlight(route=True, engines=("own",))  # type: ignore[arg-type]
    server.accept(ops.SaveSampler(MODEL, 1, f"session-{TENANT}:sample:1", inflight=True))
    saving = server.next()
    assert saving.path == ""
    server.finish(saving)
    assert server.state.pushes == {}
    future_id = server.sample(f"session-{TENANT}:sample:1")
    assert [*server.next().future_ids] == [future_id]


def test_saves_and_steps_do_not_keep_a_sample_from_its_slices() -> None:
    server = InFlight(max_running=1)
    future_id = server.sample(server.save(1))
    for seq in range(2, 22):
        save = ops.SaveSampler(MODEL, seq, f"session-{TENANT}:sample:{seq}", inflight=True)
        server.accept(save if seq % 2 else step(MODEL, seq))
    kinds = []
    for _ in range(40):
        dispatch = server.next()
        kinds.append(dispatch.slice is not None)
        if dispatch.slice is None:
            server.finish(dispatch)
        else:
            drawn = server.state.drawn.get(future_id, DrawnSample()).sequences.get(0, DrawnSequence())
            parts = {future_id: [part(drawn.length, 1, 1)]}
            server.ask(CompleteSlice(dispatch.number, [], 1, server.now_s, parts))
    assert kinds == [True, False] * 20


def test_spans_of_one_version_are_one_unless_the_cache_was_computed_again() -> None:
    spans = add_span(add_span((), VersionSpan(1, 2)), VersionSpan(1, 3))
    spans = add_span(add_span(spans, VersionSpan(1, 1, recomputed=True)), VersionSpan(1, 4))
    assert add_span(spans, VersionSpan(2, 1)) == (VersionSpan(1, 5), VersionSpan(1, 5, True), VersionSpan(2, 1))


def test_what_was_drawn_in_two_slices_has_the_likeliest_tokens_of_both() -> None:
    one = DrawnSequence(b"1234", b"5678", (VersionSpan(1, 1),), "", TopLogprobs(b"abcdefgh", b"ABCDEFGH", 2, 1))
    other = DrawnSequence(b"4321", b"8765", (VersionSpan(1, 1),), "stop", TopLogprobs(b"ijklmnop", b"IJKLMNOP", 2, 1))
    both = one.plus(other)
    assert (both.tokens, both.logprobs, both.stop_reason) == (b"12344321", b"56788765", "stop")
    assert both.top == TopLogprobs(b"abcdefghijklmnop", b"ABCDEFGHIJKLMNOP", 2, 2)


def test_no_slice_makes_more_durable_than_a_fact_and_the_saved_state_have_room_for() -> None:
    server = InFlight()
    sampler = server.save(1)
    future_id, other = server.sample(sampler), server.sample(sampler, 1)
    large = inflight.MAX_PARTS_BYTES // 8
    server.sliced({future_id: [part(0, large, 1)], other: [part(0, 2, 1)]})
    assert future_id not in server.state.drawn
    assert server.state.drawn[other].sequences[0].length == 2
    for number in range(2 * inflight.MAX_DRAWN_BYTES // inflight.MAX_PARTS_BYTES):
        server.sliced({other: [part(2 + number * (large // 2), large // 2, 1)]})
    durable = server.state.drawn[other].sequences[0]
    assert len(durable.tokens + durable.logprobs) <= inflight.MAX_DRAWN_BYTES
    assert durable.length > inflight.MAX_DRAWN_BYTES // 16


def test_a_save_that_names_a_sampler_of_another_kind_changes_nothing_of_it() -> None:
    server = InFlight()
    frozen, moving = server.save(1, inflight=False), server.save(2)
    for seq, sampler_id, is_inflight in ((3, frozen, True), (4, moving, False)):
        server.accept(ops.SaveSampler(MODEL, seq, sampler_id, is_inflight))
        assert server.dispatch() is None, "it is refused"
    assert not server.state.samplers[frozen].inflight
    assert server.state.samplers[moving].inflight


def test_clients_read_what_is_durable_without_the_last_token_of_a_sequence() -> None:
    server = InFlight()
    sampler = server.save(1)
    future_id, silent = server.sample(sampler, stream=True), server.sample(sampler, 1)
    dispatch = server.next()
    parts = {each: [part(0, 3, 1), part(0, 2, 1, index=1)] for each in (future_id, silent)}
    ended = msgspec.structs.replace(parts[future_id][1].added, stop_reason="stop")
    parts[future_id][1] = DrawnPart(1, 0, ended)
    server.ask(CompleteSlice(dispatch.number, [], 2, server.now_s, parts))
    streamed = list(inflight.streamed_parts(server.state, [facts.SliceEnded(dispatch.number, parts)]))
    assert [(name, each.index, each.end) for name, each in streamed] == [(future_id, 0, 3), (future_id, 1, 1)]


def test_a_request_that_is_repeated_after_an_upgrade_from_0_2_0_has_the_same_digest() -> None:
    prompt = struct.pack("<3i", 1, 2, 3)
    plain = SampleOperation("s:sample:3", 7, prompt, SampleParams(max_tokens=4))
    assert digest_of(plain) == "c5ddcac27f06662e5384a0dfe308f2b5748a3d01107dd45cc4190edec09fcbef"
    params = SampleParams(seed=1, temperature=0.5, stop_strings=["x"])
    other = SampleOperation("s:sample:3", 7, prompt, params, num_samples=2)
    assert digest_of(other) == "51dbd79dbd695e7d627a29f6b66916f3435be9951629ea861d2d00fb9bf6c94d"
