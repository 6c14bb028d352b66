"""Decides when a certificate is due for renewal: a third of its life left at hubs, half at hosts."""

from __future__ import annotations

from typing import Final

HUB_PART: Final = 1 / 3
"""The part of its validity after which the hub issues itself a new certificate."""
HOST_PART: Final = 1 / 2
"""The part of its validity after which a host requests a new certificate."""
_CLOCK_ERROR_S: Final = 60.0


def needs_renewal(issued_at_s: float, valid_for_s: float, now_s: float, *, part: float) -> bool:
    """Says whether this part of the validity is over, or the certificate comes from the future: then the clock was
    wrong."""
    age_s = now_s - issued_at_s
    return age_s >= valid_for_s * part or age_s < -_CLOCK_ERROR_S
