"""From the contract's messages to the values of `coord.view`, field by field under the same names."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from google.protobuf.message import Message

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.view import JobSummaryView, JobView

Descriptor: TypeAlias = Any
"""Of a field or an enum: protobuf has two implementations without a common type."""


def job_view(message: pb.JobState) -> JobView:
    return msgspec.convert(plain(message), JobView)


def summary_view(message: pb.JobSummary) -> JobSummaryView:
    return msgspec.convert(plain(message), JobSummaryView)


def plain(message: Message) -> dict[str, Any]:
    """Every field, also those that are 0 or empty; one that may be absent and is, is None."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Descriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_single(each, field) for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(value, field)


def _single(value: Any, field: Descriptor) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return _name(field.enum_type, value)
    return value


def _name(enum: Descriptor, number: int) -> str | None:
    """`TRAINING` for WORKER_STATUS_TRAINING; None for what was not said. A later coordinator may know more values."""
    if number == 0:
        return None
    known = enum.values_by_number.get(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(known.name).removeprefix(prefix) if known is not None else f"UNKNOWN_{number}"
