"""Every field of every request of the newest tested `tinker` SDK is known to our bodies, or stands in a list here.

The table of the SDK is committed, so this runs whatever SDK is installed. Where that is the SDK of the table, the two
are compared; `make newest` compares the table with the newest SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor

from strata.train.core.loss_graph import LossGraph, LossInput, LossNode
from strata.train.wire import bodies, sampling, tinker_json
from strata.train.wire.pb import tinker_pb2
from strata.train.wire.sdk_fields import NO_MODEL, SdkField, SdkTable, sdk_table
from tests.wire.train import sdk_table as sdk_json

BODIES: Final[Mapping[str, type[msgspec.Struct]]] = {
    each.__dict__["sdk_model"]: each
    for module in (bodies, sampling, tinker_json)
    for each in vars(module).values()
    if isinstance(each, type) and each.__dict__.get("sdk_model", NO_MODEL) != NO_MODEL
} | {"CustomLossGraph": LossGraph, "CustomLossNode": LossNode, "CustomLossInput": LossInput}
NOT_READ: Final = {
    "AccessibleSearchOwner": "UserSearchOwner has all fields of it",
    "ActiveSessionStatusQuery": "ClientFinishedSessionStatusQuery has all fields of it",
    "AdamOptimizerConfig": "OptimizerConfigBase has all fields of it",
    "CancelledSessionStatusQuery": "ClientFinishedSessionStatusQuery has all fields of it",
    "Datum": "since 0.25 batches are protobuf",
    "DimuonOptimizerConfig": "refused by its type",
    "DimuonParams": "refused by its type",
    "DmelChunk": "refused by its type",
    "FailedSessionStatusQuery": "ClientFinishedSessionStatusQuery has all fields of it",
    "ForwardBackwardInput": "since 0.25 batches are protobuf",
    "GenericEvent": "telemetry is counted, not read",
    "ImageAssetPointerChunk": "refused by its type",
    "ImageChunk": "refused by its type",
    "OptimParamsBase": "refused by its type, if that is not muon",
    "OwnSearchOwner": "UserSearchOwner has all fields of it",
    "SessionEndEvent": "telemetry is counted, not read",
    "SessionStartEvent": "telemetry is counted, not read",
    "TelemetrySendRequest": "telemetry is counted, not read",
    "UnhandledExceptionEvent": "telemetry is counted, not read",
}
"""Models of the SDK without a body of their own."""
NO_FIELD: Final = {
    "LoadWeightsRequest.weights_access_token": "refused unless null: it is read by copy_weights only",
    "OptimStepRequest.optim_params": "written as adam_params or optimizer_params",
}
"""Fields of the SDK that no body has."""
OURS: Final = {
    "SampleRequest.max_staleness": "of in-flight samplers: how many saves may end while the sample runs",
    "AdamParams.type": "so that it can stand where the parameters of muon do",
    "CreateModelRequest.schedule": "of strata.sdk",
    "FutureRetrieveRequest.wait_s": "of strata.sdk",
    "LoraConfig.alpha": "of strata.sdk",
    "OptimStepRequest.adam_params": "how optim_params is written",
    "OptimStepRequest.optimizer_params": "how optim_params is written",
    "OptimizerConfigBase.version": "of DimuonOptimizerConfig, which is refused by its type",
    "SaveWeightsForSamplerRequest.overwrite": "of strata.sdk",
}
"""Fields of our bodies that the SDK does not send."""
OTHER_MESSAGES: Final = {
    "ImageDimensions": "images are refused",
    "PromptProvenanceSpan": "read as a TokenSpan",
    "SampledProvenanceSpan": "read as a TokenSpan",
    "SamplingParams": "samples are requested in JSON",
    "StopStrings": "samples are requested in JSON",
    "StopTokens": "samples are requested in JSON",
}
"""Messages of protobuf that ours have not, and why."""
READ_FOR: Final = {"TokenSpan": "PromptProvenanceSpan"}
"""Messages of ours that the SDK names otherwise."""
OTHER_NUMBERS: Final = {"ImageChunk.override_dimensions": "images are refused"}


def differences(table: SdkTable) -> list[str]:
    """Whatever the table has and our bodies have not, or the other way round, unless a list above says why."""
    found = [f"{model}: there is no body for it" for model in table.models.keys() - BODIES.keys() - NOT_READ.keys()]
    found += [f"{model}: the SDK has it no more" for model in (BODIES.keys() | NOT_READ.keys()) - table.models.keys()]
    theirs = {f"{model}.{field}" for model in BODIES for field in table.models.get(model, {}) if field != "type"}
    ours = {f"{model}.{field}" for model, body in BODIES.items() for field in fields_of(body)}
    ours = {each for each in ours if not each.endswith(".type") or each in OURS}
    found += [f"{field}: our body does not know it" for field in theirs - ours - NO_FIELD.keys()]
    found += [
        f"{field}: the SDK sends it no more" for field in (ours - theirs - OURS.keys()) | (NO_FIELD.keys() - theirs)
    ]
    found += [f"{field}: the lists here are wrong" for field in (NO_FIELD.keys() & ours) | (OURS.keys() - ours)]
    for field in theirs & ours:
        model, _, name = field.partition(".")
        found += different_default(field, table.models[model][name], fields_of(BODIES[model])[name])
    return sorted(found)


def fields_of(body: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {each.encode_name: each for each in msgspec.structs.fields(body)}


def different_default(path: str, theirs: SdkField, ours: msgspec.structs.FieldInfo) -> list[str]:
    if theirs.default is msgspec.UNSET or ours.required:
        return []
    default = ours.default_factory() if ours.default_factory is not msgspec.NODEFAULT else ours.default
    if msgspec.json.encode(msgspec.convert(theirs.default, ours.type | None)) == msgspec.json.encode(default):
        return []
    return [f"{path}: the default is {theirs.default!r}, and {default!r} here"]


def different_messages(table: SdkTable) -> list[str]:
    ours: Mapping[str, Descriptor] = tinker_pb2.DESCRIPTOR.message_types_by_name
    found = [
        f"{name}: there is no message for it" for name in table.messages.keys() - ours.keys() - OTHER_MESSAGES.keys()
    ]
    for name, message in ours.items():
        theirs = table.messages.get(READ_FOR.get(name, name))
        if theirs is None:
            found.append(f"{name}: the SDK has it no more")
            continue
        numbers = {field.name: field.number for field in message.fields}
        different = {f"{name}.{field}" for field, _ in theirs.items() ^ numbers.items()}
        found += [f"{field}: it is not the same field" for field in sorted(different - OTHER_NUMBERS.keys())]
    return found


def test_the_committed_table_is_what_the_installed_sdk_says() -> None:
    if version("tinker") != sdk_table().sdk:
        pytest.skip(f"the table is of tinker {sdk_table().sdk}, and {version('tinker')} is installed")
    assert sdk_json.FILE.read_text(encoding="utf-8") == sdk_json.written(sdk_json.table())


def with_field(model: str, field: str, default: Any) -> SdkTable:
    models = {name: dict(fields) for name, fields in sdk_table().models.items()}
    models[model][field] = SdkField(default)
    return SdkTable(sdk_table().sdk, models, sdk_table().messages)


def test_every_field_of_every_request_is_known_with_its_default() -> None:
    assert differences(sdk_table()) == []


def test_every_message_of_protobuf_has_the_same_fields() -> None:
    assert different_messages(sdk_table()) == []


@pytest.mark.parametrize("model", sorted(BODIES))
def test_a_new_field_of_any_model_fails(model: str) -> None:
    (difference,) = differences(with_field(model, "planted", 1))
    assert difference == f"{model}.planted: our body does not know it"


def test_a_new_model_fails() -> None:
    table = sdk_table()
    planted = SdkTable(table.sdk, {**table.models, "PlantedRequest": {}}, table.messages)
    assert differences(planted) == ["PlantedRequest: there is no body for it"]


@pytest.mark.parametrize("model", sorted({*BODIES, *NOT_READ}))
def test_a_model_that_the_sdk_has_no_more_fails(model: str) -> None:
    table = sdk_table()
    models = {name: fields for name, fields in table.models.items() if name != model}
    found = differences(SdkTable(table.sdk, models, table.messages))
    assert f"{model}: the SDK has it no more" in found
    assert all(each.startswith(f"{model}.") or each == f"{model}: the SDK has it no more" for each in found)


def test_a_field_that_the_sdk_sends_no_more_fails() -> None:
    for model, fields in sdk_table().models.items():
        for field in fields.keys() - {"type"} if model in BODIES else ():
            models: dict[str, Any] = {name: dict(each) for name, each in sdk_table().models.items()}
            del models[model][field]
            assert differences(SdkTable("", models, {})) == [f"{model}.{field}: the SDK sends it no more"]


def test_another_default_fails() -> None:
    (difference,) = differences(with_field("SaveWeightsForSamplerRequest", "kind", "inflight"))
    assert difference == "SaveWeightsForSamplerRequest.kind: the default is 'inflight', and 'snapshot' here"


def test_a_new_field_of_a_message_fails() -> None:
    messages = {name: dict(fields) for name, fields in sdk_table().messages.items()}
    messages["ForwardBackwardRequest"]["planted"] = 8
    planted = SdkTable("", sdk_table().models, messages)
    assert different_messages(planted) == ["ForwardBackwardRequest.planted: it is not the same field"]


def test_a_field_that_a_message_has_no_more_fails() -> None:
    ours: Mapping[str, Descriptor] = tinker_pb2.DESCRIPTOR.message_types_by_name
    for name in sdk_table().messages.keys() & ours.keys():
        for field in sdk_table().messages[name].keys() & {each.name for each in ours[name].fields}:
            messages = {each: dict(fields) for each, fields in sdk_table().messages.items()}
            del messages[name][field]
            planted = SdkTable("", sdk_table().models, messages)
            assert different_messages(planted) == [f"{name}.{field}: it is not the same field"]


def test_a_message_that_the_sdk_has_no_more_fails() -> None:
    ours = tinker_pb2.DESCRIPTOR.message_types_by_name
    for gone in sdk_table().messages.keys() & ours.keys():
        messages = {name: fields for name, fields in sdk_table().messages.items() if name != gone}
        planted = SdkTable("", sdk_table().models, messages)
        assert different_messages(planted) == [f"{gone}: the SDK has it no more"]
