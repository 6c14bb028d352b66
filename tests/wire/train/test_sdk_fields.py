"""Fields that the server does not know are left out if they ask for nothing, and else refused by their name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.train.wire import bodies, sampling
from strata.train.wire.sdk_fields import MAX_UNKNOWN, SdkDecoder, sdk_table

STEP = {"type": "optim_step", "model_id": "s:train:0", "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
LOAD = {"path": "tinker://s:train:0/weights/a", "model_id": "s:train:0", "seq_id": 1, "optimizer": True}
MODEL = {"type": "create_model", "session_id": "s", "model_seq_id": 0, "base_model": "tiny"}
SAMPLE = {"sampling_session_id": "s:sample:0", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2]}]}}


def decode(body: type[Any], value: object) -> Any:
    return SdkDecoder(body).decode(msgspec.json.encode(value))


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_an_unknown_field_that_is_null_or_empty_is_left_out(nothing: object) -> None:
    known = decode(bodies.OptimStepBody, STEP)
    assert decode(bodies.OptimStepBody, {**STEP, "priority": nothing}) == known
    inside = {**STEP, "adam_params": {"learning_rate": 0.5, "amsgrad": nothing}}
    assert decode(bodies.OptimStepBody, inside) == known


def test_a_field_of_the_newest_sdk_is_left_out_with_its_default_alone() -> None:
    assert "weights_access_token" in sdk_table().models["LoadWeightsRequest"]
    assert decode(bodies.LoadWeightsBody, {**LOAD, "weights_access_token": None}) == decode(
        bodies.LoadWeightsBody, LOAD
    )
    with pytest.raises(StrataError, match="weights_access_token: this server does not know"):
        decode(bodies.LoadWeightsBody, {**LOAD, "weights_access_token": "secret"})


def test_the_default_of_an_unknown_field_is_that_of_the_committed_table() -> None:
    class Older(bodies.StrictBody, frozen=True, kw_only=True):
        sdk_model = "SaveWeightsForSamplerRequest"
        model_id: str

    assert decode(Older, {"model_id": "m", "kind": "snapshot"}) == Older(model_id="m")
    with pytest.raises(StrataError, match="kind: this server does not know"):
        decode(Older, {"model_id": "m", "kind": "inflight"})


@pytest.mark.parametrize("value", [1, 0, True, False, 0.5, "fast", [1], {"a": 1}])
def test_any_other_value_is_refused_by_name_with_the_newest_tested_sdk(value: object) -> None:
    with pytest.raises(StrataError) as refused:
        decode(sampling.SampleRequest, {**SAMPLE, "sampling_params": {"min_p": value}})
    assert refused.value.code is Code.INVALID
    assert str(refused.value).startswith("sampling_params.min_p: this server does not know the field")
    assert sdk_table().sdk in str(refused.value)


IDENTIFYING: Final[Mapping[type[Any], Mapping[str, Any]]] = {
    bodies.ClientConfigBody: {"sdk_version": "9.9.9"},
    bodies.CreateSessionBody: {"tags": ["a"], "user_metadata": None, "sdk_version": "9.9.9", "type": "create_session"},
    bodies.SessionBody: {"session_id": "s", "type": "session_heartbeat"},
    bodies.FinishSessionBody: {"reason": {"type": "success"}, "detail": None},
    bodies.ModelBody: {"model_id": "m", "type": "get_info"},
    bodies.TinkerPathBody: {"tinker_path": "tinker://m/weights/a"},
    bodies.CheckpointBody: {"model_id": "m", "checkpoint_id": "weights/a"},
    bodies.RetrieveFutureBody: {"request_id": "f", "allow_metadata_only": True},
    bodies.FutureBody: {"request_id": "f"},
}
"""Bodies that only identify or describe, as the SDK sends them."""


@pytest.mark.parametrize("body", IDENTIFYING)
def test_a_body_that_only_identifies_keeps_the_same_rule(body: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    sent = IDENTIFYING[body]
    caplog.set_level(logging.WARNING)
    known = decode(body, sent)
    assert not caplog.records
    assert decode(body, {**sent, "planted": None, "tried": []}) == known
    assert [record.message for record in caplog.records] == ["unknown_field_left_out"] * 2
    with pytest.raises(StrataError, match=r"^planted: this server does not know the field"):
        decode(body, {**sent, "planted": "fast"})


def test_a_field_inside_of_a_body_that_only_identifies_keeps_the_same_rule() -> None:
    with pytest.raises(StrataError, match=r"^reason\.planted: this server does not know the field"):
        decode(bodies.FinishSessionBody, {"reason": {"type": "success", "planted": 1}})
    with pytest.raises(StrataError, match=r"^optimizer_config\.beta3: this server does not know the field"):
        decode(bodies.CreateModelBody, {**MODEL, "optimizer_config": {"type": "adamw", "beta3": 0.5}})


def test_only_queries_ignore_what_they_do_not_know() -> None:
    declared = [each for each in vars(bodies).values() if isinstance(each, type) and each.__module__ == bodies.__name__]
    structs = [each for each in declared if issubclass(each, msgspec.Struct)]
    lenient = {each.__name__ for each in structs if not each.__struct_config__.forbid_unknown_fields}
    assert {name for name in lenient if not name.endswith("Query")} == set()


def test_an_optimizer_that_is_not_here_is_refused_by_its_type_whatever_else_it_takes() -> None:
    dimuon = decode(bodies.CreateModelBody, {**MODEL, "optimizer_config": {"type": "dimuon", "version": 1}})
    with pytest.raises(StrataError, match=r"^optimizer_config.type: this server steps with adamw or muon"):
        dimuon.operation()
    versioned = decode(bodies.CreateModelBody, {**MODEL, "optimizer_config": {"type": "adamw", "version": 1}})
    with pytest.raises(StrataError, match=r"^optimizer_config.version: adamw has no versions"):
        versioned.operation()


def test_a_known_field_beside_an_unknown_one_is_as_strict_as_ever() -> None:
    wrong = {**STEP, "seq_id": -1, "priority": None}
    with pytest.raises(msgspec.ValidationError, match=r"`int` >= 1 - at `\$.seq_id`"):
        decode(bodies.OptimStepBody, wrong)


def test_a_number_of_any_size_beside_an_unknown_field_is_a_complaint() -> None:
    with pytest.raises(msgspec.ValidationError):
        SdkDecoder(bodies.OptimStepBody).decode(b'{"model_id":"m","seq_id":1' + b"0" * 400 + b',"priority":null}')


def test_a_message_of_stratas_own_has_no_newer_clients() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        decode(bodies.ApiKeyBody, {"name": "a", "role": "viewer", "valid_S": None})


def test_a_chunk_of_a_prompt_may_have_a_field_that_asks_for_nothing() -> None:
    chunk = {"tokens": [1, 2], "type": "encoded_text", "cache": None}
    request = decode(sampling.SampleRequest, {**SAMPLE, "prompt": {"chunks": [chunk]}})
    assert request.operation().length == 2


def test_a_field_is_logged_once_and_hostile_names_fill_neither_log_nor_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = SdkDecoder(bodies.OptimStepBody)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        decoder.decode(msgspec.json.encode({**STEP, "priority": None}))
    assert [record.message for record in caplog.records] == ["unknown_field_left_out"]
    for number in range(200):
        decoder.decode(msgspec.json.encode({**STEP, f"planted_{number}": None}))
    assert len(caplog.records) == MAX_UNKNOWN


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a\n", "\u202e", "a.b"])
def test_what_is_no_name_of_a_field_is_refused(name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        decode(bodies.OptimStepBody, {**STEP, name: None})


def test_a_request_of_unknown_fields_is_refused() -> None:
    with pytest.raises(StrataError, match=f"more than {MAX_UNKNOWN} fields"):
        decode(bodies.OptimStepBody, {**STEP, **{f"planted_{number}": None for number in range(MAX_UNKNOWN + 1)}})
