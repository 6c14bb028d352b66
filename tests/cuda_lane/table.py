"""The committed table of the lane, and what of it may not grow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from tests.support.counted_passes import Figures, grown

TABLE: Final = Path(__file__).with_name("counts.json")


class CaseCounts(msgspec.Struct, frozen=True):
    """What was counted of a family, in one way of training."""

    figures: Figures
    kernels: Mapping[str, int]
    """Of a row of four documents, each of another adapter if there are some, and a step: how often each branch was
    taken, by operation."""
    reads: Mapping[str, int]
    """Of the same: where the host waits for the device."""
    to_device: Mapping[str, int]
    """Where it copies to the device."""


def read_table() -> dict[str, CaseCounts]:
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, CaseCounts])


def write_table(table: Mapping[str, CaseCounts]) -> None:
    TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(table, order="sorted"), indent=1) + b"\n")


def worse(recorded: CaseCounts, counted: CaseCounts) -> list[str]:
    """Says what grew, where the host reads or copies more, and which kernels are others."""
    problems = grown(recorded.figures, counted.figures)
    for kind, before, now in (
        ("reads", recorded.reads, counted.reads),
        ("copies to the device", recorded.to_device, counted.to_device),
    ):
        problems += [
            f"{kind} in {place}: {number}, and {before.get(place, 0)} are recorded"
            for place, number in now.items()
            if number > before.get(place, 0)
        ]
    if recorded.kernels != counted.kernels:
        problems.append(f"kernels: {dict(counted.kernels)} where {dict(recorded.kernels)} are recorded")
    return problems
