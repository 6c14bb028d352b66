"""What a host does at one moment: its processors, its memory and its cards."""

from __future__ import annotations

from typing import Annotated

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
