"""Status reports as types, and their limits: 20 tenants, 20 recent operations, 200 models; also the phases of an
operation's timeline.

A caller that may see everything gets a row for every tenant; others get their own, and all other tenants in the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from strata.train.core.commands import Timing
from strata.train.core.replay_differences import ReplayDifferences

PHASES: Final = ("held", "queue", "pack", "behind", "forward", "backward", "optimizer", "publish", "sample", "other")
"""Held behind a gap; queued; packed, journaled and sent; behind another dispatch; and the phases at the ranks."""
MAX_TENANT_ROWS: Final = 20
"""Rows with a name; all other tenants are folded into one."""
OTHER_TENANTS: Final = "other"
RECENT: Final = 20
MAX_ACTIVE_MODELS: Final = 200
"""Models in a report of the activity: those used last."""


class Timeline(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A time is None until it is reached. For a sample the last ones are of its first and its last slice."""

    future_id: str
    tenant: str
    model_id: str
    kind: str
    tokens: int
    number: int = 0
    """The number of its dispatch."""
    outcome: Literal["", "finished", "failed", "cancelled"] = ""
    accepted_at_s: float
    ready_at_s: float | None = None
    dispatched_at_s: float | None = None
    sent_at_s: float | None = None
    begun_at_s: float | None = None
    answered_at_s: float | None = None
    ended_at_s: float | None = None
    spent: Timing = Timing(0.0)
    """Time inside the ranks, by all operations of the same dispatch together."""

    def phases(self) -> dict[str, float]:
        """Seconds of each phase that there was."""
        spent = self.spent
        known = spent.forward_s + spent.backward_s + spent.optimizer_s + spent.publish_s
        # Synced weights are saved first and end when the push to all endpoints is complete.
        pushed_s = _between(self.answered_at_s, self.ended_at_s) if self.kind == "sync_weights" else 0.0
        # From its first slice to its last; training may have run in between.
        sampled_s = _between(self.begun_at_s, self.answered_at_s) if self.kind == "sample" else 0.0
        found = dict(
            zip(
                PHASES,
                (
                    _between(self.accepted_at_s, self.ready_at_s),
                    _between(self.ready_at_s, self.dispatched_at_s),
                    _between(self.dispatched_at_s, self.sent_at_s),
                    _between(self.sent_at_s, self.begun_at_s),
                    spent.forward_s,
                    spent.backward_s,
                    spent.optimizer_s,
                    spent.publish_s + pushed_s,
                    sampled_s,
                    max(spent.total_s - known, 0.0),
                ),
                strict=True,
            )
        )
        return {name: seconds for name, seconds in found.items() if seconds > 0}


def _between(first_s: float | None, then_s: float | None) -> float:
    return 0.0 if first_s is None or then_s is None else max(then_s - first_s, 0.0)


class TimelineView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="timeline"):
    timeline: Timeline


class TimelinesView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="timelines"):
    timelines: Sequence[Timeline]


class MetricsView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="metrics"):
    text: bytes
    """The text in the form of Prometheus."""


class RanksStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    """`starting`, `catching up`, `ready`, `busy`, `asleep`, `unhealthy`."""
    reason: str
    size: int = 0
    answered: Sequence[int] = ()
    """Ranks that passed a health check just now; busy ranks are not asked."""
    group: str = ""
    attached_at_s: float | None = None


class RunningStatus(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    kind: str
    tenants: Sequence[str]
    tokens: int
    since_s: float | None
    """When it began, or could have; None if it waits behind another."""


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    waiting: int = 0
    """Operations, held ones too."""
    held: int = 0
    tokens: int = 0
    running: int = 0
    samples: int = 0
    """Requests for samples that wait or run."""
    models: int = 0
    eta_s: float | None = None
    """Time until all that wait have begun, if nothing else came; None if it cannot be estimated."""


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    behind: int
    """Dispatches since then that modified a model."""
    at_s: float | None = None
    """None if it is older than this orchestrator."""
    size: int | None = None
    held_s: float | None = None


class RecoveryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A group of ranks was lost, and another one took its place."""

    lost_at_s: float
    seconds: float
    """Time from the loss to the end of the replay."""
    reason: str
    restored: int | None
    """The dispatch whose snapshot was restored; None if there was none."""
    replayed: int
    """Dispatches after that."""
    differences: ReplayDifferences = ReplayDifferences()
    """The largest differences of all models between their first numbers and those of the replay."""


class StoppedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose operations are refused since its replay differed."""

    model_id: str
    tenant: str
    since_s: float
    dispatch: int
    """The first dispatch that differs."""
    differences: ReplayDifferences
    reason: str


class GapStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far the sampler's log probabilities are from the trainer's in a pass, over tokens that the same weights drew.

    In nats. Tokens of earlier weights are not in it.
    """

    mean: float
    max: float
    tokens: int
    seq_id: int
    """The number of the pass."""
    at_s: float
    high: bool
    """Whether the mean is above the alarm of the server."""


class HighGapStatus(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    tenant: str
    gap: GapStatus


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An inference engine that the launcher supervises."""

    name: str
    state: str
    """`waiting` for devices that it shares, `starting`, `ready`, `restarting`, `unknown`."""
    reason: str
    starts: int = 0
    """Starts since the server started."""
    since_s: float | None = None


class DeviceTurnStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Who has the devices that ranks and engines share in turns."""

    side: str
    """`ranks` or `engines`."""
    since_s: float | None
    """None: since the first start."""
    leaving: bool
    """The other side waits until this one sleeps."""

    @property
    def next_side(self) -> str:
        """The side that waits for the other one to sleep; empty if none does."""
        return ("ranks" if self.side == "engines" else "engines") if self.leaving else ""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float
    leading_since_s: float
    generation: int
    base_model: str
    arch: str
    training: str
    parameters: int
    one_document_per_row: bool = False
    """Documents are not packed: they would change each other."""
    ranks: RanksStatus
    models: int
    slots: int
    samplers: int
    sampler_places: int
    waiting: int
    max_waiting: int
    samples_waiting: int
    samples_running: int
    running: Sequence[RunningStatus]
    dispatched: int
    trained_tokens_per_s: float
    """Tokens over the last minute, as the one below."""
    sampled_tokens_per_s: float
    snapshot: SnapshotStatus | None
    recoveries: int
    """Recoveries since this orchestrator leads: groups of ranks that replaced others."""
    recovery_s: float | None
    """How long the last one took, from the loss to the end of the replay."""
    tenants: Sequence[TenantStatus]
    recent: Sequence[Timeline]
    """The last that ended, newest first."""
    recovered: Sequence[RecoveryStatus] = ()
    """The last recoveries, newest first."""
    gap_alarm_nats: float = 0.0
    """The mean gap between sampler and trainer above which a model is in `high_gaps`; 0: no alarm."""
    high_gaps: Sequence[HighGapStatus] = ()
    engines: Sequence[EngineStatus] = ()
    unroutable: Mapping[str, int] = {}
    """Samples that the ranks began since this orchestrator leads, because no engine draws them: by reason."""
    stopped: Sequence[StoppedStatus] = ()
    stopped_models: int = 0
    """Those of all tenants."""
    device_turn: DeviceTurnStatus | None = None
    """None unless ranks and engines take turns on devices."""


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """`tinker://run/kind/name`."""
    saved_at_s: float
    expires_at_s: float | None = None


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    tenant: str
    rank: int | None
    """The rank of its LoRA adapter; None for a full fine-tune."""
    created_at_s: float
    used_at_s: float
    unloaded: bool
    done: int
    """The number of its last operation that has a result."""
    waiting: int
    """Operations without a result."""
    stepped_at_s: float | None
    """Its last optimizer step since this orchestrator leads."""
    values: Mapping[str, float]
    """The metrics of that step."""
    checkpoint: CheckpointStatus | None
    """The newest one."""
    gap: GapStatus | None = None
    """The gap in the last pass that had tokens of the same weights; None if there was none."""
    evaluation: Mapping[str, float] = {}
    """The newest metrics of its client that begin with `eval_`."""


class PublishedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a model that an endpoint samples with."""

    model_id: str
    version: str
    behind: int
    """Operations of the model that have ended since they were saved."""
    sampler_gap: float | None
    """The mean distance of the sampler's log probabilities from the trainer's, in the last step that had samples."""


class EndpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    engine: str
    added_at_s: float
    pushing: bool
    """Weights are on their way to it."""
    published: Sequence[PublishedStatus]


class ThroughputPoint(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    values: Mapping[str, float]
    """Tokens per second that were `trained` and `sampled`."""


class ThroughputReport(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of the last hour, and of all tenants."""

    points: Sequence[ThroughputPoint]


class ServerActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What happened at the server: of all tenants for an operator, else of the caller alone."""

    now_s: float
    operations: Sequence[Timeline]
    """Newest first; those under way too."""
    models: Sequence[ModelStatus]
    """The one used last first."""
    endpoints: Sequence[EndpointStatus]


class CurveSeries(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    steps: Sequence[int]
    """The numbers of the operations that were these steps."""
    at_s: Sequence[float]
    values: Sequence[float]


class ModelCurves(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a model over its optimizer steps, since this orchestrator leads."""

    model_id: str
    steps_per_point: int
    series: Sequence[CurveSeries]


class ActivityView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="activity"):
    activity: ServerActivity


class ThroughputView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="throughput"):
    throughput: ThroughputReport


class CurvesView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="curves"):
    curves: ModelCurves


class StatusView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="status"):
    status: ServerStatus


Views = StatusView | TimelineView | TimelinesView | MetricsView | ActivityView | ThroughputView | CurvesView
