"""The settings of a job and their defaults: heartbeat interval, missed beats, settle time, least and most workers,
barrier timeout, kept checkpoints, shard failures, placement, limits of stragglers and hangs.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EscalationLevel(StrEnum):
    """The reaction to a worker that is slow or hangs, from mild to severe."""

    NONE = "none"
    REWEIGHT = "reweight"
    REBALANCE = "rebalance"
    STOP = "stop"


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set when the job is created, or by an operator later; the same for all its workers."""

    heartbeat_interval_s: float = 5.0
    """Time between two heartbeats of a worker."""
    missed_beats: int = 6
    """A worker is lost after so many intervals of silence."""
    reconnect_grace_s: float = 0.5
    """How long a worker's broken presence stream may take to come back before the worker is lost."""
    settle_s: float = 0.2
    """Members that come or go within this time share one new generation."""
    min_workers: int = 1
    """No generation forms with fewer."""
    max_workers: int = 0
    """No more workers may join; 0: no limit of this job."""
    barrier_timeout_s: float = 600.0
    """How long a barrier waits for the last worker before it fails."""
    keep_checkpoints: int = 3
    """Committed checkpoints that are kept."""
    max_shard_failures: int = 3
    """A shard that failed so often is quarantined."""
    max_shards: int = 1_000_000
    """The most shards of one dataset. The order of an epoch is computed in one piece, about 0.25 s for each million
    shards."""
    placement: str = "rendezvous"
    """`rendezvous` or `ring`."""
    slow_until: EscalationLevel = EscalationLevel.REWEIGHT
    """How far a worker that stays slower than the others may climb: `none`, `reweight`, `rebalance` or `stop`."""
    hang_floor_s: float = 60.0
    """No worker counts as hung before its step has stood still for so long, however short the job's steps are."""
    parameters: dict[str, str] = {}
    """System-wide training parameters, handed to every worker as they are."""
