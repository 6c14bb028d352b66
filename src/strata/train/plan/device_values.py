"""Settings that depend on the device, with their values on CPUs."""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["float32", "bfloat16"]


class DeviceValues(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed with, where the settings may leave it to the device. The defaults are those of CPUs."""

    nproc: int = 1
    threads: int = 1
    dtype: Dtype = "float32"
    replicated_mb: int = 256
    max_tokens_per_row: int = 4096
    first_pass_timeout_s: float = 1800.0
    """A collective of ranks on CPUs waits for all that the slowest rank computes, reads and writes."""
    collective_timeout_s: float = 1800.0
