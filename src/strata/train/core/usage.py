"""Counts what tenants used by the hour (training, prefill, sampling, checkpoints), kept for 15 days and at most 100,000
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from strata.train.core import ops
from strata.train.core.sampling import SampleOperation

HOUR_S: Final = 3600
RETENTION_HOURS: Final = 15 * 24
"""Clients may ask for the last fourteen days."""
MAX_COUNTS: Final = 100_000
"""The number beyond which the oldest hour is kept by tenant and not by session."""
UsageKind = Literal["training", "sampling_prefill", "sampling_sample", "checkpoint"]


class UsageKey(NamedTuple):
    hour: int
    """Hours since 1970, UTC."""
    tenant: str
    session_id: str
    """Empty if only the tenant is still known."""
    kind: UsageKind


class UsageCount(msgspec.Struct, frozen=True, array_like=True):
    hour: int
    tenant: str
    session_id: str
    kind: UsageKind
    count: int
    """Tokens; of the kind "checkpoint" how many were saved."""


class HourlyUsage:
    def __init__(self, saved: Sequence[UsageCount] = ()) -> None:
        self._counts = {UsageKey(each.hour, each.tenant, each.session_id, each.kind): each.count for each in saved}

    def __iter__(self) -> Iterator[UsageCount]:
        return (UsageCount(*key, count) for key, count in self._counts.items())

    def record(self, tenant: str, operation: ops.Operation | None, result: ops.Result, at_s: float) -> None:
        """Count an operation that ended with a result; a failure costs nothing."""
        hour = int(at_s) // HOUR_S
        match operation, result:
            case ops.ForwardBackward(), ops.PassDone():
                self._add(UsageKey(hour, tenant, _session_of(operation.model_id), "training"), sum(operation.lengths))
            case SampleOperation(), ops.SampleDone():
                session_id = _session_of(operation.sampler_id)
                self._add(UsageKey(hour, tenant, session_id, "sampling_prefill"), operation.length)
                self._add(UsageKey(hour, tenant, session_id, "sampling_sample"), result.tokens)
            case ops.SaveWeights() | ops.SyncWeights(), ops.WeightsSaved() | ops.WeightsSynced() if operation.seq_id:
                self._add(UsageKey(hour, tenant, _session_of(operation.model_id), "checkpoint"), 1)
            case _:
                pass

    def of(self, tenant: str, from_s: float, until_s: float) -> list[UsageCount]:
        """Returns counts of the hours that begin in this window, the oldest first, then the largest."""
        window = range(int(from_s) // HOUR_S, int(until_s) // HOUR_S)
        found = [each for each in self if each.tenant == tenant and each.hour in window]
        return sorted(found, key=lambda each: (each.hour, -each.count, each.session_id, each.kind))

    def _add(self, key: UsageKey, amount: int) -> None:
        if key not in self._counts:
            self._make_room(key.hour)
        self._counts[key] = self._counts.get(key, 0) + amount

    def _make_room(self, hour: int) -> None:
        if any(key.hour <= hour - RETENTION_HOURS for key in self._counts):
            self._counts = {key: count for key, count in self._counts.items() if key.hour > hour - RETENTION_HOURS}
        oldest = min((key.hour for key in self._counts if key.session_id), default=hour)
        if len(self._counts) >= MAX_COUNTS and oldest < hour:
            folded: dict[UsageKey, int] = {}
            for key, count in self._counts.items():
                kept = key._replace(session_id="") if key.hour == oldest else key
                folded[kept] = folded.get(kept, 0) + count
            self._counts = folded


def _session_of(name: str) -> str:
    """Names of models and samplers begin with that of their session."""
    return name.partition(":")[0]
