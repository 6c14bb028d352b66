"""Samples of hosts and cards (CPU, memory, power, temperature): their names, and how long each resolution is kept (as
taken for an hour, by the minute for a day, by the hour for 90 days).

The energy of a card is its mean power times the span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class CardSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: the device does not tell."""

    card: Annotated[str, msgspec.Meta(max_length=256)]
    """Its UUID, or its number where there is none."""
    use: Amount | None = None
    """The share of the time in which it computed, 0 to 1."""
    vram_used_gib: Amount | None = None
    temperature_c: Amount | None = None
    power_w: Amount | None = None


class HostSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    cpu_use: Amount | None = None
    """The share of the time in which its processors computed, 0 to 1: since the last sample, and of all of them."""
    ram_used_gib: Amount | None = None
    disk_free_gib: Amount | None = None
    """Free space below the agent's work folder."""
    environments_gib: Amount | None = None
    """Size of the cached environments; the next one is of the data of jobs."""
    data_gib: Amount | None = None
    cards: Annotated[tuple[CardSample, ...], msgspec.Meta(max_length=256)] = ()

    def values(self) -> dict[str, float]:
        """Each value under its name; those of a card as `CARD/name`."""
        named = [(name, getattr(self, name)) for name in _HOST_VALUES]
        for card in self.cards:
            named += [(f"{card.card}/{name}", getattr(card, name)) for name in _CARD_VALUES]
        return {name: value for name, value in named if value is not None}


_HOST_VALUES: Final = ("cpu_use", "ram_used_gib", "disk_free_gib", "environments_gib", "data_gib")
_CARD_VALUES: Final = ("use", "vram_used_gib", "temperature_c", "power_w")


class SamplePoint(NamedTuple):
    """The values of a host at one moment, or their means over a step that begins then."""

    host_id: str
    at_s: float
    values: Mapping[str, float]


FLEET: Final = "fleet"
"""Stands in the place of a host: figures of the whole fleet."""


class Resolution(NamedTuple):
    step_s: int
    """The step of the means; 0: as they were sampled."""
    keep_s: int
    source_s: int
    """The step of the points that the means are of."""


RESOLUTIONS: Final = (
    Resolution(0, 3600, 0),
    Resolution(60, 86_400, 0),
    Resolution(3600, 90 * 86_400, 60),
)
"""A host never has more points than these keep: 240 + 1,440 + 2,160 with a sample each 15 seconds."""
LATE_S: Final = 30.0
"""How long after its end a step is averaged: samples arrive with heartbeats."""


def finest(span_s: float, points: int) -> int:
    """The smallest step that shows this span in so many points, and is kept so long."""
    fits = (each.step_s for each in RESOLUTIONS if each.keep_s >= span_s and span_s / (each.step_s or 15) <= points)
    return next(fits, RESOLUTIONS[-1].step_s)


def average(points: Iterable[SamplePoint], step_s: int) -> list[SamplePoint]:
    """The means of each host over each step, in the order of hosts and time."""
    steps: dict[tuple[str, float], dict[str, list[float]]] = {}
    for point in points:
        named = steps.setdefault((point.host_id, point.at_s // step_s * step_s), {})
        for name, value in point.values.items():
            named.setdefault(name, []).append(value)
    return [
        SamplePoint(host_id, at_s, {name: sum(values) / len(values) for name, values in named.items()})
        for (host_id, at_s), named in sorted(steps.items())
    ]
