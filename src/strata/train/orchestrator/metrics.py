"""The orchestrator's metrics: Prometheus series, and the telemetry that status reports are made of.

Both live as long as the process. Nothing is decided by them, and nothing of them is journaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import Counter, Gauge, Histogram, Summary, generate_latest

from strata.base.clock import Clock
from strata.train.core.commands import DispatchReply
from strata.train.core.facts import Dispatched, Fact, OperationAccepted, SnapshotAbandoned, SnapshotCommitted
from strata.train.core.inputs import Decision, Dispatching
from strata.train.core.ops import ForwardBackward, InlinePayload
from strata.train.core.state import TrainState
from strata.train.core.status import ServerStatus, SnapshotStatus, Timeline
from strata.train.core.timeline import Rate, Timelines
from strata.train.metrics_registry import PREFIX, new_registry

_TIMES_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
KEEP_TIMELINES: Final = 1_000


class OrchestratorMetrics:
    """Names are `strata_train_…`; those of counters end in `_total`."""

    def __init__(self) -> None:
        self._registry = registry = new_registry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}", text, labels, registry=registry, buckets=_TIMES_S)

        def summary(name: str, text: str) -> Summary:
            return Summary(f"{PREFIX}{name}", text, registry=registry)

        self.accepted = counter("operations_accepted_total", "Operations that were accepted", "kind")
        self.ended = counter("operations_ended_total", "Operations that ended, by outcome", "kind", "outcome")
        self.payload_bytes = counter("payload_bytes_total", "Bytes of the batches that were accepted")
        self.wait_s = histogram("wait_seconds", "From the acceptance of an operation until the ranks began it")
        self.phase_s = histogram("phase_seconds", "Time that an operation spent in a phase", "phase")
        self.dispatches = counter("dispatches_total", "Dispatches that were made")
        self.replays = counter("replays_total", "Dispatches replayed to ranks that had not applied them")
        self.efficiency = summary("packing_efficiency", "Of passes: tokens divided by the capacity of their rows")
        self.trained = counter("trained_tokens_total", "Tokens of forward and backward passes")
        self.sampled = counter("sampled_tokens_total", "Tokens that the ranks sampled")
        self.quantum_s = summary("quantum_seconds", "Time that the ranks took for a sampling slice")
        self.journal_s = histogram("journal_seconds", "From a decision until it was durable")
        self.groups = counter("rank_groups_total", "Groups of ranks that were attached, one per start of the ranks")
        self.recovery_s = histogram(
            "recovery_seconds", "From the loss of a group of ranks until another had finished its replay"
        )
        self.snapshots = counter("snapshots_total", "Snapshots of the models, by outcome", "outcome")
        self.held_s = summary("snapshot_held_seconds", "Time that the ranks did nothing but copy, per snapshot")
        self.snapshot_bytes = gauge("snapshot_bytes", "Size of the newest snapshot; 0 before one was taken here")
        self.snapshot_at = gauge("snapshot_timestamp_seconds", "When the newest snapshot was complete; 0 before")
        self.queue = gauge("queue_length", "Operations that were accepted and not dispatched", "tenant")
        self.samples = gauge("samples", "Sample requests, by state", "state")
        self.ranks = gauge("ranks", "Attached ranks; 0 while they start")
        self.models = gauge("models", "Models that occupy a slot of the ranks")
        self.samplers = gauge("samplers", "Samplers that are open")

    def record_decision(self, decision: Decision, ended: list[Timeline]) -> None:
        for fact in decision.facts:
            self._record_fact(fact)
        if isinstance(decision.reply, Dispatching) and decision.reply.dispatch.rows:
            self.efficiency.observe(decision.reply.efficiency)
        for line in ended:
            self.ended.labels(line.kind, line.outcome).inc()
            if line.begun_at_s is not None:
                self.wait_s.observe(max(line.begun_at_s - line.accepted_at_s, 0.0))
            for phase, seconds in line.phases().items():
                self.phase_s.labels(phase).observe(seconds)

    def _record_fact(self, fact: Fact) -> None:
        match fact:
            case OperationAccepted(operation=operation):
                kind = str(operation.__struct_config__.tag)
                if isinstance(operation, ForwardBackward):
                    kind = "forward" if operation.forward_only else kind
                    payload = operation.payload
                    self.payload_bytes.inc(len(payload.data) if isinstance(payload, InlinePayload) else payload.size)
                self.accepted.labels(kind).inc()
            case Dispatched():
                self.dispatches.inc()
            case SnapshotCommitted():
                self.snapshots.labels("committed").inc()
                self.held_s.observe(fact.held_s)
                self.snapshot_bytes.set(fact.size)
                self.snapshot_at.set(fact.at_s)
            case SnapshotAbandoned():
                self.snapshots.labels("abandoned").inc()
            case _:
                pass

    def record_reply(self, reply: DispatchReply, kind: str) -> None:
        if reply.sampled is not None:
            self.quantum_s.observe(reply.timing.total_s)
            self.sampled.inc(reply.sampled.sampled_tokens)
        elif kind == "forward_backward":
            self.trained.inc(reply.timing.tokens)

    def render(self, status: ServerStatus) -> bytes:
        """The exposition text, with gauges set from the status of this moment."""
        self.queue.clear()
        for row in status.tenants:
            self.queue.labels(row.tenant.removeprefix("key:")).set(row.waiting)
        self.samples.labels("waiting").set(status.samples_waiting)
        self.samples.labels("running").set(status.samples_running)
        self.ranks.set(status.ranks.size)
        self.models.set(status.models)
        self.samplers.set(status.samplers)
        return generate_latest(self._registry)


class ServerTelemetry:
    """What a leading orchestrator records while it works: timelines, rates, recoveries and the Prometheus series."""

    def __init__(self, clock: Clock, keep: int = KEEP_TIMELINES) -> None:
        self._clock = clock
        self.leading_since_s = clock.wall_s()
        self.timelines = Timelines(keep)
        self.metrics = OrchestratorMetrics()
        self.trained, self.sampled = Rate(), Rate()
        self._snapshot: SnapshotCommitted | None = None
        self._sent_at_s: dict[int, float] = {}
        """By dispatch in flight."""
        self._replied_at_s = 0.0
        self._group = ""
        self.attached_at_s: float | None = None
        self._lost_at_s: float | None = None
        self.recoveries = 0
        self.recovery_s: float | None = None

    def record_decision(self, decision: Decision, state: TrainState) -> None:
        ended = self.timelines.record_decision(decision, state, self._clock.wall_s())
        self.metrics.record_decision(decision, ended)
        for fact in decision.facts:
            if isinstance(fact, SnapshotCommitted):
                self._snapshot = fact

    def record_durable(self, decided_at_s: float) -> None:
        """`decided_at_s` is of the monotonic clock."""
        self.metrics.journal_s.observe(self._clock.monotonic_s() - decided_at_s)

    def record_sent(self, state: TrainState, number: int, future_ids: Sequence[str]) -> None:
        now_s = self._clock.wall_s()
        self._sent_at_s[number] = now_s
        self.timelines.record_sent(state, number, future_ids, now_s)

    def record_replay(self) -> None:
        """One dispatch was replayed."""
        self.metrics.replays.inc()

    def record_reply(self, reply: DispatchReply) -> None:
        now_s = self._clock.wall_s()
        self._sent_at_s.pop(reply.number, None)
        self._replied_at_s = now_s
        ended = None if reply.sampled is None else [sample.request_id for sample in reply.sampled.ended]
        timelines = self.timelines.record_reply(reply.number, reply.timing, now_s, ended)
        kind = timelines[0].kind if timelines else ""
        self.metrics.record_reply(reply, kind)
        if reply.sampled is not None:
            self.sampled.note(reply.sampled.sampled_tokens, now_s)
        elif kind == "forward_backward":
            self.trained.note(reply.timing.tokens, now_s)

    def record_attached(self, group: str) -> None:
        self.metrics.groups.inc(group != self._group)
        self._group, self.attached_at_s = group, self._clock.wall_s()

    def record_lost(self) -> None:
        """If groups are lost in a row, the recovery began with the first."""
        self.attached_at_s = None
        self._sent_at_s.clear()
        if self._lost_at_s is None:
            self._lost_at_s = self._clock.monotonic_s()

    def record_replayed(self) -> None:
        """The attached group has finished its replay."""
        if self._lost_at_s is not None:
            self.recovery_s, self._lost_at_s = self._clock.monotonic_s() - self._lost_at_s, None
            self.recoveries += 1
            self.metrics.recovery_s.observe(self.recovery_s)

    def begun_at_s(self, number: int) -> float | None:
        """When the ranks can have begun this dispatch: it was sent, and the one before had its reply."""
        sent_at_s = self._sent_at_s.get(number)
        return None if sent_at_s is None else max(sent_at_s, self._replied_at_s)

    def newest_snapshot(self, state: TrainState) -> SnapshotStatus | None:
        if not state.snapshots:
            return None
        number, behind, committed = state.snapshots[-1].number, state.snapshot_backlog.dispatches, self._snapshot
        if committed is None or committed.number != number:
            return SnapshotStatus(number=number, behind=behind)
        return SnapshotStatus(
            number=number, behind=behind, at_s=committed.at_s, size=committed.size, held_s=committed.held_s
        )
