"""Router replay, decided: whose samples record their routing, which a pass may replay, and what of it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import pytest

from strata.base.errors import Code
from strata.train.core import facts, ops
from strata.train.core.client_commands import OpenSession, SubmitOperation
from strata.train.core.decide import digest_of
from strata.train.core.inputs import ClientCommand
from strata.train.core.router_replay import recorded_for, recorded_samples, replayed_models
from strata.train.core.sampling import SampleOperation, SampleParams
from tests.core.train.servers import LORA, TENANT, Server, forward_backward

WANTED: Final = {"router_replay": "true"}
ROUTING: Final = ops.StoredPayload("0" * 64, 7)
RESULT: Final = ops.StoredPayload("1" * 64, 9)


def model_of(server: Server, number: int, metadata: Mapping[str, str]) -> str:
    session_id = f"session-{TENANT}"
    server.ask(ClientCommand(TENANT, OpenSession(session_id), server.now_s))
    model_id = f"{session_id}:train:{number}"
    create = ops.CreateModel(model_id, "tiny", LORA, user_metadata=metadata)
    server.ask(ClientCommand(TENANT, SubmitOperation(create, session_id), server.now_s))
    server.run_all()
    return model_id


def sampler_of(server: Server, model_id: str, seq: int = 1) -> SampleOperation:
    sampler_id = f"{model_id.partition(':')[0]}:sample:{seq}"
    server.accept(ops.SaveSampler(model_id, seq, sampler_id))
    return SampleOperation(sampler_id, 1, b"abcd", SampleParams(max_tokens=8))


@pytest.mark.parametrize("from_snapshot", [True, False])
@pytest.mark.parametrize(("metadata", "is_recorded"), [(WANTED, True), ({"router_replay": "no"}, False), ({}, False)])
def test_samples_of_a_model_that_asks_for_it_record_their_routing_also_after_a_restart(
    metadata: Mapping[str, str], *, is_recorded: bool, from_snapshot: bool
) -> None:
    server = Server()
    model = model_of(server, 0, metadata)
    sample = sampler_of(server, model)
    server.restart(from_snapshot=from_snapshot)
    assert recorded_for(server.state, sample) == (model if is_recorded else "")


def test_samples_of_the_base_and_of_another_tenant_are_not_recorded() -> None:
    server = Server()
    sample = sampler_of(server, model_of(server, 0, WANTED))
    base = ops.OpenSampler(f"session-{TENANT}:sample:9", "tiny")
    server.ask(ClientCommand(TENANT, SubmitOperation(base, f"session-{TENANT}"), server.now_s))
    assert not recorded_for(server.state, msgspec.structs.replace(sample, sampler_id=base.sampler_id))
    server.state.samplers[sample.sampler_id].tenant = "bob"
    assert not recorded_for(server.state, sample)


def test_a_pass_replays_samples_of_its_own_model_and_of_the_one_that_it_goes_on_from() -> None:
    server = Server()
    first, second, plain = (model_of(server, number, each) for number, each in enumerate((WANTED, WANTED, {})))
    assert replayed_models(server.state, TENANT, forward_backward(first, 1)) == {first, ""}
    assert replayed_models(server.state, "bob", forward_backward(first, 1)) == set()
    assert replayed_models(server.state, TENANT, forward_backward(plain, 1)) == set()
    record = server.state.models[second]
    record.lineage = msgspec.structs.replace(record.lineage, parent=f"tinker://{first}/weights/state")
    assert replayed_models(server.state, TENANT, forward_backward(second, 1)) == {first, second}


def test_samples_are_found_by_the_digest_of_their_tokens_as_long_as_their_results_are_kept() -> None:
    server = Server(result_ttl_s=60.0)
    model = model_of(server, 0, WANTED)
    (future_id,) = server.accept(sampler_of(server, model))
    done = ops.RoutedSampleDone(RESULT, 4, model, (b"one", b"two"))
    server.state.futures.dispatch(future_id, 1)
    server.state.futures.end(future_id, done, server.now_s)
    server.restart()
    assert list(recorded_samples(server.state, TENANT, {model})) == [(b"one", RESULT, 0), (b"two", RESULT, 1)]
    assert list(recorded_samples(server.state, "bob", {model})) == []
    assert list(recorded_samples(server.state, TENANT, {"another"})) == []


def test_a_pass_that_comes_again_is_the_same_with_and_without_its_routing() -> None:
    """Its client sends it without, and what is found for it may have changed since."""
    server = Server()
    model = model_of(server, 0, WANTED)
    sent = forward_backward(model, 1)
    fields = msgspec.structs.asdict(sent)
    routed = ops.RoutedForwardBackward(**fields, routing=ROUTING)
    assert digest_of(routed) == digest_of(sent)
    assert server.accept(routed) == server.accept(sent)
    (accepted,) = [each.operation for each in server.facts if isinstance(each, facts.OperationAccepted)][1:]
    assert isinstance(accepted, ops.RoutedForwardBackward)
    assert accepted.routing == ROUTING
    assert ops.kind_of(routed) == ops.kind_of(sent) == "forward_backward"


def test_passes_without_routing_are_stored_as_ever() -> None:
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(forward_backward("m", 1)))
    assert (encoded["type"], "routing" in encoded) == ("forward_backward", False)
    done = msgspec.msgpack.decode(msgspec.msgpack.encode(ops.SampleDone(RESULT)))
    assert set(done) == {"type", "payload", "tokens"}


def test_a_server_whose_engines_sample_refuses_it() -> None:
    server = Server(route=True)
    session_id = f"session-{TENANT}"
    server.ask(ClientCommand(TENANT, OpenSession(session_id), server.now_s))
    create = ops.CreateModel(f"{session_id}:train:0", "tiny", LORA, user_metadata=WANTED)
    refusal = server.refusal(ClientCommand(TENANT, SubmitOperation(create, session_id), server.now_s))
    assert refusal.code is Code.INVALID
    assert "engines sample for this server" in refusal.message
