"""Parses what a trainer reports as JSON lines (metrics, progress, checkpoints): at most 64 KiB in a line and 256
metrics.

The lines come from a program of the user, so nothing about them is trusted: a line that is none of ours is counted and
left alone, never an error of the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec

MAX_LINE_BYTES: Final = 65_536
MAX_METRICS: Final = 256

Value = float | Literal["nan", "inf", "-inf"]
"""JSON has no NaN, and a loss that became NaN is just what somebody wants to see."""


class MetricsReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="metrics"):
    at_s: float
    """Wall seconds of the host."""
    step: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)] | None = None
    values: Annotated[dict[Annotated[str, msgspec.Meta(max_length=128)], Value], msgspec.Meta(max_length=MAX_METRICS)]


class ProgressReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="progress"):
    at_s: float
    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)]
    note: Annotated[str, msgspec.Meta(max_length=256)] = ""


class CheckpointReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="checkpoint"):
    at_s: float
    took_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)]
    """How long the trainer wrote it."""


TrainerReport = MetricsReport | ProgressReport | CheckpointReport
_DECODER: Final = msgspec.json.Decoder(TrainerReport)


def parse_lines(lines: Iterable[bytes]) -> tuple[list[TrainerReport], int]:
    """The reports in `lines`, and how many lines were none."""
    reports: list[TrainerReport] = []
    refused = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            if len(line) > MAX_LINE_BYTES:
                raise msgspec.ValidationError("too long")
            reports.append(_DECODER.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            refused += 1
    return reports, refused
